//! What follows from whether a path is proven: the condition that says so, polls of those that are not,
//! slow verification of those that are.
//!
//! `hub` judges the paths; here one loop acts on it, about once a second. `verdict` says what a condition shall say, `rounds` who is
//! looked at when, `damper` how often one Kyma may be written: all pure. `write` writes. `pause` says whose runtime is left alone,
//! `restart` who goes first when this process begins.

mod damper;
mod metrics;
mod restart;
mod rounds;
mod verdict;
mod write;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use clap::Args;
use futures::{StreamExt as _, stream};
use kube::{Client, runtime::reflector::ObjectRef};
use tidewatch_shared::api::{Condition, Kyma};
use tokio::time::{self, Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

pub use metrics::Metrics;

use self::{
    damper::Damper,
    rounds::{Rounds, Tokens},
};
use crate::{
    base::limits::CONNECTION_LOST_AFTER,
    base::{
        key::KymaKey,
        pause::Pause,
        stores::{CurrentPlan, Stores},
        takeover::{self, Takeover},
    },
    controllers::{catalog::Catalog, kyma::REFUSED_AGAIN},
    fleet::{
        PathState, Unproven,
        hub::Hub,
        queue::{Priority, Works},
    },
    pki::Rotations,
};

/// How often paths are looked at.
const TICK: Duration = Duration::from_secs(1);
/// An agent that is well comes back sooner after its connection ended.
const LOST_AFTER: Duration = Duration::from_secs(5);
/// Whoever says nothing any more, and not even that, is missed within this time.
const MISSED_WITHIN: Duration = Duration::from_secs(30);
const _: () =
    assert!(CONNECTION_LOST_AFTER.as_secs() + LOST_AFTER.as_secs() + TICK.as_secs() < MISSED_WITHIN.as_secs());
/// Conditions that are written in one second, of all Kymas.
const WRITES_PER_SECOND: u32 = 20;
/// The condition that tells whether an agent is installed.
const INSTALLED: &str = "SKRWebhook";
/// Conditions that are written at the same time.
const WRITERS: usize = 8;

/// How proven and unproven paths are treated.
#[derive(Clone, Debug, Args)]
pub struct Flags {
    /// How often a runtime is polled whose event path is not proven, in seconds, on average.
    #[arg(long, env = "TIDEWATCH_FALLBACK_POLL_SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub fallback_poll_seconds: u32,

    /// Polls and verifications in one second, of all runtimes.
    #[arg(long, env = "TIDEWATCH_FALLBACK_POLLS_PER_SECOND", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub fallback_polls_per_second: u32,

    /// How often a runtime is verified whose event path is proven, in seconds, on average: no watch shows a right that was revoked.
    #[arg(long, env = "TIDEWATCH_VERIFICATION_SECONDS", default_value_t = 21_600, value_parser = clap::value_parser!(u32).range(1..=2_592_000))]
    pub verification_seconds: u32,

    /// After a start, the runtimes of which nothing changed are verified within this time, in seconds.
    #[arg(long, env = "TIDEWATCH_RESTART_SPREAD_SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    pub restart_spread_seconds: u32,

    /// A runtime that says nothing for so long, in seconds, and cannot be reached either, is called away: no alarm, no polls.
    #[arg(long, env = "TIDEWATCH_AWAY_SECONDS", default_value_t = 7_200, value_parser = clap::value_parser!(u32).range(1..=2_592_000))]
    pub away_seconds: u32,

    /// Heartbeats in one second, of all runtimes: with more runtimes the interval that they are told grows, up to an hour.
    #[arg(long, env = "TIDEWATCH_MAX_HEARTBEATS_PER_SECOND", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_heartbeats_per_second: u32,
}

/// What the loop needs.
pub struct Paths {
    /// See [`Flags`].
    pub flags: Flags,
    /// Client of KCP.
    pub client: Client,
    /// Caches of KCP.
    pub stores: Stores,
    /// Judges the paths, and takes the polls.
    pub hub: Hub,
    /// What each runtime shall have: an input of its passes.
    pub catalog: Catalog,
    /// The plan of all runtimes: another input.
    pub plan: CurrentPlan,
    /// Whose runtimes are left alone.
    pub pause: Pause,
    /// Whose Kymas are ours, and since when.
    pub takeover: Takeover,
    /// Knows whom a rotation of the CA waits for.
    pub rotations: Rotations,
    /// Whether agents are installed, and so mended when nothing is heard of them.
    pub installs: bool,
    /// Counts what is done.
    pub metrics: Metrics,
}

impl Paths {
    /// Waits until the caches are whole, says who goes first, and then runs for ever.
    pub async fn run(self, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        let Self { stores, catalog, hub, .. } = &self;
        let spread = Duration::from_secs(self.flags.restart_spread_seconds.into());
        restart::order(&restart::Order { spread, stores, plan: &self.plan.load_full(), catalog, hub });
        let mut known = Known::new(&self.flags, Instant::now());
        let mut tick = time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let now = tick.tick().await;
            for (key, path) in self.hub.moved_paths() {
                self.metrics.moved(&path);
                tracing::info!(kyma = %key, path = path.as_str(), "Event path moved");
                known.rounds.moved(&key, &path, now);
                self.moved(&mut known, &key, &path);
                known.paths.insert(key, path);
            }
            let kymas = self.stores.kymas.state();
            known.forget_who_is_gone(&kymas);
            if self.installs {
                known.broken.extend(self.hub.lost(LOST_AFTER));
            }
            // Without an installer too, since whoever prepared the agent by hand gets its Lease from here.
            known.broken.extend(self.hub.incomplete(REFUSED_AGAIN));
            self.mend(&mut known, now);
            self.poll(&mut known, now);
            self.tell(&mut known, &kymas, now).await;
        }
    }

    /// A path that is lost may be the agent's, and that one cannot say so itself; one that is proven may be what an installation waited for.
    fn moved(&self, known: &mut Known, key: &KymaKey, path: &PathState) {
        if !self.installs {
            return;
        }
        match path {
            PathState::Unproven(flaw) if !matches!(flaw, Unproven::Away | Unproven::LegacyAgent) => {
                known.broken.insert(key.clone());
            }
            PathState::Proven => {
                let kyma = self.stores.kymas.get(&ObjectRef::new(&key.name).within(&key.namespace));
                let is_told = |kyma: Arc<Kyma>| verdict::shown(&kyma, INSTALLED).is_some_and(Condition::is_true);
                if !kyma.is_some_and(is_told) {
                    self.hub.want(key, Works::INSTALLER, Priority::Catalog);
                }
            }
            PathState::Unknown | PathState::Unproven(_) => {}
        }
    }

    /// Whether something may be wanted of a Kyma that nobody asked for.
    fn may_work_on(&self, key: &KymaKey, kyma: &Kyma) -> bool {
        self.pause.of(kyma).is_none() && !self.is_others(key, kyma)
    }

    /// Whether a Kyma comes from somebody else or goes there, and so is told nothing.
    fn is_others(&self, key: &KymaKey, kyma: &Kyma) -> bool {
        takeover::is_asked_back(kyma) || takeover::is_handed_back(kyma) || self.takeover.awaits(key)
    }

    /// Wants the installations compared of those that went silent or miss something, within the rate of all polls.
    fn mend(&self, known: &mut Known, now: Instant) {
        let most = known.polls.take(known.broken.len(), now);
        for _ in 0..most {
            let Some(key) = known.broken.pop_first() else { break };
            let kyma = self.stores.kymas.get(&ObjectRef::new(&key.name).within(&key.namespace));
            if kyma.is_some_and(|kyma| self.may_work_on(&key, &kyma)) {
                tracing::info!(kyma = %key, "The agent is not heard of, or misses something of its own: its installation is looked at");
                self.metrics.mended();
                self.hub.repair(&key);
            }
        }
    }

    /// Wants those whose turn has come verified. Whoever is paused has his turn and nothing happens: what was paused waits for its
    /// end anyway.
    fn poll(&self, known: &mut Known, now: Instant) {
        let most = known.polls.take(usize::MAX, now);
        let due = known.rounds.due(now, most);
        known.polls.give_back(most - due.len());
        for (key, kind) in due {
            let kyma = self.stores.kymas.get(&ObjectRef::new(&key.name).within(&key.namespace));
            if kyma.is_some_and(|kyma| self.may_work_on(&key, &kyma)) {
                self.metrics.polled(kind);
                self.hub.verify(&key);
            }
        }
    }

    /// Writes the conditions that say something else than they shall.
    async fn tell(&self, known: &mut Known, kymas: &[Arc<Kyma>], now: Instant) {
        let laggards = self.rotations.laggards();
        let mut wrong = Vec::new();
        for kyma in kymas {
            let Some((name, namespace)) = kyma.metadata.name.as_ref().zip(kyma.metadata.namespace.as_ref()) else {
                continue;
            };
            let key = KymaKey::new(namespace, name);
            if self.is_others(&key, kyma) {
                continue;
            }
            let said = verdict::event_path(known.paths.get(&key), || self.hub.has_spoken_v3(&key), kyma)
                .into_iter()
                .chain(verdict::paused(self.pause.of(kyma), kyma))
                .chain(verdict::rotation(laggards.as_ref().map(|laggards| laggards.of(&key)), kyma));
            wrong.extend(said.map(|said| (key.clone(), kyma.clone(), said)));
        }
        self.metrics.waiting(wrong.len());
        known.damper.choose(&mut wrong, now);
        // Cut off, it comes again with the next tick.
        wrong.truncate(known.writes.take(wrong.len(), now));
        let writes = wrong.into_iter().map(async |(key, kyma, said)| {
            let result = write::condition(&self.client, &kyma, &said).await;
            (key, said, result)
        });
        let mut written = stream::iter(writes).buffer_unordered(WRITERS);
        while let Some((key, said, result)) = written.next().await {
            self.metrics.written(&result);
            if matches!(result, Err(write::Write::Moved)) {
                // The cache shows it by the next tick, and then it may be said, or may not.
                continue;
            }
            if let Err(error) = result {
                tracing::warn!(kyma = %key, condition = said.kind(), error = &error as &dyn std::error::Error, "Condition could not be written");
            }
            known.damper.wrote(key, &said, now);
        }
    }
}

