//! Memory budget of all responses of runtimes that are being read, decoded or used, in estimated bytes.
//!
//! Each runtime has a guaranteed part, which no other runtime can take, and a share of what all runtimes have in
//! common. So runtimes that use as much as they can delay large responses of others, and never ordinary ones. The sum
//! is at most [`MemoryLimits::common`], and [`MemoryLimits::guaranteed`] for each runtime that is being reconciled.

use std::{
    cell::RefCell,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use parking_lot::Mutex;
use tokio::sync::{Notify, futures::OwnedNotified};

/// Sizes of the budget, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct MemoryLimits {
    /// For all runtimes together, beyond their guaranteed parts.
    pub common: u64,
    /// For each runtime, in any case.
    pub guaranteed: u64,
    /// For one runtime at most, its guaranteed part included.
    pub share: u64,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self { common: 256 << 20, guaranteed: 8 << 20, share: 64 << 20 }
    }
}

/// The budget of all runtimes.
#[derive(Clone)]
pub(super) struct MemoryBudget(Arc<Common>);

struct Common {
    limits: MemoryLimits,
    /// Bytes of all accounts beyond their guaranteed parts. Locked after an account.
    used: Mutex<u64>,
    released: Arc<Notify>,
}

impl MemoryBudget {
    pub(super) fn new(limits: MemoryLimits) -> Self {
        Self(Arc::new(Common { limits, used: Mutex::default(), released: Arc::default() }))
    }

    /// Used bytes beyond the guaranteed parts.
    #[cfg(test)]
    pub(super) fn used(&self) -> u64 {
        *self.0.used.lock()
    }

    /// Opens the account of one runtime.
    pub(super) fn account(&self) -> Account {
        Account(Arc::new(AccountState { common: self.0.clone(), used: Mutex::default() }))
    }
}

/// Account of one runtime; clones are the same account.
#[derive(Clone)]
pub(super) struct Account(Arc<AccountState>);

struct AccountState {
    common: Arc<Common>,
    /// Bytes of all reservations.
    used: Mutex<u64>,
}

impl AccountState {
    /// Adds to the used bytes, unless that exceeds the share of this runtime or the budget of all.
    fn try_take(&self, more: u64) -> bool {
        let limits = &self.common.limits;
        let mut used = self.used.lock();
        let sum = used.saturating_add(more);
        if sum > limits.share {
            return false;
        }
        let mut common = self.common.used.lock();
        let excess = sum.saturating_sub(limits.guaranteed) - used.saturating_sub(limits.guaranteed);
        if excess > 0 && common.saturating_add(excess) > limits.common {
            return false;
        }
        *common += excess;
        *used = sum;
        true
    }

    fn give_back(&self, bytes: u64) {
        let guaranteed = self.common.limits.guaranteed;
        let mut used = self.used.lock();
        let rest = used.saturating_sub(bytes);
        let mut common = self.common.used.lock();
        *common = common.saturating_sub(used.saturating_sub(guaranteed) - rest.saturating_sub(guaranteed));
        *used = rest;
        drop((used, common));
        self.common.released.notify_waiters();
    }
}

/// Bytes of one response, given back on drop.
pub(super) struct Reservation {
    account: Arc<AccountState>,
    bytes: AtomicU64,
}

impl Reservation {
    pub(super) fn new(account: &Account) -> Arc<Self> {
        Arc::new(Self { account: account.0.clone(), bytes: AtomicU64::new(0) })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let bytes = *self.bytes.get_mut();
        if bytes > 0 {
            self.account.give_back(bytes);
        }
    }
}

/// The only handle that can enlarge a reservation; it waits while the budget is exhausted.
pub(super) struct Growth {
    reservation: Arc<Reservation>,
    released: Option<Pin<Box<OwnedNotified>>>,
}

impl Growth {
    pub(super) fn new(reservation: Arc<Reservation>) -> Self {
        Self { reservation, released: None }
    }

