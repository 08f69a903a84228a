//! Both clusters of the model, and the reconcile of a Manifest in them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, LazyLock},
    time::Duration,
};

use serde_json::json;
use tidewatch_api::{
    Manifest,
    key::KymaKey,
    names::{annotation, label},
};
use tidewatch_cluster::{WriteBudgets, object::Component};
use tokio::time::advance;

use super::objects::{Fields, Manager, Object, Owner, definition, key, map, name, namespace, operator};
use crate::{
    adoption::Installation,
    inventory::{Inventory, ObjectKey},
    render::RenderedObject,
    sharing::{Claim, Parting, Sharing},
    stage::Stage,
    step::{Action, DefaultObject, Facts, Goal, Seen, step},
};

/// Actions of one reconcile at most: each adds a fact.
const MAX_ACTIONS: usize = 60;
/// Reconciles of each module until everything is settled, once faults and edits have ended.
const MAX_RECONCILES: usize = 30;
/// Reconciles until the stored objects of a CRD are migrated.
const MIGRATION: u8 = 3;
/// Interval of reconciles while a writer changes an object back, and between those that settle: then every budget is whole.
pub(super) const SOON: Duration = Duration::from_secs(1);
const LATER: Duration = Duration::from_secs(1_500);
/// Version whose operator never removes its finalizers, and one that mends this.
const HANGING: usize = 1;
pub(super) const MENDED: usize = 2;
/// The module with a default module CR. The other one shares objects with it.
pub(super) const ALPHA: usize = 0;
pub(super) const MODULES: [usize; 2] = [ALPHA, 1];

/// The Manifest in the store.
#[derive(Clone, Debug)]
pub(super) struct StoredManifest {
    number: u32,
    pub(super) has_finalizers: bool,
    pub(super) is_deleting: bool,
    pub(super) is_unmanaged: bool,
    default_created: bool,
    inventory: Inventory,
    pub(super) version: usize,
}

/// A module of the cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct Module {
    pub(super) manifest: Option<StoredManifest>,
    /// Number of the last Manifest.
    manifests: u32,
    /// Manifests that created the default CR and recorded it.
    pub(super) creators: Vec<u32>,
    /// Backup of the store.
    pub(super) backup: Option<StoredManifest>,
    /// The store was restored: until its removal, a Manifest may lack objects in its inventory.
    pub(super) is_restored: bool,
    /// It became unmanaged once, and may have left fields in objects of the other module.
    pub(super) was_released: bool,
}

/// The default module CR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DefaultCr {
    /// A finalizer of the module's operator.
    pub(super) is_held: bool,
    is_terminating: bool,
}

/// Change between two actions of a reconcile.
#[derive(Clone, Debug)]
pub(super) enum Meanwhile {
    /// A user creates a resource.
    UserCr,
    /// A user creates an object in the Namespace.
    Lodge,
    /// The other module is reconciled.
    Reconcile,
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) objects: BTreeMap<ObjectKey, Object>,
    pub(super) modules: [Module; 2],
    pub(super) user_crs: u8,
    pub(super) default: Option<DefaultCr>,
    /// Users have objects in the Namespace.
    pub(super) has_lodgers: bool,
    /// A resource was created after the user CRs were looked for.
    is_late: bool,
    /// The reconcile in progress has created the default CR. One that is killed before it records this leaves the next
    /// one to find the CR, and to create it again if the user has deleted it meanwhile.
    has_created: bool,
    pub(super) layer_is_available: bool,
    /// The group of an object of version 2 is served.
    pub(super) serves_extra: bool,
    /// The user permits that the module replaces one that was installed by hand.
    pub(super) permits: bool,
    /// The modules have different values for one field of the ConfigMap.
    pub(super) is_disputed: bool,
    /// Remaining requests until one fails; `None` for no fault.
    pub(super) fault_in: Option<u8>,
    /// Remaining actions until the process is killed.
    pub(super) crash_in: Option<u8>,
    pub(super) meanwhile: Option<(u8, Meanwhile)>,
    /// A webhook of others refuses writes of ConfigMaps and CRs.
    pub(super) is_foreign_webhook_down: bool,
    /// Versions in which objects of the CRD are stored.
    stored: BTreeSet<u8>,
    /// Reconciles in which they were migrated.
    migrated: u8,
    /// Number of reconciles after which a writer changes the shared ConfigMap, and those since it did.
    pub(super) writer: Option<(u8, u8)>,
    /// Changes of the writer, and our writes of its object.
    changes: usize,
    repairs: usize,
    budgets: WriteBudgets,
    /// The module whose turn it is to let shared objects leave.
    turn: Option<usize>,
}

