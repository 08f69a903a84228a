//! Who holds the other end: a runtime itself, or the proxy that speaks for runtimes.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use http::HeaderMap;
use rustls::server::{WebPkiClientVerifier, danger::ClientCertVerifier};
use rustls_pki_types::{CertificateDer, UnixTime};
use tidewatch_shared::{
    forwarded::FORWARDED_CLIENT_CERT,
    tls::{self, TlsConfigError},
    v2::{Caller, ReadCallerError, forwarded},
};

use super::refusal::Refusal;
use crate::pki::{ProxyIdentity, TrustBundle};

/// A proxy that ends TLS in front of this port.
pub struct Proxy {
    /// The roots of its certificate.
    pub roots: TrustBundle,
    /// Whom its certificate names.
    pub identity: ProxyIdentity,
}

/// Who may call. Clones share one state, which [`Self::replace`] exchanges.
#[derive(Clone)]
pub struct Callers(Arc<ArcSwap<Admitted>>);

struct Admitted {
    bundle: TrustBundle,
    /// The proxy, and what verifies the certificates that it forwards.
    proxy: Option<(ProxyIdentity, Arc<dyn ClientCertVerifier>)>,
}

/// Who holds the other end of a connection.
pub struct Peer(pub(super) Who);

pub(super) enum Who {
    /// A runtime.
    Runtime(Caller),
    /// The trusted proxy: each request names its runtime.
    Proxy,
    /// Somebody who is refused whatever they say.
    Nobody(Refusal),
}

impl Callers {
    /// Clients that chain to a bundle. With a proxy nobody else may connect, and the leaves that it forwards must chain to that bundle.
    ///
    /// # Errors
    /// [`TlsConfigError`]: a bundle that cannot be used.
    pub fn new(clients: TrustBundle, proxy: Option<Proxy>) -> Result<Self, TlsConfigError> {
        let admitted = match proxy {
            None => Admitted { bundle: clients, proxy: None },
            Some(Proxy { roots, identity }) => {
                let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(clients.store()?), tls::provider());
                let verifier = builder.build().map_err(TlsConfigError::Verifier)?;
                Admitted { bundle: roots, proxy: Some((identity, verifier)) }
            }
        };
        Ok(Self(Arc::new(ArcSwap::from_pointee(admitted))))
    }

    /// From now on, and in all clones, those of the other one may call and nobody else.
    pub(super) fn replace(&self, by: &Self) {
        self.0.store(by.0.load_full());
    }

    /// What the handshake demands: a chain to one of these roots.
    #[must_use]
    pub fn bundle(&self) -> TrustBundle {
        self.0.load().bundle.clone()
    }

    /// Reads the leaf of a connection, whose chain the handshake has verified.
    pub(super) fn peer(&self, leaf: Option<&CertificateDer<'_>>) -> Peer {
        Peer(match (leaf, &self.0.load().proxy) {
            (Some(leaf), Some((identity, _))) if identity.is_named_by(leaf) => Who::Proxy,
            (Some(leaf), None) => Caller::read(leaf).map_or_else(|why| Who::Nobody(why.into()), Who::Runtime),
            _ => Who::Nobody(Refusal::Certificate),
        })
    }

    /// Who makes this request at a time in Unix seconds. The header counts on the proxy's connection alone.
    pub(super) fn caller(&self, peer: &Peer, headers: &HeaderMap, now: i64) -> Result<Caller, Refusal> {
        let caller = match &peer.0 {
            Who::Nobody(refusal) => return Err(*refusal),
            Who::Runtime(caller) => caller.clone(),
            Who::Proxy => self.forwarded(headers, now)?,
        };
        let valid = caller.not_before <= now && now <= caller.not_after;
        valid.then_some(caller).ok_or(Refusal::Certificate)
    }

    fn forwarded(&self, headers: &HeaderMap, now: i64) -> Result<Caller, Refusal> {
        let mut values = headers.get_all(FORWARDED_CLIENT_CERT).iter();
        // A second value may be what the client itself wrote.
        let (Some(value), None) = (values.next(), values.next()) else { return Err(Refusal::Certificate) };
        let leaf = forwarded(value.as_bytes()).map_err(|_| Refusal::Certificate)?;
        let admitted = self.0.load();
        let (_, verifier) = admitted.proxy.as_ref().ok_or(Refusal::Certificate)?;
        let since = Duration::from_secs(u64::try_from(now).unwrap_or_default());
        let verified = verifier.verify_client_cert(&leaf, &[], UnixTime::since_unix_epoch(since));
        verified.map_err(|_| Refusal::Certificate)?;
        Ok(Caller::read(&leaf)?)
    }
}

impl From<ReadCallerError> for Refusal {
    fn from(why: ReadCallerError) -> Self {
        match why {
            ReadCallerError::Empty | ReadCallerError::NotId => Self::Name,
            ReadCallerError::Unreadable | ReadCallerError::Several => Self::Certificate,
        }
    }
}
