//! The CA rotates while users write, agents renew, and receivers die: nobody notices.

use std::{
    process::{Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_receiver::pki::CA_SECRET;
use tidewatch_shared::{
    api::Kyma,
    names::{AGENT_OBJECT, SKR_KYMA, SKR_NAMESPACE, TRUST_BUNDLE_KEY},
};
use tidewatch_tests::{
    landscape::{Landscape, Options, until},
    product::build_binaries,
    progress::say,
};
use tokio::{process::Command, task::JoinHandle, time};

use crate::support::{Member, Nothing, Tested, quick};

/// Changes a second while the CA rotates.
const WRITES_PER_SECOND: u64 = 20;

/// Leaves that hold for a minute, so that many renew while the CA rotates.
fn short() -> Options {
    let receiver = ["--certificate-validity-seconds=60", "--server-certificate-validity-seconds=30"];
    Options { receiver: receiver.map(str::to_owned).to_vec(), ..quick() }
}

async fn secrets(landscape: &Landscape) -> Result<Api<Secret>> {
    Ok(Api::namespaced(landscape.kcp().client().await?, landscape.namespace()))
}

async fn state(landscape: &Landscape) -> Result<Option<Value>> {
    let secret = secrets(landscape).await?.get_opt(CA_SECRET).await?;
    let Some(state) = secret.and_then(|secret| secret.data?.remove("state.json")) else { return Ok(None) };
    Ok(Some(serde_json::from_slice(&state.0)?))
}

async fn phase(landscape: &Landscape, wanted: &str) -> Result<()> {
    until(&format!("the phase {wanted}"), async || {
        Ok(state(landscape).await?.filter(|state| state["phase"] == wanted).map(drop))
    })
    .await
}

/// Runs `rotate-ca`, as its operator does.
async fn rotate(landscape: &Landscape, more: &[&str]) -> Result<Output> {
    let admin = landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    let url = format!("http://{admin}");
    let command = Command::new(build_binaries().await?.receiver()?)
        .args([&["rotate-ca", "--admin-url", &url], more].concat())
        .stdin(Stdio::null())
        .output();
    let output = time::timeout(Duration::from_secs(300), command).await.context("rotate-ca does not end")??;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    anyhow::ensure!(output.status.success(), "{}: {errors}", output.status);
    Ok(output)
}

/// The roots that a runtime's agent is told to trust.
async fn roots(member: &Member) -> Result<String> {
    let maps = Api::<ConfigMap>::namespaced(member.runtime.cluster().client().await?, SKR_NAMESPACE);
    let data = maps.get(AGENT_OBJECT).await?.data.context("data")?;
    data.get(TRUST_BUNDLE_KEY).cloned().context("roots")
}

/// Requests and handshakes that the receiver has refused in this life, other than while it was starting, by line of the metric.
async fn refusals(landscape: &Landscape) -> Result<Vec<String>> {
    let (_, text) = landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
    let counts = |line: &&str| {
        ["tidewatch_gateway_requests_refused_total{", "tidewatch_gateway_handshakes_failed_total{"]
            .iter()
            .any(|family| line.starts_with(family))
            && !line.contains("\"not-synced\"")
            && !line.ends_with(" 0")
    };
    Ok(text.lines().filter(counts).map(str::to_owned).collect())
}

/// A user who writes all the time.
struct User {
    ended: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    task: JoinHandle<Result<()>>,
}

impl User {
    fn start(members: &[Member]) -> Self {
        let kymas = members.iter().map(|member| Api::<Kyma>::namespaced(member.runtime.user(), SKR_NAMESPACE));
        let kymas: Vec<_> = kymas.collect();
        let (ended, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (until, count) = (ended.clone(), written.clone());
        let task = tokio::spawn(async move {
            let mut pace = time::interval(Duration::from_millis(1_000 / WRITES_PER_SECOND));
            pace.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
            for number in 0_u64.. {
                pace.tick().await;
                if until.load(Ordering::Relaxed) {
                    break;
                }
                let kyma = &kymas[usize::try_from(number)? % kymas.len()];
                let channel = if number % 4 < 2 { "regular" } else { "fast" };
                let change = Patch::Merge(json!({"spec": {"channel": channel}}));
                kyma.patch(SKR_KYMA, &PatchParams::default(), &change).await.context("a user's write failed")?;
                count.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        Self { ended, written, task }
    }

    /// How many writes there were. None may have failed.
    async fn stop(self) -> Result<u64> {
        self.ended.store(true, Ordering::Relaxed);
        self.task.await??;
        Ok(self.written.load(Ordering::Relaxed))
    }
}

#[tokio::test]
async fn the_ca_rotates_under_load_and_a_receiver_killed_in_each_phase_is_continued() -> Tested {
    let (mut nothing, clusters) = Nothing::prepare("rotates", 2, short()).await?;
    nothing.register(clusters).await?;
    for member in &nothing.members {
        member.proven().await?;
    }
    let landscape = &nothing.landscape;
    let first = roots(&nothing.members[0]).await?;
    let agents = [&nothing.members[0], &nothing.members[1]].map(async |member| member.agent(None).await);
    let [one, two] = agents;
    let before = [one.await?.pid(), two.await?.pid()];
    let user = User::start(&nothing.members);

    let output = rotate(landscape, &[]).await?;
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    say(&told);
    for phase in ["spread", "no rotation is under way"] {
        assert!(told.contains(phase), "{told}");
    }
    assert_eq!(refusals(landscape).await?, Vec::<String>::new());
    let second = roots(&nothing.members[0]).await?;
    assert!(first != second && second.matches("BEGIN").count() == 1, "{second}");

    rotate(landscape, &["--no-wait"]).await?;
    for name in ["spread", "reissue", "retire"] {
        phase(landscape, name).await?;
        landscape.with_receiver(async |receiver| receiver.kill9()).await?;
        landscape.start_receiver().await?;
        say(&format!("killed in {name}"));
    }
    phase(landscape, "steady").await?;
    let third = roots(&nothing.members[1]).await?;
    assert!(second != third && third.matches("BEGIN").count() == 1, "{third}");
    assert_eq!(refusals(landscape).await?, Vec::<String>::new());

    say(&format!("{} writes, none failed", user.stop().await?));
    for (member, before) in nothing.members.iter().zip(before) {
        member.delivers(&["keda"]).await?;
        member.proven().await?;
        assert_eq!(member.agent(None).await?.pid(), before, "no agent was restarted");
    }
    Ok(())
}

#[tokio::test]
async fn who_never_follows_is_named_and_left_behind_on_command() -> Tested {
    let options = Options { receiver: vec!["--certificate-validity-seconds=600".to_owned()], ..quick() };
    let (mut nothing, clusters) = Nothing::prepare("behind", 2, options).await?;
    nothing.register(clusters).await?;
    for member in &nothing.members {
        member.proven().await?;
    }
    let landscape = &nothing.landscape;
    let [cut, well] = [&nothing.members[0], &nothing.members[1]];
    let frozen = cut.agent(None).await?;
    cut.kubelet.freeze(&frozen)?;
    let output = rotate(landscape, &["--no-wait", "--json"]).await?;
    let target = serde_json::from_slice::<Value>(&output.stdout)?["target"].clone();
    assert!(target.is_string(), "{target}");
    let metric = format!("tidewatch_pki_rotation_stragglers{{phase=\"spread\"}} {}", 1);
    until("the one that does not follow to be counted", async || {
        let (_, text) = landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        Ok(text.lines().any(|line| line == metric).then_some(()))
    })
    .await?;
    let output = rotate(landscape, &["--force-after", "4"]).await?;
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(told.contains(&format!("{}/{}", landscape.namespace(), cut.runtime.name())), "{told}");
    let last = told.rsplit_once("retire: ").map(|(_, last)| last).context("the last phase")?;
    let others = format!("{}/{}", landscape.namespace(), well.runtime.name());
    assert!(!last.contains(&others), "{told}");
    well.delivers(&["keda"]).await?;
    // It is back, with a certificate and roots that are of no use any more: it finds the way by itself.
    cut.kubelet.thaw(&frozen)?;
    cut.delivers(&["keda"]).await?;
    cut.proven().await?;
    Ok(())
}

#[tokio::test]
async fn a_lost_ca_is_replaced_and_everybody_enrols_again() -> Tested {
    let nothing = Nothing::one("lost-ca", quick()).await?;
    let (landscape, member) = (&nothing.landscape, nothing.only());
    let before = roots(member).await?;
    let lost = secrets(landscape).await?.get(CA_SECRET).await?;
    secrets(landscape).await?.delete(CA_SECRET, &DeleteParams::default()).await?;
    until("another CA", async || {
        let now = secrets(landscape).await?.get_opt(CA_SECRET).await?;
        Ok(now.filter(|now| now.uid() != lost.uid()).map(drop))
    })
    .await?;
    until("the runtime to be told", async || Ok((roots(member).await? != before).then_some(()))).await?;
    member.delivers(&["keda"]).await?;
    member.proven().await?;

    // The backup comes back.
    let mut now = secrets(landscape).await?.get(CA_SECRET).await?;
    now.data.clone_from(&lost.data);
    secrets(landscape).await?.replace(CA_SECRET, &kube::api::PostParams::default(), &now).await?;
    until("the old roots to be told again", async || Ok((roots(member).await? == before).then_some(()))).await?;
    member.delivers(&[]).await?;
    member.proven().await?;
    Ok(())
}
