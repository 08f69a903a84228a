//! How KCP is reached.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result};
use kube::{
    Config,
    config::{KubeConfigOptions, Kubeconfig},
};

/// A connection to KCP is opened in this time, or not at all.
const CONNECT: Duration = Duration::from_secs(5);

/// What a client of KCP is made of: from a kubeconfig, or else from what is `found`. It retries nothing by itself.
///
/// # Errors
/// The kubeconfig cannot be read, or nothing is found.
pub(crate) async fn config(kubeconfig: Option<&Path>, found: impl Future<Output = Result<Config>>) -> Result<Config> {
    let mut config = match kubeconfig {
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path).with_context(|| format!("read {}", path.display()))?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
        }
        None => found.await?,
    };
    config.default_retry = false;
    config.connect_timeout = Some(CONNECT);
    Ok(config)
}