/// True for a version with a default module CR.
pub(super) const fn has_default(at: usize, version: usize) -> bool {
    at == ALPHA && version < 3
}

/// Objects of a module's versions.
pub(super) fn versions(at: usize) -> Vec<Vec<(ObjectKey, Stage)>> {
    let crd = (definition(), Stage::Definitions);
    let own_namespace = (namespace(), Stage::Definitions);
    let shared = (key("Namespace", "kyma-system"), Stage::Definitions);
    let role = (key("ClusterRole", "r"), Stage::Configuration);
    let map = (map(), Stage::Configuration);
    let manager = (operator(), Stage::Workloads);
    let hook = (key("ValidatingWebhookConfiguration", "w"), Stage::Webhooks);
    let own = (key("Sample", "own"), Stage::CustomResources);
    let other_crd = (key("CustomResourceDefinition", "others.other.test"), Stage::Definitions);
    let extra = (key("Extra", "e"), Stage::Configuration);
    let of_beta = (key("ConfigMap", "b"), Stage::Configuration);
    if at == ALPHA {
        return vec![
            vec![shared.clone(), crd.clone(), own_namespace, role.clone(), map.clone(), manager.clone()],
            vec![crd.clone(), other_crd, role, manager.clone(), hook, own],
            vec![shared, crd, map.clone(), extra, manager.clone()],
            vec![map, manager],
        ];
    }
    vec![vec![crd, map.clone(), of_beta.clone()], vec![own_namespace, map, of_beta.clone()], vec![of_beta]]
}

/// Versions of the CRD in a version of a module, and the one in which objects are stored.
const fn crd_versions(at: usize, version: usize) -> (&'static [u8], u8) {
    match (at, version) {
        (ALPHA, 0) => (&[1], 1),
        (ALPHA, 2..) => (&[2], 2),
        _ => (&[1, 2], 2),
    }
}

impl World {
    pub(super) fn new() -> Self {
        Self {
            objects: [(key("ConfigMap", "theirs"), Object::new(Owner::Foreign))].into(),
            modules: Default::default(),
            user_crs: 0,
            default: None,
            has_lodgers: false,
            is_late: false,
            has_created: false,
            layer_is_available: true,
            serves_extra: true,
            permits: false,
            is_disputed: false,
            fault_in: None,
            crash_in: None,
            meanwhile: None,
            is_foreign_webhook_down: false,
            stored: BTreeSet::new(),
            migrated: 0,
            writer: None,
            changes: 0,
            repairs: 0,
            budgets: WriteBudgets::default(),
            turn: None,
        }
    }

    /// Selects a module.
    pub(super) fn list(&mut self, at: usize) {
        let module = &mut self.modules[at];
        if module.manifest.is_none() {
            module.manifests += 1;
            module.manifest = Some(StoredManifest {
                number: module.manifests,
                has_finalizers: false,
                is_deleting: false,
                is_unmanaged: false,
                default_created: false,
                inventory: Inventory::default(),
                version: 0,
            });
        }
    }

    /// Keys of the objects of modules.
    pub(super) fn ours(&self) -> Vec<ObjectKey> {
        let ours = self.objects.iter().filter(|(_, object)| object.owner != Owner::Foreign);
        ours.map(|(key, _)| key.clone()).collect()
    }

    pub(super) fn rendered(&self, at: usize, version: usize) -> Vec<RenderedObject> {
        let objects = versions(at).swap_remove(version).into_iter();
        let render = |(key, stage): (ObjectKey, Stage)| RenderedObject {
            served: self.serves_extra || key.kind != "Extra",
            version: "v1".into(),
            stage,
            body: json!({}),
            key,
        };
        objects.map(render).collect()
    }

    /// Fields of an object in a module.
    fn desired(&self, at: usize, key: &ObjectKey, version: usize) -> Fields {
        let mut desired = Fields::from([("common", 0), (name(at), version)]);
        if key.name == "m" {
            desired.insert("disputed", if self.is_disputed { at } else { 0 });
        }
        desired
    }

    /// True if this request fails.
    fn fails(&mut self) -> bool {
        let Some(left) = self.fault_in.as_mut() else { return false };
        let fails = *left == 0;
        self.fault_in = left.checked_sub(1);
        fails
    }

