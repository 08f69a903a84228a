//! The four acts: a change by a user or an operator, and its expected results.

use std::{fmt, time::SystemTime};

use anyhow::{Context as _, Result};
use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    Api,
    api::{Patch, PatchParams},
    runtime::watcher,
};
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma, Manifest, ModuleReleaseMeta, State,
    names::{SKR_KYMA, SKR_NAMESPACE, label},
};
use tidewatch_testing::{
    landscape::{Landscape, Runtime, catalog, until},
    stamps::{self, Stamp},
};

use super::{
    observe::{Observer, named},
    timeline::{Timeline, millis},
};

/// Names of the plan's watches with events from the acts.
const KYMA_WATCH: &str = "kyma";
const RELEASE_WATCH: &str = "catalog/modulereleasemetas";

pub(super) enum Act<'a> {
    Enable { runtime: &'a Runtime, module: &'a str },
    Move { runtimes: [&'a Runtime; 2], module: &'a str, from: &'a str, to: &'a str },
    Tamper { runtime: &'a Runtime, module: &'a str },
    Disable { runtime: &'a Runtime, module: &'a str },
}

impl fmt::Display for Act<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Enable { runtime, module } => write!(f, "enabling {module} in runtime {}", runtime.name()),
            Self::Move { module, from, to, .. } => {
                write!(f, "moving channel regular of {module} from {from} to {to} in KCP")
            }
            Self::Tamper { runtime, module } => {
                write!(
                    f,
                    "editing a channel of {module} and adding another one, in the catalog of runtime {}",
                    runtime.name()
                )
            }
            Self::Disable { runtime, module } => write!(f, "disabling {module} in runtime {}", runtime.name()),
        }
    }
}

