//! Task that drives an upgrade. Each replica assesses the runtimes of its shards, and enqueues those that lack their image. The
//! one with the fleet role asks all replicas for summaries, computes the next step, and writes it to the ConfigMap. A step
//! takes effect in each replica when the watch returns it.

use std::{collections::HashSet, sync::Arc};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use tidewatch_api::key::KymaKey;
use tidewatch_cluster::state_map::{ReadStateMapError, StateMap};
use tidewatch_fleet::{
    Services,
    evidence::Replicas,
    peers::{AskError, Topic},
    queue::{Priority, WorkSet},
    recorder::{PendingEvent, Regarding},
    staged::{StagedTask, Subject},
    table::RuntimeTable,
};
use tidewatch_kit::error_levels;
use tidewatch_rollout::{Criteria, Rules};
use tokio::time::Instant;

use super::{
    CONFIG_MAP, Flags, ImageDecision, Metrics, UpgradeHandle, UpgradeState,
    assessor::{Assessor, Question},
    decide::{self, Step},
    members::{Fleet, Member},
    store::Stored,
    summary::{Counts, Summary},
};

/// Maximum number of runtimes of the fleet enqueued per tick: the restart of an agent causes a reconcile of its runtime.
const MAX_ENQUEUED: u32 = 20;

/// Upgrade of the agents.
pub struct Upgrade {
    rules: Rules,
    image: String,
    namespace: String,
    stored: Stored,
    handle: UpgradeHandle,
    assessor: Assessor,
    fleet: RuntimeTable,
    replicas: Replicas,
    metrics: Metrics,
    /// Runtimes enqueued since the state last changed.
    enqueued: HashSet<KymaKey>,
}

impl Upgrade {
    /// Reads the stored state, and answers questions about the runtimes from now on. The client must be fenced, so that only
    /// the replica with the fleet role writes. Decisions are published in the [`UpgradeHandle`].
    ///
    /// # Errors
    /// [`ReadStateMapError`].
    pub async fn open(
        client: Client,
        namespace: &str,
        image: &str,
        flags: Flags,
        services: Services,
        metrics: Metrics,
    ) -> Result<(StagedTask<Self>, UpgradeHandle), ReadStateMapError> {
        let mut map = StateMap::new(client, namespace, CONFIG_MAP);
        let stored = Stored::of(map.read().await?.as_ref(), image);
        let handle = UpgradeHandle::new(match &stored {
            Stored::Valid { state, .. } => state.clone(),
            Stored::Absent | Stored::Invalid => UpgradeState::unknown(image, Timestamp::now().as_second()),
        });
        let rules = Rules {
            rings: flags.agent_upgrade_stages,
            pause: flags.agent_upgrade_pause,
            deadline: flags.agent_upgrade_deadline,
            max_failures: flags.agent_upgrade_max_failures,
        };
        let Services { fleet, stores, pause, takeover, recorder, replicas } = services;
        let assessor = Assessor {
            fleet: fleet.clone(),
            stores,
            pause,
            takeover,
            handle: handle.clone(),
            deadline: rules.deadline,
            table: Arc::default(),
        };
        assessor.respond(&replicas);
        let role = replicas.role.clone();
        let upgrade = Self {
            rules,
            image: image.to_owned(),
            namespace: namespace.to_owned(),
            stored,
            handle: handle.clone(),
            assessor,
            fleet,
            replicas,
            metrics,
            enqueued: HashSet::new(),
        };
        Ok((StagedTask::new(upgrade, map, role, recorder), handle))
    }

    fn announce(&self, state: &UpgradeState, uid: &str) -> PendingEvent {
        let target = &state.target;
        let stage = state.ring();
        let of = self.rules.rings.count();
        let note = match (state.halted(), state.is_done()) {
            (Some(reason), _) => {
                tracing::error!(%target, stage, reason, "Agent upgrade halted");
                format!("the upgrade to {target} has halted in stage {stage}: {reason}")
            }
            (None, true) => {
                tracing::info!(%target, "Agent image applies to every runtime");
                format!("every runtime gets {target}")
            }
            (None, false) => {
                tracing::info!(%target, stage, of, "Agent upgrade progressed");
                format!("the upgrade to {target} is in stage {stage} of {of}")
            }
        };
        let regarding = Regarding { uid: uid.to_owned(), ..Regarding::config_map(&self.namespace, CONFIG_MAP) };
        let warning = state.halted().is_some();
        let reason = if warning { "AgentUpgradeHalted" } else { "AgentUpgrade" };
        PendingEvent { regarding, warning, reason, note }
    }

