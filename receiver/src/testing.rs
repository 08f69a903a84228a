//! What the tests of several rooms share: a control plane, or a runtime's API server, that is a function; a folder of files.

use std::{convert::Infallible, fs, future, path::PathBuf, sync::Arc};

use bytes::Bytes;
use http::{Request, Response, StatusCode, request::Parts};
use http_body_util::{BodyExt as _, Full};
use kube::{Client, client::Body};

/// A client of a server that answers each request from its head and its body, and never where there is no answer.
pub(crate) fn client<A, T>(namespace: &str, answer: A) -> Client
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
            // Others may come in between any two calls.
            tokio::task::yield_now().await;
            let Some((status, text)) = answer(&parts, &body) else { return future::pending().await };
            Ok::<_, Infallible>(Response::builder().status(status).body(Full::new(text.into())).unwrap())
        }
    });
    Client::new(service, namespace)
}

/// Files of one test, in a folder of their own until dropped.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    /// Empty. No two tests of the crate may use the same name.
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tidewatch-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Writes a file, and tells where it is.
    pub(crate) fn put(&self, name: &str, text: &str) -> PathBuf {
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
