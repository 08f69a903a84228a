//! Preview of a change of KCP's catalog: its effect on each visibility class, the number of affected runtimes, and the
//! removal that would be held. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::{api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::Time};
use kube::ResourceExt as _;
use serde::Serialize;
use tidewatch_api::{
    ModuleReleaseMeta, ModuleTemplate,
    names::{annotation, finalizer},
};
use tidewatch_kit::{table, variant::VariantName as _};
use tidewatch_select::{
    catalog::{
        ChannelTarget, VersionSource,
        desired::{Difference, ObjectId},
        holds::Holds,
        releases::Ledger,
        removal_guard::{self, GuardDecision, HeldRemovals, Releases, RemovalPolicy},
        rollout::{
            BoardEntry, InvalidPolicyError, Rollout, RolloutBoard, RolloutFlags, RolloutKey, RolloutPolicy,
            RolloutSlot, StoredRollouts,
        },
        snapshot::{Omission, Snapshot},
        visibility::VisibilityClass,
    },
    kyma::mandatory::{is_protected, is_wanted},
    windows::Windows,
};

use super::check::Objects;

/// Annotations of a release meta with the rules of its ring rollout.
const ROLLOUT_RULES: [&str; 5] = [
    annotation::ROLLOUT_RINGS,
    annotation::ROLLOUT_PAUSE,
    annotation::ROLLOUT_DEADLINE,
    annotation::ROLLOUT_MAX_FAILURES,
    annotation::ROLLOUT_CANARIES,
];

/// Current state of KCP.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// Templates and release metas.
    pub objects: Objects,
    /// Labels of each Kyma.
    pub kymas: Vec<BTreeMap<String, String>>,
    /// ConfigMap of releases.
    pub releases: Option<ConfigMap>,
    /// ConfigMap of the ring rollouts.
    pub rollouts: Option<ConfigMap>,
}

/// Options of a preview.
#[derive(Clone, Debug, Default)]
pub struct PreviewOptions {
    /// Modules of `--restricted-default-modules`.
    pub restricted: BTreeSet<String>,
    /// Value of `--removal-limit-percent`.
    pub removal_limit_percent: u8,
    /// The given objects are the whole catalog: objects that only KCP has are removed.
    pub whole: bool,
    /// Flags of the ring rollout.
    pub rollout: RolloutFlags,
    /// Maintenance windows; `None` if they are not known.
    pub windows: Option<Windows>,
    /// Current time in Unix seconds.
    pub now: i64,
}

/// Effect of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Preview {
    /// Number of all runtimes.
    pub runtimes: usize,
    /// Number of runtimes with a changed catalog.
    pub affected: usize,
    /// Changes per class, sorted by the number of runtimes, largest first. The four classes without restricted modules
    /// are always included.
    pub classes: Vec<ClassChange>,
    /// Removals that would wait for a confirmation.
    pub guard: Option<Guard>,
    /// Objects that the change would newly leave out because of a mistake in them.
    pub left_out: Vec<OmissionView>,
}

/// Effect of a change on one class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClassChange {
    /// Current class.
    pub class: VisibilityClass,
    /// Class after the change, if a selector moves the Kymas to another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub becomes: Option<VisibilityClass>,
    /// Number of runtimes of the class.
    pub runtimes: usize,
    /// Objects that would become visible.
    pub added: Vec<String>,
    /// Visible objects with changed content.
    pub changed: Vec<String>,
    /// Objects that would no longer be visible.
    pub removed: Vec<String>,
}

/// Removals that would be held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Guard {
    /// The removals, flattened.
    #[serde(flatten)]
    pub removal: HeldRemovals,
    /// Summary as text.
    pub message: String,
}

/// An omission in text and JSON output.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OmissionView {
    /// Plural kind and name of the object.
    pub object: String,
    /// Kind of the mistake, one value of a closed set.
    pub fault: &'static str,
    /// Explanation of the mistake.
    pub message: String,
}

/// The catalog before and after a change, and the decision of the removal guard on it.
pub(crate) struct Outlook {
    /// Catalog as it is.
    pub(crate) before: Snapshot,
    /// Catalog right after the change: held removals stay as they were accepted.
    pub(crate) at_first: Snapshot,
    /// Catalog after the change, whatever the guard decides.
    pub(crate) later: Snapshot,
    /// Ring rollouts before and after the change.
    pub(crate) rollouts: (RolloutBoard, RolloutBoard),
    /// Rules of the modules with a ring rollout after the change.
    policies: BTreeMap<String, Result<RolloutPolicy, InvalidPolicyError>>,
    guard: GuardDecision,
    now: i64,
}

