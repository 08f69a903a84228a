//! A renewal of the certificate, beside events and heartbeats: the receiver answers when its issuer does, and an issuer may take its
//! time, or none at all answer. So it has a connection of its own, which ends with it; nothing of it is held at rest.

use bytes::Bytes;
use tidewatch_shared::enrolment::{self, CERTIFICATES_PATH};

use super::{
    client::{Answer, Client, Fault, Post},
    post, take_clock,
    verdict::{Verdict, judge},
};
use crate::{
    clock,
    core::Core,
    identity::Order,
    telemetry::{Metrics, Route},
};

/// Carries one renewal.
pub(super) struct Carrier {
    client: Client,
    core: Core,
    metrics: Metrics,
}

impl Carrier {
    /// With the identity that is in use, on a connection that nobody else uses.
    pub(super) const fn new(client: Client, core: Core, metrics: Metrics) -> Self {
        Self { client, core, metrics }
    }

    /// What the answer means is not for us to say, but for its clock.
    pub(super) async fn carry(self, order: Order) {
        let mut answer = self.ask(&order.body).await;
        let verdict = answer.as_ref().ok().map(|answer| judge(answer, clock::unix_seconds()));
        if let Some(Verdict::Clock { offset }) = verdict {
            take_clock(&self.metrics, offset);
            answer = self.ask(&order.body).await;
        }
        order.answer(answer);
    }

    async fn ask(&self, body: &Bytes) -> Result<Answer, Fault> {
        let (content_type, nonce) = (enrolment::CONTENT_TYPE, self.core.nonce());
        let request = Post { path: CERTIFICATES_PATH, content_type, body: body.clone(), nonce };
        post(&self.client, &self.metrics, Route::Renewal, request).await
    }
}
