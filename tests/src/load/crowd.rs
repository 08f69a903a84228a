//! Any number of simulated agents with their runtimes, known to a landscape's receiver.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use http::StatusCode;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, api::PostParams};
use serde_json::{Value, json};
use tidewatch_receiver::{pki, watcher};
use tidewatch_shared::{
    api::{Kyma, Watcher},
    identity::RuntimeId,
    names::{KUBECONFIG_KEY, label},
    plan::Plan,
};
use tokio::{task::JoinSet, time::sleep};

use super::{Agent, Applicant, Contract, Office, Voice, agent::Memory};
use crate::{
    fake::{Fake, FakeCluster},
    landscape::{Landscape, now},
    progress,
};

/// The key of the Kyma in a runtime.
const KYMA: &str = "operator.kyma-project.io/kymas/kyma-system/default";
/// Objects that are written to KCP at the same time.
const HANDS: usize = 16;
const PAUSE: Duration = Duration::from_millis(100);

/// What all agents of a crowd have seen so far.
#[derive(Debug, Default)]
pub struct Tally {
    requests: AtomicU64,
    events: AtomicU64,
    heartbeats: AtomicU64,
    enrolments: AtomicU64,
    faults: AtomicU64,
    refused: Mutex<BTreeMap<u16, u64>>,
}

