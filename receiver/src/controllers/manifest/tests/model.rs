//! Random schedules of `step` against a model of both clusters: edits, deletions, faults of every request, crashes after
//! any action, upgrades, removals, listings again, and restores of the control plane from an older backup; an operator
//! that holds the CRs of its module, whose webhook refuses them while it does not run, and one version of which never
//! lets them go; a webhook of others; versions of a CRD that come and go; and a writer that changes an object back at any
//! pace. `TIDEWATCH_SCHEDULES` sets the number of schedules.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    time::Duration,
};

use proptest::{prelude::*, test_runner::TestCaseError};
use serde_json::json;
use tokio::time::advance;

use super::super::{
    adoption::Installation,
    inventory::{Inventory, ObjectKey},
    render::RenderedObject,
    stage::Stage,
    step::{Action, DefaultObject, Facts, Goal, Seen, step},
};
use crate::{
    base::key::KymaKey,
    kube::{WriteBudgets, object::Component},
};

/// Actions of one reconcile at most: each adds a fact.
const MAX_ACTIONS: usize = 60;
/// Reconciles until everything is settled, once faults and edits have ended.
const MAX_RECONCILES: usize = 30;
/// Schedules, unless `TIDEWATCH_SCHEDULES` sets their number.
const SCHEDULES: u32 = 10_000;
/// Reconciles until the stored objects of a CRD are migrated.
const MIGRATION: u8 = 3;
/// Interval of reconciles while a writer changes an object back, and between those that settle: then every budget is whole.
const SOON: Duration = Duration::from_secs(1);
const LATER: Duration = Duration::from_secs(1_500);
/// Version whose operator never removes its finalizers, and one that mends this.
const HANGING: usize = 1;
const MENDED: usize = 2;

/// Owner of an object in the runtime cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The Manifest with this number.
    Manifest(u32),
    /// Another Manifest, or the user.
    Foreign,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Object {
    owner: Owner,
    /// A finalizer of its controller; of a CR, of the module's operator.
    is_held: bool,
    is_terminating: bool,
    /// Version of the module whose content it has.
    version: usize,
}

impl Object {
    const fn foreign() -> Self {
        Self { owner: Owner::Foreign, is_held: false, is_terminating: false, version: 0 }
    }
}

/// The default module CR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DefaultCr {
    /// A finalizer of the module's operator.
    is_held: bool,
    is_terminating: bool,
}

/// The Manifest in the control plane.
#[derive(Clone, Debug)]
struct StoredManifest {
    number: u32,
    has_finalizers: bool,
    is_deleting: bool,
    is_unmanaged: bool,
    default_created: bool,
    inventory: Inventory,
    version: usize,
}

#[derive(Clone, Debug)]
struct World {
    objects: BTreeMap<ObjectKey, Object>,
    user_crs: u8,
    default: Option<DefaultCr>,
    /// Manifests that created the default CR and recorded it.
    creators: Vec<u32>,
    /// The reconcile in progress has created the default CR. One that is killed before it records this leaves the next
    /// one to find the CR, and to create it again if the user has deleted it meanwhile.
    has_created: bool,
    manifest: Option<StoredManifest>,
    manifests: u32,
    layer_is_available: bool,
    /// The group of an object of version 2 is served.
    serves_extra: bool,
    /// The user permits that the module replaces one that was installed by hand.
    permits: bool,
    /// Remaining requests until one fails; `None` for no fault.
    fault_in: Option<u8>,
    /// Remaining actions until the receiver is killed.
    crash_in: Option<u8>,
    /// A webhook of others refuses writes of ConfigMaps and CRs.
    is_foreign_webhook_down: bool,
    /// Versions in which objects of the CRD are stored.
    stored: BTreeSet<u8>,
    /// Reconciles in which they were migrated.
    migrated: u8,
    /// Number of reconciles after which a writer changes the ConfigMap `m` back, and those since it did.
    writer: Option<(u8, u8)>,
    /// Changes of the writer, and our writes of its object.
    changes: usize,
    repairs: usize,
    budgets: WriteBudgets,
    /// Backup of the control plane.
    backup: Option<StoredManifest>,
    /// The control plane was restored: until its removal, a Manifest may lack objects in its inventory.
    is_restored: bool,
}

