//! The staged rollout of an agent image: it survives crashes of the receiver, and halts on a bad image.

use anyhow::{Context as _, Result};
use futures::future::join_all;
use k8s_openapi::api::{apps::v1::Deployment, core::v1::ConfigMap, events::v1::Event};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;
use tidewatch_api::names::{AGENT_CONTAINER, AGENT_DEPLOYMENT, SKR_NAMESPACE};
use tidewatch_installer::upgrade::CONFIG_MAP;
use tidewatch_testing::landscape::{DEADLINE, Options, until};

use crate::{
    support::{Fleet, TestResult, quick_options},
    sync::sum,
};

const FIRST: &str = "example.test/tidewatch-agent:1";
const SECOND: &str = "example.test/tidewatch-agent:2";
const EXITS: &str = "example.test/tidewatch-agent:exits";
const HANGS: &str = "example.test/tidewatch-agent:hangs";
const FLAGS: [&str; 2] = ["--agent-upgrade-stages", "1%,100%"];
/// Flags for an image that is known to be bad; a good one gets the default deadline, since the machine may be slow. The
/// deadline must exceed the up to fifteen seconds within which the healthy agents reconnect to a restarted receiver.
const SHORT_DEADLINE: [&str; 4] = ["--agent-upgrade-pause-seconds", "0", "--agent-upgrade-deadline-seconds", "30"];
const WITHOUT_PAUSE: [&str; 2] = ["--agent-upgrade-pause-seconds", "0"];
/// A pause longer than any test.
const WITH_PAUSE: [&str; 2] = ["--agent-upgrade-pause-seconds", "86400"];

impl Fleet {
    fn deployments(&self) -> Vec<Api<Deployment>> {
        self.members.iter().map(|member| Api::namespaced(member.runtime.user(), SKR_NAMESPACE)).collect()
    }

    /// The image in each runtime's Deployment.
    async fn images(&self) -> Result<Vec<String>> {
        let mut images = Vec::new();
        for api in self.deployments() {
            let pod = api.get(AGENT_DEPLOYMENT).await?.spec.context("a spec")?.template.spec.context("a pod")?;
            images.push(pod.containers[0].image.clone().context("an image")?);
        }
        Ok(images)
    }

    async fn images_become(&self, wanted: &[&str]) -> Result<()> {
        let description = format!("the images {wanted:?}");
        until(&description, async || Ok((self.images().await? == wanted).then_some(()))).await
    }

    /// A value of the ConfigMap that holds the state of the upgrade.
    async fn upgrade_state(&self, key: &str) -> Result<Option<String>> {
        let maps = Api::<ConfigMap>::namespaced(self.landscape.operator(), self.landscape.namespace());
        Ok(maps.get_opt(CONFIG_MAP).await?.and_then(|map| map.data?.remove(key)))
    }

    async fn completes(&self) -> Result<()> {
        until("the end of the upgrade", async || {
            Ok((self.upgrade_state("stage").await?.as_deref() == Some("done")).then_some(()))
        })
        .await
    }

    /// Waits until the receiver counts so many upgraded runtimes as proven.
    async fn proven_count_becomes(&self, proven: u64) -> Result<()> {
        self.landscape
            .with_receiver(async |receiver| {
                let look = |page: &str| {
                    let count = sum(page, "tidewatch_agent_upgrade_runtimes", &["standing=\"proven\""]);
                    (count == proven).then_some(())
                };
                receiver.metrics_until(DEADLINE, look).await
            })
            .await??;
        Ok(())
    }

    async fn halts(&self) -> Result<()> {
        self.landscape
            .with_receiver(async |receiver| {
                let look = |page: &str| (sum(page, "tidewatch_agent_upgrade_halted", &[]) == 1).then_some(());
                receiver.metrics_until(DEADLINE, look).await
            })
            .await??;
        Ok(())
    }

    /// Sets another image in a runtime, as a user could.
    async fn tamper(&self, at: usize, image: &str) -> Result<()> {
        let containers = json!([{"name": AGENT_CONTAINER, "image": image}]);
        let patch = json!({"spec": {"template": {"spec": {"containers": containers}}}});
        let api = self.deployments().into_iter().nth(at).context("a runtime")?;
        api.patch(AGENT_DEPLOYMENT, &PatchParams::default(), &Patch::Strategic(patch)).await?;
        Ok(())
    }

    /// Waits until exactly one agent runs there, of the current generation of the Deployment; returns its process.
    async fn single_agent_runs(&self, at: usize) -> Result<Option<u32>> {
        let member = &self.members[at];
        let api = self.deployments().remove(at);
        until("one agent of the current generation", async || {
            let deployment = api.get(AGENT_DEPLOYMENT).await?;
            let status = deployment.status.context("a status")?;
            let is_current = status.observed_generation == deployment.metadata.generation
                && (status.replicas, status.updated_replicas, status.available_replicas) == (Some(1), Some(1), Some(1));
            let running = member.kubelet.running("tidewatch-agent");
            Ok((is_current && running.len() == 1).then(|| running[0].pid()))
        })
        .await
    }

    async fn all_deliver(&self, modules: &[&str]) -> Result<()> {
        join_all(self.members.iter().map(|member| member.delivers(modules))).await.into_iter().collect()
    }
}

