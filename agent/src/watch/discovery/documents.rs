//! Discovery documents. Watches that need the same one at the same time share a request.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};

use crate::kubernetes::{Accept, ApiClient, ApiError};

/// Maximum size of a document in bytes. A group with a thousand custom kinds stays far below.
pub(super) const LIMIT: usize = 1 << 20;
/// Number of documents that are requested and held at a time.
const CONCURRENT: usize = 2;

/// A document; `None` if the API server responded with 404.
type Document = Option<Arc<[u8]>>;

/// Documents in flight; clones share them. Nothing is kept once its last reader has left.
#[derive(Clone)]
pub(super) struct Documents(Arc<Shared>);

struct Shared {
    in_flight: Mutex<BTreeMap<Box<str>, InFlight>>,
    permits: Semaphore,
}

/// Readers of one path.
#[derive(Default)]
struct InFlight {
    readers: usize,
    /// Requests begun since the first reader came.
    begun: u64,
    /// The last answer; locked by the reader that requests another one.
    answer: Arc<AsyncMutex<Option<Answer>>>,
}

/// An answer that readers share.
struct Answer {
    /// Number of its request.
    request: u64,
    /// An error that cannot be shared makes the next reader request the document itself.
    document: Option<Result<Document, ApiError>>,
}

/// A reader of one path, removed when dropped, also by a cancelled lookup.
struct Reader<'a> {
    documents: &'a Shared,
    path: &'a str,
    /// Requests that had begun when the reader came; their answers may be older than the cause of the lookup.
    begun_before: u64,
    answer: Arc<AsyncMutex<Option<Answer>>>,
}

impl Default for Documents {
    fn default() -> Self {
        Self(Arc::new(Shared { in_flight: Mutex::default(), permits: Semaphore::new(CONCURRENT) }))
    }
}

impl Documents {
    /// Reads a document by a request that begins after the call, of this reader or of another one.
    ///
    /// # Errors
    /// [`ApiError`]; a response with 404 is no error.
    pub(super) async fn read(&self, client: &ApiClient, path: &str) -> Result<Document, ApiError> {
        let reader = self.0.enter(path);
        let mut answer = reader.answer.lock().await;
        if let Some(shared) = answer.as_ref().and_then(|answer| reader.share(answer)) {
            return shared;
        }
        // The semaphore is never closed; if it were, the document would be read without a permit.
        let _permit = self.0.permits.acquire().await.ok();
        let request = reader.begin();
        let document = match client.get(path, Accept::Full, LIMIT).await {
            Ok(document) => Ok(Some(document.into())),
            Err(error) if error.status() == Some(http::StatusCode::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        };
        *answer = Some(Answer { request, document: copy(&document) });
        document
    }
}

impl Shared {
    fn with<R>(&self, work: impl FnOnce(&mut BTreeMap<Box<str>, InFlight>) -> R) -> R {
        work(&mut self.in_flight.lock())
    }

    fn enter<'a>(&'a self, path: &'a str) -> Reader<'a> {
        self.with(|in_flight| {
            let entry = in_flight.entry(path.into()).or_default();
            entry.readers += 1;
            Reader { documents: self, path, begun_before: entry.begun, answer: entry.answer.clone() }
        })
    }
}

impl Reader<'_> {
    /// Counts a request of this reader and returns its number.
    fn begin(&self) -> u64 {
        self.documents.with(|in_flight| {
            let Some(entry) = in_flight.get_mut(self.path) else { return 0 };
            entry.begun += 1;
            entry.begun
        })
    }

    /// The answer, unless its request began before this reader came.
    fn share(&self, answer: &Answer) -> Option<Result<Document, ApiError>> {
        let is_new = answer.request > self.begun_before;
        answer.document.as_ref().filter(|_| is_new).and_then(copy)
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.documents.with(|in_flight| {
            let Some(entry) = in_flight.get_mut(self.path) else { return };
            entry.readers -= 1;
            if entry.readers == 0 {
                in_flight.remove(self.path);
            }
        });
    }
}

/// A copy for another reader; `None` for errors with causes that cannot be copied.
fn copy(document: &Result<Document, ApiError>) -> Option<Result<Document, ApiError>> {
    match document {
        Ok(document) => Some(Ok(document.clone())),
        Err(error) => error.copy().map(Err),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering::Relaxed};

    use bytes::Bytes;
    use futures::future::{BoxFuture, join_all};
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
            // The request of the first reader began before the others came.
            for (answer, number) in answers.into_iter().zip([&b"1"[..]].into_iter().chain([&b"2"[..]].repeat(499))) {
                match status {
                    200 => assert_eq!(answer.unwrap().as_deref(), Some(number)),
                    404 => assert_eq!(answer.unwrap(), None),
                    status => assert_eq!(answer.unwrap_err().status().unwrap(), status),
                }
            }
            assert_eq!(server.requests.load(Relaxed), 2);
            assert!(documents.0.in_flight.lock().is_empty(), "nothing is kept");
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
    async fn cancelled_request_is_replaced_by_that_of_the_next_reader() {
        let (server, client, documents) = server(200);
        let half = std::time::Duration::from_millis(500);
        let cancelled = tokio::time::timeout(half, documents.read(&client, "/apis/g/v1"));
        let (cancelled, next) = tokio::join!(cancelled, documents.read(&client, "/apis/g/v1"));
        assert!(cancelled.is_err());
        assert_eq!((next.unwrap().as_deref(), server.requests.load(Relaxed)), (Some(&b"2"[..]), 2));
        assert!(documents.0.in_flight.lock().is_empty());
    }
}
