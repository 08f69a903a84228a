//! Task that drives the rollouts. The replica with the fleet role assesses the runtimes of the whole fleet, by the caches of KCP,
//! computes the next steps, writes them to the ConfigMap, and grants all replicas which runtimes get a version now. A step takes
//! effect in each replica when the watch returns it, and admits only what is granted. The other replicas assess the runtimes
//! for the conditions of their Kymas, and to continue where the role moves to.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    mem,
    sync::Arc,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use tidewatch_api::{
    facts::KymaFacts,
    key::KymaKey,
    names::{ROLLOUTS, annotation},
    plan::Work,
};
use tidewatch_cluster::state_map::{ReadStateMapError, StateMap};
use tidewatch_fleet::{
    Services,
    peers::Topic,
    queue::{Priority, WorkSet},
    recorder::{PendingEvent, Regarding},
    staged::{StagedTask, Subject},
    stores::{
        kymas::{self, CachedKyma},
        manifests::CachedManifest,
    },
};
use tidewatch_kit::error_levels;
use tidewatch_rollout::Criteria;
use tidewatch_select::{
    catalog::{
        ChannelTarget,
        rollout::{BoardEntry, Rollout, RolloutKey, RolloutPolicy, Rollouts, StoredRollouts},
        visibility::template_name,
    },
    module_rollout::{
        decide,
        members::{self, Block, Member, Observation, Standing, Times},
    },
    windows::WindowState,
};
use tokio::time::Instant;

use super::{
    Metrics,
    grants::{Grants, Question},
    metrics::States,
};
use crate::{catalog::Catalog, windows::MaintenanceWindows};

/// Dependencies of the task.
#[derive(Clone)]
pub struct Dependencies {
    /// Queue of reconciles, caches, and the replicas, which admit Kymas.
    pub services: Services,
    /// Accepted targets, and the shared state of the rollouts.
    pub catalog: Catalog,
    /// Maintenance windows of the runtimes.
    pub windows: MaintenanceWindows,
    /// Metrics of the rollouts.
    pub metrics: Metrics,
}

/// Rollouts of the modules.
pub struct ModuleRollouts {
    namespace: String,
    stored: StoredRollouts,
    dependencies: Dependencies,
    /// Memory of each rollout in progress.
    runs: HashMap<RolloutKey, Run>,
    grants: Grants,
    /// The last evaluation changed a state, or upgrades runtimes.
    is_active: bool,
}

/// Memory of one rollout in progress; a new process begins with an empty one.
#[derive(Debug, Default)]
struct Run {
    change: String,
    times: Times,
    /// Uids of the Kymas that the last step admitted, here or in the replica with the role, and that were enqueued.
    admitted: BTreeSet<String>,
}

impl Run {
    /// Lets the next step enqueue all Kymas that it admits: those reconciled meanwhile did not get the version.
    fn admit_again(&mut self) {
        self.admitted.clear();
    }
}

/// Evaluation of all rollouts at one moment.
#[derive(Default)]
struct Evaluation {
    /// Next states.
    rollouts: Rollouts,
    /// Kymas that get a version now, by rollout.
    admitted: HashMap<RolloutKey, BTreeSet<String>>,
    /// Kymas that failed in halted rollouts, with a message.
    halted: HashMap<KymaKey, String>,
    standings: Vec<Standing>,
    states: States,
}

impl ModuleRollouts {
    /// Reads the stored state, and receives grants from now on. The client must be fenced, so that only the replica with the fleet
    /// role writes.
    ///
    /// # Errors
    /// [`ReadStateMapError`].
    pub async fn open(
        client: Client,
        namespace: &str,
        dependencies: Dependencies,
    ) -> Result<StagedTask<Self>, ReadStateMapError> {
        let mut map = StateMap::new(client, namespace, ROLLOUTS);
        let stored = StoredRollouts::of(map.read().await?.as_ref());
        let grants = Grants::default();
        let received = grants.clone();
        let Services { replicas, recorder, .. } = dependencies.services.clone();
        replicas.respond(Topic::ModuleRollout, move |question| {
            received.receive(question, Instant::now());
            Ok(())
        });
        let namespace = namespace.to_owned();
        let rollouts = Self { namespace, stored, dependencies, runs: HashMap::new(), grants, is_active: false };
        rollouts.publish(&HashMap::new());
        Ok(StagedTask::new(rollouts, map, replicas.role, recorder))
    }

