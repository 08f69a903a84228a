//! Random histories: whatever KCP, a user, failing calls, crashes, other receivers and restarts do, what a runtime has in the end is
//! what a naive reading of the rules says; no write makes a channel point to a template that is not there; and nothing is written
//! of a module whose removal is held.

use std::time::Duration;

use proptest::{collection::vec, option, prelude::*, sample::select};
use tidewatch_shared::names::annotation;

use super::{
    fake::{Fake, Fault, Heard, Told},
    *,
};

const MODULES: [&str; 2] = ["open", "open-extra"];
const VERSIONS: [&str; 3] = ["1.0.0", "2.0.0", "3.0.0"];
const CHANNELS: [&str; 2] = ["fast", "regular"];
const BETA: &str = "operator.kyma-project.io/beta";
const INTERNAL: &str = "operator.kyma-project.io/internal";

/// Whom a release meta is for. The second module is restricted.
#[derive(Clone, Copy, Debug)]
enum Audience {
    Plain,
    Team,
    Empty,
    Malformed,
    Mandatory,
}

#[derive(Clone, Debug)]
enum Step {
    Template {
        module: usize,
        version: usize,
        label: Option<&'static str>,
        mandatory: bool,
        text: u8,
    },
    NoTemplate {
        module: usize,
        version: usize,
    },
    Meta {
        module: usize,
        channels: Vec<(usize, usize)>,
        audience: Audience,
    },
    NoMeta {
        module: usize,
    },
    Labels {
        beta: bool,
        internal: bool,
        team: bool,
    },
    /// The user writes to the nth object of the runtime, which the agent tells.
    Tamper {
        at: usize,
        told: bool,
    },
    /// The user deletes a template, or the release meta.
    Delete {
        object: Which,
        told: bool,
    },
    /// The user has a template of his own.
    Own,
    Sync {
        faults: Vec<Fault>,
    },
    Restart,
    /// The inventory is taken away; perhaps from a process that remembers it.
    LoseInventory {
        restart: bool,
    },
    /// Somebody else writes to the inventory.
    TouchInventory,
    Refuse {
        what: Refused,
        refused: bool,
    },
    /// Another process goes on, with what is written down in KCP. The one before has not noticed, and knows KCP as it is now.
    HandOver,
    /// A pass, and beside it one of another process: of one that has just begun, or else of the one before.
    Beside {
        fresh: bool,
        seed: u64,
    },
    /// Somebody confirms the removal that is held.
    Confirm,
}

/// An object of a module.
#[derive(Clone, Copy, Debug)]
struct Which {
    module: usize,
    /// Of a template; without it, the release meta.
    version: Option<usize>,
}

impl Which {
    fn id(self) -> String {
        match self.version {
            Some(version) => format!("moduletemplates/{}", name(self.module, version)),
            None => format!("modulereleasemetas/{}", MODULES[self.module]),
        }
    }
}

/// What a runtime refuses.
#[derive(Clone, Copy, Debug)]
enum Refused {
    /// All writes of an object.
    Object(Which),
    /// That it is deleted.
    Delete(Which),
    /// All writes of the inventory.
    Inventory,
}

impl Refused {
    fn id(self) -> String {
        match self {
            Self::Object(object) => object.id(),
            Self::Delete(object) => format!("delete {}", object.id()),
            Self::Inventory => "configmaps".to_owned(),
        }
    }
}

fn fault() -> impl Strategy<Value = Fault> {
    let lands = prop_oneof![3 => Just(None), 3 => Just(Some(0)), 1 => (1..8_usize).prop_map(Some)];
    let heard = prop_oneof![2 => Just(Heard::Unavailable), 1 => Just(Heard::Nothing)];
    (0..10_usize, lands, heard).prop_map(|(after, lands, heard)| Fault { after, lands, heard })
}