    /// Sharing of an object with the other module, by the inventory of its Manifest.
    fn sharing(&self, at: usize, key: &ObjectKey) -> Sharing {
        let others: Vec<_> =
            MODULES.into_iter().filter(|other| *other != at).filter_map(|other| self.manifest(other)).collect();
        let own = self.manifest(at).unwrap();
        Sharing::of(&own, &others, [key])
    }

    fn manifest(&self, at: usize) -> Option<Arc<Manifest>> {
        static TEMPLATES: LazyLock<[Manifest; 2]> = LazyLock::new(|| {
            MODULES.map(|at| {
                let manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
                    "metadata": {"name": name(at), "namespace": "kcp", "labels": {label::MODULE_NAME: name(at)}},
                    "spec": {"remote": true, "install": {"name": "i", "source": {}}}, "status": {"state": "Ready"}});
                serde_json::from_value(manifest).unwrap()
            })
        });
        let stored = self.modules[at].manifest.as_ref()?;
        let mut manifest = TEMPLATES[at].clone();
        if stored.is_deleting {
            manifest.metadata.deletion_timestamp =
                Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
        }
        if stored.is_unmanaged {
            manifest.metadata.annotations = Some([(annotation::UNMANAGED.to_owned(), "true".to_owned())].into());
        }
        manifest.status.as_mut().unwrap().synced = Some(stored.inventory.write().into());
        Some(Arc::new(manifest))
    }

    pub(super) fn reconcile(&mut self, at: usize) {
        if at == ALPHA {
            self.write_by_others();
        }
        self.run(at);
        self.turn = self.turn.filter(|turn| *turn != at);
    }

    fn run(&mut self, at: usize) {
        let Some(manifest) = self.modules[at].manifest.clone() else { return };
        let goal = match () {
            () if manifest.is_unmanaged => Goal::Release,
            () if manifest.is_deleting => Goal::Remove,
            () => Goal::Install,
        };
        let rendered = self.rendered(at, manifest.version);
        let is_pending = has_default(at, manifest.version) && (goal == Goal::Remove || !manifest.default_created);
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
        };
        self.has_created = false;
        self.is_late = false;
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
            self.interrupt(at);
            if !self.act(action, &mut facts, at) {
                return;
            }
            self.check();
        }
        let has_created = self.has_created;
        let Module { manifest: Some(stored), creators, .. } = &mut self.modules[at] else { return };
        stored.inventory = facts.remaining();
        stored.default_created |= has_default(at, stored.version)
            && facts.goal == Goal::Install
            && facts.default_object == DefaultObject::Done;
        if has_created {
            creators.push(stored.number);
        }
    }

    /// Lets something happen between two actions, once.
    fn interrupt(&mut self, at: usize) {
        match self.meanwhile.take() {
            Some((0, Meanwhile::UserCr)) if self.objects.contains_key(&definition()) => {
                self.user_crs += 1;
                self.is_late = true;
            }
            Some((0, Meanwhile::Lodge)) => self.has_lodgers |= self.objects.contains_key(&namespace()),
            Some((0, Meanwhile::Reconcile)) => {
                let before = self.clone();
                self.fault_in = None;
                self.crash_in = None;
                self.reconcile(1 - at);
                self.has_created = before.has_created;
                self.is_late = before.is_late;
                self.fault_in = before.fault_in;
                self.crash_in = before.crash_in;
            }
            Some((0, Meanwhile::UserCr)) | None => {}
            Some((left, meanwhile)) => self.meanwhile = Some((left - 1, meanwhile)),
        }
    }

    /// Carries out an action; false ends the reconcile, as a failed request to the store does.
    fn act(&mut self, action: Action<'_>, facts: &mut Facts<'_>, at: usize) -> bool {
        let Some(number) = self.modules[at].manifest.as_ref().map(|manifest| manifest.number) else { return false };
        match action {
            Action::AddFinalizers => {
                if self.fails() {
                    return false;
                }
                self.modules[at].manifest.iter_mut().for_each(|manifest| manifest.has_finalizers = true);
                facts.has_finalizers = true;
            }
            Action::FindInstallation => {
                let found = self.objects.get(&operator()).filter(|_| at == ALPHA);
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
                self.record(at, &inventory);
                facts.inventory = inventory;
            }
            Action::Apply(objects) => self.write_all(&objects, facts, at, number),
            Action::AwaitDefinitions { meanwhile, .. } => {
                self.write_all(&meanwhile, facts, at, number);
                facts.established = Some(!self.fails());
            }
            Action::CreateDefault => {
                // The kind may be gone with the CRD.
                let is_refused = self.fails() || self.refuses_crs() || !self.objects.contains_key(&definition());
                facts.default_object = if is_refused {
                    DefaultObject::Failed
                } else {
                    assert_eq!(facts.goal, Goal::Install, "a removal creates no default CR");
                    assert!(!self.modules[at].creators.contains(&number), "a Manifest created its default CR again");
                    self.has_created |= self.default.is_none();
                    self.default.get_or_insert_default();
                    DefaultObject::Done
                };
            }
            Action::Recover => {
                let is_found = !self.fails();
                if is_found {
                    let mut inventory = facts.inventory.clone();
                    let is_ours = |object: &Object| object.owner == Owner::Module(at);
                    for (key, _) in self.objects.iter().filter(|(_, object)| is_ours(object)) {
                        inventory.grow(key, "v1");
                    }
                    if inventory != facts.inventory && self.fails() {
                        return false;
                    }
                    self.record(at, &inventory);
                    facts.inventory = inventory;
                }
                facts.recovered = Some(is_found);
            }
            Action::FindBlockers => {
                let lists = self.lists_crs(at, &facts.inventory);
                let is_failed = self.fails();
                facts.blocked = Some(is_failed || lists && self.has_user_crs(&facts.inventory));
                if !is_failed && lists && self.default.is_some() {
                    facts.default_object = DefaultObject::Pending;
                }
            }
            Action::DeleteDefault => {
                assert!(self.user_crs == 0 || self.is_late, "the default CR goes after the user's");
                let has_failed = self.fails() || self.refuses_crs();
                facts.default_object = match has_failed {
                    _ if self.default.is_none() => DefaultObject::Done,
                    true => DefaultObject::Failed,
                    false if self.delete_default() => DefaultObject::Done,
                    false => DefaultObject::Terminating,
                };
            }
            Action::Prune(keys) | Action::Delete(keys) | Action::Unlabel(keys) if !self.takes_turn(at, &keys) => {
                return false;
            }
            Action::Prune(keys) => {
                for key in keys {
                    let seen = if self.fails() { Seen::Failed } else { self.part(&key, at, facts, true) };
                    facts.seen.insert(key, seen);
                }
            }
            Action::Delete(keys) => {
                for key in keys {
                    let seen = if self.fails() { Seen::Failed } else { self.part(&key, at, facts, false) };
                    facts.seen.insert(key, seen);
                }
            }
            Action::Unlabel(keys) => {
                for key in keys {
                    let seen = if self.fails() { Seen::Failed } else { self.release(&key, at) };
                    facts.seen.insert(key, seen);
                }
            }
            Action::Leave => {
                if !self.fails() {
                    self.modules[at].manifest = None;
                }
                return false;
            }
            Action::End => return false,
        }
        true
    }

    /// Takes the turn to let shared objects leave. False if the reconcile has to wait, until its time is over.
    fn takes_turn(&mut self, at: usize, keys: &[ObjectKey]) -> bool {
        if keys.iter().any(|key| self.sharing(at, key).is_shared(key)) {
            return *self.turn.get_or_insert(at) == at;
        }
        true
    }

    fn record(&mut self, at: usize, inventory: &Inventory) {
        self.modules[at].manifest.iter_mut().for_each(|manifest| manifest.inventory = inventory.clone());
    }

    /// True if a removal looks for CRs: the kind is that of the default CR, or its CRD goes with the module.
    fn lists_crs(&self, at: usize, inventory: &Inventory) -> bool {
        let definition = definition();
        let Some(live) = self.objects.get(&definition) else { return false };
        let is_owned = matches!(live.owner, Owner::Foreign) || live.owner == Owner::Module(at);
        let goes = inventory.contains(&definition) && is_owned && !self.sharing(at, &definition).is_shared(&definition);
        let stored = self.modules[at].manifest.as_ref().unwrap();
        goes || has_default(at, stored.version) || stored.default_created
    }

    /// True if there are CRs that neither the module has brought, nor a marker keeps.
    fn has_user_crs(&self, inventory: &Inventory) -> bool {
        let own = key("Sample", "own");
        let is_users = !inventory.contains(&own) && self.objects.get(&own).is_some_and(|own| !own.is_marked);
        self.user_crs > 0 || is_users
    }

    fn write_all(&mut self, objects: &[&RenderedObject], facts: &mut Facts<'_>, at: usize, number: u32) {
        for object in objects {
            let seen = if self.fails() { Seen::Failed } else { self.write(&object.key, at, number) };
            facts.seen.insert(object.key.clone(), seen);
        }
    }

    fn write(&mut self, key: &ObjectKey, at: usize, number: u32) -> Seen {
        let version = self.modules[at].manifest.as_ref().unwrap().version;
        let desired = self.desired(at, key, version);
        let sharing = self.sharing(at, key);
        if self.is_refused(key) {
            return Seen::Failed;
        }
        let found = self.objects.get(key).cloned().unwrap_or_else(|| Object::new(Owner::Foreign));
        let claim = sharing.claim(key, &found.live());
        let joined = Manager::Joined(at);
        if claim == Claim::Yield || claim != Claim::Own && found.conflicts(joined, &desired) {
            return Seen::Current;
        }
        if claim == Claim::Own && *key == definition() && !self.migrates(at, version) {
            return Seen::Migrating;
        }
        if found.differs(&desired) && self.writer.is_some() {
            let kyma = KymaKey::new("ns", "k");
            let budget = self.budgets.of(&kyma, Component::Module, &key.to_string(), (at, number, version));
            if !budget.may_write() {
                return Seen::Failed;
            }
            budget.wrote();
            self.repairs += usize::from(at == ALPHA && *key == map());
        }
        let object = self.objects.entry(key.clone()).or_insert(found);
        if claim == Claim::Own {
            object.owner = Owner::Module(at);
            object.apply(Manager::Owner, &desired);
            object.apply(joined, &Fields::new());
        } else {
            object.apply(joined, &desired);
        }
        Seen::Current
    }

    /// Goes on with the migration that the CRD of a version needs. Returns true once it needs none.
    fn migrates(&mut self, at: usize, version: usize) -> bool {
        let (served, storage) = crd_versions(at, version);
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
        if let Some(map) = self.objects.get_mut(&map()) {
            map.overwrite(name(ALPHA), usize::MAX);
            self.changes += 1;
        }
    }

    /// Deletes the default module CR. Returns true if it is gone.
    pub(super) fn delete_default(&mut self) -> bool {
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
        let hook = key("ValidatingWebhookConfiguration", "w");
        let is_own_down = self.objects.contains_key(&hook) && !self.objects.contains_key(&operator());
        self.is_foreign_webhook_down || is_own_down
    }

    /// True if CRs are being deleted, and no operator lets them go.
    pub(super) fn hangs(&self) -> bool {
        let is_cr = |(key, object): (&ObjectKey, &Object)| key.kind == "Sample" && object.is_terminating;
        let has_terminating =
            self.default.is_some_and(|default| default.is_terminating) || self.objects.iter().any(is_cr);
        has_terminating && !self.has_working_operator()
    }

    fn has_working_operator(&self) -> bool {
        self.objects.get(&operator()).is_some_and(|operator| operator.value(name(ALPHA)) != Some(HANGING))
    }

    /// The operator removes its finalizers from CRs that are being deleted.
    pub(super) fn operate(&mut self) {
        if self.has_working_operator() {
            self.default = self.default.filter(|default| !default.is_terminating);
            self.objects.retain(|key, object| key.kind != "Sample" || !object.is_terminating);
        }
    }

    /// Lets an object leave, as long as nothing of a user goes with it.
    fn part(&mut self, key: &ObjectKey, at: usize, facts: &Facts<'_>, is_prune: bool) -> Seen {
        let sharing = self.sharing(at, key);
        let content = self.has_content(key, facts, is_prune);
        let is_refused = self.is_refused(key);
        let Some(object) = self.objects.get_mut(key) else { return Seen::Absent };
        match sharing.parting(key, &object.live()) {
            Parting::Withdraw if !object.has_joined(at) => {}
            _ if is_refused => return Seen::Failed,
            Parting::Withdraw => object.apply(Manager::Joined(at), &Fields::new()),
            Parting::HandOver(_) => {
                object.owner = Owner::Module(1 - at);
                object.apply(Manager::Joined(at), &Fields::new());
            }
            Parting::Delete if object.is_marked => {
                // The fields that it has added stay.
                self.modules[at].was_released |= object.has_joined(at);
                object.owner = Owner::Foreign;
            }
            Parting::Delete if object.is_terminating => return Seen::Terminating,
            Parting::Delete if content && is_prune => return Seen::Kept,
            Parting::Delete if content => object.owner = Owner::Foreign,
            Parting::Delete if object.is_held => {
                object.is_terminating = true;
                return Seen::Terminating;
            }
            Parting::Delete => self.remove(key),
        }
        Seen::Absent
    }

    fn release(&mut self, key: &ObjectKey, at: usize) -> Seen {
        let sharing = self.sharing(at, key);
        let Some(object) = self.objects.get_mut(key) else { return Seen::Absent };
        // The fields that it has added stay.
        self.modules[at].was_released |= object.has_joined(at);
        match sharing.parting(key, &object.live()) {
            Parting::Withdraw => {}
            Parting::HandOver(_) => object.owner = Owner::Module(1 - at),
            Parting::Delete => {
                object.owner = Owner::Foreign;
                return Seen::Current;
            }
        }
        Seen::Absent
    }

    fn has_content(&self, container: &ObjectKey, facts: &Facts<'_>, is_prune: bool) -> bool {
        if *container == namespace() {
            return self.has_lodgers;
        }
        let own = key("Sample", "own");
        let is_rendered = facts.rendered.is_some_and(|rendered| rendered.iter().any(|object| object.key == own));
        let leaves = facts.inventory.contains(&own) && !(is_rendered && is_prune);
        let has_own = self.objects.get(&own).is_some_and(|own| own.is_marked || !leaves);
        *container == definition() && (self.user_crs > 0 || self.default.is_some() || has_own)
    }

    /// Removes an object without finalizers, with all that goes with it.
    fn remove(&mut self, key: &ObjectKey) {
        if *key == definition() {
            assert_eq!((self.user_crs, self.default), (0, None), "resources of users were deleted");
        }
        self.end(key);
        assert!(*key != namespace() || !self.has_lodgers, "objects of users were deleted");
    }

    fn end(&mut self, key: &ObjectKey) {
        self.objects.remove(key);
        if *key == definition() {
            self.stored.clear();
        }
    }

    /// Removes an object that a user deletes, or whose finalizers are gone, with all that goes with it.
    pub(super) fn end_with_content(&mut self, key: &ObjectKey) {
        self.end(key);
        if *key == definition() {
            self.user_crs = 0;
            self.default = None;
            self.objects.retain(|key, _| key.kind != "Sample");
        }
        self.has_lodgers &= *key != namespace();
    }

    /// Invariants after each action.
    pub(super) fn check(&self) {
        assert!(self.objects.contains_key(&key("ConfigMap", "theirs")), "an object of others was deleted");
        for (key, object) in &self.objects {
            let Owner::Module(at) = object.owner else { continue };
            if key.is_common() {
                continue;
            }
            let Some(manifest) = &self.modules[at].manifest else { panic!("{key} is left without a Manifest") };
            let is_recorded = manifest.inventory.contains(key);
            assert!(is_recorded || self.modules[at].is_restored, "{key} of {} is not in the inventory", name(at));
        }
    }

    /// Reconciles for some minutes while a writer changes an object back as fast as it does: either it is repaired each
    /// time, or ever more seldom.
    pub(super) async fn contend(&mut self) {
        self.changes = 0;
        self.repairs = 0;
        for _ in 0..300 {
            MODULES.into_iter().for_each(|at| self.reconcile(at));
            advance(SOON).await;
        }
        // Once more for the change before, and when the owner of the object changes; five in a minute, until that is not enough.
        assert!(self.repairs <= self.changes + 3 && self.repairs <= 26, "{} of {}", self.repairs, self.changes);
    }

    /// Ends all faults, and reconciles until nothing changes.
    pub(super) async fn settle(&mut self) {
        self.is_foreign_webhook_down = false;
        self.writer = None;
        self.layer_is_available = true;
        self.serves_extra = true;
        self.permits = true;
        for (key, object) in &mut self.objects {
            object.is_held &= key.kind == "Sample";
        }
        let is_gone = |(key, object): &(&ObjectKey, &Object)| key.kind != "Sample" && object.is_terminating;
        let gone: Vec<_> = self.objects.iter().filter(is_gone).map(|(key, _)| key.clone()).collect();
        gone.iter().for_each(|key| self.end_with_content(key));
        for _ in 0..MAX_RECONCILES {
            advance(LATER).await;
            self.round();
        }
        self.check();
        let settled = self.objects.clone();
        for at in MODULES {
            self.reconcile(at);
            assert_eq!(self.objects, settled, "two modules revert each other");
        }
    }

    fn round(&mut self) {
        MODULES.into_iter().for_each(|at| self.reconcile(at));
        self.operate();
    }
}
