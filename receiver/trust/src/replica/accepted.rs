//! Checks that other replicas accept a certificate.

use std::sync::Arc;

use rustls_pki_types::UnixTime;
use thiserror::Error;
use tidewatch_api::{identity::TrustDomain, replica::ReplicaName};
use tidewatch_contract::certificate::{Leaf, ReadCertificateError};
use tidewatch_kit::{
    last_good::ReadFileError,
    tls::{Identity, TlsConfigError},
};

use super::verifier::ReplicaVerifier;
use crate::{TrustBundle, proxy};

/// Reason for which a certificate of a replica is rejected.
#[derive(Debug, Error)]
pub enum ReplicaError {
    /// A file is not readable.
    #[error(transparent)]
    Read(#[from] ReadFileError),
    /// Chain, key or roots are not usable.
    #[error("the replica's certificate, its key or the roots are not usable")]
    Unusable(#[from] TlsConfigError),
    /// The leaf is not readable, or its key is not P-256.
    #[error("the replica's certificate is not usable")]
    Leaf(#[from] ReadCertificateError),
    /// The leaf is not valid now as a server's and a client's, does not chain to the roots, or names another replica.
    #[error("another replica would reject the certificate")]
    Rejected(#[source] rustls::Error),
}

/// Checks that other replicas would accept a certificate, from a server and from a client. Returns its leaf.
pub(crate) fn check(
    identity: &Identity,
    replica: &ReplicaName,
    domain: &TrustDomain,
    roots: &TrustBundle,
    now: UnixTime,
) -> Result<Leaf, ReplicaError> {
    let (leaf, rest) = identity.chain.split_first().ok_or(TlsConfigError::Empty("the certificate chain"))?;
    let server = ReplicaVerifier::new(Arc::new(roots.store()?), domain.clone(), replica.clone());
    server.verify(leaf, rest, now).map_err(ReplicaError::Rejected)?;
    proxy::verifier(roots.store()?)?.verify_client_cert(leaf, rest, now).map_err(ReplicaError::Rejected)?;
    Ok(Leaf::read(leaf)?)
}