fn step() -> impl Strategy<Value = Step> {
    let (module, version) = (0..MODULES.len(), 0..VERSIONS.len());
    let label = prop_oneof![3 => Just(None), 1 => Just(Some(BETA)), 1 => Just(Some(INTERNAL))];
    let audience = prop_oneof![
        3 => Just(Audience::Plain),
        3 => Just(Audience::Team),
        1 => Just(Audience::Empty),
        1 => Just(Audience::Malformed),
        1 => Just(Audience::Mandatory)
    ];
    let channels = vec((0..CHANNELS.len(), version.clone()), 0..4);
    let at = (module.clone(), version.clone());
    let which = (module.clone(), option::weighted(0.6, version.clone()));
    let which = which.prop_map(|(module, version)| Which { module, version });
    let refused = prop_oneof![
        3 => which.clone().prop_map(Refused::Object),
        1 => which.clone().prop_map(Refused::Delete),
        1 => Just(Refused::Inventory)
    ];
    let faults = prop_oneof![1 => Just(Vec::new()), 1 => vec(fault(), 1..4)];
    prop_oneof![
        6 => (at.clone(), label, prop::bool::weighted(0.1), 0..3_u8).prop_map(|((module, version), label, mandatory, text)| {
            Step::Template { module, version, label, mandatory, text }
        }),
        2 => at.clone().prop_map(|(module, version)| Step::NoTemplate { module, version }),
        6 => (module.clone(), channels, audience)
            .prop_map(|(module, channels, audience)| Step::Meta { module, channels, audience }),
        1 => module.clone().prop_map(|module| Step::NoMeta { module }),
        2 => any::<[bool; 3]>().prop_map(|[beta, internal, team]| Step::Labels { beta, internal, team }),
        2 => (0..8_usize, any::<bool>()).prop_map(|(at, told)| Step::Tamper { at, told }),
        2 => (which, prop::bool::weighted(0.8)).prop_map(|(object, told)| Step::Delete { object, told }),
        1 => Just(Step::Own),
        16 => faults.prop_map(|faults| Step::Sync { faults }),
        1 => Just(Step::Restart),
        1 => any::<bool>().prop_map(|restart| Step::LoseInventory { restart }),
        1 => Just(Step::TouchInventory),
        2 => (refused, select(vec![true, false])).prop_map(|(what, refused)| Step::Refuse { what, refused }),
        1 => Just(Step::HandOver),
        2 => (any::<bool>(), any::<u64>()).prop_map(|(fresh, seed)| Step::Beside { fresh, seed }),
        1 => Just(Step::Confirm),
    ]
}

/// What KCP has, as the naive reading sees it.
#[derive(Default)]
struct World {
    templates: BTreeMap<(usize, usize), (Option<&'static str>, bool, u8)>,
    metas: BTreeMap<usize, (BTreeMap<usize, usize>, Audience)>,
    labels: BTreeMap<String, String>,
}

impl World {
    fn has(&self, label: &str) -> bool {
        self.labels.contains_key(label)
    }

    fn sees(&self, module: usize, version: usize) -> bool {
        let template = self.templates.get(&(module, version));
        template.is_some_and(|(label, mandatory, _)| !mandatory && label.is_none_or(|label| self.has(label)))
    }

    /// By id: the text of a template, the channels of a release meta.
    fn expected(&self) -> BTreeMap<String, Value> {
        let mut expected = BTreeMap::new();
        for (module, (channels, audience)) in &self.metas {
            let admitted = match (audience, *module == 1) {
                (Audience::Mandatory, _) => false,
                (Audience::Plain, restricted) => !restricted,
                (Audience::Team, restricted) => restricted && self.has("team"),
                (Audience::Empty | Audience::Malformed, _) => false,
            };
            let visible: BTreeMap<_, _> = channels
                .iter()
                .filter(|(_, version)| self.sees(*module, **version))
                .map(|(channel, version)| (CHANNELS[*channel], VERSIONS[*version]))
                .collect();
            if !admitted || visible.is_empty() {
                continue;
            }
            expected.insert(format!("modulereleasemetas/{}", MODULES[*module]), json!(visible));
            for ((of, version), (_, _, text)) in &self.templates {
                if of == module && self.sees(*of, *version) {
                    expected.insert(format!("moduletemplates/{}", name(*of, *version)), json!(text));
                }
            }
        }
        expected
    }
}

fn name(module: usize, version: usize) -> String {
    format!("{}-{}", MODULES[module], VERSIONS[version])
}

/// The same of what is there, less the user's own.
fn found(runtime: &Fake) -> BTreeMap<String, Value> {
    let objects = runtime.objects().into_iter().filter(|(id, _)| id != "moduletemplates/own-1.0.0");
    let essence = |object: &Value| match object["spec"]["channels"].as_array() {
        Some(channels) => {
            let pair = |entry: &Value| (entry["channel"].as_str().unwrap().to_owned(), entry["version"].clone());
            Value::Object(channels.iter().map(pair).collect())
        }
        None => object["spec"]["descriptor"]["text"].clone(),
    };
    objects.map(|(id, object)| (id, essence(&object))).collect()
}

struct Play {
    bed: Bed,
    world: World,
    /// What KCP's ConfigMap of releases holds.
    releases: BTreeMap<String, String>,
    /// The process before this one.
    old: Option<Catalog>,
    /// The agent has not told all that was done.
    untold: bool,
    /// One that knew another KCP was at work, or a call of one that had died.
    stale: bool,
}

fn restricted() -> BTreeSet<String> {
    BTreeSet::from([MODULES[1].to_owned()])
}

fn drift(told: &BTreeMap<String, Told>) -> Drift {
    let mut drift = Drift::None;
    for (id, Told { uid, resource_version, change }) in told {
        let (resource, name) = id.split_once('/').unwrap();
        drift.merge(Drift::of(told_of(resource, name, uid, resource_version, *change)));
    }
    drift
}

impl Play {
    /// With so many Kymas without labels beside this one.
    fn new(kymas: usize) -> Self {
        let mut bed = Bed::empty(restricted());
        bed.kymas(kymas);
        bed.runtime.watch(true);
        Self { bed, world: World::default(), releases: BTreeMap::new(), old: None, untold: false, stale: false }
    }

