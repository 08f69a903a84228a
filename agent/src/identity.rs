//! Identity of the agent: key, chain, trust bundle and everything derived from them, replaced as one unit.
//!
//! It is read from a folder with files that another component renews ([`FileReloader`]), or requested and renewed by
//! the agent and stored in the agent's own Secret ([`Enroller`]).

mod channel;
mod enroller;
mod files;
mod request;
mod schedule;
mod secret;
mod status;
mod validity;

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use rustls::ClientConfig;
use thiserror::Error;
use tidewatch_api::identity::{RuntimeId, TrustDomain};
use tidewatch_contract::{
    admin::agent::IdentitySource,
    certificate::{self, Leaf, ReadCertificateError, RuntimeCertificate},
    heartbeat::CertificateState,
    signature::{SignError, Signer},
};
use tidewatch_kit::tls::{self, TlsConfigError};
use tokio::{sync::watch, time::sleep};

pub(crate) use channel::{CertificateNotice, EnrollerHandle, RenewalOrder, renewal_channel};
pub(crate) use enroller::{Enroller, EnrollerParts};
pub(crate) use secret::{SecretWatch, SecretWriter, Stored};
pub(crate) use status::IdentityStatus;

use crate::{
    clock,
    receiver::Endpoint,
    telemetry::{Metrics, Pending, error_chain},
};

/// Interval at which the content of the files is compared. Projected files change by a swap of symbolic links.
const POLL: Duration = Duration::from_secs(5);

/// Reason to reject a set of key, chain and trust bundle.
#[derive(Debug, Error)]
pub enum CredentialsError {
    /// A file cannot be read.
    #[error("{name} could not be read")]
    Read {
        /// Name of the file.
        name: &'static str,
        /// Cause.
        #[source]
        error: std::io::Error,
    },
    /// The PEM content is invalid.
    #[error("key, chain or trust bundle is invalid")]
    Tls(#[from] TlsConfigError),
    /// The leaf is not the certificate of a runtime.
    #[error("the certificate is not a valid runtime certificate")]
    Certificate(#[from] ReadCertificateError),
    /// The key is of an unsupported kind.
    #[error("the key cannot be used for signatures")]
    Key(#[from] SignError),
    /// The certificate has expired.
    #[error("the certificate expired at {0}")]
    Expired(Timestamp),
    /// The certificate names another runtime. An agent process serves exactly one.
    #[error("the certificate names runtime {new}, but this agent serves {current}")]
    OtherRuntime {
        /// Runtime that this agent serves.
        current: RuntimeId,
        /// Runtime that the certificate names.
        new: RuntimeId,
    },
}

/// Reason for which the task of the identity ends, and with it the process.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum IdentityStop {
    /// The ConfigMap names another runtime. Digests, sequences and the core's index belong to one runtime, so the process
    /// must restart.
    #[error("restart required: this agent reports for runtime {current}, but its ConfigMap now names {new}")]
    OtherRuntime {
        /// Runtime that the agent serves.
        current: RuntimeId,
        /// Runtime that the ConfigMap names.
        new: RuntimeId,
    },
    /// The certificate in the folder names another runtime; the process must restart for the same reason.
    #[error("restart required: this agent reports for runtime {current}, but its certificate now names {new}")]
    OtherCertificate {
        /// Runtime that the agent serves.
        current: RuntimeId,
        /// Runtime that the certificate names.
        new: RuntimeId,
    },
    /// The watch of the ConfigMap or of the Secret has ended.
    #[error("task identity ended unexpectedly")]
    ChannelClosed,
}

/// Key, chain and trust bundle, in PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyMaterial {
    /// Certificate chain, leaf first.
    pub chain: Vec<u8>,
    /// Private key in PKCS#8.
    pub key: Vec<u8>,
    /// Trust anchors for the receiver's certificate.
    pub bundle: Vec<u8>,
}

/// Origin of an identity.
pub(crate) trait Source {
    /// Reads the current material.
    ///
    /// # Errors
    /// [`CredentialsError::Read`].
    fn read(&mut self) -> Result<KeyMaterial, CredentialsError>;
}

/// A validated identity. A connection and the signatures on it derive from the same credentials.
pub struct Credentials {
    /// Runtime that the certificate names.
    pub runtime: RuntimeId,
    /// Receiver to present the certificate to. Replaced together with the trust bundle, so that a receiver is never
    /// verified against the roots of another one.
    pub receiver: Endpoint,
    /// Signs requests with the leaf's key.
    pub signer: Signer,
    /// TLS configuration that presents the chain and trusts the bundle.
    pub tls: ClientConfig,
    /// State of the certificate as reported in heartbeats.
    pub certificate: CertificateState,
    /// Start of validity, in Unix seconds.
    pub not_before: i64,
    /// End of validity, in Unix seconds.
    pub not_after: i64,
    /// Revision of the trust bundle; differs when the set of roots does.
    pub trust_revision: String,
}

/// Credentials in use, for all consumers; `None` until there are any.
pub type CurrentCredentials = watch::Receiver<Option<Arc<Credentials>>>;

impl Credentials {
    /// Validates material at a time in Unix seconds: the certificate names the runtime in URI and common name, and the
    /// key signs requests.
    ///
    /// # Errors
    /// [`CredentialsError`].
    pub fn new(
        material: &KeyMaterial,
        domain: &TrustDomain,
        receiver: Endpoint,
        now: i64,
    ) -> Result<Self, CredentialsError> {
        let identity = tls::Identity::from_pem(&material.chain, &material.key)?;
        let roots = tls::certificates(&material.bundle)?;
        let tls = clock::with_wall_clock(tls::client(Some(&identity), tls::roots(&roots)?)?);
        let leaf = identity.chain.first().ok_or(TlsConfigError::Empty("the certificate chain"))?;
        let RuntimeCertificate { runtime, leaf } = RuntimeCertificate::read(leaf, domain)?;
        let Leaf { not_before, not_after, fingerprint, .. } = leaf;
        let certificate = certificate_state(not_after, fingerprint, now)?;
        let signer = Signer::new(&identity.key, certificate.fingerprint.clone())?;
        let trust_revision = certificate::trust_revision(&roots);
        Ok(Self { runtime, receiver, signer, tls, certificate, not_before, not_after, trust_revision })
    }

