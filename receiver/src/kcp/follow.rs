//! One watch of KCP: keeps a cache, tells of each change, and survives objects that cannot be read.

use std::{collections::HashSet, fmt::Debug, sync::Arc};

use futures::StreamExt;
use kube::{
    Api,
    core::{DeserializeGuard, Resource},
    runtime::{
        WatchStreamExt,
        reflector::{Lookup, ObjectRef, store::Writer},
        watcher::{self, Event},
    },
};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use super::Metrics;
use crate::{
    hub::Hub,
    telemetry::{Pending, Readiness},
};

/// What a watch tells.
pub(super) enum Change<'a, K> {
    /// The object stood in the first list: it is nothing new, this process is.
    Found(&'a K),
    /// The object is there, new, changed or listed again.
    Applied(&'a K),
    /// The object is gone, or is not selected any more.
    Deleted(&'a K),
    /// A list is complete; what it said has been told.
    Listed,
}

/// What one watch needs.
pub(super) struct Watch<K> {
    pub(super) kind: &'static str,
    pub(super) api: Api<DeserializeGuard<K>>,
    pub(super) config: watcher::Config,
    pub(super) gate: Guard,
    pub(super) metrics: Metrics,
}

/// Opens when every kind has been listed once: only then may an event be placed, an unknown runtime be called unknown, or a
/// Kyma be worked on; before, what is missing in a cache would look as if it did not exist.
pub(super) struct Gate {
    readiness: Readiness,
    last: Arc<Last>,
}

struct Last {
    hub: Hub,
    synced: CancellationToken,
}

impl Drop for Last {
    fn drop(&mut self) {
        self.hub.set_synced();
        self.synced.cancel();
    }
}

/// One kind's share of the [`Gate`].
pub(super) struct Guard {
    _pending: Pending,
    _last: Arc<Last>,
}

impl Gate {
    /// `synced` is cancelled when the gate opens.
    pub(super) fn new(readiness: &Readiness, hub: Hub, synced: CancellationToken) -> Self {
        Self { readiness: readiness.clone(), last: Arc::new(Last { hub, synced }) }
    }

    pub(super) fn guard(&self, kind: &'static str) -> Guard {
        Guard { _pending: self.readiness.pending(kind), _last: self.last.clone() }
    }
}

/// Runs for ever; returns only if the stream ends, which it never should.
pub(super) async fn follow<K>(
    watch: Watch<K>,
    mut writer: Writer<K>,
    mut sink: impl FnMut(Change<'_, K>),
) -> &'static str
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let Watch { kind, api, config, gate, metrics } = watch;
    let reader = writer.as_reader();
    let mut gate = Some(gate);
    let mut stream = watcher::watcher(api, config).default_backoff().boxed();
    while let Some(event) = stream.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                metrics.failed(kind);
                tracing::warn!(kind, error = &error as &dyn std::error::Error, "Watch of the control plane failed");
                continue;
            }
        };
        // An object that cannot be read is named, counted, and stays as it was last readable: a mistake in one object
        // must not look like its deletion.
        let readable = |object: DeserializeGuard<K>| match object.0 {
            Ok(mut object) => {
                object.meta_mut().managed_fields = None;
                Some(object)
            }
            Err(invalid) => {
                let (namespace, name) =
                    (invalid.metadata.namespace.unwrap_or_default(), invalid.metadata.name.unwrap_or_default());
                metrics.unreadable(kind);
                tracing::warn!(kind, namespace, name, error = %invalid.error, "Object cannot be read");
                reader.get(&ObjectRef::new(&name).within(&namespace)).map(|known| (*known).clone())
            }
        };
        match event {
            Event::Init => writer.apply_watcher_event(&Event::Init),
            Event::InitApply(object) => {
                if let Some(object) = readable(object) {
                    writer.apply_watcher_event(&Event::InitApply(object));
                }
            }
            Event::InitDone => {
                let before = reader.state();
                writer.apply_watcher_event(&Event::InitDone);
                let after = reader.state();
                let first = gate.is_some();
                after
                    .iter()
                    .for_each(|object| sink(if first { Change::Found(object) } else { Change::Applied(object) }));
                let present: HashSet<_> = after.iter().map(|object| object.to_object_ref(())).collect();
                let gone = before.iter().filter(|object| !present.contains(&object.to_object_ref(())));
                gone.for_each(|object| sink(Change::Deleted(object)));
                sink(Change::Listed);
                gate.take();
            }
            Event::Apply(object) => {
                if let Some(object) = readable(object) {
                    writer.apply_watcher_event(&Event::Apply(object.clone()));
                    sink(Change::Applied(&object));
                }
            }
            Event::Delete(object) => {
                if let Some(object) = readable(object) {
                    writer.apply_watcher_event(&Event::Delete(object.clone()));
                    sink(Change::Deleted(&object));
                }
            }
        }
        metrics.objects(kind, reader.len());
    }
    kind
}
