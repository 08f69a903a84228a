//! Rotation of the CA under load: users write, agents renew, receivers are killed and networks are cut, and no request
//! of a healthy runtime fails.

mod user;

use std::{
    fs,
    process::{Output, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ObjectMeta, PostParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma,
    names::{AGENT_OBJECT, SKR_NAMESPACE, TRUST_BUNDLE_KEY},
};
use tidewatch_testing::{
    http,
    kubelet::PodState,
    landscape::{Landscape, Options, until},
    product::build_binaries,
    progress::print_line,
};
use tidewatch_trust::CA_SECRET;
use tokio::{io::AsyncWriteExt as _, net::TcpStream, process::Command, time};
use user::User;

use crate::{
    support::{Fleet, Member, TestResult, quick_options},
    sync::sum,
};

/// Validity of a leaf, in seconds. An agent renews after two thirds of it: the rest must exceed the downtime of a
/// killed receiver plus the agent's reconnect backoff of up to fifteen seconds.
const LEAF_SECONDS: u64 = 60;
/// Validity of a leaf, in seconds, where no receiver is killed; longer than a busy machine may stall.
const SHORT_LEAF_SECONDS: u64 = 24;
/// Timeout of one request to a process.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Options with leaves that are valid for so many seconds, so that they are renewed all the time.
fn leaf_validity(seconds: u64) -> Options {
    let receiver = vec![
        format!("--certificate-validity-seconds={seconds}"),
        "--server-certificate-validity-seconds=30".to_owned(),
    ];
    Options { receiver, ..quick_options() }
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

/// Runs `rotate-ca` as the operator does, and returns its output.
async fn rotate(landscape: &Landscape, more: &[&str]) -> Result<String> {
    let admin = landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    let url = format!("http://{admin}");
    let command = Command::new(build_binaries().await?.cli()?)
        .args([&["rotate-ca", "--admin-url", &url], more].concat())
        .stdin(Stdio::null())
        .output();
    let output = time::timeout(Duration::from_secs(300), command).await.context("rotate-ca does not exit")??;
    let Output { status, stdout, stderr } = output;
    ensure!(status.success(), "{status}: {}", String::from_utf8_lossy(&stderr));
    let output = String::from_utf8(stdout)?;
    print_line(&output);
    Ok(output)
}

/// Returns the trust bundle in the ConfigMap of a runtime's agent.
async fn roots(member: &Member) -> Result<String> {
    let maps = Api::<ConfigMap>::namespaced(member.runtime.cluster().client().await?, SKR_NAMESPACE);
    let data = maps.get(AGENT_OBJECT).await?.data.context("data")?;
    data.get(TRUST_BUNDLE_KEY).cloned().context("roots")
}

/// A refused request or handshake, as the receiver logs it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Refusal {
    message: String,
    reason: String,
    /// The runtime that sent the request; empty if the refusal came before authentication.
    runtime: String,
}

/// All lines of the receiver's log, across its restarts.
async fn log_lines(landscape: &Landscape) -> Result<Vec<Value>> {
    let log = landscape.with_receiver(async |receiver| receiver.log_text()).await??;
    Ok(log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// All refusals so far, without those that request a retry because the receiver is starting or overloaded.
async fn refusals(landscape: &Landscape) -> Result<Vec<Refusal>> {
    let refusal = |line: &Value| {
        let text = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
        let refusal = Refusal { message: text("message"), reason: text("reason"), runtime: text("runtime") };
        let is_refusal = ["Request refused", "Enrolment refused", "TLS handshake failed"].contains(&&*refusal.message);
        (is_refusal && !["not-synced", "busy", "late"].contains(&&*refusal.reason)).then_some(refusal)
    };
    Ok(log_lines(landscape).await?.iter().filter_map(refusal).collect())
}

/// Sends plain text to the TLS port and waits until that refusal is logged, which proves that the log shows refusals.
async fn plaintext_refusal(landscape: &Landscape) -> Result<Vec<Refusal>> {
    let mut stream = TcpStream::connect(landscape.authority()).await?;
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await?;
    let seen = until("the plain-text connection to be refused", async || {
        Ok(Some(refusals(landscape).await?).filter(|refusals| !refusals.is_empty()))
    })
    .await?;
    let message = "TLS handshake failed".to_owned();
    assert_eq!(seen, [Refusal { message, reason: "protocol".to_owned(), runtime: String::new() }]);
    Ok(seen)
}

/// Number of certificates that a runtime received by renewal.
async fn renewals(landscape: &Landscape, member: &Member) -> Result<usize> {
    let is_refusal = |line: &&Value| {
        line["message"] == "Certificate issued" && line["by"] == "renewal" && line["runtime"] == id(member)
    };
    Ok(log_lines(landscape).await?.iter().filter(is_refusal).count())
}

fn id(member: &Member) -> &str {
    member.runtime.id().as_str()
}

/// Requests a page from one of an agent's ports.
async fn get_page(agent: &PodState, port: u16, path: &str) -> Result<String> {
    let (status, text) = http::get(agent.address(port).context("a port")?, path, REQUEST_TIMEOUT).await?;
    ensure!(status.is_success(), "{path} answers {status}");
    Ok(text)
}

/// Number of an agent's requests that failed, without those that it was to retry later (503).
async fn failures(agent: &PodState) -> Result<u64> {
    let page = get_page(agent, 2112, "/metrics").await?;
    let of = |outcome: &[&str]| sum(&page, "tidewatch_agent_requests_total", outcome);
    let taken = of(&["\"taken\""]);
    ensure!(taken > 0, "no request was accepted: {page}");
    Ok(of(&[]) - taken - of(&["\"503\""]))
}

/// Waits until the receiver has recorded and settled all events of a runtime, including the last change of its Kyma:
/// the ledger has every sequence that the agent assigned, none is missing, and no work is open.
async fn settled(landscape: &Landscape, member: &Member, last: &Kyma) -> Result<()> {
    let name = member.runtime.name();
    let agent = member.agent(None).await?;
    let channel = Some(&*last.spec.channel);
    until(&format!("all of {name} to be settled"), async || {
        let admin = landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
        let agent: Value = serde_json::from_str(&get_page(&agent, 2113, "/status").await?)?;
        let fleet: Value = serde_json::from_str(&http::get(admin, "/fleet", REQUEST_TIMEOUT).await?.1)?;
        let agent = &agent["runtime"];
        let mut runtimes = fleet["runtimes"].as_array().into_iter().flatten();
        let runtime = runtimes.find(|runtime| runtime["runtimeId"] == id(member)).context("the runtime")?;
        let mut epochs = runtime["epochs"].as_array().into_iter().flatten();
        let epoch = epochs.find(|epoch| epoch["epoch"] == agent["epoch"]).context("its epoch")?;
        let open = ["waiting", "parked", "unsettled"].map(|figure| agent[figure].as_u64());
        ensure!(open == [Some(0); 3], "the agent reports {agent}");
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
    ensure!(kyma.metadata.generation == last.metadata.generation, "only the user writes to the spec");
    Ok(())
}

/// Searches all logs for lines that no fault of the test excuses.
async fn logs_are_clean(landscape: &Landscape, agents: &[PodState]) -> Result<()> {
    let receiver = landscape.with_receiver(async |receiver| receiver.log_text()).await??;
    let agents = agents.iter().map(|agent| fs::read_to_string(&agent.log)).collect::<Result<Vec<_>, _>>()?;
    for word in ["panicked", "Digests of watches differ"] {
        if let Some(line) =
            agents.iter().chain([&receiver]).flat_map(|log| log.lines()).find(|line| line.contains(word))
        {
            bail!("a log has: {line}");
        }
    }
    Ok(())
}

/// Starts two runtimes and waits until their event paths are proven.
async fn two_proven_runtimes(name: &str, options: Options) -> Result<Fleet> {
    let (mut fleet, clusters) = Fleet::prepare(name, 2, options).await?;
    fleet.register(clusters).await?;
    for member in &fleet.members {
        member.path_proven().await?;
    }
    Ok(fleet)
}

async fn agents(members: &[Member]) -> Result<Vec<PodState>> {
    let mut agents = Vec::new();
    for member in members {
        agents.push(member.agent(None).await?);
    }
    Ok(agents)
}

/// Waits until all changes of the user are settled, and checks that no agent restarted and no log has an inexcusable
/// line.
async fn outcome_is_clean(landscape: &Landscape, members: &[Member], agents: &[PodState], last: &[Kyma]) -> Result<()> {
    for (member, last) in members.iter().zip(last) {
        settled(landscape, member, last).await?;
    }
    for (member, before) in members.iter().zip(agents) {
        member.delivers(&["keda"]).await?;
        member.path_proven().await?;
        let now = member.agent(None).await?;
        assert_eq!((now.pid(), now.restarts), (before.pid(), before.restarts), "no agent was restarted");
    }
    logs_are_clean(landscape, agents).await
}

/// Checks that each recorded trust bundle has a single root, and that each rotation replaced it.
fn roots_are_replaced(roots: &[String]) {
    assert!(roots.iter().all(|roots| roots.matches("BEGIN").count() == 1), "{roots:?}");
    assert!(roots.windows(2).all(|two| two[0] != two[1]), "{roots:?}");
}

async fn rotate_undisturbed(landscape: &Landscape) -> Result<()> {
    let output = rotate(landscape, &[]).await?;
    for phase in ["spread", "no rotation is under way"] {
        assert!(output.contains(phase), "{output}");
    }
    Ok(())
}

async fn rotate_with_crash_in_each_phase(landscape: &Landscape) -> Result<()> {
    rotate(landscape, &["--no-wait"]).await?;
    for name in ["spread", "reissue", "retire"] {
        phase(landscape, name).await?;
        landscape.with_receiver(async |receiver| receiver.kill9()).await?;
        landscape.start_receiver().await?;
        print_line(&format!("killed in {name}"));
    }
    phase(landscape, "steady").await
}

/// The rotation waits for the runtime that is cut off until its leaf must have expired, and for no other one.
async fn rotate_without(landscape: &Landscape, cut: &Member, agent: &PodState) -> Result<()> {
    let proxy = landscape.agents_proxy().context("a proxy")?;
    proxy.cut_off(agent.pid().context("a process")?);
    let output = rotate(landscape, &[]).await?;
    assert!(output.contains(&format!("{}/{}", landscape.namespace(), cut.runtime.name())), "{output}");
    proxy.readmit();
    Ok(())
}

/// Three rotations in a row under constant changes and renewals: one undisturbed, one in which the receiver is killed
/// in each phase, and one that a runtime misses because its network is cut.
#[tokio::test]
async fn the_ca_rotates_three_times_under_load_without_failed_requests() -> TestResult {
    let fleet = two_proven_runtimes("rotates", Options { proxied: true, ..leaf_validity(LEAF_SECONDS) }).await?;
    let landscape = &fleet.landscape;
    let members = &fleet.members;
    let [healthy, cut] = [&members[0], &members[1]];
    let agents = agents(members).await?;
    let plaintext_refusal = plaintext_refusal(landscape).await?;
    let mut bundles = vec![roots(healthy).await?];
    let user = User::start(members).await?;

    rotate_undisturbed(landscape).await?;
    bundles.push(roots(healthy).await?);
    assert_eq!(refusals(landscape).await?, plaintext_refusal);

    rotate_with_crash_in_each_phase(landscape).await?;
    bundles.push(roots(healthy).await?);
    assert_eq!(refusals(landscape).await?, plaintext_refusal);

    let before = failures(&agents[0]).await?;
    rotate_without(landscape, cut, &agents[1]).await?;
    bundles.push(roots(healthy).await?);
    roots_are_replaced(&bundles);

    let (last, record) = user.stop().await?;
    print_line(&record.to_string());
    outcome_is_clean(landscape, members, &agents, &last).await?;
    let since: Vec<_> = refusals(landscape).await?.split_off(plaintext_refusal.len());
    print_line(&format!("refused requests of the runtime that was cut off: {since:?}"));
    assert!(since.iter().all(|refusal| refusal.runtime.is_empty() || refusal.runtime == id(cut)), "{since:?}");
    assert_eq!(failures(&agents[0]).await?, before, "unnamed refusals in {since:?} are not of the healthy runtime");
    // The three rotations account for one renewal each.
    assert!(renewals(landscape, healthy).await? > 3);
    Ok(())
}

#[tokio::test]
async fn short_lived_certificates_are_renewed_through_a_rotation_without_refusals() -> TestResult {
    let fleet = two_proven_runtimes("renews", leaf_validity(SHORT_LEAF_SECONDS)).await?;
    let landscape = &fleet.landscape;
    let members = &fleet.members;
    let agents = agents(members).await?;
    let plaintext_refusal = plaintext_refusal(landscape).await?;
    let mut failed = Vec::new();
    for agent in &agents {
        failed.push(failures(agent).await?);
    }
    let before = roots(&members[0]).await?;
    let user = User::start(members).await?;

    rotate_undisturbed(landscape).await?;
    for member in members {
        // The rotation accounts for one renewal.
        until("certificates to be renewed several times", async || {
            let renewals = renewals(landscape, member).await?;
            ensure!(renewals > 3, "{renewals} of {}", id(member));
            Ok(Some(()))
        })
        .await?;
    }
    user.goes_on().await?;
    let (last, record) = user.stop().await?;
    print_line(&record.to_string());
    roots_are_replaced(&[before, roots(&members[0]).await?]);
    outcome_is_clean(landscape, members, &agents, &last).await?;
    assert_eq!(refusals(landscape).await?, plaintext_refusal);
    for (agent, failed) in agents.iter().zip(failed) {
        assert_eq!(failures(agent).await?, failed, "{}", agent.name);
    }
    Ok(())
}

#[tokio::test]
async fn a_straggler_is_named_and_skipped_on_command() -> TestResult {
    let options =
        Options { receiver: vec!["--certificate-validity-seconds=600".to_owned()], proxied: true, ..quick_options() };
    let fleet = two_proven_runtimes("behind", options).await?;
    let landscape = &fleet.landscape;
    let [cut, healthy] = [&fleet.members[0], &fleet.members[1]];
    let proxy = landscape.agents_proxy().context("a proxy")?;
    proxy.cut_off(cut.agent(None).await?.pid().context("a process")?);
    let answer = rotate(landscape, &["--no-wait", "--json"]).await?;
    let target = serde_json::from_str::<Value>(&answer)?["target"].clone();
    assert!(target.is_string(), "{target}");
    let metric = format!("tidewatch_pki_rotation_stragglers{{phase=\"spread\"}} {}", 1);
    until("the straggler to be counted", async || {
        let (_, text) = landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        Ok(text.lines().any(|line| line == metric).then_some(()))
    })
    .await?;
    let message = cut.condition_becomes("CARotation", "False", "RootsNotConfirmed").await?;
    assert!(message.contains("the rotation of the CA waits for the runtime"), "{message}");
    until("the healthy runtime not to be a straggler", async || Ok((!is_straggler(healthy).await?).then_some(())))
        .await?;

    let output = rotate(landscape, &["--force-after", "4"]).await?;
    assert!(output.contains(&format!("{}/{}", landscape.namespace(), cut.runtime.name())), "{output}");
    let last = output.rsplit_once("retire: ").map(|(_, last)| last).context("the last phase")?;
    let others = format!("{}/{}", landscape.namespace(), healthy.runtime.name());
    assert!(!last.contains(&others), "{output}");
    healthy.delivers(&["keda"]).await?;
    until("the condition to be removed after the rotation", async || Ok((!is_straggler(cut).await?).then_some(())))
        .await?;
    // Readmit the runtime with its expired certificate and outdated roots: the agent recovers without help.
    proxy.readmit();
    cut.delivers(&["keda"]).await?;
    cut.path_proven().await?;
    Ok(())
}

/// Returns true if the Kyma has the condition that a rotation waits for its runtime.
async fn is_straggler(member: &Member) -> Result<bool> {
    let status = member.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status);
    Ok(status.is_some_and(|status| status.condition("CARotation").is_some()))
}

#[tokio::test]
async fn a_lost_or_compromised_ca_is_replaced_and_all_agents_enrol_again() -> TestResult {
    let fleet = Fleet::with_one_runtime("lost-ca", quick_options()).await?;
    let landscape = &fleet.landscape;
    let member = fleet.only();
    let before = roots(member).await?;
    let lost = secrets(landscape).await?.get(CA_SECRET).await?;
    secrets(landscape).await?.delete(CA_SECRET, &DeleteParams::default()).await?;
    let empty = Secret {
        metadata: ObjectMeta { name: Some(CA_SECRET.to_owned()), ..ObjectMeta::default() },
        ..Secret::default()
    };
    secrets(landscape).await?.create(&PostParams::default(), &empty).await?;
    until("another CA", async || {
        let now = secrets(landscape).await?.get_opt(CA_SECRET).await?;
        Ok(now.filter(|now| now.uid() != lost.uid() && now.data.is_some()).map(drop))
    })
    .await?;
    until("the new roots in the runtime", async || Ok((roots(member).await? != before).then_some(()))).await?;
    member.delivers(&["keda"]).await?;
    member.path_proven().await?;

    // Restore the CA from its backup.
    let mut now = secrets(landscape).await?.get(CA_SECRET).await?;
    now.data.clone_from(&lost.data);
    secrets(landscape).await?.replace(CA_SECRET, &PostParams::default(), &now).await?;
    until("the old roots in the runtime", async || Ok((roots(member).await? == before).then_some(()))).await?;
    member.delivers(&[]).await?;
    member.path_proven().await?;

    let renewed = renewals(landscape, member).await?;
    let output = rotate(landscape, &["--compromised"]).await?;
    assert!(output.contains("no rotation is under way"), "{output}");
    until("the roots in the runtime to be replaced", async || {
        Ok((!roots(member).await?.contains(before.trim())).then_some(()))
    })
    .await?;
    member.delivers(&["keda"]).await?;
    member.path_proven().await?;
    assert_eq!(renewals(landscape, member).await?, renewed, "a certificate of the old root was renewed");
    Ok(())
}
