//! Changes of templates and release metas that come together are taken together: a release meta that the cache sees before its new
//! template would else take a channel away for a moment.

use std::{
    collections::BTreeSet,
    mem,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time};

use super::wakes::Rooms;
use crate::key::KymaKey;

/// From the first change until all that came meanwhile is acted on.
const SETTLE: Duration = Duration::from_millis(300);

/// Whom changes of the catalog concern that are not acted on yet; bounded by the number of Kymas.
#[derive(Default)]
pub(super) struct Settle {
    users: Mutex<BTreeSet<KymaKey>>,
    told: Notify,
}

impl Settle {
    /// Something in the catalog moved, which these Kymas use.
    pub(super) fn moved(&self, users: Vec<KymaKey>) {
        self.users.lock().unwrap_or_else(PoisonError::into_inner).extend(users);
        self.told.notify_one();
    }

    /// Runs for ever.
    pub(super) async fn run(&self, rooms: &Rooms) -> &'static str {
        loop {
            self.told.notified().await;
            time::sleep(SETTLE).await;
            let users = mem::take(&mut *self.users.lock().unwrap_or_else(PoisonError::into_inner));
            rooms.catalog_moved(users);
        }
    }
}