    /// Logs and records that these credentials are in use, with their origin.
    fn announce(&self, from: IdentitySource, identity_status: &IdentityStatus, metrics: &Metrics) {
        let Self { runtime, certificate, trust_revision, not_after, .. } = self;
        tracing::info!(%runtime, fingerprint = %certificate.fingerprint, not_after = %certificate.not_after,
            trust_revision, %from, "Using an identity");
        metrics.certificate_not_after.set(*not_after);
        identity_status.set_source(from);
    }
}

/// The state of a certificate that is valid at `now`; both times in Unix seconds.
fn certificate_state(not_after: i64, fingerprint: String, now: i64) -> Result<CertificateState, CredentialsError> {
    let end = Timestamp::from_second(not_after).unwrap_or(Timestamp::MAX);
    if not_after <= now {
        return Err(CredentialsError::Expired(end));
    }
    Ok(CertificateState { not_after: end.to_string(), fingerprint, renewal_failed_since: None })
}

/// Polls a source and publishes each new valid identity; while the content is invalid, the last valid one stays.
pub(crate) struct FileReloader<S> {
    source: S,
    /// Trust domain of the certificates.
    domain: TrustDomain,
    /// Receiver that the credentials are for.
    receiver: Endpoint,
    publish: watch::Sender<Option<Arc<Credentials>>>,
    /// Material read last, valid or not.
    seen: Option<KeyMaterial>,
    /// The material read last has expired by the local clock.
    expired: bool,
    /// The last read failed; a failure is reported once.
    failing: bool,
    identity_status: IdentityStatus,
    pending: Option<Pending>,
    metrics: Metrics,
}

impl<S: Source> FileReloader<S> {
    /// Creates a keeper that publishes nothing before the first valid material.
    pub(crate) fn new(
        source: S,
        domain: TrustDomain,
        receiver: Endpoint,
        identity_status: IdentityStatus,
        pending: Pending,
        metrics: Metrics,
    ) -> (Self, CurrentCredentials) {
        let (publish, current) = watch::channel(None);
        let seen = None;
        let pending = Some(pending);
        let reloader = Self {
            source,
            domain,
            receiver,
            publish,
            seen,
            expired: false,
            failing: false,
            identity_status,
            pending,
            metrics,
        };
        (reloader, current)
    }

    /// Polls until the agent has to restart.
    pub(crate) async fn run(mut self) -> IdentityStop {
        loop {
            if let Err(stop) = self.refresh(clock::unix_seconds()) {
                return stop;
            }
            sleep(POLL).await;
        }
    }

    /// Reads once, at a time in Unix seconds. An error if the agent has to restart.
    fn refresh(&mut self, now: i64) -> Result<(), IdentityStop> {
        match self.fresh(now) {
            Ok(None) => {}
            Err(CredentialsError::OtherRuntime { current, new }) => {
                return Err(IdentityStop::OtherCertificate { current, new });
            }
            Ok(Some(credentials)) => {
                credentials.announce(IdentitySource::Files, &self.identity_status, &self.metrics);
                self.failing = false;
                self.pending = None;
                self.publish.send_replace(Some(Arc::new(credentials)));
            }
            Err(error) => {
                self.metrics.identity_refused.inc();
                tracing::error!(
                    error = error_chain(&error),
                    "Invalid identity rejected; the last valid one stays in use"
                );
            }
        }
        Ok(())
    }

    /// Credentials from new material; `None` if nothing has changed since the last read.
    fn fresh(&mut self, now: i64) -> Result<Option<Credentials>, CredentialsError> {
        let material = match self.source.read() {
            Ok(material) => material,
            // Reading can fail while the folder is swapped and succeed at the next poll; only the first failure is
            // reported.
            Err(_) if self.failing => return Ok(None),
            Err(error) => {
                self.failing = true;
                return Err(error);
            }
        };
        self.failing = false;
        let unchanged = self.seen.as_ref() == Some(&material);
        if unchanged && !self.expired {
            return Ok(None);
        }
        let credentials = Credentials::new(&material, &self.domain, self.receiver.clone(), now);
        self.seen = Some(material);
        // Material that has expired by the local clock may be valid once the clock is corrected; expiry is reported
        // once.
        self.expired = matches!(credentials, Err(CredentialsError::Expired(_)));
        if unchanged && self.expired {
            return Ok(None);
        }
        let credentials = credentials?;
        let current = self.publish.borrow().as_ref().map(|current| current.runtime.clone());
        match current.filter(|current| *current != credentials.runtime) {
            // Index, digests and outbox belong to one runtime.
            Some(current) => Err(CredentialsError::OtherRuntime { current, new: credentials.runtime }),
            None => Ok(Some(credentials)),
        }
    }
}

#[cfg(test)]
pub(crate) use enroller::tests::fixture;
#[cfg(test)]
pub(crate) mod tests;
