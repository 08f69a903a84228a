//! Identity of a TLS-terminating proxy in front of the event port, and the verifier of the client certificates that it forwards.

use std::{str::FromStr, sync::Arc};

use arc_swap::ArcSwap;
use rustls::{RootCertStore, server::WebPkiClientVerifier, server::danger::ClientCertVerifier};
use rustls_pki_types::{CertificateDer, DnsName};
use thiserror::Error;
use tidewatch_contract::certificate::SubjectAltNames;
use tidewatch_kit::tls::{self, TlsConfigError};

/// The text is neither a SPIFFE URI nor a DNS name.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a proxy is named by a SPIFFE URI or a DNS name")]
pub struct ParseProxyIdentityError;

/// Name that the proxy's certificate must carry (`--proxy-identity`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyIdentity(Name);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Name {
    /// Must be the only URI of the certificate (X509-SVID, section 2).
    Uri(String),
    Dns(String),
}

impl ProxyIdentity {
    /// True if the certificate names this proxy. The caller has verified its chain.
    pub fn is_named_by(&self, leaf: &CertificateDer<'_>) -> bool {
        let Ok(names) = SubjectAltNames::read(leaf) else { return false };
        match &self.0 {
            Name::Uri(uri) => names.uris == [uri.as_str()],
            Name::Dns(name) => names.dns.iter().any(|dns| dns.eq_ignore_ascii_case(name)),
        }
    }
}

impl FromStr for ProxyIdentity {
    type Err = ParseProxyIdentityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = match text.strip_prefix("spiffe://") {
            Some(rest) if !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Name::Uri(text.to_owned())
            }
            Some(_) => return Err(ParseProxyIdentityError),
            None => DnsName::try_from(text).map(|_| Name::Dns(text.to_owned())).map_err(|_| ParseProxyIdentityError)?,
        };
        Ok(Self(name))
    }
}

/// The proxy that terminates TLS in front of the event port.
#[derive(Clone, Debug)]
pub struct Proxy {
    /// Identity in its certificate.
    pub identity: ProxyIdentity,
    verifier: Arc<ArcSwap<Verifier>>,
}

/// Verifier of the chains of agents' certificates.
pub type Verifier = Arc<dyn ClientCertVerifier>;

impl Proxy {
    /// Takes the proxy's name, and the roots of the agents behind it.
    ///
    /// # Errors
    /// [`TlsConfigError::Verifier`].
    pub fn new(identity: ProxyIdentity, clients: RootCertStore) -> Result<Self, TlsConfigError> {
        let verifier = Arc::new(ArcSwap::from_pointee(verifier(clients)?));
        Ok(Self { identity, verifier })
    }

    /// Replaces the roots to which agents behind the proxy must chain, at once also for agents with certificates of
    /// other roots.
    ///
    /// # Errors
    /// [`TlsConfigError::Verifier`]; then nothing has changed.
    pub fn trust(&self, clients: RootCertStore) -> Result<(), TlsConfigError> {
        self.verifier.store(Arc::new(verifier(clients)?));
        Ok(())
    }

    /// Verifier of forwarded client certificates; replaced with each change of the roots.
    pub fn verifier(&self) -> Arc<Verifier> {
        self.verifier.load_full()
    }
}

/// Verifier of client certificates that chain to one of the roots.
pub(super) fn verifier(clients: RootCertStore) -> Result<Verifier, TlsConfigError> {
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(clients), tls::provider());
    builder.build().map_err(TlsConfigError::Verifier)
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
    fn proxy_certificate_must_match_exactly() {
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
    fn invalid_proxy_identities_are_refused() {
        for bad in ["", "spiffe://", "https://a", "a b", "spiffe://a b"] {
            assert_eq!(bad.parse::<ProxyIdentity>(), Err(ParseProxyIdentityError), "{bad}");
        }
    }
}