/// Change from outside, or a reconcile.
#[derive(Clone, Debug)]
enum Event {
    Reconcile {
        fault_in: Option<u8>,
        crash_in: Option<u8>,
    },
    List,
    Delist,
    Unmanage,
    Upgrade(usize),
    DeleteObject(usize),
    Adopt(usize),
    Hold(usize, bool),
    UserCrs(u8),
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
    BackUp,
    Restore,
}

fn key(kind: &str, name: &str) -> ObjectKey {
    let group = match kind {
        "CustomResourceDefinition" => "apiextensions.k8s.io",
        "Deployment" => "apps",
        "ClusterRole" => "rbac.authorization.k8s.io",
        "ValidatingWebhookConfiguration" => "admissionregistration.k8s.io",
        "Sample" => "example.test",
        "Extra" => "extra.test",
        _ => "",
    };
    let namespace = if matches!(kind, "Deployment" | "ConfigMap" | "Sample" | "Extra") { "kyma-system" } else { "" };
    ObjectKey { group: group.into(), kind: kind.into(), namespace: namespace.into(), name: name.into() }
}

/// Objects of the module's versions.
fn versions() -> [Vec<(ObjectKey, Stage)>; 3] {
    let crd = (key("CustomResourceDefinition", "samples.example.test"), Stage::Definitions);
    let shared = (key("Namespace", "kyma-system"), Stage::Definitions);
    let role = (key("ClusterRole", "r"), Stage::Configuration);
    let map = (key("ConfigMap", "m"), Stage::Configuration);
    let manager = (key("Deployment", "d"), Stage::Workloads);
    let hook = (key("ValidatingWebhookConfiguration", "w"), Stage::Webhooks);
    let own = (key("Sample", "own"), Stage::CustomResources);
    let extra = (key("Extra", "e"), Stage::Configuration);
    let other_crd = (key("CustomResourceDefinition", "others.other.test"), Stage::Definitions);
    [
        vec![shared.clone(), crd.clone(), role.clone(), map.clone(), manager.clone()],
        vec![crd.clone(), other_crd, role.clone(), manager.clone(), hook, own],
        vec![shared, crd, extra, manager],
    ]
}

impl World {
    fn new() -> Self {
        Self {
            objects: [(key("ConfigMap", "theirs"), Object::foreign())].into(),
            user_crs: 0,
            default: None,
            creators: Vec::new(),
            has_created: false,
            manifest: None,
            manifests: 0,
            layer_is_available: true,
            serves_extra: true,
            permits: false,
            fault_in: None,
            crash_in: None,
            is_foreign_webhook_down: false,
            stored: BTreeSet::new(),
            migrated: 0,
            writer: None,
            changes: 0,
            repairs: 0,
            budgets: WriteBudgets::default(),
            backup: None,
            is_restored: false,
        }
    }

    fn rendered(&self, version: usize) -> Vec<RenderedObject> {
        let objects = versions()[version].clone().into_iter();
        let render = |(key, stage): (ObjectKey, Stage)| RenderedObject {
            served: self.serves_extra || key.kind != "Extra",
            version: "v1".into(),
            stage,
            body: json!(version),
            key,
        };
        objects.map(render).collect()
    }

    /// True if this request fails.
    fn fails(&mut self) -> bool {
        let Some(left) = self.fault_in.as_mut() else { return false };
        let fails = *left == 0;
        self.fault_in = left.checked_sub(1);
        fails
    }

