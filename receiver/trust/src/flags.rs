//! Flags of the certificates.

use std::{num::NonZeroU32, path::PathBuf, str::FromStr, time::Duration};

use clap::Args;
use rustls_pki_types::ServerName;
use thiserror::Error;
use tidewatch_cluster::flags::seconds;

use super::ProxyIdentity;

/// Issuer and validity of certificates.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Certificates")]
pub struct Flags {
    /// Issuer of the runtimes' certificates unless --client-ca is given: `builtin`, or `cert-manager:<kind>/<name>` of
    /// an issuer of cert-manager.io
    #[arg(long, env = "TIDEWATCH_ISSUER", default_value = "builtin")]
    pub issuer: IssuerName,

    /// PEM file with the roots of the certificates that cert-manager issues; required with it
    #[arg(long, env = "TIDEWATCH_ISSUER_CA")]
    pub issuer_ca: Option<PathBuf>,

    /// PEM file with the roots of the event port's certificate, for agents to trust, with --tls-cert and without
    /// --client-ca
    #[arg(long, env = "TIDEWATCH_SERVER_CA", requires = "tls_cert", conflicts_with = "client_ca")]
    pub server_ca: Option<PathBuf>,

    /// Further names and addresses in the receiver's certificate that the built-in CA issues, besides those of
    /// --authority and of the URLs for agents
    #[arg(long, env = "TIDEWATCH_SERVER_NAMES", value_delimiter = ',', value_parser = server_name)]
    pub server_names: Vec<ServerName<'static>>,

    /// Namespace of the Secret with the built-in CA, other than the receiver's, so that who may read the access Secrets
    /// cannot read the CA
    #[arg(long, env = "TIDEWATCH_CA_NAMESPACE", value_name = "NAMESPACE")]
    pub ca_namespace: Option<String>,

    /// Validity of a runtime's certificate, in seconds
    #[arg(long = "certificate-validity-seconds", env = "TIDEWATCH_CERTIFICATE_VALIDITY_SECONDS", default_value = "86400", value_name = "SECONDS", value_parser = seconds(5..=31_536_000))]
    pub certificate_validity: Duration,

    /// Validity of the receiver's own certificate that the built-in CA issues, in seconds
    #[arg(long = "server-certificate-validity-seconds", env = "TIDEWATCH_SERVER_CERTIFICATE_VALIDITY_SECONDS", default_value = "2592000", value_name = "SECONDS", value_parser = seconds(5..=31_536_000))]
    pub server_certificate_validity: Duration,

    /// Validity of a root of the built-in CA, in seconds
    #[arg(long = "ca-validity-seconds", env = "TIDEWATCH_CA_VALIDITY_SECONDS", default_value = "157680000", value_name = "SECONDS", value_parser = seconds(60..=1_576_800_000))]
    pub ca_validity: Duration,

    /// Age in seconds at which the built-in CA replaces its root automatically
    #[arg(long = "ca-rotation-seconds", env = "TIDEWATCH_CA_ROTATION_SECONDS", default_value = "63072000", value_name = "SECONDS", value_parser = seconds(10..=1_576_800_000))]
    pub ca_rotation_age: Duration,

    /// Maximum number of agents per second that are requested to renew a certificate whose issuer was replaced
    #[arg(long, env = "TIDEWATCH_RENEWALS_PER_SECOND", default_value = "20")]
    pub renewals_per_second: NonZeroU32,
}

impl Flags {
    /// Namespace of the CA's Secret of a receiver in `own`.
    pub fn ca_namespace<'a>(&'a self, own: &'a str) -> &'a str {
        self.ca_namespace.as_deref().unwrap_or(own)
    }
}

/// Parses a DNS name or an IP address.
pub(super) fn server_name(text: &str) -> Result<ServerName<'static>, &'static str> {
    text.to_owned().try_into().map_err(|_| "a server name is a DNS name or an IP address")
}

/// Issuer of the runtimes' certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IssuerName {
    /// The built-in CA.
    Builtin,
    /// A cert-manager.io issuer.
    CertManager {
        /// `Issuer` in the receiver's namespace, or `ClusterIssuer`.
        kind: String,
        /// Its name.
        name: String,
    },
}

/// The text names no issuer: neither `builtin` nor `cert-manager:<kind>/<name>`.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("an issuer is builtin or cert-manager:<kind>/<name>")]
pub struct ParseIssuerError;

impl FromStr for IssuerName {
    type Err = ParseIssuerError;

    fn from_str(text: &str) -> Result<Self, ParseIssuerError> {
        if text == "builtin" {
            return Ok(Self::Builtin);
        }
        let (kind, name) =
            text.strip_prefix("cert-manager:").and_then(|rest| rest.split_once('/')).ok_or(ParseIssuerError)?;
        let is_kind = !kind.is_empty() && kind.len() <= 63 && kind.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let is_name = (1..=253).contains(&name.len())
            && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'));
        if is_kind && is_name {
            Ok(Self::CertManager { kind: kind.to_owned(), name: name.to_owned() })
        } else {
            Err(ParseIssuerError)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn issuer_is_builtin_or_of_cert_manager() {
        let of_cert_manager = |kind: &str, name: &str| IssuerName::CertManager { kind: kind.into(), name: name.into() };
        for (good, issuer) in [
            ("builtin", IssuerName::Builtin),
            ("cert-manager:Issuer/a", of_cert_manager("Issuer", "a")),
            ("cert-manager:ClusterIssuer/kyma.root-1", of_cert_manager("ClusterIssuer", "kyma.root-1")),
        ] {
            assert_eq!(good.parse(), Ok(issuer), "{good}");
        }
        for bad in [
            "",
            "built-in",
            "cert-manager:",
            "cert-manager:Issuer",
            "cert-manager:/a",
            "cert-manager:Issuer/",
            "cert-manager:Issuer/A b",
        ] {
            assert_eq!(bad.parse::<IssuerName>(), Err(ParseIssuerError), "{bad}");
        }
    }
}
/// TLS of the event port.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Event port")]
pub struct TlsFlags {
    /// PEM file with the certificate chain of the event port, leaf first, reloaded on change; without it the built-in
    /// CA issues one
    #[arg(long, env = "TIDEWATCH_TLS_CERT", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the key of --tls-cert, in PKCS#8, PKCS#1 or SEC1, reloaded on change
    #[arg(long, env = "TIDEWATCH_TLS_KEY", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// PEM file with the roots of the agents' certificates, which another issuer provides: the receiver issues none
    /// then
    #[arg(long, env = "TIDEWATCH_CLIENT_CA", requires = "tls_cert")]
    pub client_ca: Option<PathBuf>,
    /// PEM file with the roots of a proxy that terminates TLS in front of the event port; only that proxy may connect
    /// then, and must overwrite Client-Cert and X-Forwarded-Client-Cert of client requests
    #[arg(long, env = "TIDEWATCH_PROXY_CA", requires = "proxy_identity")]
    pub proxy_ca: Option<PathBuf>,
    /// SPIFFE URI or DNS name in the certificate of the proxy of --proxy-ca
    #[arg(long, env = "TIDEWATCH_PROXY_IDENTITY", requires = "proxy_ca")]
    pub proxy_identity: Option<ProxyIdentity>,
}
