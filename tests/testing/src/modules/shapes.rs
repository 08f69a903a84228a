//! The module shapes in `tests/modules/shapes`: one module each, as the tools of their ecosystem render it.
//!
//! `manifest.yaml` is version 1.0.0. Version 2.0.0 is `upgrade.yaml`, else the same text with another version number.

use std::{fmt::Write as _, fs, io};

use serde_json::{Value, json};

use super::root;

/// Version that is installed.
pub const INSTALLED: &str = "1.0.0";
/// Version of the upgrade.
pub const UPGRADE: &str = "2.0.0";

/// Shapes without a folder: their texts are too large or too fragile for files.
const GENERATED: [&str; 3] = ["crlf", "large-crd", "larger-crd"];
/// Bytes of the CRDs in the generated shapes.
const LARGE: usize = 256 << 10;
const LARGER: usize = 700 << 10;

/// Names of all shapes, sorted.
///
/// # Errors
/// The folder cannot be read.
pub fn names() -> io::Result<Vec<String>> {
    let mut names: Vec<_> = GENERATED.map(str::to_owned).to_vec();
    for entry in fs::read_dir(root().join("shapes"))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Text of the manifest of a version; `None` if there is no such shape.
pub fn manifest(shape: &str, version: &str) -> Option<String> {
    let text = match shape {
        "crlf" => read("lists", "manifest.yaml")?.replace("lists-", "crlf-").replace('\n', "\r\n"),
        "large-crd" => definition(shape, "larges", LARGE),
        "larger-crd" => definition(shape, "largers", LARGER),
        _ => {
            let upgrade = || read(shape, "upgrade.yaml").filter(|_| version == UPGRADE);
            upgrade().or_else(|| read(shape, "manifest.yaml"))?
        }
    };
    Some(text.replace(INSTALLED, version))
}

/// The default module CR of a shape, if it has one.
pub fn default_cr(shape: &str) -> Option<Value> {
    serde_saphyr::from_str(&read(shape, "default-cr.yaml")?).ok()
}

fn read(shape: &str, file: &str) -> Option<String> {
    fs::read_to_string(root().join("shapes").join(shape).join(file)).ok()
}

/// A CRD of about this size, as generators write them for embedded types of Kubernetes: many fields with long descriptions.
fn definition(shape: &str, plural: &str, bytes: usize) -> String {
    const DESCRIPTION: &str = "Field of an embedded type that its own documentation describes at length. ";
    let mut properties = String::new();
    for number in 0.. {
        if properties.len() >= bytes {
            break;
        }
        let comma = if number == 0 { "" } else { "," };
        let description = DESCRIPTION.repeat(3);
        // Writing to a String does not fail.
        let _ = write!(
            properties,
            r#"{comma}"field{number}":{{"type":"object","description":"{description}","properties":{{"name":{{"type":"string"}},"values":{{"type":"array","items":{{"type":"string"}}}}}}}}"#,
        );
    }
    let properties: Value = serde_json::from_str(&format!("{{{properties}}}")).unwrap_or_default();
    let schema = json!({"type": "object", "properties": {"spec": {"type": "object", "properties": properties}}});
    let group = format!("{shape}.shapes.test");
    let singular = plural.trim_end_matches('s');
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{group}"), "labels": {"version": INSTALLED}},
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": {"kind": "Large", "listKind": "LargeList", "plural": plural, "singular": singular},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}],
        },
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_has_two_versions_that_differ() {
        let names = names().expect("the shapes");
        assert!(names.len() >= 25, "{names:?}");
        for name in names {
            let of = |version| manifest(&name, version).expect("a manifest");
            assert_ne!(of(INSTALLED), of(UPGRADE), "{name}");
        }
        assert_eq!(manifest("no-such-shape", INSTALLED), None);
    }

    #[test]
    fn generated_shapes_have_their_sizes_and_line_ends() {
        for (shape, bytes) in [("large-crd", LARGE), ("larger-crd", LARGER)] {
            let text = manifest(shape, INSTALLED).expect("a manifest");
            assert!(text.len() > bytes && text.len() < bytes + 2_000, "{shape}: {}", text.len());
        }
        let crlf = manifest("crlf", INSTALLED).expect("a manifest");
        assert!(crlf.lines().count() > 20 && crlf.matches('\n').count() == crlf.matches("\r\n").count());
    }
}