    fn apply(&mut self, event: &Event) {
        match *event {
            Event::Reconcile { fault_in, crash_in } => {
                (self.fault_in, self.crash_in) = (fault_in, crash_in);
                self.reconcile();
                (self.fault_in, self.crash_in) = (None, None);
            }
            Event::List => {
                if self.manifest.is_none() {
                    self.manifests += 1;
                    self.manifest = Some(StoredManifest {
                        number: self.manifests,
                        has_finalizers: false,
                        is_deleting: false,
                        is_unmanaged: false,
                        default_created: false,
                        inventory: Inventory::default(),
                        version: 0,
                    });
                }
            }
            Event::Delist => {
                if let Some(manifest) = &mut self.manifest {
                    manifest.is_deleting = true;
                    // Without a finalizer it is gone at once.
                    if !manifest.has_finalizers {
                        self.manifest = None;
                    }
                }
            }
            Event::Unmanage => self.manifest.iter_mut().for_each(|manifest| manifest.is_unmanaged = true),
            Event::Upgrade(version) => self.manifest.iter_mut().for_each(|manifest| manifest.version = version % 3),
            Event::DeleteObject(at) => {
                if let Some(key) = self.ours().get(at % self.objects.len()).cloned() {
                    self.remove(&key);
                }
            }
            Event::Adopt(at) => {
                let keys: Vec<_> = self.objects.keys().cloned().collect();
                if let Some(object) = self.objects.get_mut(&keys[at % keys.len()]) {
                    object.owner = Owner::Foreign;
                }
            }
            Event::Hold(at, is_held) => {
                let keys: Vec<_> = self.objects.keys().cloned().collect();
                let key = &keys[at % keys.len()];
                if let Some(object) = self.objects.get_mut(key) {
                    object.is_held = is_held;
                    if !is_held && object.is_terminating {
                        self.remove(key);
                    }
                }
            }
            Event::UserCrs(count) => self.user_crs = count,
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
                self.objects.entry(key("Deployment", "d")).or_insert(Object::foreign());
            }
            Event::Permit(permits) => self.permits = permits,
            // The request that creates a Manifest contains its finalizers.
            Event::BackUp => self.backup = self.manifest.clone().filter(|manifest| manifest.has_finalizers),
            Event::Restore => {
                let Some(backup) = self.backup.clone() else { return };
                // Successive Manifests have one name, which is the owner of the objects.
                for object in self.objects.values_mut().filter(|object| object.owner != Owner::Foreign) {
                    object.owner = Owner::Manifest(backup.number);
                }
                self.creators.retain(|creator| *creator != backup.number);
                self.manifest = Some(backup);
                self.is_restored = true;
            }
        }
    }

    fn ours(&self) -> Vec<ObjectKey> {
        let ours = self.objects.iter().filter(|(_, object)| object.owner != Owner::Foreign);
        ours.map(|(key, _)| key.clone()).collect()
    }

    fn reconcile(&mut self) {
        self.write_by_others();
        let Some(manifest) = self.manifest.clone() else { return };
        let goal = match () {
            () if manifest.is_unmanaged => Goal::Release,
            () if manifest.is_deleting => Goal::Remove,
            () => Goal::Install,
        };
        let rendered = self.rendered(manifest.version);
        let is_pending = goal == Goal::Remove || !manifest.default_created;
        let mut facts = Facts {
            goal,
            has_finalizers: manifest.has_finalizers,
            rendered: (self.layer_is_available && goal != Goal::Release).then_some(&rendered[..]),
            inventory: manifest.inventory.clone(),
            recovered: None,
            seen: BTreeMap::new(),
            established: None,
            default_object: if is_pending { DefaultObject::Pending } else { DefaultObject::NotWanted },
            default_created: manifest.default_created,
            installation: Installation::Unknown,
            blocked: None,
            inherited: BTreeSet::new(),
        };
        self.has_created = false;
        for actions in 0.. {
            assert!(actions < MAX_ACTIONS, "the reconcile does not end: {facts:?}");
            let action = step(&facts);
            if action == Action::End {
                break;
            }
            if self.crash_in == Some(0) {
                return;
            }
            self.crash_in = self.crash_in.map(|left| left - 1);
            if !self.act(action, &mut facts) {
                return;
            }
            self.check();
        }
        let Some(stored) = &mut self.manifest else { return };
        stored.inventory = facts.remaining();
        stored.default_created |= facts.goal == Goal::Install && facts.default_object == DefaultObject::Done;
        if self.has_created {
            self.creators.push(stored.number);
        }
    }

    /// Carries out an action; false ends the reconcile, as a failed request to the control plane does.
    fn act(&mut self, action: Action<'_>, facts: &mut Facts<'_>) -> bool {
        let Some(number) = self.manifest.as_ref().map(|manifest| manifest.number) else { return false };
        match action {
            Action::AddFinalizers => {
                if self.fails() {
                    return false;
                }
                self.manifest.iter_mut().for_each(|manifest| manifest.has_finalizers = true);
                facts.has_finalizers = true;
            }
            Action::FindInstallation => {
                let found = self.objects.get(&key("Deployment", "d"));
                let is_foreign = found.is_some_and(|found| found.owner == Owner::Foreign);
                facts.installation = match (self.fails(), is_foreign, self.permits) {
                    (true, ..) => Installation::Failed,
                    (_, false, _) => Installation::Ours,
                    (_, true, true) => Installation::Adoptable("adopting".into()),
                    (_, true, false) => Installation::Foreign("left as it is".into()),
                };
            }
            Action::Adopt(_) => {
                if self.fails() {
                    return false;
                }
                facts.installation = Installation::Ours;
            }
            Action::Record(inventory) => {
                let is_first = facts.goal == Goal::Install && facts.inventory.is_empty();
                assert!(!is_first || facts.installation == Installation::Ours, "written before it was adopted");
                if self.fails() {
                    return false;
                }
                self.manifest.iter_mut().for_each(|manifest| manifest.inventory = inventory.clone());
                facts.inventory = inventory;
            }
            Action::Apply(objects) => {
                for object in objects {
                    let seen = if self.fails() { Seen::Failed } else { self.write(object, number) };
                    facts.seen.insert(object.key.clone(), seen);
                }
            }
            Action::AwaitDefinitions(_) => facts.established = Some(!self.fails()),
            Action::CreateDefault => {
                facts.default_object = if self.fails() || self.refuses_crs() {
                    DefaultObject::Failed
                } else {
                    assert_eq!(facts.goal, Goal::Install, "a removal creates no default CR");
                    assert!(!self.creators.contains(&number), "a Manifest created its default CR again");
                    self.has_created |= self.default.is_none();
                    self.default.get_or_insert_default();
                    DefaultObject::Done
                };
            }
            Action::Recover => {
                let is_found = !self.fails();
                if is_found {
                    let mut inventory = facts.inventory.clone();
                    let is_ours = |object: &Object| object.owner == Owner::Manifest(number);
                    for (key, _) in self.objects.iter().filter(|(_, object)| is_ours(object)) {
                        inventory.grow(key, "v1");
                    }
                    if inventory != facts.inventory && self.fails() {
                        return false;
                    }
                    self.manifest.iter_mut().for_each(|manifest| manifest.inventory = inventory.clone());
                    facts.inventory = inventory;
                }
                facts.recovered = Some(is_found);
            }
            Action::FindBlockers => facts.blocked = Some(self.fails() || self.user_crs > 0),
            Action::DeleteDefault => {
                assert_eq!(self.user_crs, 0, "the default CR goes after the user's");
                facts.default_object = match self.fails() || self.refuses_crs() {
                    true => DefaultObject::Failed,
                    false if self.delete_default() => DefaultObject::Done,
                    false => DefaultObject::Terminating,
                };
            }
            Action::Delete(keys) => {
                let has_crs = facts.goal == Goal::Remove && (self.user_crs > 0 || self.default.is_some());
                assert!(!has_crs || keys.iter().all(|key| !key.is_definition()), "a CRD goes after its CRs");
                for key in keys {
                    let seen = if self.fails() { Seen::Failed } else { self.delete(&key, number) };
                    facts.seen.insert(key, seen);
                }
            }
            Action::Unlabel(keys) => {
                for key in keys {
                    let seen = if self.fails() { Seen::Failed } else { Seen::Current };
                    if let Some(object) = self.objects.get_mut(&key).filter(|_| seen == Seen::Current) {
                        object.owner = Owner::Foreign;
                    }
                    facts.seen.insert(key, seen);
                }
            }
            Action::Leave => {
                if !self.fails() {
                    self.manifest = None;
                }
                return false;
            }
            Action::End => return false,
        }
        true
    }

    fn write(&mut self, RenderedObject { key, body, .. }: &RenderedObject, number: u32) -> Seen {
        let version = body.as_u64().and_then(|version| version.try_into().ok()).unwrap_or(usize::MAX);
        if self.is_refused(key) {
            return Seen::Failed;
        }
        if *key == samples() && !self.migrates(version) {
            return Seen::Migrating;
        }
        let differs = self.objects.get(key).is_none_or(|object| object.version != version);
        if differs && self.writer.is_some() {
            let kyma = KymaKey::new("ns", "k");
            let budget = self.budgets.of(&kyma, Component::Module, &key.to_string(), (number, version));
            if !budget.may_write() {
                return Seen::Failed;
            }
            budget.wrote();
            self.repairs += usize::from(key.kind == "ConfigMap");
        }
        let object = self.objects.entry(key.clone()).or_insert(Object::foreign());
        object.owner = Owner::Manifest(number);
        object.version = version;
        Seen::Current
    }

    /// Goes on with the migration that the CRD of a version needs. Returns true once it needs none.
    fn migrates(&mut self, version: usize) -> bool {
        let (served, storage) = definition(version);
        if !self.stored.iter().all(|stored| served.contains(stored)) {
            self.migrated += 1;
            if self.migrated < MIGRATION {
                return false;
            }
            self.stored = BTreeSet::new();
        }
        self.migrated = 0;
        self.stored.insert(storage);
        true
    }

    fn write_by_others(&mut self) {
        let Some((pace, since)) = &mut self.writer else { return };
        *since += 1;
        if since < pace {
            return;
        }
        *since = 0;
        if let Some(map) = self.objects.get_mut(&key("ConfigMap", "m")) {
            map.version = usize::MAX;
            self.changes += 1;
        }
    }

    fn delete(&mut self, key: &ObjectKey, number: u32) -> Seen {
        let is_refused = self.is_refused(key);
        match self.objects.get_mut(key) {
            Some(object) if object.owner == Owner::Manifest(number) && is_refused => Seen::Failed,
            Some(object) if object.owner == Owner::Manifest(number) && object.is_held => {
                object.is_terminating = true;
                Seen::Terminating
            }
            Some(object) if object.owner == Owner::Manifest(number) => {
                self.remove(key);
                Seen::Absent
            }
            _ => Seen::Absent,
        }
    }

    fn remove(&mut self, key: &ObjectKey) {
        self.objects.remove(key);
        if *key == samples() {
            self.stored.clear();
        }
    }

    /// Deletes the default module CR. Returns true if it is gone.
    fn delete_default(&mut self) -> bool {
        match &mut self.default {
            Some(default) if default.is_held => default.is_terminating = true,
            default => *default = None,
        }
        self.default.is_none()
    }

    /// True for an object that a webhook refuses.
    fn is_refused(&self, key: &ObjectKey) -> bool {
        (key.kind == "Sample" && self.refuses_crs()) || (key.kind == "ConfigMap" && self.is_foreign_webhook_down)
    }

    /// True while a webhook of others is down, or that of the module is there and nothing serves it.
    fn refuses_crs(&self) -> bool {
        let exists = |key: &ObjectKey| self.objects.contains_key(key);
        let is_own_down = exists(&key("ValidatingWebhookConfiguration", "w")) && !exists(&key("Deployment", "d"));
        self.is_foreign_webhook_down || is_own_down
    }

    fn has_terminating_cr(&self) -> bool {
        let is_cr = |(key, object): (&ObjectKey, &Object)| key.kind == "Sample" && object.is_terminating;
        self.default.is_some_and(|default| default.is_terminating) || self.objects.iter().any(is_cr)
    }

    fn operate(&mut self) {
        if self.objects.get(&key("Deployment", "d")).is_none_or(|operator| operator.version == HANGING) {
            return;
        }
        self.default = self.default.filter(|default| !default.is_terminating);
        self.objects.retain(|key, object| key.kind != "Sample" || !object.is_terminating);
    }

    /// Invariants after each action.
    fn check(&self) {
        assert!(self.objects.contains_key(&key("ConfigMap", "theirs")), "an object of others was deleted");
        for (key, object) in &self.objects {
            let Owner::Manifest(number) = object.owner else { continue };
            if key.is_shared_namespace() {
                continue;
            }
            let Some(manifest) = &self.manifest else { panic!("{key} is left without a Manifest") };
            let is_recorded = manifest.inventory.contains(key);
            assert!(
                manifest.number == number && (is_recorded || self.is_restored),
                "{key} of Manifest {number} is not in the inventory"
            );
        }
    }

    /// Reconciles for some minutes while a writer changes an object back as fast as it does: either it is repaired each
    /// time, or ever more seldom.
    async fn contend(&mut self) {
        self.changes = 0;
        self.repairs = 0;
        for _ in 0..300 {
            self.reconcile();
            advance(SOON).await;
        }
        // Five in a minute, until that is not enough.
        assert!(self.repairs <= self.changes + 1 && self.repairs <= 26, "{} of {}", self.repairs, self.changes);
    }

    /// Ends all faults, and reconciles until nothing changes.
    async fn settle(&mut self) {
        self.is_foreign_webhook_down = false;
        self.writer = None;
        self.layer_is_available = true;
        self.serves_extra = true;
        self.permits = true;
        let keys: Vec<_> = self.objects.keys().cloned().collect();
        // From the last one on, since an object that is being deleted goes with its hold.
        let others = (0..keys.len()).rev().filter(|at| keys[*at].kind != "Sample");
        others.for_each(|at| self.apply(&Event::Hold(at, false)));
        for _ in 0..MAX_RECONCILES {
            advance(LATER).await;
            self.reconcile();
            self.operate();
        }
        self.check();
    }
}

