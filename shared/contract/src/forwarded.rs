//! Client certificates that a TLS-terminating proxy forwards in header fields.
//!
//! Both fields are parsed strictly: one certificate in one canonical spelling. Ambiguous values are rejected, because
//! another component on the path may have interpreted them differently. Parsing establishes trust neither in the
//! certificate nor in the proxy.

use base64::{Engine, engine::general_purpose::STANDARD};
use percent_encoding::percent_decode_str;
use rustls_pki_types::{CertificateDer, pem::PemObject};

/// Header field of RFC 9440: a byte sequence of RFC 9651.
pub const CLIENT_CERT: &str = "client-cert";
/// Header field of RFC 9440 with the certificates between the leaf and a root: a list of byte sequences.
pub const CLIENT_CERT_CHAIN: &str = "client-cert-chain";
/// Certificates of that field at most.
pub const MAX_CHAIN: usize = 4;
/// Header field of Envoy and compatible proxies.
pub const FORWARDED_CLIENT_CERT: &str = "x-forwarded-client-cert";
/// Limit of a field's value in bytes. A P-256 leaf takes about 1 KiB.
pub const MAX_BYTES: usize = 8 << 10;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// Parses the value of a `Client-Cert` field: `:<base64 of the DER>:`, padded, without parameters (RFC 9440, section
/// 2.2). `None` if it is malformed or has more than [`MAX_BYTES`].
pub fn parse_client_cert(value: &str) -> Option<CertificateDer<'static>> {
    if value.len() > MAX_BYTES {
        return None;
    }
    let text = value.strip_prefix(':')?.strip_suffix(':').filter(|text| !text.is_empty())?;
    STANDARD.decode(text).ok().map(CertificateDer::from)
}

/// Parses the value of a `Client-Cert-Chain` field: one to [`MAX_CHAIN`] certificates as in `Client-Cert`, separated by commas (RFC
/// 9440, section 2.3). `None` if one is malformed, or if there are too many or too long ones.
pub fn parse_client_cert_chain(value: &str) -> Option<Vec<CertificateDer<'static>>> {
    if value.len() > MAX_CHAIN * MAX_BYTES || value.matches(',').count() >= MAX_CHAIN {
        return None;
    }
    value.split(',').map(|one| parse_client_cert(one.trim_matches([' ', '\t']))).collect()
}

/// Returns the value of a `Client-Cert` field, or of a `Client-Cert-Chain` field with several certificates.
pub fn client_cert(certificates: &[CertificateDer<'_>]) -> String {
    let encoded = certificates.iter().map(|certificate| format!(":{}:", STANDARD.encode(certificate)));
    encoded.collect::<Vec<_>>().join(", ")
}

/// Parses the value of an `X-Forwarded-Client-Cert` field: one element with one `Cert=`, a URL-encoded PEM certificate,
/// quoted or not. Other pairs of the element are ignored. `None` for anything else, and for more than [`MAX_BYTES`].
pub fn parse_xfcc(value: &str) -> Option<CertificateDer<'static>> {
    if value.len() > MAX_BYTES {
        return None;
    }
    let mut certificates = Vec::new();
    for pair in pairs(value)? {
        let (key, value) = pair.split_once('=')?;
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return None;
        }
        if key.eq_ignore_ascii_case("cert") {
            certificates.push(unquoted(value)?);
        }
    }
    match certificates[..] {
        [text] => one_pem(&url_decoded(text)?),
        _ => None,
    }
}

