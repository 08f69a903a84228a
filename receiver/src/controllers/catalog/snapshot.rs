//! KCP's catalog as read at one time, and what each visibility class gets of it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use kube::ResourceExt;
use tidewatch_shared::api::{ModuleReleaseMeta, ModuleTemplate};

use super::{
    desired::{self, Desired, Kind, ObjectId, Release, Unfit, Wanted},
    facts::Releases,
    visibility::{self, Admission, Class, Exclusion, Hidden, template_name},
};

/// Classes whose catalog is kept. Two labels and the restricted modules make the classes, and KCP sets all of them; above
/// this a catalog is computed for each pass.
const MAX_CLASSES: usize = 256;

/// Templates and release metas of KCP, by name, and the catalogs computed from them. What cannot be part of any catalog is
/// left out by name.
pub struct Snapshot {
    templates: BTreeMap<String, Template>,
    metas: BTreeMap<String, Meta>,
    left_out: Vec<LeftOut>,
    held: BTreeSet<String>,
    classes: Mutex<HashMap<Class, Arc<Wanted>>>,
}

struct Template {
    object: Arc<ModuleTemplate>,
    module: String,
    version: String,
    desired: Arc<Desired>,
}

struct Meta {
    object: Arc<ModuleReleaseMeta>,
    admission: Admission,
    release: Release,
}

/// An object, or a part of one, that is in no catalog because of a mistake in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeftOut {
    /// Which object.
    pub id: ObjectId,
    /// Its uid.
    pub uid: String,
    /// What is wrong.
    pub fault: Fault,
}

/// A mistake in a template or release meta.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fault {
    /// Its name is not what its module, and for a template its version, make it.
    Name {
        /// What it should be.
        expected: String,
    },
    /// It does not say of which module, or for a template of which version it is.
    Nameless,
    /// Its selector cannot be read; why.
    Selector(String),
    /// It has a selector although its module is not restricted: nobody sees it.
    NotRestricted,
    /// A channel points to a version without a template; the channel alone is left out.
    UnknownVersion {
        /// The channel.
        channel: String,
        /// The version.
        version: String,
    },
    /// It has no form in a runtime, or too many bytes; which.
    Unfit(String),
}

impl Fault {
    /// One word of a closed set.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Name { .. } => "name",
            Self::Nameless => "nameless",
            Self::Selector(_) => "selector",
            Self::NotRestricted => "not-restricted",
            Self::UnknownVersion { .. } => "unknown-version",
            Self::Unfit(_) => "unfit",
        }
    }

    /// Every word of [`Fault::as_str`].
    pub const WORDS: [&'static str; 6] = ["name", "nameless", "selector", "not-restricted", "unknown-version", "unfit"];
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name { expected } => write!(f, "it is left out: its name should be {expected}"),
            Self::Nameless => f.write_str("it is left out: it names no module or no version"),
            Self::Selector(why) => write!(f, "nobody sees the module: its kymaSelector cannot be read: {why}"),
            Self::NotRestricted => f.write_str(
                "nobody sees the module: it has a kymaSelector but is not in the list of restricted modules",
            ),
            Self::UnknownVersion { channel, version } => {
                write!(f, "the channel {channel} is left out: there is no template of the version {version}")
            }
            Self::Unfit(why) => write!(f, "it is left out: {why}"),
        }
    }
}

/// What a class sees of one module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The module.
    pub module: String,
    /// The rule that hides it whole, if one does.
    pub hidden: Option<Hidden>,
    /// Its channels: the template that each points to, or the rule that hides it.
    pub channels: BTreeMap<String, Result<String, Hidden>>,
    /// The versions that have a template, each with the rule that hides it, if one does. Where the module is not hidden, those
    /// that are not hidden can be installed, with a channel or without.
    pub versions: BTreeMap<String, Option<Hidden>>,
}

