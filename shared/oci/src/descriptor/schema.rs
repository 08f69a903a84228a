//! The two schemas of component descriptors, of which the members that are used here are checked.

use serde_json::Value;

use super::{
    Descriptor, DescriptorError, Excerpt, LocalBlob, RAW_MANIFEST, Relation, Resource, ResourceDigest, Schema,
    access::{AccessType, local_blob},
    member::{MemberError, Object},
};
use crate::component::{ComponentVersion, Mapping};

/// Parts of a component descriptor that both schemas have, in different places.
pub(crate) struct Parts<'a> {
    pub(crate) schema: Schema,
    /// Object with `name`, `version` and `provider`.
    pub(crate) head: Object<'a>,
    /// Object with `resources`.
    pub(crate) elements: Object<'a>,
    /// Object with `repositoryContexts`.
    contexts: Object<'a>,
}

/// Reads a parsed component descriptor.
pub(super) fn descriptor(document: &Value, expected: &ComponentVersion) -> Result<Descriptor, DescriptorError> {
    let Parts { schema, head, elements, contexts } = parts(Object::root(document)?)?;
    check_identity(&head, expected)?;
    head.required("provider")?;
    let mapping = mapping(&contexts)?;
    let mut descriptor = Descriptor {
        component: expected.clone(),
        schema,
        mapping,
        raw_manifest: None,
        images: Vec::new(),
        resources: Vec::new(),
    };
    for resource in elements.objects("resources")? {
        add(&mut descriptor, &resource)?;
    }
    Ok(descriptor)
}

/// Finds the parts. v2 names its schema in `meta.schemaVersion`, v3 in `apiVersion`.
pub(super) fn parts(root: Object<'_>) -> Result<Parts<'_>, DescriptorError> {
    let meta = root.optional_object("meta")?;
    let version = meta.map(|meta| meta.text("schemaVersion")).transpose()?;
    let api_version = root.get("apiVersion").map(|_| root.text("apiVersion")).transpose()?;
    match (version, api_version) {
        (Some("v2"), None) => {
            let component = root.object("component")?;
            component.has("resources")?;
            Ok(Parts { schema: Schema::V2, head: component.clone(), elements: component.clone(), contexts: component })
        }
        (None, Some("ocm.software/v3alpha1")) => {
            let kind = root.text("kind")?;
            if kind != "ComponentVersion" {
                return Err(DescriptorError::Schema(format!("kind {}", Excerpt::of(kind))));
            }
            Ok(Parts {
                schema: Schema::V3alpha1,
                head: root.object("metadata")?,
                elements: root.object("spec")?,
                contexts: root,
            })
        }
        (Some(version), None) => Err(DescriptorError::Schema(format!("version {}", Excerpt::of(version)))),
        (None, Some(version)) => Err(DescriptorError::Schema(format!("API version {}", Excerpt::of(version)))),
        (Some(_), Some(_)) => Err(DescriptorError::Schema("both meta.schemaVersion and apiVersion are set".to_owned())),
        (None, None) => Err(DescriptorError::Schema("neither meta.schemaVersion nor apiVersion is set".to_owned())),
    }
}

/// A registry that serves a component descriptor under another name or tag would pass another module off as this one.
fn check_identity(head: &Object<'_>, expected: &ComponentVersion) -> Result<(), DescriptorError> {
    let name = head.text("name")?;
    let version = head.text("version")?;
    if name == expected.name() && version == expected.version() {
        return Ok(());
    }
    Err(DescriptorError::Mismatch { expected: expected.to_string(), found: Excerpt::of(&format!("{name}:{version}")) })
}

/// Mapping of the last repository context, to which the component was transported.
fn mapping(contexts: &Object<'_>) -> Result<Mapping, MemberError> {
    let contexts = contexts.objects("repositoryContexts")?;
    let Some(context) = contexts.last() else { return Ok(Mapping::default()) };
    match context.optional_text("componentNameMapping")? {
        "" | "urlPath" => Ok(Mapping::UrlPath),
        "sha256-digest" => Ok(Mapping::Sha256Digest),
        other => {
            Err(context.error("componentNameMapping", format!("is {}, which is not supported", Excerpt::of(other))))
        }
    }
}

/// Adds a resource. Only [`RAW_MANIFEST`] has to be a local blob; the access of a resource that is not used may have any
/// type.
fn add(descriptor: &mut Descriptor, from: &Object<'_>) -> Result<(), DescriptorError> {
    let access = from.object("access")?;
    let resource = resource(from, &access)?;
    if resource.name == RAW_MANIFEST {
        let blob: LocalBlob = local_blob(&access)?;
        if descriptor.raw_manifest.replace(blob).is_some() {
            return Err(DescriptorError::SeveralRawManifests);
        }
    } else if let Some(image) = &resource.image {
        descriptor.images.push(image.clone());
    }
    descriptor.resources.push(resource);
    Ok(())
}

fn resource(from: &Object<'_>, access: &Object<'_>) -> Result<Resource, MemberError> {
    let text = |key| from.text(key).map(str::to_owned);
    let relation = from.text("relation")?;
    let relation: Relation = relation
        .parse()
        .map_err(|_| from.error("relation", format!("is {}, neither local nor external", Excerpt::of(relation))))?;
    let digest = from.optional_object("digest")?.map(|digest| resource_digest(&digest)).transpose()?;
    let name = text("name")?;
    let kind = AccessType::of(access.text("type")?);
    let is_image = kind == AccessType::Image && name != RAW_MANIFEST;
    let image = is_image.then(|| access.text("imageReference").map(str::to_owned)).transpose()?;
    Ok(Resource {
        name,
        version: text("version")?,
        kind: text("type")?,
        relation,
        access: access.text("type")?.to_owned(),
        image,
        digest,
    })
}

fn resource_digest(from: &Object<'_>) -> Result<ResourceDigest, MemberError> {
    let text = |key| from.text(key).map(str::to_owned);
    Ok(ResourceDigest {
        hash_algorithm: text("hashAlgorithm")?,
        normalisation_algorithm: text("normalisationAlgorithm")?,
        value: text("value")?,
    })
}
