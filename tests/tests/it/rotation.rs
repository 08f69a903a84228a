//! The CA rotates while users write, agents renew, receivers die and networks are cut: nobody notices.

mod user;

use std::{
    fs,
    process::{Output, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, ResourceExt as _, api::DeleteParams};
use serde_json::{Value, json};
use tidewatch_receiver::pki::CA_SECRET;
use tidewatch_shared::{
    api::Kyma,
    names::{AGENT_OBJECT, SKR_NAMESPACE, TRUST_BUNDLE_KEY},
};
use tidewatch_tests::{
    http,
    kubelet::Played,
    landscape::{Landscape, Options, until},
    product::build_binaries,
    progress::say,
};
use tokio::{io::AsyncWriteExt as _, net::TcpStream, process::Command, time};

use crate::{
    support::{Member, Nothing, Tested, quick},
    sync::sum,
};
use user::User;

/// How long a leaf holds. It is renewed after two thirds: the rest must be longer than a receiver that was killed is away, and than the
/// up to fifteen seconds after which an agent tries again to reach it.
const LEAF_SECONDS: u64 = 60;
/// The same where no receiver is ever away, but a machine may stand still for seconds.
const SHORT_LEAF_SECONDS: u64 = 24;
/// One question to a process takes no longer.
const ASKING: Duration = Duration::from_secs(10);

/// Certificates that are renewed all the time.
fn leaves_of(seconds: u64) -> Options {
    let receiver = vec![
        format!("--certificate-validity-seconds={seconds}"),
        "--server-certificate-validity-seconds=30".to_owned(),
    ];
    Options { receiver, ..quick() }
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

/// Runs `rotate-ca`, as its operator does, and returns what it says.
async fn rotate(landscape: &Landscape, more: &[&str]) -> Result<String> {
    let admin = landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    let url = format!("http://{admin}");
    let command = Command::new(build_binaries().await?.receiver()?)
        .args([&["rotate-ca", "--admin-url", &url], more].concat())
        .stdin(Stdio::null())
        .output();
    let output = time::timeout(Duration::from_secs(300), command).await.context("rotate-ca does not end")??;
    let Output { status, stdout, stderr } = output;
    ensure!(status.success(), "{status}: {}", String::from_utf8_lossy(&stderr));
    let told = String::from_utf8(stdout)?;
    say(&told);
    Ok(told)
}

/// The roots that a runtime's agent is told to trust.
async fn roots(member: &Member) -> Result<String> {
    let maps = Api::<ConfigMap>::namespaced(member.runtime.cluster().client().await?, SKR_NAMESPACE);
    let data = maps.get(AGENT_OBJECT).await?.data.context("data")?;
    data.get(TRUST_BUNDLE_KEY).cloned().context("roots")
}

/// A request or a handshake that the receiver has refused, as its log has it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Refusal {
    what: String,
    reason: String,
    /// Whose request it was; empty where that was not known yet.
    runtime: String,
}

/// All lines of the receiver's log, of all its lives.
async fn logged(landscape: &Landscape) -> Result<Vec<Value>> {
    let log = landscape.with_receiver(async |receiver| receiver.log_text()).await??;
    Ok(log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// What was refused so far, but for what a receiver that is just starting or has too much to do asks to be told again.
async fn refusals(landscape: &Landscape) -> Result<Vec<Refusal>> {
    let refusal = |line: &Value| {
        let text = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
        let refusal = Refusal { what: text("message"), reason: text("reason"), runtime: text("runtime") };
        let is_one = ["Request refused", "Enrolment refused", "TLS handshake failed"].contains(&&*refusal.what);
        (is_one && !["not-synced", "busy", "late"].contains(&&*refusal.reason)).then_some(refusal)
    };
    Ok(logged(landscape).await?.iter().filter_map(refusal).collect())
}

/// Somebody who speaks no TLS is the first that is refused: so it is known that refusals are seen.
async fn stranger(landscape: &Landscape) -> Result<Vec<Refusal>> {
    let mut stream = TcpStream::connect(landscape.authority()).await?;
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await?;
    let seen = until("the stranger to be refused", async || {
        Ok(Some(refusals(landscape).await?).filter(|refusals| !refusals.is_empty()))
    })
    .await?;
    let what = "TLS handshake failed".to_owned();
    assert_eq!(seen, [Refusal { what, reason: "protocol".to_owned(), runtime: String::new() }]);
    Ok(seen)
}

/// Certificates that a runtime got over the ones that it had.
async fn renewals(landscape: &Landscape, member: &Member) -> Result<usize> {
    let is_one = |line: &&Value| {
        line["message"] == "Certificate issued" && line["by"] == "renewal" && line["runtime"] == id(member)
    };
    Ok(logged(landscape).await?.iter().filter(is_one).count())
}

fn id(member: &Member) -> &str {
    member.runtime.id().as_str()
}

/// What an agent says on one of its ports.
async fn asked(agent: &Played, port: u16, path: &str) -> Result<String> {
    let (status, text) = http::get(agent.address(port).context("a port")?, path, ASKING).await?;
    ensure!(status.is_success(), "{path} says {status}");
    Ok(text)
}

/// Requests of an agent that were not taken, but for those that were to be sent again later.
async fn failures(agent: &Played) -> Result<u64> {
    let page = asked(agent, 2112, "/metrics").await?;
    let of = |outcome: &[&str]| sum(&page, "tidewatch_agent_requests_total", outcome);
    let taken = of(&["\"taken\""]);
    ensure!(taken > 0, "nothing was taken: {page}");
    Ok(of(&[]) - taken - of(&["\"503\""]))
}

/// Waits until all that a runtime has told is counted by the receiver and settled, the last change of its Kyma with it: each sequence
/// that its agent gave was recorded, none is missing, and no work is open.
async fn settled(landscape: &Landscape, member: &Member, last: &Kyma) -> Result<()> {
    let name = member.runtime.name();
    let (agent, channel) = (member.agent(None).await?, Some(&*last.spec.channel));
    until(&format!("all of {name} to be settled"), async || {
        let admin = landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
        let agent: Value = serde_json::from_str(&asked(&agent, 2113, "/status").await?)?;
        let fleet: Value = serde_json::from_str(&http::get(admin, "/fleet", ASKING).await?.1)?;
        let agent = &agent["runtime"];
        let mut runtimes = fleet["runtimes"].as_array().into_iter().flatten();
        let runtime = runtimes.find(|runtime| runtime["runtimeId"] == id(member)).context("the runtime")?;
        let mut epochs = runtime["epochs"].as_array().into_iter().flatten();
        let epoch = epochs.find(|epoch| epoch["epoch"] == agent["epoch"]).context("its epoch")?;
        let open = ["waiting", "parked", "unsettled"].map(|figure| agent[figure].as_u64());
        ensure!(open == [Some(0); 3], "the agent says {agent}");
        ensure!(epoch["accepted"] == agent["sequence"] && epoch["missing"] == 0, "{epoch} and {agent}");
        ensure!(epoch["unsettled"] == json!([]), "{epoch}");
        for kyma in [member.runtime.skr_kyma().await?, member.runtime.kcp_kyma().await?] {
            let status = kyma.context("a Kyma")?.status.context("a status")?;
            ensure!(status.active_channel.as_deref() == channel, "{:?}", status.active_channel);
        }
        Ok(Some(()))
    })
    .await?;
    let kyma = member.runtime.skr_kyma().await?.context("the Kyma")?;
    ensure!(kyma.metadata.generation == last.metadata.generation, "nobody but the user writes to it");
    Ok(())
}

/// Looks through all logs for what nothing excuses.
async fn nothing_was_odd(landscape: &Landscape, agents: &[Played]) -> Result<()> {
    let receiver = landscape.with_receiver(async |receiver| receiver.log_text()).await??;
    let agents = agents.iter().map(|agent| fs::read_to_string(&agent.log)).collect::<Result<Vec<_>, _>>()?;
    for word in ["panicked", "Digests of watches do not agree"] {
        if let Some(line) =
            agents.iter().chain([&receiver]).flat_map(|log| log.lines()).find(|line| line.contains(word))
        {
            bail!("a log says: {line}");
        }
    }
    Ok(())
}

/// Two runtimes, whose paths are proven.
async fn begun(name: &str, options: Options) -> Result<Nothing> {
    let (mut nothing, clusters) = Nothing::prepare(name, 2, options).await?;
    nothing.register(clusters).await?;
    for member in &nothing.members {
        member.proven().await?;
    }
    Ok(nothing)
}

async fn agents(members: &[Member]) -> Result<Vec<Played>> {
    let mut agents = Vec::new();
    for member in members {
        agents.push(member.agent(None).await?);
    }
    Ok(agents)
}

/// Waits until all is settled that a user has written, and looks for what nothing excuses: an agent that was restarted, or a line in a log.
async fn all_is_well(landscape: &Landscape, members: &[Member], agents: &[Played], last: &[Kyma]) -> Result<()> {
    for (member, last) in members.iter().zip(last) {
        settled(landscape, member, last).await?;
    }
    for (member, before) in members.iter().zip(agents) {
        member.delivers(&["keda"]).await?;
        member.proven().await?;
        let now = member.agent(None).await?;
        assert_eq!((now.pid(), now.restarts), (before.pid(), before.restarts), "no agent was restarted");
    }
    nothing_was_odd(landscape, agents).await
}

/// One root at any time when nothing is under way, and another one after each rotation.
fn each_replaced(roots: &[String]) {
    assert!(roots.iter().all(|roots| roots.matches("BEGIN").count() == 1), "{roots:?}");
    assert!(roots.windows(2).all(|two| two[0] != two[1]), "{roots:?}");
}

async fn rotates_undisturbed(landscape: &Landscape) -> Result<()> {
    let told = rotate(landscape, &[]).await?;
    for phase in ["spread", "no rotation is under way"] {
        assert!(told.contains(phase), "{told}");
    }
    Ok(())
}

async fn rotates_although_killed_in_each_phase(landscape: &Landscape) -> Result<()> {
    rotate(landscape, &["--no-wait"]).await?;
    for name in ["spread", "reissue", "retire"] {
        phase(landscape, name).await?;
        landscape.with_receiver(async |receiver| receiver.kill9()).await?;
        landscape.start_receiver().await?;
        say(&format!("killed in {name}"));
    }
    phase(landscape, "steady").await
}

/// The rotation waits for the one that is cut off until its leaf must have ended, and then for the others alone.
async fn rotates_without(landscape: &Landscape, cut: &Member, agent: &Played) -> Result<()> {
    let front = landscape.front().context("a proxy")?;
    front.cut_off(agent.pid().context("a process")?);
    let told = rotate(landscape, &[]).await?;
    assert!(told.contains(&format!("{}/{}", landscape.namespace(), cut.runtime.name())), "{told}");
    front.take_back();
    Ok(())
}

/// Three rotations in a row, with changes and renewals all the time: one that nothing disturbs, one whose receiver is killed in each
/// phase, and one that a runtime misses because its network is cut.
#[tokio::test]
async fn the_ca_rotates_three_times_under_load_and_nobody_notices() -> Tested {
    let nothing = begun("rotates", Options { proxied: true, ..leaves_of(LEAF_SECONDS) }).await?;
    let (landscape, members) = (&nothing.landscape, &nothing.members);
    let [well, cut] = [&members[0], &members[1]];
    let agents = agents(members).await?;
    let stranger = stranger(landscape).await?;
    let mut known = vec![roots(well).await?];
    let user = User::start(members).await?;

    rotates_undisturbed(landscape).await?;
    known.push(roots(well).await?);
    assert_eq!(refusals(landscape).await?, stranger);

    rotates_although_killed_in_each_phase(landscape).await?;
    known.push(roots(well).await?);
    assert_eq!(refusals(landscape).await?, stranger);

    let before = failures(&agents[0]).await?;
    rotates_without(landscape, cut, &agents[1]).await?;
    known.push(roots(well).await?);
    each_replaced(&known);

    let (last, record) = user.stop().await?;
    say(&record.to_string());
    all_is_well(landscape, members, &agents, &last).await?;
    let since: Vec<_> = refusals(landscape).await?.split_off(stranger.len());
    say(&format!("of the one that was cut off was refused: {since:?}"));
    assert!(since.iter().all(|refusal| refusal.runtime.is_empty() || refusal.runtime == id(cut)), "{since:?}");
    assert_eq!(failures(&agents[0]).await?, before, "what has no name in {since:?} was not the other's");
    // The rotations ask for one each.
    assert!(renewals(landscape, well).await? > 3);
    Ok(())
}

#[tokio::test]
async fn certificates_of_seconds_are_renewed_through_a_rotation_and_nothing_is_refused() -> Tested {
    let nothing = begun("renews", leaves_of(SHORT_LEAF_SECONDS)).await?;
    let (landscape, members) = (&nothing.landscape, &nothing.members);
    let agents = agents(members).await?;
    let stranger = stranger(landscape).await?;
    let mut failed = Vec::new();
    for agent in &agents {
        failed.push(failures(agent).await?);
    }
    let (before, user) = (roots(&members[0]).await?, User::start(members).await?);

    rotates_undisturbed(landscape).await?;
    for member in members {
        // One is the rotation's.
        until("certificates to be renewed several times", async || {
            let renewals = renewals(landscape, member).await?;
            ensure!(renewals > 3, "{renewals} of {}", id(member));
            Ok(Some(()))
        })
        .await?;
    }
    user.keeps_pace().await?;
    let (last, record) = user.stop().await?;
    say(&record.to_string());
    each_replaced(&[before, roots(&members[0]).await?]);
    all_is_well(landscape, members, &agents, &last).await?;
    assert_eq!(refusals(landscape).await?, stranger);
    for (agent, failed) in agents.iter().zip(failed) {
        assert_eq!(failures(agent).await?, failed, "{}", agent.name);
    }
    Ok(())
}

#[tokio::test]
async fn who_never_follows_is_named_and_left_behind_on_command() -> Tested {
    let options = Options { receiver: vec!["--certificate-validity-seconds=600".to_owned()], proxied: true, ..quick() };
    let nothing = begun("behind", options).await?;
    let landscape = &nothing.landscape;
    let [cut, well] = [&nothing.members[0], &nothing.members[1]];
    let front = landscape.front().context("a proxy")?;
    front.cut_off(cut.agent(None).await?.pid().context("a process")?);
    let answer = rotate(landscape, &["--no-wait", "--json"]).await?;
    let target = serde_json::from_str::<Value>(&answer)?["target"].clone();
    assert!(target.is_string(), "{target}");
    let metric = format!("tidewatch_pki_rotation_stragglers{{phase=\"spread\"}} {}", 1);
    until("the one that does not follow to be counted", async || {
        let (_, text) = landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        Ok(text.lines().any(|line| line == metric).then_some(()))
    })
    .await?;
    let said = cut.said("CARotation", "False", "RootsNotConfirmed").await?;
    assert!(said.contains("the rotation of the CA waits for the runtime"), "{said}");
    until("the other one, which has followed, not to be named", async || Ok((!is_named(well).await?).then_some(())))
        .await?;

    let told = rotate(landscape, &["--force-after", "4"]).await?;
    assert!(told.contains(&format!("{}/{}", landscape.namespace(), cut.runtime.name())), "{told}");
    let last = told.rsplit_once("retire: ").map(|(_, last)| last).context("the last phase")?;
    let others = format!("{}/{}", landscape.namespace(), well.runtime.name());
    assert!(!last.contains(&others), "{told}");
    well.delivers(&["keda"]).await?;
    until("the condition to go, as nothing waits for anybody", async || Ok((!is_named(cut).await?).then_some(())))
        .await?;
    // It is back, with a certificate and roots that are of no use any more: it finds the way by itself.
    front.take_back();
    cut.delivers(&["keda"]).await?;
    cut.proven().await?;
    Ok(())
}

/// Whether its Kyma says that a rotation waits for it.
async fn is_named(member: &Member) -> Result<bool> {
    let status = member.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status);
    Ok(status.is_some_and(|status| status.condition("CARotation").is_some()))
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
