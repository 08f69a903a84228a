//! Watches and writes the Leases, opens and closes the fences, and publishes the held shards and the holders.
//!
//! One list and watch serves all Leases of the namespace, without a selector: the decision needs the order of all changes, and
//! an installation may have Leases without labels. Leases of other programs are dropped on arrival.

mod write;

use std::{collections::BTreeMap, mem, sync::Arc};

use aws_lc_rs::digest;
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::BoxStream, stream::FuturesUnordered};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api, Client,
    runtime::watcher::{self, Event, watcher},
};
use tidewatch_api::{
    identity::Instance,
    leases::{self, Unit},
};
use tidewatch_cluster::leader::{LeaseApi, Timings, WriteFence};
use tidewatch_kit::{
    hash::hash,
    log_error,
    metrics::{OutcomeLabel, ReasonLabel},
    random::Random,
    variant::VariantName as _,
};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};
use tokio_util::sync::CancellationToken;

use self::write::{Content, Written};
use super::{
    Metrics, Settings,
    changes::{HeldShard, HeldShards, ShardChanges, Stopped},
    holders::{Holder, Holders, HoldersHandle},
    ownership::{self, Effect, Outcome, Ownership, Refusal, Step, Write},
    record::{LeaseId, Record, annotation, leases_by_name},
};

type LeaseEvent = Result<Event<Lease>, watcher::Error>;

/// The task of one replica that owns shards.
pub struct ShardElector {
    leases: Api<Lease>,
    api: LeaseApi,
    by_name: BTreeMap<String, LeaseId>,
    content: Arc<Content>,
    timings: Timings,
    ownership: Ownership,
    random: Random,
    instance: Instance,
    /// Number of acquisitions of this process.
    acquisitions: u64,
    /// The Leases as the watch last delivered them, and those of a list while it is not complete.
    watched: BTreeMap<LeaseId, Lease>,
    listing: Option<BTreeMap<LeaseId, Lease>>,
    /// The Leases as this replica last wrote them.
    written: BTreeMap<LeaseId, Lease>,
    held: watch::Sender<HeldShards>,
    stopped: Arc<Stopped>,
    holders: HoldersHandle,
    metrics: Metrics,
    refusal: Option<Refusal>,
    /// True if the last write or watch failed, so that a series of failures is logged once.
    failing: bool,
}

/// The task, and its output.
pub struct ShardOwnership {
    /// The task, which is not running yet.
    pub elector: ShardElector,
    /// Changes of the held shards.
    pub changes: ShardChanges,
}

impl ShardElector {
    /// Makes no call yet. The client must not be behind a write fence, and nothing else should use it; `instance` is this
    /// process's own. The holders of all units are published in `holders`.
    pub fn start(
        client: Client,
        settings: Settings,
        instance: Instance,
        holders: HoldersHandle,
        metrics: Metrics,
    ) -> ShardOwnership {
        let timings = Timings::of(settings.lease_duration);
        let identity = format!("{}_{instance}", settings.place.as_ref().unwrap_or(&settings.name));
        let decision = ownership::Settings {
            identity: identity.clone(),
            place: settings.place.clone(),
            shards: settings.shards,
            is_alone: settings.relay_address.is_none(),
            timings,
        };
        let leases: Api<Lease> = Api::namespaced(client, &settings.namespace);
        let seed = seed(instance);
        let (held, state) = watch::channel(HeldShards::new());
        let stopped = Arc::new(Stopped::default());
        metrics.shards.set(i64::from(settings.shards.get()));
        let elector = Self {
            api: LeaseApi::new(leases.clone(), timings.call),
            leases,
            by_name: leases_by_name(settings.shards),
            content: Arc::new(Content { identity, settings }),
            timings,
            ownership: Ownership::new(decision, seed, Instant::now()),
            random: Random::new(seed),
            instance,
            acquisitions: 0,
            watched: BTreeMap::new(),
            listing: None,
            written: BTreeMap::new(),
            held,
            stopped: stopped.clone(),
            holders,
            metrics,
            refusal: None,
            failing: false,
        };
        ShardOwnership { elector, changes: ShardChanges::new(state, stopped) }
    }