impl Outlook {
    /// Applies the objects, and lets the guard decide. Without an accepted state in KCP, the current objects count as
    /// accepted.
    pub(crate) fn new(live: &Live, objects: &Objects, options: &PreviewOptions) -> Self {
        let snapshot = |objects: &Objects, holds| {
            let templates = objects.templates.iter().cloned();
            let metas = objects.release_metas.iter().cloned();
            Snapshot::new(templates, metas, &options.restricted, holds)
        };
        let applied = applied(&live.objects, objects, options);
        let before = snapshot(&live.objects, Holds::default());
        let later = snapshot(&applied, Holds::default());
        let mut ledger = Ledger::default();
        let _ = ledger.observe(live.releases.as_ref());
        let accepted = ledger.accepted.take().unwrap_or_else(|| before.releases());
        let percent = options.removal_limit_percent;
        let confirmed = &ledger.confirmed;
        let policy = RemovalPolicy { percent, confirmed, now: options.now };
        let guard = removal_guard::evaluate(Some(&accepted), later.releases(), live.kymas.iter(), policy);
        let at_first = snapshot(&applied, Holds::of(&guard.held, &guard.accepted));
        let policy = |meta: &Arc<ModuleReleaseMeta>| {
            Some((meta.name_any(), RolloutPolicy::of(meta, &options.rollout).transpose()?))
        };
        let policies = applied.release_metas.iter().filter_map(policy).collect();
        let stored = StoredRollouts::of(live.rollouts.as_ref());
        let after = rollouts_after(&stored, &policies, &guard.accepted, options.now);
        let rollouts = (board(stored.rollouts), board(after));
        Self { before, at_first, later, rollouts, policies, guard, now: options.now }
    }

    /// Returns whether a module has a ring rollout after the change.
    pub(crate) fn has_rings(&self, module: &str) -> bool {
        self.policies.contains_key(module)
    }

    /// Mistakes in the rules of ring rollouts, by module.
    pub(crate) fn invalid_policies(&self) -> impl Iterator<Item = (&str, &InvalidPolicyError)> {
        self.policies.iter().filter_map(|(module, policy)| Some((module.as_str(), policy.as_ref().err()?)))
    }

    /// Removals that wait for a confirmation.
    pub(crate) const fn held(&self) -> &HeldRemovals {
        &self.guard.held
    }

    /// Slot of a Kyma for the version that a module's release meta points to after the change. The jitter of the roll-out
    /// counts as passed; of a ring rollout in progress no ring has begun.
    pub(crate) fn rollout_slot(
        &self,
        kyma_uid: &str,
        module: &str,
        source: VersionSource<'_>,
        version: &str,
    ) -> RolloutSlot {
        let target = self.guard.accepted.get(module).and_then(|state| state.target(source));
        if let (Some(target), true) = (target, self.has_rings(module)) {
            return self.rollouts.1.slot(kyma_uid, module, source, version, target);
        }
        let now = Timestamp::from_second(self.now).unwrap_or_default();
        RolloutSlot::of(kyma_uid, module, version, target, Duration::ZERO, now)
    }
}

/// Rollouts of the modules with rings, for these accepted targets, as the task of the rollouts would record them.
fn rollouts_after(
    stored: &StoredRollouts,
    policies: &BTreeMap<String, Result<RolloutPolicy, InvalidPolicyError>>,
    accepted: &Releases,
    now: i64,
) -> BTreeMap<RolloutKey, Rollout> {
    let with_rings = accepted.iter().filter_map(|(module, state)| Some((module, state, policies.get(module)?)));
    let targets = with_rings.flat_map(|(module, state, policy)| {
        state.targets().map(move |(source, target)| (RolloutKey::new(module, source), target, policy))
    });
    let rollout = |(key, target, policy): (RolloutKey, &ChannelTarget, &Result<_, _>)| {
        let rollout = match policy {
            Ok(_) => stored.of_target(&key, target, now)?.0,
            // The state stays as it is until the annotations are valid.
            Err(_) => stored.rollouts.get(&key)?.clone(),
        };
        Some((key, rollout))
    };
    targets.filter_map(rollout).collect()
}

fn board(rollouts: BTreeMap<RolloutKey, Rollout>) -> RolloutBoard {
    let board = RolloutBoard::default();
    let entry = |(key, rollout)| (key, BoardEntry { rollout, admitted: Arc::default() });
    board.publish(rollouts.into_iter().map(entry).collect());
    board
}

