//! Certificate renewal beside events and heartbeats. The receiver responds when its issuer does, which may take long or
//! fail, so a renewal has a connection of its own, which closes with it; it holds no resources while idle.

use tidewatch_contract::enrolment::{self, CERTIFICATES_PATH};

use super::{
    apply_clock_offset,
    client::{Client, PostRequest},
    post,
};
use crate::{
    clock,
    core::Core,
    identity::RenewalOrder,
    receiver::{RefusalAction, classify_refusal},
    telemetry::{Metrics, Route},
};

/// Sends a renewal over `client`, which is not used otherwise, and passes the response to the enroller. Only a clock
/// refusal is handled here, by one retry.
pub(super) async fn send(client: Client, core: Core, metrics: Metrics, order: RenewalOrder) {
    let post_once = || {
        let content_type = enrolment::CONTENT_TYPE;
        let nonce = core.nonce();
        let request = PostRequest { path: CERTIFICATES_PATH, content_type, body: order.body.clone(), nonce };
        post(&client, &metrics, Route::Renewal, request)
    };
    let mut response = post_once().await;
    let action = response.as_ref().ok().map(|response| classify_refusal(response, clock::unix_seconds()));
    if let Some(RefusalAction::Clock { offset }) = action {
        apply_clock_offset(&metrics, offset);
        response = post_once().await;
    }
    order.complete(response);
}
