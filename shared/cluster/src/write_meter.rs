//! Measures the writes of a reconcile to the control plane.

use std::{
    cell::Cell,
    task::{Context, Poll},
};

use futures::{FutureExt as _, future::BoxFuture};
use http::{Method, Request};
use http_body::Body;
use tokio::task_local;
use tower::{Layer, Service, layer::layer_fn};

/// Bytes of a write's body that cost as much as a write without one.
const BYTES_PER_UNIT: u64 = 4 << 10;

task_local! {
    /// Cost of the writes of the current reconcile.
    static COST: Cell<u64>;
}

/// Runs a reconcile. Returns its result with the cost of its writes to the control plane: for each, one, and one more for
/// every full 4 KiB of its body.
pub async fn metered<F: Future>(reconcile: F) -> (F::Output, u64) {
    let reconcile = async {
        let result = reconcile.await;
        (result, COST.with(Cell::get))
    };
    COST.scope(Cell::new(0), reconcile).await
}

/// Layer of a client whose writes [`metered`] counts.
pub(super) fn layer<S>() -> impl Layer<S, Service = Metered<S>> + Clone {
    layer_fn(Metered)
}

/// See [`layer`].
#[derive(Clone, Debug)]
pub(super) struct Metered<S>(S);

impl<S, B> Service<Request<B>> for Metered<S>
where
    S: Service<Request<B>>,
    S::Future: Send + 'static,
    B: Body,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let cost = cost(&request);
        let response = self.0.call(request);
        // kube calls the service in a task of its own, and polls the response in that of the reconcile.
        async move {
            charge(cost);
            response.await
        }
        .boxed()
    }
}

/// Adds to the cost of the current reconcile; requests outside a reconcile are not counted.
pub fn charge(cost: u64) {
    COST.try_with(|total| total.set(total.get().saturating_add(cost))).ok();
}

fn cost(request: &Request<impl Body>) -> u64 {
    match *request.method() {
        Method::GET | Method::HEAD => 0,
        _ => 1 + request.body().size_hint().lower() / BYTES_PER_UNIT,
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::Full;
    use hyper::body::Bytes;
    use tower::{ServiceBuilder, ServiceExt as _, buffer::Buffer, service_fn};

    use super::*;

    #[tokio::test]
    async fn writes_of_a_reconcile_are_counted_with_their_size_behind_a_buffer() {
        let server = service_fn(async |_: Request<Full<Bytes>>| Ok::<_, Infallible>(()));
        let client = Buffer::new(ServiceBuilder::new().layer(layer()).service(server), 8);
        let send = async |method: Method, bytes: usize| {
            let request = Request::builder().method(method).body(Full::from(vec![0; bytes])).unwrap();
            client.clone().oneshot(request).await.unwrap();
        };
        let ((), nothing) = metered(async { send(Method::GET, 0).await }).await;
        let ((), one) = metered(send(Method::DELETE, 0)).await;
        let (result, several) = metered(async {
            send(Method::POST, 4_095).await;
            send(Method::PATCH, 9_000).await;
            send(Method::GET, 0).await;
            "result"
        })
        .await;
        assert_eq!((nothing, one, several, result), (0, 1, 4, "result"));
        // Outside a reconcile.
        send(Method::PUT, 1).await;
    }
}