    fn announce(&self, rollout: &Rollout) -> Option<PendingEvent> {
        let Rollout { module, version, change, .. } = rollout;
        let channel = rollout.channel.as_deref().unwrap_or("mandatory");
        let note = match (rollout.halted(), rollout.ring()) {
            (Some(reason), _) => {
                let confirmation = rollout.confirmation().unwrap_or_default();
                tracing::error!(module, channel, version, change, reason, "Module rollout halted");
                format!(
                    "the rollout of {version} in the channel {channel} has halted: {reason}; it continues when the \
                     annotation {} of the ConfigMap {ROLLOUTS} names {confirmation}",
                    annotation::CONFIRM
                )
            }
            (None, Some(ring)) => {
                tracing::info!(module, channel, version, change, ring, "Module rollout progressed");
                format!("the rollout of {version} in the channel {channel} is in ring {ring}")
            }
            (None, None) if rollout.progress.is_none() => {
                tracing::info!(module, channel, version, change, "Module version applies to every runtime");
                format!("every runtime gets {version} of the channel {channel}")
            }
            (None, None) => return None,
        };
        let warning = rollout.halted().is_some();
        let reason = if warning { "ModuleRolloutHalted" } else { "ModuleRollout" };
        let regarding = Regarding::release_meta(&self.namespace, module, "");
        Some(PendingEvent { regarding, warning, reason, note })
    }

    /// Kymas that the last step admitted to the recorded rollouts.
    fn admitted_so_far(&self) -> HashMap<RolloutKey, BTreeSet<String>> {
        let is_recorded = |(key, run): &(&RolloutKey, &Run)| {
            self.stored.rollouts.get(*key).is_some_and(|rollout| rollout.change == run.change)
        };
        let runs = self.runs.iter().filter(is_recorded);
        runs.map(|(key, run)| (key.clone(), run.admitted.clone())).collect()
    }

    /// Enqueues the Kymas that a version reaches without rings: after a move back, or because the rings were removed.
    fn enqueue_lacking(&self, key: &RolloutKey, rollout: &Rollout) {
        let keys = self.lacking(key, &rollout.version).map(|kyma| kyma.key()).collect();
        let rate = self.dependencies.catalog.flags().catalog_sync_rate;
        self.dependencies.services.fleet.enqueue_paced(keys, WorkSet::of(&[Work::Kyma]), rate);
    }

    /// Kymas that follow a channel, or the mandatory version, and do not have this version.
    fn lacking(&self, key: &RolloutKey, version: &str) -> impl Iterator<Item = Arc<CachedKyma>> {
        let lacks = move |manifest: &CachedManifest| manifest.facts().version != Some(version);
        self.followers(key).filter(move |(_, manifest)| lacks(manifest)).map(|(kyma, _)| kyma)
    }

    /// Admits the Kymas that the replica with the role grants a version.
    fn admit_granted(&mut self, now: Instant) {
        self.grants.retain(|key| self.stored.rollouts.contains_key(key));
        let is_ongoing = |(_, rollout): &(&RolloutKey, &Rollout)| rollout.progress.is_some();
        let mut admitted = HashMap::new();
        for (key, rollout) in self.stored.rollouts.iter().filter(is_ongoing) {
            let run = self.runs.entry(key.clone()).or_default();
            if run.change != rollout.change {
                *run = Run { change: rollout.change.clone(), ..Run::default() };
            }
            admitted.insert(key.clone(), self.grants.of(key, &rollout.change, now));
        }
        self.publish(&admitted);
        self.enqueue_admitted(admitted);
    }

