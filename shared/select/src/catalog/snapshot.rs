//! Snapshot of KCP's catalog, and the desired catalog of each visibility class.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use kube::ResourceExt;
use parking_lot::Mutex;
use tidewatch_api::{ModuleReleaseMeta, ModuleTemplate};

use super::{
    content::content_id,
    desired::{self, DesiredCatalog, DesiredObject, HeldObjects, Kind, ObjectId, ReleaseBody},
    holds::Holds,
    removal_guard::{ModuleState, Releases},
    visibility::{self, Admission, HidingRule, VisibilityClass, template_name},
};

/// Maximum number of cached catalogs, one per class. Two labels and the restricted modules make up the classes, and
/// KCP controls all of them; above this number a catalog is computed for each sync.
const MAX_CLASSES: usize = 256;

/// Valid templates and release metas of KCP by name, and the catalogs computed from them. Invalid objects are listed as
/// omissions.
pub struct Snapshot {
    templates: BTreeMap<String, Template>,
    metas: BTreeMap<String, Meta>,
    left_out: Vec<Omission>,
    /// Objects with a held removal.
    held: HeldObjects,
    classes: Mutex<HashMap<VisibilityClass, Arc<DesiredCatalog>>>,
}

struct Template {
    /// As in KCP, but with the accepted labels if its removal is held.
    object: Arc<ModuleTemplate>,
    module: String,
    version: String,
    /// See [`content_id`].
    content: String,
    desired: Arc<DesiredObject>,
}

struct Meta {
    /// As in KCP, but with the channels whose removal is held.
    object: Arc<ModuleReleaseMeta>,
    admission: Admission,
    body: ReleaseBody,
}

/// An object, or a channel of one, that is left out of every catalog because of a mistake in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Omission {
    /// The object.
    pub id: ObjectId,
    /// UID of the object.
    pub uid: String,
    /// Mistake in the object.
    pub reason: OmissionReason,
}

/// Mistake in a template or release meta. The name is the value of the metric label and JSON field `fault`.
#[derive(
    Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error, strum::IntoStaticStr, strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum OmissionReason {
    /// The name is not the one derived from the module, and for a template from the version.
    #[error("it is left out: its name should be {expected}")]
    Name {
        /// Derived name.
        expected: String,
    },
    /// The module name, or for a template the version, is missing.
    #[error("it is left out: it names no module or no version")]
    Nameless,
    /// The selector is malformed, with the reason.
    #[error("no Kyma sees the module: its kymaSelector cannot be read: {0}")]
    Selector(String),
    /// The release meta has a selector although its module is not restricted, so no Kyma sees the module.
    #[error("no Kyma sees the module: it has a kymaSelector but is not in the list of restricted modules")]
    NotRestricted,
    /// A channel points to a version without a template; only the channel is left out.
    #[error("the channel {channel} is left out: there is no template of the version {version}")]
    UnknownVersion {
        /// Name of the channel.
        channel: String,
        /// Version without a template.
        version: String,
    },
    /// The version of a mandatory module has no template; runtimes keep the installed version.
    #[error("runtimes keep the installed version: there is no template of the mandatory version {version}")]
    UnknownMandatoryVersion {
        /// Version without a template.
        version: String,
    },
    /// The object cannot be written to a runtime, with the reason; see [`desired::UnfitObjectError`].
    #[error("it is left out: {0}")]
    Unfit(String),
}

impl OmissionReason {
    /// True for a mistake that leaves out the object itself, and not only a channel or its visibility.
    const fn omits_object(&self) -> bool {
        match self {
            Self::Name { .. } | Self::Nameless | Self::Unfit(_) => true,
            Self::Selector(_)
            | Self::NotRestricted
            | Self::UnknownVersion { .. }
            | Self::UnknownMandatoryVersion { .. } => false,
        }
    }
}

/// Visibility of one module to a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleVisibility {
    /// Name of the module.
    pub module: String,
    /// Rule that hides the whole module, if any.
    pub hidden: Option<HidingRule>,
    /// Channels by name: the template that each points to, or the rule that hides it.
    pub channels: BTreeMap<String, Result<String, HidingRule>>,
    /// Versions with a template, each with the rule that hides it, if any. The unhidden versions of an unhidden module
    /// are installable, with or without a channel.
    pub versions: BTreeMap<String, Option<HidingRule>>,
}

