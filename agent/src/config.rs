//! Flags and environment, read once, before anything starts.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Parser, ValueEnum};
use tidewatch_shared::{identity::TrustDomain, names::SKR_NAMESPACE};

pub use crate::link::{Endpoint, ParseEndpoint};

/// Where `status` asks when it is not told.
pub(crate) const DEFAULT_ADMIN_ADDRESS: &str = "127.0.0.1:2113";
/// Where Kubernetes mounts a pod's account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Tells the Kyma control plane about changes in this cluster.
#[derive(Clone, Debug, Parser)]
#[command(name = "tidewatch-agent", version)]
pub struct Config {
    /// Kubeconfig (in JSON) of the cluster to watch; without it, the pod's own account
    #[arg(long, env = "TIDEWATCH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Where the pod's own account lies: token and ca.crt
    #[arg(long, env = "TIDEWATCH_SERVICE_ACCOUNT_DIR", default_value = SERVICE_ACCOUNT, value_name = "FOLDER")]
    pub service_account_dir: PathBuf,

    /// The receiver, https://host:port, for an identity from files; else the agent's ConfigMap says where it is
    #[arg(long, env = "TIDEWATCH_RECEIVER_URL", value_name = "URL", requires = "identity_dir")]
    pub receiver_url: Option<Endpoint>,

    /// Contract that the receiver speaks: v3, or v2 for the incumbent's listener
    #[arg(long, env = "TIDEWATCH_CONTRACT", default_value = "v3")]
    pub contract: Contract,

    /// Folder with tls.crt, tls.key and ca.crt; without it the agent enrols
    #[arg(
        long,
        env = "TIDEWATCH_IDENTITY_DIR",
        value_name = "FOLDER",
        requires = "receiver_url",
        required_if_eq("contract", "v2"),
        required_unless_present = "token_file"
    )]
    pub identity_dir: Option<PathBuf>,

    /// File with the token that the agent enrols with (audience `tidewatch`); it is read anew each time
    #[arg(long, env = "TIDEWATCH_TOKEN_FILE", value_name = "FILE", conflicts_with_all = ["identity_dir", "receiver_url"])]
    pub token_file: Option<PathBuf>,

    /// Trust domain of the certificates
    #[arg(long, env = "TIDEWATCH_TRUST_DOMAIN", default_value = "kyma.local", value_name = "DOMAIN")]
    pub trust_domain: TrustDomain,

    /// Namespace of the agent's ConfigMap, Lease and Secret
    #[arg(long, env = "TIDEWATCH_NAMESPACE", default_value = SKR_NAMESPACE, value_parser = namespace)]
    pub namespace: String,

    /// Where metrics and probes are served; port 0 takes a free one
    #[arg(long, env = "TIDEWATCH_METRICS_ADDRESS", default_value = "0.0.0.0:2112", value_name = "IP:PORT")]
    pub metrics_address: SocketAddr,

    /// Where `status` asks, on loopback only; port 0 takes a free one
    #[arg(long, env = "TIDEWATCH_ADMIN_ADDRESS", default_value = DEFAULT_ADMIN_ADDRESS, value_name = "IP:PORT", value_parser = loopback)]
    pub admin_address: SocketAddr,

    /// File that the bound address of metrics and probes is written to
    #[arg(long, env = "TIDEWATCH_ADDRESS_FILE", value_name = "FILE")]
    pub address_file: Option<PathBuf>,

    /// Heartbeat interval until the receiver says otherwise, in seconds
    #[arg(long, env = "TIDEWATCH_HEARTBEAT_SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub heartbeat_seconds: u32,

    /// Objects of one watch above which only "something changed" is told
    #[arg(long, env = "TIDEWATCH_MAX_OBJECTS", default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_objects: u32,

    /// Objects of all watches together, above which the largest watch only tells "something changed"
    #[arg(long, env = "TIDEWATCH_MAX_OBJECTS_TOTAL", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1_000..=10_000_000))]
    pub max_objects_total: u32,

    /// Seconds that are added to the clock, for tests of wrong clocks
    #[arg(long, default_value_t = 0, hide = true, allow_negative_numbers = true)]
    pub clock_offset_seconds: i64,

    /// Where traces are exported to, over OTLP (gRPC) without TLS: http://host:port
    #[cfg(feature = "otlp")]
    #[arg(long, env = "TIDEWATCH_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,

    /// Log filter: level, or target=level, separated by commas
    #[arg(long, env = "TIDEWATCH_LOG", default_value = "info")]
    pub log: String,
}