    /// Grants what the evaluation admits, and stores the next states.
    async fn carry_on(&mut self, evaluation: Evaluation, map: &mut StateMap, now: Instant) {
        let Evaluation { rollouts, admitted, standings, states, .. } = evaluation;
        self.dependencies.metrics.set(states, &standings);
        let is_upgrading =
            admitted.values().any(|admitted| !admitted.is_empty()) || standings.contains(&Standing::Upgrading);
        self.publish(&admitted);
        let grants = self.grants_of(&admitted);
        self.enqueue_admitted(admitted);
        for grant in grants {
            let granted = self.dependencies.services.replicas.ask::<()>(Topic::ModuleRollout, &grant).await;
            if let Err(error) = granted {
                // A Kyma keeps its place, and is granted the version again with the next tick.
                tracing::debug!(error = error_levels::own(&error), "Not every replica admits runtimes to a rollout");
                self.dependencies.metrics.count_incomplete();
            }
        }
        let is_deleted = !map.exists() && !rollouts.is_empty();
        let is_changed = is_deleted || rollouts != self.stored.rollouts;
        self.is_active = is_upgrading || is_changed;
        if is_changed && map.is_writable(now) {
            map.annotate(annotation::CONFIRM, self.stored.unused_confirmations(&rollouts));
            self.dependencies.metrics.count_write(map.write(self.stored.data(&rollouts)).await);
        }
    }

    /// Grants for these Kymas of recorded rollouts; also of none, if the last step admitted some.
    fn grants_of(&self, admitted: &HashMap<RolloutKey, BTreeSet<String>>) -> Vec<Question> {
        let round = Timestamp::now().as_microsecond();
        let questions = admitted.iter().filter_map(|(key, admitted)| {
            let rollout = self.stored.rollouts.get(key)?;
            let before = self.runs.get(key).map(|run| &run.admitted);
            let is_needed = !admitted.is_empty() || before.is_some_and(|before| !before.is_empty());
            is_needed.then(|| Question::of(key, &rollout.change, round, admitted))
        });
        questions.flatten().collect()
    }

    /// Evaluates the rollouts of all modules that have rings.
    fn evaluate_all(&mut self, now: Instant) -> Evaluation {
        let mut evaluation = Evaluation::default();
        let targets = self.dependencies.catalog.ring_targets();
        evaluation.states.invalid = self.stored.invalid.len();
        for (key, target, policy) in targets {
            let recorded = self.stored.rollouts.get(&key).cloned();
            let policy = match policy {
                Ok(policy) if target.since.is_some() && !self.stored.is_invalid(&key) => policy,
                Ok(_) => continue,
                Err(error) => {
                    tracing::debug!(module = key.module, %error, "Module rollout waits for valid annotations");
                    evaluation.states.invalid += 1;
                    // The state stays as it is, and no further runtime gets the version.
                    self.runs.get_mut(&key).into_iter().for_each(Run::admit_again);
                    evaluation.rollouts.extend(recorded.map(|recorded| (key, recorded)));
                    continue;
                }
            };
            let rollout = match recorded {
                Some(recorded) if recorded.is_of(&target) => recorded,
                recorded => self.moved(&key, recorded.as_ref(), &target),
            };
            let next = self.advance(&key, rollout, &target, &policy, now, &mut evaluation);
            evaluation.rollouts.insert(key, next);
        }
        self.runs.retain(|key, _| evaluation.rollouts.get(key).is_some_and(|rollout| rollout.progress.is_some()));
        evaluation
    }

    /// Rollout of a moved source. Without a record of an earlier one, a version that some Kymas lack reaches them in rings,
    /// even if the channel moved long ago: the record may be lost.
    fn moved(&self, key: &RolloutKey, recorded: Option<&Rollout>, target: &ChannelTarget) -> Rollout {
        let is_lacking = self.lacking(key, &target.version).next().is_some();
        Rollout::of_move(key, recorded, target, !is_lacking)
    }

