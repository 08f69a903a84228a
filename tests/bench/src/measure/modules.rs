//! Modules: time from a user's selection to the last object, from an available manager to a ready module, and from a
//! registered runtime to its ready Kyma; requests per installed module. Beside a plain client in the same run.

mod large;

use std::{sync::Arc, time::SystemTime};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tidewatch_api::{
    Kyma, Manifest, State,
    names::{SKR_KYMA, SKR_NAMESPACE, annotation, label},
};
use tidewatch_testing::{
    bed::TestBed,
    landscape::{Landscape, Options, Runtime, until},
    modules::Module,
    progress::Step,
    stamps,
};

use super::{
    Figure, Network, api_calls,
    figure::{median, millis, quantile},
    plain_modules::{PLAIN, PlainClient, PlainStatuses},
};
use crate::demo::{Observer, is_ready, named};

/// The measured module, and its manager.
const MODULE: &str = "sample";
const VERSION: &str = "1.0.0";
const MANAGER: &str = "sample-manager";
/// A module with the same kinds, installed as the second one.
const SECOND: &str = "without-default";
/// Own requests to the runtime during one installation of the product: the selection, list and watch of the Deployment, read
/// and write of its status, and list and watch of the Kyma.
const OWN_REQUESTS: f64 = 7.0;
/// The same of the plain client: list and watch of the Deployment.
const OWN_PLAIN_REQUESTS: f64 = 2.0;

/// Extent of the measurement.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Settings {
    /// Installations of each, the product and the plain client
    #[arg(long, default_value_t = 20)]
    pub installs: u32,
    /// Changes of a manager to available, of each
    #[arg(long, default_value_t = 100)]
    pub flips: u32,
    /// New runtimes
    #[arg(long, default_value_t = 3)]
    pub runtimes: u32,
    /// Installations of each large module, by each
    #[arg(long, default_value_t = 3)]
    pub large: u32,
    #[command(flatten)]
    pub(super) network: Network,
}

/// Runs the measurement and emits its figures.
///
/// # Errors
/// When the setup cannot be started, or an expected state does not appear.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let setup = Setup::start(settings.network).await?;
    let step = Step::begin(format!("{} installations of each", settings.installs));
    let installs = setup.installs(settings.installs).await?;
    step.done();
    installs.emit(settings.network, emit);
    let step = Step::begin(format!("{} changes of a manager to available, of each", settings.flips));
    let [mut ours, mut plain] = setup.flips(settings.flips).await?;
    step.done();
    for (figure, q, bar) in [("module_ready_p50", 0.5, 100.0), ("module_ready_p99", 0.99, 300.0)] {
        emit(&Figure::new(figure, quantile(&mut ours, q), "ms").at_most(bar).with_floor(quantile(&mut plain, q)));
    }
    let step = Step::begin(format!("{} new runtimes", settings.runtimes));
    let mut times = setup.new_runtimes(settings.runtimes).await?;
    step.done();
    emit(&Figure::new("new_runtime_ready_max", quantile(&mut times, 1.0), "ms").at_most(5_000.0));
    large::measure(&setup, settings.large, emit).await
}

/// Samples of the installations, in milliseconds and requests.
#[derive(Default)]
struct Installs {
    ours: Vec<f64>,
    /// From the available manager to the ready module, while the rest of the module is installed.
    ready: Vec<f64>,
    event_path: Vec<f64>,
    plain: Vec<f64>,
    requests: Vec<f64>,
    plain_requests: Vec<f64>,
    second_requests: Vec<f64>,
    plain_second_requests: Vec<f64>,
}

impl Installs {
    fn emit(self, network: Network, emit: &mut impl FnMut(&Figure)) {
        let ours = median(self.ours);
        let floor = median(self.plain) + median(self.event_path);
        emit(&Figure::new("module_applied_p50", ours, "ms").at_most(1_000.0).with_floor(floor));
        emit(&Figure::new("module_applied_ratio", ours, "ms").ratio_at_most(floor, ours / floor, 1.5));
        if network.rtt > 0 {
            let round_trip = f64::from(network.rtt);
            let figure = Figure::new("module_applied_round_trips", ours / round_trip, "round trips");
            emit(&figure.with_floor(floor / round_trip));
        }
        emit(&Figure::new("first_module_ready_p50", median(self.ready), "ms").at_most(300.0));
        for (figure, ours, plain, bar) in [
            ("module_requests", self.requests, self.plain_requests, 1.8),
            ("module_requests_of_known_kinds", self.second_requests, self.plain_second_requests, 1.3),
        ] {
            let ours = median(ours);
            let plain = median(plain);
            emit(&Figure::new(figure, ours, "requests").ratio_at_most(plain, ours / plain, bar));
        }
    }
}

/// One installation, in milliseconds and requests to the runtime until it is ready.
struct Install {
    /// From the selection to the last object.
    applied: f64,
    /// From the selection to the accepted event.
    accepted: f64,
    /// From the available manager to the ready module in the runtime's Kyma.
    ready: f64,
    requests: f64,
}

