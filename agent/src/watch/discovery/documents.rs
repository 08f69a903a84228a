//! Discovery documents. Watches that need the same one at the same time share a request.

use std::{collections::BTreeMap, sync::Arc};

use futures::{
    FutureExt as _,
    future::{BoxFuture, Shared, WeakShared},
};
use http::StatusCode;
use parking_lot::Mutex;
use tokio::{sync::Semaphore, task::yield_now};

use crate::kubernetes::{Accept, ApiClient, ApiError};

/// Maximum size of a document in bytes. A group with a thousand custom kinds stays far below.
pub(super) const LIMIT: usize = 1 << 20;
/// Number of documents that are requested and held at a time.
const CONCURRENT: usize = 2;

/// A document; `None` if the API server responded with 404.
type Document = Option<Arc<[u8]>>;

/// A request whose readers share its answer.
type Request = BoxFuture<'static, Arc<Result<Document, ApiError>>>;

/// Requests for documents; clones share them. Nothing is kept once the last reader of a document has left.
#[derive(Clone)]
pub(super) struct Documents(Arc<Requests>);

struct Requests {
    /// Requests that have not begun, by path. Each is kept by its readers alone.
    waiting: Mutex<BTreeMap<Box<str>, WeakShared<Request>>>,
    permits: Semaphore,
}

impl Default for Documents {
    fn default() -> Self {
        Self(Arc::new(Requests { waiting: Mutex::default(), permits: Semaphore::new(CONCURRENT) }))
    }
}

impl Documents {
    /// Reads a document by a request that begins after the call: the answer to an earlier one may be older than the cause
    /// of the lookup.
    ///
    /// # Errors
    /// [`ApiError`]; a response with 404 is no error.
    pub(super) async fn read(&self, client: &ApiClient, path: &str) -> Result<Document, ApiError> {
        match &*self.request(client, path).await {
            Ok(document) => Ok(document.clone()),
            Err(error) => Err(error.copy()),
        }
    }

    /// The request for a path that has not begun yet, or a new one.
    fn request(&self, client: &ApiClient, path: &str) -> Shared<Request> {
        let mut waiting = self.0.waiting.lock();
        // Those whose readers were all cancelled.
        waiting.retain(|_, request| request.upgrade().is_some());
        if let Some(request) = waiting.get(path).and_then(WeakShared::upgrade) {
            return request;
        }
        let request = self.0.clone().send(client.clone(), path.into()).boxed().shared();
        if let Some(kept) = request.downgrade() {
            waiting.insert(path.into(), kept);
        }
        request
    }
}

impl Requests {
    async fn send(self: Arc<Self>, client: ApiClient, path: Box<str>) -> Arc<Result<Document, ApiError>> {
        // All readers that come at the same time share the request.
        yield_now().await;
        // The semaphore is never closed; if it were, the document would be read without a permit.
        let _permit = self.permits.acquire().await.ok();
        self.waiting.lock().remove(&path);
        let document = match client.get(&path, Accept::Full, LIMIT).await {
            Ok(document) => Ok(Some(document.into())),
            Err(error) if error.status() == Some(StatusCode::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        };
        Arc::new(document)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering::Relaxed};

    use bytes::Bytes;
    use futures::future::join_all;
    use http::{Request, Response};
    use http_body_util::{BodyExt, Full};

    use super::*;
    use crate::kubernetes::{Body, Transport};

    /// Counts requests, each of which takes a second.
    #[derive(Clone, Default)]
    struct Server {
        requests: Arc<AtomicUsize>,
        status: Arc<AtomicU16>,
    }

    impl Transport for Server {
        fn send(
            &self,
            _: Request<Full<Bytes>>,
        ) -> BoxFuture<'static, Result<Response<Body>, Box<dyn std::error::Error + Send + Sync>>> {
            let number = self.requests.fetch_add(1, Relaxed) + 1;
            let status = self.status.load(Relaxed);
            Box::pin(async move {
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                let body = Full::new(Bytes::from(number.to_string())).map_err(Into::into).boxed_unsync();
                Ok(Response::builder().status(status).body(body).unwrap())
            })
        }
    }

    fn server(status: u16) -> (Server, ApiClient, Documents) {
        let server = Server::default();
        server.status.store(status, Relaxed);
        (server.clone(), ApiClient::new(server), Documents::default())
    }

    #[tokio::test(start_paused = true)]
    async fn readers_at_the_same_time_share_requests() {
        for status in [200, 404, 429] {
            let (server, client, documents) = server(status);
            let answers = join_all((0..500).map(|_| documents.read(&client, "/apis/g/v1"))).await;
            for answer in answers {
                match status {
                    200 => assert_eq!(answer.unwrap().as_deref(), Some(&b"1"[..])),
                    404 => assert_eq!(answer.unwrap(), None),
                    status => assert_eq!(answer.unwrap_err().status().unwrap(), status),
                }
            }
            assert_eq!(server.requests.load(Relaxed), 1);
            assert!(documents.0.waiting.lock().is_empty(), "nothing is kept");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn reader_does_not_use_a_request_that_began_before_it_came() {
        let (server, client, documents) = server(200);
        let first = documents.read(&client, "/apis/g/v1");
        let later = async {
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
            join_all((0..9).map(|_| documents.read(&client, "/apis/g/v1"))).await
        };
        let (first, later) = tokio::join!(first, later);
        assert_eq!(first.unwrap().as_deref(), Some(&b"1"[..]));
        assert!(later.into_iter().all(|answer| answer.unwrap().as_deref() == Some(b"2")));
        assert_eq!(server.requests.load(Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn cancelled_reader_leaves_the_request_to_the_others() {
        let (server, client, documents) = server(200);
        let half = std::time::Duration::from_millis(500);
        let cancelled = tokio::time::timeout(half, documents.read(&client, "/apis/g/v1"));
        let (cancelled, next) = tokio::join!(cancelled, documents.read(&client, "/apis/g/v1"));
        assert!(cancelled.is_err());
        assert_eq!((next.unwrap().as_deref(), server.requests.load(Relaxed)), (Some(&b"1"[..]), 1));
        assert!(documents.0.waiting.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn request_without_readers_is_dropped() {
        let (server, client, documents) = server(200);
        drop(documents.request(&client, "/apis/g/v1"));
        assert_eq!(documents.read(&client, "/apis/other/v1").await.unwrap().as_deref(), Some(&b"1"[..]));
        assert_eq!(server.requests.load(Relaxed), 1);
        assert!(documents.0.waiting.lock().is_empty());
    }
}