impl Act<'_> {
    pub(super) async fn play(&self, landscape: &Landscape) -> Result<Timeline> {
        match self {
            Self::Enable { runtime, module } => self.enable(landscape, runtime, module).await,
            Self::Move { runtimes, module, to, .. } => self.move_channel(landscape, runtimes, module, to).await,
            Self::Tamper { runtime, module } => self.tamper(landscape, runtime, module).await,
            Self::Disable { runtime, module } => self.disable(landscape, runtime, module).await,
        }
    }

    async fn enable(&self, landscape: &Landscape, runtime: &Runtime, module: &str) -> Result<Timeline> {
        let selected = manifest_of(runtime, module);
        let manifests = Api::<Manifest>::namespaced(landscape.operator(), landscape.namespace());
        let manifest =
            Observer::establish("the Manifest in KCP", manifests, selected, |manifest| manifest.is_some()).await?;
        let wanted = module.to_owned();
        let status =
            status_of(runtime, "the module in the status", move |kyma| version_of(kyma, &wanted).is_some()).await?;
        let applied = manager_of(runtime, module, "the manager", |manager| manager.is_some()).await?;
        let available = manager_of(runtime, module, "the manager to be available", is_available).await?;
        let wanted = module.to_owned();
        let ready = status_of(runtime, "the module to be ready", move |kyma| is_ready(kyma, &wanted, None)).await?;
        let begun = SystemTime::now();
        runtime.select(&[module]).await?;
        let written = SystemTime::now();
        let stamp = stamp(landscape, runtime, KYMA_WATCH, begun).await?;
        let of_module = OfModule {
            applied: Some(applied.reached().await?),
            available: Some(available.reached().await?),
            ready: Some(ready.reached().await?),
        };
        let reconciled = manifest.reached().await?;
        let status = status.reached().await?;
        self.timeline(begun, written, Some(stamp), reconciled, Some(status), of_module)
    }

    async fn move_channel(
        &self,
        landscape: &Landscape,
        runtimes: &[&Runtime; 2],
        module: &str,
        to: &str,
    ) -> Result<Timeline> {
        let mut catalogs = Vec::new();
        for runtime in runtimes {
            let version = to.to_owned();
            let moved = move |meta: Option<&ModuleReleaseMeta>| {
                meta.and_then(|meta| channel(meta, "regular")) == Some(&*version)
            };
            catalogs.push(
                Observer::establish("the channel in a runtime", release_metas(runtime).await?, named(module), moved)
                    .await?,
            );
        }
        let wanted = module.to_owned();
        let version = to.to_owned();
        let moved = move |kyma: &Kyma| version_of(kyma, &wanted).is_some_and(|running| running == version);
        let manifest = {
            let version = to.to_owned();
            let moved = move |manifest: Option<&Manifest>| {
                manifest.and_then(|manifest| manifest.spec.version.as_deref()) == Some(&*version)
            };
            let manifests = Api::<Manifest>::namespaced(landscape.operator(), landscape.namespace());
            Observer::establish("the Manifest's version in KCP", manifests, manifest_of(runtimes[0], module), moved)
                .await?
        };
        let status = status_of(runtimes[0], "the version in the status", moved).await?;
        let wanted = module.to_owned();
        let version = to.to_owned();
        let is_upgraded = move |kyma: &Kyma| is_ready(kyma, &wanted, Some(&version));
        let ready = status_of(runtimes[0], "the new version to be ready", is_upgraded).await?;
        let begun = SystemTime::now();
        landscape.write_channels(module, &[("regular", to), ("fast", to)]).await?;
        let written = SystemTime::now();
        let mut reconciled = manifest.reached().await?;
        for catalog in catalogs {
            reconciled = reconciled.max(catalog.reached().await?);
        }
        let of_module = OfModule { ready: Some(ready.reached().await?), ..OfModule::default() };
        self.timeline(begun, written, None, reconciled, Some(status.reached().await?), of_module)
    }

    async fn tamper(&self, landscape: &Landscape, runtime: &Runtime, module: &str) -> Result<Timeline> {
        let api = release_metas(runtime).await?;
        let before = api.get(module).await.context("read the catalog of the runtime")?.spec;
        let tampered =
            catalog::release_meta(module, &[("regular", "9.9.9"), ("added", "9.9.9")])["spec"]["channels"].clone();
        let begun = SystemTime::now();
        let patch = Patch::Merge(json!({"spec": {"channels": tampered}}));
        api.patch(module, &PatchParams::default(), &patch).await.context("tamper with the catalog")?;
        let written = SystemTime::now();
        let before: Value = serde_json::to_value(before)?;
        let undone = Observer::establish("the catalog as it was", api, named(module), move |meta| {
            meta.and_then(|meta| serde_json::to_value(&meta.spec).ok()).is_some_and(|spec| spec == before)
        })
        .await?;
        let stamp = stamp(landscape, runtime, RELEASE_WATCH, begun).await?;
        self.timeline(begun, written, Some(stamp), undone.reached().await?, None, OfModule::default())
    }

    async fn disable(&self, landscape: &Landscape, runtime: &Runtime, module: &str) -> Result<Timeline> {
        let selected = manifest_of(runtime, module);
        let manifests = Api::<Manifest>::namespaced(landscape.operator(), landscape.namespace());
        let manifest =
            Observer::establish("the Manifest to go", manifests, selected, |manifest| manifest.is_none()).await?;
        let gone = module.to_owned();
        let status =
            status_of(runtime, "the module to leave the status", move |kyma| version_of(kyma, &gone).is_none()).await?;
        let removed = manager_of(runtime, module, "the manager to go", |manager| manager.is_none()).await?;
        let begun = SystemTime::now();
        runtime.select(&[]).await?;
        let written = SystemTime::now();
        let stamp = stamp(landscape, runtime, KYMA_WATCH, begun).await?;
        let of_module = OfModule { applied: Some(removed.reached().await?), ..OfModule::default() };
        let reconciled = manifest.reached().await?;
        let status = status.reached().await?;
        self.timeline(begun, written, Some(stamp), reconciled, Some(status), of_module)
    }

    fn timeline(
        &self,
        begun: SystemTime,
        written: SystemTime,
        stamp: Option<Stamp>,
        reconciled: SystemTime,
        status: Option<SystemTime>,
        of_module: OfModule,
    ) -> Result<Timeline> {
        let since = |at: SystemTime| Ok::<_, anyhow::Error>(millis(at.duration_since(begun)?));
        Ok(Timeline {
            act: self.to_string(),
            written_ms: since(written)?,
            seen_ms: stamp.as_ref().and_then(|stamp| stamp.observed).map(since).transpose()?,
            accepted_ms: stamp.map(|stamp| since(stamp.enqueued)).transpose()?,
            reconciled_ms: since(reconciled)?,
            status_ms: status.map(since).transpose()?,
            applied_ms: of_module.applied.map(since).transpose()?,
            available_ms: of_module.available.map(since).transpose()?,
            ready_ms: of_module.ready.map(since).transpose()?,
            is_removal: matches!(self, Self::Disable { .. }),
        })
    }
}

