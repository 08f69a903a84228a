//! Clients that apply objects to runtimes, as many as they are told to, and know nothing of what is there: the floor of the catalog's
//! measurement, and the incumbent's way.
//!
//! They are the receiver's own, one for each runtime and new for each pass, as after a while in which nothing was asked of it. Their
//! threads bear a name, to tell their CPU time by.

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
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    core::DynamicObject,
};
use tidewatch_receiver::{
    catalog::desired::Desired,
    key::KymaKey,
    runtime_access::{AccessSecret, Metrics, RuntimeAccess, Settings},
};
use tidewatch_shared::names::SKR_NAMESPACE;
use tokio::runtime;

use crate::{load::Crowd, product::cpu_by_thread};

/// Runtimes that are worked on at the same time; as many as by the receiver that is measured beside.
pub(super) const RUNTIMES: usize = 16;
/// Calls to one runtime at the same time, as of catalog sync.
const CALLS: usize = 4;

/// See the module.
pub(super) struct Bare {
    access: RuntimeAccess,
    keys: Vec<KymaKey>,
    /// The name of its threads, which no other has.
    threads: String,
    runtime: Option<runtime::Runtime>,
}

/// What a pass over all runtimes took, in seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Passed {
    pub(super) seconds: f64,
    /// CPU time of the clients.
    pub(super) cpu: f64,
}

/// Objects to apply to each runtime; the next wave begins when all of one are there.
type Waves = Arc<Vec<Vec<Arc<Desired>>>>;

impl Bare {
    /// Reads the kubeconfigs of all runtimes. Nothing is connected yet.
    pub(super) fn new(crowd: &Crowd) -> Result<Self> {
        static NUMBERS: AtomicU32 = AtomicU32::new(1);
        let settings = Settings { allow: vec!["127.0.0.0/8".parse()?], ..Settings::default() };
        let access = RuntimeAccess::new(settings, Metrics::default());
        let mut keys = Vec::with_capacity(crowd.members().len());
        for member in crowd.members() {
            let key = KymaKey::new("", member.name());
            let secret = AccessSecret {
                name: member.name().to_owned(),
                resource_version: "1".to_owned(),
                kubeconfig: Some(crowd.fake().kubeconfig(member.name()).into_bytes()),
            };
            access.set_secrets(&key, &[secret]);
            keys.push(key);
        }
        let threads = format!("bare-{}", NUMBERS.fetch_add(1, Ordering::Relaxed));
        // As many threads as the machines have that the bars are meant for.
        let runtime =
            runtime::Builder::new_multi_thread().worker_threads(2).thread_name(&threads).enable_all().build()?;
        Ok(Self { access, keys, threads, runtime: Some(runtime) })
    }

    /// Applies the waves to all runtimes, by server-side apply under that name, and ends.
    pub(super) async fn apply(mut self, manager: &'static str, waves: Vec<Vec<Arc<Desired>>>) -> Result<Passed> {
        let (access, keys) = (self.access.clone(), std::mem::take(&mut self.keys));
        let (begun, before) = (Instant::now(), self.cpu()?);
        let runtime = self.runtime.as_ref().context("it has threads as long as it is there")?;
        runtime.spawn(everywhere(access, keys, manager, Arc::new(waves))).await.context("apply to all runtimes")??;
        Ok(Passed { seconds: begun.elapsed().as_secs_f64(), cpu: self.cpu()? - before })
    }

    /// CPU time of its threads so far, in seconds.
    fn cpu(&self) -> Result<f64> {
        let threads = cpu_by_thread(process::id())?;
        Ok(threads.get(&self.threads).copied().unwrap_or(Duration::ZERO).as_secs_f64())
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // To wait for threads is not allowed inside a task.
            runtime.shutdown_background();
        }
    }
}

async fn everywhere(access: RuntimeAccess, keys: Vec<KymaKey>, manager: &'static str, waves: Waves) -> Result<()> {
    let passes = stream::iter(keys).map(move |key| {
        let (access, waves) = (access.clone(), waves.clone());
        async move {
            let client = access.client(&key)?;
            // Its connections end with this pass.
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

async fn apply(client: Client, manager: &'static str, object: Arc<Desired>) -> kube::Result<()> {
    let api: Api<DynamicObject> = Api::namespaced_with(client, SKR_NAMESPACE, &object.id.kind.api_resource());
    let params = PatchParams::apply(manager).force();
    api.patch(&object.id.name, &params, &Patch::Apply(&object.body)).await.map(drop)
}
