//! What a change of KCP's catalog would do: to each visibility class, to how many runtimes, and whether it would be held. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt as _;
use serde::Serialize;
use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    table,
};

use super::{
    check::Objects,
    desired::{Difference, ObjectId},
    facts::{self, Held, Terms},
    releases::Ledger,
    snapshot::{LeftOut, Snapshot},
    visibility::Class,
};

/// KCP as it is.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// Its templates and release metas.
    pub objects: Objects,
    /// The labels of each Kyma.
    pub kymas: Vec<BTreeMap<String, String>>,
    /// The ConfigMap of releases.
    pub releases: Option<ConfigMap>,
}

/// How a change is judged.
#[derive(Clone, Debug)]
pub struct Judge {
    /// The modules of `--restricted-default-modules`.
    pub restricted: BTreeSet<String>,
    /// `--removal-limit-percent`.
    pub removal_limit_percent: u8,
    /// The texts are the whole catalog: what they do not name goes.
    pub whole: bool,
    /// Now, in unix seconds.
    pub now: i64,
}

/// What a change would do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Preview {
    /// All runtimes.
    pub runtimes: usize,
    /// Those whose catalog would be another one.
    pub affected: usize,
    /// What the classes would see, those with most runtimes first. Classes without a runtime are those of the two labels.
    pub classes: Vec<ClassChange>,
    /// The removal that would wait for a confirmation.
    pub guard: Option<Guard>,
    /// What would be left out because of a mistake in it, and is not now.
    pub left_out: Vec<Mistake>,
}

/// What one class would see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClassChange {
    /// What of a Kyma's labels counts now.
    pub class: Seer,
    /// What would count, if a selector moves its Kymas to another class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub becomes: Option<Seer>,
    /// Its runtimes.
    pub runtimes: usize,
    /// Objects that it would see, and does not.
    pub added: Vec<String>,
    /// Objects that it would see otherwise.
    pub changed: Vec<String>,
    /// Objects that it sees, and would not.
    pub removed: Vec<String>,
}

/// A visibility class, for people and programs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Seer {
    /// Beta modules are seen.
    pub beta: bool,
    /// Internal modules are seen.
    pub internal: bool,
    /// Restricted modules that are seen.
    pub restricted: BTreeSet<String>,
}

/// A removal that would wait.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Guard {
    /// What a confirmation names.
    pub change: String,
    /// Modules that would be removed, or channels of which would be.
    pub modules: BTreeSet<String>,
    /// Runtimes that would lose something.
    pub runtimes: usize,
    /// All runtimes.
    pub of: usize,
    /// The same in words.
    pub message: String,
}

/// A mistake in an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mistake {
    /// Plural kind and name.
    pub object: String,
    /// One word of a closed set.
    pub fault: &'static str,
    /// The same in words.
    pub message: String,
}

/// What the objects of texts, applied to KCP, would do.
#[must_use]
pub fn preview(live: &Live, objects: &Objects, judge: &Judge) -> Preview {
    let snapshot = |objects: &Objects| {
        let (templates, metas) = (objects.templates.iter().cloned(), objects.release_metas.iter().cloned());
        Snapshot::new(templates, metas, &judge.restricted, BTreeSet::new())
    };
    let before = snapshot(&live.objects);
    let later = snapshot(&if judge.whole { objects.clone() } else { over(&live.objects, objects) });
    let mut members: BTreeMap<(Class, Class), usize> = BTreeMap::new();
    for labels in &live.kymas {
        *members.entry((before.class(labels), later.class(labels))).or_default() += 1;
    }
    for (beta, internal) in [(false, false), (true, false), (false, true), (true, true)] {
        let class = Class { beta, internal, restricted: BTreeSet::new() };
        members.entry((class.clone(), class)).or_default();
    }
    let mut classes: Vec<_> =
        members.into_iter().map(|(pair, runtimes)| change(&before, &later, pair, runtimes)).collect();
    classes.sort_by_key(|class| usize::MAX - class.runtimes);
    let known: BTreeSet<_> = mistakes(&before).into_iter().collect();
    Preview {
        runtimes: live.kymas.len(),
        affected: classes.iter().filter(|class| class.is_some()).map(|class| class.runtimes).sum(),
        guard: guard(live, &before, &later, judge),
        left_out: mistakes(&later).into_iter().filter(|mistake| !known.contains(mistake)).collect(),
        classes,
    }
}