impl Snapshot {
    /// Of these objects; `restricted` are the modules of `--restricted-default-modules`, `held` those whose objects stay in
    /// each runtime as they are.
    #[must_use]
    pub fn new(
        templates: impl IntoIterator<Item = Arc<ModuleTemplate>>,
        metas: impl IntoIterator<Item = Arc<ModuleReleaseMeta>>,
        restricted: &BTreeSet<String>,
        held: BTreeSet<String>,
    ) -> Self {
        let mut left_out = Vec::new();
        let templates = templates.into_iter().filter_map(|template| fit_template(template, &mut left_out)).collect();
        let mut admitted = BTreeMap::new();
        for meta in metas {
            let name = meta.name_any();
            admitted.extend(fit_meta(meta, restricted, &templates, &mut left_out).map(|meta| (name, meta)));
        }
        left_out.sort_unstable();
        Self { templates, metas: admitted, left_out, held, classes: Mutex::default() }
    }

    /// The class of a Kyma with these labels.
    #[must_use]
    pub fn class(&self, kyma_labels: &BTreeMap<String, String>) -> Class {
        Class::of(kyma_labels, self.metas.iter().map(|(module, meta)| (module.as_str(), &meta.admission)))
    }

    /// What is in no catalog because of a mistake in it, in order.
    #[must_use]
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    /// Whether a module's objects stay in each runtime as they are.
    #[must_use]
    pub fn holds(&self, module: &str) -> bool {
        self.held.contains(module)
    }

    /// What decides on who sees which module and channel.
    #[must_use]
    pub fn facts(&self) -> Releases {
        let facts = |(module, meta): (&String, &Meta)| {
            let templates = self.templates_of(module).map(|found| (found.version.as_str(), &*found.object));
            (module.clone(), super::facts::Facts::of(&meta.object, &meta.admission, templates))
        };
        self.metas.iter().map(facts).collect()
    }

    /// Every module of a well-formed release meta, and what a class sees of it.
    #[must_use]
    pub fn modules(&self, class: &Class) -> Vec<Seen> {
        let seen = |(module, meta): (&String, &Meta)| {
            let channels = self.channels(class, meta);
            let hidden = class.excludes(module, &meta.admission).or_else(|| visibility::hides_all(&channels));
            let versions = self.templates_of(module);
            let versions = versions.map(|found| (found.version.clone(), class.hides_template(&found.object)));
            Seen {
                module: module.clone(),
                hidden,
                versions: versions.collect(),
                channels: channels.into_iter().map(|(channel, found)| (channel.to_owned(), found)).collect(),
            }
        };
        self.metas.iter().map(seen).collect()
    }

    /// The catalog of a class, computed once.
    #[must_use]
    pub fn wanted(&self, class: &Class) -> Arc<Wanted> {
        let classes = || self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(wanted) = classes().get(class) {
            return Arc::clone(wanted);
        }
        let wanted = Arc::new(self.compute(class));
        let mut classes = classes();
        if classes.len() < MAX_CLASSES {
            classes.insert(class.clone(), Arc::clone(&wanted));
        }
        wanted
    }

    /// Release metas that admit the class, with the channels that it may see, if any; and every template of theirs that it may see,
    /// whether a channel points to it or not.
    fn compute(&self, class: &Class) -> Wanted {
        let mut objects = Vec::new();
        for (module, meta) in &self.metas {
            if self.holds(module) || class.excludes(module, &meta.admission).is_some() {
                continue;
            }
            let channels = self.channels(class, meta).into_iter();
            let channels: BTreeMap<_, _> = channels.filter_map(|(name, found)| Some((name, found.ok()?))).collect();
            if channels.is_empty() {
                continue;
            }
            let templates = || self.templates_of(module).filter(|found| class.sees_template(&found.object));
            let versions = templates().map(|found| found.version.as_str()).collect();
            objects.push(Arc::new(meta.release.with(&channels, &versions)));
            objects.extend(templates().map(|found| Arc::clone(&found.desired)));
        }
        Wanted::with_held(objects, self.held.clone())
    }

    fn channels<'a>(&'a self, class: &Class, meta: &'a Meta) -> BTreeMap<&'a str, Result<String, Hidden>> {
        visibility::channels(class, &meta.object, |name| self.templates.get(name).map(|found| &found.object))
    }

