//! Flags of this port.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use tidewatch_cluster::flags::connections;
use tidewatch_trust::ProxyIdentity;

use crate::ports::MAX_CONNECTIONS;

/// Flags of contract v2.
#[derive(Clone, Debug, Args)]
#[group(id = "contract-v2")]
#[command(next_help_heading = "Contract v2")]
pub struct Flags {
    /// Serve contract v2 of runtime-watcher's agents on a separate port
    #[arg(long, env = "TIDEWATCH_V2", requires = "v2_client_ca")]
    pub v2: bool,

    /// Listen address for runtime-watcher's agents: mTLS only
    #[arg(long, env = "TIDEWATCH_V2_ADDRESS", default_value = "[::]:8083")]
    pub v2_address: SocketAddr,

    /// Maximum number of open connections of this port, fewer under a low limit of open files; further ones wait in the
    /// kernel's backlog
    #[arg(long, env = "TIDEWATCH_V2_MAX_CONNECTIONS", value_name = "CONNECTIONS", default_value_t = MAX_CONNECTIONS, value_parser = connections())]
    pub v2_max_connections: u32,

    /// PEM file with the roots of runtime-watcher's agents' certificates, trusted on this port only
    #[arg(long, env = "TIDEWATCH_V2_CLIENT_CA")]
    pub v2_client_ca: Option<PathBuf>,

    /// PEM file with the certificate chain of this port, leaf first; defaults to that of the event port
    #[arg(long, env = "TIDEWATCH_V2_TLS_CERT", requires = "v2_tls_key")]
    pub v2_tls_cert: Option<PathBuf>,

    /// PEM file with the key of --v2-tls-cert, in PKCS#8, PKCS#1 or SEC1
    #[arg(long, env = "TIDEWATCH_V2_TLS_KEY", requires = "v2_tls_cert")]
    pub v2_tls_key: Option<PathBuf>,

    /// PEM file with the roots of a proxy that terminates TLS in front of this port; only that proxy may connect then,
    /// and must overwrite X-Forwarded-Client-Cert of client requests
    #[arg(long, env = "TIDEWATCH_V2_PROXY_CA", requires = "v2_proxy_identity")]
    pub v2_proxy_ca: Option<PathBuf>,

    /// SPIFFE URI or DNS name in the certificate of the proxy of --v2-proxy-ca
    #[arg(long, env = "TIDEWATCH_V2_PROXY_IDENTITY", requires = "v2_proxy_ca")]
    pub v2_proxy_identity: Option<ProxyIdentity>,
}
