//! Limits of each kind of response, derived from the request.

use http::{Method, Request, header::ACCEPT};

/// Limits of one response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BodyLimits {
    /// Bytes of the text.
    pub(super) bytes: u64,
    /// Estimated bytes once decoded, see [`super::structure::Structure::memory`].
    pub(super) memory: u64,
}

/// A TokenReview, or the keys of a token issuer.
pub(super) const SMALL: BodyLimits = BodyLimits { bytes: 64 << 10, memory: 2 << 20 };

/// Metadata of one object. An API server accepts 256 KiB of annotations, which JSON escapes; the rest is
/// `managedFields`.
pub(super) const METADATA: BodyLimits = BodyLimits { bytes: 512 << 10, memory: 8 << 20 };

/// One object, or a discovery response. An API server accepts request bodies of 3 MiB, and etcd stores 1.5 MiB by default. The
/// memory suffices for the largest definitions in use, with about 30,000 schema nodes.
pub(super) const OBJECT: BodyLimits = BodyLimits { bytes: 3 << 20, memory: 32 << 20 };

/// One page of a list. A page that exceeds them is requested again with fewer objects.
pub(super) const PAGE: BodyLimits = BodyLimits { bytes: 16 << 20, memory: 48 << 20 };

/// Limits of an error response; its bytes are limited by [`super::Limits::error_bytes`].
pub(super) const ERROR_MEMORY: u64 = 2 << 20;

/// Limits of the response to a request. A list without a limit of objects counts as one object.
pub(super) fn limits_of<B>(request: &Request<B>) -> BodyLimits {
    let path = request.uri().path();
    let is_review = request.method() == Method::POST && path.ends_with("/tokenreviews");
    if is_review || path.ends_with("/openid/v1/jwks") {
        return SMALL;
    }
    let accept = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let query = request.uri().query().unwrap_or_default();
    let is_page = query.split('&').any(|parameter| parameter.starts_with("limit="));
    if request.method() == Method::GET && (is_page || accept.contains("as=PartialObjectMetadataList")) {
        return PAGE;
    }
    if accept.contains("as=PartialObjectMetadata;") {
        return METADATA;
    }
    OBJECT
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::{
        authentication::v1::TokenReview,
        core::v1::{ConfigMap, Pod},
    };
    use kube::{
        Resource,
        api::{DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams},
        core::Request as Requests,
    };
    use serde_json::json;

    use super::*;

    #[test]
    fn each_call_has_its_limits() {
        let maps = Requests::new(ConfigMap::url_path(&(), Some("a")));
        let pods = Requests::new(Pod::url_path(&(), Some("a")));
        let reviews = Requests::new(TokenReview::url_path(&(), None));
        let get = GetParams::default();
        let list = ListParams::default();
        let post = PostParams::default();
        let patch = Patch::Merge(json!({}));
        let path = |path: &str| Ok(Request::get(path).body(Vec::new()).unwrap());
        for (name, request, expected) in [
            ("review", reviews.create(&post, Vec::new()), SMALL),
            ("keys", path("/openid/v1/jwks"), SMALL),
            ("keys behind a prefix", path("https://host/one/openid/v1/jwks"), SMALL),
            ("discovery", path("/apis/apps/v1"), OBJECT),
            ("metadata", maps.get_metadata("x", &get), METADATA),
            ("patch for metadata", maps.patch_metadata("x", &PatchParams::default(), &patch), METADATA),
            ("object", maps.get("x", &get), OBJECT),
            ("object with the name of another kind", maps.get("tokenreviews", &get), OBJECT),
            ("object with the name of a parameter", maps.get("limit=1", &get), OBJECT),
            ("create", maps.create(&post, Vec::new()), OBJECT),
            ("replace", maps.replace("x", &post, Vec::new()), OBJECT),
            ("apply", maps.patch("x", &PatchParams::apply("m"), &Patch::Apply(json!({}))), OBJECT),
            ("delete", maps.delete("x", &DeleteParams::background()), OBJECT),
            ("list of any length", pods.list(&list), OBJECT),
            ("page", pods.list(&list.clone().labels("limit=1").limit(5)), PAGE),
            ("next page", pods.list(&list.clone().limit(5).continue_token("t")), PAGE),
            ("page of metadata", pods.list_metadata(&list.clone().limit(5)), PAGE),
            ("label that looks like a page", pods.list(&list.labels("limit=1")), OBJECT),
        ] {
            assert_eq!(limits_of(&request.unwrap()), expected, "{name}");
        }
    }
}
