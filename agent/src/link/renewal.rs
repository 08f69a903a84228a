//! Certificate renewal beside events and heartbeats. The receiver responds when its issuer does, which may take long or
//! fail, so a renewal has a connection of its own, which closes with it; it holds no resources while idle.

use bytes::Bytes;
use tidewatch_shared::enrolment::{self, CERTIFICATES_PATH};

use super::{
    apply_clock_offset,
    client::{Client, PostRequest},
    post,
};
use crate::{
    clock,
    core::Core,
    identity::RenewalOrder,
    receiver::{BufferedResponse, RefusalAction, RequestError, classify_refusal},
    telemetry::{Metrics, Route},
};

/// Sends one renewal.
pub(super) struct RenewalSender {
    client: Client,
    core: Core,
    metrics: Metrics,
}

impl RenewalSender {
    /// A sender with the current identity and a dedicated connection.
    pub(super) const fn new(client: Client, core: Core, metrics: Metrics) -> Self {
        Self { client, core, metrics }
    }

    /// Sends the renewal and passes the response to the enroller. Only a clock refusal is handled here, by one retry.
    pub(super) async fn send(self, order: RenewalOrder) {
        let mut answer = self.post_once(&order.body).await;
        let action = answer.as_ref().ok().map(|answer| classify_refusal(answer, clock::unix_seconds()));
        if let Some(RefusalAction::Clock { offset }) = action {
            apply_clock_offset(&self.metrics, offset);
            answer = self.post_once(&order.body).await;
        }
        order.answer(answer);
    }

    async fn post_once(&self, body: &Bytes) -> Result<BufferedResponse, RequestError> {
        let (content_type, nonce) = (enrolment::CONTENT_TYPE, self.core.nonce());
        let request = PostRequest { path: CERTIFICATES_PATH, content_type, body: body.clone(), nonce };
        post(&self.client, &self.metrics, Route::Renewal, request).await
    }
}
