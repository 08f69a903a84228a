//! Localisation of images: references of a module's containers are replaced by those of the registry that the runtime
//! cluster pulls from. Pure.
//!
//! A localised reference with the same digest is the same image. Without one, name and tag decide, as for
//! lifecycle-manager. A reference that has no part in common with a localised one but the name is that image only if the name
//! is unique, and if neither tags nor digests contradict it.

use std::collections::BTreeMap;

use serde_json::Value;

/// Begin of a digest in a reference.
const DIGEST: &str = "sha256:";

/// Localised references of a Manifest. Of several that an image could mean equally, the last one counts.
pub(super) struct Localizer<'a> {
    by_digest: BTreeMap<&'a str, Vec<Reference<'a>>>,
    by_tag: BTreeMap<&'a str, Reference<'a>>,
    by_name: BTreeMap<&'a str, Vec<Reference<'a>>>,
}

/// Reference of an image in its parts, without registry and path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reference<'a> {
    /// The whole reference.
    text: &'a str,
    name: &'a str,
    /// `name:tag`.
    tagged: Option<&'a str>,
    digest: Option<&'a str>,
}

/// Place of a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The image of a container: a reference in any case.
    Image,
    /// Any text, which may be a reference: `redis:6379` is an address as well.
    Variable,
}

impl<'a> Localizer<'a> {
    /// `images` are localised references; texts without tag and digest name no image of a module.
    pub(super) fn new(images: &'a [String]) -> Self {
        let mut localizer = Self { by_digest: BTreeMap::new(), by_tag: BTreeMap::new(), by_name: BTreeMap::new() };
        let references = images.iter().filter_map(|image| Reference::parse(image));
        for reference in references.filter(|reference| reference.tagged.is_some() || reference.digest.is_some()) {
            if let Some(digest) = reference.digest {
                localizer.by_digest.entry(digest).or_default().push(reference);
            }
            if let Some(tagged) = reference.tagged {
                localizer.by_tag.insert(tagged, reference);
            }
            localizer.by_name.entry(reference.name).or_default().push(reference);
        }
        localizer
    }

    /// Replaces the image of a container and the values of its variables that are localised.
    pub(super) fn localize(&self, container: &mut Value) {
        if self.by_name.is_empty() {
            return;
        }
        self.replace(container.get_mut("image"), Place::Image);
        for variable in container.get_mut("env").and_then(Value::as_array_mut).into_iter().flatten() {
            self.replace(variable.get_mut("value"), Place::Variable);
        }
    }

    /// Replaces the image of a volume.
    pub(super) fn localize_volume(&self, volume: &mut Value) {
        self.replace(volume.pointer_mut("/image/reference"), Place::Image);
    }

    fn replace(&self, value: Option<&mut Value>, place: Place) {
        let Some(Value::String(value)) = value else { return };
        if let Some(localised) = Reference::parse(value).and_then(|reference| self.find(&reference, place)) {
            localised.clone_into(value);
        }
    }

    fn find(&self, reference: &Reference<'_>, place: Place) -> Option<&'a str> {
        let of_digest = reference.digest.and_then(|digest| self.by_digest.get(digest)).map(Vec::as_slice);
        let of_digest = of_digest.unwrap_or_default();
        let same_name = of_digest.iter().rev().find(|localised| localised.name == reference.name);
        if let Some(localised) = same_name.or(of_digest.last()) {
            return Some(localised.text);
        }
        if let Some(localised) = reference.tagged.and_then(|tagged| self.by_tag.get(tagged)) {
            return Some(localised.text);
        }
        let is_reference = reference.digest.is_some() || (place == Place::Image && reference.tagged.is_some());
        let named = self.by_name.get(reference.name).filter(|_| is_reference)?;
        let contradicts = |one: Option<&str>, other: Option<&str>| one.is_some() && other.is_some() && one != other;
        let is_possible = |localised: &&Reference<'_>| {
            !contradicts(localised.tagged, reference.tagged) && !contradicts(localised.digest, reference.digest)
        };
        let mut possible = named.iter().filter(is_possible);
        let first = possible.next()?;
        possible.all(|other| other == first).then_some(first.text)
    }
}

impl<'a> Reference<'a> {
    /// The parts of a reference; `None` if it has no plain name, or a malformed tag.
    fn parse(text: &'a str) -> Option<Self> {
        let (tagged, digest) = text.split_once('@').map_or((text, None), |(tagged, digest)| (tagged, Some(digest)));
        let last = tagged.rsplit('/').next().unwrap_or(tagged);
        let (name, tag) = last.split_once(':').map_or((last, None), |(name, tag)| (name, Some(tag)));
        let is_plain = |text: &str| !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c == ':');
        if !is_plain(name) || !tag.is_none_or(is_plain) {
            return None;
        }
        Some(Self { text, name, tagged: tag.map(|_| last), digest: digest.filter(|digest| is_digest(digest)) })
    }
}

