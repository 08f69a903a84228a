//! Watchers to plan, as a pure function.

use std::collections::{BTreeMap, BTreeSet};

use aws_lc_rs::digest;
use kube::{Resource, ResourceExt};
use thiserror::Error;
use tidewatch_shared::{
    api::{WatchField, Watcher},
    hex,
    names::{GROUP, OWN_MANAGER, SKR_KYMA, SKR_NAMESPACE, VERSION, label},
    plan::{Field, MAX_WATCHES, ParsePlanError, Plan, PlannedWatch, Work},
};

use crate::{
    base::key::KymaKey,
    controllers::catalog::selector::{is_label_key, is_label_value},
    fleet::forward::{Routes, Service, Target},
};

/// A Watcher that is not served, and why.
#[derive(Debug)]
pub struct Rejected {
    /// Which.
    pub watcher: KymaKey,
    /// Why.
    pub why: Why,
}

/// Why a Watcher is not served. The text goes into its status.
#[derive(Debug, Error)]
pub enum Why {
    /// Neither `spec.manager` nor the label `managed-by` names one.
    #[error("neither spec.manager nor the label operator.kyma-project.io/managed-by names a manager")]
    NoManager,
    /// A part of the service's name is empty.
    #[error("serviceInfo must have a name and a namespace")]
    NoService,
    /// Not a TCP port.
    #[error("serviceInfo.port {0} is not in 1..65535")]
    Port(i64),
    /// A label to watch that no object can have.
    #[error("labelsToWatch: {0:?} is no label")]
    Label(String),
    /// What it asks for cannot be watched.
    #[error("{0}")]
    Watch(ParsePlanError),
    /// A manager that cannot stand in a path.
    #[error("the manager {0:?} is no name: letters, digits, '-', '.' and '_'")]
    Manager(String),
    /// A service of another manager that cannot stand in a URL.
    #[error("serviceInfo must have a name and a namespace that are DNS labels")]
    Service,
    /// The plan is full; Watchers are taken in the order of their names.
    #[error("the plan already has {MAX_WATCHES} watches")]
    Full,
}

/// The watches that every runtime has, whatever Watchers say.
#[must_use]
pub fn builtin() -> Vec<PlannedWatch> {
    let ours = format!("{}={}", label::MANAGED_BY, label::MANAGED_BY_SKR);
    let base = |name: &str, resource: &str, work: Work| PlannedWatch {
        name: name.to_owned(),
        group: GROUP.to_owned(),
        version: VERSION.to_owned(),
        resource: resource.to_owned(),
        namespace: Some(SKR_NAMESPACE.to_owned()),
        label_selector: ours.clone(),
        field_selector: String::new(),
        field: Field::Spec,
        manager: OWN_MANAGER.to_owned(),
        work: BTreeSet::from([work]),
    };
    vec![
        // By its name and not by a label: a user may take the label off.
        PlannedWatch {
            label_selector: String::new(),
            field_selector: format!("metadata.name={SKR_KYMA}"),
            ..base("kyma", "kymas", Work::Kyma)
        },
        base("catalog/moduletemplates", "moduletemplates", Work::Catalog),
        base("catalog/modulereleasemetas", "modulereleasemetas", Work::Catalog),
        PlannedWatch {
            group: "apiextensions.k8s.io".to_owned(),
            version: "v1".to_owned(),
            namespace: None,
            ..base("crds", "customresourcedefinitions", Work::Kyma)
        },
    ]
}

/// Makes the plan of all runtimes. A Watcher that cannot be served is named and stops no other; one that is being deleted
/// is left out.
#[must_use]
pub fn plan<W: AsRef<Watcher>>(watchers: &[W]) -> (Plan, Vec<Rejected>) {
    plan_with(Vec::new(), watchers)
}

