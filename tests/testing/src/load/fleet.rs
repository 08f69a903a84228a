//! Any number of simulated agents with their runtimes, registered at a landscape's receiver.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use http::StatusCode;
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma, Watcher,
    identity::RuntimeId,
    names::{KUBECONFIG_KEY, label},
    plan::Plan,
};
use tidewatch_installer::watcher;
use tokio::{task::JoinSet, time::sleep};

use super::{
    Agent, ChangingRuntime, ChurnCounters, EnrolmentClient, EnrolmentEndpoint, ProtocolState, SignedClient,
    agent::AgentHandle,
};
use crate::{
    fake::{FakeApiServer, FakeCluster},
    landscape::{Landscape, now},
    product::metric_sum,
    progress,
};

/// Store key of the Kyma in a runtime.
const KYMA: &str = "operator.kyma-project.io/kymas/kyma-system/default";
/// Concurrent writes to KCP.
const CONCURRENT_WRITES: usize = 16;
const PAUSE: Duration = Duration::from_millis(100);

/// Counters over all agents of a fleet.
#[derive(Debug, Default)]
pub struct FleetCounters {
    requests: AtomicU64,
    events: AtomicU64,
    heartbeats: AtomicU64,
    enrolments: AtomicU64,
    failures: AtomicU64,
    refused: Mutex<BTreeMap<u16, u64>>,
    /// Times until requests with events were accepted, if they are recorded.
    times: Mutex<Option<Vec<Duration>>>,
}

