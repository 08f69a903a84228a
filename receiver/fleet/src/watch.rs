//! Watch of one kind of KCP: a reflector that keeps a cache, reports each change, and tolerates invalid objects.

mod backoff;
mod common_parts;
mod freshness;
mod initial_list;
mod list_splitter;
mod writer;

use std::{borrow::Cow, collections::HashSet, fmt::Debug, sync::Arc};

use futures::StreamExt;
use kube::{
    Api,
    core::{DeserializeGuard, Resource},
    runtime::{
        WatchStreamExt,
        reflector::{Lookup, ObjectRef, Store},
        watcher::{self, Event},
    },
};
use serde::de::DeserializeOwned;
use tidewatch_api::names::GROUP;
use tidewatch_cluster::Metrics;
use tidewatch_kit::{
    log_error,
    metrics::KindLabel,
    readiness::{Pending, Readiness},
};

pub use backoff::WatchBackoff;
pub use common_parts::{CommonKymaParts, CommonParts};
pub use freshness::{CacheMonitor, Freshness};
pub use writer::{LockedCache, SharedWriter};

use crate::recorder::{EventRecorder, Regarding};

/// Change that a watch reports.
pub enum Change<'a, K> {
    /// The object is in the first list of this process, so it may be unchanged since the previous process.
    Initial(&'a K),
    /// The object is new, changed, or listed again.
    Applied(&'a K),
    /// The object is deleted or no longer selected.
    Deleted(&'a K),
    /// A list is complete, and its changes have been reported.
    Listed,
}

/// Opens when all kinds have been listed once. Only then are events placed, unknown runtimes refused and Kymas
/// reconciled, because an object that is missing from an incomplete cache would look deleted.
pub struct SyncGate {
    readiness: Readiness,
    opening: Arc<OnOpen>,
}

/// Calls the callback when the last reference is dropped.
struct OnOpen {
    on_open: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Drop for OnOpen {
    fn drop(&mut self) {
        if let Some(on_open) = self.on_open.take() {
            on_open();
        }
    }
}

/// Keeps the [`SyncGate`] closed, and its kind pending in the readiness, until dropped.
pub struct SyncGuard {
    _pending: Pending,
    _opening: Arc<OnOpen>,
}

impl SyncGate {
    /// `on_open` is called once, when the gate and all its guards are dropped.
    pub fn new(readiness: &Readiness, on_open: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { readiness: readiness.clone(), opening: Arc::new(OnOpen { on_open: Some(Box::new(on_open)) }) }
    }

    /// Keeps the gate closed for a kind.
    pub fn guard(&self, kind: &'static str) -> SyncGuard {
        SyncGuard { _pending: self.readiness.pending(kind), _opening: self.opening.clone() }
    }
}

/// Runs forever; returns the kind if the stream ends, which is a defect. The client must be one of [`Freshness::observe`].
pub async fn run<K, S>(
    api: Api<DeserializeGuard<K>>,
    config: watcher::Config,
    mut cache: Cache<K, S>,
    mut handler: impl FnMut(Change<'_, S>),
) -> &'static str
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    S: Lookup<DynamicType = ()> + Clone + 'static,
{
    let kind = cache.kind;
    let mut stream = watcher::watcher(api, config.streaming_lists()).backoff(WatchBackoff::default()).boxed();
    while let Some(event) = stream.next().await {
        match event {
            Ok(event) => cache.apply(event, &mut handler),
            Err(error) => {
                cache.metrics.failed.get_or_create(&KindLabel { kind }).inc();
                log_error!(warn, &error, kind, "Watch failed");
            }
        }
    }
    kind
}

/// Returns the form of an object in which it is stored, which needs less memory.
pub type Compact<K, S> = Box<dyn FnMut(K) -> S + Send>;

/// Cache of one kind with its write and read halves. It stores objects of the type `K` as `S`.
pub struct Cache<K, S: Lookup<DynamicType = ()> + Clone + 'static> {
    /// Name of the kind, in metrics, logs and the readiness.
    pub kind: &'static str,
    /// Write half.
    pub writer: SharedWriter<S>,
    /// Read half.
    pub reader: Store<S>,
    /// Called while the cache is locked.
    pub compact: Compact<K, S>,
    /// Held until the first list is complete.
    pub gate: Option<SyncGuard>,
    /// Confirmed by each complete list; its client's watches confirm it as well.
    pub freshness: Freshness,
    /// Metrics of the control plane's watches.
    pub metrics: Metrics,
    /// Recorder of Events about objects that cannot be read.
    pub recorder: EventRecorder,
}

impl<K, S> Cache<K, S>
where
    K: Resource<DynamicType = ()> + Clone + Debug + 'static,
    S: Lookup<DynamicType = ()> + Clone + 'static,
{
    fn apply(&mut self, event: Event<DeserializeGuard<K>>, handler: &mut impl FnMut(Change<'_, S>)) {
        if let Event::InitDone = event {
            self.complete_list(handler);
        } else if let Some(event) = self.store(event) {
            match &event {
                Event::Apply(object) => handler(Change::Applied(object)),
                Event::Delete(object) => handler(Change::Deleted(object)),
                Event::Init | Event::InitApply(_) | Event::InitDone => {}
            }
        }
        let count = i64::try_from(self.reader.len()).unwrap_or(i64::MAX);
        self.metrics.objects.get_or_create(&KindLabel { kind: self.kind }).set(count);
    }

    /// Applies an event to the cache; `None` if it has nothing to store.
    fn store(&mut self, event: Event<DeserializeGuard<K>>) -> Option<Event<S>> {
        let writer = self.writer.clone();
        let mut cache = writer.lock();
        let event = match event {
            Event::Init => Event::Init,
            Event::InitApply(object) => Event::InitApply(self.last_valid(object)?),
            Event::Apply(object) => Event::Apply(self.last_valid(object)?),
            Event::Delete(object) => Event::Delete(self.last_valid(object)?),
            Event::InitDone => Event::InitDone,
        };
        cache.apply(&event);
        Some(event)
    }

    fn complete_list(&mut self, handler: &mut impl FnMut(Change<'_, S>)) {
        let before = self.reader.state();
        self.writer.lock().apply(&Event::InitDone);
        let after = self.reader.state();
        let first = self.gate.is_some();
        after.iter().for_each(|object| handler(if first { Change::Initial(object) } else { Change::Applied(object) }));
        let present: HashSet<_> = after.iter().map(|object| object.to_object_ref(())).collect();
        let deleted = before.iter().filter(|object| !present.contains(&object.to_object_ref(())));
        deleted.for_each(|object| handler(Change::Deleted(object)));
        handler(Change::Listed);
        self.freshness.confirm();
        self.gate = None;
    }

    /// Returns the object as it is stored; for an invalid one its last valid state, because an error in an object must not
    /// look like its deletion. An invalid object is logged, counted, and reported by an Event if it is of Kyma's API group.
    fn last_valid(&mut self, object: DeserializeGuard<K>) -> Option<S> {
        match object.0 {
            Ok(mut object) => {
                object.meta_mut().managed_fields = None;
                Some((self.compact)(object))
            }
            Err(invalid) => {
                let namespace = invalid.metadata.namespace;
                let name = invalid.metadata.name;
                let namespace = namespace.unwrap_or_default();
                let name = name.unwrap_or_default();
                let known = self.reader.get(&ObjectRef::new(&name).within(&namespace));
                self.metrics.unreadable.get_or_create(&KindLabel { kind: self.kind }).inc();
                tracing::warn!(kind = self.kind, namespace, name, error = %invalid.error, "Invalid object");
                if let (true, Cow::Borrowed(kind)) = (K::group(&()) == GROUP, K::kind(&())) {
                    let uid = invalid.metadata.uid.unwrap_or_default();
                    let object = Regarding { kind, namespace, name, uid };
                    self.recorder.report_invalid(object, known.is_some(), &invalid.error);
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
    use tidewatch_api::ModuleTemplate;
    use tidewatch_kit::metrics::Registry;

    use super::*;
    use crate::recorder;

    fn template(name: &str, spec: Value) -> DeserializeGuard<ModuleTemplate> {
        let object = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": name, "namespace": "kcp-system", "uid": "u"}, "spec": spec});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn invalid_object_is_counted_and_reported_and_keeps_its_last_valid_state() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let events = recorder::Metrics::register(&mut registry);
        let writer = Writer::<ModuleTemplate>::default();
        let recorder = EventRecorder::new(events);
        let mut cache = Cache {
            kind: "moduletemplates",
            reader: writer.as_reader(),
            writer: writer.into(),
            compact: Box::new(|template| template),
            gate: None,
            freshness: Freshness::new(),
            metrics,
            recorder,
        };
        let mut seen = Vec::new();
        let mut handler = |change: Change<'_, ModuleTemplate>| {
            if let Change::Applied(template) = change {
                seen.push((template.metadata.name.clone().unwrap(), template.spec.version.clone()));
            }
        };
        let good = json!({"version": "1.0.0", "descriptor": {}});
        let bad = json!({"version": 1, "descriptor": {}});
        cache.apply(Event::Apply(template("known", good)), &mut handler);
        cache.apply(Event::Apply(template("known", bad.clone())), &mut handler);
        cache.apply(Event::Apply(template("new", bad)), &mut handler);
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
    fn gate_opens_when_all_kinds_have_been_listed_once() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let events = recorder::Metrics::register(&mut registry);
        let readiness = Readiness::default();
        let opened = Arc::new(AtomicBool::new(false));
        let gate = SyncGate::new(&readiness, {
            let opened = opened.clone();
            move || opened.store(true, Ordering::Relaxed)
        });
        let mut caches = ["moduletemplates", "modulereleasemetas"].map(|kind| {
            let writer = Writer::<ModuleTemplate>::default();
            let gate = Some(gate.guard(kind));
            let recorder = EventRecorder::new(events.clone());
            Cache {
                kind,
                reader: writer.as_reader(),
                writer: writer.into(),
                compact: Box::new(|template| template),
                gate,
                freshness: Freshness::new(),
                metrics: metrics.clone(),
                recorder,
            }
        });
        drop(gate);
        let is_open = || opened.load(Ordering::Relaxed);

        let mut seen = Vec::new();
        let good = template("known", json!({"version": "1.0.0", "descriptor": {}}));
        let mut handler = |change: Change<'_, ModuleTemplate>| {
            seen.push(match change {
                Change::Initial(_) => "initial",
                Change::Applied(_) => "applied",
                Change::Deleted(_) => "deleted",
                Change::Listed => "listed",
            });
        };
        let listing = || [Event::Init, Event::InitApply(good.clone())];
        for event in listing() {
            caches[0].apply(event, &mut handler);
        }
        assert!(!is_open() && readiness.missing().len() == 2, "the list is not complete");
        caches[0].apply(Event::InitDone, &mut handler);
        assert!(!is_open(), "the other kind is not listed");
        assert_eq!(readiness.missing(), ["modulereleasemetas"]);
        // A second list of the same kind does not open the gate.
        for event in listing().into_iter().chain([Event::InitDone]) {
            caches[0].apply(event, &mut handler);
        }
        assert!(!is_open());
        caches[1].apply(Event::Init, &mut handler);
        caches[1].apply(Event::InitDone, &mut handler);
        assert!(is_open() && readiness.missing().is_empty());
        // Objects of the first list are initial, those of later lists may have changed.
        assert_eq!(seen, ["initial", "listed", "applied", "listed", "listed"]);
    }
}
