//! Health of the services to which events are forwarded. Each replica forwards the events of its own shards, and may alone be unable to
//! reach a service; the replica with the fleet role asks all of them, and is informed about changes.

use std::{collections::BTreeMap, sync::Arc};

use tidewatch_fleet::{
    evidence::Replicas,
    forward::Health,
    peers::{AskError, Topic},
    table::RuntimeTable,
};
use tokio::{sync::Notify, time::Instant};

/// Health per forwarded watch, by the watch's name.
pub type HealthByWatch = BTreeMap<String, Health>;

/// Health of forwarding in this replica and all others.
pub struct ForwardHealth {
    fleet: RuntimeTable,
    replicas: Replicas,
    /// Notified when another replica reports a change.
    reported: Arc<Notify>,
    /// True while the replica with the fleet role is not informed of the last change here.
    is_unreported: bool,
}

impl ForwardHealth {
    /// Answers the questions and reports of other replicas from now on.
    pub fn new(fleet: RuntimeTable, replicas: Replicas) -> Self {
        let own = fleet.clone();
        let reported = Arc::new(Notify::new());
        replicas.respond(Topic::ForwardHealth, move |()| Ok(of_replica(&own)));
        let notify = reported.clone();
        replicas.respond(Topic::ForwardHealthChanged, move |()| {
            notify.notify_one();
            Ok(())
        });
        Self { fleet, replicas, reported, is_unreported: false }
    }

    /// Waits until the health changes in this replica, or another one reports a change. Cancel safe.
    pub async fn changed(&mut self) {
        tokio::select! {
            () = self.fleet.forward_health_changed() => self.is_unreported = true,
            () = self.reported.notified() => {}
        }
    }

    /// Asks all replicas, unless no watch is forwarded. The worst health of each watch counts.
    ///
    /// # Errors
    /// [`AskError`]: the health is unknown now.
    pub async fn of_fleet(&self) -> Result<HealthByWatch, AskError> {
        let mut worst = HealthByWatch::new();
        if of_replica(&self.fleet).is_empty() {
            return Ok(worst);
        }
        for answer in self.replicas.ask::<HealthByWatch>(Topic::ForwardHealth, &()).await? {
            for (watch, health) in answer {
                let known = worst.entry(watch).or_default();
                *known = health.max(*known);
            }
        }
        Ok(worst)
    }

    /// Reports a change in this replica, if there is one, to the replica with the fleet role.
    ///
    /// # Errors
    /// [`AskError`]: the next call repeats it.
    pub async fn report(&mut self) -> Result<(), AskError> {
        if self.is_unreported {
            self.replicas.ask_fleet_holder::<()>(Topic::ForwardHealthChanged, &()).await?;
            self.is_unreported = false;
        }
        Ok(())
    }
}

fn of_replica(fleet: &RuntimeTable) -> HealthByWatch {
    let health = fleet.forward_health(Instant::now());
    health.into_iter().map(|(watch, health)| (watch.to_string(), health)).collect()
}

#[cfg(test)]
mod tests;
