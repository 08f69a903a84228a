//! Labels of the requests to the control plane: resource and operation.

use http::{Method, Uri};

use super::{body_deadline::is_watch, metrics::RequestLabels};

/// Resources with a label of their own; all others share [`OTHER`].
const KINDS: [&str; 12] = [
    "certificates",
    "configmaps",
    "customresourcedefinitions",
    "events",
    "kymas",
    "leases",
    "manifests",
    "modulereleasemetas",
    "moduletemplates",
    "secrets",
    "subjectaccessreviews",
    "watchers",
];
const OTHER: &str = "other";

impl RequestLabels {
    pub(super) fn of(method: &Method, uri: &Uri) -> Self {
        let (kind, is_named) = resource(uri.path());
        let operation = match *method {
            Method::GET | Method::HEAD if is_watch(uri) => "watch",
            Method::GET | Method::HEAD if is_named => "get",
            Method::GET | Method::HEAD => "list",
            Method::POST => "create",
            Method::PUT => "update",
            Method::PATCH => "patch",
            Method::DELETE => "delete",
            _ => OTHER,
        };
        Self { kind, operation }
    }
}

/// Resource of a path, and whether it names an object: `/api/<version>/…` or `/apis/<group>/<version>/…`, then
/// `namespaces/<namespace>/` for objects in one.
fn resource(path: &str) -> (&'static str, bool) {
    let mut segments = path.split('/').skip_while(|segment| !matches!(*segment, "api" | "apis"));
    let skipped = if segments.next() == Some("api") { 1 } else { 2 };
    let mut segments = segments.skip(skipped).peekable();
    let mut plural = segments.next();
    if plural == Some("namespaces") && segments.clone().nth(1).is_some() {
        plural = segments.nth(1);
    }
    let kind = KINDS.into_iter().find(|kind| Some(*kind) == plural).unwrap_or(OTHER);
    (kind, segments.next().is_some_and(|name| !name.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_labelled_by_resource_and_operation_of_closed_sets() {
        let kymas = "/apis/operator.kyma-project.io/v1beta2/namespaces/kcp-system/kymas";
        for (method, uri, kind, operation) in [
            (Method::GET, format!("{kymas}?limit=500"), "kymas", "list"),
            (Method::GET, format!("{kymas}?&watch=true&timeoutSeconds=290"), "kymas", "watch"),
            (Method::GET, format!("{kymas}/a"), "kymas", "get"),
            (Method::PATCH, format!("{kymas}/a/status?fieldManager=m"), "kymas", "patch"),
            (Method::POST, "/api/v1/namespaces/kcp-system/secrets".into(), "secrets", "create"),
            (Method::PUT, "/prefix/api/v1/namespaces/kcp-system/configmaps/a".into(), "configmaps", "update"),
            (Method::DELETE, "/apis/coordination.k8s.io/v1/namespaces/n/leases/a".into(), "leases", "delete"),
            (
                Method::GET,
                "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/a".into(),
                "customresourcedefinitions",
                "get",
            ),
            (
                Method::POST,
                "/apis/authorization.k8s.io/v1/subjectaccessreviews".into(),
                "subjectaccessreviews",
                "create",
            ),
            (Method::GET, "/api/v1/namespaces".into(), OTHER, "list"),
            (Method::GET, "/api/v1/namespaces/kymas".into(), OTHER, "get"),
            (Method::GET, "/api/v1/namespaces/n/pods/kymas".into(), OTHER, "get"),
            (Method::GET, "/version".into(), OTHER, "list"),
            (Method::OPTIONS, String::new(), OTHER, OTHER),
        ] {
            let labels = RequestLabels::of(&method, &uri.parse().unwrap_or_default());
            assert_eq!(labels, RequestLabels { kind, operation }, "{method} {uri}");
        }
    }
}