/// Where the agent has its identity from, and with it the receiver's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Files that somebody else brings and renews.
    Files {
        /// With `tls.crt`, `tls.key` and `ca.crt`.
        folder: PathBuf,
        /// Where they are shown.
        receiver: Endpoint,
    },
    /// Its own, asked for with a token; the ConfigMap says where.
    Enrolment {
        /// The file with the token.
        token: PathBuf,
    },
}

/// What is spoken with the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Contract {
    /// The incumbent's: one unsigned request for each event, and no heartbeats.
    V2,
    /// Ours.
    V3,
}

impl Config {
    /// See [`Origin`]; `None` for halves of one, which the command line has refused already.
    #[must_use]
    pub fn origin(&self) -> Option<Origin> {
        match (self.identity_dir.clone(), self.receiver_url.clone(), self.token_file.clone()) {
            (Some(folder), Some(receiver), None) => Some(Origin::Files { folder, receiver }),
            (None, None, Some(token)) if self.contract == Contract::V3 => Some(Origin::Enrolment { token }),
            _ => None,
        }
    }

    /// See [`Config::heartbeat_seconds`].
    #[must_use]
    pub fn heartbeat(&self) -> Duration {
        Duration::from_secs(self.heartbeat_seconds.into())
    }
}

/// What the agent shows there is nobody's but the pod's.
pub(crate) fn loopback(text: &str) -> Result<SocketAddr, &'static str> {
    let address: SocketAddr = text.parse().map_err(|_| "not an address with a port")?;
    if address.ip().is_loopback() { Ok(address) } else { Err("not an address of the loopback") }
}

/// RFC 1123 label, as it stands in paths of the API.
fn namespace(text: &str) -> Result<String, &'static str> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let valid = (1..=63).contains(&text.len()) && text.bytes().all(allowed);
    valid.then(|| text.to_owned()).ok_or("not the name of a namespace")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(more: &[&str]) -> Result<Config, clap::Error> {
        let least = ["agent", "--receiver-url", "https://kcp:1", "--identity-dir", "/identity"];
        Config::try_parse_from(least.iter().chain(more))
    }

    #[test]
    fn little_is_needed_and_nonsense_is_refused() {
        Config::command().debug_assert();
        let config = parse(&[]).unwrap();
        assert_eq!((config.namespace.as_str(), config.heartbeat()), ("kyma-system", Duration::from_secs(30)));
        for bad in [
            ["--heartbeat-seconds", "0"],
            ["--namespace", "../x"],
            ["--receiver-url", "http://kcp"],
            ["--trust-domain", "A B"],
            ["--max-objects", "0"],
            ["--admin-address", "0.0.0.0:2113"],
        ] {
            assert!(parse(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_identity_comes_from_files_or_from_enrolment_and_halves_are_named() {
        let parse = |more: &[&str]| Config::try_parse_from([&["agent"], more].concat());
        let files = parse(&["--receiver-url", "https://kcp:1", "--identity-dir", "/identity"]).unwrap().origin();
        assert!(matches!(files, Some(Origin::Files { .. })), "{files:?}");
        let own = parse(&["--token-file", "/token"]).unwrap();
        assert_eq!(own.origin(), Some(Origin::Enrolment { token: "/token".into() }));
        assert_eq!(own.service_account_dir, PathBuf::from(SERVICE_ACCOUNT));
        for (halves, missing) in [
            (&[][..], "--identity-dir"),
            (&["--receiver-url", "https://kcp:1"], "--identity-dir"),
            (&["--identity-dir", "/identity"], "--receiver-url"),
            (&["--token-file", "/token", "--receiver-url", "https://kcp:1"], "cannot be used"),
            (&["--token-file", "/token", "--contract", "v2"], "--identity-dir"),
            (&["--token-file", "/t", "--identity-dir", "/i", "--receiver-url", "https://kcp:1"], "cannot be used"),
        ] {
            let said = parse(halves).unwrap_err().to_string();
            assert!(said.contains(missing), "{halves:?}: {said}");
        }
    }
}
