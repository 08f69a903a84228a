//! Random schedules of `step` against a model of both clusters, with two modules that share objects: edits, deletions, faults
//! of every request, crashes after any action, upgrades, removals, listings again, restores of the store from an older
//! backup, and content of users in CRDs and Namespaces that a module has brought; an operator that holds the CRs of its
//! module, whose webhook refuses them while it does not run, and one version of which never lets them go; a webhook of
//! others; versions of a CRD that come and go; and a writer that changes an object back at any pace. `TIDEWATCH_SCHEDULES`
//! sets the number of schedules.

mod objects;
mod world;

use std::{collections::BTreeSet, env};

use proptest::{prelude::*, test_runner::TestCaseError};
use tokio::time::advance;

use self::{
    objects::{Object, Owner, definition, name, namespace, operator},
    world::{ALPHA, MENDED, MODULES, Meanwhile, SOON, StoredManifest, World, versions},
};
use crate::inventory::ObjectKey;

/// Schedules, unless `TIDEWATCH_SCHEDULES` sets their number.
const SCHEDULES: u32 = 10_000;

/// Change from outside, or a reconcile.
#[derive(Clone, Debug)]
enum Event {
    Reconcile {
        at: usize,
        fault_in: Option<u8>,
        crash_in: Option<u8>,
        meanwhile: Option<(u8, Meanwhile)>,
    },
    List(usize),
    Delist(usize),
    Unmanage(usize),
    Upgrade(usize, usize),
    DeleteObject(usize),
    Adopt(usize),
    Hold(usize, bool),
    Mark(usize),
    Dispute(bool),
    UserCrs(u8),
    Lodge(bool),
    HoldDefault,
    UserDeletesDefault,
    /// The operator removes its finalizers from CRs that are being deleted.
    Operate,
    Layer(bool),
    Serve(bool),
    ForeignWebhook(bool),
    /// From now on, or no longer.
    Writer(Option<u8>),
    InstallByHand,
    Permit(bool),
    BackUp(usize),
    Restore(usize),
}

impl World {
    fn apply(&mut self, event: &Event) {
        match event.clone() {
            Event::Reconcile { at, fault_in, crash_in, meanwhile } => {
                (self.fault_in, self.crash_in, self.meanwhile) = (fault_in, crash_in, meanwhile);
                self.reconcile(at);
                (self.fault_in, self.crash_in, self.meanwhile) = (None, None, None);
            }
            Event::List(at) => self.list(at),
            Event::Delist(at) => {
                if let Some(manifest) = &mut self.modules[at].manifest {
                    manifest.is_deleting = true;
                    // Without a finalizer it is gone at once.
                    if !manifest.has_finalizers {
                        self.modules[at].manifest = None;
                    }
                }
            }
            Event::Unmanage(at) => self.change(at, |manifest| manifest.is_unmanaged = true),
            Event::Upgrade(at, version) => {
                self.change(at, |manifest| manifest.version = version % versions(at).len());
            }
            Event::DeleteObject(at) => {
                if let Some(key) = self.ours().get(at % self.objects.len()).cloned() {
                    self.end_with_content(&key);
                }
            }
            Event::Adopt(at) => self.nth(at).owner = Owner::Foreign,
            Event::Mark(at) => self.nth(at).is_marked = true,
            Event::Hold(at, is_held) => {
                let object = self.nth(at);
                object.is_held = is_held;
                let is_gone = !is_held && object.is_terminating;
                if is_gone {
                    let at = at % self.objects.len();
                    let key = self.objects.keys().nth(at).cloned().unwrap();
                    self.end_with_content(&key);
                }
            }
            Event::Dispute(is_disputed) => self.is_disputed = is_disputed,
            Event::UserCrs(count) if self.objects.contains_key(&definition()) => self.user_crs = count,
            Event::UserCrs(_) => {}
            Event::Lodge(lodges) => self.has_lodgers = lodges && self.objects.contains_key(&namespace()),
            Event::HoldDefault => self.default.iter_mut().for_each(|default| default.is_held = true),
            Event::UserDeletesDefault => {
                self.delete_default();
            }
            Event::Operate => self.operate(),
            Event::Layer(available) => self.layer_is_available = available,
            Event::Serve(serves) => self.serves_extra = serves,
            Event::ForeignWebhook(is_down) => self.is_foreign_webhook_down = is_down,
            Event::Writer(pace) => self.writer = pace.map(|pace| (pace, 0)),
            Event::InstallByHand => {
                self.objects.entry(operator()).or_insert_with(|| Object::new(Owner::Foreign));
            }
            Event::Permit(permits) => self.permits = permits,
            // The request that creates a Manifest contains its finalizers.
            Event::BackUp(at) => {
                let module = &mut self.modules[at];
                module.backup = module.manifest.clone().filter(|manifest| manifest.has_finalizers);
            }
            Event::Restore(at) => {
                let module = &mut self.modules[at];
                let Some(backup) = module.backup.clone() else { return };
                module.creators.clear();
                module.manifest = Some(backup);
                module.is_restored = true;
            }
        }
    }

