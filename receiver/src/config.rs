//! Flags and environment, read once, before anything starts.

use std::{net::SocketAddr, path::PathBuf};

use clap::Parser;
use tidewatch_shared::{identity::TrustDomain, names};

use crate::{
    controllers::{catalog, event_path, installer},
    fleet::forward::UrlTemplate,
    ingress::{
        admin, enrolment,
        gateway::{OwnAuthority, v2},
    },
    kube::{leader, runtime_access::Cidr},
    pki::{self},
};

/// Receives the signed events of Kyma runtimes and reconciles the runtimes they come from.
#[derive(Clone, Debug, Parser)]
#[command(name = "tidewatch-receiver", version)]
pub struct Config {
    /// Kubeconfig of the control plane; without it the account of the pod is used.
    #[arg(long, env = "TIDEWATCH_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// Namespace of Kymas, templates, release metas, Manifests, Watchers and access Secrets.
    #[arg(long, env = "TIDEWATCH_NAMESPACE", default_value = names::KCP_NAMESPACE)]
    pub namespace: String,

    /// Only the Kymas that this label selector selects, for a gradual take-over. The API server judges its syntax.
    #[arg(long, env = "TIDEWATCH_KYMA_SELECTOR", default_value = "")]
    pub kyma_selector: String,

    /// A Kyma that an incumbent has worked on is taken over once nobody has written to it for so long, in seconds: what is under way
    /// there may end. 0 waits for nobody.
    #[arg(long, env = "TIDEWATCH_TAKEOVER_QUIET_SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(0..=3_600))]
    pub takeover_quiet_seconds: u32,

    /// Where agents connect: mTLS only.
    #[arg(long, env = "TIDEWATCH_EVENT_ADDRESS", default_value = "0.0.0.0:8443")]
    pub event_address: SocketAddr,

    /// Where metrics and probes are served, in plain HTTP.
    #[arg(long, env = "TIDEWATCH_METRICS_ADDRESS", default_value = "0.0.0.0:8080")]
    pub metrics_address: SocketAddr,

    /// Where and to whom the fleet is shown.
    #[command(flatten)]
    pub admin: admin::Flags,

    /// How one receiver of several is the active one.
    #[command(flatten)]
    pub lease: leader::Flags,

    /// Host and port under which agents know this receiver; signatures name one of them.
    #[arg(long, env = "TIDEWATCH_AUTHORITY", value_delimiter = ',', required = true)]
    pub authority: Vec<OwnAuthority>,

    /// Certificates, key and roots of the event port.
    #[command(flatten)]
    pub tls: pki::TlsFlags,

    /// Contract v2, the incumbent's.
    #[command(flatten)]
    pub v2: v2::Flags,

    /// URL of another manager's service, to which events are forwarded in contract v2: http, without a path.
    #[arg(long, env = "TIDEWATCH_FORWARD_URL_TEMPLATE", default_value = "http://{service}.{namespace}.svc:{port}")]
    pub forward_url_template: UrlTemplate,

    /// Trust domain of the runtimes' certificates.
    #[arg(long, env = "TIDEWATCH_TRUST_DOMAIN", default_value = "kyma.local")]
    pub trust_domain: TrustDomain,

    /// Registry that Manifests pull their layers from, as host with optional port.
    #[arg(long, env = "TIDEWATCH_OCI_REGISTRY_HOST", required = true)]
    pub oci_registry_host: String,

    /// Modules that only runtimes selected by their release meta's `kymaSelector` may see.
    #[arg(long, env = "TIDEWATCH_RESTRICTED_DEFAULT_MODULES", value_delimiter = ',')]
    pub restricted_default_modules: Vec<String>,

    /// How changes of the catalog reach the runtimes.
    #[command(flatten)]
    pub catalog: catalog::Flags,

    /// Networks in which runtimes may stand although they are refused by default.
    #[arg(long, env = "TIDEWATCH_ALLOW_RUNTIME_ADDRESSES", value_delimiter = ',')]
    pub allow_runtime_addresses: Vec<Cidr>,

    /// Further networks in which no runtime may stand, for example the control plane's own.
    #[arg(long, env = "TIDEWATCH_DENY_RUNTIME_ADDRESSES", value_delimiter = ',')]
    pub deny_runtime_addresses: Vec<Cidr>,

    /// Kymas that are worked on at the same time.
    #[arg(long, env = "TIDEWATCH_CONCURRENCY", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub concurrency: u16,

    /// Wanted heartbeat interval of the agents, in seconds.
    #[arg(long, env = "TIDEWATCH_HEARTBEAT_SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub heartbeat_seconds: u32,

    /// Writes nothing to any runtime; events stay accepted and unsettled.
    #[arg(long, env = "TIDEWATCH_PAUSE")]
    pub pause: bool,

    /// How proven and unproven event paths are treated.
    #[command(flatten)]
    pub path: event_path::Flags,

    /// Whether and how agents are installed in the runtimes.
    #[command(flatten)]
    pub installer: installer::Flags,

    /// Where agents enrol.
    #[command(flatten)]
    pub enrolment: enrolment::Flags,

    /// Who issues certificates, and how long they hold.
    #[command(flatten)]
    pub pki: pki::Flags,

    /// What is logged, as directives: `info`, or `info,tidewatch_receiver::controllers::kyma=debug`.
    #[arg(long, env = "RUST_LOG", default_value = "info,kube_client=error")]
    pub log: String,

    /// Where traces are exported to, over OTLP (gRPC) without TLS: http://host:port
    #[cfg(feature = "otlp")]
    #[arg(long, env = "TIDEWATCH_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,

    /// Appends one line with a time stamp for every event that makes a Kyma wanted, for measurements.
    #[arg(long)]
    pub stamp_file: Option<PathBuf>,
}