impl Snapshot {
    /// Validates the objects. `restricted` are the modules of `--restricted-default-modules`, `holds` the held removals,
    /// in the simplest case a set of modules.
    pub fn new(
        templates: impl IntoIterator<Item = Arc<ModuleTemplate>>,
        metas: impl IntoIterator<Item = Arc<ModuleReleaseMeta>>,
        restricted: &BTreeSet<String>,
        holds: impl Into<Holds>,
    ) -> Self {
        let mut left_out = Vec::new();
        let holds = holds.into();
        let templates = templates.into_iter().map(|template| holds.template(template));
        let templates: BTreeMap<_, _> =
            templates.filter_map(|template| accept_template(template, &mut left_out)).collect();
        let mut admitted = BTreeMap::new();
        for meta in metas {
            let name = meta.name_any();
            let accepted = accept_release_meta(meta, restricted, &templates, &holds, &mut left_out);
            admitted.extend(accepted.map(|meta| (name, meta)));
        }
        left_out.sort_unstable();
        let held = holds.objects(|name| templates.get(name).map(|found: &Template| &*found.object));
        Self { templates, metas: admitted, left_out, held, classes: Mutex::default() }
    }

    /// Visibility class of a Kyma with these labels.
    pub fn class(&self, kyma_labels: &BTreeMap<String, String>) -> VisibilityClass {
        VisibilityClass::of(kyma_labels, self.metas.iter().map(|(module, meta)| (module.as_str(), &meta.admission)))
    }

    /// Omissions, sorted.
    pub fn omissions(&self) -> &[Omission] {
        &self.left_out
    }

    /// Mistake for which an object is left out as a whole.
    pub fn omission(&self, kind: Kind, name: &str) -> Option<&OmissionReason> {
        let of_object = self.left_out.iter().filter(|omission| omission.id.kind == kind && *omission.id.name == *name);
        of_object.map(|omission| &omission.reason).find(|reason| reason.omits_object())
    }

    /// Valid release meta of a module, with the Kymas that it admits.
    pub fn release_meta(&self, module: &str) -> Option<(&Arc<ModuleReleaseMeta>, &Admission)> {
        self.metas.get(module).map(|meta| (&meta.object, &meta.admission))
    }

    /// Modules with a valid release meta that makes them mandatory, including those being deleted.
    pub fn mandatory(&self) -> impl Iterator<Item = (&str, &Arc<ModuleReleaseMeta>)> {
        let mandatory = self.metas.iter().filter(|(_, meta)| meta.object.spec.mandatory.is_some());
        mandatory.map(|(module, meta)| (module.as_str(), &meta.object))
    }

    /// Valid template by name.
    pub fn template(&self, name: &str) -> Option<&Arc<ModuleTemplate>> {
        self.templates.get(name).map(|template| &template.object)
    }

    /// Identifier of the content of a valid template; see [`content_id`].
    pub fn content(&self, name: &str) -> Option<&str> {
        self.templates.get(name).map(|template| template.content.as_str())
    }

    /// State of all modules for the removal guard.
    pub fn releases(&self) -> Releases {
        let state = |(module, meta): (&String, &Meta)| {
            let templates =
                self.templates_of(module).map(|found| (found.version.as_str(), &*found.object, found.content.as_str()));
            (module.clone(), ModuleState::of(&meta.object, &meta.admission, templates))
        };
        self.metas.iter().map(state).collect()
    }

    /// Visibility of every module with a valid release meta to a class.
    pub fn modules(&self, class: &VisibilityClass) -> Vec<ModuleVisibility> {
        let visibility = |(module, meta): (&String, &Meta)| {
            let channels = self.channels(class, meta);
            let hidden = class.exclusion_rule(module, &meta.admission).or_else(|| visibility::module_rule(&channels));
            let versions = self.templates_of(module);
            let versions = versions.map(|found| (found.version.clone(), class.hidden_template_rule(&found.object)));
            ModuleVisibility {
                module: module.clone(),
                hidden,
                versions: versions.collect(),
                channels: channels.into_iter().map(|(channel, found)| (channel.to_owned(), found)).collect(),
            }
        };
        self.metas.iter().map(visibility).collect()
    }

