//! Pieces of schema that no Rust type says by itself.

use schemars::{Schema, SchemaGenerator, json_schema};

/// A channel.
pub(super) const CHANNEL: &str = "^[a-z]+$";
/// A version that can stand in the name of a template; may be empty.
pub(super) const VERSION: &str = r"^((0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[a-zA-Z-][0-9a-zA-Z-]*)?)?$";
/// A module's name; may be empty.
pub(super) const MODULE_NAME: &str = "^([a-z]{3,}(-[a-z]{3,})*)?$";
/// An OCM component's name.
pub(super) const COMPONENT: &str =
    r"^[a-z][-a-z0-9]*([.][a-z][-a-z0-9]*)*[.][a-z]{2,}(/[a-z][-a-z0-9_]*([.][a-z][-a-z0-9_]*)*)+$";
/// Any semantic version (semver.org, 2.0.0).
pub(super) const SEMVER: &str = concat!(
    r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)",
    r"(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?",
    r"(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?$",
);
/// The type of a condition (meta/v1).
pub(super) const CONDITION_TYPE: &str = concat!(
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?",
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
);
/// The reason of a condition (meta/v1).
pub(super) const CONDITION_REASON: &str = "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$";

/// Makes a list of objects a map by one of their members.
pub(super) fn map_list(mut list: Schema, key: &str) -> Schema {
    list.insert("x-kubernetes-list-type".to_owned(), "map".into());
    list.insert("x-kubernetes-list-map-keys".to_owned(), vec![key].into());
    list
}

/// Any object at all.
pub(super) fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

/// A whole Kubernetes object of any kind.
pub(super) fn embedded_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "x-kubernetes-embedded-resource": true, "x-kubernetes-preserve-unknown-fields": true,
    })
}

/// A whole Kubernetes object of any kind, or null.
pub(super) fn nullable_embedded_object(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = embedded_object(generator);
    schema.insert("nullable".to_owned(), true.into());
    schema
}

/// A label selector (meta/v1), in our own words.
pub(super) fn label_selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "x-kubernetes-map-type": "atomic",
        "properties": {
            "matchLabels": {
                "description": "Labels that must have these values.",
                "type": "object",
                "additionalProperties": {"type": "string"},
            },
            "matchExpressions": {
                "description": "Requirements that must hold as well.",
                "type": "array",
                "x-kubernetes-list-type": "atomic",
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": {"description": "The label.", "type": "string"},
                        "operator": {"description": "In, NotIn, Exists or DoesNotExist.", "type": "string"},
                        "values": {
                            "description": "The values of In and NotIn.",
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
