//! Reasons for which no certificate is issued.

use std::time::Duration;

use strum::IntoStaticStr;
use thiserror::Error;
use tidewatch_contract::certificate::ReadCertificateError;
use tidewatch_kit::tls::TlsConfigError;

use super::{PkiError, ReplicaError};

/// Failure to issue a certificate. The name is the reason in metrics and logs.
#[derive(Debug, Error, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum IssueError {
    /// The built-in CA failed.
    #[error("the built-in CA did not issue")]
    Builtin(#[from] PkiError),
    /// The request for a replica's certificate could not be made.
    #[error("the certificate request of the replica could not be made")]
    Request(#[source] PkiError),
    /// The request must name exactly its runtime, because the issuer signs all names in it.
    #[error("the certificate request does not name exactly its runtime")]
    Names,
    /// The issuer refused, with its message.
    #[error("the issuer refused: {0}")]
    Refused(String),
    /// The issuer did not respond in time.
    #[error("the issuer did not respond within {0:?}")]
    #[strum(serialize = "late")]
    Timeout(Duration),
    /// Too many requests wait for the issuer.
    #[error("too many certificate requests wait for the issuer")]
    Busy,
    /// The control plane rejected the request, or did not return the result.
    #[error("the call to the control plane failed")]
    Api(#[source] Box<kube::Error>),
    /// The issuer's response is not readable.
    #[error("the issuer's response is not a chain of certificates")]
    #[strum(serialize = "foreign")]
    Chain(#[source] TlsConfigError),
    /// The issued certificate is not one of this runtime.
    #[error("the issuer's certificate does not name the runtime")]
    #[strum(serialize = "foreign")]
    Certificate(#[from] ReadCertificateError),
    /// The issued certificate is not one of this replica.
    #[error("the issuer's certificate is not one of this replica")]
    #[strum(serialize = "foreign")]
    Replica(#[from] ReplicaError),
    /// The issued certificate has another key, is not valid now, or does not chain to the accepted roots.
    #[error("the issuer's certificate {0}")]
    Foreign(&'static str),
}
