//! Clients that apply a fixed list of objects to runtimes without reading them: the floor of the catalog measurement,
//! and lifecycle-manager's way.
//!
//! They are the receiver's own clients, one for each runtime and new for each pass, as after a quiet period. Their
//! threads bear a name, by which their CPU time is measured.

use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    core::DynamicObject,
};
use tidewatch_api::{
    key::KymaKey,
    names::{KUBECONFIG_KEY, SKR_NAMESPACE},
};
use tidewatch_cluster::runtime_access::{AccessSecret, Metrics, RuntimeAccess, Settings};
use tidewatch_select::catalog::desired::DesiredObject;
use tidewatch_testing::{load::SimulatedFleet, product::cpu_by_thread};
use tokio::runtime;

/// Concurrent runtimes, as many as the measured receiver's.
pub(super) const RUNTIMES: usize = 16;
/// Concurrent requests to one runtime, as in catalog sync.
const CALLS: usize = 4;

/// See the module.
pub(super) struct BareClients {
    access: RuntimeAccess,
    keys: Vec<KymaKey>,
    /// Name of its threads, unique in the process.
    threads: String,
    runtime: Option<runtime::Runtime>,
}

/// Cost of a pass over all runtimes.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassCost {
    pub(super) seconds: f64,
    /// CPU time of the clients, in seconds.
    pub(super) cpu: f64,
}

/// Objects to apply to each runtime; the next wave begins when all objects of the previous one are applied.
type Waves = Arc<Vec<Vec<Arc<DesiredObject>>>>;

impl BareClients {
    /// Reads the kubeconfigs of all runtimes, without connecting yet.
    pub(super) fn new(fleet: &SimulatedFleet) -> Result<Self> {
        static NUMBERS: AtomicU32 = AtomicU32::new(1);
        let settings = Settings { allow: vec!["127.0.0.0/8".parse()?], ..Settings::default() };
        let access = RuntimeAccess::new(settings, Metrics::default());
        let mut keys = Vec::with_capacity(fleet.members().len());
        for member in fleet.members() {
            let key = KymaKey::new("", member.name());
            let kubeconfig = ByteString(fleet.fake().kubeconfig(member.name()).into_bytes());
            let data = Some([(KUBECONFIG_KEY.to_owned(), kubeconfig)].into());
            let secret = Secret { data, ..Secret::default() };
            access.set_secrets(&key, vec![Arc::new(AccessSecret::from(secret))]);
            keys.push(key);
        }
        let threads = format!("bare-{}", NUMBERS.fetch_add(1, Ordering::Relaxed));
        // As many threads as the reference machine has CPUs.
        let runtime =
            runtime::Builder::new_multi_thread().worker_threads(2).thread_name(&threads).enable_all().build()?;
        Ok(Self { access, keys, threads, runtime: Some(runtime) })
    }

    /// Applies the waves to all runtimes by server-side apply with this field manager, and ends.
    pub(super) async fn apply(
        mut self,
        manager: &'static str,
        waves: Vec<Vec<Arc<DesiredObject>>>,
    ) -> Result<PassCost> {
        let access = self.access.clone();
        let keys = std::mem::take(&mut self.keys);
        let begun = Instant::now();
        let before = self.cpu()?;
        let runtime = self.runtime.as_ref().context("the executor has been shut down")?;
        runtime
            .spawn(apply_to_all(access, keys, manager, Arc::new(waves)))
            .await
            .context("apply to all runtimes")??;
        Ok(PassCost { seconds: begun.elapsed().as_secs_f64(), cpu: self.cpu()? - before })
    }

    /// CPU time of its threads so far, in seconds.
    fn cpu(&self) -> Result<f64> {
        let threads = cpu_by_thread(process::id())?;
        Ok(threads.get(&self.threads).copied().unwrap_or(Duration::ZERO).as_secs_f64())
    }
}

impl Drop for BareClients {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waiting for threads is not allowed inside a task.
            runtime.shutdown_background();
        }
    }
}

async fn apply_to_all(access: RuntimeAccess, keys: Vec<KymaKey>, manager: &'static str, waves: Waves) -> Result<()> {
    let passes = stream::iter(keys).map(move |key| {
        let access = access.clone();
        let waves = waves.clone();
        async move {
            let client = access.client(&key)?;
            // Drops the cached client, so its connections end with this pass.
            access.remove(&key);
            pass(client, manager, waves).await.with_context(|| format!("apply to the runtime {}", key.name))
        }
    });
    passes.buffer_unordered(RUNTIMES).try_collect().await
}

async fn pass(client: Client, manager: &'static str, waves: Waves) -> Result<()> {
    for wave in waves.iter() {
        let calls: Vec<_> = wave.iter().map(|object| apply(client.clone(), manager, object.clone())).collect();
        stream::iter(calls).buffer_unordered(CALLS).try_collect::<()>().await?;
    }
    Ok(())
}

async fn apply(client: Client, manager: &'static str, object: Arc<DesiredObject>) -> kube::Result<()> {
    let api: Api<DynamicObject> = Api::namespaced_with(client, SKR_NAMESPACE, &object.id.kind.api_resource());
    let params = PatchParams::apply(manager).force();
    api.patch(&object.id.name, &params, &Patch::Apply(&object.body)).await.map(drop)
}