/// What the loop remembers; bounded by the number of Kymas.
struct Known {
    paths: HashMap<KymaKey, PathState>,
    /// Whose agent may be broken.
    broken: BTreeSet<KymaKey>,
    rounds: Rounds,
    polls: Tokens,
    damper: Damper,
    writes: Tokens,
}

impl Known {
    fn new(flags: &Flags, now: Instant) -> Self {
        let seconds = |seconds: u32| Duration::from_secs(seconds.into());
        Self {
            paths: HashMap::new(),
            broken: BTreeSet::new(),
            rounds: Rounds::new(seconds(flags.fallback_poll_seconds), seconds(flags.verification_seconds)),
            polls: Tokens::new(flags.fallback_polls_per_second, now),
            damper: Damper::default(),
            writes: Tokens::new(WRITES_PER_SECOND, now),
        }
    }

    fn forget_who_is_gone(&mut self, kymas: &[Arc<Kyma>]) {
        if self.paths.len() <= kymas.len() && self.damper.len() <= 2 * kymas.len() {
            return;
        }
        let present: HashSet<_> = kymas
            .iter()
            .filter_map(|kyma| Some((kyma.metadata.namespace.as_deref()?, kyma.metadata.name.as_deref()?)))
            .collect();
        let is_present = |key: &KymaKey| present.contains(&(key.namespace.as_str(), key.name.as_str()));
        self.paths.retain(|key, _| is_present(key));
        self.broken.retain(is_present);
        self.rounds.retain(is_present);
        self.damper.retain(is_present);
    }
}
