//! The agent's identity: key, chain, trust bundle and everything that is made of them, exchanged as one.
//!
//! It comes from a folder of files that somebody else renews ([`Keeper`]), or the agent asks for it by itself, renews it and keeps it in
//! its own Secret ([`Enroller`]).

mod agenda;
mod enroller;
mod errands;
mod files;
mod legacy;
mod life;
mod request;
mod secret;
mod standing;

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use rustls::{ClientConfig, pki_types::pem::Error as PemError};
use thiserror::Error;
use tidewatch_shared::{
    certificate::{self, ReadCertificate, RuntimeCertificate},
    heartbeat::CertificateState,
    identity::{RuntimeId, TrustDomain},
    signature::{Sign, Signer},
    tls::{self, TlsConfig},
    v2::ReadCaller,
};
use tokio::{sync::watch, time::sleep};

pub(crate) use enroller::{Enroller, Stop, Tools};
pub(crate) use errands::{Order, Renewals, errands};
pub(crate) use files::Files;
pub(crate) use secret::{SecretWatch, Stored, Vault};
pub(crate) use standing::Standing;
pub use standing::{Provenance, Told};

use crate::{
    clock,
    link::Endpoint,
    telemetry::{Guard, Metrics, chain},
};

/// Projected files change by a swap of links; their content is compared this often.
const POLL: Duration = Duration::from_secs(5);

