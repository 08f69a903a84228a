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
    tls::{self, TlsConfig},
    v2::Caller,
};

use super::{Credentials, Load, Material};
use crate::{clock, link::Endpoint};

/// Validates the whole set, at a time in Unix seconds.
pub(super) fn credentials(material: &Material, receiver: Endpoint, now: i64) -> Result<Credentials, Load> {
    let chain = tls::certificates(&material.chain)?;
    let leaf = chain.first().ok_or(TlsConfig::Empty("the certificate chain"))?;
    let Caller { runtime, fingerprint, not_after: end, .. } = Caller::read(leaf)?;
    let not_after = Timestamp::from_second(end).unwrap_or(Timestamp::MAX);
    if end <= now {
        return Err(Load::Expired(not_after));
    }
    let roots = tls::certificates(&material.bundle)?;
    let trust_revision = certificate::trust_revision(&roots);
    let key = PrivateKeyDer::from_pem_slice(&material.key).map_err(Load::LegacyKey)?;
    let mut config = ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(Load::Pair)?
        .with_root_certificates(tls::roots(&roots)?)
        .with_client_auth_cert(chain, key)
        .map_err(Load::Pair)?;
    config.resumption = Resumption::disabled();
    let not_after = not_after.to_string();
    let certificate = CertificateState { not_after, fingerprint, renewal_failed_since: None };
    let (signer, tls) = (None, clock::judge_by(config));
    // Nobody renews it, so its start is of no use.
    Ok(Credentials { runtime, receiver, signer, tls, certificate, not_before: 0, not_after: end, trust_revision })
}