    fn templates_of(&self, module: &str) -> impl Iterator<Item = &Template> {
        // Names begin with the module's; others' that do so too are told apart by what they say.
        let from = self.templates.range(format!("{module}-")..);
        let near = from.take_while(move |(name, _)| name.starts_with(module)).map(|(_, template)| template);
        near.filter(move |template| template.module == module)
    }
}

fn fit_template(object: Arc<ModuleTemplate>, left_out: &mut Vec<LeftOut>) -> Option<(String, Template)> {
    let name = object.name_any();
    let mut leave = |fault| {
        let (id, uid) = (ObjectId::new(Kind::Template, &name), object.uid().unwrap_or_default());
        left_out.push(LeftOut { id, uid, fault });
    };
    let said = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let (Some(module), Some(version)) = (said(&object.spec.module_name), said(&object.spec.version)) else {
        leave(Fault::Nameless);
        return None;
    };
    let expected = template_name(&module, &version);
    if name != expected {
        leave(Fault::Name { expected });
        return None;
    }
    match desired::template(&object) {
        Ok(desired) => Some((name, Template { module, version, desired: Arc::new(desired), object })),
        Err(unfit) => {
            leave(fault_of(&unfit));
            None
        }
    }
}

fn fit_meta(
    object: Arc<ModuleReleaseMeta>,
    restricted: &BTreeSet<String>,
    templates: &BTreeMap<String, Template>,
    left_out: &mut Vec<LeftOut>,
) -> Option<Meta> {
    let name = object.name_any();
    let mut leave = |fault| {
        let (id, uid) = (ObjectId::new(Kind::ReleaseMeta, &name), object.uid().unwrap_or_default());
        left_out.push(LeftOut { id, uid, fault });
    };
    if name != object.spec.module_name {
        let expected = object.spec.module_name.clone();
        leave(if expected.is_empty() { Fault::Nameless } else { Fault::Name { expected } });
        return None;
    }
    let release = match Release::of(&object) {
        Ok(release) => release,
        Err(unfit) => {
            leave(fault_of(&unfit));
            return None;
        }
    };
    let admission = Admission::of(&object, restricted);
    match &admission {
        Admission::Nobody(Exclusion::Malformed(why)) => leave(Fault::Selector(why.clone())),
        Admission::Nobody(Exclusion::NotRestricted) => leave(Fault::NotRestricted),
        Admission::Nobody(Exclusion::Mandatory | Exclusion::SelectsNobody)
        | Admission::Everyone
        | Admission::Selected(_) => {}
    }
    for entry in object.spec.channels() {
        if !templates.contains_key(&template_name(&name, &entry.version)) {
            leave(Fault::UnknownVersion { channel: entry.channel.clone(), version: entry.version.clone() });
        }
    }
    Some(Meta { object, admission, release })
}