/// Names of the modules of which the change adds, changes or removes a template or the release meta. All other modules
/// stay as they are in every runtime.
pub fn changed_modules(live: &Objects, objects: &Objects, options: &PreviewOptions) -> BTreeSet<String> {
    let later = applied(live, objects, options);
    let templates = differing(&live.templates, &later.templates, |a, b| a.spec == b.spec);
    let metas = differing(&live.release_metas, &later.release_metas, |a, b| {
        a.spec == b.spec && a.metadata.deletion_timestamp == b.metadata.deletion_timestamp
    });
    let modules = templates.iter().filter_map(|template| template.spec.module_name.clone());
    modules.chain(metas.iter().map(|meta| meta.name_any())).collect()
}

/// Objects of both lists that the other list has not, or has with another content or other labels.
fn differing<K: kube::Resource<DynamicType = ()>>(
    before: &[Arc<K>],
    later: &[Arc<K>],
    is_same: impl Fn(&K, &K) -> bool,
) -> Vec<Arc<K>> {
    let by_name = |objects: &[Arc<K>]| -> BTreeMap<String, Arc<K>> {
        objects.iter().map(|object| (object.name_any(), Arc::clone(object))).collect()
    };
    let sides = (by_name(before), by_name(later));
    let changed = |(name, object): (&String, &Arc<K>), others: &BTreeMap<String, Arc<K>>| {
        let same = others.get(name).is_some_and(|other| other.labels() == object.labels() && is_same(other, object));
        (!same).then(|| Arc::clone(object))
    };
    let old = sides.0.iter().filter_map(|entry| changed(entry, &sides.1));
    old.chain(sides.1.iter().filter_map(|entry| changed(entry, &sides.0))).collect()
}

/// Computes the effect of applying these objects to KCP.
pub fn preview(live: &Live, objects: &Objects, options: &PreviewOptions) -> Preview {
    let Outlook { before, later, guard, .. } = Outlook::new(live, objects, options);
    let mut members: BTreeMap<(VisibilityClass, VisibilityClass), usize> = BTreeMap::new();
    for labels in &live.kymas {
        *members.entry((before.class(labels), later.class(labels))).or_default() += 1;
    }
    for (beta, internal) in [(false, false), (true, false), (false, true), (true, true)] {
        let class = VisibilityClass { beta, internal, restricted: BTreeSet::new() };
        members.entry((class.clone(), class)).or_default();
    }
    let mut classes: Vec<_> =
        members.into_iter().map(|((from, to), runtimes)| class_change(&before, &later, from, to, runtimes)).collect();
    classes.sort_by_key(|class| usize::MAX - class.runtimes);
    let known: BTreeSet<_> = OmissionView::all(&before).into_iter().collect();
    Preview {
        runtimes: live.kymas.len(),
        affected: classes.iter().filter(|class| class.is_change()).map(|class| class.runtimes).sum(),
        guard: (!guard.held.is_empty()).then(|| Guard { message: guard.held.to_string(), removal: guard.held }),
        left_out: OmissionView::all(&later).into_iter().filter(|omission| !known.contains(omission)).collect(),
        classes,
    }
}

impl Preview {
    /// Returns whether any class would be changed, or any object newly left out.
    pub fn is_change(&self) -> bool {
        self.classes.iter().any(ClassChange::is_change) || !self.left_out.is_empty()
    }
}

impl ClassChange {
    /// Returns whether the class's catalog would change.
    pub const fn is_change(&self) -> bool {
        !(self.added.is_empty() && self.changed.is_empty() && self.removed.is_empty())
    }
}

/// KCP's objects after the change, as the receiver finds them before it installs or removes anything: the release meta of a
/// mandatory module has a finalizer, so that its deletion only begins.
fn applied(live: &Objects, objects: &Objects, options: &PreviewOptions) -> Objects {
    let mut later = if options.whole { objects.clone() } else { overlay(live, objects) };
    for meta in &mut later.release_metas {
        let name = meta.name_any();
        let found = Arc::make_mut(meta);
        if let Some(live) = live.release_metas.iter().find(|live| live.name_any() == name) {
            found.metadata.finalizers.clone_from(&live.metadata.finalizers);
            found.metadata.deletion_timestamp.clone_from(&live.metadata.deletion_timestamp);
            // Operators annotate the live object; an applied file changes only the annotations that it has.
            for (name, value) in live.annotations().iter().filter(|(name, _)| ROLLOUT_RULES.contains(&name.as_str())) {
                found.annotations_mut().entry(name.clone()).or_insert_with(|| value.clone());
            }
        }
        if is_wanted(found) && !is_protected(found) {
            found.finalizers_mut().push(finalizer::MANDATORY_MODULE.to_owned());
        }
    }
    let kept: BTreeSet<_> = later.release_metas.iter().map(|meta| meta.name_any()).collect();
    let is_leaving = |meta: &&Arc<ModuleReleaseMeta>| {
        meta.spec.mandatory.is_some() && is_protected(meta) && !kept.contains(&meta.name_any())
    };
    for meta in live.release_metas.iter().filter(is_leaving) {
        let mut leaving = ModuleReleaseMeta::clone(meta);
        let now = Timestamp::from_second(options.now).unwrap_or_default();
        leaving.metadata.deletion_timestamp.get_or_insert(Time(now));
        later.release_metas.push(Arc::new(leaving));
    }
    later
}