    async fn sync(&self, drift: Drift) -> Result<Synced, SyncError> {
        let Bed { catalog, key, runtime, stores, .. } = &self.bed;
        catalog.sync(key, &runtime.client(), &self.world.labels, stores, &drift).await
    }

    /// Another process, which knows what is written down in KCP.
    fn another(&mut self) -> Catalog {
        self.note_releases();
        let another =
            Catalog::new(Settings { restricted_modules: restricted(), ..Settings::default() }, Metrics::default());
        another.take_releases(Some(&ConfigMap { data: Some(self.releases.clone()), ..ConfigMap::default() }));
        another
    }

    fn note_releases(&mut self) {
        drop(self.bed.catalog.snapshot(&self.bed.stores));
        if let Some(releases) = self.bed.catalog.unwritten_releases() {
            self.releases = releases;
        }
    }

    fn confirm(&mut self) {
        self.note_releases();
        let Some(held) = self.bed.catalog.held() else { return };
        let mut map = ConfigMap { data: Some(self.releases.clone()), ..ConfigMap::default() };
        map.metadata.annotations = Some(BTreeMap::from([(annotation::CONFIRM.to_owned(), held.change)]));
        self.bed.catalog.take_releases(Some(&map));
        assert_eq!(self.bed.catalog.renew(&self.bed.stores).held, None);
        assert_eq!(self.bed.catalog.held(), None);
    }

