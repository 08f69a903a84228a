//! Configuration from flags and environment, read once at start.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use tidewatch_api::{identity::TrustDomain, names};
use tidewatch_cluster::{
    flags::{object_name, seconds},
    leader,
    runtime_access::Cidr,
};
use tidewatch_fleet::forward::UrlTemplate;
use tidewatch_gateway::{
    admin, enrolment,
    ports::{self, OwnAuthority, v2},
    relay,
};
use tidewatch_modules::{catalog, event_path, windows};

/// Receives the signed events of Kyma runtimes and reconciles the runtimes they come from
#[derive(Clone, Debug, Parser)]
#[command(name = "tidewatch-receiver", version, next_help_heading = "Control plane")]
pub struct Config {
    /// Kubeconfig of the control plane; defaults to the pod's service account
    #[arg(long, env = "TIDEWATCH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Namespace of Kymas, ModuleTemplates, ModuleReleaseMetas, Manifests, Watchers and access Secrets
    #[arg(long, env = "TIDEWATCH_NAMESPACE", default_value = names::KCP_NAMESPACE)]
    pub namespace: String,

    /// Label selector of the Kymas that this receiver manages, for a gradual take-over; validated by the API server
    #[arg(long, env = "TIDEWATCH_KYMA_SELECTOR", default_value = "", value_name = "SELECTOR")]
    pub kyma_selector: String,

    /// Time in seconds without writes to a Kyma of lifecycle-manager before it is taken over, so that a running reconcile
    /// there can end; 0 disables it
    #[arg(long = "takeover-quiet-seconds", env = "TIDEWATCH_TAKEOVER_QUIET_SECONDS", default_value = "60", value_name = "SECONDS", value_parser = seconds(0..=3_600))]
    pub takeover_quiet: Duration,

    /// Concurrent reconciles of Kymas
    #[arg(long, env = "TIDEWATCH_CONCURRENCY", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub concurrency: u16,

    /// Name of the modules' image pull secret in the receiver's namespace. It is copied to kyma-system in every runtime and to
    /// the other namespaces of the modules' workloads, and all pod templates of the modules name it
    #[arg(long, env = "TIDEWATCH_SKR_IMAGE_PULL_SECRET", value_name = "SECRET", value_parser = object_name)]
    pub skr_image_pull_secret: Option<String>,

    /// Write nothing to any runtime; events stay accepted and unsettled
    #[arg(long, env = "TIDEWATCH_PAUSE")]
    pub pause: bool,

    /// Leader election.
    #[command(flatten)]
    pub lease: leader::Flags,

    /// Replicas that are all active.
    #[command(flatten)]
    pub replicas: relay::Flags,