impl Tally {
    pub(super) fn taken(&self, events: usize) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.events.fetch_add(events as u64, Ordering::Relaxed);
    }

    pub(super) fn beaten(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.heartbeats.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn enrolled(&self) {
        self.enrolments.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn fault(&self) {
        self.faults.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn refused(&self, status: StatusCode) {
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner).entry(status.as_u16()).or_default() += 1;
    }

    /// Requests that were taken, heartbeats included.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Events in requests that were taken.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// Heartbeats that were taken.
    #[must_use]
    pub fn heartbeats(&self) -> u64 {
        self.heartbeats.load(Ordering::Relaxed)
    }

    /// Certificates that were issued by a token.
    #[must_use]
    pub fn enrolments(&self) -> u64 {
        self.enrolments.load(Ordering::Relaxed)
    }

    /// Requests that had no answer.
    #[must_use]
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// Requests that were refused, by status.
    #[must_use]
    pub fn refusals(&self) -> BTreeMap<u16, u64> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// One runtime of a crowd.
pub struct Member {
    name: String,
    id: RuntimeId,
    cluster: FakeCluster,
    memory: Memory,
    silent: Option<Agent>,
    is_paused: bool,
}

impl Member {
    /// The name of its Kyma in KCP, and of its runtime.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its runtime id.
    #[must_use]
    pub fn id(&self) -> &RuntimeId {
        &self.id
    }

    /// Its runtime.
    #[must_use]
    pub fn cluster(&self) -> &FakeCluster {
        &self.cluster
    }

    /// Its agent's memory.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Its agent, to be driven by hand; `None` once it runs.
    pub fn take_agent(&mut self) -> Option<Agent> {
        self.silent.take()
    }

    /// The user of the runtime chooses these modules, and the agent sees it.
    pub fn select(&self, modules: &[&str]) {
        let modules: Vec<_> = modules.iter().map(|name| json!({"name": name})).collect();
        self.cluster.edit(KYMA, |kyma| kyma["spec"]["modules"] = modules.into());
        self.memory.with(|contract| contract.mark("kyma", 0));
    }

    /// The modules that the status of the runtime's Kyma names; `None` when there is no status.
    #[must_use]
    pub fn shown(&self) -> Option<Vec<String>> {
        let kyma = self.cluster.object(KYMA)?;
        let status = kyma.get("status").filter(|status| status["state"].is_string())?;
        let modules = status["modules"].as_array().into_iter().flatten();
        Some(modules.filter_map(|module| module["name"].as_str().map(str::to_owned)).collect())
    }
}

/// See the module. Dropping it ends its agents; its objects stay in KCP.
pub struct Crowd {
    landscape: Arc<Landscape>,
    fake: Fake,
    plan: Plan,
    tally: Arc<Tally>,
    members: Vec<Member>,
    running: JoinSet<()>,
}

impl Crowd {
    /// Nobody yet.
    ///
    /// # Errors
    /// When the fake API server cannot be started.
    pub async fn new(landscape: Arc<Landscape>) -> Result<Self> {
        let (plan, _) = watcher::plan::<Arc<Watcher>>(&[]);
        let (fake, tally) = (Fake::start().await?, Arc::default());
        Ok(Self { landscape, fake, plan, tally, members: Vec::new(), running: JoinSet::new() })
    }

    /// Registers more runtimes, until there are so many: Kyma and access Secret in KCP, a runtime, an agent that has not begun.
    ///
    /// # Errors
    /// When KCP refuses something, or a certificate cannot be made.
    pub async fn grow(&mut self, to: usize) -> Result<()> {
        self.register(to, false).await
    }

    /// The same with runtimes that are paused: their agents are served as all others, and nothing is done in the runtimes.
    ///
    /// # Errors
    /// As [`Crowd::grow`].
    pub async fn grow_paused(&mut self, to: usize) -> Result<()> {
        self.register(to, true).await
    }

    async fn register(&mut self, to: usize, is_paused: bool) -> Result<()> {
        let client = self.landscape.kcp().client().await?;
        let namespace = self.landscape.namespace();
        let (kymas, secrets) =
            (Api::<Kyma>::namespaced(client.clone(), namespace), Api::<Secret>::namespaced(client, namespace));
        let roots = self.landscape.ca().trust_bundle().store()?;
        let mut written = Vec::new();
        for number in self.members.len()..to {
            let name = format!("crowd-{number:05}");
            let id: RuntimeId = format!("{namespace}.{name}").parse()?;
            let ca = self.landscape.ca();
            let identity = ca.make_runtime(&id, self.landscape.trust_domain(), now(), pki::RUNTIME_VALIDITY)?;
            let voice = Voice::new(&identity.identity()?, roots.clone(), self.landscape.authority().parse()?)?;
            let contract = Contract::new(id.clone(), &self.plan, number as u64);
            let agent = Agent::new(voice, contract, self.tally.clone());
            let cluster = self.fake.cluster(&name);
            let kyma = kyma(&name, &id, is_paused);
            written.push(write(&kymas, &secrets, name.clone(), kyma, self.fake.kubeconfig(&name)));
            self.members.push(Member { name, id, cluster, memory: agent.memory(), silent: Some(agent), is_paused });
        }
        stream::iter(written).buffer_unordered(HANDS).try_collect::<()>().await.context("register the runtimes in KCP")
    }

    /// Lets all agents speak that do not yet.
    pub fn start(&mut self) {
        for agent in self.members.iter_mut().filter_map(Member::take_agent) {
            self.running.spawn(agent.run());
        }
    }

    /// Lets all agents that do not speak yet enrol, as if they had tried for hours, and then speak with what they got. What they were
    /// registered with is of no use to a receiver that issues.
    pub fn enrol(&mut self, office: &Office) {
        for number in 0..self.members.len() {
            let applicant = self.applicant(number, office, true);
            let Some(mut agent) = self.members[number].take_agent() else { continue };
            self.running.spawn(async move {
                match applicant.enrol().await.and_then(|enrolled| agent.adopt(enrolled)) {
                    Ok(()) => agent.run().await,
                    Err(error) => progress::say(&format!("an agent ends: {error:#}")),
                }
            });
        }
    }

    /// Lets all agents enrol once more, all in one moment, as if each had lost what it got; they go on speaking with that.
    pub fn enrol_again(&mut self, office: &Office) {
        for number in 0..self.members.len() {
            let applicant = self.applicant(number, office, false);
            self.running.spawn(async move {
                if let Err(error) = applicant.enrol().await {
                    progress::say(&format!("an agent gets no certificate: {error:#}"));
                }
            });
        }
    }

    fn applicant(&self, number: usize, office: &Office, has_waited: bool) -> Applicant {
        let Member { id, cluster, memory, .. } = &self.members[number];
        Applicant {
            runtime: id.clone(),
            cluster: cluster.clone(),
            memory: memory.clone(),
            tally: self.tally.clone(),
            office: office.clone(),
            has_waited,
        }
    }

    /// The runtimes, in the order in which they were registered.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// See [`Crowd::members`].
    pub fn members_mut(&mut self) -> &mut [Member] {
        &mut self.members
    }

    /// The API server of all its runtimes.
    #[must_use]
    pub fn fake(&self) -> &Fake {
        &self.fake
    }

    /// The plan of all its agents.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What its agents have seen.
    #[must_use]
    pub fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }

    /// What is not settled, over all agents, as they know it.
    #[must_use]
    pub fn unsettled(&self) -> usize {
        self.members.iter().map(|member| member.memory.look(Contract::unsettled)).sum()
    }

    /// Those that something is done for.
    fn active(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| !member.is_paused)
    }

    /// Waits until every runtime that is not paused has been brought to what it shall be, everything of theirs is settled, and nothing is
    /// worked on.
    ///
    /// # Errors
    /// When the deadline passes; the text says how far it came.
    pub async fn at_rest(&self, deadline: Duration) -> Result<()> {
        until_within("the crowd to be at rest", deadline, async || {
            let of = self.active().count();
            let unsettled: usize = self.active().map(|member| member.memory.look(Contract::unsettled)).sum();
            let (queue, refusals) = (self.queue().await?, self.tally.refusals());
            if unsettled > 0 || queue > 0.0 {
                bail!("{of} agents, {unsettled} events unsettled, {queue} Kymas in the queue, refusals {refusals:?}");
            }
            let served = self.active().filter(|member| member.shown().is_some()).count();
            if served < of {
                bail!("{served} of {of} runtimes are served");
            }
            Ok(Some(()))
        })
        .await
    }

    /// Waits until the receiver has been in every runtime, whether its agent speaks or not.
    ///
    /// # Errors
    /// When the deadline passes; the text says how far it came.
    pub async fn served(&self, deadline: Duration) -> Result<()> {
        until_within("every runtime to be served", deadline, async || {
            let served = self.members.iter().filter(|member| member.shown().is_some()).count();
            ensure!(served == self.members.len(), "{served} of {} runtimes are served", self.members.len());
            Ok(Some(()))
        })
        .await
    }

    /// Kymas that the receiver works on or could work on now.
    ///
    /// # Errors
    /// When its metrics cannot be read.
    pub async fn queue(&self) -> Result<f64> {
        let (_, page) = self.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        Ok(queue(&page))
    }
}