fn is_digest(text: &str) -> bool {
    text.strip_prefix(DIGEST).is_some_and(|hex| !hex.is_empty() && hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn images_and_variables_with_the_same_name_and_tag_are_replaced() {
        let images = ["eu.example.com/mirror/keda:1.0", "eu.example.com/other:2@sha256:ab", "eu.example.com/untagged"];
        let images = images.map(str::to_owned);
        let localizer = Localizer::new(&images);
        let mut container = json!({"image": "docker.io/library/keda:1.0@sha256:cd", "env": [
            {"name": "A", "value": "ghcr.io/x/other:2"}, {"name": "B", "value": "keda:1.1"}, {"name": "C", "value": "keda"},
            {"name": "D", "value": "http://keda:1.0:x"}, {"name": "E", "valueFrom": {}}]});
        localizer.localize(&mut container);
        assert_eq!(container["image"], "eu.example.com/mirror/keda:1.0");
        let values: Vec<_> = container["env"].as_array().unwrap().iter().map(|it| it["value"].clone()).collect();
        let expected = ["eu.example.com/other:2@sha256:ab", "keda:1.1", "keda", "http://keda:1.0:x"].map(Value::from);
        assert_eq!(values[..4], expected);
        let mut untouched = json!({"image": "untagged"});
        localizer.localize(&mut untouched);
        assert_eq!(untouched["image"], "untagged");
    }

    /// The image of a container and the value of a variable with this text, after the localisation.
    fn localised(images: &[&str], text: &str) -> [String; 2] {
        let images: Vec<_> = images.iter().map(|image| (*image).to_owned()).collect();
        let mut container = json!({"image": text, "env": [{"name": "A", "value": text}]});
        Localizer::new(&images).localize(&mut container);
        [&container["image"], &container["env"][0]["value"]].map(|it| it.as_str().unwrap().to_owned())
    }

    #[test]
    fn digest_decides_before_name_and_tag() {
        let images = ["m.test/other@sha256:aa", "m.test/keda:1.0@sha256:bb", "m.test/keda@sha256:aa", "m.test/late:2"];
        for (text, expected) in [
            ("ghcr.io/x/keda@sha256:aa", "m.test/keda@sha256:aa"),
            ("ghcr.io/x/keda:1.0@sha256:aa", "m.test/keda@sha256:aa"),
            ("ghcr.io/x/renamed@sha256:aa", "m.test/keda@sha256:aa"),
            ("ghcr.io/x/renamed@sha256:bb", "m.test/keda:1.0@sha256:bb"),
            ("ghcr.io/x/keda:1.0@sha256:cc", "m.test/keda:1.0@sha256:bb"),
            ("ghcr.io/x/keda:1.0", "m.test/keda:1.0@sha256:bb"),
            ("ghcr.io/x/late@sha256:dd", "m.test/late:2"),
        ] {
            assert_eq!(localised(&images, text), [expected, expected], "{text}");
        }
    }

    #[test]
    fn name_alone_decides_only_if_it_is_unique_and_nothing_contradicts() {
        let by_digest = ["m.test/keda@sha256:aa"];
        assert_eq!(
            localised(&by_digest, "x/keda:1.0"),
            ["m.test/keda@sha256:aa", "x/keda:1.0"],
            "it may be an address"
        );
        for untouched in ["x/keda", "keda", "x/keda@sha256:bb", "x/keda@other", "x/keda:1.0 y", "x/other:1.0"] {
            assert_eq!(localised(&by_digest, untouched), [untouched, untouched]);
        }
        let two = ["m.test/keda:1", "m.test/keda:2"];
        assert_eq!(localised(&two, "x/keda@sha256:aa"), ["x/keda@sha256:aa", "x/keda@sha256:aa"], "either is possible");
        assert_eq!(localised(&two, "x/keda:2@sha256:aa"), ["m.test/keda:2", "m.test/keda:2"]);
        assert_eq!(
            localised(&["m.test/keda:1", "m.test/keda:1"], "x/keda@sha256:aa")[0],
            "m.test/keda:1",
            "listed twice"
        );
    }

    #[test]
    fn malformed_containers_stay_as_they_are() {
        let images = ["r/a:1".to_owned()];
        for malformed in
            [json!(null), json!("a:1"), json!({"image": 1, "env": {"value": "a:1"}}), json!({"env": ["a:1"]})]
        {
            let mut container = malformed.clone();
            Localizer::new(&images).localize(&mut container);
            assert_eq!(container, malformed);
        }
    }
}
