//! Counts the requests to the control plane by resource and operation, and its open watches: the load of this process on
//! KCP.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use futures::{FutureExt as _, future::BoxFuture};
use http::{Method, Request, Response, Uri};
use http_body::{Body, Frame, SizeHint};
use prometheus_client::metrics::gauge::Gauge;
use tidewatch_kit::metrics::KindLabel;
use tower::{Layer, Service, layer::layer_fn};

use super::{Metrics, body_deadline::is_watch, metrics::RequestLabels};

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
    fn of(method: &Method, uri: &Uri) -> Self {
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

/// Layer of a client whose requests are counted.
pub(super) fn layer<S>(metrics: Metrics) -> impl Layer<S, Service = Counted<S>> + Clone {
    layer_fn(move |service| Counted { service, metrics: metrics.clone() })
}

/// See [`layer`].
#[derive(Clone)]
pub(super) struct Counted<S> {
    service: S,
    metrics: Metrics,
}

impl<S, B, R> Service<Request<B>> for Counted<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = Response<CountedBody<R>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let labels = RequestLabels::of(request.method(), request.uri());
        self.metrics.requests.get_or_create(&labels).inc();
        let is_watch = labels.operation == "watch";
        let watches = is_watch.then(|| self.metrics.watches.get_or_create_owned(&KindLabel { kind: labels.kind }));
        let response = self.service.call(request);
        async move {
            let response = response.await?;
            let open = watches.filter(|_| response.status().is_success()).map(OpenWatch::new);
            Ok(response.map(|body| CountedBody { body, _open: open }))
        }
        .boxed()
    }
}

/// A watch that counts as open until dropped.
struct OpenWatch(Gauge);

impl OpenWatch {
    fn new(watches: Gauge) -> Self {
        watches.inc();
        Self(watches)
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Body of a response; that of a watch counts as open until it is dropped.
pub(super) struct CountedBody<B> {
    body: B,
    _open: Option<OpenWatch>,
}

impl<B: Body + Unpin> Body for CountedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::StatusCode;
    use http_body_util::Empty;
    use hyper::body::Bytes;
    use tidewatch_kit::metrics::Registry;
    use tower::{ServiceBuilder, ServiceExt as _, service_fn};

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

    #[tokio::test]
    async fn watch_is_open_until_its_body_is_dropped_and_a_refused_one_is_not() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let server = service_fn(async |request: Request<StatusCode>| {
            let mut response = Response::new(Empty::<Bytes>::new());
            *response.status_mut() = *request.body();
            Ok::<_, Infallible>(response)
        });
        let client = ServiceBuilder::new().layer(layer(metrics)).service(server);
        let send = async |uri: &'static str, status: StatusCode| {
            let request = Request::get(uri).body(status).unwrap();
            client.clone().oneshot(request).await.unwrap()
        };
        let watch = "/api/v1/namespaces/n/secrets?watch=true";
        let list = "/api/v1/namespaces/n/secrets";
        let open = || registry.encode().unwrap().contains(r#"kcp_watches_open{kind="secrets"} 1"#);
        let first = send(watch, StatusCode::OK).await;
        assert!(open());
        let _refused = send(watch, StatusCode::GONE).await;
        let _list = send(list, StatusCode::OK).await;
        assert!(open(), "neither counts");
        drop(first);
        let page = registry.encode().unwrap();
        for line in [
            r#"kcp_watches_open{kind="secrets"} 0"#,
            r#"kcp_requests_total{kind="secrets",operation="watch"} 2"#,
            r#"kcp_requests_total{kind="secrets",operation="list"} 1"#,
        ] {
            assert!(page.contains(line), "{page}");
        }
    }
}
