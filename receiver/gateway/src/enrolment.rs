//! Certificates for agents: enrolment by a token that the runtime's own API server verifies, renewal by such a token
//! and the current certificate, and revocation of certificates and runtimes.
//!
//! An enrolment and a renewal pass these checks; the first failure ends it. Unauthenticated requests cost the runtime nothing: its
//! keys are fetched at most once a minute, and a token is reviewed only if one of those keys signed it.
//!
//! 1. the request: route, length, one bearer token, JSON (`ports::enrol`)
//! 2. the runtime belongs to a Kyma, and is not revoked (`issuance`)
//! 3. the claims of the token: algorithm, audience, time, account, pod (`token`)
//! 4. the signature of the token, by that runtime's issuer (`keys`)
//! 5. the rate limit of that runtime, which only its own agent can use up
//! 6. the certificate request is signed by its own key, which is on P-256, and is not for a CA
//! 7. the TokenReview of that runtime's API server (`review`)
//! 8. the certificate is issued and logged
//!
//! A renewal needs the token because a certificate is no proof of being the agent: a stolen one could be renewed for
//! ever, and the agent of a cluster that a Kyma has left would keep speaking for it. A token that the runtime rejects
//! ends the certificate that was to be renewed.
//!
//! The same request with the same token may be repeated, for example because the response was lost, or by an attacker
//! that read both. It is served again: the certificate has the same runtime and the same key, and is useless without
//! that key. A replay only costs this receiver and that runtime some work, within the rate limit.

mod issuance;
mod jwks;
mod keys;
mod metrics;
mod rate_limiter;
mod review;
mod revocations;
mod token;

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    sync::Arc,
    time::Duration,
};

use clap::Args;
use kube::Client;
use thiserror::Error;
use tidewatch_api::{
    identity::{RuntimeId, TrustDomain},
    key::KymaKey,
};
use tidewatch_cluster::{flags::connections, runtime_access::ClientError};
use tidewatch_contract::{
    certificate::Leaf,
    enrolment::{CertificateRequest, CertificateResponse, RenewalRequest},
};
use tidewatch_fleet::table::{PlacementError, RuntimeTable};
use tidewatch_trust::{Authority, ParseRequestError, SigningRequest};
use tokio::{
    runtime::Handle,
    sync::Semaphore,
    time::{Instant, timeout},
};
use tokio_util::task::AbortOnDropHandle;

pub use issuance::IssuanceKind;
pub use jwks::{KeySet, MAX_BYTES as MAX_KEY_SET_BYTES, ParseKeySetError};
pub use metrics::Metrics;
pub use revocations::{CONFIG_MAP, LeafRefusal, Revocations};
pub use token::{Token, TokenError};

use crate::source::network;
use keys::KeyCache;
use rate_limiter::RateLimiter;

/// Open connections of the enrolment port by default.
pub const MAX_CONNECTIONS: u32 = 4_096;
/// Concurrent calls to runtimes for keys and token reviews.
const MAX_CONCURRENT_CALLS: usize = 256;
/// Timeout of a call to a runtime, from the wait for its slot to the last byte of the response.
const CALL_DEADLINE: Duration = Duration::from_secs(5);
/// Burst of enrolments of one address, where addresses are limited.
const ADDRESS_BURST: u32 = 20;
/// Capacity of the rate limiter for addresses.
const MAX_ADDRESSES: usize = 50_000;

/// Flags of the enrolment port.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Enrolment")]
pub struct Flags {
    /// Listen address for enrolment, if this receiver issues the agents' certificates: TLS without client certificates
    #[arg(long, env = "TIDEWATCH_ENROLMENT_ADDRESS", default_value = "[::]:8444")]
    pub enrolment_address: SocketAddr,

    /// Maximum number of open connections of the enrolment port, fewer under a low limit of open files; further ones wait
    /// in the kernel's backlog
    #[arg(long, env = "TIDEWATCH_ENROLMENT_MAX_CONNECTIONS", value_name = "CONNECTIONS", default_value_t = MAX_CONNECTIONS, value_parser = connections())]
    pub enrolment_max_connections: u32,