impl Preview {
    /// Whether anything would be otherwise for anybody, now or later.
    #[must_use]
    pub fn is_change(&self) -> bool {
        self.classes.iter().any(ClassChange::is_some) || !self.left_out.is_empty()
    }
}

impl ClassChange {
    /// Whether the class would see anything else.
    #[must_use]
    pub const fn is_some(&self) -> bool {
        !(self.added.is_empty() && self.changed.is_empty() && self.removed.is_empty())
    }
}

/// KCP's objects, and in the place of those with the same name those of the texts.
fn over(live: &Objects, objects: &Objects) -> Objects {
    fn over<K: kube::Resource<DynamicType = ()>>(live: &[Arc<K>], objects: &[Arc<K>]) -> Vec<Arc<K>> {
        let both = live.iter().chain(objects).map(|object| (object.name_any(), Arc::clone(object)));
        both.collect::<BTreeMap<_, _>>().into_values().collect()
    }
    Objects {
        templates: over::<ModuleTemplate>(&live.templates, &objects.templates),
        release_metas: over::<ModuleReleaseMeta>(&live.release_metas, &objects.release_metas),
    }
}

fn change(before: &Snapshot, later: &Snapshot, (from, to): (Class, Class), runtimes: usize) -> ClassChange {
    let Difference { added, changed, removed } = before.wanted(&from).difference(&later.wanted(&to));
    let names = |ids: Vec<ObjectId>| ids.iter().map(ObjectId::to_string).collect();
    ClassChange {
        becomes: (from != to).then(|| Seer::of(&to)),
        class: Seer::of(&from),
        runtimes,
        added: names(added),
        changed: names(changed),
        removed: names(removed),
    }
}

/// What the guard against mass removal would say. What was accepted stands in KCP; where nothing does, what KCP has is taken for it.
fn guard(live: &Live, before: &Snapshot, later: &Snapshot, judge: &Judge) -> Option<Guard> {
    let mut ledger = Ledger::default();
    ledger.take(live.releases.as_ref());
    let accepted = ledger.accepted.take().unwrap_or_else(|| before.facts());
    let terms = Terms { percent: judge.removal_limit_percent, confirmed: ledger.confirmed.as_deref(), now: judge.now };
    facts::rule(Some(&accepted), later.facts(), live.kymas.iter(), terms).held.map(Guard::of)
}

fn mistakes(snapshot: &Snapshot) -> Vec<Mistake> {
    snapshot.left_out().iter().map(Mistake::of).collect()
}

impl Mistake {
    pub(super) fn of(left: &LeftOut) -> Self {
        Self { object: left.id.to_string(), fault: left.fault.as_str(), message: left.fault.to_string() }
    }
}

impl Guard {
    pub(super) fn of(held: Held) -> Self {
        let message = held.to_string();
        let Held { change, modules, runtimes, of } = held;
        Self { change, modules, runtimes, of, message }
    }
}

impl Seer {
    pub(super) fn of(class: &Class) -> Self {
        let Class { beta, internal, restricted } = class.clone();
        Self { beta, internal, restricted }
    }
}

impl fmt::Display for Seer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = [(self.beta, "beta"), (self.internal, "internal")];
        let mut words: Vec<_> = flags.into_iter().filter(|(set, _)| *set).map(|(_, word)| word.to_owned()).collect();
        words.extend(self.restricted.iter().map(|module| format!("selected for {module}")));
        f.write_str(&if words.is_empty() { "plain".to_owned() } else { words.join(", ") })
    }
}

