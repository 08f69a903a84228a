//! Ring rollout of a module on a real control plane, with fake API servers of the runtimes.

use std::{collections::BTreeSet, sync::Arc};

use anyhow::Result;
use k8s_openapi::api::events::v1::Event;
use kube::{Api, ResourceExt as _};
use serde_json::Value;
use tidewatch_api::{Condition, Kyma, Manifest, names::label};
use tidewatch_kit::variant::VariantName as _;
use tidewatch_testing::{
    artefacts::WIDE,
    bed,
    landscape::{DEADLINE, Landscape, Options, until},
    load::SimulatedFleet,
};

use crate::support::{SLOTS, TestResult, quick_options};

const RUNTIMES: usize = 4;
/// Store key of the Kyma in a runtime.
const KYMA: &str = "operator.kyma-project.io/kymas/kyma-system/default";

/// Runtimes that follow the channel of one module, whose moves are rolled out in two rings.
pub(crate) struct Rollout {
    pub(crate) fleet: SimulatedFleet,
    landscape: Arc<Landscape>,
    module: String,
}

impl Rollout {
    /// Registers the runtimes, whose agents do not run yet.
    pub(crate) async fn register(landscape: Arc<Landscape>) -> Result<Self> {
        let module = format!("{WIDE}rollout");
        landscape.write_wide(&module, "1.0.0").await?;
        let mut fleet = SimulatedFleet::new(landscape.clone()).await?;
        fleet.grow(RUNTIMES).await?;
        fleet.served(DEADLINE).await?;
        Ok(Self { fleet, landscape, module })
    }

    /// Starts the agents, and selects the module in every runtime.
    pub(crate) async fn install(&mut self) -> Result<()> {
        self.fleet.start();
        self.select();
        self.becomes([("Ready", "1.0.0"); RUNTIMES]).await
    }

    /// Selects the module in every runtime, as each user does.
    pub(crate) fn select(&self) {
        self.fleet.members().iter().for_each(|member| member.select(&[&self.module]));
    }

    /// Points the channel to a version.
    pub(crate) async fn move_to(&self, version: &str) -> Result<()> {
        self.landscape.write_wide(&self.module, version).await
    }

    /// Waits until the module has these states and versions in the Kymas of the runtimes, in any order.
    pub(crate) async fn becomes(&self, expected: [(&str, &str); RUNTIMES]) -> Result<()> {
        until(&format!("the modules {expected:?}"), async || {
            let shown = self.fleet.members().iter().map(|member| {
                let kyma = member.cluster().object(KYMA).unwrap_or_default();
                let module = &kyma["status"]["modules"][0];
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                (text(&module["state"]), text(&module["version"]))
            });
            let mut shown: Vec<_> = shown.collect();
            shown.sort_unstable();
            let is_it = shown.iter().map(|(state, version)| (state.as_str(), version.as_str())).eq(expected);
            Ok(is_it.then_some(()))
        })
        .await
    }

    /// Names of the Kymas whose condition `ModuleRollout` is false, with its message.
    async fn conditions(&self) -> Result<Vec<(String, Condition)>> {
        let kymas = Api::<Kyma>::namespaced(self.landscape.kcp().client().await?, self.landscape.namespace());
        let kymas = kymas.list(&Default::default()).await?;
        let condition = |kyma: Kyma| {
            let condition = kyma.status.as_ref()?.condition("ModuleRollout")?.clone();
            Some((kyma.name_any(), condition))
        };
        Ok(kymas.items.into_iter().filter_map(condition).collect())
    }