    /// Owns shards until `stop`, then hands all of them over and gives the membership back, for at most one duration of
    /// the Lease. All fences are closed when it returns.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut events = self.watch();
        // Start of the watch, its last event, and the time until which a failed one pauses.
        let mut watch_since = Instant::now();
        let mut watch_from = Instant::now();
        let mut last_event = watch_since;
        let mut writes = FuturesUnordered::new();
        // Without an event: renewals, lapses and deadlines are due within this time.
        let mut ticks = interval(self.timings.retry / 2);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last = None;
        loop {
            tokio::select! {
                // Changes first, so that no decision is made on an old record after a pause.
                biased;
                event = next(&mut events, watch_from) => {
                    last_event = Instant::now();
                    if self.observe(event) {
                        watch_from = Instant::now() + self.timings.retry + self.random.jitter(self.timings.retry);
                    }
                }
                Some(written) = writes.next() => self.finished(written),
                () = self.stopped.wait() => self.acknowledge(),
                () = stop.cancelled(), if last.is_none() => {
                    last = Some(Instant::now() + self.timings.lease);
                    self.ownership.leave(Instant::now());
                }
                _ = ticks.tick() => {}
            }
            self.decide(&mut writes);
            let now = Instant::now();
            if self.ownership.has_left() || last.is_some_and(|last| now >= last) {
                break;
            }
            // A watch stands still that delivers no own renewal, or nothing at all.
            let undelivered = self.ownership.undelivered().map(|since| since.max(watch_since) + self.timings.renew);
            // A list is short, and a replica without one sees no Lease lapse.
            let silence = if self.listing.is_some() { self.timings.renew } else { self.timings.lease };
            if undelivered.is_some_and(|due| now > due) || now > last_event.max(watch_from) + silence {
                tracing::warn!("The watch of the Leases stands still, listing them anew");
                (events, watch_since, watch_from) = (self.watch(), now, now);
            }
        }
        self.end_all();
    }

    fn watch(&mut self) -> BoxStream<'static, LeaseEvent> {
        self.listing = Some(BTreeMap::new());
        watcher(self.leases.clone(), watcher::Config::default()).boxed()
    }

    /// Takes an event of the watch. Returns true if it is a failure.
    fn observe(&mut self, event: Option<LeaseEvent>) -> bool {
        let now = Instant::now();
        match event {
            Some(Ok(Event::Init)) => self.listing = Some(BTreeMap::new()),
            Some(Ok(Event::InitApply(lease))) => {
                if let Some(id) = self.id(&lease) {
                    self.listing.get_or_insert_default().insert(id, lean(lease));
                }
            }
            Some(Ok(Event::InitDone)) => {
                self.watched = self.listing.take().unwrap_or_default();
                let records = self.watched.iter().map(|(id, lease)| (*id, Record::of(lease))).collect();
                self.ownership.observe_all(records, now);
                self.publish_holders();
            }
            Some(Ok(Event::Apply(lease))) => {
                let Some(id) = self.id(&lease) else { return false };
                self.ownership.observe(id, Some(Record::of(&lease)), now);
                self.watched.insert(id, lean(lease));
                self.publish_holders();
            }
            Some(Ok(Event::Delete(lease))) => {
                let Some(id) = self.id(&lease) else { return false };
                self.ownership.observe(id, None, now);
                self.watched.remove(&id);
                self.publish_holders();
            }
            Some(Err(error)) => {
                self.record_failure(&error);
                return true;
            }
            // The stream never ends.
            None => return true,
        }
        false
    }

    /// Which of our Leases it is; `None` for those of others.
    fn id(&self, lease: &Lease) -> Option<LeaseId> {
        self.by_name.get(lease.metadata.name.as_deref()?).copied()
    }

    fn finished(&mut self, written: Written) {
        let Written { id, outcome, lease, error } = written;
        let label = match &outcome {
            Outcome::Written(_) => "written",
            Outcome::Conflict | Outcome::Taken => "conflict",
            Outcome::Failed => "failed",
        };
        self.metrics.writes.get_or_create(&OutcomeLabel { outcome: label }).inc();
        match error {
            Some(error) => self.record_failure(&error),
            None => self.failing = false,
        }
        if let Some(lease) = lease {
            self.written.insert(id, lean(lease));
        }
        self.ownership.finished(id, outcome, Instant::now());
    }

    fn acknowledge(&mut self) {
        for (unit, instance) in self.stopped.take() {
            if self.held.borrow().get(&unit).is_some_and(|held| held.instance == instance) {
                self.ownership.stopped(unit);
            }
        }
    }

    fn decide(&mut self, writes: &mut FuturesUnordered<BoxFuture<'static, Written>>) {
        let step = self.ownership.step(Instant::now());
        self.apply(&step);
        for write in step.writes {
            writes.push(self.request(write));
        }
        self.metrics.wanted.set(i64::try_from(step.wanted).unwrap_or(i64::MAX));
        if self.refusal != step.refusal {
            if let Some(before) = self.refusal {
                self.metrics.refused.get_or_create(&ReasonLabel { reason: before.as_str() }).set(0);
            }
            if let Some(refusal) = step.refusal {
                self.metrics.refused.get_or_create(&ReasonLabel { reason: refusal.as_str() }).set(1);
                tracing::info!(reason = refusal.as_str(), "This replica claims no shard");
            }
            self.refusal = step.refusal;
        }
    }

    /// Opens, extends and closes the fences, and publishes the shards.
    fn apply(&mut self, step: &Step) {
        let until = step.until.map(Instant::into_std);
        let mut held = (!step.effects.is_empty()).then(|| self.held.borrow().clone());
        for effect in &step.effects {
            let Some(held) = &mut held else { continue };
            match effect {
                Effect::Acquired(unit) => {
                    let fence = WriteFence::closed();
                    let instance = self.new_instance();
                    if let Some(until) = until {
                        fence.extend(until);
                    }
                    tracing::info!(unit = %unit, %instance, "Acquired");
                    self.metrics.acquired.inc();
                    held.insert(*unit, HeldShard { instance, fence, hand_over: false });
                }
                Effect::HandOver(unit) => {
                    tracing::info!(unit = %unit, "Handing over");
                    held.entry(*unit).and_modify(|held| held.hand_over = true);
                }
                Effect::Ended(unit, reason) => {
                    if let Some(held) = held.remove(unit) {
                        held.fence.close();
                    }
                    tracing::info!(unit = %unit, reason = reason.as_str(), "No longer held");
                    self.metrics.ended.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
                }
            }
        }
        if let Some(held) = held {
            self.publish_held(held);
        }
        let Some(until) = until else { return };
        // A fence that has ended meanwhile stays closed; the next step ends its shard.
        for (unit, held) in &*self.held.borrow() {
            if !held.fence.extend(until) {
                self.ownership.expired(*unit, Instant::now());
            }
        }
    }

    fn end_all(&mut self) {
        self.publish_held(HeldShards::new()).into_values().for_each(|held| held.fence.close());
    }

    /// Publishes the held shards. Returns those before.
    fn publish_held(&self, held: HeldShards) -> HeldShards {
        let has_role = held.contains_key(&Unit::Fleet);
        self.metrics.held.set(i64::try_from(held.len() - usize::from(has_role)).unwrap_or(i64::MAX));
        self.metrics.fleet_role.set(i64::from(has_role));
        self.held.send_replace(held)
    }

    fn request(&self, write: Write) -> BoxFuture<'static, Written> {
        let is_base = |lease: &&Lease| lease.metadata.resource_version == write.version;
        let known = [&self.watched, &self.written].into_iter().filter_map(|leases| leases.get(&write.id));
        let base = known.into_iter().find(is_base).cloned();
        let api = self.api.clone();
        let content = self.content.clone();
        async move {
            if write.version.is_some() && base.is_none() {
                // The record is gone that led to the decision.
                return Written { id: write.id, outcome: Outcome::Conflict, lease: None, error: None };
            }
            content.send(&api, &write, base).await
        }
        .boxed()
    }

    /// A new instance: as unpredictable as that of the process, and different at each acquisition.
    fn new_instance(&mut self) -> Instance {
        self.acquisitions += 1;
        let text = format!("{}/{}", self.instance, self.acquisitions);
        let hash = digest::digest(&digest::SHA256, text.as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_ref()[..8]);
        Instance::new(u64::from_be_bytes(first))
    }

    fn publish_holders(&self) {
        let mut members = BTreeMap::new();
        for number in 0..leases::MAX_REPLICAS {
            let id = LeaseId::Member(number);
            let Some((record, renewed)) = self.ownership.record(id) else { continue };
            let (Some(identity), Some(lease)) = (record.holder(), self.watched.get(&id)) else { continue };
            let name = annotation(lease, leases::REPLICA).unwrap_or_else(|| identity.to_owned());
            let holder = Holder {
                name: name.into(),
                relay_address: annotation(lease, leases::RELAY_ADDRESS).map(Into::into),
                is_own: identity == self.content.identity,
                renewed,
                moved: None,
            };
            members.insert(identity, holder);
        }
        self.holders.publish(Holders::new(self.content.settings.shards, |unit| {
            let id = LeaseId::Unit(unit);
            let holder = members.get(self.ownership.record(id)?.0.holder()?)?;
            let moved = self.watched.get(&id)?.spec.as_ref()?.acquire_time.as_ref().map(|time| time.0);
            Some(Holder { moved, ..holder.clone() })
        }));
    }

    fn record_failure(&mut self, error: &impl std::error::Error) {
        if !mem::replace(&mut self.failing, true) {
            log_error!(warn, error, "The Leases of the shards could not be read or written");
        }
    }
}

/// Next event of the watch, not before a time.
async fn next(events: &mut BoxStream<'static, LeaseEvent>, from: Instant) -> Option<LeaseEvent> {
    sleep_until(from).await;
    events.next().await
}

/// Leaves the fields out that nothing reads and no write needs.
fn lean(mut lease: Lease) -> Lease {
    lease.metadata.managed_fields = None;
    lease
}

fn seed(instance: Instance) -> u64 {
    hash(&instance.to_string())
}

#[cfg(test)]
mod tests;
