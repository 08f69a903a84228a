//! One watch of KCP: keeps a cache, tells of each change, and survives objects that cannot be read.

use std::{collections::HashSet, fmt::Debug, sync::Arc};

use futures::StreamExt;
use kube::{
    Api,
    core::{DeserializeGuard, Resource},
    runtime::{
        WatchStreamExt,
        reflector::{Lookup, ObjectRef, Store, store::Writer},
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
pub(super) async fn follow<K>(watch: Watch<K>, writer: Writer<K>, mut sink: impl FnMut(Change<'_, K>)) -> &'static str
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let Watch { kind, api, config, gate, metrics } = watch;
    let mut cache = Cache { kind, reader: writer.as_reader(), writer, gate: Some(gate), metrics };
    let mut stream = watcher::watcher(api, config).default_backoff().boxed();
    while let Some(event) = stream.next().await {
        match event {
            Ok(event) => cache.take(event, &mut sink),
            Err(error) => {
                cache.metrics.failed(kind);
                tracing::warn!(kind, error = &error as &dyn std::error::Error, "Watch of the control plane failed");
            }
        }
    }
    kind
}

/// One cache with both its ends.
struct Cache<K: Resource<DynamicType = ()> + Clone + 'static> {
    kind: &'static str,
    writer: Writer<K>,
    reader: Store<K>,
    /// Until the first list is complete.
    gate: Option<Guard>,
    metrics: Metrics,
}

impl<K: Resource<DynamicType = ()> + Clone + Debug + 'static> Cache<K> {
    fn take(&mut self, event: Event<DeserializeGuard<K>>, sink: &mut impl FnMut(Change<'_, K>)) {
        match event {
            Event::Init => self.writer.apply_watcher_event(&Event::Init),
            Event::InitApply(object) => {
                if let Some(object) = self.readable(object) {
                    self.writer.apply_watcher_event(&Event::InitApply(object));
                }
            }
            Event::InitDone => self.listed(sink),
            Event::Apply(object) => {
                if let Some(object) = self.readable(object) {
                    self.writer.apply_watcher_event(&Event::Apply(object.clone()));
                    sink(Change::Applied(&object));
                }
            }
            Event::Delete(object) => {
                if let Some(object) = self.readable(object) {
                    self.writer.apply_watcher_event(&Event::Delete(object.clone()));
                    sink(Change::Deleted(&object));
                }
            }
        }
        self.metrics.objects(self.kind, self.reader.len());
    }

    fn listed(&mut self, sink: &mut impl FnMut(Change<'_, K>)) {
        let before = self.reader.state();
        self.writer.apply_watcher_event(&Event::InitDone);
        let after = self.reader.state();
        let first = self.gate.is_some();
        after.iter().for_each(|object| sink(if first { Change::Found(object) } else { Change::Applied(object) }));
        let present: HashSet<_> = after.iter().map(|object| object.to_object_ref(())).collect();
        let gone = before.iter().filter(|object| !present.contains(&object.to_object_ref(())));
        gone.for_each(|object| sink(Change::Deleted(object)));
        sink(Change::Listed);
        self.gate = None;
    }

    /// An object that cannot be read is named, counted, and stays as it was last readable: a mistake in one object must not
    /// look like its deletion.
    fn readable(&self, object: DeserializeGuard<K>) -> Option<K> {
        match object.0 {
            Ok(mut object) => {
                object.meta_mut().managed_fields = None;
                Some(object)
            }
            Err(invalid) => {
                let (namespace, name) = (invalid.metadata.namespace, invalid.metadata.name);
                let (namespace, name) = (namespace.unwrap_or_default(), name.unwrap_or_default());
                self.metrics.unreadable(self.kind);
                tracing::warn!(kind = self.kind, namespace, name, error = %invalid.error, "Object cannot be read");
                self.reader.get(&ObjectRef::new(&name).within(&namespace)).map(|known| (*known).clone())
            }
        }
    }
}