/// KCP's objects, overlaid with the given ones of the same name.
fn overlay(live: &Objects, objects: &Objects) -> Objects {
    fn merge<K: kube::Resource<DynamicType = ()>>(live: &[Arc<K>], objects: &[Arc<K>]) -> Vec<Arc<K>> {
        let both = live.iter().chain(objects).map(|object| (object.name_any(), Arc::clone(object)));
        both.collect::<BTreeMap<_, _>>().into_values().collect()
    }
    Objects {
        templates: merge::<ModuleTemplate>(&live.templates, &objects.templates),
        release_metas: merge::<ModuleReleaseMeta>(&live.release_metas, &objects.release_metas),
    }
}

fn class_change(
    before: &Snapshot,
    later: &Snapshot,
    from: VisibilityClass,
    to: VisibilityClass,
    runtimes: usize,
) -> ClassChange {
    let Difference { added, changed, removed } = before.desired(&from).difference(&later.desired(&to));
    let names = |ids: Vec<ObjectId>| ids.iter().map(ObjectId::to_string).collect();
    ClassChange {
        becomes: (from != to).then_some(to),
        class: from,
        runtimes,
        added: names(added),
        changed: names(changed),
        removed: names(removed),
    }
}

impl OmissionView {
    /// Omissions of a snapshot, sorted.
    pub(super) fn all(snapshot: &Snapshot) -> Vec<Self> {
        let view = |Omission { id, reason, .. }: &Omission| Self {
            object: id.to_string(),
            fault: reason.as_str(),
            message: reason.to_string(),
        };
        snapshot.omissions().iter().map(view).collect()
    }
}

