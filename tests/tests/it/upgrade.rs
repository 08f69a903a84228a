//! Another image of agents reaches the runtimes in stages, over receivers that are killed, and stops when it is a bad one.

use anyhow::{Context as _, Result};
use futures::future::join_all;
use k8s_openapi::api::{apps::v1::Deployment, core::v1::ConfigMap, events::v1::Event};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;
use tidewatch_receiver::installer::upgrade::CONFIG_MAP;
use tidewatch_shared::names::{AGENT_CONTAINER, AGENT_DEPLOYMENT, SKR_NAMESPACE};
use tidewatch_tests::landscape::{DEADLINE, Options, until};

use crate::{
    support::{Nothing, Tested, quick},
    sync::sum,
};

const FIRST: &str = "example.test/tidewatch-agent:1";
const SECOND: &str = "example.test/tidewatch-agent:2";
const EXITS: &str = "example.test/tidewatch-agent:exits";
const HANGS: &str = "example.test/tidewatch-agent:hangs";
const FLAGS: [&str; 2] = ["--agent-upgrade-stages", "1%,100%"];
/// For an image that is known to be bad: a good one has its time, however slow the machine. Those who have a good one are to be back from
/// the restart of the receiver before that, which takes them up to fifteen seconds.
const HURRIED: [&str; 4] = ["--agent-upgrade-pause-seconds", "0", "--agent-upgrade-deadline-seconds", "30"];
const WITHOUT_PAUSE: [&str; 2] = ["--agent-upgrade-pause-seconds", "0"];
/// Longer than any test.
const WITH_PAUSE: [&str; 2] = ["--agent-upgrade-pause-seconds", "86400"];

impl Nothing {
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

    async fn images_are(&self, wanted: &[&str]) -> Result<()> {
        let what = format!("the images {wanted:?}");
        until(&what, async || Ok((self.images().await? == wanted).then_some(()))).await
    }

    /// What its ConfigMap says of the upgrade.
    async fn upgrade(&self, key: &str) -> Result<Option<String>> {
        let maps = Api::<ConfigMap>::namespaced(self.landscape.operator(), self.landscape.namespace());
        Ok(maps.get_opt(CONFIG_MAP).await?.and_then(|map| map.data?.remove(key)))
    }

    async fn is_over(&self) -> Result<()> {
        until("the end of the upgrade", async || {
            Ok((self.upgrade("stage").await?.as_deref() == Some("done")).then_some(()))
        })
        .await
    }