    /// Waits for an Event about the release meta whose note contains a text, and returns the note.
    pub(crate) async fn event(&self, reason: &str, text: &str) -> Result<String> {
        let events = Api::<Event>::namespaced(self.landscape.operator(), self.landscape.namespace());
        until(&format!("the Event {reason}: {text}"), async || {
            let events = events.list(&Default::default()).await?.items;
            let is_it = |event: &&Event| {
                let about = event.regarding.as_ref().and_then(|about| about.kind.as_deref());
                about == Some("ModuleReleaseMeta") && event.reason.as_deref() == Some(reason)
            };
            let mut notes = events.iter().filter(is_it).filter_map(|event| event.note.clone());
            Ok(notes.find(|note| note.contains(text)))
        })
        .await
    }

    /// Names of the Kymas whose Manifest has a version.
    pub(crate) async fn with(&self, version: &str) -> Result<BTreeSet<String>> {
        let manifests = Api::<Manifest>::namespaced(self.landscape.kcp().client().await?, self.landscape.namespace());
        let manifests = manifests.list(&Default::default()).await?.items.into_iter();
        let of_version = manifests.filter(|manifest| manifest.spec.version.as_deref() == Some(version));
        let kyma = |manifest: Manifest| manifest.labels()[label::KYMA_NAME].clone();
        Ok(of_version.map(kyma).collect())
    }
}

#[tokio::test]
async fn a_failing_version_halts_in_the_first_ring_and_a_move_back_reverts_it() -> TestResult {
    tidewatch_testing::install_crypto();
    let _slot = SLOTS.acquire().await?;
    let flags = ["--module-rollout-rings", "50%,100%", "--module-rollout-pause-seconds", "0"];
    let options = Options { receiver: flags.map(str::to_owned).to_vec(), ..quick_options() };
    let landscape = Arc::new(Landscape::start(bed::shared().await?.kcp().await?, "module-rollout", options).await?);
    let mut rollout = Rollout::register(landscape).await?;
    rollout.install().await?;

    // A good version reaches one ring after the other.
    rollout.move_to("1.1.0").await?;
    rollout.event("ModuleRollout", "the rollout of 1.1.0 in the channel regular is in ring 1").await?;
    rollout.event("ModuleRollout", "the rollout of 1.1.0 in the channel regular is in ring 2").await?;
    rollout.event("ModuleRollout", "every runtime gets 1.1.0 of the channel regular").await?;
    rollout.becomes([("Ready", "1.1.0"); RUNTIMES]).await?;

    // A failing one reaches as many runtimes as may fail.
    rollout.fleet.fake().refuse_pods(":1.2.0", 1);
    rollout.move_to("1.2.0").await?;
    let note = rollout.event("ModuleRolloutHalted", "the rollout of 1.2.0 in the channel regular has halted").await?;
    rollout.becomes([("Error", "1.2.0"), ("Ready", "1.1.0"), ("Ready", "1.1.0"), ("Ready", "1.1.0")]).await?;
    let failed = rollout.with("1.2.0").await?;
    let condition = until("the condition of the failing Kyma", async || {
        let conditions = rollout.conditions().await?;
        let names: BTreeSet<_> = conditions.iter().map(|(name, _)| name.clone()).collect();
        Ok((names == failed).then(|| conditions[0].1.clone()))
    })
    .await?;
    assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "Halted"));
    let reason = format!("1 of 1 upgraded runtimes are no longer healthy: module-rollout/{}", failed.first().unwrap());
    assert!(condition.message.contains(&reason) && note.contains(&reason), "{condition:?} {note}");
    let shown = |page: &str| page.contains("tidewatch_module_rollouts{state=\"halted\"} 1\n").then_some(());
    rollout.landscape.with_receiver(async |receiver| receiver.metrics_until(DEADLINE, shown).await).await??;

    // A move back downgrades the runtime that the halted rollout upgraded.
    rollout.move_to("1.1.0").await?;
    rollout.becomes([("Ready", "1.1.0"); RUNTIMES]).await?;
    until("no condition", async || Ok(rollout.conditions().await?.is_empty().then_some(()))).await?;
    assert_eq!(rollout.with("1.2.0").await?, BTreeSet::new());
    Ok(())
}