    /// Enlarges the reservation to at least this size. The caller sets the deadline.
    pub(super) fn poll_to(&mut self, bytes: u64, cx: &mut Context<'_>) -> Poll<()> {
        let Reservation { account, bytes: reserved } = &*self.reservation;
        loop {
            let more = bytes.saturating_sub(reserved.load(Ordering::Relaxed));
            if more == 0 || account.try_take(more) {
                reserved.fetch_add(more, Ordering::Relaxed);
                self.released = None;
                return Poll::Ready(());
            }
            match &mut self.released {
                // Created before the next attempt, so that no release in between is missed.
                None => self.released = Some(Box::pin(account.common.released.clone().notified_owned())),
                Some(released) => {
                    ready!(released.as_mut().poll(cx));
                    self.released = None;
                }
            }
        }
    }
}

tokio::task_local! {
    /// Reservations of the responses that the current task keeps.
    static RETAINED: RefCell<Vec<Arc<Reservation>>>;
}

/// Runs a future, and keeps the memory of all responses of runtimes that it reads reserved until its end: for callers
/// that keep several decoded objects. Without it, memory counts until a response is read and decoded. An inner call
/// releases its own memory at its end.
pub async fn retain<F: Future>(future: F) -> F::Output {
    RETAINED.scope(RefCell::default(), future).await
}

/// Keeps a reservation until the end of the [`retain`] of the current task, if there is one.
pub(super) fn keep(reservation: &Arc<Reservation>) {
    // An error means that nothing is retained.
    let _ = RETAINED.try_with(|retained| retained.borrow_mut().push(reservation.clone()));
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures::FutureExt;

    use super::*;

    const LIMITS: MemoryLimits = MemoryLimits { common: 100, guaranteed: 10, share: 50 };

    /// Reserves, unless that has to wait.
    fn reserve(account: &Account, bytes: u64) -> Option<Arc<Reservation>> {
        let reservation = Reservation::new(account);
        let mut growth = Growth::new(reservation.clone());
        poll_fn(|cx| growth.poll_to(bytes, cx)).now_or_never().map(|()| reservation)
    }

    #[test]
    fn runtime_cannot_exceed_its_share() {
        let budget = MemoryBudget::new(LIMITS);
        let account = budget.account();
        let held = reserve(&account, 30).unwrap();
        assert!(reserve(&account, 21).is_none());
        let rest = reserve(&account, 20).unwrap();
        assert_eq!(budget.used(), 40);
        drop(held);
        assert_eq!(budget.used(), 10);
        drop(rest);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn exhausted_budget_leaves_each_runtime_its_guaranteed_part() {
        let budget = MemoryBudget::new(LIMITS);
        let hostile: Vec<_> = (0..30).map(|_| budget.account()).collect();
        let held: Vec<_> = hostile.iter().flat_map(|account| [reserve(account, 10), reserve(account, 40)]).collect();
        assert_eq!(budget.used(), 80, "two have their share");
        let mut rest: Vec<_> = hostile.iter().map(|account| reserve(account, 20)).collect();
        assert_eq!(budget.used(), 100, "one more has a part of it");
        let other = budget.account();
        let ordinary = reserve(&other, 10).unwrap();
        assert!(reserve(&other, 1).is_none());
        rest.clear();
        assert!(reserve(&other, 1).is_some());
        drop((held, ordinary));
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test]
    async fn reservation_waits_for_a_release_and_resumes() {
        let budget = MemoryBudget::new(LIMITS);
        let account = budget.account();
        let held = reserve(&account, 50).unwrap();
        let mut growth = Growth::new(Reservation::new(&account));
        let mut waiting = Box::pin(poll_fn(|cx| growth.poll_to(5, cx)));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(held);
        waiting.await;
        drop(growth);
        assert_eq!(*account.0.used.lock(), 0);
    }

    #[tokio::test]
    async fn retained_memory_is_released_at_the_end_of_the_innermost_call() {
        let budget = MemoryBudget::new(LIMITS);
        let account = budget.account();
        let read = |bytes| {
            let reservation = reserve(&account, bytes).unwrap();
            async move { keep(&reservation) }
        };
        let used = || *account.0.used.lock();
        retain(async {
            read(5).await;
            assert_eq!(used(), 5);
            retain(async {
                read(7).await;
                assert_eq!(used(), 12);
            })
            .await;
            assert_eq!(used(), 5);
        })
        .await;
        assert_eq!(used(), 0);
        read(3).await;
        assert_eq!(used(), 0, "nothing retains it");
    }
}