/// KCP, one runtime without controllers, receiver and agent.
struct Setup {
    landscape: Arc<Landscape>,
    runtime: Runtime,
    bed: TestBed,
}

impl Setup {
    async fn start(network: Network) -> Result<Self> {
        let bed = TestBed::start().await?;
        let (kcp, cluster) = tokio::try_join!(bed.kcp(), bed.runtime("measured"))?;
        let options = Options { stamps: true, distance: network.distance(), ..Options::default() };
        let landscape = Arc::new(Landscape::prepare(kcp, "kcp-system", options).await?);
        landscape.write_sample(MODULE, VERSION, "1.1.0").await?;
        landscape.write_sample(SECOND, VERSION, VERSION).await?;
        landscape.start_receiver().await?;
        let runtime = landscape.register(cluster).await?;
        runtime.start_agent().await?;
        until("the Kyma in the runtime", async || runtime.skr_kyma().await).await?;
        Ok(Self { landscape, runtime, bed })
    }

    async fn installs(&self, number: u32) -> Result<Installs> {
        let client = self.runtime.distant_client().await?;
        let plain = PlainClient::new(client.clone(), Module::read(MODULE, VERSION)?);
        let plain_second = PlainClient::new(client, Module::read(SECOND, VERSION)?);
        let mut installs = Installs::default();
        // The first one warms up both: connections, the layer, the kinds of the runtime.
        for round in 0..=number {
            let first = self.install(&[MODULE]).await?;
            let second = self.install(&[MODULE, SECOND]).await?;
            self.remove().await?;
            let (plain_applied, plain_requests) = self.install_plainly(&plain, MODULE).await?;
            let (_, plain_second_requests) = self.install_plainly(&plain_second, SECOND).await?;
            if round > 0 {
                installs.ours.push(first.applied);
                installs.ready.push(first.ready);
                installs.event_path.push(first.accepted);
                installs.requests.push(first.requests);
                installs.plain.push(plain_applied);
                installs.plain_requests.push(plain_requests);
                installs.second_requests.push(second.requests);
                installs.plain_second_requests.push(plain_second_requests);
            }
        }
        Ok(installs)
    }

    /// Selects modules of which only the last is not installed. Its manager is available as soon as it exists.
    async fn install(&self, modules: &[&str]) -> Result<Install> {
        let module = *modules.last().context("a module")?;
        let cluster = self.runtime.cluster();
        let file = self.landscape.stamp_file();
        let before = api_calls::answered(cluster).await?;
        let applied = self.manager_appears(module).await?;
        let begun = SystemTime::now();
        self.runtime.select(modules).await?;
        let applied = applied.reached().await?.duration_since(begun)?;
        let kymas = Api::<Kyma>::namespaced(self.runtime.user(), SKR_NAMESPACE);
        let name = module.to_owned();
        let is_shown = move |kyma: Option<&Kyma>| kyma.is_some_and(|kyma| is_ready(kyma, &name, None));
        let ready = Observer::establish("the ready module", kymas, named(SKR_KYMA), is_shown).await?;
        let available = SystemTime::now();
        self.set_available(&manager(module), true).await?;
        let ready = ready.reached().await?.duration_since(available)?;
        let stamp =
            until("the accepted event", async || stamps::first(&file, self.runtime.id(), "kyma", begun)).await?;
        let accepted = stamp.enqueued.duration_since(begun)?;
        until("the ready module in KCP", async || {
            let kyma = self.runtime.kcp_kyma().await?.context("a Kyma")?;
            ensure!(is_ready(&kyma, module, None), "the module is not ready: {:?}", kyma.status);
            Ok(Some(()))
        })
        .await?;
        until("the applied layer", async || {
            let manifest = self.manifest(module).await?.context("a Manifest")?;
            let annotations = manifest.metadata.annotations.unwrap_or_default();
            Ok(annotations.contains_key(annotation::SYNC_OCI_REF).then_some(()))
        })
        .await?;
        let requests = api_calls::answered(cluster).await? - before - OWN_REQUESTS;
        Ok(Install { applied: millis(applied), accepted: millis(accepted), ready: millis(ready), requests })
    }

    async fn remove(&self) -> Result<()> {
        self.runtime.select(&[]).await?;
        until("the Manifests to go", async || {
            let left = [self.manifest(MODULE).await?, self.manifest(SECOND).await?];
            Ok(left.iter().all(Option::is_none).then_some(()))
        })
        .await
    }

    /// As [`Self::install`], by the plain client, which removes the module afterwards.
    async fn install_plainly(&self, plain: &PlainClient, module: &str) -> Result<(f64, f64)> {
        let cluster = self.runtime.cluster();
        let before = api_calls::answered(cluster).await?;
        let applied = self.manager_appears(module).await?;
        let begun = SystemTime::now();
        plain.install().await?;
        let applied = applied.reached().await?.duration_since(begun)?;
        let requests = api_calls::answered(cluster).await? - before - OWN_PLAIN_REQUESTS;
        plain.remove().await?;
        Ok((millis(applied), requests))
    }

