//! Authentication of callers: a runtime by its own connection, or through a proxy or another replica that forwards its
//! certificate.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use http::{HeaderMap, HeaderName};
use rustls::server::{WebPkiClientVerifier, danger::ClientCertVerifier};
use rustls_pki_types::{CertificateDer, UnixTime};
use tidewatch_contract::{
    certificate::RuntimeCertificate,
    forwarded::{CLIENT_CERT, FORWARDED_CLIENT_CERT, parse_client_cert},
    v2::{ReadCallerError, parse_forwarded, read_caller},
};
use tidewatch_kit::tls::{self, TlsConfigError};
use tidewatch_trust::{ProxyIdentity, TrustBundle};

use crate::{
    http::single_value,
    ports::{
        peer::{Peer, Sender, Via},
        proxy,
        refusal::Refusal,
    },
};

/// A proxy that terminates TLS in front of this port.
pub struct Proxy {
    /// Roots of its certificate.
    pub roots: TrustBundle,
    /// Identity in its certificate.
    pub identity: ProxyIdentity,
}

/// Verifies callers. Clones share one state, which [`Self::replace`] exchanges.
#[derive(Clone)]
pub struct CallerVerifier(Arc<ArcSwap<Trust>>);

struct Trust {
    bundle: TrustBundle,
    /// Identity of the proxy, if there is one.
    proxy: Option<ProxyIdentity>,
    /// Verifier of forwarded certificates.
    clients: Arc<dyn ClientCertVerifier>,
}

impl CallerVerifier {
    /// Trusts clients that chain to a bundle. With a proxy only the proxy may connect, and the certificates that it
    /// forwards must chain to that bundle.
    ///
    /// # Errors
    /// [`TlsConfigError`] if a bundle is unusable.
    pub fn new(clients: TrustBundle, proxy: Option<Proxy>) -> Result<Self, TlsConfigError> {
        let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(clients.store()?), tls::provider());
        let verifier = builder.build().map_err(TlsConfigError::Verifier)?;
        let (bundle, proxy) = match proxy {
            None => (clients, None),
            Some(Proxy { roots, identity }) => (roots, Some(identity)),
        };
        let trust = Trust { bundle, proxy, clients: verifier };
        Ok(Self(Arc::new(ArcSwap::from_pointee(trust))))
    }

    /// Replaces the trust of this verifier and all its clones.
    pub(super) fn replace(&self, by: &Self) {
        self.0.store(by.0.load_full());
    }

    /// Returns the roots that the handshake demands.
    pub fn bundle(&self) -> TrustBundle {
        self.0.load().bundle.clone()
    }

    /// Identifies the client by the chain of a connection, leaf first, after the handshake has verified it.
    pub(super) fn identify(&self, chain: &[CertificateDer<'_>]) -> Peer {
        match (chain.first(), &self.0.load().proxy) {
            (Some(leaf), Some(identity)) if identity.is_named_by(leaf) => Peer::Proxy,
            (Some(leaf), None) => read_caller(leaf).map_or_else(
                |error| Peer::Rejected(error.into()),
                |caller| Peer::Runtime(caller.into(), proxy::intermediates(chain)),
            ),
            _ => Peer::Rejected(Refusal::NoCertificate),
        }
    }

    /// Returns the sender of a request at a time in Unix seconds. The header fields are trusted on the
    /// connection of the proxy, or of another replica, alone.
    pub(super) fn sender(&self, peer: &Peer, headers: &HeaderMap, now: i64) -> Result<Sender, Refusal> {
        let (certificate, intermediates, via) = match peer {
            Peer::Rejected(refusal) => return Err(*refusal),
            Peer::Client(_) => return Err(Refusal::NoCertificate),
            Peer::Runtime(caller, intermediates) => (caller.clone(), intermediates.clone(), Via::Client),
            Peer::Proxy => (self.forwarded(headers, now)?.into(), None, Via::Client),
            Peer::Replica(_) => (self.relayed(headers, now)?.into(), None, Via::Replica),
        };
        let leaf = &certificate.leaf;
        let is_valid = leaf.not_before <= now && now <= leaf.not_after;
        is_valid.then_some(Sender { certificate, intermediates, via }).ok_or(Refusal::NoCertificate)
    }

    fn forwarded(&self, headers: &HeaderMap, now: i64) -> Result<RuntimeCertificate, Refusal> {
        let mut values = headers.get_all(FORWARDED_CLIENT_CERT).iter();
        // The client itself may have sent a second value.
        let (Some(value), None) = (values.next(), values.next()) else { return Err(Refusal::NoCertificate) };
        self.verified(&parse_forwarded(value.as_bytes()).ok_or(Refusal::NoCertificate)?, &[], now)
    }

    fn relayed(&self, headers: &HeaderMap, now: i64) -> Result<RuntimeCertificate, Refusal> {
        let value = single_value(headers, &HeaderName::from_static(CLIENT_CERT)).ok_or(Refusal::NoCertificate)?;
        let leaf = parse_client_cert(value).ok_or(Refusal::NoCertificate)?;
        let intermediates = proxy::forwarded_intermediates(headers).ok_or(Refusal::NoCertificate)?;
        self.verified(&leaf, &intermediates, now)
    }

    /// Returns the caller of a forwarded certificate, after its chain was verified.
    fn verified(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: i64,
    ) -> Result<RuntimeCertificate, Refusal> {
        let verifier = self.0.load().clients.clone();
        let since = Duration::from_secs(u64::try_from(now).unwrap_or_default());
        let verified = verifier.verify_client_cert(leaf, intermediates, UnixTime::since_unix_epoch(since));
        verified.map_err(|_| Refusal::NoCertificate)?;
        Ok(read_caller(leaf)?)
    }
}

impl From<ReadCallerError> for Refusal {
    fn from(error: ReadCallerError) -> Self {
        match error {
            ReadCallerError::Empty | ReadCallerError::NotId => Self::CommonName,
            ReadCallerError::Unreadable | ReadCallerError::Several => Self::NoCertificate,
        }
    }
}
