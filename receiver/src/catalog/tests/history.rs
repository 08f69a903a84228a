//! Random histories: whatever KCP, a user, crashes and restarts do, what a runtime has in the end is what a naive reading of the
//! rules says; and at no time does a channel point to a template that is not there.

use std::time::Duration;

use proptest::{collection::vec, option, prelude::*, sample::select};

use super::{
    fake::{Crash, Fake},
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
    /// The user deletes the release meta.
    Delete {
        module: usize,
    },
    /// The user has a template of his own.
    Own,
    Sync {
        crash: Option<(usize, bool)>,
    },
    Restart,
    LoseInventory,
    Refuse {
        module: usize,
        version: usize,
        refused: bool,
    },
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
        1 => module.prop_map(|module| Step::Delete { module }),
        1 => Just(Step::Own),
        10 => option::weighted(0.4, (0..12_usize, any::<bool>())).prop_map(|crash| Step::Sync { crash }),
        1 => Just(Step::Restart),
        1 => Just(Step::LoseInventory),
        1 => (at, select(vec![true, false]))
            .prop_map(|((module, version), refused)| Step::Refuse { module, version, refused }),
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

fn no_channel_points_to_nothing(objects: &BTreeMap<String, Value>) {
    for (id, object) in objects {
        let Some(module) = id.strip_prefix("modulereleasemetas/") else { continue };
        for entry in object["spec"]["channels"].as_array().into_iter().flatten() {
            let template = format!("moduletemplates/{module}-{}", entry["version"].as_str().unwrap());
            assert!(objects.contains_key(&template), "{id} points to {template}: {:?}", objects.keys());
        }
    }
}

struct Play {
    bed: Bed,
    world: World,
    told: Drift,
}

impl Play {
    fn new() -> Self {
        let bed = Bed::empty(BTreeSet::from([MODULES[1].to_owned()]));
        bed.runtime.always(no_channel_points_to_nothing);
        Self { bed, world: World::default(), told: Drift::None }
    }

    async fn sync(&mut self, drift: Drift) -> Result<Synced, SyncError> {
        let Bed { catalog, key, runtime, stores, .. } = &self.bed;
        catalog.sync(key, &runtime.client(), &self.world.labels, stores, &drift).await
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
                runtime.edit(&id, |object| object["metadata"]["labels"]["tampered"] = json!("true"));
                self.told.merge(if told { self.bed.event(&id, Change::Metadata) } else { Drift::None });
            }
            Step::Delete { module } => {
                let id = format!("modulereleasemetas/{}", MODULES[module]);
                runtime.remove(&id);
                self.told.merge(self.bed.event(&id, Change::Deleted));
            }
            Step::Own => runtime.edit("moduletemplates/own-1.0.0", |object| object["spec"] = json!({"own": true})),
            Step::Sync { crash } => self.try_sync(crash.map(|(after, lands)| Crash { after, lands })).await,
            Step::Restart => self.bed.catalog.forget(&self.bed.key),
            Step::LoseInventory => {
                runtime.remove("configmaps/tidewatch-catalog");
                self.bed.catalog.forget(&self.bed.key);
            }
            Step::Refuse { module, version, refused } => {
                runtime.refuse(&format!("moduletemplates/{}", name(module, version)), refused);
            }
        }
    }

    /// What was told and is not acted on is told again, as agents do; so is what a pass wrote that never came to its end, since
    /// nothing of it is settled. That is what mends an inventory that a crash left behind.
    async fn try_sync(&mut self, crash: Option<Crash>) {
        let before = self.bed.runtime.objects();
        self.bed.runtime.crash(crash);
        let drift = self.told.clone();
        let ended = tokio::time::timeout(Duration::from_secs(3_600), self.sync(drift)).await;
        self.bed.runtime.crash(None);
        match ended {
            Ok(Ok(_)) => self.told = Drift::None,
            Ok(Err(_)) => {}
            Err(_) => {
                self.bed.catalog.forget(&self.bed.key);
                self.tell_since(&before);
            }
        }
    }

    /// The agent tells what is other than before.
    fn tell_since(&mut self, before: &BTreeMap<String, Value>) {
        let now = self.bed.runtime.objects();
        for id in before.keys().chain(now.keys()).filter(|id| before.get(*id) != now.get(*id)) {
            let change = if now.contains_key(id) { Change::Spec } else { Change::Deleted };
            self.told.merge(self.bed.event(id, change));
        }
    }

    async fn rest(&mut self, untold: bool) {
        for (module, version) in (0..MODULES.len()).flat_map(|module| (0..VERSIONS.len()).map(move |at| (module, at))) {
            self.bed.runtime.refuse(&format!("moduletemplates/{}", name(module, version)), false);
        }
        for _ in 0..3 {
            self.try_sync(None).await;
        }
        if untold {
            self.sync(Drift::All).await.unwrap();
        }
        let tampered = |object: &Value| object["metadata"]["labels"].get("tampered").is_some();
        let left: Vec<_> = self.bed.runtime.objects().into_iter().filter(|(_, object)| tampered(object)).collect();
        assert!(left.iter().all(|(id, _)| id == "moduletemplates/own-1.0.0"), "{left:?}");
        assert_eq!(found(&self.bed.runtime), self.world.expected());
        let inventory: BTreeSet<_> =
            self.bed.runtime.inventory().iter().filter_map(|line| Some(line.split(' ').next()?.to_owned())).collect();
        assert_eq!(inventory, self.world.expected().into_keys().collect(), "the inventory tells what is ours");
        self.bed.runtime.calls();
        self.bed.runtime.inventory_calls();
        self.sync(Drift::None).await.unwrap();
        assert!(
            self.bed.runtime.calls().is_empty() && self.bed.runtime.inventory_calls().is_empty(),
            "it is not at rest"
        );
    }
}

/// A history that was found once: the release meta goes with its only template, the receiver dies over it, and before it is back
/// both are wanted as the inventory has them.
#[tokio::test(start_paused = true)]
async fn what_a_dead_pass_deleted_comes_back_when_it_is_wanted_again() {
    let template = |label| Step::Template { module: 0, version: 2, label, mandatory: false, text: 0 };
    let mut play = Play::new();
    for step in [
        template(None),
        Step::Meta { module: 0, channels: vec![(0, 2)], audience: Audience::Plain },
        Step::Sync { crash: None },
        template(Some(BETA)),
        Step::Sync { crash: Some((1, false)) },
        template(None),
    ] {
        play.step(step).await;
    }
    assert_eq!(play.bed.runtime.ids(), ["moduletemplates/open-3.0.0"]);
    play.rest(false).await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn what_a_runtime_has_is_what_the_rules_say(steps in vec(step(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let untold = steps.iter().any(|step| matches!(step, Step::Tamper { told: false, .. }));
        runtime.block_on(async move {
            let mut play = Play::new();
            for step in steps {
                play.step(step).await;
            }
            play.rest(untold).await;
        });
    }
}
