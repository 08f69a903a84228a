//! Verification of a replica's certificate by another replica that connects to it.

use std::sync::Arc;

use rustls::{
    CertificateError, DigitallySignedStruct, Error, PeerIncompatible, RootCertStore, SignatureScheme,
    client::{
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{CryptoProvider, verify_tls13_signature},
    server::ParsedCertificate,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tidewatch_api::{identity::TrustDomain, replica::ReplicaName};
use tidewatch_contract::certificate::SubjectAltNames;
use tidewatch_kit::tls;

/// Returns the replica that a certificate identifies: its only URI is that of a replica of the trust domain. The caller
/// has verified the chain.
pub fn replica_of(leaf: &CertificateDer<'_>, domain: &TrustDomain) -> Option<ReplicaName> {
    match SubjectAltNames::read(leaf).ok()?.uris.as_slice() {
        [uri] => ReplicaName::of_uri(uri, domain),
        _ => None,
    }
}

/// Accepts exactly one replica, by its URI. The name under which it was dialled has no meaning: replicas move between
/// addresses.
#[derive(Debug)]
pub(super) struct ReplicaVerifier {
    pub(super) roots: Arc<RootCertStore>,
    pub(super) domain: TrustDomain,
    pub(super) replica: ReplicaName,
    provider: Arc<CryptoProvider>,
}

impl ReplicaVerifier {
    pub(super) fn new(roots: Arc<RootCertStore>, domain: TrustDomain, replica: ReplicaName) -> Self {
        Self { roots, domain, replica, provider: tls::provider() }
    }

    /// Verifies a chain, its usage as that of a server, and its name.
    pub(super) fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        let parsed = ParsedCertificate::try_from(leaf)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        match replica_of(leaf, &self.domain) {
            Some(replica) if replica == self.replica => Ok(()),
            _ => Err(CertificateError::NotValidForName.into()),
        }
    }
}

impl ServerCertVerifier for ReplicaVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify(leaf, intermediates, now).map(|()| ServerCertVerified::assertion())
    }

    /// Never called: replicas speak TLS 1.3 alone.
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::ServerDoesNotSupportTls12Or13.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, leaf, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
