//! What the tests of several rooms share: a control plane, or a runtime's API server, that is a function.

use std::{convert::Infallible, future, sync::Arc};

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
