//! Flags of this room.

use std::{fmt, num::NonZeroU32, path::PathBuf, str::FromStr, time::Duration};

use clap::Args;
use thiserror::Error;

use super::ProxyIdentity;

/// Who issues certificates, and how long they hold.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct Flags {
    /// Who issues the runtimes' certificates when their roots are not given as a file: `builtin`, or
    /// `cert-manager:<kind>/<name>` of an issuer of cert-manager.io.
    #[arg(long, env = "TIDEWATCH_ISSUER", default_value = "builtin")]
    pub issuer: IssuerName,

    /// The roots of the certificates that cert-manager issues, in PEM; needed with it.
    #[arg(long, env = "TIDEWATCH_ISSUER_CA")]
    pub issuer_ca: Option<PathBuf>,

    /// The roots of the event port's certificate when that is given as files and the agents' roots are not: what agents shall trust.
    #[arg(long, env = "TIDEWATCH_SERVER_CA", requires = "tls_cert", conflicts_with = "client_ca")]
    pub server_ca: Option<PathBuf>,

    /// Further names and addresses of this receiver for the certificate that the built-in CA issues to it; those of --authority and of
    /// the URLs that agents get are in it already.
    #[arg(long, env = "TIDEWATCH_SERVER_NAMES", value_delimiter = ',')]
    pub server_names: Vec<super::ServerName>,

    /// How long a runtime's certificate holds, in seconds.
    #[arg(long, env = "TIDEWATCH_CERTIFICATE_VALIDITY_SECONDS", default_value_t = 86_400, value_parser = clap::value_parser!(u32).range(5..=31_536_000))]
    pub certificate_validity_seconds: u32,

    /// How long the receiver's own certificate holds when the built-in CA issues it, in seconds.
    #[arg(long, env = "TIDEWATCH_SERVER_CERTIFICATE_VALIDITY_SECONDS", default_value_t = 2_592_000, value_parser = clap::value_parser!(u32).range(5..=31_536_000))]
    pub server_certificate_validity_seconds: u32,

    /// How long a root of the built-in CA holds, in seconds.
    #[arg(long, env = "TIDEWATCH_CA_VALIDITY_SECONDS", default_value_t = 157_680_000, value_parser = clap::value_parser!(u32).range(60..=1_576_800_000))]
    pub ca_validity_seconds: u32,

    /// At which age the root of the built-in CA is replaced by itself, in seconds.
    #[arg(long, env = "TIDEWATCH_CA_ROTATION_SECONDS", default_value_t = 63_072_000, value_parser = clap::value_parser!(u32).range(10..=1_576_800_000))]
    pub ca_rotation_seconds: u32,

    /// Agents in one second that are asked to renew a certificate whose issuer was replaced.
    #[arg(long, env = "TIDEWATCH_RENEWALS_PER_SECOND", default_value = "20")]
    pub renewals_per_second: NonZeroU32,
}

impl Flags {
    pub(crate) const fn runtime_validity(&self) -> Duration {
        Duration::from_secs(self.certificate_validity_seconds as u64)
    }

    pub(crate) const fn server_validity(&self) -> Duration {
        Duration::from_secs(self.server_certificate_validity_seconds as u64)
    }

    pub(crate) const fn ca_validity(&self) -> Duration {
        Duration::from_secs(self.ca_validity_seconds as u64)
    }

    pub(crate) const fn ca_rotation(&self) -> Duration {
        Duration::from_secs(self.ca_rotation_seconds as u64)
    }
}

/// Who issues the runtimes' certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IssuerName {
    /// The built-in CA.
    Builtin,
    /// An issuer of cert-manager.io.
    CertManager {
        /// `Issuer` in the receiver's namespace, or `ClusterIssuer`.
        kind: String,
        /// Its name.
        name: String,
    },
}

/// The text names no issuer.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("an issuer is builtin or cert-manager:<kind>/<name>")]
pub struct InvalidIssuer;

impl FromStr for IssuerName {
    type Err = InvalidIssuer;

    fn from_str(text: &str) -> Result<Self, InvalidIssuer> {
        if text == "builtin" {
            return Ok(Self::Builtin);
        }
        let (kind, name) =
            text.strip_prefix("cert-manager:").and_then(|rest| rest.split_once('/')).ok_or(InvalidIssuer)?;
        let is_kind = !kind.is_empty() && kind.len() <= 63 && kind.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let is_name = (1..=253).contains(&name.len())
            && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'));
        if is_kind && is_name {
            Ok(Self::CertManager { kind: kind.to_owned(), name: name.to_owned() })
        } else {
            Err(InvalidIssuer)
        }
    }
}

impl fmt::Display for IssuerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Builtin => f.write_str("builtin"),
            Self::CertManager { kind, name } => write!(f, "cert-manager:{kind}/{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_issuer_is_ours_or_one_of_cert_manager() {
        for good in ["builtin", "cert-manager:Issuer/a", "cert-manager:ClusterIssuer/kyma.root-1"] {
            assert_eq!(good.parse::<IssuerName>().unwrap().to_string(), good);
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
            assert_eq!(bad.parse::<IssuerName>(), Err(InvalidIssuer), "{bad}");
        }
    }
}
/// See [`Config::tls`].
#[derive(Clone, Debug, Args)]
pub struct TlsFlags {
    /// Certificate chain of the event port, leaf first, in PEM; without it the built-in CA issues one. A changed file is taken at once.
    #[arg(long, env = "TIDEWATCH_TLS_CERT", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its key, PKCS#8 in PEM.
    #[arg(long, env = "TIDEWATCH_TLS_KEY", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// The roots of the agents' certificates, in PEM; then agents have them from elsewhere, and nothing is issued here.
    #[arg(long, env = "TIDEWATCH_CLIENT_CA", requires = "tls_cert")]
    pub client_ca: Option<PathBuf>,
    /// The roots of a proxy that ends TLS in front of the event port, in PEM; then nobody but that proxy may connect. It must
    /// replace what clients write into Client-Cert and X-Forwarded-Client-Cert.
    #[arg(long, env = "TIDEWATCH_PROXY_CA", requires = "proxy_identity")]
    pub proxy_ca: Option<PathBuf>,
    /// SPIFFE URI or DNS name in that proxy's own certificate.
    #[arg(long, env = "TIDEWATCH_PROXY_IDENTITY", requires = "proxy_ca")]
    pub proxy_identity: Option<ProxyIdentity>,
}