    /// Waits until the receiver counts so many upgraded runtimes as proven.
    async fn counts_proven(&self, proven: u64) -> Result<()> {
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

    async fn is_halted(&self) -> Result<()> {
        self.landscape
            .with_receiver(async |receiver| {
                let look = |page: &str| (sum(page, "tidewatch_agent_upgrade_halted", &[]) == 1).then_some(());
                receiver.metrics_until(DEADLINE, look).await
            })
            .await??;
        Ok(())
    }

    /// Somebody in a runtime puts another image there.
    async fn tamper(&self, at: usize, image: &str) -> Result<()> {
        let containers = json!([{"name": AGENT_CONTAINER, "image": image}]);
        let patch = json!({"spec": {"template": {"spec": {"containers": containers}}}});
        let api = self.deployments().into_iter().nth(at).context("a runtime")?;
        api.patch(AGENT_DEPLOYMENT, &PatchParams::default(), &Patch::Strategic(patch)).await?;
        Ok(())
    }

    /// Waits until one agent runs there, that of the Deployment as it is.
    async fn settled(&self, at: usize) -> Result<Option<u32>> {
        let (member, api) = (&self.members[at], self.deployments().remove(at));
        until("one agent, and no older one", async || {
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

/// The three runtimes of the test, at each step of it.
impl Nothing {
    /// All have the first image.
    async fn with_first() -> Result<Self> {
        let receiver = FLAGS.map(str::to_owned).to_vec();
        let options = Options { agent_image: FIRST.to_owned(), receiver, ..quick() };
        let (mut nothing, clusters) = Self::prepare("upgrade", 3, options).await?;
        nothing.register(clusters).await?;
        for proven in join_all(nothing.members.iter().map(|member| member.proven())).await {
            proven?;
        }
        nothing.is_over().await?;
        assert_eq!(nothing.images().await?, [FIRST; 3], "the first image is everybody's");
        Ok(nothing)
    }

    /// The one that has another image than all the others.
    async fn only_one_has(&self, image: &str, others: &str) -> Result<usize> {
        let images = self.images().await?;
        let one = images.iter().position(|known| known == image).context("one that is upgraded")?;
        let mut expected = [others; 3];
        expected[one] = image;
        assert_eq!(images, expected);
        Ok(one)
    }

    /// Whoever puts another image there gets back the one that is decided for him.
    async fn cannot_be_tampered_with(&self, first: usize) -> Result<()> {
        let mut decided = [FIRST; 3];
        decided[first] = SECOND;
        let (second, third) = ((first + 1) % 3, (first + 2) % 3);
        for (at, image) in [(second, SECOND), (third, "example.test/tidewatch-agent:mine"), (first, FIRST)] {
            self.tamper(at, image).await?;
            self.images_are(&decided).await?;
        }
        Ok(())
    }

    /// A bad one reaches one runtime, which is named, and stops there.
    async fn stops_at_one(&self, image: &str) -> Result<usize> {
        self.landscape.restart_receiver(image, &HURRIED).await?;
        self.is_halted().await?;
        let bad = self.only_one_has(image, SECOND).await?;
        let why = self.upgrade("halted").await?.context("why it has halted")?;
        assert!(why.contains(self.members[bad].runtime.name()), "{why}");
        Ok(bad)
    }

    async fn others_deliver(&self, bad: usize, modules: &[&str]) -> Result<()> {
        for (at, member) in self.members.iter().enumerate().filter(|(at, _)| *at != bad) {
            member.delivers(modules).await.with_context(|| format!("runtime {at} is untouched"))?;
        }
        Ok(())
    }

    async fn tells_of_the_halt(&self) -> Result<()> {
        let events: Api<Event> = Api::namespaced(self.landscape.operator(), self.landscape.namespace());
        until("the Event about it", async || {
            let events = events.list(&ListParams::default()).await?;
            Ok(events.items.into_iter().find(|event| event.reason.as_deref() == Some("AgentUpgradeHalted")).map(drop))
        })
        .await
    }
}

#[tokio::test]
async fn an_image_comes_in_stages_and_a_bad_one_stops_at_the_first() -> Tested {
    let nothing = Nothing::with_first().await?;

    // One runtime, and no other for as long as the pause lasts.
    nothing.landscape.restart_receiver(SECOND, &WITH_PAUSE).await?;
    nothing.counts_proven(1).await?;
    let first = nothing.only_one_has(SECOND, FIRST).await?;
    assert_eq!(nothing.upgrade("stage").await?.as_deref(), Some("1"));
    nothing.cannot_be_tampered_with(first).await?;
    nothing.counts_proven(1).await?;
    nothing.all_deliver(&["keda"]).await?;
    let agent = nothing.settled(first).await?;

    // Killed in the midst of it, the receiver goes on from there.
    nothing.landscape.restart_receiver(SECOND, &WITHOUT_PAUSE).await?;
    nothing.is_over().await?;
    assert_eq!(nothing.images().await?, [SECOND; 3]);
    assert_eq!(nothing.settled(first).await?, agent, "it was the same one's turn, and is over");
    nothing.all_deliver(&[]).await?;

    // A bad one stops at the first: also after a receiver that was killed.
    let bad = nothing.stops_at_one(EXITS).await?;
    nothing.tells_of_the_halt().await?;
    nothing.members[bad].said("SKRWebhook", "False", "CrashLoop").await?;
    nothing.landscape.restart_receiver(EXITS, &HURRIED).await?;
    nothing.is_halted().await?;
    nothing.others_deliver(bad, &["keda"]).await?;
    assert_eq!(nothing.only_one_has(EXITS, SECOND).await?, bad);

    // The way back is at once, and everybody's.
    nothing.landscape.restart_receiver(SECOND, &WITH_PAUSE).await?;
    nothing.images_are(&[SECOND; 3]).await?;
    assert_eq!(nothing.upgrade("halted").await?, None);
    nothing.members[bad].delivers(&["keda"]).await?;

    // So does one that runs and says nothing, of which no pod's status tells anything.
    let bad = nothing.stops_at_one(HANGS).await?;
    nothing.members[bad].said("EventPath", "False", "NoHeartbeat").await?;
    until("its agent to run, and not to be ready", async || {
        let running = nothing.members[bad].kubelet.running("tidewatch-agent");
        Ok((running.len() == 1 && !running[0].ready).then_some(()))
    })
    .await?;
    nothing.others_deliver(bad, &[]).await?;
    Ok(())
}
