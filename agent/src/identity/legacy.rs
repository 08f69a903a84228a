//! Identities of contract v2, as lifecycle-manager issues them.

use rustls::pki_types::{PrivateKeyDer, pem::PemObject};
use tidewatch_contract::{certificate, v2::Caller};
use tidewatch_kit::tls::{self, TlsConfigError};

use super::{Credentials, CredentialsError, KeyMaterial, certificate_state};
use crate::{clock, receiver::Endpoint};

/// Validates material of contract v2, at a time in Unix seconds.
pub(super) fn credentials(
    material: &KeyMaterial,
    receiver: Endpoint,
    now: i64,
) -> Result<Credentials, CredentialsError> {
    let chain = tls::certificates(&material.chain)?;
    let leaf = chain.first().ok_or(TlsConfigError::Empty("the certificate chain"))?;
    let Caller { runtime, fingerprint, not_after, .. } = Caller::read(leaf)?;
    let certificate = certificate_state(not_after, fingerprint, now)?;
    let roots = tls::certificates(&material.bundle)?;
    let trust_revision = certificate::trust_revision(&roots);
    let key =
        PrivateKeyDer::from_pem_slice(&material.key).map_err(|error| CredentialsError::LegacyKey(error.into()))?;
    let config = tls::client_config(tls::roots(&roots)?, Some((chain, key))).map_err(CredentialsError::Pair)?;
    let signer = None;
    let tls = clock::with_wall_clock(config);
    // The agent does not renew it, so the start of validity is unused.
    Ok(Credentials { runtime, receiver, signer, tls, certificate, not_before: 0, not_after, trust_revision })
}