/// The same with further watches of our own, as where agents are installed.
#[must_use]
pub fn plan_with<W: AsRef<Watcher>>(more: Vec<PlannedWatch>, watchers: &[W]) -> (Plan, Vec<Rejected>) {
    let mut watches = builtin();
    watches.extend(more);
    let mut rejected = Vec::new();
    let present = watchers.iter().map(AsRef::as_ref).filter(|watcher| watcher.meta().deletion_timestamp.is_none());
    let by_name: BTreeMap<_, _> = present.map(|watcher| (key_of(watcher), watcher)).collect();
    for (key, watcher) in by_name {
        match watch_of(&key, watcher).map(|(watch, _)| watch) {
            Ok(watch) if is_covered(&watch) => {}
            Ok(_) if watches.len() >= MAX_WATCHES => rejected.push(Rejected { watcher: key, why: Why::Full }),
            Ok(watch) => watches.push(watch),
            Err(why) => rejected.push(Rejected { watcher: key, why }),
        }
    }
    let content = serde_json::to_vec(&watches).expect("watches are plain data with string keys");
    let hash = digest::digest(&digest::SHA256, &content);
    let revision = hex::encode(&hash.as_ref()[..16]);
    let plan = Plan::new(revision, watches).expect("each watch was checked, names are unique, the number is bounded");
    (plan, rejected)
}

/// Where the events of other managers' watches go. To be asked of the same Watchers as the plan.
#[must_use]
pub fn routes<W: AsRef<Watcher>>(watchers: &[W], plan: &Plan) -> Routes {
    let planned: BTreeSet<_> = plan.watches().iter().map(|watch| watch.name.as_str()).collect();
    let present = watchers.iter().map(AsRef::as_ref).filter(|watcher| watcher.meta().deletion_timestamp.is_none());
    let targets = present.filter_map(|watcher| {
        let (watch, target) = watch_of(&key_of(watcher), watcher).ok()?;
        planned.contains(watch.name.as_str()).then_some((watch.name, target?))
    });
    targets.collect()
}

/// The name that a Watcher's watch has in the plan.
#[must_use]
pub fn watch_name(key: &KymaKey) -> String {
    format!("watcher/{}/{}", key.namespace, key.name)
}

/// The name of a Watcher in KCP.
pub(super) fn key_of(watcher: &Watcher) -> KymaKey {
    KymaKey::new(watcher.namespace().unwrap_or_default(), watcher.name_any())
}

fn watch_of(key: &KymaKey, watcher: &Watcher) -> Result<(PlannedWatch, Option<Target>), Why> {
    let spec = &watcher.spec;
    let named = |manager: &&str| !manager.is_empty();
    let manager = spec.manager.as_deref().filter(named);
    let manager = manager.or_else(|| watcher.labels().get(label::MANAGED_BY).map(String::as_str).filter(named));
    let manager = manager.ok_or(Why::NoManager)?;
    if spec.service_info.name.is_empty() || spec.service_info.namespace.is_empty() {
        return Err(Why::NoService);
    }
    let port = spec.service_info.port;
    let port = u16::try_from(port).ok().filter(|port| *port > 0).ok_or(Why::Port(port))?;
    let watch = PlannedWatch {
        name: watch_name(key),
        group: spec.resource_to_watch.group.clone(),
        version: spec.resource_to_watch.version.clone(),
        resource: spec.resource_to_watch.resource.clone(),
        namespace: None,
        label_selector: selector(spec.labels_to_watch.iter().flatten())?,
        field_selector: String::new(),
        field: match spec.field {
            WatchField::Spec => Field::Spec,
            WatchField::Status => Field::Status,
        },
        manager: manager.to_owned(),
        work: BTreeSet::from([if manager == OWN_MANAGER { Work::Kyma } else { Work::Forward }]),
    };
    watch.check().map_err(Why::Watch)?;
    if manager == OWN_MANAGER {
        return Ok((watch, None));
    }
    let service = Service::new(&spec.service_info.name, &spec.service_info.namespace, port).ok_or(Why::Service)?;
    let target = Target::new(manager, service).ok_or_else(|| Why::Manager(manager.chars().take(120).collect()))?;
    Ok((watch, Some(target)))
}

/// Whether the built-in watch of the Kyma tells it all: the only Kyma that matters in a runtime is that one.
fn is_covered(watch: &PlannedWatch) -> bool {
    watch.manager == OWN_MANAGER
        && watch.group == GROUP
        && watch.resource == "kymas"
        && watch.field == Field::Spec
        && matches!(&*watch.version, "*" | VERSION)
}

