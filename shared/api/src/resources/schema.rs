//! Parts of the schemas that cannot be derived from a Rust type.

use schemars::{Schema, SchemaGenerator, json_schema};

/// Pattern of a channel.
pub(super) const CHANNEL: &str = "^[a-z]+$";
/// Pattern of a version that can be part of the name of a ModuleTemplate; may be empty.
pub(super) const VERSION: &str = r"^((0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[a-zA-Z-][0-9a-zA-Z-]*)?)?$";
/// Pattern of the name of a module; may be empty.
pub(super) const MODULE_NAME: &str = "^([a-z]{3,}(-[a-z]{3,})*)?$";
/// Pattern of the name of an OCM component.
pub(super) const COMPONENT: &str =
    r"^[a-z][-a-z0-9]*([.][a-z][-a-z0-9]*)*[.][a-z]{2,}(/[a-z][-a-z0-9_]*([.][a-z][-a-z0-9_]*)*)+$";
/// Pattern of a semantic version (semver.org, 2.0.0).
pub(super) const SEMVER: &str = concat!(
    r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)",
    r"(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?",
    r"(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?$",
);
/// Pattern of the type of a condition (`meta/v1`).
pub(super) const CONDITION_TYPE: &str = concat!(
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?",
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
);
/// Pattern of the reason of a condition (`meta/v1`).
pub(super) const CONDITION_REASON: &str = "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$";

/// Turns the schema of a list into that of a map keyed by one member (`x-kubernetes-list-type: map`).
pub(super) fn map_list(mut list: Schema, key: &str) -> Schema {
    list.insert("x-kubernetes-list-type".to_owned(), "map".into());
    list.insert("x-kubernetes-list-map-keys".to_owned(), vec![key].into());
    list
}

/// An object of any shape.
pub(super) fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

/// A complete Kubernetes object of any kind.
pub(super) fn embedded_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "x-kubernetes-embedded-resource": true, "x-kubernetes-preserve-unknown-fields": true,
    })
}

/// A complete Kubernetes object of any kind, or null.
pub(super) fn nullable_embedded_object(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = embedded_object(generator);
    schema.insert("nullable".to_owned(), true.into());
    schema
}

/// A label selector (`meta/v1`).
pub(super) fn label_selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "x-kubernetes-map-type": "atomic",
        "properties": {
            "matchLabels": {
                "description": "matchLabels is a map of labels to required values. All requirements must be met.",
                "type": "object",
                "additionalProperties": {"type": "string"},
            },
            "matchExpressions": {
                "description": "matchExpressions is a list of requirements on labels. All requirements must be met.",
                "type": "array",
                "x-kubernetes-list-type": "atomic",
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": {"description": "key of the label that the requirement applies to.", "type": "string"},
                        "operator": {"description": "operator relates the key to the values, one of In, NotIn, Exists, DoesNotExist.", "type": "string"},
                        "values": {
                            "description": "values of the operators In and NotIn. Must be empty for Exists and DoesNotExist.",
                            "type": "array",
                            "items": {"type": "string"},
                            "x-kubernetes-list-type": "atomic",
                        },
                    },
                },
            },
        },
    })
}
