//! Reads and writes the two header fields and the signature base.

use sfv::{BareItem, DictSerializer, Dictionary, Item, ListEntry, Parser};

use super::{ALGORITHM, LABEL, Message, TAG};

const COMPONENTS: [&str; 5] = ["@method", "@authority", "@path", "content-type", "content-digest"];

/// The variable parameters; algorithm and tag are fixed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parameters {
    pub(super) created: i64,
    pub(super) expires: i64,
    pub(super) nonce: String,
    pub(super) keyid: String,
}

impl Parameters {
    /// Writes the inner list with its parameters (RFC 9421, section 2.3). No value of the profile needs escaping.
    pub(super) fn inner_list(&self) -> String {
        let Self { created, expires, nonce, keyid } = self;
        let components = COMPONENTS.map(|name| format!("\"{name}\"")).join(" ");
        format!(
            "({components});created={created};expires={expires};nonce=\"{nonce}\";alg=\"{ALGORITHM}\";keyid=\"{keyid}\";tag=\"{TAG}\""
        )
    }
}

/// Writes the signature base (RFC 9421, section 2.5). `inner_list` is the text in the header field.
pub(super) fn signature_base(message: &Message<'_>, content_digest: &str, inner_list: &str) -> String {
    let Message { method, authority, path, content_type } = message;
    let values = [method, authority, path, content_type, content_digest];
    let mut base = String::with_capacity(512);
    for (name, value) in COMPONENTS.iter().zip(values) {
        base.push_str(&format!("\"{name}\": {value}\n"));
    }
    base.push_str(&format!("\"@signature-params\": {inner_list}"));
    base
}

/// Parses `Signature-Input` according to the profile, with parameters in any order; `None` for anything else. Returns
/// the text of the inner list as received.
pub(super) fn read_input(header: &str) -> Option<(Parameters, &str)> {
    let dictionary = canonical(header)?;
    let (key, ListEntry::InnerList(list)) = dictionary.iter().next()? else { return None };
    if key.as_str() != LABEL || dictionary.len() != 1 || list.items.len() != COMPONENTS.len() || list.params.len() != 6
    {
        return None;
    }
    let named = list.items.iter().zip(COMPONENTS).all(|(item, name)| {
        item.params.is_empty() && item.bare_item.as_string().is_some_and(|text| text.as_str() == name)
    });
    let string = |name: &str| Some(list.params.get(name)?.as_string()?.as_str());
    let integer = |name: &str| Some(i64::from(list.params.get(name)?.as_integer()?));
    if !named || string("alg")? != ALGORITHM || string("tag")? != TAG {
        return None;
    }
    let parameters = Parameters {
        created: integer("created")?,
        expires: integer("expires")?,
        nonce: string("nonce")?.to_owned(),
        keyid: string("keyid")?.to_owned(),
    };
    Some((parameters, header.strip_prefix(LABEL)?.strip_prefix('=')?))
}

/// Parses `Signature`: exactly one byte sequence under the label of the profile.
pub(super) fn read_signature(header: &str) -> Option<Vec<u8>> {
    let dictionary = canonical(header)?;
    let (key, ListEntry::Item(Item { bare_item: BareItem::ByteSequence(bytes), params })) = dictionary.iter().next()?
    else {
        return None;
    };
    (key.as_str() == LABEL && dictionary.len() == 1 && params.is_empty()).then(|| bytes.clone())
}

/// Parses a dictionary that is its own canonical serialisation, which excludes duplicate keys and parameters.
fn canonical(header: &str) -> Option<Dictionary> {
    let dictionary: Dictionary = Parser::new(header).parse().ok()?;
    let mut serializer = DictSerializer::new();
    serializer.members(&dictionary);
    (serializer.finish()? == header).then_some(dictionary)
}
