//! Issues certificates to runtimes that a token has authenticated, and logs each.

use std::{net::IpAddr, time::Duration};

use jiff::Timestamp;
use tidewatch_api::{identity::RuntimeId, key::KymaKey};
use tidewatch_contract::enrolment::{CertificateResponse, TrustResponse};
use tidewatch_kit::{log_error, variant::VariantName as _};
use tidewatch_trust::{IssueError, SigningRequest};
use tokio::time::Instant;

use super::{EnrolmentError, EnrolmentService, Inner, rate_limiter::RateLimiter};

/// Sustained interval between two certificates of a runtime; with the shortest validity it needs one every few seconds.
const COST: Duration = Duration::from_secs(2);
/// Burst of certificates of a runtime, for agents that restart repeatedly.
const BURST: u32 = 10;
/// Capacity of the rate limiter for runtimes.
const RUNTIMES: usize = 50_000;

/// Kind of an issuance, by the authentication of the runtime. The name is the label of metrics and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum IssuanceKind {
    /// Authenticated by a token.
    Enrolment,
    /// Authenticated by a token and the certificate that is renewed.
    Renewal,
}

/// Limits the certificates of each runtime.
pub(super) fn rate_limiter() -> RateLimiter<RuntimeId> {
    RateLimiter::new(COST, BURST, RUNTIMES)
}

impl EnrolmentService {
    /// Current roots for agents to trust.
    pub fn trust(&self) -> TrustResponse {
        let trust = self.0.authority.trust().borrow().clone();
        TrustResponse { trust_bundle: trust.agents.to_pem(), trust_revision: trust.agents.revision().to_owned() }
    }

    /// The Kyma of a runtime that is not revoked.
    pub(super) fn kyma(&self, runtime: &RuntimeId) -> Result<KymaKey, EnrolmentError> {
        let kyma = self.0.fleet.kyma_of(runtime)?;
        if self.0.revocations.revokes_runtime(runtime) { Err(EnrolmentError::Revoked) } else { Ok(kyma) }
    }

    /// Counts a certificate against the rate limit of an authenticated runtime, so that other clients cannot use it up.
    pub(super) fn count(&self, runtime: &RuntimeId) -> Result<(), EnrolmentError> {
        self.0.certificates.take(runtime.clone(), Instant::now()).map_err(EnrolmentError::Rate)
    }

    /// Issues a certificate, and logs it.
    pub(super) async fn issue(
        &self,
        runtime: &RuntimeId,
        request: &SigningRequest,
        by: IssuanceKind,
        address: Option<IpAddr>,
    ) -> Result<CertificateResponse, EnrolmentError> {
        let Inner { authority, metrics, .. } = &*self.0;
        let by = by.as_str();
        let issued = authority.issue(runtime, request).await.map_err(|error| {
            metrics.failed(error.as_str());
            log_error!(warn, &error, %runtime, by, "A certificate was not issued");
            // Only this one is a fault of the request, which retrying would not mend.
            if matches!(error, IssueError::Names) { EnrolmentError::RequestNames } else { EnrolmentError::Issuer }
        })?;
        metrics.issued(by);
        let not_after = Timestamp::from_second(issued.not_after).unwrap_or_default();
        let fingerprint = &*issued.fingerprint;
        let address = address.map(tracing::field::display);
        tracing::info!(%runtime, fingerprint, %not_after, by, address, "Certificate issued");
        let TrustResponse { trust_bundle, trust_revision } = self.trust();
        Ok(CertificateResponse { chain: issued.chain, trust_bundle, trust_revision })
    }
}
