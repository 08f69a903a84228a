//! Streams the first list of a watch (KEP-3157), as a consistent read.
//!
//! A list in pages is a snapshot. Once no object of the kind has changed for a minute, the API server has no snapshot in its
//! watch cache, and reads and decodes all pages but the first from etcd; this takes several times the CPU time. A streamed list
//! comes from the watch cache, object by object, and the caches decode it while the server encodes the rest.

use http::{Uri, uri::PathAndQuery};
use kube::runtime::watcher;

/// Makes a streamed list a consistent read; other requests stay as they are. `kube` begins it at any state that the API server has
/// cached (resourceVersion 0). Without a resourceVersion the server first confirms that its cache is current, as for a list.
pub(super) fn read_consistently(uri: &mut Uri) {
    let query = uri.query().unwrap_or_default();
    if !query.split('&').any(|parameter| parameter == "sendInitialEvents=true") {
        return;
    }
    let parameters: Vec<_> = query.split('&').filter(|parameter| *parameter != "resourceVersion=0").collect();
    let Ok(target) = PathAndQuery::try_from(format!("{}?{}", uri.path(), parameters.join("&"))) else { return };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(target);
    if let Ok(consistent) = Uri::from_parts(parts) {
        *uri = consistent;
    }
}

/// Returns true if the API server does not stream lists: its feature gate `WatchList` is off, the default of Kubernetes 1.33.
pub(super) fn is_refused(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if matches!(status.code, 400 | 422))
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Mutex},
        time::Duration,
    };

    use futures::{StreamExt as _, future::ready, stream};
    use http::{Request, Response, StatusCode};
    use http_body_util::StreamBody;
    use hyper::body::{Bytes, Frame};
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::{Api, Client, ResourceExt as _, client::Body, runtime::reflector::store::Writer};
    use serde_json::{Value, json};
    use tidewatch_shared::metrics::Registry;
    use tokio::{sync::mpsc, time::timeout};
    use tower::{BoxError, service_fn};

    use super::*;
    use crate::kube::{
        Metrics,
        recorder::{self, EventRecorder},
        watch::{self, Cache, Change, Freshness},
    };

    #[test]
    fn only_a_streamed_list_loses_its_resource_version() {
        let of = |target: &str| {
            let mut uri: Uri = format!("https://kcp:6443/api/v1/secrets?{target}").parse().unwrap();
            read_consistently(&mut uri);
            uri.to_string().strip_prefix("https://kcp:6443/api/v1/secrets?").unwrap().to_owned()
        };
        let streamed = "watch=true&labelSelector=a%3Db&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
        assert_eq!(of(&format!("{streamed}&resourceVersion=0")), streamed);
        for other in ["watch=true&resourceVersion=0", "limit=500", "watch=true&resourceVersion=7"] {
            assert_eq!(of(other), other);
        }
    }

    fn map(name: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "n", "resourceVersion": "5"}})
    }

    /// Response with these lines; that of a watch does not end.
    fn response(status: StatusCode, lines: &[Value], ends: bool) -> Response<StreamBody<Frames>> {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let first = stream::once(ready(Ok::<_, BoxError>(Frame::data(Bytes::from(text)))));
        let body = if ends { first.boxed() } else { first.chain(stream::pending()).boxed() };
        let mut response = Response::new(StreamBody::new(body));
        *response.status_mut() = status;
        response
    }

    type Frames = stream::BoxStream<'static, Result<Frame<Bytes>, BoxError>>;

    /// Watches the ConfigMaps `a` and `b` of a server until they are listed. Returns the reported changes, and the targets of the
    /// requests until then.
    async fn list(streams: bool) -> (Vec<String>, Vec<String>) {
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let server = service_fn({
            let requests = requests.clone();
            move |request: Request<Body>| {
                let query = request.uri().query().unwrap_or_default().to_owned();
                requests.lock().unwrap().push(query.clone());
                let (is_watch, is_streamed) = (query.contains("watch=true"), query.contains("sendInitialEvents=true"));
                let added = |name| json!({"type": "ADDED", "object": map(name)});
                let end = json!({"type": "BOOKMARK", "object": {"kind": "ConfigMap", "apiVersion": "v1", "metadata":
                    {"resourceVersion": "6", "annotations": {"k8s.io/initial-events-end": "true"}}}});
                let refusal = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": 422,
                    "message": "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch"});
                let page = json!({"kind": "ConfigMapList", "apiVersion": "v1", "metadata": {"resourceVersion": "6"},
                    "items": [map("a"), map("b")]});
                ready(Ok::<_, BoxError>(match (is_watch, is_streamed) {
                    (_, true) if streams => response(StatusCode::OK, &[added("a"), added("b"), end], false),
                    (_, true) => response(StatusCode::UNPROCESSABLE_ENTITY, &[refusal], true),
                    (true, false) => response(StatusCode::OK, &[], false),
                    (false, false) => response(StatusCode::OK, &[page], true),
                }))
            }
        });
        let mut registry = Registry::default();
        let (metrics, events) = (Metrics::register(&mut registry), recorder::Metrics::register(&mut registry));
        let (writer, recorder, freshness) =
            (Writer::<ConfigMap>::default(), EventRecorder::new(events), Freshness::new());
        let api = Api::namespaced(freshness.observe(Client::new(server, "n")), "n");
        let cache = Cache {
            kind: "configmaps",
            reader: writer.as_reader(),
            writer: writer.into(),
            compact: Box::new(|map: ConfigMap| map),
            gate: None,
            freshness,
            metrics,
            recorder,
        };
        let (seen, mut changes) = mpsc::unbounded_channel();
        let handler = move |change: Change<'_, ConfigMap>| {
            let text = match change {
                Change::Initial(map) | Change::Applied(map) => map.name_any(),
                Change::Deleted(map) => format!("deleted {}", map.name_any()),
                Change::Listed => "listed".to_owned(),
            };
            seen.send(text).unwrap();
        };
        let watch = tokio::spawn(watch::run(api, watcher::Config::default(), cache, handler));
        let mut reported = Vec::new();
        while reported.last().is_none_or(|last| last != "listed") {
            reported.push(timeout(Duration::from_secs(600), changes.recv()).await.expect("a list").unwrap());
        }
        watch.abort();
        reported[..2].sort();
        (reported, requests.lock().unwrap().clone())
    }

    #[tokio::test(start_paused = true)]
    async fn list_is_streamed_as_a_consistent_read() {
        let (reported, requests) = list(true).await;
        assert_eq!(reported, ["a", "b", "listed"]);
        let [request] = &*requests else { panic!("{requests:?}") };
        assert!(
            request.contains("sendInitialEvents=true") && request.contains("allowWatchBookmarks=true"),
            "{request}"
        );
        assert!(!request.contains("resourceVersion="), "{request}");
    }

    #[tokio::test(start_paused = true)]
    async fn list_is_requested_in_pages_from_a_server_that_does_not_stream() {
        let (reported, requests) = list(false).await;
        assert_eq!(reported, ["a", "b", "listed"]);
        assert!(requests[0].contains("sendInitialEvents=true"), "{requests:?}");
        assert!(requests[1..].iter().all(|request| !request.contains("sendInitialEvents")), "{requests:?}");
        assert!(requests[1].contains("limit="), "{requests:?}");
    }
}