impl fmt::Display for Preview {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut page = String::new();
        for class in self.classes.iter().filter(|class| class.runtimes > 0 || class.is_some()) {
            let becomes = class.becomes.iter().map(|becomes| format!(" → {becomes}")).collect::<String>();
            let what = if class.is_some() { "" } else { ": no change" };
            page.push_str(&format!("{}{becomes}: {} runtimes{what}\n", class.class, class.runtimes));
            for (sign, names) in [('+', &class.added), ('~', &class.changed), ('-', &class.removed)] {
                names.iter().for_each(|name| page.push_str(&format!("  {sign} {name}\n")));
            }
        }
        for Mistake { object, message, .. } in &self.left_out {
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
    use tidewatch_shared::names::label;

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
            releases: None,
        }
    }

    fn judge(whole: bool) -> Judge {
        Judge { restricted: BTreeSet::new(), removal_limit_percent: 5, whole, now: 100 }
    }

    #[test]
    fn what_is_there_already_changes_nothing() {
        let live = live();
        let preview = super::preview(&live, &live.objects, &judge(true));
        assert!(!preview.is_change() && preview.guard.is_none(), "{preview:?}");
        assert_eq!((preview.runtimes, preview.affected, preview.classes.len()), (10, 0, 4));
        assert!(!super::preview(&live, &Objects::default(), &judge(false)).is_change());
    }

    #[test]
    fn each_class_sees_its_part_of_a_change() {
        let moved = objects(
            &[("keda", "1.1.0", true)],
            &[json!({"moduleName": "keda", "channels": [
            {"channel": "regular", "version": "1.0.0"}, {"channel": "fast", "version": "1.1.0"}]})],
        );
        let preview = super::preview(&live(), &moved, &judge(false));
        let of = |beta: bool| {
            preview.classes.iter().find(|class| class.class.beta == beta && !class.class.internal).unwrap()
        };
        assert_eq!((of(false).runtimes, of(false).is_some()), (8, false));
        assert_eq!(of(true).added, ["moduletemplates/keda-1.1.0"]);
        assert_eq!(of(true).changed, ["modulereleasemetas/keda"]);
        assert_eq!((of(true).runtimes, preview.affected, preview.guard.is_none()), (2, 2, true));
        let text = preview.to_string();
        assert!(text.contains("beta: 2 runtimes\n  + moduletemplates/keda-1.1.0\n"), "{text}");
        assert!(text.ends_with("2 of 10 runtimes would get another catalog\n"), "{text}");
    }

    #[test]
    fn a_removal_from_many_would_wait() {
        let less = objects(&[("keda", "1.0.0", false)], &[regular("keda", "1.0.0")]);
        let preview = super::preview(&live(), &less, &judge(true));
        let guard = preview.guard.as_ref().unwrap();
        assert_eq!((guard.runtimes, guard.of, &guard.modules), (10, 10, &BTreeSet::from(["nats".to_owned()])));
        assert_eq!(preview.classes[0].removed, ["moduletemplates/nats-1.0.0", "modulereleasemetas/nats"]);
        let free = Judge { removal_limit_percent: 100, ..judge(true) };
        assert_eq!(super::preview(&live(), &less, &free).guard, None);
        assert!(!super::preview(&live(), &less, &judge(false)).is_change(), "nothing goes that is not said to");
    }

    #[test]
    fn a_selector_moves_kymas_from_class_to_class() {
        let selected = |team: &str| {
            json!({"moduleName": "nats", "channels": [{"channel": "regular", "version": "1.0.0"}],
            "kymaSelector": {"matchLabels": {"team": team}}})
        };
        let mut live = live();
        live.objects.release_metas = objects(&[], &[regular("keda", "1.0.0"), selected("a")]).release_metas;
        live.kymas = ["a", "b", "b"].map(|team| BTreeMap::from([("team".to_owned(), team.to_owned())])).to_vec();
        let judge = Judge { restricted: BTreeSet::from(["nats".to_owned()]), ..judge(false) };
        let preview = super::preview(&live, &objects(&[], &[selected("b")]), &judge);
        assert_eq!(preview.affected, 3);
        let first = &preview.classes[0];
        assert_eq!((first.runtimes, first.added.len(), first.removed.len()), (2, 2, 0));
        assert_eq!(first.becomes.as_ref().unwrap().restricted, judge.restricted);
    }

    #[test]
    fn a_mistake_is_told() {
        let wrong = objects(&[], &[regular("keda", "9.0.0")]);
        let preview = super::preview(&live(), &wrong, &judge(false));
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
