//! Shared test fixtures: a fake API server, a client of one that is a function, contents of a cache, and a temporary
//! folder.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    reason = "test support"
)]

mod api_server;

use std::{convert::Infallible, fs, future, path::PathBuf, sync::Arc};

use bytes::Bytes;
use http::{Request, StatusCode, request::Parts};
use http_body_util::{BodyExt as _, Full};
use kube::{
    Client,
    client::Body,
    runtime::{
        reflector::{Lookup, store::Writer},
        watcher::Event,
    },
};
use serde::de::DeserializeOwned;
use serde_json::Value;

pub use self::api_server::{Admit, Cause, FakeApiServer, Fault, Response, merge};

/// Replaces the content of a cache by these objects, as a completed list does.
pub fn fill<K>(writer: &mut Writer<K>, objects: &[Value])
where
    K: Lookup + Clone + DeserializeOwned + 'static,
    K::DynamicType: Default + Clone + Eq + std::hash::Hash,
{
    writer.apply_watcher_event(&Event::Init);
    for object in objects {
        writer.apply_watcher_event(&Event::InitApply(serde_json::from_value(object.clone()).unwrap()));
    }
    writer.apply_watcher_event(&Event::InitDone);
}

/// Client of a server that computes each response from the request's head and body; `None` never responds.
pub fn client<A, T>(namespace: &str, answer: A) -> Client
where
    A: Fn(&Parts, &[u8]) -> Option<(StatusCode, T)> + Send + Sync + 'static,
    T: Into<Bytes>,
{
    let answer = Arc::new(answer);
    let service = tower::service_fn(move |request: Request<Body>| {
        let answer = answer.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            // Lets other tasks run between any two requests.
            tokio::task::yield_now().await;
            let Some((status, text)) = answer(&parts, &body) else { return future::pending().await };
            Ok::<_, Infallible>(http::Response::builder().status(status).body(Full::new(text.into())).unwrap())
        }
    });
    Client::new(service, namespace)
}

/// Temporary folder of one test, removed on drop.
pub struct Folder(
    /// Its path.
    pub PathBuf,
);

impl Folder {
    /// Makes an empty folder. The name must be unique among the tests of the crate.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tidewatch-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Writes a file, and returns its path.
    pub fn put(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
