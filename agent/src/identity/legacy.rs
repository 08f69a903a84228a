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
use crate::clock;

/// Validates the whole set, at a time in Unix seconds.
pub(super) fn credentials(material: &Material, now: i64) -> Result<Credentials, Load> {
    let chain = tls::certificates(&material.chain)?;
    let leaf = chain.first().ok_or(TlsConfig::Empty("the certificate chain"))?;
    let Caller { runtime, leaf, not_after: end, .. } = Caller::read(leaf)?;
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
    let certificate =
        CertificateState { not_after: not_after.to_string(), fingerprint: certificate::fingerprint(&leaf) };
    Ok(Credentials { runtime, signer: None, tls: clock::judge_by(config), certificate, not_after: end, trust_revision })
}
