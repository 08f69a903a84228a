//! Certificates: the built-in authority and its rotation, other issuers, and what this receiver presents.
//!
//! Pure, from bytes and clocks that callers pass in:
//!
//! * [`Ca`] issues leaves for runtimes and for this receiver; all keys are P-256.
//! * [`Request`] is a certificate request whose signature was checked; nothing but its key is ever read from it.
//! * [`TrustBundle`] is what agents and this receiver trust, with its revision.
//! * [`ServerIdentity`] is what the gateway presents, with what it demands of clients, as one TLS configuration.
//! * `stored` is what stands in the CA's Secret, `rotation` which phase comes next and for whom it waits, `sources` what follows from
//!   files, Secret and leaf together.
//!
//! With a life of its own: [`Standing`] is what is in use now, [`Upkeep`] keeps it up to date in every replica, [`Rotation`] carries a
//! rotation on in the active one. A phase is written into the Secret and takes effect when the watch brings it back.

mod authority;
mod ca;
mod cert_manager;
mod flags;
pub(crate) mod laggards;
mod latest;
mod metrics;
pub(crate) mod progress;
mod proxy;
mod request;
pub(crate) mod rotations;
mod server;
mod sources;
pub(crate) mod standing;
pub(crate) mod store;
pub(crate) mod stored;
#[cfg(test)]
pub(crate) mod testing;
mod trust;
mod upkeep;

use std::time::Duration;

use thiserror::Error;

use cert_manager::CertManager;

pub use authority::{Authority, Issue, Issued, Trust};
pub use ca::{Ca, InvalidServerName, PemIdentity, ServerName};
pub use flags::{Flags, InvalidIssuer, IssuerName, TlsFlags};
pub use laggards::{Follows, Laggards};
pub use metrics::Metrics;
pub use progress::{Behind, Order, Ordered, Progress, SecretState, Straggler};
pub use proxy::{InvalidProxyIdentity, Proxy, ProxyIdentity};
pub use request::{ParseRequest, Request};
pub(crate) use rotations::PendingOrder;
pub use rotations::{NotOrdered, Rotations};
pub use server::ServerIdentity;
pub use sources::{Inconsistent, Refused};
pub use standing::{Setup, Standing};
pub use store::{CA_SECRET, Create, Keep};
pub use stored::{PhaseName, ReadStored};
pub use trust::TrustBundle;
pub use upkeep::Upkeep;

pub(crate) use latest::{Latest, POLL};
pub(crate) use proxy::Verifier;

/// Leaves begin this long before they are issued, for clocks that are behind.
pub const BACKDATED: Duration = Duration::from_secs(10 * 60);
/// How long a runtime's certificate holds unless told otherwise.
pub const RUNTIME_VALIDITY: Duration = Duration::from_secs(24 * 60 * 60);
/// How long a certificate of this receiver holds unless told otherwise.
pub const SERVER_VALIDITY: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// How long a root holds unless told otherwise. Rotation replaces it long before.
pub const CA_VALIDITY: Duration = Duration::from_secs(5 * 365 * 24 * 60 * 60);

/// Why there is no CA, or why it did not issue.
#[derive(Debug, Error)]
pub enum Pki {
    /// The CA's certificate is missing or not readable PEM.
    #[error("the CA certificate is not readable")]
    ReadCertificateError,
    /// The certificate is not one of a CA with a P-256 key that may sign certificates.
    #[error("the certificate is not that of a P-256 certificate authority")]
    NotCa,
    /// The CA's key is missing, not PKCS#8 PEM, or not P-256.
    #[error("the CA key is not a P-256 key in PKCS#8 PEM")]
    ReadKey(#[source] rcgen::Error),
    /// The CA's key is not that of its certificate.
    #[error("the CA key does not belong to the CA certificate")]
    Pair,
    /// The CA has ended, or has not begun.
    #[error("the CA certificate is not valid at this time")]
    CaExpired,
    /// A time before 1970 or after 2100, or a validity of more than a century.
    #[error("a certificate cannot hold at such a time")]
    Time,
    /// A server certificate needs a name.
    #[error("a server certificate needs at least one name")]
    NoName,
    /// The name cannot stand in a certificate.
    #[error("the name cannot stand in a certificate")]
    Name(#[source] rcgen::Error),
    /// The system gave no random bytes or no key.
    #[error("no key could be made")]
    MakeKey(#[source] rcgen::Error),
    /// The system gave no random bytes.
    #[error("no serial number could be drawn")]
    Serial,
    /// The certificate could not be signed.
    #[error("the certificate could not be signed")]
    Sign(#[source] rcgen::Error),
}