/// Kymas that are worked on or could be worked on now, from a receiver's metrics.
#[must_use]
pub fn queue(page: &str) -> f64 {
    let lines = page.lines().filter(|line| line.starts_with("tidewatch_queue_kymas{"));
    let lines = lines.filter(|line| !line.contains("\"waiting\""));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// Asks until the answer is `Some`, as [`crate::landscape::until`], with a deadline of the caller's.
///
/// # Errors
/// When the deadline passes; the text names what was waited for and the last error.
pub async fn until_within<T>(
    what: &str,
    deadline: Duration,
    mut ask: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let started = Instant::now();
    loop {
        let answer = ask().await;
        if let Ok(Some(answer)) = answer {
            return Ok(answer);
        }
        if started.elapsed() > deadline {
            match answer {
                Err(error) => return Err(error.context(format!("waited {deadline:?} for: {what}"))),
                Ok(_) => bail!("waited {deadline:?} in vain for: {what}"),
            }
        }
        sleep(PAUSE).await;
    }
}

fn kyma(name: &str, id: &RuntimeId, is_paused: bool) -> Value {
    json!({
        "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
        "metadata": {"name": name, "labels": {label::RUNTIME_ID: id.as_str(), label::PAUSE: is_paused.to_string()}},
        "spec": {"channel": "regular"},
    })
}

async fn write(kymas: &Api<Kyma>, secrets: &Api<Secret>, name: String, kyma: Value, kubeconfig: String) -> Result<()> {
    let secret: Value = json!({
        "metadata": {"name": format!("kubeconfig-{name}"), "labels": {label::KYMA_NAME: name}},
        "stringData": {KUBECONFIG_KEY: kubeconfig},
    });
    secrets.create(&PostParams::default(), &serde_json::from_value(secret)?).await?;
    kymas.create(&PostParams::default(), &serde_json::from_value(kyma)?).await?;
    Ok(())
}