/// The steps of the test with three runtimes.
impl Fleet {
    /// Starts three runtimes with the first image.
    async fn start_with_first_image() -> Result<Self> {
        let receiver = FLAGS.map(str::to_owned).to_vec();
        let options = Options { agent_image: FIRST.to_owned(), receiver, ..quick_options() };
        let (mut fleet, clusters) = Self::prepare("upgrade", 3, options).await?;
        fleet.register(clusters).await?;
        for proven in join_all(fleet.members.iter().map(|member| member.path_proven())).await {
            proven?;
        }
        fleet.completes().await?;
        assert_eq!(fleet.images().await?, [FIRST; 3], "all runtimes have the first image");
        Ok(fleet)
    }

    /// Checks that exactly one runtime has this image, and returns its index.
    async fn single_runtime_with(&self, image: &str, others: &str) -> Result<usize> {
        let images = self.images().await?;
        let index = images.iter().position(|found| found == image).context("an upgraded runtime")?;
        let mut expected = [others; 3];
        expected[index] = image;
        assert_eq!(images, expected);
        Ok(index)
    }

    /// Checks that a user's change of the image is reverted to the image decided for that runtime.
    async fn tampering_is_reverted(&self, first: usize) -> Result<()> {
        let mut decided = [FIRST; 3];
        decided[first] = SECOND;
        let second = (first + 1) % 3;
        let third = (first + 2) % 3;
        for (at, image) in [(second, SECOND), (third, "example.test/tidewatch-agent:mine"), (first, FIRST)] {
            self.tamper(at, image).await?;
            self.images_become(&decided).await?;
        }
        Ok(())
    }

    /// Checks that a bad image reaches one runtime, which the halt names, and no other; returns its index.
    async fn halts_at_one(&self, image: &str) -> Result<usize> {
        self.landscape.restart_receiver(image, &SHORT_DEADLINE).await?;
        self.halts().await?;
        let bad = self.single_runtime_with(image, SECOND).await?;
        let halt = self.upgrade_state("halted").await?.context("the reason of the halt")?;
        assert!(halt.contains(self.members[bad].runtime.name()), "{halt}");
        Ok(bad)
    }

    async fn others_deliver(&self, bad: usize, modules: &[&str]) -> Result<()> {
        for (at, member) in self.members.iter().enumerate().filter(|(at, _)| *at != bad) {
            member.delivers(modules).await.with_context(|| format!("deliver in the unaffected runtime {at}"))?;
        }
        Ok(())
    }

    async fn halt_is_reported(&self) -> Result<()> {
        let events: Api<Event> = Api::namespaced(self.landscape.operator(), self.landscape.namespace());
        until("the Event of the halt", async || {
            let events = events.list(&ListParams::default()).await?;
            Ok(events.items.into_iter().find(|event| event.reason.as_deref() == Some("AgentUpgradeHalted")).map(drop))
        })
        .await
    }
}

#[tokio::test]
async fn an_image_is_rolled_out_in_stages_and_a_bad_one_halts_at_the_first() -> TestResult {
    let fleet = Fleet::start_with_first_image().await?;

    // The first stage has one runtime, and the pause holds the next stage back.
    fleet.landscape.restart_receiver(SECOND, &WITH_PAUSE).await?;
    fleet.proven_count_becomes(1).await?;
    let first = fleet.single_runtime_with(SECOND, FIRST).await?;
    assert_eq!(fleet.upgrade_state("stage").await?.as_deref(), Some("1"));
    fleet.tampering_is_reverted(first).await?;
    fleet.proven_count_becomes(1).await?;
    fleet.all_deliver(&["keda"]).await?;
    let agent = fleet.single_agent_runs(first).await?;

    // A receiver killed between two stages continues with the next one.
    fleet.landscape.restart_receiver(SECOND, &WITHOUT_PAUSE).await?;
    fleet.completes().await?;
    assert_eq!(fleet.images().await?, [SECOND; 3]);
    assert_eq!(fleet.single_agent_runs(first).await?, agent, "the first runtime was not restarted again");
    fleet.all_deliver(&[]).await?;

    // A crashing image halts at the first runtime, also across a restart of the receiver.
    let bad = fleet.halts_at_one(EXITS).await?;
    fleet.halt_is_reported().await?;
    fleet.members[bad].condition_becomes("SKRWebhook", "False", "CrashLoop").await?;
    fleet.landscape.restart_receiver(EXITS, &SHORT_DEADLINE).await?;
    fleet.halts().await?;
    fleet.others_deliver(bad, &["keda"]).await?;
    assert_eq!(fleet.single_runtime_with(EXITS, SECOND).await?, bad);

    // A rollback reaches all runtimes at once.
    fleet.landscape.restart_receiver(SECOND, &WITH_PAUSE).await?;
    fleet.images_become(&[SECOND; 3]).await?;
    assert_eq!(fleet.upgrade_state("halted").await?, None);
    fleet.members[bad].delivers(&["keda"]).await?;

    // An image that runs and stays silent halts as well, although no pod status shows a fault.
    let bad = fleet.halts_at_one(HANGS).await?;
    fleet.members[bad].condition_becomes("EventPath", "False", "NoHeartbeat").await?;
    until("the agent to run without becoming ready", async || {
        let running = fleet.members[bad].kubelet.running("tidewatch-agent");
        Ok((running.len() == 1 && !running[0].ready).then_some(()))
    })
    .await?;
    fleet.others_deliver(bad, &[]).await?;
    Ok(())
}
