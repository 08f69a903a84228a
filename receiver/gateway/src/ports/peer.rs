//! Clients of connections and senders of requests.

use std::{net::IpAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rustls_pki_types::{CertificateDer, UnixTime};
use tidewatch_api::{identity::TrustDomain, replica::ReplicaName};
use tidewatch_contract::certificate::{Leaf, RuntimeCertificate};
use tidewatch_trust::{Verifier, replica_of};

use super::{proxy::Intermediates, refusal::Refusal};

/// Client of a connection, identified once. It decides the limits of the connection.
pub enum Peer {
    /// A single runtime, and the certificates between its own and a root. The number of its connections is limited.
    Runtime(Arc<RuntimeCertificate>, Intermediates),
    /// The trusted proxy, which forwards a certificate with each request. It has many runtimes, and any number of connections.
    Proxy,
    /// Another replica, which passes the client's certificate or address on with each request. Only the relay port identifies one.
    Replica(Box<ConnectedReplica>),
    /// A client without a certificate, with its address, if it is known.
    Client(Option<IpAddr>),
    /// A client each of whose requests is refused.
    Rejected(Refusal),
}

/// Sender of a request, by its certificate.
pub struct Sender {
    pub(super) certificate: Arc<RuntimeCertificate>,
    pub(super) intermediates: Intermediates,
    pub(super) via: Via,
}

/// Way by which a request arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    /// Its client, or a proxy in front of this replica, sent it.
    Client,
    /// Another replica accepted and relayed it.
    Replica,
}

/// Another replica, by the certificate of its connection.
pub struct ConnectedReplica {
    pub(super) name: ReplicaName,
    chain: Vec<CertificateDer<'static>>,
    /// End of its validity, in Unix seconds.
    not_after: i64,
    /// Verifier that last accepted the chain; another one has other roots. `None` once a request found it invalid.
    verifier: Mutex<Option<Arc<Verifier>>>,
}

impl ConnectedReplica {
    /// Identifies a replica by the chain of its handshake, leaf first, which is verified again: the roots may have been replaced
    /// since the handshake began.
    pub(super) fn read(
        chain: &[CertificateDer<'_>],
        domain: &TrustDomain,
        verifier: Arc<Verifier>,
        now: i64,
    ) -> Option<Self> {
        let leaf = chain.first()?;
        let name = replica_of(leaf, domain)?;
        let not_after = Leaf::read(leaf).ok()?.not_after;
        let chain: Vec<_> = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        is_verified(&chain, &verifier, now).then(|| Self {
            name,
            chain,
            not_after,
            verifier: Mutex::new(Some(verifier)),
        })
    }

    /// True while its certificate is valid by this verifier, and never again after that. A connection outlives many requests, and
    /// no root that was removed is trusted over one.
    pub(super) fn is_valid(&self, verifier: &Arc<Verifier>, now: i64) -> bool {
        let mut last = self.verifier.lock();
        let is_accepted = |last: &Arc<Verifier>| Arc::ptr_eq(last, verifier) || is_verified(&self.chain, verifier, now);
        let is_valid = now <= self.not_after && last.as_ref().is_some_and(is_accepted);
        *last = is_valid.then(|| verifier.clone());
        is_valid
    }
}

fn is_verified(chain: &[CertificateDer<'_>], verifier: &Verifier, now: i64) -> bool {
    let time = UnixTime::since_unix_epoch(Duration::from_secs(now.try_into().unwrap_or(0)));
    chain.split_first().is_some_and(|(leaf, rest)| verifier.verify_client_cert(leaf, rest, time).is_ok())
}
