//! Watches: each response contains the changes since a resourceVersion and ends, like one whose time is over.

use std::{convert::Infallible, future, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, StatusCode, request::Parts};
use http_body_util::{BodyExt as _, Full};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::{sync::Notify, time::sleep};
use tower::Service;

use super::{FakeApiServer, Fault, Response, State, failure, object_id, parameter};

/// All changes of the objects, in order.
#[derive(Default)]
pub(super) struct ChangeLog {
    /// The resourceVersion, the kind, and the event.
    changes: Vec<(u64, String, Value)>,
    added: Arc<Notify>,
}

impl ChangeLog {
    pub(super) fn add(&mut self, version: u64, event: &str, id: &str, object: &Value) {
        let plural = id.split('/').next().unwrap_or_default().to_owned();
        let mut object = object.clone();
        object["metadata"]["resourceVersion"] = version.to_string().into();
        self.changes.push((version, plural, json!({"type": event, "object": object})));
        self.added.notify_waiters();
    }
}

/// Service of the requests of a client, with watches.
pub(super) fn service(
    server: FakeApiServer,
) -> impl Service<Request<Body>, Response = http::Response<Full<Bytes>>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    tower::service_fn(move |request: Request<Body>| {
        let server = server.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            // Lets other tasks run between any two requests.
            tokio::task::yield_now().await;
            let one_way = server.0.lock().round_trip / 2;
            travel(one_way).await;
            let response = match is_watch(&parts) {
                true => Some(server.watch(&parts).await),
                false => server.respond(&parts, &body),
            };
            let Some((status, text)) = response else { return future::pending().await };
            travel(one_way).await;
            let body = Full::new(Bytes::from(text));
            Ok::<_, Infallible>(http::Response::builder().status(status).body(body).unwrap())
        }
    })
}

/// Without a distance nothing changes the order of the requests.
async fn travel(time: Duration) {
    if !time.is_zero() {
        sleep(time).await;
    }
}

fn is_watch(parts: &Parts) -> bool {
    let watch = parameter(parts.uri.query().unwrap_or_default(), "watch");
    parts.method == Method::GET && watch.is_some_and(|watch| watch == "true" || watch == "1")
}

impl FakeApiServer {
    /// Waits for changes after the request's resourceVersion.
    async fn watch(&self, parts: &Parts) -> Response {
        let added = self.0.lock().log.added.clone();
        loop {
            let notified = added.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if let Some(response) = self.0.lock().changes(parts) {
                return response;
            }
            notified.await;
        }
    }
}

impl State {
    fn changes(&self, parts: &Parts) -> Option<Response> {
        if self.fault == Fault::Unresponsive {
            return None;
        }
        let (plural, _) = object_id(parts.uri.path());
        if let Some(status) = self.refusal(&format!("GET {plural}"), &plural, &plural, &Method::GET) {
            return Some(failure(status, ""));
        }
        let from = parameter(parts.uri.query().unwrap_or_default(), "resourceVersion");
        let from = from.and_then(|version| version.parse().ok()).unwrap_or(0);
        let new = self.log.changes.iter().filter(|(version, kind, _)| *version > from && *kind == plural);
        let text: String = new.map(|(.., event)| format!("{event}\n")).collect();
        (!text.is_empty()).then_some((StatusCode::OK, text))
    }
}
