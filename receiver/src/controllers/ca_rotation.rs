//! Carries a rotation out: one task of the active receiver looks, decides by `rotation`, and writes the next phase into the Secret.
//! The phase takes effect when the watch of the Secret brings it back, here as in every other replica.

mod decide;

use std::{sync::Arc, time::Duration};

use kube::Client;
use tokio::{
    sync::{mpsc, watch},
    time::{self, Instant, MissedTickBehavior, timeout},
};
use tokio_util::sync::CancellationToken;

use decide::{Next, Terms};

use crate::{
    fleet::{
        hub::{Follower, Hub, Told},
        queue::{Priority, Works},
    },
    pki::{
        Behind, Flags, Laggards, Metrics, NotOrdered, Order, Ordered, PendingOrder, Progress, Rotations, SecretState,
        Standing, Straggler, Trust,
        laggards::{self, Waits},
        progress::NAMED,
        rotations,
        standing::{Held, make_root},
        store::{Kept, Store},
        stored::Stored,
    },
};

/// How often it looks.
const LOOK: Duration = Duration::from_secs(1);
/// After a write that failed.
const RETRY: Duration = Duration::from_secs(5);
/// One write takes no longer.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);
/// A Secret that is gone is made anew after this long: somebody may be about to restore it.
const LOST: Duration = Duration::from_secs(3);
/// Runtimes in one second that are brought a new trust bundle.
const BUNDLES_PER_SECOND: u32 = 50;

/// The task of the active receiver.
pub struct Rotation {
    standing: Standing,
    store: Store,
    hub: Hub,
    leaf: Duration,
    age: Duration,
    ca_validity: Duration,
    renewals_per_second: u32,
    orders: mpsc::Receiver<PendingOrder>,
    progress: watch::Sender<Option<Arc<Progress>>>,
    laggards: watch::Sender<Option<Arc<Laggards>>>,
    waits: Waits,
    metrics: Metrics,
    /// The version over which was written: nothing is written until the watch brings another.
    written: Option<String>,
    lost_since: Option<Instant>,
    not_before: Instant,
}

impl Rotation {
    /// Tells the hub at once what is trusted. The client must be behind the fence: only the active receiver carries a rotation on.
    #[must_use]
    pub fn new(
        standing: Standing,
        client: Client,
        namespace: &str,
        flags: &Flags,
        hub: Hub,
        metrics: Metrics,
    ) -> (Self, Rotations) {
        let (orders, taken) = mpsc::channel(4);
        let (progress, shown) = watch::channel(None);
        let (laggards, told) = watch::channel(None);
        let rotation = Self {
            store: Store::new(client, namespace),
            leaf: flags.runtime_validity(),
            age: flags.ca_rotation(),
            ca_validity: flags.ca_validity(),
            renewals_per_second: flags.renewals_per_second.get(),
            orders: taken,
            progress,
            laggards,
            waits: Waits::default(),
            metrics,
            written: None,
            lost_since: None,
            not_before: Instant::now(),
            standing,
            hub,
        };
        rotation.tell(&rotation.standing.trust().borrow());
        (rotation, Rotations { orders, progress: shown, laggards: told })
    }

    /// Runs for ever, from when the caches of KCP are full: before, nobody knows whom to wait for.
    pub async fn run(mut self, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        let (mut trust, mut look) = (self.standing.trust(), time::interval(LOOK));
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // What a receiver that was killed stored may not have reached everybody.
        let mut spreads = matches!(&*self.standing.held().borrow(), Held::Good(kept) if kept.stored.is_rotating());
        loop {
            if std::mem::take(&mut spreads) {
                self.hub.want_all(Works::INSTALLER, Priority::Catalog, BUNDLES_PER_SECOND);
            }
            tokio::select! {
                changed = trust.changed() => {
                    if changed.is_err() {
                        return "trust";
                    }
                    let now = trust.borrow_and_update().clone();
                    self.tell(&now);
                    spreads = true;
                }
                Some((order, answer)) = self.orders.recv() => {
                    // Whoever asked may have gone.
                    let _ = answer.send(self.order(order).await);
                }
                _ = look.tick() => self.look().await,
            }
        }
    }

