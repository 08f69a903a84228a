//! Client certificates that a TLS-terminating proxy forwards in a header field.
//!
//! The proxy authenticates by its own certificate in the handshake. Each forwarded certificate is verified again against the roots of
//! the agents, and the request's signature proves possession of the key: a proxy can withhold requests but not forge them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::HeaderMap;
use rustls_pki_types::{CertificateDer, UnixTime};
use tidewatch_shared::{
    certificate::{RuntimeCertificate, fingerprint},
    forwarded::{CLIENT_CERT, FORWARDED_CLIENT_CERT, parse_client_cert, parse_xfcc},
    identity::TrustDomain,
};
use tokio::time::Instant;

use super::{Now, refusal::Refusal};
use crate::pki::{Proxy, Verifier};

/// Leaves that were verified are remembered so long, so that a flood through the proxy costs no verification each time.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Leaves that are remembered; when there are more, all are forgotten.
const REMEMBERED_LEAVES: usize = 16_384;

/// Reads and judges the certificates that the proxy tells.
pub(super) struct Clients {
    proxy: Proxy,
    domain: TrustDomain,
    known: Mutex<HashMap<String, Known>>,
}

/// A leaf that was verified.
struct Known {
    certificate: Arc<RuntimeCertificate>,
    until: Instant,
    /// By whom: with other roots it says nothing.
    verifier: Arc<Verifier>,
}

impl Clients {
    pub(super) fn new(proxy: Proxy, domain: TrustDomain) -> Self {
        Self { proxy, domain, known: Mutex::default() }
    }

    pub(super) const fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    /// Who speaks in a request that came through the proxy.
    pub(super) fn read(&self, headers: &HeaderMap, now: Now) -> Result<Arc<RuntimeCertificate>, Refusal> {
        let leaf = told(headers).ok_or(Refusal::Proxy)?;
        let (name, verifier) = (fingerprint(&leaf), self.proxy.verifier());
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = |known: &&Known| now.instant < known.until && Arc::ptr_eq(&known.verifier, &verifier);
        if let Some(known) = known.get(&name).filter(holds) {
            return Ok(known.certificate.clone());
        }
        drop(known);
        let time = UnixTime::since_unix_epoch(Duration::from_secs(now.unix.try_into().unwrap_or(0)));
        verifier.verify_client_cert(&leaf, &[], time).map_err(|_| Refusal::Certificate)?;
        let certificate = RuntimeCertificate::read(&leaf, &self.domain).map_err(|_| Refusal::Identity)?;
        let certificate = Arc::new(certificate);
        known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REMEMBERED_LEAVES {
            known.clear();
        }
        known.insert(name, Known { certificate: certificate.clone(), until: now.instant + REMEMBERED, verifier });
        Ok(certificate)
    }
}

/// The certificate in the only field of both.
fn told(headers: &HeaderMap) -> Option<CertificateDer<'static>> {
    let all = |name| headers.get_all(name).iter();
    let (mut plain, mut envoy) = (all(CLIENT_CERT), all(FORWARDED_CLIENT_CERT));
    match (plain.next(), plain.next(), envoy.next(), envoy.next()) {
        (Some(value), None, None, None) => parse_client_cert(value.to_str().ok()?).ok(),
        (None, None, Some(value), None) => parse_xfcc(value.to_str().ok()?).ok(),
        _ => None,
    }
}