/// Why a set of key, chain and bundle is not used.
#[derive(Debug, Error)]
pub enum Load {
    /// A file.
    #[error("{name} could not be read")]
    Read {
        /// Which file.
        name: &'static str,
        /// Why.
        #[source]
        error: std::io::Error,
    },
    /// Their bytes.
    #[error("key, chain or trust bundle is not usable")]
    Tls(#[from] TlsConfig),
    /// The leaf.
    #[error("the certificate is not that of a runtime")]
    Certificate(#[from] ReadCertificate),
    /// Its kind.
    #[error("the key cannot sign")]
    Key(#[from] Sign),
    /// The leaf, in contract v2.
    #[error("the certificate is not that of a caller of contract v2")]
    Caller(#[from] ReadCaller),
    /// The key, in contract v2.
    #[error("the key is not readable PEM")]
    LegacyKey(#[source] PemError),
    /// Key and certificate, in contract v2.
    #[error("certificate and key are not usable together")]
    Pair(#[source] rustls::Error),
    /// Its end has passed.
    #[error("the certificate ended at {0}")]
    Expired(Timestamp),
    /// An agent speaks for one runtime as long as it lives.
    #[error("the certificate names runtime {new}, but this agent speaks for {known}")]
    OtherRuntime {
        /// The one it speaks for.
        known: RuntimeId,
        /// The one that the certificate names.
        new: RuntimeId,
    },
}

/// The bytes of an identity, in PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Material {
    /// Leaf first.
    pub chain: Vec<u8>,
    /// PKCS#8.
    pub key: Vec<u8>,
    /// Roots for the receiver's certificate.
    pub bundle: Vec<u8>,
}

/// Where an identity comes from.
pub(crate) trait Source {
    /// Reads what there is now.
    ///
    /// # Errors
    /// [`Load::Read`].
    fn read(&mut self) -> Result<Material, Load>;
}

/// A valid identity: a connection and the signatures on it are made of one and the same.
pub struct Credentials {
    /// Whom the certificate names.
    pub runtime: RuntimeId,
    /// To whom it is shown. Exchanged together with the trust bundle, so that nobody meets the roots of another.
    pub receiver: Endpoint,
    /// Signs with the leaf's key; `None` in contract v2, where nothing is signed.
    pub signer: Option<Signer>,
    /// Presents the chain and trusts the bundle.
    pub tls: ClientConfig,
    /// For heartbeats.
    pub certificate: CertificateState,
    /// Start of validity, in Unix seconds.
    pub not_before: i64,
    /// End of validity, in Unix seconds.
    pub not_after: i64,
    /// Changes with the set of roots.
    pub trust_revision: String,
}

/// How credentials reach whoever uses them; `None` until there are any.
pub type Current = watch::Receiver<Option<Arc<Credentials>>>;

impl Credentials {
    /// Validates the whole set, at a time in Unix seconds.
    ///
    /// # Errors
    /// [`Load`].
    pub fn new(material: &Material, domain: &TrustDomain, receiver: Endpoint, now: i64) -> Result<Self, Load> {
        let identity = tls::Identity::from_pem(&material.chain, &material.key)?;
        let roots = tls::certificates(&material.bundle)?;
        let tls = clock::judge_by(tls::client(&identity, tls::roots(&roots)?)?);
        let leaf = identity.chain.first().ok_or(TlsConfig::Empty("the certificate chain"))?;
        let RuntimeCertificate { runtime, leaf } = RuntimeCertificate::read(leaf, domain)?;
        let not_after = Timestamp::from_second(leaf.not_after).unwrap_or(Timestamp::MAX);
        if leaf.not_after <= now {
            return Err(Load::Expired(not_after));
        }
        let signer = Some(Signer::new(&identity.key, leaf.fingerprint.clone())?);
        let (not_before, end) = (leaf.not_before, leaf.not_after);
        let (not_after, fingerprint) = (not_after.to_string(), leaf.fingerprint);
        let certificate = CertificateState { not_after, fingerprint, renewal_failed_since: None };
        let trust_revision = certificate::trust_revision(&roots);
        Ok(Self { runtime, receiver, signer, tls, certificate, not_before, not_after: end, trust_revision })
    }

    /// Tells that these are used from now on, and where they come from.
    fn used(&self, from: Provenance, standing: &Standing, metrics: &Metrics) {
        let Self { runtime, certificate, trust_revision, not_after, .. } = self;
        tracing::info!(%runtime, fingerprint = %certificate.fingerprint, not_after = %certificate.not_after,
            trust_revision, from = from.as_str(), "Using an identity");
        metrics.certificate_not_after.set(*not_after);
        standing.has(from);
    }
}

/// How credentials are made: each contract has certificates of its own.
pub(crate) type Make = Box<dyn Fn(&Material, i64) -> Result<Credentials, Load> + Send>;

impl Credentials {
    /// The certificates of contract v3: the runtime stands in URI and common name, and the key signs.
    pub(crate) fn v3(domain: TrustDomain, receiver: Endpoint) -> Make {
        Box::new(move |material, now| Self::new(material, &domain, receiver.clone(), now))
    }

    /// The certificates of contract v2: the runtime stands in the common name alone, and the key is of any kind.
    pub(crate) fn v2(receiver: Endpoint) -> Make {
        Box::new(move |material, now| legacy::credentials(material, receiver.clone(), now))
    }
}

/// Reads a source again and again, and publishes what is new and valid; the last good set stays when something is not.
pub(crate) struct Keeper<S> {
    source: S,
    /// Makes credentials of what the source has, at a time in Unix seconds.
    make: Make,
    publish: watch::Sender<Option<Arc<Credentials>>>,
    /// What was last looked at, good or bad.
    seen: Option<Material>,
    /// What was last looked at has ended by our clock.
    expired: bool,
    /// The last reading failed; so that it is said once.
    failing: bool,
    standing: Standing,
    pending: Option<Guard>,
    metrics: Metrics,
}

impl<S: Source> Keeper<S> {
    /// Nothing is published before the first valid set.
    pub(crate) fn new(source: S, make: Make, standing: Standing, pending: Guard, metrics: Metrics) -> (Self, Current) {
        let (publish, current) = watch::channel(None);
        let (seen, pending) = (None, Some(pending));
        let keeper = Self { source, make, publish, seen, expired: false, failing: false, standing, pending, metrics };
        (keeper, current)
    }

    /// Reads for ever.
    pub(crate) async fn run(mut self) {
        loop {
            self.look(clock::unix_seconds());
            sleep(POLL).await;
        }
    }

    /// Reads once, at a time in Unix seconds.
    fn look(&mut self, now: i64) {
        match self.fresh(now) {
            Ok(None) => {}
            Ok(Some(credentials)) => {
                credentials.used(Provenance::Files, &self.standing, &self.metrics);
                self.failing = false;
                self.pending = None;
                self.publish.send_replace(Some(Arc::new(credentials)));
            }
            Err(error) => {
                self.metrics.identity_refused.inc();
                tracing::error!(error = chain(&error), "An identity is refused; the last good one stays");
            }
        }
    }

    /// `None` when nothing has changed since the last look.
    fn fresh(&mut self, now: i64) -> Result<Option<Credentials>, Load> {
        let material = match self.source.read() {
            Ok(material) => material,
            // A folder that is just being swapped reads well again at the next look; only the first failure is told.
            Err(_) if self.failing => return Ok(None),
            Err(error) => {
                self.failing = true;
                return Err(error);
            }
        };
        self.failing = false;
        let looked = self.seen.as_ref() == Some(&material);
        if looked && !self.expired {
            return Ok(None);
        }
        let credentials = (self.make)(&material, now);
        self.seen = Some(material);
        // What has ended by our clock may be good when the clock is set; that it has ended is said once.
        self.expired = matches!(credentials, Err(Load::Expired(_)));
        if looked && self.expired {
            return Ok(None);
        }
        let credentials = credentials?;
        let known = self.publish.borrow().as_ref().map(|known| known.runtime.clone());
        match known.filter(|known| *known != credentials.runtime) {
            // Index, digests and outbox are those of one runtime.
            Some(known) => Err(Load::OtherRuntime { known, new: credentials.runtime }),
            None => Ok(Some(credentials)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
