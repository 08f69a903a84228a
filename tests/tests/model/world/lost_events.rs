//! Directed scenarios that random actions rarely reach: an event is lost in one specific way and recovered.

use std::{sync::Arc, time::Duration};

use proptest::{prop_assert, prop_assert_eq};

use super::{
    CheckResult, LONG, World,
    actions::{Action, RequestFault},
};
use crate::{
    cluster::{Mutation, NAMES, Name, PlanId, WATCHES, Watch},
    receiver::ManagerResponse,
};

/// Longest time between two events of a coarse watch.
const COARSE_SPACING: Duration = Duration::from_secs(61);

impl World {
    /// Starts from a converged world: the receiver loses an accepted deletion that another manager has not received
    /// yet, and the agent learns of it first from a heartbeat response that settles a later event.
    pub(crate) async fn lose_accepted_deletion(&mut self, name: Name) -> CheckResult {
        const OTHER: usize = 2;
        let watch = WATCHES.iter().position(Watch::is_forwarded).unwrap();
        let other = (name + 1) % NAMES;
        if !self.plan.has(watch) {
            self.change_plan(PlanId::ALL);
        }
        self.mutate(OTHER, name, Mutation::Spec);
        self.mutate(OTHER, other, Mutation::Spec);
        self.converge().await?;
        self.tick += 1;
        self.mutate(OTHER, name, Mutation::Delete);
        self.drain_watches().await?;
        self.exchange(Action::SendEvents).await?;
        self.receive_response(0)?;
        self.tick += 1;
        self.receivers[0].replace_kyma(Arc::new(self.plan.plan(self.plan_revision)));
        self.mutate(OTHER, other, Mutation::Spec);
        self.drain_watches().await?;
        self.exchange(Action::SendEvents).await?;
        self.tick += 1;
        while self.begin_delivery(0) {
            self.receivers[0].end_delivery(0, ManagerResponse::Accepted, &mut self.records);
        }
        self.exchange(Action::SendHeartbeat).await?;
        // The heartbeat response arrives before the events response.
        self.receive_response(1)?;
        self.receive_response(0)?;
        self.converge().await
    }

    /// Sends and delivers one request; its response is then in flight.
    async fn exchange(&mut self, action: Action) -> CheckResult {
        if matches!(action, Action::SendHeartbeat) {
            self.send_heartbeat()
        } else {
            self.send_events();
        }
        if self.requests.is_empty() {
            // The events of a coarse watch are spaced.
            tokio::time::advance(COARSE_SPACING).await;
            self.send_events();
        }
        prop_assert_eq!(self.requests.len(), 1, "nothing was sent");
        self.deliver(0, 0, false, RequestFault::None)
    }

    /// Starts from a converged world: an event loses the content of its change, the digest reveals that, and the change
    /// is recorded only then.
    pub(crate) async fn lose_event_content(&mut self, name: Name) -> CheckResult {
        if !self.plan.has(1) {
            self.change_plan(PlanId::ALL);
            self.converge().await?;
        }
        // Deletes all objects and relists, so that the watch is not coarse and the next heartbeats carry its exact
        // digest.
        for name in 0..NAMES {
            self.mutate(0, name, Mutation::Status);
            self.mutate(0, name, Mutation::Delete);
        }
        self.converge().await?;
        for watch in 0..WATCHES.len() {
            self.agent.break_watch(watch);
        }
        self.converge().await?;
        (self.allows_digest_mismatch, self.corrupt_next_event) = (true, true);
        self.mutate(0, name, Mutation::Status);
        self.tick += 1;
        while self.agent.deliver_watch_event(1) {}
        self.send_events();
        self.deliver(0, 0, false, RequestFault::None)?;
        prop_assert!(!self.corrupt_next_event, "nothing was sent");
        self.send_heartbeat();
        self.deliver(0, 0, false, RequestFault::None)?;
        prop_assert_eq!(self.receivers[0].requested_watches(), [WATCHES[1].name], "the lost change was not detected");
        self.converge().await?;
        self.allows_digest_mismatch = false;
        self.run_round(LONG).await?;
        self.converge().await
    }
}