    /// Desired catalog of a class, cached.
    pub fn desired(&self, class: &VisibilityClass) -> Arc<DesiredCatalog> {
        let classes = || self.classes.lock();
        if let Some(catalog) = classes().get(class) {
            return Arc::clone(catalog);
        }
        let catalog = Arc::new(self.compute(class));
        let mut classes = classes();
        if classes.len() < MAX_CLASSES {
            classes.insert(class.clone(), Arc::clone(&catalog));
        }
        catalog
    }

    /// Fingerprint of the desired catalog of a Kyma with these labels.
    pub fn fingerprint(&self, kyma_labels: &BTreeMap<String, String>) -> String {
        self.desired(&self.class(kyma_labels)).fingerprint().to_owned()
    }

    /// Computes the release metas that admit the class and have a visible channel, limited to the visible channels,
    /// with all visible templates of their modules, whether a channel points to them or not.
    fn compute(&self, class: &VisibilityClass) -> DesiredCatalog {
        let mut objects = Vec::new();
        for (module, meta) in &self.metas {
            if class.exclusion_rule(module, &meta.admission).is_some() {
                continue;
            }
            let channels = self.channels(class, meta).into_iter();
            let channels: BTreeMap<_, _> = channels.filter_map(|(name, found)| Some((name, found.ok()?))).collect();
            if channels.is_empty() {
                continue;
            }
            let templates =
                || self.templates_of(module).filter(|found| class.hidden_template_rule(&found.object).is_none());
            let versions = templates().map(|found| found.version.as_str()).collect();
            objects.push(Arc::new(meta.body.restricted_to(&channels, &versions)));
            objects.extend(templates().map(|found| Arc::clone(&found.desired)));
        }
        DesiredCatalog::with_held(objects, self.held.clone())
    }

    fn channels<'a>(
        &'a self,
        class: &VisibilityClass,
        meta: &'a Meta,
    ) -> BTreeMap<&'a str, Result<String, HidingRule>> {
        visibility::channels(class, &meta.object, |name| self.templates.get(name).map(|found| &found.object))
    }

    fn templates_of(&self, module: &str) -> impl Iterator<Item = &Template> + Clone {
        // Template names begin with the module's name; those of other modules with the same prefix are filtered by
        // their `moduleName`.
        let from = self.templates.range(format!("{module}-")..);
        let near = from.take_while(move |(name, _)| name.starts_with(module)).map(|(_, template)| template);
        near.filter(move |template| template.module == module)
    }
}

fn accept_template(object: Arc<ModuleTemplate>, left_out: &mut Vec<Omission>) -> Option<(String, Template)> {
    let name = object.name_any();
    let mut omit = |reason| {
        let id = ObjectId::new(Kind::Template, &name);
        let uid = object.uid().unwrap_or_default();
        left_out.push(Omission { id, uid, reason });
    };
    let non_empty = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let (Some(module), Some(version)) = (non_empty(&object.spec.module_name), non_empty(&object.spec.version)) else {
        omit(OmissionReason::Nameless);
        return None;
    };
    let expected = template_name(&module, &version);
    if name != expected {
        omit(OmissionReason::Name { expected });
        return None;
    }
    let desired = desired::template(&object).inspect_err(|error| omit(OmissionReason::Unfit(error.to_string())));
    let desired = Arc::new(desired.ok()?);
    let content = content_id(&object.spec);
    Some((name, Template { module, version, content, desired, object }))
}

