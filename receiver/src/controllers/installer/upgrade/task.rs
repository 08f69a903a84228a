//! Carries an upgrade on: one task of the active receiver looks, decides by `decide`, and writes what comes next into the ConfigMap. It
//! takes effect when the watch of the ConfigMap brings it back.

use std::{
    collections::{BTreeSet, HashSet},
    time::Duration,
};

use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Client,
    runtime::{WatchStreamExt as _, reflector::ObjectRef, watcher},
};
use tidewatch_shared::{api::Kyma, names::label};
use tokio::time::{self, Instant, MissedTickBehavior, timeout};
use tokio_util::sync::CancellationToken;

use super::{
    CONFIG_MAP, Course, Decided, Flags, Keep, Metrics, Rollout,
    decide::{self, Count, Fleet, Terms},
    store::{Held, Store},
    table::{Look, Table},
};
use crate::{
    base::{
        key::KymaKey,
        labels::is_true,
        pause::Pause,
        stores::Stores,
        takeover::{self, Takeover},
    },
    fleet::{
        PathState, Unproven,
        hub::{Hub, Stand},
        queue::{Priority, Works},
    },
    kube::record::Record,
};

/// How often it looks while agents are being upgraded.
const LOOK: Duration = Duration::from_secs(1);
/// So many looks are left out when nothing is under way.
const IDLE: u32 = 10;
/// Runtimes in one look whose agents are to become others: each restart of an agent is a pass over its runtime.
const AT_ONCE: usize = 20;
/// After a write that failed.
const RETRY: Duration = Duration::from_secs(5);
/// One call of KCP takes no longer.
const DEADLINE: Duration = Duration::from_secs(10);

/// What the task needs of other rooms.
pub struct Rooms {
    /// How paths stand, and who is to be worked on.
    pub hub: Hub,
    /// Caches of KCP.
    pub stores: Stores,
    /// Whose runtimes are left alone.
    pub pause: Pause,
    /// Which Kymas are this receiver's.
    pub takeover: Takeover,
    /// Tells of it.
    pub record: Record,
    /// Shows it.
    pub metrics: Metrics,
}

/// The task of the active receiver.
pub struct Upgrade {
    flags: Flags,
    image: String,
    namespace: String,
    store: Store,
    held: Held,
    course: Course,
    rooms: Rooms,
    table: Table,
    /// Who was asked to become another one, in this content of the ConfigMap.
    asked: HashSet<KymaKey>,
    /// The version over which was written: nothing is written until the watch brings another.
    written: Option<String>,
    not_before: Instant,
    idle: u32,
}

impl Upgrade {
    /// Reads how far it is. The client must be behind the fence: only the active receiver carries an upgrade on. The task ends by itself
    /// never; what it decides stands in its [`Course`].
    ///
    /// # Errors
    /// [`Keep`].
    pub async fn open(
        client: Client,
        namespace: &str,
        image: &str,
        flags: Flags,
        rooms: Rooms,
    ) -> Result<(Self, Course), Keep> {
        let store = Store::new(client, namespace);
        let held = store.read().await?;
        let course = Course::new(match &held {
            Held::Good(kept) => kept.rollout.clone(),
            Held::None | Held::Refused => Rollout::unknown(image, Timestamp::now().as_second()),
        });
        let upgrade = Self {
            flags,
            image: image.to_owned(),
            namespace: namespace.to_owned(),
            store,
            held,
            course: course.clone(),
            rooms,
            table: Table::default(),
            asked: HashSet::new(),
            written: None,
            not_before: Instant::now(),
            idle: 0,
        };
        Ok((upgrade, course))
    }

