//! Images of a module: references, the workloads that name them, and their resources in a component descriptor.

use std::collections::BTreeSet;

use semver::Version;
use serde_json::Value;
use thiserror::Error;
use tidewatch_oci::{component::is_tag, digest::Digest};

/// Characters of a digest in the version of a resource.
const VERSION_DIGITS: usize = 12;
/// Characters of a digest in the name of a resource.
const NAME_DIGITS: usize = 8;

/// Reference of an image by tag, by digest, or by both.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ImageReference {
    text: String,
    /// Last segment of the repository.
    name: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

/// A text that does not pin an image.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum ImageReferenceError {
    /// The text is no reference.
    #[error("{0:?} is not an image reference")]
    Malformed(String),
    /// The registry would choose the image.
    #[error("the image {0:?} has neither a tag nor a digest")]
    Unpinned(String),
}

impl ImageReference {
    /// Parses a reference with a tag, a digest, or both.
    pub(super) fn parse(text: &str) -> Result<Self, ImageReferenceError> {
        let malformed = || ImageReferenceError::Malformed(text.to_owned());
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest.parse().map_err(|_| malformed())?)),
            None => (text, None),
        };
        let (path, last) = rest.rsplit_once('/').unwrap_or(("", rest));
        let (name, tag) = last.split_once(':').map_or((last, None), |(name, tag)| (name, Some(tag)));
        let is_path = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/:[]".contains(&byte);
        if !path.bytes().all(is_path) || !is_name(name) || !tag.is_none_or(is_tag) {
            return Err(malformed());
        }
        if tag.is_none() && digest.is_none() {
            return Err(ImageReferenceError::Unpinned(text.to_owned()));
        }
        Ok(Self { text: text.to_owned(), name: name.to_owned(), tag: tag.map(str::to_owned), digest })
    }

    /// The reference as written.
    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    /// The digest, if the reference has one.
    pub(super) const fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// Name of the image's resource: the last segment of the repository, then 8 digits of the digest if there is one.
    /// Characters that names of resources must not have become hyphens.
    pub(super) fn resource_name(&self) -> String {
        let mut name = self.name.replace('.', "-");
        if let Some(digest) = &self.digest {
            name.push('-');
            name.extend(digest.hex().chars().take(NAME_DIGITS));
        } else if name.len() < 2 {
            // Names of resources have at least two characters.
            name.push_str("-image");
        }
        name
    }

    /// Version of the image's resource: a tag that is a semantic version, else a pre-release of `0.0.0` made of the
    /// tag, then 12 digits of the digest if there is one.
    pub(super) fn resource_version(&self) -> String {
        let version = self.tag.as_deref().map_or_else(|| "0.0.0".to_owned(), version_of_tag);
        match &self.digest {
            None => version,
            Some(digest) => {
                let digits: String = digest.hex().chars().take(VERSION_DIGITS).collect();
                format!("{version}+sha256.{digits}")
            }
        }
    }
}

/// Returns true for the last segment of a repository (OCI distribution specification, *Pulling manifests*).
fn is_name(text: &str) -> bool {
    let bound = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte);
    bound(text.as_bytes().first()) && bound(text.as_bytes().last()) && text.bytes().all(inside)
}

fn version_of_tag(tag: &str) -> String {
    if Version::parse(tag.strip_prefix('v').unwrap_or(tag)).is_ok() {
        return tag.to_owned();
    }
    let tag = tag.replace('_', "-");
    let version = format!("0.0.0-{}", tag.trim_matches(['-', '.']));
    if Version::parse(&version).is_ok() { version } else { format!("0.0.0-tag-{}", tag.replace('.', "-")) }
}

/// Distinct images of the containers of workloads, in the order of the objects.
pub(super) fn of_workloads<'a>(objects: impl IntoIterator<Item = &'a Value>) -> Vec<&'a str> {
    let mut seen = BTreeSet::new();
    let containers = objects
        .into_iter()
        .filter_map(pod_spec)
        .flat_map(|pod| ["initContainers", "containers"].into_iter().filter_map(|list| pod[list].as_array()).flatten());
    containers.filter_map(|container| container["image"].as_str()).filter(|image| seen.insert(*image)).collect()
}

/// `spec` of a workload's pods.
fn pod_spec(object: &Value) -> Option<&Value> {
    let group = object["apiVersion"].as_str()?.split_once('/').map_or("", |(group, _)| group);
    let spec = &object["spec"];
    match (group, object["kind"].as_str()?) {
        ("apps", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet") | ("batch", "Job") => {
            Some(&spec["template"]["spec"])
        }
        ("batch", "CronJob") => Some(&spec["jobTemplate"]["spec"]["template"]["spec"]),
        ("", "Pod") => Some(spec),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const HEX: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn resources_are_named_by_image_tag_and_digest() {
        let digest = format!("reg.example.org:5000/a/tide@sha256:{HEX}");
        let both = format!("tide:v1@sha256:{HEX}");
        for (text, name, version) in [
            ("reg.example.org:5000/a/tide:1.2.3", "tide", "1.2.3"),
            ("tide:v1.2.3-rc.1", "tide", "v1.2.3-rc.1"),
            ("x/tide.agent:1.2", "tide-agent", "0.0.0-1.2"),
            ("x/tide:main_7", "tide", "0.0.0-main-7"),
            ("x/tide:2026.01", "tide", "0.0.0-tag-2026-01"),
            ("x/a:1.0.0", "a-image", "1.0.0"),
            (&*digest, "tide-ba7816bf", "0.0.0+sha256.ba7816bf8f01"),
            (&*both, "tide-ba7816bf", "0.0.0-v1+sha256.ba7816bf8f01"),
        ] {
            let image = ImageReference::parse(text).unwrap();
            assert_eq!((&*image.resource_name(), &*image.resource_version(), image.as_str()), (name, version, text));
        }
    }

    #[test]
    fn references_without_a_pin_or_with_foreign_characters_are_refused() {
        for bad in ["tide", "reg:5000/tide", ""] {
            assert!(ImageReference::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(ImageReference::parse("a/tide"), Err(ImageReferenceError::Unpinned("a/tide".into())));
        for bad in ["a b:1", "Tide:1", "tide:", "tide:-1", "tide@sha256:ab", "tide:1:2", "-tide:1", "a\n/tide:1"] {
            assert!(matches!(ImageReference::parse(bad), Err(ImageReferenceError::Malformed(_))), "{bad}");
        }
    }

    #[test]
    fn images_come_from_the_containers_of_every_kind_of_workload() {
        let pod = |images: &[&str]| {
            let containers: Vec<_> = images.iter().map(|image| json!({"name": "c", "image": image})).collect();
            json!({"containers": containers})
        };
        let objects = [
            json!({"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": {"spec":
                {"containers": [{"image": "b:1"}], "initContainers": [{"image": "a:1"}]}}}}),
            json!({"apiVersion": "batch/v1", "kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": {"spec": pod(&["c:1", "b:1"])}}}}}),
            json!({"apiVersion": "v1", "kind": "Pod", "spec": pod(&["d:1"])}),
            json!({"apiVersion": "example.org/v1", "kind": "Deployment", "spec": {"template": {"spec": pod(&["e:1"])}}}),
            json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"image": "f:1"}}),
        ];
        assert_eq!(of_workloads(&objects), ["a:1", "b:1", "c:1", "d:1"]);
    }
}