fn fault_of(unfit: &Unfit) -> Fault {
    Fault::Unfit(unfit.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidewatch_shared::names::label;

    use super::*;

    fn template(name: &str, module: &str, version: &str, label: Option<&str>) -> Arc<ModuleTemplate> {
        let labels: BTreeMap<_, _> = label.into_iter().map(|label| (label, "true")).collect();
        let template = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": name, "labels": labels},
            "spec": {"moduleName": module, "version": version, "descriptor": {}}});
        Arc::new(serde_json::from_value(template).unwrap())
    }

    fn meta(name: &str, spec: Value) -> Arc<ModuleReleaseMeta> {
        let meta = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": name}, "spec": spec});
        Arc::new(serde_json::from_value(meta).unwrap())
    }

    fn regular(module: &str, version: &str) -> Arc<ModuleReleaseMeta> {
        meta(module, json!({"moduleName": module, "channels": [{"channel": "regular", "version": version}]}))
    }

    fn names(snapshot: &Snapshot, labels: &[(&str, &str)]) -> Vec<String> {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let wanted = snapshot.wanted(&snapshot.class(&labels));
        wanted.objects().map(|object| object.id.to_string()).collect()
    }

    #[test]
    fn every_visible_version_of_a_visible_module_can_be_installed() {
        let snapshot = Snapshot::new(
            [
                template("a-1.0.0", "a", "1.0.0", None),
                template("a-2.0.0", "a", "2.0.0", None),
                template("a-3.0.0", "a", "3.0.0", Some(label::BETA)),
                template("a-b-1.0.0", "a-b", "1.0.0", None),
                template("lone-1.0.0", "lone", "1.0.0", None),
            ],
            [regular("a", "1.0.0"), regular("a-b", "9.0.0")],
            &BTreeSet::new(),
            BTreeSet::new(),
        );
        let plain = ["moduletemplates/a-1.0.0", "moduletemplates/a-2.0.0", "modulereleasemetas/a"];
        assert_eq!(names(&snapshot, &[]), plain);
        let beta = names(&snapshot, &[(label::BETA, "true")]);
        assert_eq!(beta[2], "moduletemplates/a-3.0.0");
        assert_eq!(beta.len(), 4);
        let seen = snapshot.modules(&snapshot.class(&BTreeMap::new()));
        assert_eq!(
            seen.iter().map(|seen| (&*seen.module, seen.hidden.clone())).collect::<Vec<_>>(),
            [("a", None), ("a-b", Some(Hidden::NoTemplate))]
        );
        assert_eq!(seen[0].versions["3.0.0"], Some(Hidden::Beta));
        assert_eq!(seen[0].channels["regular"], Ok("a-1.0.0".to_owned()));
    }

    #[test]
    fn what_has_a_mistake_is_left_out_by_name_and_the_rest_goes_on() {
        let restricted = BTreeSet::from(["s".to_owned()]);
        let bad = json!({"moduleName": "s", "channels": [], "kymaSelector": {"matchExpressions": [{"key": "a", "operator": "Like"}]}});
        let snapshot = Snapshot::new(
            [
                template("a-1.0.0", "a", "1.0.0", None),
                template("wrong", "a", "1.1.0", None),
                template("old-regular", "", "", None),
            ],
            [
                meta(
                    "a",
                    json!({"moduleName": "a", "channels": [
                    {"channel": "regular", "version": "1.0.0"}, {"channel": "fast", "version": "1.1.0"}]}),
                ),
                meta("b", json!({"moduleName": "c", "channels": []})),
                meta("n", json!({"moduleName": "n", "channels": [], "kymaSelector": {}})),
                meta("s", bad),
            ],
            &restricted,
            BTreeSet::new(),
        );
        let said: Vec<_> = snapshot.left_out().iter().map(|left| (left.id.to_string(), left.fault.as_str())).collect();
        let expected = [
            ("moduletemplates/old-regular", "nameless"),
            ("moduletemplates/wrong", "name"),
            ("modulereleasemetas/a", "unknown-version"),
            ("modulereleasemetas/b", "name"),
            ("modulereleasemetas/n", "not-restricted"),
            ("modulereleasemetas/s", "selector"),
        ];
        assert_eq!(said, expected.map(|(id, fault)| (id.to_owned(), fault)));
        assert!(said.iter().all(|(_, fault)| Fault::WORDS.contains(fault)));
        assert_eq!(names(&snapshot, &[]), ["moduletemplates/a-1.0.0", "modulereleasemetas/a"]);
    }

    #[test]
    fn a_class_is_computed_once_and_what_is_held_is_nobodys() {
        let objects = || ([template("a-1.0.0", "a", "1.0.0", None)], [regular("a", "1.0.0")]);
        let (templates, metas) = objects();
        let snapshot = Snapshot::new(templates, metas, &BTreeSet::new(), BTreeSet::new());
        let class = snapshot.class(&BTreeMap::new());
        assert!(Arc::ptr_eq(&snapshot.wanted(&class), &snapshot.wanted(&class)));
        let (templates, metas) = objects();
        let held = Snapshot::new(templates, metas, &BTreeSet::new(), BTreeSet::from(["a".into()]));
        let wanted = held.wanted(&class);
        assert_eq!(wanted.objects().count(), 0);
        assert!(wanted.holds(&ObjectId::new(Kind::Template, "a-1.0.0")));
        assert_ne!(wanted.content(), snapshot.wanted(&class).content());
    }
}