    /// Times from an available manager to a ready module in the runtime's Kyma: ours, and the plain client's.
    async fn flips(&self, number: u32) -> Result<[Vec<f64>; 2]> {
        let kcp = self.landscape.kcp().client().await?;
        let plain = PlainStatuses::create(&kcp, &self.runtime.distant_client().await?).await?;
        let shown = plain.shown.clone();
        let following = tokio::spawn(async move { plain.follow().await });
        self.runtime.select(&[MODULE]).await?;
        let mut times = [Vec::new(), Vec::new()];
        until("the manager", async || Ok(self.deployments().await?.get_opt(MANAGER).await?)).await?;
        let kymas = Api::<Kyma>::namespaced(self.runtime.user(), SKR_NAMESPACE);
        let ours = |kyma: &Kyma| is_ready(kyma, MODULE, None);
        let plain = |kyma: &Kyma| kyma.status.as_ref().is_some_and(|status| status.state() == State::Ready);
        for round in 0..=number {
            let ours = self.flip(MANAGER, &kymas, SKR_KYMA, ours).await?;
            let plain = self.flip(PLAIN, &shown, PLAIN, plain).await?;
            if round > 0 {
                times[0].push(ours);
                times[1].push(plain);
            }
        }
        following.abort();
        self.remove().await?;
        Ok(times)
    }

    /// Makes a manager unavailable and available again. Returns the time from the latter to the state in a Kyma.
    async fn flip(
        &self,
        manager: &str,
        kymas: &Api<Kyma>,
        name: &str,
        is_ready: impl Fn(&Kyma) -> bool + Copy + Send + 'static,
    ) -> Result<f64> {
        self.set_available(manager, false).await?;
        until("the module not to be ready", async || Ok((!is_ready(&kymas.get(name).await?)).then_some(()))).await?;
        let ready = move |kyma: Option<&Kyma>| kyma.is_some_and(is_ready);
        let ready = Observer::establish("the ready module", kymas.clone(), named(name), ready).await?;
        let begun = SystemTime::now();
        self.set_available(manager, true).await?;
        Ok(millis(ready.reached().await?.duration_since(begun)?))
    }

    /// Times from the registration of a runtime to its ready Kyma in KCP.
    async fn new_runtimes(&self, number: u32) -> Result<Vec<f64>> {
        let mut times = Vec::new();
        for n in 0..number {
            let cluster = self.bed.runtime(&format!("new-{n}")).await?;
            let kymas = Api::<Kyma>::namespaced(self.landscape.operator(), self.landscape.namespace());
            let is_ready = |kyma: Option<&Kyma>| {
                kyma.and_then(|kyma| kyma.status.as_ref()).is_some_and(|status| status.state() == State::Ready)
            };
            let ready = Observer::establish("the ready Kyma", kymas, named(cluster.name()), is_ready).await?;
            let begun = SystemTime::now();
            let _runtime = self.landscape.register(cluster).await?;
            times.push(millis(ready.reached().await?.duration_since(begun)?));
        }
        Ok(times)
    }

    async fn deployments(&self) -> Result<Api<Deployment>> {
        Ok(Api::namespaced(self.runtime.cluster().client().await?, SKR_NAMESPACE))
    }

    async fn manager_appears(&self, module: &str) -> Result<Observer> {
        let deployments = self.deployments().await?;
        Observer::establish("the manager", deployments, named(&manager(module)), |manager| manager.is_some()).await
    }

    /// Writes the status of a Deployment as its controller does, which does not run here.
    async fn set_available(&self, name: &str, is_available: bool) -> Result<()> {
        let deployments = self.deployments().await?;
        let replicas = i32::from(is_available);
        let condition = if is_available { "True" } else { "False" };
        let status = json!({"status": {
            "observedGeneration": deployments.get_metadata(name).await?.metadata.generation,
            "replicas": 1, "updatedReplicas": 1, "readyReplicas": replicas, "availableReplicas": replicas,
            "unavailableReplicas": 1 - replicas,
            "conditions": [{"type": "Available", "status": condition},
                           {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}],
        }});
        deployments.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await?;
        Ok(())
    }

    async fn manifest(&self, module: &str) -> Result<Option<Manifest>> {
        let api = Api::<Manifest>::namespaced(self.landscape.operator(), self.landscape.namespace());
        let selector = format!("{}={module}", label::MODULE_NAME);
        let config = kube::api::ListParams::default().labels(&selector);
        Ok(api.list(&config).await?.items.pop())
    }
}

/// Name of the Deployment of a sample module.
fn manager(module: &str) -> String {
    format!("{module}-manager")
}
