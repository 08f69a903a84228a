//! Who gets a certificate: enrolment by a token that the runtime's own API server vouches for, renewal
//! over the certificate that is renewed, and the revocation of either.
//!
//! An enrolment goes this way, and the first refusal ends it. What anybody could send costs the runtime nothing: it is asked for its
//! keys at most once a minute, and about a token only if one of those keys has signed it.
//!
//! 1. the request: route, length, one bearer token, JSON (`gateway`)
//! 2. the runtime is a Kyma's, and not revoked ([`Office`])
//! 3. the token says the right things: algorithm, audience, time, account, pod (`token`)
//! 4. the token is signed by that runtime's issuer (`keys`)
//! 5. the rate of that runtime, which so only its own agent uses up
//! 6. the certificate request is signed by its own key, which is on P-256, and asks for no CA
//! 7. that runtime's API server says whose token it is (`review`)
//! 8. the certificate, and a record of it
//!
//! The same request with the same token may come again, for example because the first answer was lost, or because somebody has read both.
//! It is served again: the certificate names the same runtime and the same key, and without that key it is of no use. All that can be
//! gained by it is work for this receiver and that runtime, which the rate bounds.

mod jwks;
mod keys;
mod metrics;
mod office;
mod rates;
mod review;
mod revocations;
mod token;

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    num::NonZeroU32,
    sync::Arc,
    time::Duration,
};

use clap::Args;
use kube::Client;
use thiserror::Error;
use tidewatch_shared::enrolment::{CertificateRequest, CertificateResponse};
use tokio::{runtime::Handle, sync::Semaphore, time::Instant};
use tokio_util::task::AbortOnDropHandle;

pub use jwks::{Keys, MAX_BYTES as MAX_KEYS_BYTES, ParseKeys};
pub use metrics::Metrics;
pub use office::{By, Office};
pub use revocations::{CONFIG_MAP, Revocations};
pub use token::{InvalidToken, Token};

use crate::{
    base::key::KymaKey,
    fleet::hub::Unplaced,
    kube::runtime_access::{RuntimeAccess, Unusable},
    pki::ParseRequest,
};
use keys::KeyCache;
use rates::Rates;

/// Runtimes that are asked about keys and tokens at the same time.
const CALLS: usize = 256;
/// Enrolments of one address at once, after a silence, where addresses are limited.
const BURST_OF_ADDRESS: u32 = 20;
/// Addresses that are counted.
const ADDRESSES: usize = 50_000;

/// Where runtimes enrol.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct Flags {
    /// Where agents enrol, if this receiver issues their certificates: TLS, without client certificates.
    #[arg(long, env = "TIDEWATCH_ENROLMENT_ADDRESS", default_value = "0.0.0.0:8444")]
    pub enrolment_address: SocketAddr,

    /// Enrolments of one address in one minute, at most (of a /64 with IPv6). Only where the source address is real: behind a load
    /// balancer or NAT that hides it, one could lock out all.
    #[arg(long, env = "TIDEWATCH_ENROLMENT_LIMIT_BY_ADDRESS")]
    pub enrolment_limit_by_address: Option<NonZeroU32>,
}

/// Why a runtime gets no certificate: a closed set.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Refused {
    /// The runtime is no Kyma's, or nobody knows yet.
    #[error(transparent)]
    Unplaced(#[from] Unplaced),
    /// The runtime stands in the revocation list.
    #[error("the runtime is revoked")]
    Revoked,
    /// The token proves nothing.
    #[error(transparent)]
    Token(#[from] InvalidToken),
    /// Nobody can be asked about the token: the runtime has no usable kubeconfig.
    #[error("this receiver has no access to the runtime")]
    NoAccess,
    /// The runtime could not be asked about the token, or was replaced meanwhile.
    #[error("the runtime could not be asked")]
    Unreachable,
    /// More certificates than one runtime may get; how long until the next.
    #[error("the runtime asks for too many certificates")]
    Rate(Duration),
    /// More enrolments than one address may begin; how long until the next.
    #[error("too many enrolments come from this address")]
    Address(Duration),
    /// The certificate request is no PKCS#10, or too large.
    #[error("the certificate request is not readable")]
    Request,
    /// The certificate request is for a key that is not on P-256.
    #[error("the certificate request's key is not P-256")]
    RequestKey,
    /// Whoever asks does not hold the key.
    #[error("the certificate request's signature does not verify")]
    RequestSignature,
    /// The certificate request asks for a certificate that could sign others.
    #[error("the certificate request asks for a certificate authority")]
    RequestAuthority,
    /// The certificate request names somebody else, and the issuer signs what it says.
    #[error("the certificate request does not name exactly its runtime")]
    RequestNames,
    /// The issuer did not issue.
    #[error("the issuer did not issue")]
    Issuer,
}

impl From<ParseRequest> for Refused {
    fn from(error: ParseRequest) -> Self {
        match error {
            ParseRequest::Key => Self::RequestKey,
            ParseRequest::Signature => Self::RequestSignature,
            ParseRequest::Authority => Self::RequestAuthority,
            ParseRequest::TooLarge | ParseRequest::Parse => Self::Request,
        }
    }
}

/// How runtimes are asked.
pub trait Runtimes: Send + Sync + 'static {
    /// The client of a Kyma's runtime, with a number that is another one for each kubeconfig.
    ///
    /// # Errors
    /// [`Unusable`].
    fn client(&self, kyma: &KymaKey) -> Result<(Client, u64), Unusable>;
}

