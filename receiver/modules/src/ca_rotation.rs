//! Carries a rotation of the built-in CA out. A task of each replica announces the current roots to the runtimes of its shards, and
//! observes which of them follow. The one with the fleet role asks all replicas, decides by `decide`, and writes the next phase into the
//! CA's Secret. The phase takes effect when the watch returns the Secret, here as in every other replica; none follows it before each
//! replica with shards has observed it.

mod decide;
mod followers;

use std::{mem, sync::Arc, time::Duration};

use decide::Transition;
use followers::{FollowerSummary, Question};
use kube::Client;
use tidewatch_contract::admin::rotation::{RotationProgress, RotationRequest, RotationResponse, SecretState};
use tidewatch_fleet::{
    evidence::Replicas,
    peers::{AskError, Topic},
    queue::{Priority, WorkSet},
    table::{RuntimeTable, TrustAnnouncement},
};
use tidewatch_kit::error_levels;
use tidewatch_trust::{
    Flags, Metrics, PendingRotation, RotationError, RotationHandle, Stragglers, TlsState, Trust,
    ca_state::{CaState, Root},
    rotation_handle,
    store::{CaSecret, CaSecretError, Store},
    stragglers::{self, StragglerTracker},
    tls_state::CaSecretStatus,
};
use tokio::{
    sync::{mpsc, watch},
    time::{self, Instant, MissedTickBehavior, error::Elapsed, timeout},
};
use tokio_util::sync::CancellationToken;

/// Interval between two reconciles.
const RECONCILE_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after a failed write.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// Timeout of one write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay before a deleted Secret is created anew, because an operator may be about to restore it.
const RECREATE_DELAY: Duration = Duration::from_secs(3);
/// Runtimes of the fleet per second that are enqueued to receive a new trust bundle.
const BUNDLES_PER_SECOND: u32 = 50;
/// Outcome of a write that changed the Secret.
const WRITTEN: &str = "written";

/// The rotation task of a replica.
pub struct CaRotation {
    tls_state: TlsState,
    store: Store,
    fleet: RuntimeTable,
    replicas: Replicas,
    flags: Flags,
    requests: mpsc::Receiver<PendingRotation>,
    /// Changes of the trust after the announced one.
    trust: watch::Receiver<Arc<Trust>>,
    progress: watch::Sender<Option<Arc<RotationProgress>>>,
    stragglers: watch::Sender<Option<Arc<Stragglers>>>,
    tracker: StragglerTracker,
    metrics: Metrics,
    /// resourceVersion that the last write replaced: nothing is written until the watch returns another one.
    written_over: Option<String>,
    lost_since: Option<Instant>,
    not_before: Instant,
}

impl CaRotation {
    /// Creates the task, announces the current trust to the runtime table, and answers the questions of other replicas from now on. The
    /// client must be behind the write fence: only the replica with the fleet role advances a rotation.
    pub fn new(
        tls_state: TlsState,
        client: Client,
        namespace: &str,
        flags: &Flags,
        fleet: RuntimeTable,
        replicas: Replicas,
        metrics: Metrics,
    ) -> (Self, RotationHandle) {
        let (request_sender, requests) = mpsc::channel(4);
        let (progress, progress_receiver) = watch::channel(None);
        let (stragglers, straggler_receiver) = watch::channel(None);
        let mut trust = tls_state.trust();
        let announced = trust.borrow_and_update().clone();
        let rotation = Self {
            trust,
            store: Store::new(client, flags.ca_namespace(namespace)),
            flags: flags.clone(),
            requests,
            progress,
            stragglers,
            tracker: StragglerTracker::default(),
            metrics,
            written_over: None,
            lost_since: None,
            not_before: Instant::now(),
            tls_state,
            fleet,
            replicas,
        };
        rotation.announce_trust(&announced);
        let handle =
            RotationHandle { requests: request_sender, progress: progress_receiver, stragglers: straggler_receiver };
        followers::respond(&rotation.replicas, &rotation.tls_state, rotation.fleet.clone(), rotation.flags.clone());
        (rotation, handle)
    }

