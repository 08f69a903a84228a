//! What random moves hardly ever hit: changes that are lost in one certain way, and found again.

use std::sync::Arc;

use proptest::{prop_assert, prop_assert_eq};

use super::{
    Checked, Game, LONG,
    moves::{Move, Spoil},
};
use crate::{
    cluster::{Deed, NAMES, Name, PlanId, WATCHES, Watch},
    receiver::Fate,
};

impl Game {
    /// After everything has come to rest: the receiver forgets that it accepted a deletion, which another manager has not heard of, and
    /// the first that the agent hears of it is a heartbeat's answer, by which a later event is settled.
    pub(crate) async fn forget_a_deletion(&mut self, name: Name) -> Checked {
        const OTHER: usize = 2;
        let watch = WATCHES.iter().position(Watch::is_forwarded).unwrap();
        let other = (name + 1) % NAMES;
        if !self.plan.has(watch) {
            self.change_plan(PlanId::ALL);
        }
        self.act(OTHER, name, Deed::Spec);
        self.act(OTHER, other, Deed::Spec);
        self.rest().await?;
        self.tick += 1;
        self.act(OTHER, name, Deed::Delete);
        self.hush().await?;
        self.exchange(Move::Send)?;
        self.hear(0)?;
        self.tick += 1;
        self.receivers[0].forget(Arc::new(self.plan.plan(self.turn)));
        self.act(OTHER, other, Deed::Spec);
        self.hush().await?;
        self.exchange(Move::Send)?;
        self.tick += 1;
        while self.hand(0) {
            self.receivers[0].handed(0, Fate::Taken, &mut self.records);
        }
        self.exchange(Move::Beat)?;
        // The answer to the heartbeat comes before the one to the events.
        self.hear(1)?;
        self.hear(0)?;
        self.rest().await
    }

    /// One request arrives, and its answer is on its way.
    fn exchange(&mut self, step: Move) -> Checked {
        if matches!(step, Move::Beat) {
            self.beat()
        } else {
            self.send()
        }
        prop_assert_eq!(self.requests.len(), 1, "something was sent");
        self.deliver(0, 0, false, Spoil::Nothing)
    }

    /// After everything has come to rest: a change whose event lost what it was about is found by the digest, and only then known.
    pub(crate) async fn lose_a_change(&mut self, name: Name) -> Checked {
        if !self.plan.has(1) {
            self.change_plan(PlanId::ALL);
            self.rest().await?;
        }
        // The truth of the heartbeats that follow is that of a watch that is not coarse.
        for name in 0..NAMES {
            self.act(0, name, Deed::Status);
            self.act(0, name, Deed::Delete);
        }
        self.rest().await?;
        for watch in 0..WATCHES.len() {
            self.agent.break_off(watch);
        }
        self.rest().await?;
        (self.corrupted, self.corrupt) = (true, true);
        self.act(0, name, Deed::Status);
        self.tick += 1;
        while self.agent.feed(1) {}
        self.send();
        self.deliver(0, 0, false, Spoil::Nothing)?;
        prop_assert!(!self.corrupt, "something was sent");
        self.beat();
        self.deliver(0, 0, false, Spoil::Nothing)?;
        prop_assert_eq!(self.receivers[0].resend(), [WATCHES[1].name], "nobody noticed");
        self.rest().await?;
        self.corrupted = false;
        self.round(LONG).await?;
        self.rest().await
    }
}