impl Runtimes for RuntimeAccess {
    fn client(&self, kyma: &KymaKey) -> Result<(Client, u64), Unusable> {
        self.client_and_revision(kyma)
    }
}

/// Judges enrolments; clones are the same.
#[derive(Clone)]
pub struct Enrolments(Arc<Inner>);

struct Inner {
    office: Office,
    runtimes: Box<dyn Runtimes>,
    keys: KeyCache,
    calls: Semaphore,
    addresses: Option<Rates<IpAddr>>,
    metrics: Metrics,
    /// Where runtimes are asked: whoever is first to ask one starts what serves its client from then on, and the threads of a port that
    /// anybody can flood are no place for that.
    handle: Handle,
}

impl Enrolments {
    /// `office` issues, `runtimes` are asked about tokens, on the runtime that calls this.
    #[must_use]
    pub fn new(flags: &Flags, office: Office, runtimes: impl Runtimes, metrics: Metrics) -> Self {
        let addresses = flags
            .enrolment_limit_by_address
            .map(|most| Rates::new(Duration::from_secs(60) / most.get(), BURST_OF_ADDRESS.min(most.get()), ADDRESSES));
        Self(Arc::new(Inner {
            office,
            runtimes: Box::new(runtimes),
            keys: KeyCache::new(metrics.clone()),
            calls: Semaphore::new(CALLS),
            addresses,
            metrics,
            handle: Handle::current(),
        }))
    }

    /// Who issues.
    #[must_use]
    pub fn office(&self) -> &Office {
        &self.0.office
    }

    /// Counts an enrolment of an address, before anything else is looked at.
    ///
    /// # Errors
    /// [`Refused::Address`].
    pub fn admit(&self, address: Option<IpAddr>) -> Result<(), Refused> {
        match (&self.0.addresses, address) {
            (Some(addresses), Some(address)) => {
                addresses.take(network(address), Instant::now()).map_err(Refused::Address)
            }
            _ => Ok(()),
        }
    }

    /// Judges an enrolment and issues. Ends within half a minute.
    ///
    /// # Errors
    /// [`Refused`].
    pub async fn enrol(
        &self,
        token: &str,
        asked: &CertificateRequest,
        address: Option<IpAddr>,
    ) -> Result<CertificateResponse, Refused> {
        // What needs nobody else is judged here.
        let kyma = self.0.office.kyma(&asked.runtime)?;
        Token::read(token, jiff::Timestamp::now().as_second())?;
        let (this, token, asked) = (self.clone(), token.to_owned(), asked.clone());
        let judging = self.0.handle.spawn(async move { this.judge(kyma, &token, &asked, address).await });
        AbortOnDropHandle::new(judging).await.unwrap_or_else(|error| {
            tracing::error!(%error, "An enrolment was not judged");
            Err(Refused::Unreachable)
        })
    }

    async fn judge(
        &self,
        kyma: KymaKey,
        token: &str,
        asked: &CertificateRequest,
        address: Option<IpAddr>,
    ) -> Result<CertificateResponse, Refused> {
        let Inner { office, runtimes, keys, calls, metrics, .. } = &*self.0;
        let read = Token::read(token, jiff::Timestamp::now().as_second())?;
        let (client, revision) = keys.verify(&**runtimes, &kyma, &read, calls).await?;
        office.count(&asked.runtime)?;
        // Before the runtime is asked, because a request that nobody can serve is not worth it.
        let request = office.request(&asked.request)?;
        review::review(&kyma, client, token, &read.pod, calls, metrics).await?;
        // What was asked is an answer only if it is still the same Kyma's same cluster.
        let is_same = office.kyma(&asked.runtime)? == kyma
            && runtimes.client(&kyma).is_ok_and(|(_, current)| current == revision);
        if !is_same {
            return Err(Refused::Unreachable);
        }
        office.issue(&asked.runtime, &request, By::Enrolment, address).await
    }
}

/// What one customer has of addresses: one of version 4, 64 bits of version 6.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
    }
}

#[cfg(test)]
pub(crate) mod tests;