    fn template(&mut self, module: usize, version: usize, label: Option<&'static str>, mandatory: bool, text: u8) {
        self.world.templates.insert((module, version), (label, mandatory, text));
        let labels: BTreeMap<_, _> = label.into_iter().map(|label| (label, "true")).collect();
        let template = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": name(module, version), "namespace": "kcp-system", "labels": labels},
            "spec": {"moduleName": MODULES[module], "version": VERSIONS[version], "mandatory": mandatory,
                     "descriptor": {"text": text}}}));
        self.bed.templates.apply_watcher_event(&Event::Apply(template));
        drop(self.bed.catalog.renew(&self.bed.stores));
    }

    fn meta(&mut self, module: usize, channels: &[(usize, usize)], audience: Audience) {
        let channels: BTreeMap<_, _> = channels.iter().copied().collect();
        let entries: Vec<_> = channels
            .iter()
            .map(|(channel, version)| json!({"channel": CHANNELS[*channel], "version": VERSIONS[*version]}))
            .collect();
        let mut spec = json!({"moduleName": MODULES[module], "channels": entries});
        match audience {
            Audience::Plain => {}
            Audience::Team => spec["kymaSelector"] = json!({"matchLabels": {"team": "true"}}),
            Audience::Empty => spec["kymaSelector"] = json!({}),
            Audience::Malformed => {
                spec["kymaSelector"] = json!({"matchExpressions": [{"key": "team", "operator": "Like"}]});
            }
            Audience::Mandatory => spec["mandatory"] = json!({"version": "1.0.0"}),
        }
        self.world.metas.insert(module, (channels, audience));
        let meta = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": MODULES[module], "namespace": "kcp-system"}, "spec": spec}));
        self.bed.metas.apply_watcher_event(&Event::Apply(meta));
        drop(self.bed.catalog.renew(&self.bed.stores));
    }

    async fn step(&mut self, step: Step) {
        let runtime = self.bed.runtime.clone();
        match step {
            Step::Template { module, version, label, mandatory, text } => {
                self.template(module, version, label, mandatory, text);
            }
            Step::NoTemplate { module, version } => {
                if self.world.templates.remove(&(module, version)).is_some() {
                    self.bed.delete_template(&name(module, version));
                }
            }
            Step::Meta { module, channels, audience } => self.meta(module, &channels, audience),
            Step::NoMeta { module } => {
                if self.world.metas.remove(&module).is_some() {
                    drop(self.bed.delete_meta(MODULES[module]));
                }
            }
            Step::Labels { beta, internal, team } => {
                let labels = [(BETA, beta), (INTERNAL, internal), ("team", team)];
                let set = labels.into_iter().filter(|(_, set)| *set);
                self.world.labels = set.map(|(label, _)| (label.to_owned(), "true".to_owned())).collect();
            }
            Step::Tamper { at, told } => {
                let Some(id) = runtime.ids().into_iter().nth(at) else { return };
                let tampered = |object: &mut Value| object["metadata"]["labels"]["tampered"] = json!("true");
                self.by_user(told, |runtime| runtime.edit(&id, tampered));
            }
            Step::Delete { object, told } => self.by_user(told, |runtime| runtime.remove(&object.id())),
            Step::Own => runtime.edit("moduletemplates/own-1.0.0", |object| object["spec"] = json!({"own": true})),
            Step::Sync { faults } => self.try_sync(&faults).await,
            Step::Restart => self.bed.catalog.forget(&self.bed.key),
            Step::LoseInventory { restart } => {
                runtime.remove("configmaps/tidewatch-catalog");
                match restart {
                    true => self.bed.catalog.forget(&self.bed.key),
                    false => self.untold = true,
                }
            }
            Step::TouchInventory if runtime.object("configmaps/tidewatch-catalog").is_some() => {
                let touch = |map: &mut Value| {
                    map["metadata"]["annotations"] = json!({"at": map["metadata"]["resourceVersion"]})
                };
                runtime.edit("configmaps/tidewatch-catalog", touch);
            }
            Step::TouchInventory => {}
            Step::Refuse { what, refused } => runtime.refuse(&what.id(), refused),
            Step::HandOver => {
                let next = self.another();
                self.old = Some(std::mem::replace(&mut self.bed.catalog, next));
            }
            Step::Beside { fresh, seed } => self.beside(fresh, seed).await,
            Step::Confirm => self.confirm(),
        }
    }

    fn by_user(&mut self, told: bool, deed: impl FnOnce(&Fake)) {
        match told {
            true => deed(&self.bed.runtime),
            false => {
                self.untold = true;
                self.bed.runtime.unheard(deed);
            }
        }
    }

    /// What was told and is not acted on is told again, as agents do; so is what a pass wrote that never came to its end, since
    /// nothing of it is settled. That is what mends an inventory that a crash left behind.
    async fn try_sync(&mut self, faults: &[Fault]) {
        let runtime = self.bed.runtime.clone();
        drop(self.bed.catalog.snapshot(&self.bed.stores));
        let held = self.bed.catalog.held().map(|held| held.modules).unwrap_or_default();
        let told = runtime.changes();
        runtime.hears(&told);
        runtime.calls();
        runtime.faults(faults);
        self.stale |= faults.iter().any(|fault| fault.lands.is_some_and(|after| after > 0));
        let ended = tokio::time::timeout(Duration::from_secs(3_600), self.sync(drift(&told))).await;
        let died = runtime.faults(&[]);
        for call in runtime.calls() {
            let (verb, id) = call.split_once(' ').unwrap();
            let id = desired::ObjectId::parse(id).filter(|_| !matches!(verb, "get" | "list"));
            let is_held = id.is_some_and(|id| held.iter().any(|module| id.is_of(module)));
            assert!(!is_held, "{call}, but {held:?} are held");
        }
        if died || ended.is_err() {
            self.bed.catalog.forget(&self.bed.key);
        } else if let Ok(Ok(_)) = ended {
            runtime.settle(&told);
        }
    }

    /// Two that began with the same do each what the other does. One that knows an older KCP, or a runtime that is not any more, may
    /// do anything, and what it did is mended.
    async fn beside(&mut self, fresh: bool, seed: u64) {
        let another = match fresh {
            true => self.another(),
            false => match self.old.take() {
                Some(old) => old,
                None => return,
            },
        };
        let told = self.bed.runtime.changes();
        self.bed.runtime.hears(&told);
        self.bed.runtime.watch(fresh);
        let Bed { catalog, key, runtime, stores, .. } = &self.bed;
        let (drift, labels) = (drift(&told), &self.world.labels);
        let (ours, theirs) = (runtime.slow_client(seed), runtime.slow_client(!seed));
        let (ours, theirs) =
            (catalog.sync(key, &ours, labels, stores, &drift), another.sync(key, &theirs, labels, stores, &drift));
        let (ours, _) = tokio::join!(ours, theirs);
        self.bed.runtime.watch(true);
        self.stale |= !fresh;
        if ours.is_ok() {
            self.bed.runtime.settle(&told);
        }
        self.old = Some(another);
    }

    async fn rest(&mut self) {
        let runtime = self.bed.runtime.clone();
        runtime.refuse_nothing();
        runtime.land_all();
        self.confirm();
        // The first ones may find that another one wrote the inventory, and the last ones hear of themselves.
        for _ in 0..5 {
            self.try_sync(&[]).await;
        }
        if self.untold {
            self.sync(Drift::All).await.unwrap();
            self.try_sync(&[]).await;
        }
        assert_eq!(runtime.changes(), BTreeMap::new(), "all is settled");
        let tampered = |object: &Value| object["metadata"]["labels"].get("tampered").is_some();
        let left: Vec<_> = runtime.objects().into_iter().filter(|(_, object)| tampered(object)).collect();
        assert!(left.iter().all(|(id, _)| id == "moduletemplates/own-1.0.0"), "{left:?}");
        assert_eq!(found(&runtime), self.world.expected());
        self.is_written_down();
        runtime.calls();
        runtime.inventory_calls();
        self.sync(Drift::None).await.unwrap();
        assert!(runtime.calls().is_empty() && runtime.inventory_calls().is_empty(), "it is not at rest");
    }
}