    /// Runs for ever, once the caches of KCP are synced: before, the runtimes to wait for are unknown.
    pub async fn run(mut self, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        let mut trust = self.trust.clone();
        let mut ticks = time::interval(RECONCILE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut enqueue_all = false;
        let mut held = Vec::new();
        loop {
            // The holder before may have been killed after a phase was stored, before it had enqueued every runtime.
            let before = mem::replace(&mut held, self.fleet.held());
            let has_acquired = held.iter().any(|shard| !before.contains(shard));
            if mem::take(&mut enqueue_all) || has_acquired && self.is_rotating() {
                self.fleet.enqueue_all(WorkSet::INSTALLER, Priority::Catalog, BUNDLES_PER_SECOND);
            }
            tokio::select! {
                changed = trust.changed() => {
                    if changed.is_err() {
                        return "trust";
                    }
                    let now = trust.borrow_and_update().clone();
                    self.announce_trust(&now);
                    enqueue_all = true;
                }
                Some((request, response)) = self.requests.recv() => {
                    let role = self.replicas.role.clone();
                    let responded = role.run(self.request(request)).await.unwrap_or(Err(RotationError::Timeout));
                    // The requester may have given up.
                    let _ = response.send(responded);
                }
                _ = ticks.tick() => self.reconcile().await,
            }
        }
    }

    fn is_rotating(&self) -> bool {
        matches!(&*self.tls_state.secret_status().borrow(), CaSecretStatus::Good(secret) if secret.state.is_rotating())
    }

    fn announce_trust(&self, trust: &Trust) {
        self.fleet.announce_trust(TrustAnnouncement {
            revision: trust.agents.revision().to_owned(),
            issuer: trust.issuer.clone(),
            renewals_per_second: self.flags.renewals_per_second.get(),
        });
    }

    async fn reconcile(&mut self) {
        let status = self.tls_state.secret_status().borrow().clone();
        match &status {
            CaSecretStatus::Unused => {
                self.tracker = StragglerTracker::default();
                self.publish_stragglers(Stragglers::default());
            }
            CaSecretStatus::Good(secret) => {
                self.lost_since = None;
                self.track(&secret.state);
            }
            CaSecretStatus::Lost | CaSecretStatus::Refused => {}
        }
        let role = self.replicas.role.clone();
        let decided = role.run(async {
            match &status {
                CaSecretStatus::Unused => {}
                CaSecretStatus::Good(secret) => self.carry_on(secret).await,
                CaSecretStatus::Lost => self.replace_lost().await,
                CaSecretStatus::Refused => self.publish_secret_state(SecretState::Refused),
            }
        });
        if decided.await.is_none() {
            // The replica with the role knows it.
            self.progress.send_if_modified(|progress| progress.take().is_some());
            self.lost_since = None;
        }
    }

    /// Decides on the next transition, from the answers of all replicas, and stores it.
    async fn carry_on(&mut self, secret: &CaSecret) {
        // The watch returns the next state soon; other replicas may have observed it.
        if self.is_write_pending(secret) {
            return;
        }
        let followers = self.followers(secret).await.inspect_err(|error| {
            tracing::debug!(
                error = error_levels::own(error),
                "The rotation of the CA waits for the answers of all replicas"
            );
            self.metrics.incomplete();
        });
        self.publish_progress(&secret.state, followers.as_ref().ok());
        if Instant::now() >= self.not_before {
            let waiting_for = followers.ok().map(|followers| followers.waiting_for);
            let transition = self.next_transition(&secret.state, waiting_for, false);
            // A failure is logged, and the next reconcile tries again.
            let _ = self.advance(secret, transition, None).await;
        }
    }

    /// Summary of the runtimes of the fleet. A steady CA waits for no runtime, and needs no answers.
    async fn followers(&self, secret: &CaSecret) -> Result<FollowerSummary, AskError> {
        if !secret.state.is_rotating() {
            return Ok(FollowerSummary { runtimes: self.fleet.runtimes_of_fleet(), ..FollowerSummary::default() });
        }
        let question = Question::new(secret, self.tls_state.trust().borrow().agents.revision());
        let answers = self.replicas.ask(Topic::CaRotation, &question).await?;
        FollowerSummary::merged(answers).ok_or(AskError::Unavailable)
    }

    /// Observes which runtimes of this replica's shards the phase waits for.
    fn track(&mut self, state: &CaState) {
        let revision = self.tls_state.trust().borrow().agents.revision().to_owned();
        let followers = if state.is_rotating() { self.fleet.runtime_reports() } else { Vec::new() };
        let count = followers.len();
        let behind = followers::behind(state, &self.flags, &revision, followers);
        self.metrics.rotation(state.name(), behind.len());
        let per_second = self.fleet.share_of_rate(self.flags.renewals_per_second.get().min(BUNDLES_PER_SECOND));
        let overdue_after = stragglers::overdue_after(self.fleet.heartbeat_interval().get(), count, per_second);
        let behind = behind.into_iter().map(|(follower, reason)| (follower.kyma, reason));
        let tracked = self.tracker.update(behind, overdue_after, Instant::now());
        self.publish_stragglers(tracked);
    }

    /// True until the watch returns the Secret that was written over this one.
    fn is_write_pending(&self, secret: &CaSecret) -> bool {
        self.written_over.as_deref() == Some(secret.version())
    }

    fn next_transition(&self, state: &CaState, waiting_for: Option<usize>, requested: bool) -> Transition {
        decide::next_transition(state, self.flags.ca_rotation_age, waiting_for, requested, unix())
    }

    /// Stores the next phase before any of it takes effect.
    async fn advance(
        &mut self,
        secret: &CaSecret,
        transition: Transition,
        request: Option<RotationRequest>,
    ) -> Result<Option<CaState>, RotationError> {
        let now = unix();
        let flags = &self.flags;
        let force_after = request.and_then(|request| request.force_after_seconds);
        let generate = || Root::generate(flags.ca_validity, now);
        let leaf_validity = flags.certificate_validity;
        let next = decide::apply_transition(&secret.state, transition, leaf_validity, force_after, now, generate);
        let Some(state) = next.map_err(|error| self.record_failure(&error))? else { return Ok(None) };
        self.write(secret, &state).await?;
        tracing::info!(phase = %state.name(), target = %state.target().id, "The rotation of the CA goes on");
        Ok(Some(state))
    }

    async fn write(&mut self, secret: &CaSecret, state: &CaState) -> Result<(), RotationError> {
        let replaced = timeout(WRITE_TIMEOUT, self.store.replace(secret, state)).await;
        let outcome = self.record_write(replaced)?;
        self.written_over = Some(secret.version().to_owned());
        if outcome == WRITTEN { Ok(()) } else { Err(RotationError::Write) }
    }

    /// Counts a write, and returns its outcome: [`WRITTEN`] or a conflict.
    fn record_write(
        &mut self,
        written: Result<Result<Option<CaSecret>, CaSecretError>, Elapsed>,
    ) -> Result<&'static str, RotationError> {
        let outcome = match written {
            Ok(Ok(Some(_))) => WRITTEN,
            Ok(Ok(None)) => "conflict",
            Ok(Err(error)) => return Err(self.record_failure(&error)),
            Err(elapsed) => return Err(self.record_failure(&elapsed)),
        };
        self.metrics.wrote(outcome);
        Ok(outcome)
    }