    fn tell(&self, trust: &Trust) {
        self.hub.tell_trust(Told {
            revision: trust.agents.revision().to_owned(),
            issuer: trust.issuer.clone(),
            renewals_per_second: self.renewals_per_second,
        });
    }

    async fn look(&mut self) {
        let held = self.standing.held().borrow().clone();
        match &held {
            Held::None => {
                self.waits = Waits::default();
                self.tell_laggards(Laggards::default());
            }
            Held::Good(kept) => {
                self.lost_since = None;
                let followers = self.hub.followers();
                self.show(&kept.stored, SecretState::Good, &followers);
                if self.may_write(kept) {
                    let next = self.step(&kept.stored, &followers, false);
                    // A failure is told and tried again.
                    let _ = self.advance(kept, next, None).await;
                }
            }
            Held::Lost => self.replace_lost().await,
            Held::Refused => self.show_state(SecretState::Refused),
        }
    }

    fn may_write(&self, kept: &Kept) -> bool {
        Instant::now() >= self.not_before && self.written.as_deref() != Some(kept.version())
    }

    fn step(&self, stored: &Stored, followers: &[Follower], ordered: bool) -> Next {
        let trust = self.standing.trust().borrow().clone();
        decide::step(stored, self.terms(trust.agents.revision()), followers, ordered, unix())
    }