    /// Listen address for agents: mTLS only; here and in all listen addresses, `[::]` serves IPv4 as well
    #[arg(
        long,
        env = "TIDEWATCH_EVENT_ADDRESS",
        default_value = "[::]:8443",
        value_name = "IP:PORT",
        help_heading = "Event port"
    )]
    pub event_address: SocketAddr,

    /// Hosts and ports under which agents reach this receiver; each signature names one of them
    #[arg(
        long,
        env = "TIDEWATCH_AUTHORITY",
        value_name = "HOST:PORT",
        value_delimiter = ',',
        required = true,
        help_heading = "Event port"
    )]
    pub authority: Vec<OwnAuthority>,

    /// Capacity of the event port.
    #[command(flatten)]
    pub capacity: ports::Flags,

    /// TLS of the event port.
    #[command(flatten)]
    pub tls: tidewatch_trust::TlsFlags,

    /// Listen address of metrics and probes: plain HTTP
    #[arg(
        long,
        env = "TIDEWATCH_METRICS_ADDRESS",
        default_value = "[::]:8080",
        value_name = "IP:PORT",
        help_heading = "Metrics and probes"
    )]
    pub metrics_address: SocketAddr,

    /// Listen address of the probes alone, so that scrapers cannot keep the kubelet from them: plain HTTP; unset, only
    /// the metrics address serves them
    #[arg(long, env = "TIDEWATCH_PROBE_ADDRESS", value_name = "IP:PORT", help_heading = "Metrics and probes")]
    pub probe_address: Option<SocketAddr>,

    /// Admin listener.
    #[command(flatten)]
    pub admin: admin::Flags,

    /// Contract v2, lifecycle-manager's.
    #[command(flatten)]
    pub v2: v2::Flags,

    /// URL template of other managers' services, to which events are forwarded in contract v2: http, without a path
    #[arg(
        long,
        env = "TIDEWATCH_FORWARD_URL_TEMPLATE",
        default_value = "http://{service}.{namespace}.svc:{port}",
        value_name = "URL",
        help_heading = "Forwarding"
    )]
    pub forward_url_template: UrlTemplate,

    /// Registry of the modules' artefacts.
    #[command(flatten)]
    pub registry: tidewatch_oci::flags::Flags,

    /// Modules that only runtimes selected by their ModuleReleaseMeta's `kymaSelector` may see
    #[arg(
        long,
        env = "TIDEWATCH_RESTRICTED_DEFAULT_MODULES",
        value_name = "MODULE",
        value_delimiter = ',',
        help_heading = "Catalog"
    )]
    pub restricted_default_modules: Vec<String>,

    /// Roll-out of catalog changes.
    #[command(flatten)]
    pub catalog: catalog::Flags,

    /// Maintenance windows.
    #[command(flatten)]
    pub windows: windows::Flags,

    /// Networks in which runtimes' API servers are permitted although they are refused by default, in CIDR notation
    #[arg(
        long,
        env = "TIDEWATCH_ALLOW_RUNTIME_ADDRESSES",
        value_name = "CIDR",
        value_delimiter = ',',
        help_heading = "Runtime access"
    )]
    pub allow_runtime_addresses: Vec<Cidr>,

    /// Further networks in which runtimes' API servers are refused, for example the control plane's own, in CIDR
    /// notation
    #[arg(
        long,
        env = "TIDEWATCH_DENY_RUNTIME_ADDRESSES",
        value_name = "CIDR",
        value_delimiter = ',',
        help_heading = "Runtime access"
    )]
    pub deny_runtime_addresses: Vec<Cidr>,

    /// Time in seconds without an access Secret, while its Kyma is being deleted, after which a runtime counts as gone:
    /// the finalizers of its Manifests and of the Kyma are removed without a cleanup of the runtime
    #[arg(long = "runtime-gone-after-seconds", env = "TIDEWATCH_RUNTIME_GONE_AFTER_SECONDS", default_value = "600", value_name = "SECONDS", value_parser = seconds(5..=86_400), help_heading = "Runtime access")]
    pub runtime_gone_after: Duration,

    /// Heartbeat interval of the agents in seconds, longer in large fleets
    #[arg(long = "heartbeat-seconds", env = "TIDEWATCH_HEARTBEAT_SECONDS", default_value = "30", value_name = "SECONDS", value_parser = seconds(1..=3_600), help_heading = "Event path")]
    pub heartbeat: Duration,

    /// Polls and verifications of event paths.
    #[command(flatten)]
    pub path: event_path::Flags,

    /// Installation of agents.
    #[command(flatten)]
    pub installer: tidewatch_installer::Flags,

    /// Enrolment port.
    #[command(flatten)]
    pub enrolment: enrolment::Flags,

    /// Trust domain of the runtimes' certificates, other than those of other control planes, since certificates and tokens
    /// of one domain are valid in it alone
    #[arg(
        long,
        env = "TIDEWATCH_TRUST_DOMAIN",
        default_value = "kyma.local",
        value_name = "DOMAIN",
        help_heading = "Certificates"
    )]
    pub trust_domain: TrustDomain,

    /// Issuer and validity of certificates.
    #[command(flatten)]
    pub pki: tidewatch_trust::Flags,

    /// Log filter: comma-separated levels, or target=level, such as `info,tidewatch_fleet=debug`; `tidewatch` stands for all
    /// crates
    #[arg(
        long,
        env = "RUST_LOG",
        default_value = "info,kube_client=error",
        value_name = "FILTER",
        help_heading = "Logging and tracing"
    )]
    pub log: String,

    /// OTLP endpoint (gRPC without TLS) to export traces to: http://host:port
    #[cfg(feature = "otlp")]
    #[arg(long, env = "TIDEWATCH_OTLP_ENDPOINT", value_name = "URL", help_heading = "Logging and tracing")]
    pub otlp_endpoint: Option<String>,

    /// File to append a timestamp to for each event that enqueues a Kyma, for measurements
    #[cfg(feature = "stamps")]
    #[arg(long, value_name = "FILE", help_heading = "Measurement", hide = true)]
    pub stamp_file: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    const REQUIRED: [&str; 3] = ["receiver", "--authority=kcp:8443", "--oci-registry-host=r"];

    #[test]
    fn each_flag_has_a_heading_and_a_description() {
        Config::command().debug_assert();
        for flag in Config::command().get_arguments() {
            let help = flag.get_help().map(ToString::to_string).unwrap_or_default();
            assert!(flag.get_help_heading().is_some(), "{flag} has no heading");
            assert!(!help.is_empty() && !help.ends_with('.'), "{flag}: {help:?}");
            let is_duration = flag.get_long().is_some_and(|long| long.ends_with("-seconds"));
            assert!(!is_duration || help.contains("seconds"), "{flag} states no unit");
        }
        let heading = |id: &str| {
            Config::command()
                .get_arguments()
                .find(|flag| flag.get_id() == id)
                .unwrap()
                .get_help_heading()
                .map(str::to_owned)
        };
        assert_eq!(heading("agent_upgrade_stages").as_deref(), Some("Upgrade of agents"));
        assert_eq!(heading("metrics_address").as_deref(), Some("Metrics and probes"));
    }

    #[test]
    fn durations_are_whole_seconds_within_their_limits() {
        let parse = |flags: &[&str]| Config::try_parse_from([&REQUIRED[..], flags].concat());
        let config = parse(&["--lease-seconds", "3"]).unwrap();
        assert_eq!((config.lease.lease_duration, config.heartbeat), (Duration::from_secs(3), Duration::from_secs(30)));
        let parsed = config.catalog;
        let default = catalog::Flags::default();
        assert_eq!(parsed.module_upgrade_rollout_max_delay, default.module_upgrade_rollout_max_delay);
        assert_eq!(config.runtime_gone_after, Duration::from_secs(600));
        for bad in [
            ["--runtime-gone-after-seconds", "4"],
            ["--runtime-gone-after-seconds", "86401"],
            ["--lease-seconds", "2"],
            ["--lease-seconds", "301"],
            ["--heartbeat-seconds", "1.5"],
            ["--away-seconds", "1h"],
        ] {
            assert!(parse(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn capacities_have_defaults_and_limits() {
        let parse = |flags: &[&str]| Config::try_parse_from([&REQUIRED[..], flags].concat());
        let config = parse(&[]).unwrap();
        let connections = [
            config.capacity.event_max_connections,
            config.v2.v2_max_connections,
            config.enrolment.enrolment_max_connections,
        ];
        assert_eq!((connections, config.path.condition_writes_per_second), ([20_000, 20_000, 4_096], 20));
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        assert_eq!(config.capacity.threads(), cores.max(2), "the threads follow the cores");
        let steps = |threads: &str| parse(&["--event-threads", threads]).unwrap().capacity.handshake_steps();
        assert_eq!((steps("1"), steps("2"), steps("8")), (1, 1, 4));
        for bad in [
            ["--event-threads", "0"],
            ["--event-max-connections", "0"],
            ["--v2-max-connections", "1000001"],
            ["--enrolment-max-connections", "-1"],
            ["--condition-writes-per-second", "0"],
        ] {
            assert!(parse(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn operator_commands_are_refused() {
        assert!(Config::try_parse_from(REQUIRED).is_ok());
        assert!(Config::try_parse_from(["receiver"]).is_err());
        assert!(Config::try_parse_from([&REQUIRED[..], &["--tls-cert", "c"]].concat()).is_err());
        for command in ["fleet", "rotate-ca", "catalog"] {
            for arguments in [vec!["receiver", command], [&REQUIRED[..], &[command]].concat()] {
                let error = Config::try_parse_from(arguments).err().unwrap();
                assert_eq!(error.kind(), clap::error::ErrorKind::UnknownArgument, "{error}");
            }
        }
    }
}
