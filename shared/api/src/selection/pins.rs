//! Pins: annotations of a Kyma that fix the version of a module.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::names::annotation;

/// Maximal length of a pinned version, in characters: that of a template's version in its CRD.
pub const MAX_VERSION: usize = 32;

/// Maximal number of pins that are read of one Kyma: as many as modules.
const MAX_PINS: usize = 500;

/// Maximal length of the name of an annotation behind its prefix, in bytes. The response of a runtime cluster's API server
/// may violate it.
const MAX_NAME: usize = 63;

/// Annotations of an object.
type Annotations = BTreeMap<String, String>;

/// Versions that the annotations of one Kyma pin, by module. They are not validated. One that is longer than
/// [`MAX_VERSION`] is cut after one more character, so that it is still too long.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Pins(BTreeMap<String, String>);

impl Pins {
    /// Pins of these modules at these versions.
    pub fn new(pins: impl IntoIterator<Item = (String, String)>) -> Self {
        Self(pins.into_iter().collect())
    }

    /// Reads the pins in the annotations of a Kyma. If there are too many, those of modules that `is_listed` selects are
    /// read first.
    pub fn of(annotations: &Annotations, is_listed: impl Fn(&str) -> bool) -> Self {
        let all = annotations.iter().filter_map(|(key, version)| Some((module_of(key)?, version)));
        let (listed, others): (Vec<_>, Vec<_>) =
            all.filter(|(module, _)| module.len() <= MAX_NAME).partition(|(module, _)| is_listed(module));
        let pin = |(module, version): (&str, &String)| (module.to_owned(), cut(version).to_owned());
        Self(listed.into_iter().chain(others).take(MAX_PINS).map(pin).collect())
    }

    /// Pinned version of a module.
    pub fn of_module(&self, module: &str) -> Option<&str> {
        self.0.get(module).map(String::as_str)
    }

    /// Returns true if there is no pin.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The annotations that pin these versions.
    pub fn annotations(&self) -> impl Iterator<Item = (String, String)> {
        self.0.iter().map(|(module, version)| (annotation_of(module), version.clone()))
    }
}

/// Version that annotations pin of one module, in the form that [`Pins`] has.
pub fn pinned<'a>(annotations: &'a Annotations, module: &str) -> Option<&'a str> {
    annotations.get(&annotation_of(module)).map(|version| cut(version))
}

/// Module whose version an annotation pins.
pub fn module_of(key: &str) -> Option<&str> {
    key.strip_prefix(annotation::PINNED_VERSION)
}

/// Key of the annotation that pins the version of a module.
pub fn annotation_of(module: &str) -> String {
    format!("{}{module}", annotation::PINNED_VERSION)
}

fn cut(version: &str) -> &str {
    version.char_indices().nth(MAX_VERSION + 1).map_or(version, |(end, _)| &version[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations<'a>(pins: impl IntoIterator<Item = (&'a str, &'a str)>) -> Annotations {
        pins.into_iter().map(|(module, version)| (annotation_of(module), version.to_owned())).collect()
    }

    #[test]
    fn pins_are_read_and_written_as_annotations() {
        let mut all = annotations([("keda", "1.0.0"), ("warden", "")]);
        let pins = Pins::of(&all, |_| true);
        assert_eq!((pins.of_module("keda"), pins.of_module("warden")), (Some("1.0.0"), Some("")));
        assert_eq!((pins.of_module("other"), pins.is_empty(), Pins::default().is_empty()), (None, false, true));
        assert_eq!(pins.annotations().collect::<Annotations>(), all);
        assert_eq!(all.keys().next().unwrap(), "version.operator.kyma-project.io/keda");
        all.insert("operator.kyma-project.io/version".to_owned(), "1.0.0".to_owned());
        assert_eq!(Pins::of(&all, |_| true), pins);
        assert_eq!(pinned(&all, "keda"), Some("1.0.0"));
    }

    #[test]
    fn number_and_size_of_pins_are_limited_and_listed_modules_come_first() {
        let names: Vec<_> = (0..=MAX_PINS).map(|n| format!("m{n:03}")).collect();
        let all = annotations(names.iter().map(|name| (name.as_str(), "1.0.0")));
        let last = names.last().unwrap();
        let pins = Pins::of(&all, |module| module == last);
        assert_eq!((pins.0.len(), pins.of_module(last)), (MAX_PINS, Some("1.0.0")));
        assert_eq!(pins.of_module(&names[MAX_PINS - 1]), None);
        let long = "é".repeat(70_000);
        let name = "m".repeat(MAX_NAME + 1);
        let all = annotations([("keda", long.as_str()), (&name, "1.0.0")]);
        let pins = Pins::of(&all, |_| true);
        assert_eq!((pins.0.len(), pins.of_module("keda").unwrap().chars().count()), (1, MAX_VERSION + 1));
        assert_eq!(pinned(&all, "keda"), pins.of_module("keda"));
        // A pin that comes back is read as before.
        assert_eq!(Pins::of(&pins.annotations().collect(), |_| true), pins);
    }
}