    /// Evaluates one rollout, and returns its next state.
    fn advance(
        &mut self,
        key: &RolloutKey,
        rollout: Rollout,
        target: &ChannelTarget,
        policy: &RolloutPolicy,
        now: Instant,
        evaluation: &mut Evaluation,
    ) -> Rollout {
        if rollout.progress.is_none() {
            return rollout;
        }
        let mut run = self.runs.remove(key).unwrap_or_default();
        if run.change != rollout.change {
            run = Run { change: rollout.change.clone(), ..Run::default() };
        }
        let members = self.members(key, &rollout, policy, &mut run, now);
        let confirmation = rollout.confirmation();
        let is_confirmed = confirmation.is_some_and(|id| self.stored.confirmed.contains(&id));
        let criteria = Criteria { rules: &policy.rules, is_confirmed, now: Timestamp::now().as_second() };
        let step = decide::step(&rollout, &members, &run.admitted, criteria);
        evaluation.standings.extend(members.iter().map(|member| member.standing));
        let states = &mut evaluation.states;
        *match (rollout.halted(), &step.waits_for) {
            (Some(_), _) => &mut states.halted,
            (None, Some(_)) => &mut states.waiting,
            (None, None) => &mut states.progressing,
        } += 1;
        if let Some(reason) = rollout.halted() {
            let failing = members.iter().filter(|member| member.standing == Standing::Failing);
            let message = format!("the rollout of {} of module {} has halted: {reason}", target.version, key.module);
            evaluation.halted.extend(failing.map(|member| (member.kyma.clone(), message.clone())));
        }
        self.runs.insert(key.clone(), run);
        evaluation.admitted.insert(key.clone(), step.admitted);
        step.next.unwrap_or(rollout)
    }

    /// Kymas with a Manifest that follows a channel, or of a mandatory module.
    fn followers(&self, key: &RolloutKey) -> impl Iterator<Item = (Arc<CachedKyma>, Arc<CachedManifest>)> {
        let manifests = self.dependencies.services.stores.manifests.of_module(&key.module);
        manifests.into_iter().filter_map(move |manifest| {
            let kyma = kymas::find(&self.dependencies.services.stores.kymas, &manifest.kyma()?)?;
            let is_member = members::follows(&manifest.facts(), &*kyma, key);
            (is_member && !kyma.facts().is_deleting()).then_some((kyma, manifest))
        })
    }

    /// Assesses the runtimes of a rollout.
    fn members(
        &self,
        key: &RolloutKey,
        rollout: &Rollout,
        policy: &RolloutPolicy,
        run: &mut Run,
        now: Instant,
    ) -> Vec<Member> {
        let catalog = self.dependencies.catalog.snapshot(&self.dependencies.services.stores);
        let template = catalog.template(&template_name(&key.module, &rollout.version));
        let awaits_window = key.channel.is_some() && template.is_some_and(|template| template.spec.requires_downtime());
        let assess = |(kyma, manifest): (Arc<CachedKyma>, Arc<CachedManifest>)| {
            let kyma_key = kyma.key();
            let kyma = kyma.facts();
            let uid = Some(kyma.uid()).filter(|uid| !uid.is_empty())?.to_owned();
            let block = self.block(&kyma_key, kyma, awaits_window);
            let observation =
                Observation::of(&manifest.facts(), rollout, block, self.dependencies.services.takeover.selector());
            let is_admitted = run.admitted.contains(&uid);
            let standing =
                run.times.assess(&kyma_key, &rollout.change, is_admitted, &observation, policy.rules.deadline, now);
            let rank = members::rank(&key.module, &rollout.version, &uid, policy.is_first(kyma.labels()));
            Some(Member { kyma: kyma_key, uid, rank, standing })
        };
        let members: Vec<_> = self.followers(key).filter_map(assess).collect();
        let known: HashSet<_> = members.iter().map(|member| &member.kyma).collect();
        run.times.retain(|key| known.contains(key));
        members
    }

    /// Reason for which nothing can be upgraded in a runtime.
    fn block(&self, key: &KymaKey, kyma: KymaFacts<'_>, awaits_window: bool) -> Option<Block> {
        let Dependencies { windows, services: Services { pause, takeover, fleet, .. }, .. } = &self.dependencies;
        // The replica that holds the shard ends a takeover.
        let is_pending = takeover.is_pending(key) && !fleet.is_elsewhere(key);
        let is_stopped = !takeover.reconciles(kyma, pause) || is_pending;
        let is_closed = || windows.state(kyma, Timestamp::now()) != WindowState::Open;
        members::block(kyma, is_stopped, || awaits_window && is_closed())
    }

