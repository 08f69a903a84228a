//! Forwarded events of one request, under the lock of the runtime's shard.

use std::{collections::BTreeSet, sync::Arc};

use rustls_pki_types::CertificateDer;
use tidewatch_api::identity::{Epoch, RuntimeId};
use tidewatch_contract::event::Reason;

use super::kymas::Entry;
use crate::{
    EventsRecord, ForwardedEvent, Snapshot,
    forward::{Outbox, QueueKey, Settlement},
};

/// Watches with queues that a request changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct OutboxChanges {
    pub(super) put: Vec<Arc<str>>,
    pub(super) without_room: Vec<Arc<str>>,
}

/// Puts the forwarded events of a request into the outbox and refuses those that find no room.
pub(super) fn take(
    outbox: &mut Outbox<Snapshot>,
    entry: &mut Entry,
    id: &RuntimeId,
    epoch: Epoch,
    recorded: &mut EventsRecord,
    leaf: Option<&CertificateDer<'static>>,
) -> OutboxChanges {
    let mut changes = OutboxChanges::default();
    let mut touched: BTreeSet<_> = outbox.answered_below(id, epoch, recorded.answered_below).into_iter().collect();
    if recorded.counts.forwards_unblocked {
        touched.extend(entry.runtime.watches_pending_forward().map(|watch| (id.clone(), watch.into())));
    }
    let leaf = leaf.filter(|_| !recorded.forwards.is_empty()).map(|leaf| Arc::new(leaf.clone()));
    for ForwardedEvent { id: event_id, watch, event } in std::mem::take(&mut recorded.forwards) {
        let key: QueueKey = (id.clone(), watch.into());
        touched.insert(key.clone());
        let Some(event) = event else { continue };
        let put = leaf.as_ref().map(|leaf| outbox.put(&key, leaf, event));
        if let Some(Ok(())) = put {
            outbox.found_room(&key, epoch, event_id.sequence);
            changes.put.push(key.1);
            continue;
        }
        changes.without_room.push(key.1.clone());
        // A lower sequence belongs to a delayed duplicate; the agent no longer awaits its response.
        if let Some(leaf) = leaf.as_ref().filter(|_| event_id.sequence >= recorded.answered_below) {
            outbox.block(&key, leaf, epoch, event_id.sequence);
        }
        // The agent keeps a refused event and retries it with backoff.
        recorded.refused.push((event_id, Reason::UnknownWatch));
    }
    for key in touched {
        progress(outbox, entry, &key);
    }
    changes
}

/// Settles the forwarded events of one watch up to the last answered one.
pub(super) fn progress(outbox: &mut Outbox<Snapshot>, entry: &mut Entry, key: &QueueKey) {
    if let Some(Settlement { accepted, except }) = outbox.progress(key, || entry.runtime.snapshot()) {
        entry.runtime.forwarded(&accepted, &key.1, &except);
    }
}
