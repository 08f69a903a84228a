//! Image manifests (OCI image specification, *Image Manifest*), as far as a component version needs them.

use http::{HeaderMap, header::CONTENT_TYPE};
use serde::Deserialize;

use super::error::FetchError;
use crate::digest::BlobReference;

/// Media types that are requested. An index is requested so that it can be named: some registries answer 404 otherwise.
pub(super) const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";
/// Media types of image manifests; that of Docker (schema 2) has the same members.
const IMAGE_MANIFESTS: [&str; 2] =
    ["application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"];
/// Media types of lists of manifests, with their names.
const INDEXES: [(&str, &str); 2] = [
    ("application/vnd.oci.image.index.v1+json", "OCI image index"),
    ("application/vnd.docker.distribution.manifest.list.v2+json", "Docker manifest list"),
];

/// A page for people in place of the content.
pub(super) const WEB_PAGE: &str =
    "it is a web page; the address is not that of a registry, or a login page or a proxy answers for it";

/// The parts of an image manifest that are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageManifest {
    /// Configuration blob.
    pub config: BlobReference,
    /// Layers, in their order.
    pub layers: Vec<BlobReference>,
}

impl ImageManifest {
    /// Parses a manifest. The member `mediaType` decides on its kind, then `Content-Type`, then its members.
    ///
    /// # Errors
    /// [`FetchError::Index`] and [`FetchError::Malformed`].
    pub fn parse(content: &[u8], content_type: Option<&str>, artefact: &str) -> Result<Self, FetchError> {
        let document: Document = serde_json::from_slice(content).map_err(|_| match content_type {
            Some("text/html") => FetchError::Malformed(WEB_PAGE),
            _ => FetchError::Malformed("the manifest is not JSON of an image manifest"),
        })?;
        let media_type = document.media_type.as_deref().or(content_type);
        let index = INDEXES.iter().find(|(kind, _)| media_type == Some(kind)).map(|(_, name)| *name);
        if let Some(kind) = index.or(document.manifests.is_some().then_some("list of manifests")) {
            return Err(FetchError::Index { artefact: artefact.to_owned(), kind });
        }
        if document.media_type.is_some_and(|kind| !IMAGE_MANIFESTS.contains(&&*kind)) {
            return Err(FetchError::Malformed("the manifest's media type is not that of an image manifest"));
        }
        let config = document.config.ok_or(FetchError::Malformed("the manifest has no config"))?;
        let layers = document.layers.into_iter().map(Reference::checked).collect::<Result<_, _>>()?;
        Ok(Self { config: config.checked()?, layers })
    }
}

/// Media type of a response, without parameters.
pub(super) fn content_type(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    Some(value.split(';').next().unwrap_or(value).trim())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    media_type: Option<String>,
    config: Option<Reference>,
    #[serde(default)]
    layers: Vec<Reference>,
    manifests: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Reference {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
}

impl Reference {
    fn checked(self) -> Result<BlobReference, FetchError> {
        let digest =
            self.digest.parse().map_err(|_| FetchError::Malformed("a digest in the manifest is not SHA-256"))?;
        Ok(BlobReference { digest, size: self.size, media_type: self.media_type })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::digest::Digest;

    fn parse(document: &Value, content_type: Option<&str>) -> Result<ImageManifest, FetchError> {
        ImageManifest::parse(document.to_string().as_bytes(), content_type, "a:1")
    }

    #[test]
    fn config_and_layers_are_read() {
        let reference =
            |text: &str| json!({"mediaType": text, "digest": Digest::of(text.as_bytes()).to_string(), "size": 7});
        let mut document = json!({"schemaVersion": 2, "config": reference("c"), "layers": [reference("l")]});
        let expected =
            |text: &str| BlobReference { digest: Digest::of(text.as_bytes()), size: 7, media_type: text.into() };
        let manifest = ImageManifest { config: expected("c"), layers: vec![expected("l")] };
        assert_eq!(parse(&document, None), Ok(manifest.clone()));
        assert_eq!(parse(&document, Some("application/json")), Ok(manifest.clone()));
        document["mediaType"] = json!(IMAGE_MANIFESTS[0]);
        assert_eq!(parse(&document, Some(IMAGE_MANIFESTS[0])), Ok(manifest.clone()));
        document["mediaType"] = json!("application/vnd.docker.distribution.manifest.v2+json");
        assert_eq!(parse(&document, Some("application/octet-stream")), Ok(manifest));
    }

    #[test]
    fn index_is_refused_in_each_of_its_forms() {
        let index = |kind| Err(FetchError::Index { artefact: "a:1".into(), kind });
        assert_eq!(parse(&json!({"mediaType": INDEXES[0].0}), None), index("OCI image index"));
        assert_eq!(parse(&json!({}), Some(INDEXES[1].0)), index("Docker manifest list"));
        assert_eq!(parse(&json!({"manifests": []}), None), index("list of manifests"));
    }

    #[test]
    fn web_page_is_named() {
        let page = ImageManifest::parse(b"<html>Log in</html>", Some("text/html"), "a:1");
        assert_eq!(page, Err(FetchError::Malformed(WEB_PAGE)));
    }

    #[test]
    fn malformed_manifest_is_refused() {
        let digest = Digest::of(b"").to_string();
        for document in [
            json!([]),
            json!({}),
            json!({"mediaType": "application/vnd.docker.distribution.manifest.v1+json"}),
            json!({"config": {"digest": "sha512:00", "size": 1}}),
            json!({"config": {"digest": digest, "size": -1}}),
            json!({"config": {"digest": digest, "size": 1}, "layers": [{"digest": "../x", "size": 1}]}),
        ] {
            assert!(matches!(parse(&document, None), Err(FetchError::Malformed(_))), "{document}");
        }
    }
}
