//! Identity of the agent: key, chain, trust bundle and everything derived from them, replaced as one unit.
//!
//! It is read from a folder with files that another component renews ([`FileReloader`]), or requested and renewed by
//! the agent and stored in the agent's own Secret ([`Enroller`]).

mod channel;
mod client;
mod enroller;
mod files;
mod request;
mod schedule;
mod secret;
mod status;
mod validity;

use std::{path::PathBuf, sync::Arc};

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
use tidewatch_kit::{
    last_good::{FILE_POLL_INTERVAL, LastGood},
    tls::{self, TlsConfigError},
};
use tokio::{sync::watch, time::sleep};

pub use channel::EnrollerHandle;

pub(crate) use channel::CertificateNotice;
pub(crate) use client::{Client, PostRequest, correct_clock};
pub(crate) use enroller::{Enroller, EnrollerParts};
pub(crate) use secret::{SecretWatch, SecretWriter, Stored};
pub(crate) use status::IdentityStatus;

use crate::{
    clock,
    receiver::Endpoint,
    telemetry::{Metrics, Pending},
};

/// Reason to reject a set of key, chain and trust bundle.
#[derive(Debug, Error)]
pub enum CredentialsError {
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
    /// ConfigMap or certificate name another runtime. Digests, sequences and the core's index belong to one runtime, so the
    /// process must restart.
    #[error("restart required: this agent reports for runtime {current}, but its {named_by} now names {new}")]
    OtherRuntime {
        /// Runtime that the agent serves.
        current: RuntimeId,
        /// Runtime that it should serve.
        new: RuntimeId,
        /// What names that runtime.
        named_by: &'static str,
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

/// Polls a folder and publishes each new valid identity; while the content is invalid, the last valid one stays.
pub(crate) struct FileReloader {
    folder: PathBuf,
    /// Material that has expired by the local clock may be valid once the clock is corrected, so it is retried.
    files: LastGood<Option<KeyMaterial>>,
    /// Trust domain of the certificates.
    domain: TrustDomain,
    /// Receiver that the credentials are for.
    receiver: Endpoint,
    publish: watch::Sender<Option<Arc<Credentials>>>,
    identity_status: IdentityStatus,
    pending: Option<Pending>,
    metrics: Metrics,
}

impl FileReloader {
    /// Creates a keeper that publishes nothing before the first valid material.
    pub(crate) fn new(
        folder: PathBuf,
        domain: TrustDomain,
        receiver: Endpoint,
        identity_status: IdentityStatus,
        pending: Pending,
        metrics: Metrics,
    ) -> (Self, CurrentCredentials) {
        let (publish, current) = watch::channel(None);
        let files = LastGood::new("Files of the identity", None).retrying(1);
        let pending = Some(pending);
        (Self { folder, files, domain, receiver, publish, identity_status, pending, metrics }, current)
    }

    /// Polls until the agent has to restart.
    pub(crate) async fn run(mut self) -> IdentityStop {
        loop {
            if let Err(stop) = self.refresh(clock::unix_seconds()) {
                return stop;
            }
            sleep(FILE_POLL_INTERVAL).await;
        }
    }

    /// Reads once, at a time in Unix seconds. An error if the agent has to restart.
    fn refresh(&mut self, now: i64) -> Result<(), IdentityStop> {
        let read = files::read(&self.folder).map(Some);
        let Some(Some(material)) = self.files.changed(read) else { return Ok(()) };
        let result = match Credentials::new(&material, &self.domain, self.receiver.clone(), now) {
            Ok(credentials) => {
                self.adopt(credentials)?;
                Ok(())
            }
            Err(error) => Err(error.into()),
        };
        if self.files.record(Some(material), result) {
            self.metrics.identity_refused.inc();
        }
        Ok(())
    }

    fn adopt(&mut self, credentials: Credentials) -> Result<(), IdentityStop> {
        let current = self.publish.borrow().as_ref().map(|current| current.runtime.clone());
        if let Some(current) = current.filter(|current| *current != credentials.runtime) {
            return Err(IdentityStop::OtherRuntime { current, new: credentials.runtime, named_by: "certificate" });
        }
        credentials.announce(IdentitySource::Files, &self.identity_status, &self.metrics);
        self.pending = None;
        self.publish.send_replace(Some(Arc::new(credentials)));
        Ok(())
    }
}

#[cfg(test)]
pub(crate) use enroller::tests::fixture;
#[cfg(test)]
pub(crate) mod tests;
