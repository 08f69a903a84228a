//! Requests for the Manifests of one Kyma.

use futures::{StreamExt as _, stream};

/// Requests that run concurrently.
const AT_ONCE: usize = 4;

/// Runs requests, up to [`AT_ONCE`] concurrently. They are created before the stream: created inside it, their lifetimes are too
/// general for the compiler to infer `Send`.
pub(super) async fn run<F: Future>(requests: Vec<F>) -> Vec<F::Output> {
    stream::iter(requests).buffered(AT_ONCE).collect().await
}
