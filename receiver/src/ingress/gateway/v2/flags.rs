//! Flags of this port.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;

use crate::pki::ProxyIdentity;

/// How contract v2 is served.
#[derive(Clone, Debug, Args)]
#[group(id = "contract-v2")]
pub struct Flags {
    /// Serves contract v2 of the incumbent's agents, on a port of its own.
    #[arg(long, env = "TIDEWATCH_V2", requires = "v2_client_ca")]
    pub v2: bool,

    /// Where the incumbent's agents connect, if contract v2 is served: mTLS only.
    #[arg(long, env = "TIDEWATCH_V2_ADDRESS", default_value = "0.0.0.0:8083")]
    pub v2_address: SocketAddr,

    /// The roots of the incumbent's agents' certificates, in PEM. They count on this port alone.
    #[arg(long, env = "TIDEWATCH_V2_CLIENT_CA")]
    pub v2_client_ca: Option<PathBuf>,

    /// Certificate chain of this port, leaf first, in PEM; that of the event port unless given.
    #[arg(long, env = "TIDEWATCH_V2_TLS_CERT", requires = "v2_tls_key")]
    pub v2_tls_cert: Option<PathBuf>,

    /// Its key, PKCS#8 in PEM.
    #[arg(long, env = "TIDEWATCH_V2_TLS_KEY", requires = "v2_tls_cert")]
    pub v2_tls_key: Option<PathBuf>,

    /// The roots of a proxy that ends TLS in front of this port, in PEM; then nobody but that proxy may connect. It must replace what clients write into
    /// X-Forwarded-Client-Cert.
    #[arg(long, env = "TIDEWATCH_V2_PROXY_CA", requires = "v2_proxy_identity")]
    pub v2_proxy_ca: Option<PathBuf>,

    /// SPIFFE URI or DNS name in that proxy's own certificate.
    #[arg(long, env = "TIDEWATCH_V2_PROXY_IDENTITY", requires = "v2_proxy_ca")]
    pub v2_proxy_identity: Option<ProxyIdentity>,
}