    /// Computes the next state, and stores it. A new target needs no evidence, and does not wait for any: runtimes may need
    /// the previous image urgently.
    async fn decide(&self, map: &mut StateMap, current: &UpgradeState, retargeted: UpgradeState, unix: i64) {
        let next = self.step(current, &retargeted, unix).await.unwrap_or_else(|error| {
            tracing::debug!(
                error = error_levels::own(&error),
                "Agent upgrade waits for the assessment of all replicas"
            );
            self.metrics.incomplete.inc();
            None
        });
        let next = next.unwrap_or(retargeted);
        if next != *current || !map.exists() {
            self.metrics.count_write(map.write(next.to_data()).await);
        }
    }

    /// Computes the next step from the summaries of all replicas; `None` if the state does not change. Their order is asked
    /// for only when a ring begins or grows, since it names each runtime.
    async fn step(
        &self,
        current: &UpgradeState,
        retargeted: &UpgradeState,
        unix: i64,
    ) -> Result<Option<UpgradeState>, AskError> {
        if retargeted.is_done() {
            return Ok(None);
        }
        let is_confirmed = self.stored.confirms(&retargeted.target);
        let criteria = Criteria { rules: &self.rules, is_confirmed, now: unix };
        for with_order in [false, true] {
            let question = Question::new(current, retargeted, with_order);
            let summaries = self.replicas.ask(Topic::AgentUpgrade, &question).await?;
            let fleet = Summary::merged(summaries).ok_or(AskError::Incomplete)?;
            match decide::step(retargeted, &fleet, criteria) {
                Step::Wait => return Ok(None),
                Step::Become(next) => return Ok(Some(next)),
                Step::NeedsOrder => {}
            }
        }
        // An answer lacks the order, although it was asked for.
        Err(AskError::Unavailable)
    }

    /// Enqueues, once each, runtimes that do not have their assigned image; the queue retries failed reconciles.
    fn enqueue_outdated(&mut self, state: &UpgradeState, fleet: &Fleet) {
        let lacks = |member: &&Member| match state.image_for_rank(member.rank) {
            ImageDecision::Use(image) => match &member.image {
                Some(has) => *has != image,
                // Images are observed by verifications within minutes after a start; an upgrade does not wait for them.
                None => !state.is_done() && image == state.target,
            },
            ImageDecision::KeepOr(_) => member.image.is_none(),
        };
        let enqueued = &self.enqueued;
        let most = usize::try_from(self.fleet.share_of_rate(MAX_ENQUEUED)).unwrap_or(usize::MAX);
        let next = fleet.members.iter().filter(lacks).filter(|member| !enqueued.contains(&member.kyma)).take(most);
        let next: Vec<_> = next.map(|member| member.kyma.clone()).collect();
        for key in next {
            self.fleet.enqueue(&key, WorkSet::INSTALLER, Priority::Catalog);
            self.enqueued.insert(key);
        }
    }
}

impl Subject for Upgrade {
    const WATCH: &'static str = "watch of the agents' upgrade";

    fn observe(&mut self, map: Option<&ConfigMap>) -> Vec<PendingEvent> {
        self.stored = Stored::of(map, &self.image);
        let Stored::Valid { state, .. } = &self.stored else { return Vec::new() };
        if **self.handle.state.load() == *state {
            return Vec::new();
        }
        let uid = map.and_then(|map| map.metadata.uid.as_deref()).unwrap_or_default();
        let event = self.announce(state, uid);
        self.handle.state.store(Arc::new(state.clone()));
        self.enqueued.clear();
        vec![event]
    }

    /// While no upgrade is in progress, or only a change of the ConfigMap can resume it.
    fn rests(&self) -> bool {
        let state = self.handle.state.load();
        let has_target = || *state.target == *self.image || !self.replicas.role.is_held();
        match &self.stored {
            Stored::Absent => false,
            Stored::Invalid => true,
            Stored::Valid { .. } => has_target() && (state.is_done() || state.halted().is_some()),
        }
    }

    async fn evaluate(&mut self, map: &mut StateMap, now: Instant) {
        let current = self.handle.state.load_full();
        let is_refused = matches!(self.stored, Stored::Invalid);
        self.metrics.set_state(&current, is_refused);
        let unix = Timestamp::now().as_second();
        // Replicas may be configured with different images while they are upgraded themselves: one of them decides.
        let retargeted = match self.replicas.role.is_held() {
            true => current.retarget(&self.image, unix),
            false => UpgradeState::clone(&current),
        };
        let fleet = self.assessor.assess(&current, &retargeted, now);
        self.metrics.set_counts(&Counts::of(&retargeted, &fleet.members), fleet.excluded.len());
        let known: HashSet<_> = fleet.kymas().collect();
        self.enqueued.retain(|key| known.contains(key));
        if current.target == retargeted.target {
            self.enqueue_outdated(&current, &fleet);
        }
        if is_refused || !map.is_writable(now) {
            return;
        }
        let role = self.replicas.role.clone();
        // Without the role there is nothing to decide.
        let _ = role.run(self.decide(map, &current, retargeted, unix)).await;
    }
}

#[cfg(test)]
mod tests;
