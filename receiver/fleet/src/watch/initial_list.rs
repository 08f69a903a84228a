//! Turns the first list of a watch, which `kube` requests as a stream of events (KEP-3157), into a plain list, and the list into
//! such a stream.
//!
//! The API server answers a list without a limit from its watch cache once it has confirmed that the cache is current
//! (KEP-2340), and encodes it object by object (KEP-5116). A streamed list costs it twice the CPU time, and the pages of a list
//! several times as much: once no object of the kind has changed for a minute, all but the first are read from etcd. The
//! caches decode each object when it arrives, so neither the text of the list nor its objects are in memory as a whole.

use std::error::Error;

use bytes::Bytes;
use futures::stream;
use http::{Uri, uri::PathAndQuery};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, StreamBody};
use kube::client;
use serde_json::{Value, json};
use tidewatch_kit::error_levels;
use tower::BoxError;

use super::list_splitter::{ListHead, ListSplitter};

/// Parameters of a streamed list that apply to a list as well.
const SELECTORS: [&str; 2] = ["labelSelector=", "fieldSelector="];

/// Makes the target of a streamed list that of a list, and returns true; other targets stay as they are. Without a
/// resourceVersion a list is a consistent read.
pub(super) fn request_list(uri: &mut Uri) -> bool {
    let query = uri.query().unwrap_or_default();
    if !query.split('&').any(|parameter| parameter == "sendInitialEvents=true") {
        return false;
    }
    let is_selector = |parameter: &&str| SELECTORS.iter().any(|name| parameter.starts_with(name));
    let parameters: Vec<_> = query.split('&').filter(is_selector).collect();
    let Ok(target) = PathAndQuery::try_from(format!("{}?{}", uri.path(), parameters.join("&"))) else { return false };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(target);
    let Ok(list) = Uri::from_parts(parts) else { return false };
    *uri = list;
    true
}

/// Turns the body of a list into that of a streamed list: an event for each object, and the bookmark at its end.
pub(super) fn events(list: client::Body) -> impl Body<Data = Bytes, Error = BoxError> {
    let list = ListEvents { list, splitter: ListSplitter::default(), has_ended: false };
    StreamBody::new(stream::unfold(list, |mut list| async move {
        let events = list.next().await?;
        Some((Ok(Frame::data(events.into())), list))
    }))
}

/// See [`events`].
struct ListEvents {
    list: client::Body,
    splitter: ListSplitter,
    /// The list has ended, or is refused.
    has_ended: bool,
}

impl ListEvents {
    /// Returns the next events; `None` at the end.
    async fn next(&mut self) -> Option<Vec<u8>> {
        while !self.has_ended {
            let part = self.list.frame().await;
            let events = self.events_of(part);
            if !events.is_empty() {
                return Some(events);
            }
        }
        None
    }

    /// Returns the events of the next part of the list, or that of an error, which ends the stream. An error of the body
    /// becomes an event as well: `kube` takes some of them for the end of the stream, and requests the list again at once.
    fn events_of(&mut self, part: Option<Result<Frame<Bytes>, kube::Error>>) -> Vec<u8> {
        let mut events = Vec::new();
        if let Err(error) = self.split(part, &mut events) {
            self.has_ended = true;
            events = error_event(&*error);
        }
        events
    }

    /// Appends the events of the next part of the list, or that of its end.
    fn split(&mut self, part: Option<Result<Frame<Bytes>, kube::Error>>, events: &mut Vec<u8>) -> Result<(), BoxError> {
        let Some(part) = part else {
            self.has_ended = true;
            *events = end_event(&self.splitter.finish()?);
            return Ok(());
        };
        if let Ok(data) = part?.into_data() {
            self.splitter.push(&data, |object| add_event(events, object))?;
        }
        Ok(())
    }
}