    fn change(&mut self, at: usize, change: impl FnOnce(&mut StoredManifest)) {
        if let Some(manifest) = &mut self.modules[at].manifest {
            change(manifest);
        }
    }

    fn nth(&mut self, at: usize) -> &mut Object {
        let at = at % self.objects.len();
        self.objects.values_mut().nth(at).unwrap()
    }

    /// Keys of the objects that the modules need.
    fn expected(&self) -> BTreeSet<ObjectKey> {
        let installed = MODULES.into_iter().filter_map(|at| Some((at, self.modules[at].manifest.as_ref()?)));
        let expected = installed.flat_map(|(at, manifest)| versions(at).swap_remove(manifest.version));
        expected.map(|(key, _)| key).filter(|key| !key.is_common()).collect()
    }

    /// Objects of a version before that stay because of content of users.
    fn kept(&self) -> BTreeSet<ObjectKey> {
        let has_resources =
            self.user_crs > 0 || self.default.is_some() || self.objects.keys().any(|key| key.kind == "Sample");
        let definition = has_resources.then(definition);
        definition.into_iter().chain(self.has_lodgers.then(namespace)).collect()
    }

    fn is_restored(&self) -> bool {
        self.modules.iter().any(|module| module.is_restored)
    }

    fn ours_apart_from_common(&self) -> BTreeSet<ObjectKey> {
        self.ours().into_iter().filter(|key| !key.is_common()).collect()
    }

    /// Each object has the fields of all modules that contain it, and of no other ones.
    fn check_fields(&self) {
        for key in self.expected() {
            let Some(object) = self.objects.get(&key) else { continue };
            let Owner::Module(owner) = object.owner else { continue };
            for at in MODULES {
                let manifest = self.modules[at].manifest.as_ref();
                let contains_it = |version: usize| versions(at)[version].iter().any(|(rendered, _)| *rendered == key);
                let has_it = manifest.is_some_and(|manifest| contains_it(manifest.version));
                let is_refused = at != owner && self.is_disputed && key.name == "m";
                let is_left = self.modules[at].was_released && !has_it;
                let value = object.value(name(at));
                let expected = manifest.filter(|_| has_it).map(|manifest| manifest.version);
                let is_of_writer = !has_it && object.is_of_writer(name(at));
                let is_kept = at == owner && !has_it && self.kept().contains(&key);
                // A removal that waits gives up no CRD.
                let is_pending =
                    !has_it && key.is_definition() && manifest.is_some_and(|manifest| manifest.is_deleting);
                assert!(
                    value == expected || is_refused || is_left || is_of_writer || is_kept || is_pending,
                    "{key}: the field of {} is {value:?}",
                    name(at)
                );
            }
            let disputed = object.value("disputed");
            let expected = if self.is_disputed { owner } else { 0 };
            assert!(disputed.is_none_or(|value| value == expected), "{key}: {disputed:?}");
        }
    }
}

