//! One watch of KCP: keeps a cache, tells of each change, and survives objects that cannot be read.

use std::{borrow::Cow, collections::HashSet, fmt::Debug, sync::Arc};

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
use tidewatch_shared::names::GROUP;

use super::Metrics;
use crate::{
    kube::record::Record,
    telemetry::{Pending, Readiness},
};

/// What a watch tells.
pub(crate) enum Change<'a, K> {
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
pub(crate) struct Watch<K> {
    pub(crate) kind: &'static str,
    pub(crate) api: Api<DeserializeGuard<K>>,
    pub(crate) config: watcher::Config,
    pub(crate) gate: Guard,
    pub(crate) metrics: Metrics,
    pub(crate) record: Record,
}

/// Opens when every kind has been listed once: only then may an event be placed, an unknown runtime be called unknown, or a
/// Kyma be worked on; before, what is missing in a cache would look as if it did not exist.
pub(crate) struct Gate {
    readiness: Readiness,
    last: Arc<Last>,
}

struct Last {
    on_open: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Drop for Last {
    fn drop(&mut self) {
        if let Some(on_open) = self.on_open.take() {
            on_open();
        }
    }
}

/// One kind's share of the [`Gate`].
pub(crate) struct Guard {
    _pending: Pending,
    _last: Arc<Last>,
}

impl Gate {
    /// `on_open` is called once, when the gate opens.
    pub(crate) fn new(readiness: &Readiness, on_open: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { readiness: readiness.clone(), last: Arc::new(Last { on_open: Some(Box::new(on_open)) }) }
    }

    pub(crate) fn guard(&self, kind: &'static str) -> Guard {
        Guard { _pending: self.readiness.pending(kind), _last: self.last.clone() }
    }
}

/// Runs for ever; returns only if the stream ends, which it never should.
pub(crate) async fn follow<K>(watch: Watch<K>, writer: Writer<K>, mut sink: impl FnMut(Change<'_, K>)) -> &'static str
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let Watch { kind, api, config, gate, metrics, record } = watch;
    let mut cache = Cache { kind, reader: writer.as_reader(), writer, gate: Some(gate), metrics, record };
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
    record: Record,
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

    /// An object that cannot be read is named, counted, told of if it is of our group, and stays as it was last readable: a mistake in
    /// one object must not look like its deletion.
    fn readable(&self, object: DeserializeGuard<K>) -> Option<K> {
        match object.0 {
            Ok(mut object) => {
                object.meta_mut().managed_fields = None;
                Some(object)
            }
            Err(invalid) => {
                let (namespace, name) = (invalid.metadata.namespace, invalid.metadata.name);
                let (namespace, name) = (namespace.unwrap_or_default(), name.unwrap_or_default());
                let known = self.reader.get(&ObjectRef::new(&name).within(&namespace));
                self.metrics.unreadable(self.kind);
                tracing::warn!(kind = self.kind, namespace, name, error = %invalid.error, "Object cannot be read");
                if let (true, Cow::Borrowed(kind)) = (K::group(&()) == GROUP, K::kind(&())) {
                    let uid = invalid.metadata.uid.unwrap_or_default();
                    self.record.unreadable(kind, (namespace, name, uid), known.is_some(), &invalid.error);
                }
                known.map(|known| (*known).clone())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use kube::runtime::reflector::store::Writer;
    use serde_json::{Value, json};
    use tidewatch_shared::{api::ModuleTemplate, metrics::Registry};

    use super::*;
    use crate::kube::record;

    fn template(name: &str, spec: Value) -> DeserializeGuard<ModuleTemplate> {
        let object = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": name, "namespace": "kcp-system", "uid": "u"}, "spec": spec});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn an_object_that_cannot_be_read_is_counted_told_and_stays_as_it_was() {
        let mut registry = Registry::default();
        let (metrics, told) = (Metrics::register(&mut registry), record::Metrics::register(&mut registry));
        let (writer, record) = (Writer::<ModuleTemplate>::default(), Record::new(told));
        let mut cache =
            Cache { kind: "moduletemplates", reader: writer.as_reader(), writer, gate: None, metrics, record };
        let mut seen = Vec::new();
        let mut sink = |change: Change<'_, ModuleTemplate>| {
            if let Change::Applied(template) = change {
                seen.push((template.metadata.name.clone().unwrap(), template.spec.version.clone()));
            }
        };
        let (good, bad) = (json!({"version": "1.0.0", "descriptor": {}}), json!({"version": 1, "descriptor": {}}));
        cache.take(Event::Apply(template("known", good)), &mut sink);
        cache.take(Event::Apply(template("known", bad.clone())), &mut sink);
        cache.take(Event::Apply(template("new", bad)), &mut sink);
        assert_eq!(
            seen,
            [("known".to_owned(), Some("1.0.0".to_owned())), ("known".to_owned(), Some("1.0.0".to_owned()))]
        );
        assert_eq!(cache.reader.len(), 1);
        let page = registry.encode().unwrap();
        for line in [r#"kcp_unreadable_objects_total{kind="moduletemplates"} 2"#, "kubernetes_events_waiting 2"] {
            assert!(page.contains(line), "{page}");
        }
    }

    #[test]
    fn the_gate_opens_when_every_kind_has_been_listed_once() {
        let mut registry = Registry::default();
        let (metrics, told) = (Metrics::register(&mut registry), record::Metrics::register(&mut registry));
        let (readiness, opened) = (Readiness::default(), Arc::new(AtomicBool::new(false)));
        let gate = Gate::new(&readiness, {
            let opened = opened.clone();
            move || opened.store(true, Ordering::Relaxed)
        });
        let mut caches = ["moduletemplates", "modulereleasemetas"].map(|kind| {
            let (writer, gate) = (Writer::<ModuleTemplate>::default(), Some(gate.guard(kind)));
            let record = Record::new(told.clone());
            Cache { kind, reader: writer.as_reader(), writer, gate, metrics: metrics.clone(), record }
        });
        drop(gate);
        let is_open = || opened.load(Ordering::Relaxed);

        let mut seen = Vec::new();
        let good = template("known", json!({"version": "1.0.0", "descriptor": {}}));
        let mut sink = |change: Change<'_, ModuleTemplate>| {
            seen.push(match change {
                Change::Found(_) => "found",
                Change::Applied(_) => "applied",
                Change::Deleted(_) => "deleted",
                Change::Listed => "listed",
            });
        };
        let listing = || [Event::Init, Event::InitApply(good.clone())];
        for event in listing() {
            caches[0].take(event, &mut sink);
        }
        assert!(!is_open() && readiness.missing().len() == 2, "a list that has begun is none");
        caches[0].take(Event::InitDone, &mut sink);
        assert!(!is_open(), "the other kind is missing");
        assert_eq!(readiness.missing(), ["modulereleasemetas"]);
        // Listing the same again is not listing the other.
        for event in listing().into_iter().chain([Event::InitDone]) {
            caches[0].take(event, &mut sink);
        }
        assert!(!is_open());
        caches[1].take(Event::Init, &mut sink);
        caches[1].take(Event::InitDone, &mut sink);
        assert!(is_open() && readiness.missing().is_empty());
        // What stood there at the start is nothing new; what is listed later may be.
        assert_eq!(seen, ["found", "listed", "applied", "listed", "listed"]);
    }
}
