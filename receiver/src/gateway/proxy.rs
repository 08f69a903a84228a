//! Behind a proxy that ends TLS: only that proxy may connect, and it tells each client's certificate in one field.
//!
//! The proxy proves who it is by its own certificate, in the handshake. What it tells is verified again against the roots of
//! the agents, and the request's signature proves that the client has the key: so a proxy can withhold, but not forge.

use std::{
    collections::HashMap,
    fmt,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use http::HeaderMap;
use rustls::{RootCertStore, server::WebPkiClientVerifier, server::danger::ClientCertVerifier};
use rustls_pki_types::{CertificateDer, DnsName, UnixTime};
use thiserror::Error;
use tidewatch_shared::{
    certificate::{Names, RuntimeCertificate, fingerprint},
    forwarded::{CLIENT_CERT, FORWARDED_CLIENT_CERT, parse_client_cert, parse_xfcc},
    identity::TrustDomain,
    tls::{self, TlsConfig},
};
use tokio::time::Instant;

use super::{Now, refusal::Refusal};

/// Leaves that were verified are remembered so long, so that a flood through the proxy costs no verification each time.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Leaves that are remembered; when there are more, all are forgotten.
const REMEMBERED_LEAVES: usize = 16_384;

/// The text names no proxy.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a proxy is named by a SPIFFE URI or a DNS name")]
pub struct InvalidProxyIdentity;

/// Whom the proxy's certificate must name (`--proxy-identity`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyIdentity(Name);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Name {
    /// It must be the only URI of the certificate (X509-SVID, section 2).
    Uri(String),
    Dns(String),
}

impl ProxyIdentity {
    /// Whether a certificate, whose chain was verified, names this proxy.
    #[must_use]
    pub fn is_named_by(&self, leaf: &CertificateDer<'_>) -> bool {
        let Ok(names) = Names::read(leaf) else { return false };
        match &self.0 {
            Name::Uri(uri) => names.uris == [uri.as_str()],
            Name::Dns(name) => names.dns.iter().any(|dns| dns.eq_ignore_ascii_case(name)),
        }
    }
}

impl FromStr for ProxyIdentity {
    type Err = InvalidProxyIdentity;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = match text.strip_prefix("spiffe://") {
            Some(rest) if !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Name::Uri(text.to_owned())
            }
            Some(_) => return Err(InvalidProxyIdentity),
            None => DnsName::try_from(text).map(|_| Name::Dns(text.to_owned())).map_err(|_| InvalidProxyIdentity)?,
        };
        Ok(Self(name))
    }
}

impl fmt::Display for ProxyIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Name::Uri(name) | Name::Dns(name)) = &self.0;
        f.write_str(name)
    }
}

/// The proxy that ends TLS in front of this port.
#[derive(Clone, Debug)]
pub struct Proxy {
    identity: ProxyIdentity,
    verifier: Arc<ArcSwap<Verifier>>,
}

type Verifier = Arc<dyn ClientCertVerifier>;

impl Proxy {
    /// Takes the proxy's name, and the roots of the agents that it speaks for.
    ///
    /// # Errors
    /// [`TlsConfig::Verifier`].
    pub fn new(identity: ProxyIdentity, clients: RootCertStore) -> Result<Self, TlsConfig> {
        let verifier = Arc::new(ArcSwap::from_pointee(verifier(clients)?));
        Ok(Self { identity, verifier })
    }

    /// From now on the agents that it speaks for must chain to these roots, those too that chained to others just before.
    ///
    /// # Errors
    /// [`TlsConfig::Verifier`]; then nothing has changed.
    pub fn trust(&self, clients: RootCertStore) -> Result<(), TlsConfig> {
        self.verifier.store(Arc::new(verifier(clients)?));
        Ok(())
    }

    pub(super) const fn identity(&self) -> &ProxyIdentity {
        &self.identity
    }
}

fn verifier(clients: RootCertStore) -> Result<Verifier, TlsConfig> {
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(clients), tls::provider());
    builder.build().map_err(TlsConfig::Verifier)
}

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
        let (name, verifier) = (fingerprint(&leaf), self.proxy.verifier.load_full());
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

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, SanType};

    use super::*;

    fn leaf(names: &[SanType]) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.subject_alt_names = names.to_vec();
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn a_proxy_is_named_by_its_certificate_exactly() {
        let uri = |text: &str| SanType::URI(text.try_into().unwrap());
        let dns = |text: &str| SanType::DnsName(text.try_into().unwrap());
        let spiffe: ProxyIdentity = "spiffe://kcp/ns/istio-system/sa/gateway".parse().unwrap();
        for (names, is_it) in [
            (vec![uri("spiffe://kcp/ns/istio-system/sa/gateway")], true),
            (vec![dns("x"), uri("spiffe://kcp/ns/istio-system/sa/gateway")], true),
            (vec![uri("spiffe://kcp/ns/istio-system/sa/gateway"), uri("spiffe://kcp/x")], false),
            (vec![uri("spiffe://kcp/ns/istio-system/sa/gateway2")], false),
            (vec![dns("spiffe")], false),
            (vec![], false),
        ] {
            assert_eq!(spiffe.is_named_by(&leaf(&names)), is_it, "{names:?}");
        }
        let name: ProxyIdentity = "gateway.kcp.test".parse().unwrap();
        for (names, is_it) in [
            (vec![dns("x"), dns("Gateway.kcp.test")], true),
            (vec![dns("*.kcp.test")], false),
            (vec![dns("a.gateway.kcp.test")], false),
            (vec![uri("gateway.kcp.test")], false),
        ] {
            assert_eq!(name.is_named_by(&leaf(&names)), is_it, "{names:?}");
        }
        assert!(!name.is_named_by(&CertificateDer::from(vec![0])));
    }

    #[test]
    fn what_names_no_proxy_is_refused() {
        for bad in ["", "spiffe://", "https://a", "a b", "spiffe://a b"] {
            assert_eq!(bad.parse::<ProxyIdentity>(), Err(InvalidProxyIdentity), "{bad}");
        }
    }
}
