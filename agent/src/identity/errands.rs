//! What the link and whoever renews the identity do for each other: the link has renewals carried beside its own requests, in the name
//! of the identity that it has, and tells what the receiver says of it.

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use super::Standing;
use crate::link::{Answer, Fault};

/// Demands that wait. Each is told again as long as its reason lasts.
const DEMANDS: usize = 4;

/// A renewal to carry.
pub(crate) struct Order {
    /// Body of the request.
    pub(crate) body: Bytes,
    reply: oneshot::Sender<Result<Answer, Fault>>,
}

impl Order {
    /// Nobody waits for the answer any more.
    pub(crate) fn is_given_up(&self) -> bool {
        self.reply.is_closed()
    }

    /// Hands over the answer.
    pub(crate) fn answer(self, answer: Result<Answer, Fault>) {
        // Whoever has given up asks again.
        let _ = self.reply.send(answer);
    }
}

/// What the receiver says of an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Demand {
    /// It is to be renewed.
    Renew,
    /// It is of no use.
    Refused,
}

/// The link's end.
pub(crate) struct Renewals {
    orders: mpsc::Receiver<Order>,
    /// With the fingerprint of the leaf that is meant.
    demands: mpsc::Sender<(Demand, String)>,
    standing: Standing,
}

/// The other end.
pub(crate) struct Errands {
    orders: mpsc::Sender<Order>,
    demands: mpsc::Receiver<(Demand, String)>,
}

/// Both ends.
pub(crate) fn errands(standing: Standing) -> (Renewals, Errands) {
    let (order, orders) = mpsc::channel(1);
    let (tell, demands) = mpsc::channel(DEMANDS);
    (Renewals { orders, demands: tell, standing }, Errands { orders: order, demands })
}

impl Renewals {
    /// A renewal that was ordered.
    pub(crate) fn order(&mut self) -> Option<Order> {
        self.orders.try_recv().ok()
    }

    /// The next renewal.
    pub(crate) async fn ordered(&mut self) -> Order {
        match self.orders.recv().await {
            Some(order) => order,
            // Nobody is left who could order one.
            None => std::future::pending().await,
        }
    }

    /// The receiver wants this leaf renewed.
    pub(crate) fn wanted(&self, fingerprint: &str) {
        self.demand(Demand::Renew, fingerprint);
    }

    /// The receiver has no use for this leaf.
    pub(crate) fn refused(&self, fingerprint: &str) {
        self.demand(Demand::Refused, fingerprint);
    }

    /// Since when asking for a certificate fails, in RFC 3339.
    pub(crate) fn failed_since(&self) -> Option<String> {
        self.standing.failing_since()
    }

    /// Whether the agent's Secret does not have the identity in use.
    pub(crate) fn is_unkept(&self) -> bool {
        self.standing.told().unkept
    }

    fn demand(&self, what: Demand, fingerprint: &str) {
        // A full channel holds the same already.
        let _ = self.demands.try_send((what, fingerprint.to_owned()));
    }
}

impl Errands {
    /// Has a renewal carried. `None` when the link is gone.
    pub(crate) async fn carry(&self, body: Bytes) -> Option<Result<Answer, Fault>> {
        let (reply, answer) = oneshot::channel();
        self.orders.send(Order { body, reply }).await.ok()?;
        answer.await.ok()
    }

    /// The next demand, with the fingerprint of the leaf that is meant.
    pub(super) async fn demanded(&mut self) -> (Demand, String) {
        match self.demands.recv().await {
            Some(demand) => demand,
            // Without a link nobody demands anything.
            None => std::future::pending().await,
        }
    }
}