fn event() -> impl Strategy<Value = Event> {
    let after = || prop_oneof![3 => Just(None), 2 => (0..12u8).prop_map(Some)];
    prop_oneof![
        8 => (after(), after()).prop_map(|(fault_in, crash_in)| Event::Reconcile { fault_in, crash_in }),
        2 => Just(Event::List),
        1 => Just(Event::Delist),
        1 => Just(Event::Unmanage),
        2 => (0..3usize).prop_map(Event::Upgrade),
        1 => any::<usize>().prop_map(Event::DeleteObject),
        1 => any::<usize>().prop_map(Event::Adopt),
        1 => (any::<usize>(), any::<bool>()).prop_map(|(at, held)| Event::Hold(at, held)),
        1 => (0..3u8).prop_map(Event::UserCrs),
        1 => Just(Event::HoldDefault),
        1 => Just(Event::UserDeletesDefault),
        1 => Just(Event::Operate),
        1 => any::<bool>().prop_map(Event::Layer),
        1 => any::<bool>().prop_map(Event::Serve),
        1 => any::<bool>().prop_map(Event::ForeignWebhook),
        1 => prop::option::of(1..20u8).prop_map(Event::Writer),
        1 => Just(Event::InstallByHand),
        1 => any::<bool>().prop_map(Event::Permit),
        1 => Just(Event::BackUp),
        1 => Just(Event::Restore),
    ]
}