impl FleetCounters {
    pub(super) fn accepted(&self, events: usize, after: Duration) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.events.fetch_add(events as u64, Ordering::Relaxed);
        self.times.lock().iter_mut().for_each(|times| times.push(after));
    }

    /// Records the times until requests with events are accepted from now on.
    pub fn record_times(&self) {
        *self.times.lock() = Some(Vec::new());
    }

    /// Ends the record, and returns it.
    #[must_use]
    pub fn take_times(&self) -> Vec<Duration> {
        self.times.lock().take().unwrap_or_default()
    }

    pub(super) fn heartbeat_accepted(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.heartbeats.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn enrolled(&self) {
        self.enrolments.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn failed(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn refused(&self, status: StatusCode) {
        *self.refused.lock().entry(status.as_u16()).or_default() += 1;
    }

    /// Requests that were accepted, heartbeats included.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Events in requests that were accepted.
    pub fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// Heartbeats that were accepted.
    pub fn heartbeats(&self) -> u64 {
        self.heartbeats.load(Ordering::Relaxed)
    }

    /// Certificates that were issued by a token.
    pub fn enrolments(&self) -> u64 {
        self.enrolments.load(Ordering::Relaxed)
    }

    /// Requests that had no answer.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Requests that were refused, by status.
    pub fn refusals(&self) -> BTreeMap<u16, u64> {
        self.refused.lock().clone()
    }
}

/// One runtime of a fleet, with its simulated agent.
pub struct FleetMember {
    name: String,
    id: RuntimeId,
    cluster: FakeCluster,
    handle: AgentHandle,
    agent: Option<Agent>,
    is_paused: bool,
}

impl FleetMember {
    /// Name of its Kyma in KCP, and of the fake cluster.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runtime id.
    pub fn id(&self) -> &RuntimeId {
        &self.id
    }

    /// The fake cluster.
    pub fn cluster(&self) -> &FakeCluster {
        &self.cluster
    }

    /// Shared access to its agent.
    pub fn handle(&self) -> &AgentHandle {
        &self.handle
    }

    /// The agent, to be driven by the caller; `None` once it runs.
    pub fn take_agent(&mut self) -> Option<Agent> {
        self.agent.take()
    }

    /// The same runtime for another task, without its agent.
    pub fn without_agent(&self) -> Self {
        let Self { name, id, cluster, handle, agent: _, is_paused } = self;
        let cluster = cluster.clone();
        let handle = handle.clone();
        Self { name: name.clone(), id: id.clone(), cluster, handle, agent: None, is_paused: *is_paused }
    }

    /// Selects these modules as the user of the runtime does, and lets the agent observe the change.
    pub fn select(&self, modules: &[&str]) {
        select(&self.cluster, modules);
        self.handle.update(|state| state.mark("kyma", 0));
    }

    /// Sets the channel of the runtime's Kyma as its user does, and lets the agent observe the change.
    pub fn set_channel(&self, channel: &str) {
        self.cluster.edit(KYMA, |kyma| kyma["spec"]["channel"] = channel.into());
        self.handle.update(|state| state.mark("kyma", 0));
    }

    /// Channel in the status of the runtime's Kyma, which the reconcile of a changed channel writes; `None` before the first.
    pub fn active_channel(&self) -> Option<String> {
        self.cluster.object(KYMA)?["status"]["activeChannel"].as_str().map(str::to_owned)
    }

    /// Modules in the status of the runtime's Kyma; `None` when there is no status.
    pub fn status_modules(&self) -> Option<Vec<String>> {
        let kyma = self.cluster.object(KYMA)?;
        let status = kyma.get("status").filter(|status| status["state"].is_string())?;
        let modules = status["modules"].as_array().into_iter().flatten();
        Some(modules.filter_map(|module| module["name"].as_str().map(str::to_owned)).collect())
    }
}

/// See the module. Dropping it ends its agents; its objects stay in KCP.
pub struct SimulatedFleet {
    landscape: Arc<Landscape>,
    fake: FakeApiServer,
    plan: Plan,
    counters: Arc<FleetCounters>,
    members: Vec<FleetMember>,
    /// Number of the next runtime that is registered.
    next: usize,
    running: JoinSet<()>,
}

impl SimulatedFleet {
    /// An empty fleet, whose API servers have the distance of the landscape.
    ///
    /// # Errors
    /// When the fake API server cannot be started.
    pub async fn new(landscape: Arc<Landscape>) -> Result<Self> {
        let (plan, ..) = watcher::plan::<Arc<Watcher>>(Vec::new(), &[]);
        let distance = landscape.distance();
        let fake = if distance.is_zero() {
            FakeApiServer::start().await?
        } else {
            let fake = FakeApiServer::start_behind_proxy().await?;
            fake.proxy().context("a proxy")?.set_round_trip(distance);
            fake
        };
        let counters = Arc::default();
        Ok(Self { landscape, fake, plan, counters, members: Vec::new(), next: 0, running: JoinSet::new() })
    }

    /// Registers runtimes up to this number: Kyma and access Secret in KCP, a fake cluster, an agent that does not run
    /// yet.
    ///
    /// # Errors
    /// When KCP refuses a write, or a certificate cannot be made.
    pub async fn grow(&mut self, to: usize) -> Result<()> {
        self.register(to, false).await
    }

    /// As [`SimulatedFleet::grow`], with paused runtimes: their agents are served like all others, and the receiver
    /// changes nothing in the runtimes.
    ///
    /// # Errors
    /// As [`SimulatedFleet::grow`].
    pub async fn grow_paused(&mut self, to: usize) -> Result<()> {
        self.register(to, true).await
    }

    async fn register(&mut self, to: usize, is_paused: bool) -> Result<()> {
        let client = self.landscape.kcp().client().await?;
        let namespace = self.landscape.namespace();
        let kymas = Api::<Kyma>::namespaced(client.clone(), namespace);
        let secrets = Api::<Secret>::namespaced(client, namespace);
        let roots = self.landscape.ca().trust_bundle().store()?;
        let mut written = Vec::new();
        for _ in self.members.len()..to {
            let number = self.next;
            self.next += 1;
            let name = format!("fleet-{number:05}");
            let id: RuntimeId = format!("{namespace}.{name}").parse()?;
            let ca = self.landscape.ca();
            let identity =
                ca.make_runtime(&id, self.landscape.trust_domain(), now(), tidewatch_trust::RUNTIME_VALIDITY)?;
            let signed_client =
                SignedClient::new(&identity.identity()?, roots.clone(), self.landscape.agents_authority().parse()?)?;
            let state = ProtocolState::new(id.clone(), &self.plan, number as u64);
            let agent = Agent::new(signed_client, state, self.counters.clone());
            let cluster = self.fake.cluster(&name);
            let kyma = kyma(&name, &id, is_paused);
            written.push(write(&kymas, &secrets, name.clone(), kyma, self.fake.kubeconfig(&name)));
            self.members.push(FleetMember { name, id, cluster, handle: agent.handle(), agent: Some(agent), is_paused });
        }
        stream::iter(written)
            .buffer_unordered(CONCURRENT_WRITES)
            .try_collect::<()>()
            .await
            .context("register the runtimes in KCP")
    }

    /// Deletes the Kymas of the oldest runtimes, waits until the receiver has let go of each, and deletes their access
    /// Secrets. Their agents must not run any more.
    ///
    /// # Errors
    /// When KCP refuses a write, or the deadline passes.
    pub async fn unregister(&mut self, count: usize, deadline: Duration) -> Result<()> {
        let client = self.landscape.kcp().client().await?;
        let namespace = self.landscape.namespace();
        let kymas = Api::<Kyma>::namespaced(client.clone(), namespace);
        let secrets = Api::<Secret>::namespaced(client, namespace);
        let gone: Vec<_> = self.members.drain(..count.min(self.members.len())).collect();
        for member in &gone {
            kymas.delete(&member.name, &DeleteParams::default()).await?;
        }
        for member in &gone {
            until_within("a deleted Kyma to be gone", deadline, async || {
                Ok(kymas.get_metadata_opt(&member.name).await?.is_none().then_some(()))
            })
            .await?;
            secrets.delete(&format!("kubeconfig-{}", member.name), &DeleteParams::default()).await?;
        }
        Ok(())
    }

    /// Takes the agents that do not run yet, each with its runtime and a user who selects and deselects this module.
    pub fn take_changing(
        &mut self,
        endpoint: &EnrolmentEndpoint,
        module: &str,
        pause: Duration,
        counters: &Arc<ChurnCounters>,
    ) -> Vec<ChangingRuntime> {
        let numbers = 0..self.members.len();
        let taken = numbers.filter_map(|number| {
            let enrolment = self.enrolment_client(number, endpoint, false);
            let agent = self.members[number].take_agent()?;
            let member = self.members[number].without_agent();
            let module = module.to_owned();
            let counters = counters.clone();
            Some(ChangingRuntime { member, agent, enrolment, module, pause, counters })
        });
        taken.collect()
    }

    /// Runs all agents that do not run yet.
    pub fn start(&mut self) {
        for agent in self.members.iter_mut().filter_map(FleetMember::take_agent) {
            self.running.spawn(agent.run());
        }
    }

    /// As [`SimulatedFleet::start`]; the agents connect to these addresses in turns.
    pub fn start_at(&mut self, addresses: &[SocketAddr]) {
        let agents = self.members.iter_mut().filter_map(|member| member.agent.as_mut());
        agents.zip(addresses.iter().cycle()).for_each(|(agent, address)| agent.connect_to(*address));
        self.start();
    }

    /// Lets all agents that do not run yet enrol, with the backoff of hours of failures, and then run with the issued
    /// identity. Their registered identity is of no use with a receiver that issues certificates.
    pub fn enrol(&mut self, endpoint: &EnrolmentEndpoint) {
        for number in 0..self.members.len() {
            let enrolment_client = self.enrolment_client(number, endpoint, true);
            let Some(mut agent) = self.members[number].take_agent() else { continue };
            self.running.spawn(async move {
                match enrolment_client.enrol().await.and_then(|enrolled| agent.set_identity(enrolled)) {
                    Ok(()) => agent.run().await,
                    Err(error) => progress::print_line(&format!("a simulated agent failed: {error:#}")),
                }
            });
        }
    }

    /// Lets all agents that do not run yet enrol at once, and waits for their certificates. They do not run afterwards either.
    ///
    /// # Errors
    /// As [`EnrolmentClient::enrol`], for any agent.
    pub async fn certify(&mut self, endpoint: &EnrolmentEndpoint) -> Result<()> {
        let clients = (0..self.members.len()).map(|number| self.enrolment_client(number, endpoint, false));
        let clients: Vec<_> = clients.collect();
        let enrolled = clients.iter().zip(&mut self.members).filter_map(|(client, member)| {
            let agent = member.agent.as_mut()?;
            Some(async move { agent.set_identity(client.enrol().await?) })
        });
        stream::iter(enrolled).buffer_unordered(CONCURRENT_WRITES).try_collect::<()>().await.context("enrol the agents")
    }

    /// Lets all agents enrol once more, all at the same time; they keep running with their previous identity.
    pub fn enrol_again(&mut self, endpoint: &EnrolmentEndpoint) {
        for number in 0..self.members.len() {
            let enrolment_client = self.enrolment_client(number, endpoint, false);
            self.running.spawn(async move {
                if let Err(error) = enrolment_client.enrol().await {
                    progress::print_line(&format!("the enrolment of a simulated agent failed: {error:#}"));
                }
            });
        }
    }

    pub(super) fn enrolment_client(
        &self,
        number: usize,
        endpoint: &EnrolmentEndpoint,
        is_backed_off: bool,
    ) -> EnrolmentClient {
        let FleetMember { id, cluster, handle, .. } = &self.members[number];
        EnrolmentClient {
            runtime: id.clone(),
            cluster: cluster.clone(),
            handle: handle.clone(),
            counters: self.counters.clone(),
            endpoint: endpoint.clone(),
            is_backed_off,
        }
    }

    /// The runtimes, in the order of their registration.
    pub fn members(&self) -> &[FleetMember] {
        &self.members
    }

    /// See [`SimulatedFleet::members`].
    pub fn members_mut(&mut self) -> &mut [FleetMember] {
        &mut self.members
    }

    /// Address of the receiver's event port.
    ///
    /// # Errors
    /// When the landscape has no usable one.
    pub fn receiver(&self) -> Result<SocketAddr> {
        Ok(self.landscape.authority().parse()?)
    }

    /// The API server of all its runtimes.
    pub fn fake(&self) -> &FakeApiServer {
        &self.fake
    }

    /// The plan of all its agents.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Counters over its agents.
    pub fn counters(&self) -> &Arc<FleetCounters> {
        &self.counters
    }

    /// Events that are not settled, over all agents and by their own state.
    pub fn unsettled(&self) -> usize {
        self.members.iter().map(|member| member.handle.read(ProtocolState::unsettled)).sum()
    }

    /// Runtimes that are not paused.
    fn active(&self) -> impl Iterator<Item = &FleetMember> {
        self.members.iter().filter(|member| !member.is_paused)
    }

    /// Waits until every runtime that is not paused is served, all its events are settled, and the receiver's queue is
    /// empty.
    ///
    /// # Errors
    /// When the deadline passes; the text states the progress.
    pub async fn at_rest(&self, deadline: Duration) -> Result<()> {
        until_within("all events to be settled and the queue to be empty", deadline, async || {
            let of = self.active().count();
            let unsettled: usize = self.active().map(|member| member.handle.read(ProtocolState::unsettled)).sum();
            let queue = self.queue().await?;
            let refusals = self.counters.refusals();
            if unsettled > 0 || queue > 0.0 {
                bail!("{of} agents, {unsettled} events unsettled, {queue} Kymas in the queue, refusals {refusals:?}");
            }
            let served = self.active().filter(|member| member.status_modules().is_some()).count();
            if served < of {
                bail!("{served} of {of} runtimes are served");
            }
            Ok(Some(()))
        })
        .await
    }

    /// Waits until the receiver has written the status of every runtime, whether its agent runs or not.
    ///
    /// # Errors
    /// When the deadline passes; the text states the progress.
    pub async fn served(&self, deadline: Duration) -> Result<()> {
        until_within("every runtime to have a status", deadline, async || {
            let served = self.members.iter().filter(|member| member.status_modules().is_some()).count();
            ensure!(served == self.members.len(), "{served} of {} runtimes are served", self.members.len());
            Ok(Some(()))
        })
        .await
    }

    /// Kymas that are in progress or ready in the receiver's queue.
    ///
    /// # Errors
    /// When its metrics cannot be read.
    pub async fn queue(&self) -> Result<f64> {
        let (_, page) = self.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        Ok(queue(&page))
    }
}

/// Kymas that are in progress or ready, from a receiver's metrics page.
pub fn queue(page: &str) -> f64 {
    metric_sum(page, "tidewatch_queue_kymas", |labels| !labels.contains("\"waiting\""))
}

/// Polls until the result is `Some`, as [`crate::landscape::until`], with the caller's deadline.
///
/// # Errors
/// When the deadline passes; the text names the condition and the last error.
pub async fn until_within<T>(
    condition: &str,
    deadline: Duration,
    mut poll: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let started = Instant::now();
    loop {
        let result = poll().await;
        if let Ok(Some(result)) = result {
            return Ok(result);
        }
        if started.elapsed() > deadline {
            match result {
                Err(error) => {
                    return Err(error.context(format!("timed out after {deadline:?} waiting for {condition}")));
                }
                Ok(_) => bail!("timed out after {deadline:?} waiting for {condition}"),
            }
        }
        sleep(PAUSE).await;
    }
}

/// Selects these modules in the runtime's Kyma.
pub(super) fn select(cluster: &FakeCluster, modules: &[&str]) {
    let modules: Vec<_> = modules.iter().map(|name| json!({"name": name})).collect();
    cluster.edit(KYMA, |kyma| kyma["spec"]["modules"] = modules.into());
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
