//! Who may speak: the built-in CA and its rotation, other issuers, trust bundles, the receiver's own TLS configuration, and
//! the certificates of replicas.
//!
//! Pure, from bytes and timestamps of the caller:
//!
//! * [`Ca`] issues leaves for runtimes and for this receiver; all keys are P-256.
//! * [`SigningRequest`] is a certificate request with a verified signature; the built-in CA reads nothing but its key.
//! * [`TrustBundle`] holds the roots that agents and this receiver trust, with their revision.
//! * [`ServerIdentity`] is the TLS configuration of the gateway: its certificate, and the client certificates that it
//!   requires.
//! * `ca_state` is the content of the CA's Secret; `sources` combines files, Secret and leaf.
//!
//! [`ReplicaCertificate`] keeps the certificate by which this replica authenticates to the others, its key in memory only.
//!
//! Stateful: [`open()`] reads all of it at start. [`TlsState`] holds the certificates in use, [`CertificateReloader`] keeps them up to date in every
//! replica, and the CA rotation controller advances a rotation in the active one. A phase is written into the Secret
//! and takes effect when the watch returns it.

mod authority;
mod ca;
pub mod ca_state;
mod cert_manager;
mod flags;
mod issue_error;
mod metrics;
mod open;
mod proxy;
mod reloader;
mod replica;
mod request;
pub mod rotation_handle;
mod server;
mod sources;
pub mod store;
pub mod stragglers;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tls_state;
mod trust;

use std::time::Duration;

use cert_manager::CertManager;
use thiserror::Error;

pub use authority::{Authority, Issued, Trust};
pub use ca::{Ca, PemIdentity};
pub use ca_state::CaStateError;
pub use flags::{Flags, IssuerName, ParseIssuerError, TlsFlags};
pub use issue_error::IssueError;
pub use metrics::Metrics;
pub use open::{Setup, open};
pub use proxy::{ParseProxyIdentityError, Proxy, ProxyIdentity};
pub use reloader::CertificateReloader;
pub use replica::{
    ReplicaCertificate, ReplicaClient, ReplicaError, ReplicaFiles, ReplicaMetrics, ReplicaSource, ReplicaTls,
    replica_of,
};
pub use request::{ParseRequestError, SigningRequest};
pub use rotation_handle::{PendingRotation, RotationError, RotationHandle};
pub use server::ServerIdentity;
pub use sources::{FlagsError, SourceError};
pub use store::{CA_SECRET, CaSecretError};
pub use stragglers::{FollowState, Stragglers};
pub use tls_state::TlsState;
pub use trust::TrustBundle;

pub use proxy::Verifier;

/// Leaves are valid from this long before they are issued, which tolerates clocks that are behind.
pub const BACKDATE: Duration = Duration::from_secs(10 * 60);
/// Default validity of a runtime's certificate.
pub const RUNTIME_VALIDITY: Duration = Duration::from_secs(24 * 60 * 60);
/// Default validity of a certificate of this receiver.
pub const SERVER_VALIDITY: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// Validity of a replica's certificate.
pub const REPLICA_VALIDITY: Duration = Duration::from_secs(24 * 60 * 60);
/// Default validity of a root. Rotation replaces it long before.
pub const CA_VALIDITY: Duration = Duration::from_secs(5 * 365 * 24 * 60 * 60);

/// Error of the CA: it is unusable, or did not issue.
#[derive(Debug, Error)]
pub enum PkiError {
    /// The CA's certificate is missing or not readable PEM.
    #[error("the CA certificate is not readable")]
    ReadCertificate,
    /// The certificate is not one of a CA with a P-256 key that may sign certificates.
    #[error("the certificate is not that of a P-256 certificate authority")]
    NotCa,
    /// The CA's key is missing, not PKCS#8 PEM, or not P-256.
    #[error("the CA key is not a P-256 key in PKCS#8 PEM")]
    ReadKey(#[source] rcgen::Error),
    /// The CA's key does not belong to its certificate.
    #[error("the CA key does not belong to the CA certificate")]
    KeyMismatch,
    /// The CA has expired, or is not valid yet.
    #[error("the CA certificate is not valid at this time")]
    CaExpired,
    /// A time before 1970 or after 2100, or a validity of more than a century.
    #[error("a certificate cannot be valid at that time")]
    Time,
    /// A server certificate needs at least one name.
    #[error("a server certificate needs at least one name")]
    NoName,
    /// The name cannot be encoded in a certificate.
    #[error("the name cannot be encoded in a certificate")]
    Name(#[source] rcgen::Error),
    /// The system returned no random bytes or no key.
    #[error("a key could not be generated")]
    GenerateKey(#[source] rcgen::Error),
    /// The system returned no random bytes.
    #[error("a serial number could not be generated")]
    Serial,
    /// Signing the certificate failed.
    #[error("the certificate could not be signed")]
    Sign(#[source] rcgen::Error),
}
