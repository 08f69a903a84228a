//! Configuration from flags and environment, read once at start.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use clap::{ArgGroup, Parser};
use tidewatch_api::{
    identity::{RuntimeId, TrustDomain},
    names::SKR_NAMESPACE,
};
use tidewatch_contract::admin::agent::DEFAULT_PORT;
use tracing::field::{DisplayValue, display};

pub use crate::receiver::{Endpoint, ParseEndpointError};
use crate::{core::Core, telemetry::Metrics};

/// Default address of the admin listener.
pub(crate) const DEFAULT_ADMIN_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), DEFAULT_PORT);
/// Mount path of a pod's service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Reports changes in this cluster to the Kyma control plane
#[derive(Clone, Debug, Parser)]
#[command(name = "tidewatch-agent", version)]
#[command(group(ArgGroup::new("identity").args(["token_file", "identity_dir"]).required(true)))]
pub struct Config {
    /// Kubeconfig, in JSON, of the cluster to watch; defaults to the pod's service account
    #[arg(long, env = "TIDEWATCH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Directory of the pod's service account, with token and ca.crt
    #[arg(long, env = "TIDEWATCH_SERVICE_ACCOUNT_DIR", default_value = SERVICE_ACCOUNT, value_name = "FOLDER")]
    pub service_account_dir: PathBuf,

    /// Receiver, https://host:port, for an identity from files; an agent that enrols finds it in its ConfigMap
    #[arg(long, env = "TIDEWATCH_RECEIVER_URL", value_name = "URL", requires = "identity_dir")]
    pub receiver_url: Option<Endpoint>,

    /// Directory with tls.crt, tls.key and ca.crt that another component renews, instead of an enrolment
    #[arg(long, env = "TIDEWATCH_IDENTITY_DIR", value_name = "FOLDER", requires = "receiver_url")]
    pub identity_dir: Option<PathBuf>,

    /// File with the token to enrol with (audience `spiffe://<trust domain>/tidewatch`), read again for each request
    #[arg(long, env = "TIDEWATCH_TOKEN_FILE", value_name = "FILE", conflicts_with_all = ["identity_dir", "receiver_url"])]
    pub token_file: Option<PathBuf>,

    /// Trust domain of the certificates
    #[arg(long, env = "TIDEWATCH_TRUST_DOMAIN", default_value = "kyma.local", value_name = "DOMAIN")]
    pub trust_domain: TrustDomain,

    /// Namespace of the agent's ConfigMap, Lease and Secret
    #[arg(long, env = "TIDEWATCH_NAMESPACE", default_value = SKR_NAMESPACE, value_parser = parse_namespace)]
    pub namespace: String,

    /// Address of metrics and probes; `[::]` serves IPv4 as well, port 0 selects a free port
    #[arg(long, env = "TIDEWATCH_METRICS_ADDRESS", default_value = "[::]:2112", value_name = "IP:PORT")]
    pub metrics_address: SocketAddr,

    /// Loopback address of the admin listener, which serves `status`; port 0 selects a free port
    #[arg(long, env = "TIDEWATCH_ADMIN_ADDRESS", default_value_t = DEFAULT_ADMIN_ADDRESS, value_name = "IP:PORT", value_parser = parse_loopback)]
    pub admin_address: SocketAddr,

    /// File to write the bound address of metrics and probes to
    #[arg(long, env = "TIDEWATCH_ADDRESS_FILE", value_name = "FILE")]
    pub address_file: Option<PathBuf>,

    /// Heartbeat interval in seconds, until the receiver sets another one
    #[arg(long, env = "TIDEWATCH_HEARTBEAT_SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub heartbeat_seconds: u32,

    /// Objects per watch above which changes are reported without names
    #[arg(long, env = "TIDEWATCH_MAX_OBJECTS", default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_objects: u32,

    /// Objects of all watches above which the largest watch reports changes without names
    #[arg(long, env = "TIDEWATCH_MAX_OBJECTS_TOTAL", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1_000..=10_000_000))]
    pub max_objects_total: u32,

    /// Memory in MiB of the index of objects and of the events that are not settled, half for each, above which the watch
    /// that needs the most reports changes without names; the default fits a container limit of 64 MiB
    #[arg(long, env = "TIDEWATCH_MAX_STATE_MIB", default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_state_mib: u32,

    /// Seconds added to the clock, for tests of wrong clocks
    #[arg(long, default_value_t = 0, hide = true, allow_negative_numbers = true)]
    pub clock_offset_seconds: i64,

    /// OTLP endpoint (gRPC without TLS) to export traces to: http://host:port
    #[cfg(feature = "otlp")]
    #[arg(long, env = "TIDEWATCH_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,

    /// Log filter: comma-separated levels, or target=level
    #[arg(long, env = "TIDEWATCH_LOG", default_value = "info")]
    pub log: String,
}

/// Source of the agent's identity and of the receiver's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityOrigin {
    /// Files that another component provides and renews.
    Files {
        /// Directory with `tls.crt`, `tls.key` and `ca.crt`.
        folder: PathBuf,
        /// Receiver to connect to.
        receiver: Endpoint,
    },
    /// Enrolment with a token; the ConfigMap names the receiver.
    Enrolment {
        /// File with the token.
        token: PathBuf,
    },
}