    /// Runs for ever, from when the caches of KCP are full; returns only if the watch ends, which it never should.
    pub async fn run(mut self, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        let mut maps = watcher::watch_object(self.store.api().clone(), CONFIG_MAP).default_backoff().boxed();
        let mut look = time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                map = maps.next() => match map {
                    Some(Ok(map)) => self.take(map.as_ref()),
                    Some(Err(error)) => {
                        tracing::warn!(error = &error as &dyn std::error::Error, "Watch of the ConfigMap {CONFIG_MAP} failed");
                    }
                    None => return "watch of the agents' upgrade",
                },
                now = look.tick() => {
                    if self.is_turn() {
                        self.look(now).await;
                    }
                }
            }
        }
    }

    /// While nothing is under way, or nothing can go on before somebody changes the ConfigMap, it looks more seldom.
    fn is_turn(&mut self) -> bool {
        let rollout = self.course.rollout();
        let rests = match &self.held {
            Held::None => false,
            Held::Refused => true,
            Held::Good(_) => *rollout.target == *self.image && (rollout.is_done() || rollout.halted().is_some()),
        };
        self.idle = if rests { (self.idle + 1) % IDLE } else { 0 };
        self.idle == 0
    }

    /// The ConfigMap as the watch saw it.
    fn take(&mut self, map: Option<&ConfigMap>) {
        let held = Held::of(map);
        if let Held::Good(kept) = &held
            && *self.course.rollout() != kept.rollout
        {
            self.tell(&kept.rollout, kept.uid());
            self.course.turn(kept.rollout.clone());
            self.asked.clear();
        }
        if let Held::None = &held {
            if matches!(self.held, Held::Good(_)) {
                tracing::warn!("The ConfigMap {CONFIG_MAP} is gone; it is made again");
            }
            self.written = None;
        }
        self.held = held;
        // What is written there, as a confirmation, is acted on at the next tick.
        self.idle = IDLE - 1;
    }

    fn tell(&self, rollout: &Rollout, uid: &str) {
        let (target, stage) = (&rollout.target, rollout.stage());
        let note = match (rollout.halted(), rollout.is_done()) {
            (Some(why), _) => {
                tracing::error!(%target, stage, why, "The upgrade of agents has halted");
                format!("the upgrade to {target} has halted in stage {stage}: {why}")
            }
            (None, true) => {
                tracing::info!(%target, "Every runtime gets this agent");
                format!("every runtime gets {target}")
            }
            (None, false) => {
                tracing::info!(%target, stage, of = self.flags.agent_upgrade_stages.count(), "The upgrade of agents goes on");
                format!("the upgrade to {target} is in stage {stage} of {}", self.flags.agent_upgrade_stages.count())
            }
        };
        self.rooms.record.upgrade(&self.namespace, CONFIG_MAP, uid, rollout.halted().is_some(), note);
    }

    async fn look(&mut self, now: Instant) {
        let before = self.course.rollout();
        let is_refused = matches!(self.held, Held::Refused);
        self.rooms.metrics.shows(&before, is_refused);
        let unix = Timestamp::now().as_second();
        let wanted = before.towards(&self.image, unix);
        let fleet = self.fleet(&before, &wanted, now);
        self.rooms.metrics.counted(&Count::of(&wanted, &fleet.members), fleet.others);
        if before.target == wanted.target {
            self.ask(&before, &fleet);
        }
        if is_refused || now < self.not_before || self.written.as_deref() == Some(self.held.version()) {
            return;
        }
        let next = decide::step(&wanted, &fleet, self.terms(&wanted, unix)).unwrap_or(wanted);
        if next != *before || matches!(self.held, Held::None) {
            self.write(&next).await;
        }
    }

    fn terms(&self, rollout: &Rollout, now: i64) -> Terms<'_> {
        let confirmed = matches!(&self.held, Held::Good(kept) if kept.confirms(&rollout.target));
        Terms {
            stages: &self.flags.agent_upgrade_stages,
            pause: i64::try_from(self.flags.pause().as_secs()).unwrap_or(i64::MAX),
            max_failures: self.flags.agent_upgrade_max_failures,
            confirmed,
            now,
        }
    }

    /// How everybody stands. `before` is what is in effect, `wanted` what is to come.
    fn fleet(&mut self, before: &Rollout, wanted: &Rollout, now: Instant) -> Fleet {
        let stands = self.rooms.hub.stands();
        let known: BTreeSet<_> = stands.iter().map(|stand| &stand.kyma).collect();
        self.table.retain(|key| known.contains(key));
        self.course.retain(|key| known.contains(key));
        self.asked.retain(|key| known.contains(key));
        self.table.target(&wanted.target);
        let mut fleet = Fleet::default();
        for stand in &stands {
            if !self.counts(stand) {
                fleet.others += 1;
                self.table.rests(&stand.kyma);
                continue;
            }
            let rank = self.table.rank(&stand.kyma, &stand.runtime);
            let decided = if before.target == wanted.target {
                before.image_at_rank(rank)
            } else {
                before.image_of(&stand.runtime)
            };
            let look = Look { stand, fact: self.course.fact(&stand.kyma), decided };
            fleet.members.extend(self.table.look(look, self.flags.deadline(), now));
        }
        fleet
    }

    /// Whether something may be concluded from a runtime.
    fn counts(&self, stand: &Stand) -> bool {
        if matches!(stand.path, PathState::Unproven(Unproven::Away | Unproven::LegacyAgent)) {
            return false;
        }
        let key = &stand.kyma;
        let kyma = self.rooms.stores.kymas.get(&ObjectRef::new(&key.name).within(&key.namespace));
        kyma.is_some_and(|kyma| self.is_worked_on(&kyma)) && !self.rooms.takeover.awaits(key)
    }

    fn is_worked_on(&self, kyma: &Kyma) -> bool {
        kyma.metadata.deletion_timestamp.is_none()
            && self.rooms.pause.of(kyma).is_none()
            && !takeover::is_asked_back(kyma)
            && (self.rooms.takeover.selects_skipped()
                || !is_true(kyma.metadata.labels.as_ref(), label::SKIP_RECONCILIATION))
    }

    /// Wants those looked at that have not what is in effect, each once: whatever fails is tried again by the queue.
    fn ask(&mut self, rollout: &Rollout, fleet: &Fleet) {
        let lacks = |member: &&decide::Member| match rollout.image_at_rank(member.rank) {
            Decided::Is(image) => match &member.image {
                Some(has) => *has != image,
                // Others are verified some time after a start; for these an upgrade waits.
                None => !rollout.is_done() && image == rollout.target,
            },
            Decided::KeepOr(_) => member.image.is_none(),
        };
        let asked = &self.asked;
        let next = fleet.members.iter().filter(lacks).filter(|member| !asked.contains(&member.kyma)).take(AT_ONCE);
        let next: Vec<_> = next.map(|member| member.kyma.clone()).collect();
        for key in next {
            self.rooms.hub.want(&key, Works::INSTALLER, Priority::Catalog);
            self.asked.insert(key);
        }
    }

    async fn write(&mut self, rollout: &Rollout) {
        let written = timeout(DEADLINE, self.store.write(&self.held, rollout)).await;
        let outcome = match &written {
            Ok(Ok(true)) => "written",
            Ok(Ok(false)) => "conflict",
            Ok(Err(_)) | Err(_) => "failed",
        };
        self.rooms.metrics.wrote(outcome);
        match written {
            Ok(Ok(_)) => self.written = Some(self.held.version().to_owned()),
            Ok(Err(error)) => self.failed(&error),
            Err(late) => self.failed(&late),
        }
    }

    fn failed(&mut self, error: &(dyn std::error::Error + 'static)) {
        self.not_before = Instant::now() + RETRY;
        tracing::warn!(error, "The upgrade of agents could not be carried on; it is tried again");
    }
}

#[cfg(test)]
mod tests;
