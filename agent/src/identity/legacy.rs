//! Identities of contract v2, as the incumbent issues them.

use jiff::Timestamp;
use rustls::{
    ClientConfig,
    client::Resumption,
    pki_types::{PrivateKeyDer, pem::PemObject},
    version::TLS13,
};
use tidewatch_shared::{
    certificate,
    heartbeat::CertificateState,
    tls::{self, TlsConfigError},
    v2::Caller,
};

use super::{Credentials, CredentialsError, KeyMaterial};
use crate::{clock, receiver::Endpoint};

/// Validates material of contract v2, at a time in Unix seconds.
pub(super) fn credentials(
    material: &KeyMaterial,
    receiver: Endpoint,
    now: i64,
) -> Result<Credentials, CredentialsError> {
    let chain = tls::certificates(&material.chain)?;
    let leaf = chain.first().ok_or(TlsConfigError::Empty("the certificate chain"))?;
    let Caller { runtime, fingerprint, not_after: end, .. } = Caller::read(leaf)?;
    let not_after = Timestamp::from_second(end).unwrap_or(Timestamp::MAX);
    if end <= now {
        return Err(CredentialsError::Expired(not_after));
    }
    let roots = tls::certificates(&material.bundle)?;
    let trust_revision = certificate::trust_revision(&roots);
    let key = PrivateKeyDer::from_pem_slice(&material.key).map_err(CredentialsError::LegacyKey)?;
    let mut config = ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(CredentialsError::Pair)?
        .with_root_certificates(tls::roots(&roots)?)
        .with_client_auth_cert(chain, key)
        .map_err(CredentialsError::Pair)?;
    config.resumption = Resumption::disabled();
    let not_after = not_after.to_string();
    let certificate = CertificateState { not_after, fingerprint, renewal_failed_since: None };
    let (signer, tls) = (None, clock::with_wall_clock(config));
    // The agent does not renew it, so the start of validity is unused.
    Ok(Credentials { runtime, receiver, signer, tls, certificate, not_before: 0, not_after: end, trust_revision })
}
