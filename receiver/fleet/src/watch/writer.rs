//! Write half of a cache, shared by its watch and by tasks that replace the stored form of objects.

use std::sync::Arc;

use kube::runtime::{
    reflector::{Lookup, Store, store::Writer},
    watcher::Event,
};
use parking_lot::{Mutex, MutexGuard};

/// Write half of a cache. Clones share it.
pub struct SharedWriter<S: Lookup<DynamicType = ()> + Clone + 'static>(Arc<Mutex<State<S>>>);

/// Cache that is locked: no watch event changes it meanwhile, or chooses the form of an object.
pub type LockedCache<'a, S> = MutexGuard<'a, State<S>>;

/// State of a cache.
pub struct State<S: Lookup<DynamicType = ()> + Clone + 'static> {
    writer: Writer<S>,
    /// A list is incomplete, and replaces all objects when it is complete.
    is_listing: bool,
}

impl<S: Lookup<DynamicType = ()> + Clone + 'static> Clone for SharedWriter<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: Lookup<DynamicType = ()> + Clone + 'static> From<Writer<S>> for SharedWriter<S> {
    fn from(writer: Writer<S>) -> Self {
        Self(Arc::new(Mutex::new(State { writer, is_listing: false })))
    }
}

impl<S: Lookup<DynamicType = ()> + Clone + 'static> SharedWriter<S> {
    /// The read half.
    pub fn reader(&self) -> Store<S> {
        self.lock().writer.as_reader()
    }

    /// Locks the cache for a change.
    pub fn lock(&self) -> LockedCache<'_, S> {
        self.0.lock()
    }
}

impl<S: Lookup<DynamicType = ()> + Clone + 'static> State<S> {
    /// Applies an event of the watch.
    pub fn apply(&mut self, event: &Event<S>) {
        match event {
            Event::Init => self.is_listing = true,
            Event::InitDone => self.is_listing = false,
            Event::InitApply(_) | Event::Apply(_) | Event::Delete(_) => {}
        }
        self.writer.apply_watcher_event(event);
    }

    /// Stores another form of an object. Returns false during a list, which would undo it when it is complete.
    pub fn replace(&mut self, object: S) -> bool {
        if !self.is_listing {
            self.writer.apply_watcher_event(&Event::Apply(object));
        }
        !self.is_listing
    }

    /// Returns true while a list is incomplete.
    pub const fn is_listing(&self) -> bool {
        self.is_listing
    }
}