impl Play {
    /// The inventory tells what is ours. One that knew another KCP, or that had died, may have noted what it was about to do, as what
    /// is to be read: that costs reads, and misleads nobody.
    fn is_written_down(&self) {
        let lines = self.bed.runtime.inventory();
        let of = |line: &String| line.split(' ').next().unwrap().to_owned();
        let all: BTreeSet<_> = lines.iter().map(of).collect();
        let claimed: BTreeSet<_> = lines.iter().filter(|line| line.split(' ').nth(1) != Some("-")).map(of).collect();
        let ours = self.world.expected().into_keys().collect();
        match self.stale {
            true => assert!(claimed.is_subset(&ours) && ours.is_subset(&all), "{lines:?}, and ours are {ours:?}"),
            false => assert_eq!((&claimed, &all), (&ours, &ours), "the inventory tells what is ours"),
        }
    }
}

/// A history that was found once: the release meta goes with its only template, the receiver dies over it, and before it is back
/// both are wanted as the inventory has them.
#[tokio::test(start_paused = true)]
async fn what_a_dead_pass_deleted_comes_back_when_it_is_wanted_again() {
    let template = |label| Step::Template { module: 0, version: 2, label, mandatory: false, text: 0 };
    let mut play = Play::new(0);
    for step in [
        template(None),
        Step::Meta { module: 0, channels: vec![(0, 2)], audience: Audience::Plain },
        Step::Sync { faults: Vec::new() },
        template(Some(BETA)),
        Step::Sync { faults: vec![Fault { after: 1, lands: None, heard: Heard::Nothing }] },
        template(None),
    ] {
        play.step(step).await;
    }
    assert_eq!(play.bed.runtime.ids(), ["moduletemplates/open-3.0.0"]);
    play.rest().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn what_a_runtime_has_is_what_the_rules_say(kymas in prop_oneof![2 => Just(0_usize), 1 => Just(5)], steps in vec(step(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async move {
            let mut play = Play::new(kymas);
            for step in steps {
                play.step(step).await;
            }
            play.rest().await;
        });
    }
}
