//! Localisation of images: references of a module's containers are replaced by those of the registry that the runtime
//! cluster pulls from. Pure.

use std::collections::BTreeMap;

use serde_json::Value;

/// Localised references of a Manifest, by name and tag of the image.
pub(super) struct Localizer<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Localizer<'a> {
    /// `images` are references with a tag; others name no image of a module. Of several with equal name and tag, the
    /// last one counts.
    pub(super) fn new(images: &'a [String]) -> Self {
        Self(images.iter().filter_map(|image| Some((name_and_tag(image)?, image.as_str()))).collect())
    }

    /// Replaces the image of a container and the values of its variables whose image name and tag are localised.
    pub(super) fn localize(&self, container: &mut Value) {
        if self.0.is_empty() {
            return;
        }
        self.replace(container.get_mut("image"));
        for variable in container.get_mut("env").and_then(Value::as_array_mut).into_iter().flatten() {
            self.replace(variable.get_mut("value"));
        }
    }

    fn replace(&self, reference: Option<&mut Value>) {
        let Some(Value::String(reference)) = reference else { return };
        if let Some(localised) = name_and_tag(reference).and_then(|name| self.0.get(name)) {
            (*localised).clone_into(reference);
        }
    }
}

/// `name:tag` of a reference: without registry and path, and without a digest. `None` without a tag.
fn name_and_tag(reference: &str) -> Option<&str> {
    let tagged = reference.split_once('@').map_or(reference, |(tagged, _)| tagged);
    let last = tagged.rsplit('/').next().unwrap_or(tagged);
    let (name, tag) = last.split_once(':')?;
    let is_plain = |text: &str| !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c == ':');
    (is_plain(name) && is_plain(tag)).then_some(last)
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