fn event() -> impl Strategy<Value = Event> {
    let after = || prop_oneof![3 => Just(None), 2 => (0..12u8).prop_map(Some)];
    let meanwhile = || {
        let what = prop_oneof![Just(Meanwhile::UserCr), Just(Meanwhile::Lodge), Just(Meanwhile::Reconcile)];
        prop_oneof![3 => Just(None), 2 => (0..12u8, what).prop_map(Some)]
    };
    let module = || 0..2usize;
    let reconcile = (module(), after(), after(), meanwhile())
        .prop_map(|(at, fault_in, crash_in, meanwhile)| Event::Reconcile { at, fault_in, crash_in, meanwhile });
    prop_oneof![
        12 => reconcile,
        3 => module().prop_map(Event::List),
        2 => module().prop_map(Event::Delist),
        1 => module().prop_map(Event::Unmanage),
        3 => (module(), 0..4usize).prop_map(|(at, version)| Event::Upgrade(at, version)),
        1 => any::<usize>().prop_map(Event::DeleteObject),
        1 => any::<usize>().prop_map(Event::Adopt),
        1 => (any::<usize>(), any::<bool>()).prop_map(|(at, held)| Event::Hold(at, held)),
        1 => any::<usize>().prop_map(Event::Mark),
        1 => any::<bool>().prop_map(Event::Dispute),
        2 => (0..3u8).prop_map(Event::UserCrs),
        1 => any::<bool>().prop_map(Event::Lodge),
        1 => Just(Event::HoldDefault),
        1 => Just(Event::UserDeletesDefault),
        1 => Just(Event::Operate),
        1 => any::<bool>().prop_map(Event::Layer),
        1 => any::<bool>().prop_map(Event::Serve),
        1 => any::<bool>().prop_map(Event::ForeignWebhook),
        1 => prop::option::of(1..20u8).prop_map(Event::Writer),
        1 => Just(Event::InstallByHand),
        1 => any::<bool>().prop_map(Event::Permit),
        1 => module().prop_map(Event::BackUp),
        1 => module().prop_map(Event::Restore),
    ]
}

fn schedules() -> u32 {
    env::var("TIDEWATCH_SCHEDULES").ok().and_then(|number| number.parse().ok()).unwrap_or(SCHEDULES)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: schedules(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn schedules_end_with_exactly_the_objects_of_the_manifests(events in prop::collection::vec(event(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(run(&events))?;
    }
}

async fn run(events: &[Event]) -> Result<(), TestCaseError> {
    let mut world = World::new();
    for event in events {
        world.apply(event);
        advance(SOON).await;
    }
    if world.writer.is_some() {
        world.contend().await;
    }
    world.settle().await;
    let is_foreign_cr = |(key, object): (&ObjectKey, &Object)| key.kind == "Sample" && object.owner == Owner::Foreign;
    let hangs = world.hangs();
    let may_wait = world.user_crs > 0 || world.objects.iter().any(is_foreign_cr) || hangs;
    let manifests: Vec<_> = world.modules.iter().filter_map(|module| module.manifest.as_ref()).collect();
    prop_assert!(manifests.iter().all(|manifest| !manifest.is_unmanaged), "an unmanaged Manifest is left");
    let waits = manifests.iter().any(|manifest| manifest.is_deleting);
    prop_assert!(!waits || may_wait, "only CRs hold a removal");
    // One that its operator does not let go is not written again.
    let counts = |key: &ObjectKey| !hangs || key.kind != "Sample";
    let expected: BTreeSet<_> = world.expected().into_iter().filter(counts).collect();
    let ours: BTreeSet<_> = world.ours_apart_from_common().into_iter().filter(counts).collect();
    let kept = world.kept();
    let may_stay = |key: &&ObjectKey| world.is_restored() || kept.contains(*key) || waits && key.is_definition();
    let surplus: Vec<_> = ours.difference(&expected).collect();
    prop_assert!(ours.is_superset(&expected), "{:?} of {:?}", ours, expected);
    prop_assert!(surplus.iter().all(may_stay), "{:?} are left", surplus);
    if !world.is_restored() {
        world.check_fields();
    }
    // A removal is complete once the user CRs are gone, those of a module that became unmanaged among them, and the operator
    // is mended.
    world.apply(&Event::UserCrs(0));
    world.objects.retain(|key, object| key.kind != "Sample" || object.owner != Owner::Foreign);
    if world.modules[ALPHA].manifest.is_none() {
        world.default = None;
    }
    MODULES.into_iter().for_each(|at| world.apply(&Event::Delist(at)));
    world.apply(&Event::Upgrade(ALPHA, MENDED));
    world.settle().await;
    prop_assert!(world.modules.iter().all(|module| module.manifest.is_none()), "{:?}", world);
    let left = world.ours_apart_from_common();
    prop_assert!(left.is_empty(), "{:?} are left", left);
    Ok(())
}