/// Appends the event of an object as a line.
fn add_event(events: &mut Vec<u8>, object: &[u8]) {
    events.extend_from_slice(br#"{"type":"ADDED","object":"#);
    let begin = events.len();
    events.extend_from_slice(object);
    // Valid JSON has line ends only between tokens; here they would end the event.
    events[begin..].iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')).for_each(|byte| *byte = b' ');
    events.extend_from_slice(b"}\n");
}

/// The bookmark that ends the list.
fn end_event(head: &ListHead) -> Vec<u8> {
    let annotations = json!({"k8s.io/initial-events-end": "true"});
    let metadata = json!({"resourceVersion": head.resource_version(), "annotations": annotations});
    let object = json!({"apiVersion": head.api_version, "kind": head.kind, "metadata": metadata});
    event("BOOKMARK", &object)
}

/// The event of an error, after which `kube` backs off.
fn error_event(error: &(dyn Error + 'static)) -> Vec<u8> {
    let message = error_levels::line(error);
    event("ERROR", &json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": 500}))
}

fn event(r#type: &str, object: &Value) -> Vec<u8> {
    format!("{}\n", json!({"type": r#type, "object": object})).into_bytes()
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc, time::Duration};

    use futures::{StreamExt as _, future::ready, stream};
    use http::{Request, Response, StatusCode};
    use http_body_util::StreamBody;
    use hyper::body::{Bytes, Frame};
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::{
        Api, Client, ResourceExt as _,
        client::Body,
        runtime::{reflector::store::Writer, watcher},
    };
    use parking_lot::Mutex;
    use serde_json::{Value, json};
    use tidewatch_cluster::{Metrics, body_deadline::DeadlinePerPart};
    use tidewatch_kit::metrics::Registry;
    use tokio::{
        sync::mpsc,
        time::{Instant, timeout},
    };
    use tower::{BoxError, service_fn};

    use super::*;
    use crate::{
        recorder::{self, EventRecorder},
        watch::{self, Cache, Change, Freshness},
    };

    #[test]
    fn only_a_streamed_list_becomes_a_list_and_keeps_its_selectors() {
        let of = |target: &str| {
            let mut uri: Uri = format!("https://kcp:6443/api/v1/secrets?{target}").parse().unwrap();
            let lists = request_list(&mut uri);
            (lists, uri.to_string().strip_prefix("https://kcp:6443/api/v1/secrets?").unwrap().to_owned())
        };
        let streamed = "&watch=true&timeoutSeconds=290&labelSelector=a%3Db&fieldSelector=c%3Dd&allowWatchBookmarks=true\
            &sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=0";
        assert_eq!(of(streamed), (true, "labelSelector=a%3Db&fieldSelector=c%3Dd".to_owned()));
        assert_eq!(of("watch=true&sendInitialEvents=true"), (true, String::new()));
        for other in ["watch=true&resourceVersion=0", "limit=500", "watch=true&resourceVersion=7"] {
            assert_eq!(of(other), (false, other.to_owned()));
        }
    }

    fn map(name: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "n", "resourceVersion": "5"}})
    }

    type Frames = stream::BoxStream<'static, Result<Frame<Bytes>, BoxError>>;

    fn response(status: StatusCode, body: Frames) -> Response<StreamBody<Frames>> {
        let mut response = Response::new(StreamBody::new(body));
        *response.status_mut() = status;
        response
    }

    /// A part of a body, or the error by which it ends.
    type Part = Result<String, io::ErrorKind>;

    /// Body of these parts.
    fn body(parts: Vec<Part>) -> Frames {
        let frame =
            |part: Part| part.map(|text| Frame::data(Bytes::from(text))).map_err(|kind| io::Error::from(kind).into());
        stream::iter(parts).map(frame).boxed()
    }

    fn list_of(names: &[&str]) -> String {
        let items: Vec<_> = names.iter().map(|name| map(name)).collect();
        let metadata = json!({"resourceVersion": "6"});
        let list = json!({"kind": "ConfigMapList", "apiVersion": "v1", "metadata": metadata, "items": items});
        format!("{list:#}\n")
    }

    /// Watches the ConfigMaps of a server until they are listed. The server gives the lists these responses in turn, and the
    /// last one for ever. Returns the reported changes, the requests until then, and the metrics.
    async fn list(lists: Vec<(StatusCode, Vec<Part>)>) -> (Vec<String>, Vec<String>, String) {
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let server = service_fn({
            let requests = requests.clone();
            move |request: Request<Body>| {
                let mut requests = requests.lock();
                let per_part =
                    if request.extensions().get::<DeadlinePerPart>().is_some() { ", deadline per part" } else { "" };
                requests.push(request.uri().query().unwrap_or_default().to_owned() + per_part);
                if requests.last().unwrap().contains("watch=true") {
                    return ready(Ok::<_, BoxError>(response(StatusCode::OK, stream::pending().boxed())));
                }
                let turn = requests.iter().filter(|query| !query.contains("watch=true")).count();
                let (status, parts) = lists[turn.min(lists.len()) - 1].clone();
                ready(Ok(response(status, body(parts))))
            }
        });
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let events = recorder::Metrics::register(&mut registry);
        let writer = Writer::<ConfigMap>::default();
        let recorder = EventRecorder::new(events);
        let freshness = Freshness::new();
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
        let watch = tokio::spawn(watch::run(api, watcher::Config::default().labels("a=b"), cache, handler));
        let mut reported = Vec::new();
        while reported.last().is_none_or(|last| last != "listed") {
            reported.push(timeout(Duration::from_secs(600), changes.recv()).await.expect("a list").unwrap());
        }
        let watches = || requests.lock().iter().any(|query| query.contains("watch=true"));
        while !watches() {
            tokio::task::yield_now().await;
        }
        watch.abort();
        let names = reported.len() - 1;
        reported[..names].sort();
        let requests = requests.lock().clone();
        (reported, requests, registry.encode().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn list_is_a_consistent_read_without_a_limit_and_the_watch_begins_at_its_version() {
        let text = list_of(&["a", "b"]);
        let pieces = text.as_bytes().chunks(11).map(|piece| Ok(String::from_utf8(piece.to_vec()).unwrap())).collect();
        let (reported, requests, _) = list(vec![(StatusCode::OK, pieces)]).await;
        assert_eq!(reported, ["a", "b", "listed"]);
        let [first, watch] = &*requests else { panic!("{requests:?}") };
        assert_eq!(first, "labelSelector=a%3Db, deadline per part");
        assert!(watch.contains("resourceVersion=6") && watch.contains("labelSelector=a%3Db"), "{watch}");
        assert!(!watch.contains("sendInitialEvents"), "{watch}");
    }

    #[tokio::test(start_paused = true)]
    async fn refused_and_broken_lists_are_requested_again_and_counted() {
        let whole = list_of(&["a", "b"]);
        let status = json!({"kind": "Status", "apiVersion": "v1", "code": 500});
        let of = |text: &str| (StatusCode::OK, vec![Ok(text.to_owned())]);
        let lists = vec![
            (StatusCode::INTERNAL_SERVER_ERROR, vec![Ok(status.to_string())]),
            // It ends after the first object.
            of(&whole[..whole.rfind("\"b\"").unwrap()]),
            of(&whole.replace("\"6\"", "\"\"")),
            // The connection is lost: `kube` would resume a watch without an error.
            (StatusCode::OK, vec![Ok(whole.clone()), Err(io::ErrorKind::UnexpectedEof)]),
            // Each of these objects lacks its end, or is no valid JSON.
            of(&whole.replacen("\"n\"", "]", 1)),
            of(&whole.replacen("\"n\"", "n", 1)),
            of(&list_of(&["c"])),
        ];
        let start = Instant::now();
        let (reported, requests, metrics) = list(lists).await;
        assert_eq!(reported, ["c", "listed"], "nothing of a broken list is reported");
        let waited = start.elapsed();
        assert!(waited > Duration::from_secs(40), "the backoff grows: {waited:?}");
        assert_eq!(requests.len(), 8, "{requests:?}");
        assert!(metrics.contains(r#"kcp_watch_failures_total{kind="configmaps"} 6"#), "{metrics}");
    }
}