/// The CRD of the CRs.
fn samples() -> ObjectKey {
    key("CustomResourceDefinition", "samples.example.test")
}

/// Versions of the CRD in a version of the module, and the one in which objects are stored.
fn definition(version: usize) -> (&'static [u8], u8) {
    match version {
        0 => (&[1], 1),
        1 => (&[1, 2], 2),
        _ => (&[2], 2),
    }
}

fn schedules() -> u32 {
    env::var("TIDEWATCH_SCHEDULES").ok().and_then(|number| number.parse().ok()).unwrap_or(SCHEDULES)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: schedules(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn schedules_end_with_exactly_the_objects_of_the_manifest(events in prop::collection::vec(event(), 1..40)) {
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
    let ours = || world.ours().into_iter().filter(|key| !key.is_shared_namespace()).collect::<BTreeSet<_>>();
    match &world.manifest {
        Some(manifest) if manifest.is_unmanaged => prop_assert!(false, "an unmanaged Manifest is left"),
        Some(manifest) => {
            let hangs = manifest.version == HANGING && world.has_terminating_cr();
            let waits = manifest.is_deleting;
            prop_assert!(!waits || world.user_crs > 0 || hangs, "only CRs hold a removal");
            let expected: BTreeSet<_> = versions()[manifest.version]
                .iter()
                .map(|(key, _)| key.clone())
                // One that its operator does not let go is not written again.
                .filter(|key| !key.is_shared_namespace())
                .filter(|key| !hangs || key.kind != "Sample")
                .collect();
            let ours: BTreeSet<_> = ours().into_iter().filter(|key| !(hangs && key.kind == "Sample")).collect();
            let more: Vec<_> = ours.difference(&expected).collect();
            let may_stay = |key: &&ObjectKey| world.is_restored || (waits && key.is_definition());
            prop_assert!(ours.is_superset(&expected), "{:?} of {:?}", ours, expected);
            prop_assert!(more.iter().all(may_stay), "{:?} are left", more);
            let is_current = |key: &ObjectKey| world.objects[key].version == manifest.version;
            prop_assert!(expected.iter().all(is_current), "content of another version: {:?}", world.objects);
        }
        None => prop_assert!(ours().is_empty(), "{:?} are left", ours()),
    }
    // A removal is complete once the user CRs are gone, and the operator is mended.
    world.apply(&Event::UserCrs(0));
    world.apply(&Event::Delist);
    world.apply(&Event::Upgrade(MENDED));
    world.settle().await;
    prop_assert!(world.manifest.is_none(), "{:?}", world);
    let left: Vec<_> = world.ours().into_iter().filter(|key| !key.is_shared_namespace()).collect();
    prop_assert!(left.is_empty(), "{:?} are left", left);
    Ok(())
}