/// Times at which the objects of the module reached their states.
#[derive(Default)]
struct OfModule {
    /// The manager exists, or is gone.
    applied: Option<SystemTime>,
    available: Option<SystemTime>,
    ready: Option<SystemTime>,
}

/// Observes the manager of a sample module.
async fn manager_of(
    runtime: &Runtime,
    module: &str,
    expectation: &str,
    expected: impl Fn(Option<&Deployment>) -> bool + Send + 'static,
) -> Result<Observer> {
    let api = Api::<Deployment>::namespaced(runtime.cluster().client().await?, SKR_NAMESPACE);
    Observer::establish(expectation, api, named(&format!("{module}-manager")), expected).await
}

pub(crate) fn is_available(manager: Option<&Deployment>) -> bool {
    let available = manager.and_then(|manager| manager.status.as_ref()?.available_replicas);
    available.is_some_and(|available| available > 0)
}

pub(crate) fn is_ready(kyma: &Kyma, module: &str, version: Option<&str>) -> bool {
    let status = kyma.status.iter().flat_map(|status| status.modules()).find(|status| status.name == module);
    status.is_some_and(|status| {
        status.state == State::Ready && version.is_none_or(|version| status.version.as_deref() == Some(version))
    })
}

async fn stamp(landscape: &Landscape, runtime: &Runtime, watch: &str, after: SystemTime) -> Result<Stamp> {
    let file = landscape.stamp_file();
    until("the event to be accepted", async || stamps::first(&file, runtime.id(), watch, after)).await
}

async fn status_of(
    runtime: &Runtime,
    expectation: &str,
    expected: impl Fn(&Kyma) -> bool + Send + 'static,
) -> Result<Observer> {
    let api = Api::<Kyma>::namespaced(runtime.user(), SKR_NAMESPACE);
    Observer::establish(expectation, api, named(SKR_KYMA), move |kyma| kyma.is_some_and(&expected)).await
}

async fn release_metas(runtime: &Runtime) -> Result<Api<ModuleReleaseMeta>> {
    Ok(Api::namespaced(runtime.user(), SKR_NAMESPACE))
}

fn version_of(kyma: &Kyma, module: &str) -> Option<String> {
    let status = kyma.status.as_ref()?.modules().iter().find(|status| status.name == module)?;
    Some(status.version.clone().unwrap_or_default())
}

fn channel<'a>(meta: &'a ModuleReleaseMeta, channel: &str) -> Option<&'a str> {
    meta.spec.version_of(channel)
}

/// The Manifest of a module of a runtime, by the labels that every Manifest has.
fn manifest_of(runtime: &Runtime, module: &str) -> watcher::Config {
    let selector = format!("{}={},{}={module}", label::KYMA_NAME, runtime.name(), label::MODULE_NAME);
    watcher::Config::default().labels(&selector)
}