    /// Maximum number of enrolments per minute of one address, or /64 network with IPv6; unset where a load balancer or
    /// NAT hides the source address, since one client could lock out all others
    #[arg(long, env = "TIDEWATCH_ENROLMENT_LIMIT_BY_ADDRESS")]
    pub enrolment_limit_by_address: Option<NonZeroU32>,
}

/// Reason for which a runtime gets no certificate, of a closed set.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum EnrolmentError {
    /// The runtime belongs to no Kyma, or that is not known yet.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The runtime is in the revocation list.
    #[error("the runtime is revoked")]
    Revoked,
    /// The token is invalid.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// A renewal without a token.
    #[error("the renewal has no token")]
    Unattested,
    /// The token cannot be reviewed: the runtime has no usable kubeconfig.
    #[error("this receiver has no access to the runtime")]
    NoAccess,
    /// The call to the runtime failed, or the runtime was replaced in the meantime, or its kubeconfig is not in the cache yet.
    #[error("the call to the runtime failed")]
    Unreachable,
    /// The runtime exceeds its rate of certificates; the time to wait.
    #[error("the runtime requests too many certificates")]
    Rate(Duration),
    /// The address exceeds its rate of enrolments; the time to wait.
    #[error("too many enrolments come from this address")]
    Address(Duration),
    /// The certificate request is not valid.
    #[error(transparent)]
    Request(#[from] ParseRequestError),
    /// The certificate request has other names than its runtime's, which the issuer would sign.
    #[error("the certificate request does not name exactly its runtime")]
    RequestNames,
    /// The issuer did not issue.
    #[error("the issuer did not issue")]
    Issuer,
}

/// Returns the client of a Kyma's runtime, with a revision that is unique for each kubeconfig.
pub type RuntimeClients = Box<dyn Fn(&KymaKey) -> Result<(Client, u64), ClientError> + Send + Sync>;

/// Handles enrolments; clones share it.
#[derive(Clone)]
pub struct EnrolmentService(Arc<Inner>);

struct Inner {
    authority: Authority,
    fleet: RuntimeTable,
    revocations: Revocations,
    runtimes: RuntimeClients,
    keys: KeyCache,
    calls: RuntimeCalls,
    certificates: RateLimiter<RuntimeId>,
    addresses: Option<RateLimiter<IpAddr>>,
    metrics: Metrics,
    /// Audience of the tokens.
    audience: String,
    /// Executor of the calls to runtimes: the first call spawns the task that serves the runtime's client from then on,
    /// which must not run on the threads of a port that any client can flood.
    handle: Handle,
}

impl EnrolmentService {
    /// Creates the service of a trust domain. `fleet` provides the runtimes, `authority` issues; calls to `runtimes` run on
    /// the current tokio executor.
    pub fn new(
        flags: &Flags,
        domain: &TrustDomain,
        authority: Authority,
        fleet: RuntimeTable,
        revocations: Revocations,
        runtimes: RuntimeClients,
        metrics: Metrics,
    ) -> Self {
        let addresses = flags.enrolment_limit_by_address.map(|most| {
            RateLimiter::new(Duration::from_secs(60) / most.get(), ADDRESS_BURST.min(most.get()), MAX_ADDRESSES)
        });
        Self(Arc::new(Inner {
            authority,
            fleet,
            revocations,
            runtimes,
            keys: KeyCache::default(),
            calls: RuntimeCalls { slots: Semaphore::new(MAX_CONCURRENT_CALLS), metrics: metrics.clone() },
            certificates: issuance::rate_limiter(),
            addresses,
            metrics,
            audience: domain.token_audience(),
            handle: Handle::current(),
        }))
    }

    /// Counts an enrolment against the rate limit of its address, before any other check.
    ///
    /// # Errors
    /// [`EnrolmentError::Address`].
    pub fn admit(&self, address: Option<IpAddr>) -> Result<(), EnrolmentError> {
        match (&self.0.addresses, address) {
            (Some(addresses), Some(address)) => {
                addresses.take(network(address), Instant::now()).map_err(EnrolmentError::Address)
            }
            _ => Ok(()),
        }
    }

    /// Checks an enrolment and issues the certificate. Ends within half a minute.
    ///
    /// # Errors
    /// [`EnrolmentError`].
    pub async fn enrol(
        &self,
        token: &str,
        request: &CertificateRequest,
        address: Option<IpAddr>,
    ) -> Result<CertificateResponse, EnrolmentError> {
        self.attest(token, request, IssuanceKind::Enrolment, address).await
    }

