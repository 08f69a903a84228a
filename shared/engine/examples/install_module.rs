//! Installs a module into a cluster with nothing but a client: `install_module <name> <file of YAML documents>`. Its record is
//! a Secret in the namespace `kyma-system`, which has to exist.

use std::{env, fs, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use futures::future::{BoxFuture, FutureExt as _, ready};
use kube::Client;
use serde_json::{Value, from_value, json};
use tidewatch_api::{Manifest, key::KymaKey};
use tidewatch_engine::{Cluster, Content, End, Engine, ModuleObjects, Next, Request, SecretStore};
use tidewatch_oci::{digest::Digest, layer::documents};
use tokio::time::sleep;

/// Objects of one version, from a file.
struct FileContent(Arc<Vec<Value>>);

impl Content for FileContent {
    fn objects<'a>(&'a self, _manifest: &'a Manifest) -> BoxFuture<'a, ModuleObjects> {
        ready(ModuleObjects::Ready(self.0.clone())).boxed()
    }
}

/// Installs or upgrades a module, and reconciles it until it is ready, or does not become so by itself.
///
/// # Errors
/// The text contains no objects, or the Secret was not read or written.
pub(crate) async fn install(client: Client, module: &str, text: &str) -> Result<End> {
    let content = FileContent(Arc::new(documents(text)?));
    // The digest tells whether this content was applied completely.
    let source = json!({"ref": Digest::of(text.as_bytes()).to_string()});
    let spec = json!({"remote": false, "install": {"name": "file", "source": source}});
    let store = SecretStore::new(client.clone(), "kyma-system");
    store.set(module, from_value(spec)?).await?;
    let engine = Engine::default();
    let cluster = Cluster { key: KymaKey::new("", "this-cluster"), client, revision: 1 };
    loop {
        let manifest = store.get(module).await?.context("the module was removed meanwhile")?;
        let request = Request::new(manifest, &cluster, &store, &content);
        let outcome = engine.reconcile(request).await?;
        match outcome.next {
            Next::OnChange => return Ok(outcome.end),
            Next::After(delay) => sleep(delay).await,
            Next::Retry { min_backoff, .. } => sleep(min_backoff.unwrap_or(Duration::from_secs(1))).await,
        }
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let module = env::args().nth(1).context("the first argument is the name of the module")?;
    let file = env::args().nth(2).context("the second argument is a file")?;
    let end = install(Client::try_default().await?, &module, &fs::read_to_string(file)?).await?;
    anyhow::ensure!(matches!(end, End::Ready(_)), "{module}: {end:?}");
    Ok(())
}