fn accept_release_meta(
    object: Arc<ModuleReleaseMeta>,
    restricted: &BTreeSet<String>,
    templates: &BTreeMap<String, Template>,
    holds: &Holds,
    left_out: &mut Vec<Omission>,
) -> Option<Meta> {
    let name = object.name_any();
    let uid = object.uid().unwrap_or_default();
    let mut omit = |reason| {
        let id = ObjectId::new(Kind::ReleaseMeta, &name);
        left_out.push(Omission { id, uid: uid.clone(), reason });
    };
    if name != object.spec.module_name {
        let expected = object.spec.module_name.clone();
        omit(if expected.is_empty() { OmissionReason::Nameless } else { OmissionReason::Name { expected } });
        return None;
    }
    let served = holds.release_meta(Arc::clone(&object), |name| templates.get(name).map(|found| &*found.object));
    let body = ReleaseBody::of(&served).inspect_err(|error| omit(OmissionReason::Unfit(error.to_string()))).ok()?;
    let admission = Admission::of(&object, restricted);
    match &admission {
        Admission::Excluded(HidingRule::MalformedSelector(error)) => omit(OmissionReason::Selector(error.clone())),
        Admission::Excluded(HidingRule::SelectorWithoutRestriction) => omit(OmissionReason::NotRestricted),
        Admission::Excluded(_) | Admission::All | Admission::Selected(_) => {}
    }
    for entry in object.spec.channels() {
        if !templates.contains_key(&template_name(&name, &entry.version)) {
            omit(OmissionReason::UnknownVersion { channel: entry.channel.clone(), version: entry.version.clone() });
        }
    }
    let mandatory = object.spec.mandatory.iter().map(|mandatory| &mandatory.version);
    for version in mandatory.filter(|version| !templates.contains_key(&template_name(&name, version))) {
        omit(OmissionReason::UnknownMandatoryVersion { version: version.clone() });
    }
    Some(Meta { object: served, admission, body })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use strum::VariantNames as _;
    use tidewatch_api::names::label;
    use tidewatch_kit::variant::VariantName as _;

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
        let catalog = snapshot.desired(&snapshot.class(&labels));
        catalog.objects().map(|object| object.id.to_string()).collect()
    }

    #[test]
    fn every_visible_version_of_a_visible_module_is_included() {
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
        let modules = snapshot.modules(&snapshot.class(&BTreeMap::new()));
        assert_eq!(
            modules.iter().map(|module| (&*module.module, module.hidden.clone())).collect::<Vec<_>>(),
            [("a", None), ("a-b", Some(HidingRule::NoTemplate))]
        );
        assert_eq!(modules[0].versions["3.0.0"], Some(HidingRule::Beta));
        assert_eq!(modules[0].channels["regular"], Ok("a-1.0.0".to_owned()));
    }

    #[test]
    fn invalid_objects_are_left_out_and_the_rest_is_kept() {
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
                meta("m", json!({"moduleName": "m", "mandatory": {"version": "1.0.0"}})),
                meta("n", json!({"moduleName": "n", "channels": [], "kymaSelector": {}})),
                meta("s", bad),
            ],
            &restricted,
            BTreeSet::new(),
        );
        let omitted: Vec<_> =
            snapshot.omissions().iter().map(|left| (left.id.to_string(), left.reason.as_str())).collect();
        let expected = [
            ("moduletemplates/old-regular", "nameless"),
            ("moduletemplates/wrong", "name"),
            ("modulereleasemetas/a", "unknown-version"),
            ("modulereleasemetas/b", "name"),
            ("modulereleasemetas/m", "unknown-mandatory-version"),
            ("modulereleasemetas/n", "not-restricted"),
            ("modulereleasemetas/s", "selector"),
        ];
        assert_eq!(omitted, expected.map(|(id, reason)| (id.to_owned(), reason)));
        assert!(omitted.iter().all(|(_, reason)| OmissionReason::VARIANTS.contains(reason)));
        assert_eq!(names(&snapshot, &[]), ["moduletemplates/a-1.0.0", "modulereleasemetas/a"]);
    }

    #[test]
    fn class_is_computed_once_and_marks_held_modules() {
        let objects = || ([template("a-1.0.0", "a", "1.0.0", None)], [regular("a", "1.0.0")]);
        let (templates, metas) = objects();
        let snapshot = Snapshot::new(templates, metas, &BTreeSet::new(), BTreeSet::new());
        let class = snapshot.class(&BTreeMap::new());
        assert!(Arc::ptr_eq(&snapshot.desired(&class), &snapshot.desired(&class)));
        let (templates, metas) = objects();
        let held = Snapshot::new(templates, metas, &BTreeSet::new(), BTreeSet::from(["a".into()]));
        let catalog = held.desired(&class);
        assert_eq!(catalog.objects().count(), 2, "for runtimes that lack them");
        assert!(catalog.is_held(&ObjectId::new(Kind::Template, "a-1.0.0")));
        assert_ne!(catalog.fingerprint(), snapshot.desired(&class).fingerprint());
    }
}