impl fmt::Display for Preview {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut page = String::new();
        for class in self.classes.iter().filter(|class| class.runtimes > 0 || class.is_change()) {
            let becomes = class.becomes.iter().map(|becomes| format!(" → {becomes}")).collect::<String>();
            let suffix = if class.is_change() { "" } else { ": no change" };
            page.push_str(&format!("{}{becomes}: {} runtimes{suffix}\n", class.class, class.runtimes));
            for (sign, names) in [('+', &class.added), ('~', &class.changed), ('-', &class.removed)] {
                names.iter().for_each(|name| page.push_str(&format!("  {sign} {name}\n")));
            }
        }
        for OmissionView { object, message, .. } in &self.left_out {
            page.push_str(&format!("{object}: {message}\n"));
        }
        if let Some(guard) = &self.guard {
            page.push_str(&format!("held: {}\n", guard.message));
        }
        page.push_str(&format!("{} of {} runtimes would get another catalog\n", self.affected, self.runtimes));
        page.lines().try_for_each(|line| writeln!(f, "{}", table::sanitize(line)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidewatch_api::names::label;

    use super::*;

    fn objects(templates: &[(&str, &str, bool)], metas: &[Value]) -> Objects {
        let template = |(module, version, beta): &(&str, &str, bool)| {
            let labels = if *beta { json!({label::BETA: "true"}) } else { json!({}) };
            Arc::new(
                serde_json::from_value(
                    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
                    "metadata": {"name": format!("{module}-{version}"), "labels": labels},
                    "spec": {"moduleName": module, "version": version, "descriptor": {}}}),
                )
                .unwrap(),
            )
        };
        let meta = |spec: &Value| {
            Arc::new(
                serde_json::from_value(
                    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
                    "metadata": {"name": spec["moduleName"]}, "spec": spec}),
                )
                .unwrap(),
            )
        };
        Objects { templates: templates.iter().map(template).collect(), release_metas: metas.iter().map(meta).collect() }
    }

    fn regular(module: &str, version: &str) -> Value {
        json!({"moduleName": module, "channels": [{"channel": "regular", "version": version}]})
    }

    fn live() -> Live {
        let labels = |beta: bool| BTreeMap::from([(label::BETA.to_owned(), beta.to_string())]);
        Live {
            objects: objects(
                &[("keda", "1.0.0", false), ("nats", "1.0.0", false)],
                &[regular("keda", "1.0.0"), regular("nats", "1.0.0")],
            ),
            kymas: (0..10).map(|n| labels(n < 2)).collect(),
            ..Live::default()
        }
    }

    fn options(whole: bool) -> PreviewOptions {
        PreviewOptions { removal_limit_percent: 5, whole, now: 100, ..PreviewOptions::default() }
    }

    #[test]
    fn unchanged_catalog_has_no_effect() {
        let live = live();
        let preview = super::preview(&live, &live.objects, &options(true));
        assert!(!preview.is_change() && preview.guard.is_none(), "{preview:?}");
        assert_eq!((preview.runtimes, preview.affected, preview.classes.len()), (10, 0, 4));
        assert!(!super::preview(&live, &Objects::default(), &options(false)).is_change());
    }

    #[test]
    fn change_is_reported_per_class() {
        let moved = objects(
            &[("keda", "1.1.0", true)],
            &[json!({"moduleName": "keda", "channels": [
            {"channel": "regular", "version": "1.0.0"}, {"channel": "fast", "version": "1.1.0"}]})],
        );
        let preview = super::preview(&live(), &moved, &options(false));
        let of = |beta: bool| {
            preview.classes.iter().find(|class| class.class.beta == beta && !class.class.internal).unwrap()
        };
        assert_eq!((of(false).runtimes, of(false).is_change()), (8, false));
        assert_eq!(of(true).added, ["moduletemplates/keda-1.1.0"]);
        assert_eq!(of(true).changed, ["modulereleasemetas/keda"]);
        assert_eq!((of(true).runtimes, preview.affected, preview.guard.is_none()), (2, 2, true));
        let text = preview.to_string();
        assert!(text.contains("beta: 2 runtimes\n  + moduletemplates/keda-1.1.0\n"), "{text}");
        assert!(text.ends_with("2 of 10 runtimes would get another catalog\n"), "{text}");
    }

    #[test]
    fn removal_from_many_runtimes_would_be_held() {
        let less = objects(&[("keda", "1.0.0", false)], &[regular("keda", "1.0.0")]);
        let preview = super::preview(&live(), &less, &options(true));
        let guard = preview.guard.as_ref().unwrap();
        assert_eq!(
            (guard.removal.runtimes, guard.removal.of, &guard.removal.modules),
            (10, 10, &BTreeSet::from(["nats".to_owned()]))
        );
        assert_eq!(preview.classes[0].removed, ["moduletemplates/nats-1.0.0", "modulereleasemetas/nats"]);
        let free = PreviewOptions { removal_limit_percent: 100, ..options(true) };
        assert_eq!(super::preview(&live(), &less, &free).guard, None);
        assert!(!super::preview(&live(), &less, &options(false)).is_change(), "objects absent from the files stay");
    }

    #[test]
    fn selector_moves_kymas_between_classes() {
        let selected = |team: &str| {
            json!({"moduleName": "nats", "channels": [{"channel": "regular", "version": "1.0.0"}],
            "kymaSelector": {"matchLabels": {"team": team}}})
        };
        let mut live = live();
        live.objects.release_metas = objects(&[], &[regular("keda", "1.0.0"), selected("a")]).release_metas;
        live.kymas = ["a", "b", "b"].map(|team| BTreeMap::from([("team".to_owned(), team.to_owned())])).to_vec();
        let options = PreviewOptions { restricted: BTreeSet::from(["nats".to_owned()]), ..options(false) };
        let preview = super::preview(&live, &objects(&[], &[selected("b")]), &options);
        assert_eq!(preview.affected, 3);
        let first = &preview.classes[0];
        assert_eq!((first.runtimes, first.added.len(), first.removed.len()), (2, 2, 0));
        assert_eq!(first.becomes.as_ref().unwrap().restricted, options.restricted);
    }

    #[test]
    fn new_omission_is_reported() {
        let wrong = objects(&[], &[regular("keda", "9.0.0")]);
        let preview = super::preview(&live(), &wrong, &options(false));
        assert_eq!(preview.left_out.len(), 1);
        assert_eq!(
            (&*preview.left_out[0].object, preview.left_out[0].fault),
            ("modulereleasemetas/keda", "unknown-version")
        );
        let json = serde_json::to_value(&preview).unwrap();
        assert_eq!(json["guard"]["modules"], json!(["keda"]));
        assert_eq!(json["classes"][0]["class"], json!({"beta": false, "internal": false, "restricted": []}));
    }
}