    const fn terms<'a>(&self, revision: &'a str) -> Terms<'a> {
        Terms { leaf: self.leaf, age: self.age, revision }
    }

    /// Stores the phase that comes next, before anything of it happens.
    async fn advance(&mut self, kept: &Kept, next: Next, order: Option<Order>) -> Result<Option<Stored>, NotOrdered> {
        let (now, validity) = (unix(), self.ca_validity);
        let force_after = order.and_then(|order| order.force_after_seconds);
        let made = decide::after(&kept.stored, next, self.leaf, force_after, now, || make_root(validity, now));
        let stored = match made {
            Ok(Some(stored)) => stored,
            Ok(None) => return Ok(None),
            Err(error) => {
                self.failed(&error);
                return Err(NotOrdered::Write);
            }
        };
        self.write(kept, &stored).await?;
        tracing::info!(phase = %stored.name(), target = %stored.target().id, "The rotation of the CA goes on");
        Ok(Some(stored))
    }

    async fn write(&mut self, kept: &Kept, stored: &Stored) -> Result<(), NotOrdered> {
        match timeout(WRITE_DEADLINE, self.store.replace(kept, stored)).await {
            Ok(Ok(Some(_))) => {
                self.metrics.wrote("written");
                self.written = Some(kept.version().to_owned());
                Ok(())
            }
            Ok(Ok(None)) => {
                self.metrics.wrote("conflict");
                self.written = Some(kept.version().to_owned());
                Err(NotOrdered::Write)
            }
            Ok(Err(error)) => {
                self.failed(&error);
                Err(NotOrdered::Write)
            }
            Err(late) => {
                self.failed(&late);
                Err(NotOrdered::Write)
            }
        }
    }

    fn failed(&mut self, error: &(dyn std::error::Error + 'static)) {
        self.metrics.wrote("failed");
        self.not_before = Instant::now() + RETRY;
        tracing::warn!(error, "The rotation of the CA could not be carried on; it is tried again");
    }

    /// Nothing that hangs on the CA that is lost can be renewed by another replica, so a new one is made and all enrol again.
    async fn replace_lost(&mut self) {
        self.show_state(SecretState::Lost);
        let since = *self.lost_since.get_or_insert_with(Instant::now);
        let now = Instant::now();
        if now < since + LOST || now < self.not_before {
            return;
        }
        let unix = unix();
        let made = match make_root(self.ca_validity, unix) {
            Ok(root) => Stored::steady(root, unix),
            Err(error) => return self.failed(&error),
        };
        match timeout(WRITE_DEADLINE, self.store.create(&made)).await {
            Ok(Ok(created)) => {
                let outcome = if created.is_some() { "written" } else { "conflict" };
                self.metrics.wrote(outcome);
                self.lost_since = None;
                tracing::warn!(outcome, target = %made.target().id, "The CA was lost; a new one takes its place");
            }
            Ok(Err(error)) => self.failed(&error),
            Err(late) => self.failed(&late),
        }
    }

    async fn order(&mut self, order: Order) -> Result<Ordered, NotOrdered> {
        let until = Instant::now() + rotations::ORDER_DEADLINE;
        let mut held = self.standing.held();
        loop {
            let now = held.borrow_and_update().clone();
            let kept = match now {
                Held::None => return Err(NotOrdered::NoCa),
                Held::Lost | Held::Refused => return Err(NotOrdered::Secret),
                Held::Good(kept) => kept,
            };
            // What was written last has to come back first.
            if self.written.as_deref() == Some(kept.version()) {
                let changed = time::timeout_at(until, held.changed()).await;
                if !matches!(changed, Ok(Ok(()))) {
                    return Err(NotOrdered::Late);
                }
                continue;
            }
            if kept.stored.is_rotating() {
                return self.join(&kept, order).await;
            }
            let next = self.step(&kept.stored, &[], true);
            let stored = self.advance(&kept, next, Some(order)).await?;
            return stored.map(|stored| Ordered { target: stored.target().id.clone() }).ok_or(NotOrdered::Write);
        }
    }

    /// A rotation is under way; it may be told not to wait for ever.
    async fn join(&mut self, kept: &Kept, order: Order) -> Result<Ordered, NotOrdered> {
        let ordered = Ordered { target: kept.stored.target().id.clone() };
        if order.force_after_seconds.is_some() && order.force_after_seconds != kept.stored.force_after {
            let stored = Stored { force_after: order.force_after_seconds, ..kept.stored.clone() };
            self.write(kept, &stored).await?;
        }
        Ok(ordered)
    }

    fn show(&mut self, stored: &Stored, secret: SecretState, followers: &[Follower]) {
        let (now, trust) = (unix(), self.standing.trust().borrow().clone());
        let terms = self.terms(trust.agents.revision());
        let behind = |follower| decide::behind(stored, terms, follower, now).map(|behind| (follower, behind));
        let mut behind: Vec<_> = followers.iter().filter_map(behind).collect();
        behind.sort_unstable_by(|(a, _), (b, _)| a.kyma.cmp(&b.kyma));
        let waiting_for = behind.len();
        self.metrics.rotation(stored.name(), waiting_for);
        let stragglers = behind.iter().take(NAMED).map(|(follower, behind)| straggler(follower, *behind)).collect();
        let per_second = self.renewals_per_second.min(BUNDLES_PER_SECOND);
        let patience = laggards::patience(self.hub.heartbeat_interval().get(), followers.len(), per_second);
        let behind = behind.into_iter().map(|(follower, behind)| (follower.kyma.clone(), behind));
        let laggards = self.waits.look(behind, patience, Instant::now());
        self.tell_laggards(laggards);
        let target = stored.target();
        self.progress.send_replace(Some(Arc::new(Progress {
            phase: stored.name(),
            since: stored.since,
            target: target.id.clone(),
            target_not_after: target.ca.not_after(),
            force_after_seconds: stored.force_after,
            secret,
            runtimes: followers.len(),
            waiting_for,
            stragglers,
        })));
    }

    fn tell_laggards(&self, laggards: Laggards) {
        self.laggards.send_if_modified(|known| {
            let is_news = known.as_deref() != Some(&laggards);
            if is_news {
                *known = Some(Arc::new(laggards));
            }
            is_news
        });
    }

    fn show_state(&self, secret: SecretState) {
        self.progress.send_if_modified(|progress| {
            let Some(known) = progress.as_ref().filter(|known| known.secret != secret) else { return false };
            *progress = Some(Arc::new(Progress { secret, ..Progress::clone(known) }));
            true
        });
    }
}

fn straggler(follower: &Follower, behind: Behind) -> Straggler {
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
