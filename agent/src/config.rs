//! Flags and environment, read once, before anything starts.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use tidewatch_shared::{identity::TrustDomain, names::SKR_NAMESPACE};

pub use crate::link::{Endpoint, ParseEndpoint};

/// Tells the Kyma control plane about changes in this cluster.
#[derive(Clone, Debug, Parser)]
#[command(name = "tidewatch-agent", version)]
pub struct Config {
    /// Kubeconfig (in JSON) of the cluster to watch; without it, the pod's own account
    #[arg(long, env = "TIDEWATCH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// The receiver, https://host:port
    #[arg(long, env = "TIDEWATCH_RECEIVER_URL", value_name = "URL")]
    pub receiver_url: Endpoint,

    /// Folder with tls.crt, tls.key and ca.crt
    #[arg(long, env = "TIDEWATCH_IDENTITY_DIR", value_name = "FOLDER")]
    pub identity_dir: PathBuf,

    /// Trust domain of the certificates
    #[arg(long, env = "TIDEWATCH_TRUST_DOMAIN", default_value = "kyma.local", value_name = "DOMAIN")]
    pub trust_domain: TrustDomain,

    /// Namespace of the agent's ConfigMap and Lease
    #[arg(long, env = "TIDEWATCH_NAMESPACE", default_value = SKR_NAMESPACE, value_parser = namespace)]
    pub namespace: String,

    /// Where metrics and probes are served; port 0 takes a free one
    #[arg(long, env = "TIDEWATCH_METRICS_ADDRESS", default_value = "0.0.0.0:2112", value_name = "IP:PORT")]
    pub metrics_address: SocketAddr,

    /// File that the bound address of metrics and probes is written to
    #[arg(long, env = "TIDEWATCH_ADDRESS_FILE", value_name = "FILE")]
    pub address_file: Option<PathBuf>,

    /// Heartbeat interval until the receiver says otherwise, in seconds
    #[arg(long, env = "TIDEWATCH_HEARTBEAT_SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub heartbeat_seconds: u32,

    /// Objects of one watch above which only "something changed" is told
    #[arg(long, env = "TIDEWATCH_MAX_OBJECTS", default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_objects: u32,

    /// Log filter: level, or target=level, separated by commas
    #[arg(long, env = "TIDEWATCH_LOG", default_value = "info")]
    pub log: String,
}

impl Config {
    /// See [`Config::heartbeat_seconds`].
    #[must_use]
    pub fn heartbeat(&self) -> Duration {
        Duration::from_secs(self.heartbeat_seconds.into())
    }
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
        ] {
            assert!(parse(&bad).is_err(), "{bad:?}");
        }
    }
}
