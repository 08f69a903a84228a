//! Client certificates that a TLS-terminating proxy, or another replica, forwards in a header field.
//!
//! The proxy or replica authenticates by its own certificate in the handshake. Each forwarded certificate is verified again
//! against the roots of the agents, and the request's signature proves possession of the key: it can withhold requests
//! but not forge them.

use std::{collections::HashMap, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderName};
use parking_lot::Mutex;
use rustls_pki_types::{CertificateDer, UnixTime};
use tidewatch_api::identity::TrustDomain;
use tidewatch_contract::{
    certificate::{RuntimeCertificate, fingerprint},
    forwarded::{
        CLIENT_CERT, CLIENT_CERT_CHAIN, FORWARDED_CLIENT_CERT, MAX_CHAIN, parse_client_cert, parse_client_cert_chain,
        parse_xfcc,
    },
};
use tidewatch_trust::Verifier;
use tokio::time::Instant;

use super::{Now, refusal::Refusal};
use crate::http::single_value;

/// Lifetime of a verified certificate in the cache: that of a connection of the event port, on which the certificate of an
/// agent is verified once. It outlasts several heartbeats, so that an agent with few events needs no verification for each
/// of them. Expiry and revocation are checked with each request.
const CACHE_TTL: Duration = Duration::from_secs(30 * 60);
/// Certificates in the cache at most, above the connections of the event port; beyond it the cache is cleared.
const CACHE_CAPACITY: usize = 32_768;

/// Reads and verifies forwarded certificates.
pub(super) struct ForwardedClients {
    /// Returns the verifier of the agents' certificates, which is replaced with each change of their roots.
    verifier: Box<dyn Fn() -> Arc<Verifier> + Send + Sync>,
    domain: TrustDomain,
    /// Verified certificates by fingerprint.
    cache: Mutex<HashMap<String, VerifiedCertificate>>,
}

struct VerifiedCertificate {
    certificate: Arc<RuntimeCertificate>,
    expires: Instant,
    /// Verifier with the roots of that time; the entry is invalid with other ones.
    verifier: Arc<Verifier>,
}

impl ForwardedClients {
    pub(super) fn new(verifier: impl Fn() -> Arc<Verifier> + Send + Sync + 'static, domain: TrustDomain) -> Self {
        Self { verifier: Box::new(verifier), domain, cache: Mutex::default() }
    }

    /// Returns the verified certificate of a forwarded request.
    pub(super) fn read(&self, headers: &HeaderMap, now: Now) -> Result<Arc<RuntimeCertificate>, Refusal> {
        let leaf = forwarded_leaf(headers).ok_or(Refusal::Proxy)?;
        let name = fingerprint(&leaf);
        let verifier = (self.verifier)();
        let mut cache = self.cache.lock();
        let is_valid =
            |entry: &&VerifiedCertificate| now.instant < entry.expires && Arc::ptr_eq(&entry.verifier, &verifier);
        if let Some(entry) = cache.get(&name).filter(is_valid) {
            return Ok(entry.certificate.clone());
        }
        drop(cache);
        let time = UnixTime::since_unix_epoch(Duration::from_secs(now.unix.try_into().unwrap_or(0)));
        let intermediates = forwarded_intermediates(headers).ok_or(Refusal::Proxy)?;
        verifier.verify_client_cert(&leaf, &intermediates, time).map_err(|_| Refusal::Certificate)?;
        let certificate = RuntimeCertificate::read(&leaf, &self.domain).map_err(|_| Refusal::Identity)?;
        let certificate = Arc::new(certificate);
        cache = self.cache.lock();
        if cache.len() >= CACHE_CAPACITY {
            cache.clear();
        }
        let expires = now.instant + CACHE_TTL;
        cache.insert(name, VerifiedCertificate { certificate: certificate.clone(), expires, verifier });
        Ok(certificate)
    }
}

/// Certificates between a client's certificate and a root, which the client sent in its handshake: none in most fleets, and at most
/// as many as a replica passes on.
pub(super) type Intermediates = Option<Arc<[CertificateDer<'static>]>>;

/// Returns those of a verified chain, leaf first.
pub(super) fn intermediates(chain: &[CertificateDer<'_>]) -> Intermediates {
    let rest = chain.get(1..).filter(|rest| !rest.is_empty())?;
    Some(rest.iter().take(MAX_CHAIN).map(|certificate| certificate.clone().into_owned()).collect())
}

/// Returns the forwarded certificates between the client's and a root; `None` if their field is malformed.
pub(super) fn forwarded_intermediates(headers: &HeaderMap) -> Option<Vec<CertificateDer<'static>>> {
    if !headers.contains_key(CLIENT_CERT_CHAIN) {
        return Some(Vec::new());
    }
    parse_client_cert_chain(single_value(headers, &HeaderName::from_static(CLIENT_CERT_CHAIN))?)
}

/// Returns the certificate if exactly one of the two fields occurs, and occurs once.
fn forwarded_leaf(headers: &HeaderMap) -> Option<CertificateDer<'static>> {
    let all = |name| headers.get_all(name).iter();
    let mut plain = all(CLIENT_CERT);
    let mut envoy = all(FORWARDED_CLIENT_CERT);
    match (plain.next(), plain.next(), envoy.next(), envoy.next()) {
        (Some(value), None, None, None) => parse_client_cert(value.to_str().ok()?),
        (None, None, Some(value), None) => parse_xfcc(value.to_str().ok()?),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    use tidewatch_trust::Proxy;

    use super::*;
    use crate::ports::tests::testing::{Agent, ca, domain};

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn certificate_is_verified_once_in_half_an_hour() {
        let unix = 1_764_000_000;
        let instant = Instant::now();
        let ca = ca(unix);
        let identity = "spiffe://kyma.local/runtime/proxy".parse().unwrap();
        let proxy = Proxy::new(identity, ca.trust_bundle().store().unwrap()).unwrap();
        let roots = proxy.clone();
        let clients = ForwardedClients::new(move || roots.verifier(), domain());
        let leaf = &Agent::new(&ca, "r", unix).identity.chain[0];
        let mut headers = HeaderMap::new();
        headers.insert(CLIENT_CERT, format!(":{}:", STANDARD.encode(leaf)).parse().unwrap());
        // A verification at this time fails, so an accepted certificate comes from the cache.
        let expired = unix + 25 * 60 * 60;
        let read = |unix, after| clients.read(&headers, Now { unix, instant: instant + after }).is_ok();
        assert!(!read(expired, Duration::ZERO) && read(unix, Duration::ZERO));
        assert!(read(expired, 29 * MINUTE) && !read(expired, 30 * MINUTE));
        assert!(read(unix, 30 * MINUTE) && read(expired, 31 * MINUTE));
        proxy.trust(ca.trust_bundle().store().unwrap()).unwrap();
        assert!(!read(expired, 31 * MINUTE), "the roots were replaced");
    }
}
