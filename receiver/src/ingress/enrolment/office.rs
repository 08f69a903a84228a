//! Issues to whoever has proven a runtime, by a token or by a certificate, and keeps the record.

use std::{fmt, net::IpAddr, sync::Arc, time::Duration};

use jiff::Timestamp;
use tidewatch_shared::{
    enrolment::{CertificateResponse, TrustResponse},
    identity::RuntimeId,
};
use tokio::time::Instant;

use super::{Metrics, Refused, Revocations, rates::Rates};
use crate::{
    base::key::KymaKey,
    fleet::hub::Hub,
    pki::{Authority, Request},
};

/// A runtime gets one certificate for each such time, in the long run: with the shortest lifetimes it needs one in some seconds.
const COST: Duration = Duration::from_secs(2);
/// And so many at once, for agents that start again and again.
const BURST: u32 = 10;
/// Runtimes that are counted.
const RUNTIMES: usize = 50_000;

/// By what a runtime was proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// A token.
    Enrolment,
    /// The certificate that is renewed.
    Renewal,
}

impl By {
    /// As metrics and logs name it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Enrolment => "enrolment",
            Self::Renewal => "renewal",
        }
    }
}

/// See the module. Clones are the same.
#[derive(Clone)]
pub struct Office(Arc<Inner>);

struct Inner {
    authority: Authority,
    hub: Hub,
    revocations: Revocations,
    rates: Rates<RuntimeId>,
    metrics: Metrics,
}

impl fmt::Debug for Office {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Office").finish_non_exhaustive()
    }
}

impl Office {
    /// `hub` knows the runtimes, `authority` issues.
    #[must_use]
    pub fn new(authority: Authority, hub: Hub, revocations: Revocations, metrics: Metrics) -> Self {
        let rates = Rates::new(COST, BURST, RUNTIMES);
        Self(Arc::new(Inner { authority, hub, revocations, rates, metrics }))
    }

    /// Serves a renewal: the runtime is proven by the certificate that it renews.
    ///
    /// # Errors
    /// [`Refused`].
    pub async fn renew(&self, runtime: &RuntimeId, request: &str) -> Result<CertificateResponse, Refused> {
        self.kyma(runtime)?;
        self.count(runtime)?;
        let request = self.request(request)?;
        self.issue(runtime, &request, By::Renewal, None).await
    }

    /// What agents shall trust now.
    #[must_use]
    pub fn trust(&self) -> TrustResponse {
        let trust = self.0.authority.trust().borrow().clone();
        TrustResponse { trust_bundle: trust.agents.to_pem(), trust_revision: trust.agents.revision().to_owned() }
    }

    /// The Kyma of a runtime that may have a certificate.
    pub(super) fn kyma(&self, runtime: &RuntimeId) -> Result<KymaKey, Refused> {
        let kyma = self.0.hub.placed(runtime)?;
        if self.0.revocations.names_runtime(runtime) { Err(Refused::Revoked) } else { Ok(kyma) }
    }

    /// Counts a certificate of a runtime that has been proven, so that nobody else can use up what is its own.
    pub(super) fn count(&self, runtime: &RuntimeId) -> Result<(), Refused> {
        self.0.rates.take(runtime.clone(), Instant::now()).map_err(Refused::Rate)
    }

    /// Reads a certificate request. Whatever it says of names and uses is not taken over; one for a CA is refused.
    #[expect(clippy::unused_self, reason = "part of what an office does")]
    pub(super) fn request(&self, pem: &str) -> Result<Request, Refused> {
        Ok(Request::from_pem(pem.as_bytes())?)
    }

    /// Issues, and keeps the record.
    pub(super) async fn issue(
        &self,
        runtime: &RuntimeId,
        request: &Request,
        by: By,
        address: Option<IpAddr>,
    ) -> Result<CertificateResponse, Refused> {
        let Inner { authority, metrics, .. } = &*self.0;
        let by = by.as_str();
        let issued = authority.issue(runtime, request).await.map_err(|error| {
            metrics.failed(error.as_str());
            tracing::warn!(%runtime, by, error = &error as &dyn std::error::Error, "A certificate was not issued");
            if error.is_of_request() { Refused::RequestNames } else { Refused::Issuer }
        })?;
        metrics.issued(by);
        let not_after = Timestamp::from_second(issued.not_after).unwrap_or_default();
        let (fingerprint, address) = (&*issued.fingerprint, address.map(tracing::field::display));
        tracing::info!(%runtime, fingerprint, %not_after, by, address, "Certificate issued");
        let TrustResponse { trust_bundle, trust_revision } = self.trust();
        Ok(CertificateResponse { chain: issued.chain, trust_bundle, trust_revision })
    }
}
