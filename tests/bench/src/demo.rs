//! Demonstration of the main use case: KCP and two runtimes, receiver and agents, a catalog of three modules, and four
//! acts with a timeline each.

mod acts;
mod cli;
mod observe;
mod timeline;

use std::sync::Arc;

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use serde_json::json;
use tidewatch_api::{State, names::SKR_NAMESPACE};
use tidewatch_testing::{
    bed::TestBed,
    control_plane::{ClusterUser, Tool},
    kubelet::{self, Kubelet},
    landscape::{Landscape, Options, Runtime, until},
    product::build_binaries,
    progress::{Step, print_line},
};

pub(crate) use acts::{is_available, is_ready};
pub use cli::main;
pub(crate) use observe::{Observer, named};
pub use timeline::Timeline;

/// Namespace of the demo in KCP, the usual one.
const NAMESPACE: &str = "kcp-system";
/// The module of the acts, with the versions of `regular` and `fast`. Its manager runs in the runtimes.
const SAMPLE: (&str, &str, &str) = ("sample", "1.0.0", "1.1.0");
/// Further modules of the catalog, which consist of configuration.
const MODULES: [(&str, &str, &str); 2] = [("serverless", "2.3.0", "2.4.0"), ("telemetry", "1.20.0", "1.21.0")];

/// All processes of the demo.
pub struct Demo {
    runtimes: Vec<Runtime>,
    _kubelets: Vec<Kubelet>,
    landscape: Arc<Landscape>,
    // Last field: the others depend on it and are dropped first.
    bed: TestBed,
}

impl Demo {
    /// Builds missing binaries and starts all processes; progress goes to stderr.
    ///
    /// # Errors
    /// When a process does not start; the text names it, with the end of its log.
    pub async fn start() -> Result<Self> {
        build_binaries().await?;
        let bed = TestBed::start().await?;
        let step = Step::begin("starting KCP and two runtimes");
        let (kcp, one, two) =
            tokio::try_join!(bed.kcp(), bed.runtime_for_kubelet("one"), bed.runtime_for_kubelet("two"))?;
        let kubelets = [&one, &two].map(async |cluster| {
            cluster.ensure_namespace(SKR_NAMESPACE).await?;
            anyhow::Ok(Kubelet::start(cluster, kubelet::Options::default()).await?)
        });
        let kubelets = try_join_all(kubelets).await?;
        step.done();
        let step = Step::begin("starting the receiver and registering both runtimes");
        let landscape =
            Arc::new(Landscape::prepare(kcp, NAMESPACE, Options { stamps: true, ..Options::default() }).await?);
        let (module, regular, fast) = SAMPLE;
        landscape.write_sample(module, regular, fast).await?;
        for (module, regular, fast) in MODULES {
            landscape.write_module(module, regular, fast).await?;
        }
        landscape.start_receiver().await?;
        let runtimes = try_join_all([one, two].map(|cluster| landscape.register(cluster))).await?;
        step.done();
        let step = Step::begin("starting the agents and waiting for both runtimes to be in sync");
        try_join_all(runtimes.iter().map(Runtime::start_agent)).await?;
        for runtime in &runtimes {
            until("the runtime's Kyma to be ready", async || {
                let status = runtime.skr_kyma().await?.and_then(|kyma| kyma.status).unwrap_or_default();
                Ok((status.state() == State::Ready).then_some(()))
            })
            .await?;
        }
        step.done();
        Ok(Self { runtimes, _kubelets: kubelets, landscape, bed })
    }

    /// Plays the four acts, one after the other.
    ///
    /// # Errors
    /// When the expected result of an act does not appear.
    pub async fn play(&self) -> Result<Vec<Timeline>> {
        let (module, regular, fast) = SAMPLE;
        let [one, two] = &self.runtimes[..] else { anyhow::bail!("the demo needs exactly two runtimes") };
        let mut timelines = Vec::new();
        for act in [
            acts::Act::Enable { runtime: one, module },
            acts::Act::Move { runtimes: [one, two], module, from: regular, to: fast },
            acts::Act::Tamper { runtime: two, module },
            acts::Act::Disable { runtime: one, module },
        ] {
            let timeline = act.play(&self.landscape).await.with_context(|| format!("no result of {act}"))?;
            print_line(&timeline.to_string());
            timelines.push(timeline);
        }
        Ok(timelines)
    }

    /// Command lines to copy for exploring the demo.
    ///
    /// # Errors
    /// When there is no `kubectl` and none can be built.
    pub async fn invite(&self) -> Result<String> {
        let kubectl = match self.bed.binaries().find(Tool::Kubectl) {
            Some(kubectl) => kubectl,
            None => self.bed.binaries().get(Tool::Kubectl).await?,
        };
        let mut lines = format!("All processes run until Ctrl-C. Logs are in {}. Try:\n", self.bed.dir().display());
        let kcp = self.landscape.kcp().kubeconfig_path(ClusterUser::User);
        let mut line = |kubeconfig: &std::path::Path, rest: &str| {
            lines.push_str(&format!("  {} --kubeconfig {} {rest}\n", kubectl.display(), kubeconfig.display()));
        };
        line(&kcp, &format!("-n {NAMESPACE} get kymas,manifests,moduletemplates,modulereleasemetas"));
        for runtime in &self.runtimes {
            let kubeconfig = runtime.cluster().kubeconfig_path(ClusterUser::User);
            line(&kubeconfig, "-n kyma-system get kymas,moduletemplates,modulereleasemetas,deployments,pods");
        }
        let kubeconfig = self.runtimes[0].cluster().kubeconfig_path(ClusterUser::User);
        let patch = json!({"spec": {"modules": [{"name": "telemetry"}]}});
        line(&kubeconfig, &format!("-n kyma-system patch kyma default --type merge -p '{patch}'"));
        Ok(lines)
    }
}