    /// Serves a renewal of a runtime that its current certificate authenticates. Ends within half a minute. A token
    /// that is not one of the runtime's agent ends that certificate.
    ///
    /// # Errors
    /// [`EnrolmentError`].
    pub async fn renew(&self, request: &RenewalRequest, leaf: &Leaf) -> Result<CertificateResponse, EnrolmentError> {
        let token = request.token.as_deref().ok_or(EnrolmentError::Unattested)?;
        let result = self.attest(token, &request.certificate, IssuanceKind::Renewal, None).await;
        if let Err(EnrolmentError::Token(error)) = &result
            && error.is_foreign()
        {
            let runtime = &request.certificate.runtime;
            let fingerprint = leaf.fingerprint.clone();
            self.0.revocations.refuse_leaf(runtime, fingerprint, leaf.not_after, LeafRefusal::Token);
        }
        result
    }

    async fn attest(
        &self,
        token: &str,
        request: &CertificateRequest,
        kind: IssuanceKind,
        address: Option<IpAddr>,
    ) -> Result<CertificateResponse, EnrolmentError> {
        // Checks without any call are made on the current executor.
        let kyma = self.kyma(&request.runtime)?;
        let read = Token::read(token, &self.0.audience, jiff::Timestamp::now().as_second())?;
        if let Some(verified) = self.0.keys.verify_cached(&self.0.runtimes, &kyma, &read) {
            verified?;
        }
        let this = self.clone();
        let token = token.to_owned();
        let request = request.clone();
        // Another replica decides on the runtime once its shard is released.
        let tenure = self.0.fleet.tenures()(&kyma);
        let evaluation = async move {
            let evaluated = tenure.run(this.evaluate(kyma, &token, &request, kind, address)).await;
            evaluated.unwrap_or(Err(EnrolmentError::Placement(PlacementError::Elsewhere)))
        };
        let evaluation = self.0.handle.spawn(evaluation);
        AbortOnDropHandle::new(evaluation).await.unwrap_or_else(|error| {
            tracing::error!(%error, "The task of an enrolment failed");
            Err(EnrolmentError::Unreachable)
        })
    }

    async fn evaluate(
        &self,
        kyma: KymaKey,
        token: &str,
        request: &CertificateRequest,
        kind: IssuanceKind,
        address: Option<IpAddr>,
    ) -> Result<CertificateResponse, EnrolmentError> {
        let Inner { runtimes, keys, calls, audience, .. } = &*self.0;
        let read = Token::read(token, audience, jiff::Timestamp::now().as_second())?;
        let (client, revision) = keys.verify(runtimes, &kyma, &read, calls).await?;
        self.count(&request.runtime)?;
        // Before the token review, because a request that cannot be served is not worth a call to the runtime.
        let signing_request = SigningRequest::from_pem(request.request.as_bytes())?;
        review::review(&kyma, client, token, audience, &read.pod, calls).await?;
        // The review counts only if the Kyma and its cluster are still the same.
        let is_same =
            self.kyma(&request.runtime)? == kyma && runtimes(&kyma).is_ok_and(|(_, current)| current == revision);
        if !is_same {
            return Err(EnrolmentError::Unreachable);
        }
        self.issue(&request.runtime, &signing_request, kind, address).await
    }
}

/// Calls to runtimes, limited in number and counted.
struct RuntimeCalls {
    slots: Semaphore,
    metrics: Metrics,
}

impl RuntimeCalls {
    /// Makes a call; `None` if it exceeds [`CALL_DEADLINE`]. `name` is its metric label.
    async fn make<T, E>(&self, name: &'static str, call: impl Future<Output = Result<T, E>>) -> Option<Result<T, E>> {
        let result = timeout(CALL_DEADLINE, async {
            // The semaphore is never closed.
            let _slot = self.slots.acquire().await;
            call.await
        });
        let result = result.await.ok();
        self.metrics.called(name, if matches!(result, Some(Ok(_))) { "answered" } else { "failed" });
        result
    }
}

#[cfg(test)]
pub(crate) mod tests;
