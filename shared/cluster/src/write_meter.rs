//! Measures the writes of a reconcile to the control plane.

use std::cell::Cell;

use http::{Method, Request};
use http_body::Body;
use tokio::task_local;

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

/// Adds to the cost of the current reconcile; requests outside a reconcile are not counted.
pub fn charge(cost: u64) {
    COST.try_with(|total| total.set(total.get().saturating_add(cost))).ok();
}

/// Cost of a request; zero for a read.
pub(super) fn cost(request: &Request<impl Body>) -> u64 {
    match *request.method() {
        Method::GET | Method::HEAD => 0,
        _ => 1 + request.body().size_hint().lower() / BYTES_PER_UNIT,
    }
}