    fn record_failure(&mut self, error: &(dyn std::error::Error + 'static)) -> RotationError {
        self.metrics.wrote("failed");
        self.not_before = Instant::now() + RETRY_DELAY;
        tracing::warn!(
            error = error_levels::own(error),
            cause = error_levels::cause(error),
            "The rotation of the CA could not be carried on; it is tried again"
        );
        RotationError::Write
    }

    /// Stores a new CA after [`RECREATE_DELAY`]. No replica can renew certificates of the lost CA, so all runtimes enrol again.
    async fn replace_lost(&mut self) {
        self.publish_secret_state(SecretState::Lost);
        let now = Instant::now();
        let since = *self.lost_since.get_or_insert(now);
        if now < since + RECREATE_DELAY || now < self.not_before {
            return;
        }
        let unix = unix();
        let root = Root::generate(self.flags.ca_validity, unix).map_err(|error| self.record_failure(&error));
        let Ok(root) = root else { return };
        let state = CaState::steady(root, unix);
        let created = timeout(WRITE_TIMEOUT, self.store.fill(&state)).await;
        if let Ok(outcome) = self.record_write(created) {
            self.lost_since = None;
            tracing::warn!(outcome, target = %state.target().id, "The CA was lost; a new one takes its place");
        }
    }

    async fn request(&mut self, request: RotationRequest) -> Result<RotationResponse, RotationError> {
        let deadline = Instant::now() + rotation_handle::REQUEST_TIMEOUT;
        let mut status = self.tls_state.secret_status();
        loop {
            let secret = match status.borrow_and_update().clone() {
                CaSecretStatus::Unused => return Err(RotationError::NoCa),
                CaSecretStatus::Lost | CaSecretStatus::Refused => return Err(RotationError::Secret),
                CaSecretStatus::Good(secret) => secret,
            };
            if self.is_write_pending(&secret) {
                if !matches!(time::timeout_at(deadline, status.changed()).await, Ok(Ok(()))) {
                    return Err(RotationError::Timeout);
                }
                continue;
            }
            if secret.state.is_rotating() && !request.compromised {
                return self.join(&secret, request).await;
            }
            let transition = match request.compromised {
                true => Transition::Replace,
                false => self.next_transition(&secret.state, None, true),
            };
            let state = self.advance(&secret, transition, Some(request)).await?.ok_or(RotationError::Write)?;
            return Ok(RotationResponse { target: state.target().id.clone() });
        }
    }

    /// Joins the rotation that is under way, and stores `force_after_seconds` if the request sets another value.
    async fn join(&mut self, secret: &CaSecret, request: RotationRequest) -> Result<RotationResponse, RotationError> {
        let response = RotationResponse { target: secret.state.target().id.clone() };
        if request.force_after_seconds.is_some() && request.force_after_seconds != secret.state.force_after {
            let state = CaState { force_after: request.force_after_seconds, ..secret.state.clone() };
            self.write(secret, &state).await?;
        }
        Ok(response)
    }

    /// Publishes the progress; without `followers`, with the last numbers of the phase.
    fn publish_progress(&self, state: &CaState, followers: Option<&FollowerSummary>) {
        let last =
            self.progress.borrow().clone().filter(|last| (last.phase, last.since) == (state.name(), state.since));
        let (runtimes, waiting_for, stragglers) = match (followers.cloned(), last) {
            (Some(FollowerSummary { runtimes, waiting_for, stragglers }), _) => (runtimes, waiting_for, stragglers),
            (None, Some(last)) => (last.runtimes, last.waiting_for, last.stragglers.clone()),
            (None, None) => {
                // Of none is it known that it has followed.
                let runtimes = self.fleet.runtimes_of_fleet();
                (runtimes, runtimes, Vec::new())
            }
        };
        let target = state.target();
        self.progress.send_replace(Some(Arc::new(RotationProgress {
            phase: state.name(),
            since: state.since,
            target: target.id.clone(),
            target_not_after: target.ca.not_after(),
            force_after_seconds: state.force_after,
            secret: SecretState::Good,
            runtimes,
            waiting_for,
            stragglers,
            incomplete: followers.is_none(),
        })));
    }

    fn publish_stragglers(&self, stragglers: Stragglers) {
        self.stragglers.send_if_modified(|published| {
            let is_changed = published.as_deref() != Some(&stragglers);
            if is_changed {
                *published = Some(Arc::new(stragglers));
            }
            is_changed
        });
    }

    fn publish_secret_state(&self, secret: SecretState) {
        self.progress.send_if_modified(|progress| {
            let Some(known) = progress.as_ref().filter(|known| known.secret != secret) else { return false };
            *progress = Some(Arc::new(RotationProgress { secret, ..RotationProgress::clone(known) }));
            true
        });
    }
}

fn unix() -> i64 {
    jiff::Timestamp::now().as_second()
}

#[cfg(test)]
mod tests;