/// Labels in the API's query syntax. Each part is checked, so that none can say more than itself.
fn selector<'a>(labels: impl Iterator<Item = (&'a String, &'a String)>) -> Result<String, Why> {
    let requirements = labels.map(|(key, value)| {
        let requirement = format!("{key}={value}");
        let holds = is_label_key(key) && is_label_value(value);
        if holds { Ok(requirement) } else { Err(Why::Label(requirement.chars().take(120).collect())) }
    });
    Ok(requirements.collect::<Result<Vec<_>, _>>()?.join(","))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn watcher(name: &str, change: impl FnOnce(&mut Value)) -> Watcher {
        let mut watcher = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Watcher",
            "metadata": {"name": name, "namespace": "kcp-system"},
            "spec": {"manager": "lifecycle-manager", "field": "status", "labelsToWatch": {"team": "a", "x/y": ""},
                "serviceInfo": {"name": "s", "namespace": "n", "port": 8082}, "gateway": {"selector": {}},
                "resourceToWatch": {"group": "apps", "version": "*", "resource": "deployments"}}});
        change(&mut watcher);
        serde_json::from_value(watcher).unwrap()
    }

    fn planned(watchers: &[Watcher]) -> (Plan, Vec<Rejected>) {
        let watchers: Vec<_> = watchers.iter().cloned().map(std::sync::Arc::new).collect();
        plan(&watchers)
    }

    #[test]
    fn every_runtime_watches_its_kyma_its_catalog_and_our_crds() {
        let (plan, rejected) = planned(&[]);
        assert!(rejected.is_empty());
        let told: Vec<_> = plan
            .watches()
            .iter()
            .map(|watch| {
                (
                    &*watch.name,
                    &*watch.resource,
                    watch.namespace.as_deref(),
                    &*watch.label_selector,
                    &*watch.field_selector,
                )
            })
            .collect();
        let ours = "operator.kyma-project.io/managed-by=kyma";
        let system = Some("kyma-system");
        assert_eq!(
            told,
            [
                ("kyma", "kymas", system, "", "metadata.name=default"),
                ("catalog/moduletemplates", "moduletemplates", system, ours, ""),
                ("catalog/modulereleasemetas", "modulereleasemetas", system, ours, ""),
                ("crds", "customresourcedefinitions", None, ours, ""),
            ]
        );
        assert!(plan.watches().iter().all(|watch| watch.field == Field::Spec && watch.manager == "lifecycle-manager"));
        Plan::parse(&serde_json::to_string(&plan).unwrap()).unwrap();
    }

    #[test]
    fn a_watcher_becomes_a_watch_of_its_own() {
        let (plan, rejected) = planned(&[watcher("w", |_| ())]);
        assert!(rejected.is_empty());
        let watch = plan.watches().last().unwrap();
        assert_eq!(
            (&*watch.name, &*watch.group, &*watch.version, &*watch.resource),
            ("watcher/kcp-system/w", "apps", "*", "deployments")
        );
        assert_eq!(
            (&*watch.label_selector, watch.field, &watch.work),
            ("team=a,x/y=", Field::Status, &BTreeSet::from([Work::Kyma]))
        );

        let by_label = watcher("w", |watcher| {
            watcher["spec"].as_object_mut().unwrap().remove("manager");
            watcher["metadata"]["labels"] = json!({"operator.kyma-project.io/managed-by": "lifecycle-manager"});
        });
        assert_eq!(planned(&[by_label]).0, plan);
    }

    #[test]
    fn the_incumbents_own_watcher_is_covered_and_one_on_its_way_out_is_not_planned() {
        let kymas = watcher("kyma", |watcher| {
            watcher["spec"]["field"] = json!("spec");
            watcher["spec"]["labelsToWatch"] = json!({"operator.kyma-project.io/watched-by": "kyma"});
            watcher["spec"]["resourceToWatch"] =
                json!({"group": "operator.kyma-project.io", "version": "*", "resource": "kymas"});
        });
        let going =
            watcher("going", |watcher| watcher["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
        let (plan, rejected) = planned(&[kymas, going]);
        assert!(rejected.is_empty());
        assert_eq!(plan, planned(&[]).0);
    }

    #[test]
    fn what_cannot_be_served_is_named_and_stops_no_other() {
        let spec = |member: &'static str, value: Value| {
            move |watcher: &mut Value| *watcher["spec"].pointer_mut(member).unwrap() = value
        };
        for (why, bad) in [
            ("no manager", watcher("bad", |watcher| drop(watcher["spec"].as_object_mut().unwrap().remove("manager")))),
            ("other manager without a path", watcher("bad", spec("/manager", json!("a/b")))),
            (
                "another manager's secrets",
                watcher("bad", |watcher| {
                    watcher["spec"]["manager"] = json!("other");
                    watcher["spec"]["resourceToWatch"] = json!({"group": "", "version": "v1", "resource": "secrets"});
                }),
            ),
            (
                "another manager's service that is no host",
                watcher("bad", |watcher| {
                    watcher["spec"]["manager"] = json!("other");
                    watcher["spec"]["serviceInfo"]["name"] = json!("169.254.169.254");
                }),
            ),
            ("service", watcher("bad", spec("/serviceInfo/name", json!("")))),
            ("port 0", watcher("bad", spec("/serviceInfo/port", json!(0)))),
            ("port 65536", watcher("bad", spec("/serviceInfo/port", json!(65_536)))),
            (
                "secrets",
                watcher("bad", spec("/resourceToWatch", json!({"group": "", "version": "v1", "resource": "secrets"}))),
            ),
            ("everything", watcher("bad", spec("/resourceToWatch/resource", json!("*")))),
            ("group", watcher("bad", spec("/resourceToWatch/group", json!("*")))),
            ("no resource", watcher("bad", spec("/resourceToWatch/resource", json!("")))),
            ("no version", watcher("bad", spec("/resourceToWatch/version", json!("")))),
            ("label", watcher("bad", spec("/labelsToWatch", json!({"a": "b,c!=d"})))),
            ("name", watcher(&"n".repeat(250), |_| ())),
        ] {
            let name = bad.name_any();
            let (plan, rejected) = planned(&[watcher("good", |_| ()), bad]);
            assert_eq!(plan, planned(&[watcher("good", |_| ())]).0, "{why}");
            assert_eq!(
                rejected.iter().map(|rejected| rejected.watcher.name.as_str()).collect::<Vec<_>>(),
                [name],
                "{why}"
            );
            assert!(!rejected[0].why.to_string().is_empty());
        }
    }

    #[test]
    fn another_managers_watch_is_forwarded_to_its_service() {
        let other = |name: &str| {
            watcher(name, |watcher| {
                watcher["spec"]["manager"] = json!("other");
                watcher["spec"]["field"] = json!("spec");
                watcher["spec"]["resourceToWatch"] =
                    json!({"group": "operator.kyma-project.io", "version": "*", "resource": "kymas"});
            })
        };
        let watchers = [other("o"), watcher("mine", |_| ())].map(std::sync::Arc::new);
        let (plan, rejected) = plan(&watchers);
        assert!(rejected.is_empty());
        let watch = plan.watches().iter().find(|watch| watch.name == "watcher/kcp-system/o").unwrap();
        assert_eq!((&*watch.manager, &watch.work), ("other", &BTreeSet::from([Work::Forward])));
        let routes = routes(&watchers, &plan);
        let target = routes.of("watcher/kcp-system/o").unwrap();
        assert_eq!((target.manager(), target.service().to_string()), ("other", "n/s:8082".to_owned()));
        assert_eq!(routes.targets().count(), 1, "ours needs none");
        assert_eq!(super::routes(&watchers, &super::plan::<std::sync::Arc<Watcher>>(&[]).0), Routes::default());
    }

    #[test]
    fn the_plan_is_bounded_and_its_revision_follows_its_content() {
        let many: Vec<_> = (0..=MAX_WATCHES).map(|n| watcher(&format!("w{n:04}"), |_| ())).collect();
        let (full, rejected) = planned(&many);
        assert_eq!(full.watches().len(), MAX_WATCHES);
        assert_eq!(rejected.len(), 5);
        let mut turned = many.clone();
        turned.reverse();
        assert_eq!(planned(&turned).0, full);
        assert_ne!(planned(&many[..1]).0.revision(), planned(&[]).0.revision());
    }
}