    /// Publishes the recorded rollouts with the Kymas that get the version now.
    fn publish(&self, admitted: &HashMap<RolloutKey, BTreeSet<String>>) {
        let entry = |(key, rollout): (&RolloutKey, &Rollout)| {
            let admitted = admitted.get(key).filter(|_| rollout.halted().is_none());
            let admitted = admitted.into_iter().flatten().cloned().collect::<HashSet<_>>();
            (key.clone(), BoardEntry { rollout: rollout.clone(), admitted: Arc::new(admitted) })
        };
        let entries: BTreeMap<_, _> = self.stored.rollouts.iter().map(entry).collect();
        self.dependencies.catalog.rollouts().publish(entries);
    }

    /// Enqueues newly admitted Kymas, once each; the queue retries failed reconciles.
    fn enqueue_admitted(&mut self, admitted: HashMap<RolloutKey, BTreeSet<String>>) {
        for (key, admitted) in admitted {
            let Some(run) = self.runs.get_mut(&key) else { continue };
            let new: HashSet<_> = admitted.difference(&run.admitted).cloned().collect();
            run.admitted = admitted;
            if new.is_empty() {
                continue;
            }
            for (kyma, _) in self.followers(&key) {
                if new.contains(kyma.facts().uid()) {
                    self.dependencies.services.fleet.enqueue(
                        &kyma.key(),
                        WorkSet::of(&[Work::Kyma]),
                        Priority::Catalog,
                    );
                }
            }
        }
    }
}

impl Subject for ModuleRollouts {
    const WATCH: &'static str = "watch of the module rollouts";

    fn observe(&mut self, map: Option<&ConfigMap>) -> Vec<PendingEvent> {
        let mut stored = StoredRollouts::of(map);
        for key in stored.invalid.keys().filter(|key| !self.stored.invalid.contains_key(*key)) {
            tracing::error!(
                key,
                "The state of a rollout in the ConfigMap {ROLLOUTS} is invalid, its modules keep their versions until it \
                 is corrected or deleted"
            );
        }
        if map.is_none() {
            // A deleted ConfigMap is created again.
            stored.rollouts = self.stored.rollouts.clone();
        }
        let before = mem::replace(&mut self.stored, stored).rollouts;
        // Before any reconcile that the change enqueues.
        self.publish(&self.admitted_so_far());
        let mut events = Vec::new();
        for (key, rollout) in &self.stored.rollouts {
            if before.get(key) != Some(rollout) {
                events.extend(self.announce(rollout));
                if rollout.progress.is_none() && !rollout.reverts.is_empty() {
                    self.enqueue_lacking(key, rollout);
                }
            }
        }
        let ended = before.iter().filter(|(key, _)| !self.stored.rollouts.contains_key(*key));
        ended.filter(|(_, rollout)| rollout.progress.is_some()).for_each(|(key, it)| self.enqueue_lacking(key, it));
        events
    }

    /// A channel moves, or the replica with the role grants versions to this one.
    async fn changed(&self) {
        tokio::select! {
            () = self.dependencies.catalog.rollouts().moved() => {}
            // The replica with the role grants them to itself as well.
            () = self.grants.changed(), if !self.dependencies.services.replicas.role.is_held() => {}
        }
    }

    fn rests(&self) -> bool {
        !self.is_active
    }

    async fn evaluate(&mut self, map: &mut StateMap, now: Instant) {
        self.is_active = false;
        // Rules and targets are those of the last snapshot: without one, all rollouts would look removed.
        drop(self.dependencies.catalog.snapshot(&self.dependencies.services.stores));
        if self.dependencies.catalog.lost().is_some() {
            self.runs.values_mut().for_each(Run::admit_again);
            return;
        }
        let role = self.dependencies.services.replicas.role.clone();
        if !role.is_held() {
            self.admit_granted(now);
        }
        let evaluation = self.evaluate_all(now);
        self.dependencies.catalog.rollouts().publish_halts(evaluation.halted.clone());
        if role.run(self.carry_on(evaluation, map, now)).await.is_none() {
            // The replica with the role counts all runtimes.
            self.dependencies.metrics.set(States::default(), &[]);
        }
    }
}

#[cfg(test)]
mod tests;
