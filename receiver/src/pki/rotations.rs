//! Handle of the CA rotation: its progress, its stragglers, and orders to begin one.

use std::{sync::Arc, time::Duration};

use thiserror::Error;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::timeout,
};

use super::{Laggards, Order, Ordered, Progress};

/// Whoever asks for a rotation is answered within this time.
pub(crate) const ORDER_DEADLINE: Duration = Duration::from_secs(15);

/// Why no rotation is under way.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum NotOrdered {
    /// Somebody else issues, or nobody.
    #[error("there is no built-in CA")]
    NoCa,
    /// The Secret is gone or its content is refused.
    #[error("the Secret of the CA is gone or cannot be used")]
    Secret,
    /// The Secret was not written.
    #[error("the Secret of the CA could not be written")]
    Write,
    /// Nothing happened in time.
    #[error("there was no answer in time")]
    Late,
}

/// Shows the rotation and takes orders. Clones are the same.
#[derive(Clone)]
pub struct Rotations {
    pub(crate) orders: mpsc::Sender<PendingOrder>,
    pub(crate) progress: watch::Receiver<Option<Arc<Progress>>>,
    pub(crate) laggards: watch::Receiver<Option<Arc<Laggards>>>,
}

impl Rotations {
    /// How far it is; `None` without a built-in CA, and before it was looked at.
    #[must_use]
    pub fn progress(&self) -> Option<Arc<Progress>> {
        self.progress.borrow().clone()
    }

    /// Who holds it up for longer than it should take; `None` before anybody was looked at.
    #[must_use]
    pub fn laggards(&self) -> Option<Arc<Laggards>> {
        self.laggards.borrow().clone()
    }

    /// Begins a rotation, or joins the one that is under way. Returns when that is stored.
    ///
    /// # Errors
    /// [`NotOrdered`].
    pub async fn order(&self, order: Order) -> Result<Ordered, NotOrdered> {
        let (answer, answered) = oneshot::channel();
        let asked = async {
            self.orders.send((order, answer)).await.map_err(|_| NotOrdered::NoCa)?;
            answered.await.map_err(|_| NotOrdered::NoCa)?
        };
        timeout(ORDER_DEADLINE, asked).await.map_err(|_| NotOrdered::Late)?
    }
}

/// An order with the sender of its answer.
pub(crate) type PendingOrder = (Order, oneshot::Sender<Result<Ordered, NotOrdered>>);
