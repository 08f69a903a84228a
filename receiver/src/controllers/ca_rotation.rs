//! Carries a rotation of the built-in CA out: one task of the active receiver reconciles, decides by `decide`, and writes the next
//! phase into the CA's Secret. The phase takes effect when the watch returns the Secret, here as in every other replica.

mod decide;

use std::{sync::Arc, time::Duration};

use kube::Client;
use tidewatch_shared::variant::VariantName as _;
use tokio::{
    sync::{mpsc, watch},
    time::{self, Instant, MissedTickBehavior, error::Elapsed, timeout},
};
use tokio_util::sync::CancellationToken;

use decide::{RotationPolicy, Transition};

use crate::{
    base::error_levels,
    fleet::{
        queue::{Priority, WorkSet},
        table::{RuntimeTable, RuntimeTrust, TrustAnnouncement},
    },
    pki::{
        Flags, Metrics, PendingRotation, RotationError, RotationHandle, RotationProgress, RotationRequest,
        RotationResponse, SecretState, Straggler, StragglerReason, Stragglers, TlsState, Trust,
        ca_state::CaState,
        progress::MAX_NAMED_STRAGGLERS,
        rotation_handle,
        store::{CaSecret, CaSecretError, Store},
        stragglers::{self, StragglerTracker},
        tls_state::{CaSecretStatus, generate_root},
    },
};

/// Interval between two reconciles.
const RECONCILE_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after a failed write.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// Timeout of one write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay before a deleted Secret is created anew, because an operator may be about to restore it.
const RECREATE_DELAY: Duration = Duration::from_secs(3);
/// Runtimes per second that are enqueued to receive a new trust bundle.
const BUNDLES_PER_SECOND: u32 = 50;
/// Outcome of a write that changed the Secret.
const WRITTEN: &str = "written";

/// The rotation task of the active receiver.
pub struct CaRotation {
    tls_state: TlsState,
    store: Store,
    fleet: RuntimeTable,
    flags: Flags,
    requests: mpsc::Receiver<PendingRotation>,
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
    /// Creates the task and announces the current trust to the runtime table. The client must be behind the write fence: only the active
    /// receiver advances a rotation.
    #[must_use]
    pub fn new(
        tls_state: TlsState,
        client: Client,
        namespace: &str,
        flags: &Flags,
        fleet: RuntimeTable,
        metrics: Metrics,
    ) -> (Self, RotationHandle) {
        let (request_sender, requests) = mpsc::channel(4);
        let (progress, progress_receiver) = watch::channel(None);
        let (stragglers, straggler_receiver) = watch::channel(None);
        let rotation = Self {
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
        };
        rotation.announce_trust(&rotation.tls_state.trust().borrow());
        let handle =
            RotationHandle { requests: request_sender, progress: progress_receiver, stragglers: straggler_receiver };
        (rotation, handle)
    }

    /// Runs for ever, once the caches of KCP are synced: before, the runtimes to wait for are unknown.
    pub async fn run(mut self, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        let (mut trust, mut ticks) = (self.tls_state.trust(), time::interval(RECONCILE_INTERVAL));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // A receiver that was killed after it stored a phase may not have enqueued every runtime.
        let mut enqueue_all = matches!(&*self.tls_state.secret_status().borrow(), CaSecretStatus::Good(secret) if secret.state.is_rotating());
        loop {
            if std::mem::take(&mut enqueue_all) {
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
                    // The requester may have given up.
                    let _ = response.send(self.request(request).await);
                }
                _ = ticks.tick() => self.reconcile().await,
            }
        }
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
                // A steady CA waits for no runtime.
                let followers = if secret.state.is_rotating() { self.fleet.runtime_trust() } else { Vec::new() };
                self.publish_progress(&secret.state, SecretState::Good, &followers);
                if Instant::now() >= self.not_before && !self.is_write_pending(secret) {
                    let transition = self.next_transition(&secret.state, &followers, false);
                    // A failure is logged, and the next reconcile tries again.
                    let _ = self.advance(secret, transition, None).await;
                }
            }
            CaSecretStatus::Lost => self.replace_lost().await,
            CaSecretStatus::Refused => self.publish_secret_state(SecretState::Refused),
        }
    }

    /// True until the watch returns the Secret that was written over this one.
    fn is_write_pending(&self, secret: &CaSecret) -> bool {
        self.written_over.as_deref() == Some(secret.version())
    }

    fn next_transition(&self, state: &CaState, followers: &[RuntimeTrust], requested: bool) -> Transition {
        let trust = self.tls_state.trust().borrow().clone();
        decide::next_transition(state, self.policy(trust.agents.revision()), followers, requested, unix())
    }

    const fn policy<'a>(&self, revision: &'a str) -> RotationPolicy<'a> {
        let Flags { certificate_validity: leaf_validity, ca_rotation_age: max_root_age, .. } = self.flags;
        RotationPolicy { leaf_validity, max_root_age, revision }
    }

    /// Stores the next phase before any of it takes effect.
    async fn advance(
        &mut self,
        secret: &CaSecret,
        transition: Transition,
        request: Option<RotationRequest>,
    ) -> Result<Option<CaState>, RotationError> {
        let (now, flags) = (unix(), &self.flags);
        let force_after = request.and_then(|request| request.force_after_seconds);
        let generate = || generate_root(flags.ca_validity, now);
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
        let root = generate_root(self.flags.ca_validity, unix).map_err(|error| self.record_failure(&error));
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
                false => self.next_transition(&secret.state, &[], true),
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

    fn publish_progress(&mut self, state: &CaState, secret: SecretState, followers: &[RuntimeTrust]) {
        let (now, trust) = (unix(), self.tls_state.trust().borrow().clone());
        let policy = self.policy(trust.agents.revision());
        let reason = |follower| decide::straggler_reason(state, policy, follower, now).map(|reason| (follower, reason));
        let mut behind: Vec<_> = followers.iter().filter_map(reason).collect();
        behind.sort_unstable_by(|(a, _), (b, _)| a.kyma.cmp(&b.kyma));
        let waiting_for = behind.len();
        self.metrics.rotation(state.name(), waiting_for);
        let stragglers = behind.iter().take(MAX_NAMED_STRAGGLERS);
        let stragglers = stragglers.map(|(follower, reason)| straggler(follower, *reason)).collect();
        let per_second = self.flags.renewals_per_second.get().min(BUNDLES_PER_SECOND);
        let overdue_after =
            stragglers::overdue_after(self.fleet.heartbeat_interval().get(), followers.len(), per_second);
        let behind = behind.into_iter().map(|(follower, reason)| (follower.kyma.clone(), reason));
        let tracked = self.tracker.update(behind, overdue_after, Instant::now());
        self.publish_stragglers(tracked);
        let target = state.target();
        self.progress.send_replace(Some(Arc::new(RotationProgress {
            phase: state.name(),
            since: state.since,
            target: target.id.clone(),
            target_not_after: target.ca.not_after(),
            force_after_seconds: state.force_after,
            secret,
            runtimes: self.fleet.runtimes(),
            waiting_for,
            stragglers,
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

fn straggler(follower: &RuntimeTrust, behind: StragglerReason) -> Straggler {
    Straggler {
        kyma: follower.kyma.to_string(),
        runtime_id: follower.runtime.as_str().to_owned(),
        path: follower.path.as_str().to_owned(),
        behind,
    }
}

fn unix() -> i64 {
    jiff::Timestamp::now().as_second()
}

#[cfg(test)]
mod tests;