impl Config {
    /// Identity origin that the flags select; `None` for incomplete combinations, which the command line has refused
    /// already.
    pub fn origin(&self) -> Option<IdentityOrigin> {
        match (self.identity_dir.clone(), self.receiver_url.clone(), self.token_file.clone()) {
            (Some(folder), Some(receiver), None) => Some(IdentityOrigin::Files { folder, receiver }),
            (None, None, Some(token)) => Some(IdentityOrigin::Enrolment { token }),
            _ => None,
        }
    }

    /// Logs the start of the agent with its configuration and the bound addresses.
    pub(crate) fn announce(&self, metrics_address: SocketAddr, admin_address: SocketAddr) {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| display(path.display().to_string()));
        let receiver: Option<DisplayValue<_>> = self.receiver_url.as_ref().map(|url| display(url.authority()));
        tracing::info!(
            %metrics_address,
            %admin_address,
            token_file = path(&self.token_file),
            identity_dir = path(&self.identity_dir),
            receiver,
            namespace = self.namespace,
            trust_domain = %self.trust_domain,
            heartbeat_seconds = self.heartbeat_seconds,
            max_objects = self.max_objects,
            max_state_mib = self.max_state_mib,
            version = env!("CARGO_PKG_VERSION"),
            "Started"
        );
    }

    /// An empty core for a runtime, within the configured limits.
    pub fn core(&self, runtime: RuntimeId, metrics: Metrics) -> Core {
        let limits = [self.max_objects, self.max_objects_total, self.max_state_mib];
        let [cap, total, mebibytes] = limits.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
        Core::new(runtime, cap, metrics).bounded(total).within(mebibytes.saturating_mul(1 << 20))
    }

    /// [`Config::heartbeat_seconds`] as a duration.
    pub fn heartbeat(&self) -> Duration {
        Duration::from_secs(self.heartbeat_seconds.into())
    }
}

/// Parses an address with port on loopback: the status must be reachable from the pod only.
pub(crate) fn parse_loopback(text: &str) -> Result<SocketAddr, &'static str> {
    let address: SocketAddr = text.parse().map_err(|_| "not an address with a port")?;
    if address.ip().is_loopback() { Ok(address) } else { Err("not a loopback address") }
}

/// Parses an RFC 1123 label, as used in API paths.
fn parse_namespace(text: &str) -> Result<String, &'static str> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let valid = (1..=63).contains(&text.len()) && text.bytes().all(allowed);
    valid.then(|| text.to_owned()).ok_or("not the name of a namespace")
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc};

    use clap::CommandFactory;
    use parking_lot::Mutex;
    use serde_json::{Value, json};

    use super::*;

    fn parse(more: &[&str]) -> Result<Config, clap::Error> {
        let least = ["agent", "--receiver-url", "https://kcp:1", "--identity-dir", "/identity"];
        Config::try_parse_from(least.iter().chain(more))
    }

    #[test]
    fn minimal_flags_suffice_and_invalid_values_are_refused() {
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

    /// Bytes written by a logger.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn start_line(more: &[&str]) -> Value {
        let written = Written::default();
        let config = parse(more).unwrap();
        let writer = written.clone();
        let logger = tracing_subscriber::fmt().json().flatten_event(true).with_writer(move || writer.clone()).finish();
        let [metrics, admin] = ["[::]:1", "127.0.0.1:2"].map(|address| address.parse().unwrap());
        tracing::subscriber::with_default(logger, || config.announce(metrics, admin));
        serde_json::from_slice(&written.0.lock()).unwrap()
    }

    #[test]
    fn start_is_logged_with_one_field_for_each_flag() {
        let line = start_line(&["--max-objects", "7"]);
        for (field, value) in [
            ("message", json!("Started")),
            ("identity_dir", json!("/identity")),
            ("receiver", json!("kcp:1")),
            ("token_file", Value::Null),
            ("metrics_address", json!("[::]:1")),
            ("max_objects", json!(7)),
        ] {
            assert_eq!(line[field], value, "{field}: {line}");
        }
    }

    #[test]
    fn identity_comes_from_files_or_enrolment_and_incomplete_flags_are_refused() {
        let parse = |more: &[&str]| Config::try_parse_from([&["agent"], more].concat());
        let files = parse(&["--receiver-url", "https://kcp:1", "--identity-dir", "/identity"]).unwrap().origin();
        assert!(matches!(files, Some(IdentityOrigin::Files { .. })), "{files:?}");
        let own = parse(&["--token-file", "/token"]).unwrap();
        assert_eq!(own.origin(), Some(IdentityOrigin::Enrolment { token: "/token".into() }));
        assert_eq!(own.service_account_dir, PathBuf::from(SERVICE_ACCOUNT));
        for (halves, missing) in [
            (&[][..], "<--token-file <FILE>|--identity-dir <FOLDER>>"),
            (&["--receiver-url", "https://kcp:1"], "--identity-dir"),
            (&["--identity-dir", "/identity"], "--receiver-url"),
            (&["--token-file", "/token", "--receiver-url", "https://kcp:1"], "cannot be used"),
            (&["--token-file", "/t", "--identity-dir", "/i", "--receiver-url", "https://kcp:1"], "cannot be used"),
        ] {
            let error = parse(halves).unwrap_err().to_string();
            assert!(error.contains(missing), "{halves:?}: {error}");
        }
    }
}