/// Splits the only element at its semicolons. In quotes, a backslash escapes and separators are text. `None` for several
/// elements: more than one proxy added itself, and only one is trusted.
fn pairs(value: &str) -> Option<Vec<&str>> {
    let mut pairs = Vec::new();
    let mut start = 0;
    let mut quoted = false;
    let mut escaped = false;
    for (index, byte) in value.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b',' if !quoted => return None,
            b';' if !quoted => {
                pairs.push(&value[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    if quoted {
        return None;
    }
    pairs.push(&value[start..]);
    Some(pairs)
}

/// Removes quotes that enclose the whole value; quotes and escapes elsewhere are malformed.
fn unquoted(value: &str) -> Option<&str> {
    let inner = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(value);
    (!inner.contains(['"', '\\'])).then_some(inner)
}

/// Decodes percent-encoding. A `+` is rejected: some proxies write it for a space, others leave it as a base64 digit.
fn url_decoded(text: &str) -> Option<String> {
    let is_permitted = |byte: u8| byte == b' ' || byte.is_ascii_graphic() && byte != b'+';
    if !text.bytes().all(is_permitted) {
        return None;
    }
    String::from_utf8(percent_decoded(text)?).ok()
}

/// Decodes percent-encoding; `None` unless two hexadecimal digits follow each percent sign.
pub(crate) fn percent_decoded(text: &str) -> Option<Vec<u8>> {
    let is_escape =
        |rest: &str| rest.as_bytes().get(..2).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit));
    text.split('%').skip(1).all(is_escape).then(|| percent_decode_str(text).collect())
}

/// Parses exactly one PEM certificate, without any text before or after it.
fn one_pem(text: &str) -> Option<CertificateDer<'static>> {
    let text = text.trim();
    let is_one = text.starts_with(BEGIN) && text.ends_with(END) && text.matches("-----BEGIN").count() == 1;
    is_one.then(|| CertificateDer::from_pem_slice(text.as_bytes()).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    fn certificate() -> (CertificateDer<'static>, String) {
        let certificate = CertificateParams::default().self_signed(&KeyPair::generate().unwrap()).unwrap();
        (certificate.der().clone(), certificate.pem())
    }

    fn encoded(pem: &str) -> String {
        pem.bytes()
            .map(|b| if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") })
            .collect()
    }

    #[test]
    fn client_cert_is_one_byte_sequence() {
        let (der, _) = certificate();
        let text = STANDARD.encode(&der);
        assert_eq!(parse_client_cert(&format!(":{text}:")), Some(der));
        for bad in
            [text.clone(), format!(":{text}"), format!(":{text}:;a=1"), format!(":{text}:, :{text}:"), "::".into()]
        {
            assert_eq!(parse_client_cert(&bad), None, "{bad}");
        }
        assert!(parse_client_cert(&format!(":{}:", "A".repeat(MAX_BYTES - 4))).is_some());
        assert_eq!(parse_client_cert(&format!(":{}:", "A".repeat(MAX_BYTES))), None, "too large");
    }

    #[test]
    fn client_cert_chain_is_a_short_list_of_byte_sequences() {
        let certificates: Vec<_> = (0..=MAX_CHAIN).map(|_| certificate().0).collect();
        for length in 1..=MAX_CHAIN {
            let chain = &certificates[..length];
            assert_eq!(parse_client_cert_chain(&client_cert(chain)).as_deref(), Some(chain));
            assert_eq!(parse_client_cert_chain(&client_cert(chain).replace(", ", ",\t ")).as_deref(), Some(chain));
        }
        assert_eq!(parse_client_cert_chain(&client_cert(&certificates)), None, "too many");
        assert_eq!(parse_client_cert(&client_cert(&certificates[..1])).as_ref(), Some(&certificates[0]));
        let one = client_cert(&certificates[..1]);
        for bad in ["", ",", "x", &format!("{one},"), &format!("{one}, ::"), &format!("{one};a=1, {one}")] {
            assert_eq!(parse_client_cert_chain(bad), None, "{bad}");
        }
        let large = format!("{one}, :{}:", "A".repeat(MAX_BYTES));
        assert_eq!(parse_client_cert_chain(&large), None, "too large");
    }

    #[test]
    fn xfcc_is_one_element_with_one_cert() {
        let (der, pem) = certificate();
        let text = encoded(&pem);
        for good in [
            format!("Cert={text}"),
            format!("Cert=\"{text}\""),
            format!("By=spiffe://a;Hash=00;cert=\"{text}\";Subject=\"CN=a\\\",b;c\";URI=spiffe://b"),
            format!("Cert={}", text.replace("%2D", "%2d").replace("%0A", "\n").replace('\n', "%0a")),
        ] {
            assert_eq!(parse_xfcc(&good).as_ref(), Some(&der), "{good}");
        }
    }

    #[test]
    fn ambiguous_fields_are_rejected() {
        let (_, pem) = certificate();
        let text = encoded(&pem);
        for bad in [
            format!("Cert={text},Cert={text}"),
            format!("Hash=1,Cert={text}"),
            format!("Cert={text};Cert={text}"),
            format!("Cert={text};CERT={text}"),
            "Hash=00".into(),
            format!("Cert=\"{text}"),
            format!("Cert={text}\"\""),
            format!("Cert={text};"),
            format!("Cert ={text}"),
            format!("Cert={text}%2"),
            format!("Cert={text}%"),
            format!("Cert=%0g{text}"),
            format!("Cert={text}+"),
            format!("Cert=\t{text}"),
            format!("Cert={text}%FF"),
            format!("Cert={text}{text}"),
            format!("Cert=x{text}"),
            format!("Cert={}", encoded("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----")),
            "Cert=".into(),
            String::new(),
            format!("Cert={text};A={}", "A".repeat(MAX_BYTES)),
        ] {
            assert_eq!(parse_xfcc(&bad), None, "{bad}");
        }
        assert!(parse_xfcc(&format!("Cert=%20{text}%0A")).is_some());
    }
}
