//! Builds the plan from the Watchers, as a pure function.

use std::collections::{BTreeMap, BTreeSet};

use kube::{Resource, ResourceExt};
use thiserror::Error;
use tidewatch_api::{
    WatchField, Watcher,
    key::KymaKey,
    labels::{is_label_key, is_label_value},
    names::{GROUP, OWN_MANAGER, SKR_KYMA, SKR_NAMESPACE, VERSION, label},
    plan::{Field, MAX_WATCHES, ParsePlanError, Plan, PlannedWatch, Work},
};
use tidewatch_fleet::forward::{Routes, Service, Target};
use tidewatch_kit::digest::short_digest;

/// Reason for which a Watcher is not served, shown in its status.
#[derive(Debug, Error)]
pub enum WatcherError {
    /// Neither `spec.manager` nor the label `managed-by` names a manager.
    #[error("neither spec.manager nor the label operator.kyma-project.io/managed-by names a manager")]
    NoManager,
    /// Name or namespace of the service is empty.
    #[error("serviceInfo must have a name and a namespace")]
    NoService,
    /// The number is not a TCP port.
    #[error("serviceInfo.port {0} is not in 1..65535")]
    Port(i64),
    /// The label is invalid.
    #[error("labelsToWatch: {0:?} is no label")]
    Label(String),
    /// The watch is not allowed in a plan.
    #[error("{0}")]
    Watch(ParsePlanError),
    /// The manager cannot be a path segment.
    #[error("the manager {0:?} is no name: letters, digits, '-', '.' and '_'")]
    Manager(String),
    /// The service of another manager cannot be part of a URL.
    #[error("serviceInfo must have a name and a namespace that are DNS labels")]
    Service,
    /// The plan is full; Watchers are added in the order of their keys.
    #[error("the plan already has {MAX_WATCHES} watches")]
    Full,
}

/// Watches of every runtime, independent of Watchers.
fn builtin_watches() -> Vec<PlannedWatch> {
    let ours = format!("{}={}", label::MANAGED_BY, label::MANAGED_BY_SKR);
    let base = |name, resource, work| PlannedWatch {
        namespace: Some(SKR_NAMESPACE.to_owned()),
        label_selector: ours.clone(),
        ..PlannedWatch::ours(name, GROUP, VERSION, resource, work)
    };
    vec![
        // Selected by name, since a user can remove a label.
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
            // Those of the modules too.
            work: BTreeSet::from([Work::Kyma, Work::Manifest]),
            ..base("crds", "customresourcedefinitions", Work::Kyma)
        },
        // Selected by name as well. Namespaces have no generation, so a change of their status cannot be distinguished.
        PlannedWatch {
            group: String::new(),
            version: "v1".to_owned(),
            namespace: None,
            label_selector: String::new(),
            field_selector: format!("metadata.name={SKR_NAMESPACE}"),
            field: Field::Status,
            // The objects of modules in it go with it.
            work: BTreeSet::from([Work::Kyma, Work::Manifest]),
            ..base("namespace", "namespaces", Work::Kyma)
        },
    ]
}

/// Builds the plan of all runtimes: from the built-in watches, `more`, such as those on the agent's installation, and the
/// Watchers. Returns it with the targets of the events of other managers' watches, and the rejected Watchers: an invalid
/// Watcher is rejected individually, one that is being deleted is omitted.
pub fn plan<W: AsRef<Watcher>>(
    more: Vec<PlannedWatch>,
    watchers: &[W],
) -> (Plan, Routes, BTreeMap<KymaKey, WatcherError>) {
    let mut watches = builtin_watches();
    watches.extend(more);
    let mut targets = Vec::new();
    let mut rejected = BTreeMap::new();
    let present = watchers.iter().map(AsRef::as_ref).filter(|watcher| watcher.meta().deletion_timestamp.is_none());
    let by_name: BTreeMap<_, _> = present.map(|watcher| (KymaKey::of(watcher), watcher)).collect();
    for (key, watcher) in by_name {
        match watch_of(&key, watcher) {
            Ok((watch, _)) if is_covered(&watch) => {}
            Ok(_) if watches.len() >= MAX_WATCHES => drop(rejected.insert(key, WatcherError::Full)),
            Ok((watch, target)) => {
                targets.extend(target.map(|target| (watch.name.clone(), target)));
                watches.push(watch);
            }
            Err(error) => drop(rejected.insert(key, error)),
        }
    }
    (plan_of(watches), targets.into_iter().collect(), rejected)
}

/// Adds watches to a plan, as far as there is room. One that is not valid, or whose name is taken, is left out.
pub fn extend(base: &Plan, more: Vec<PlannedWatch>) -> Plan {
    let mut watches = base.watches().to_vec();
    watches.extend(more);
    plan_of(watches)
}

/// Makes a plan of the valid watches, of those with the same name the first one, at most [`MAX_WATCHES`]. Its revision is
/// a hash of its content.
fn plan_of(mut watches: Vec<PlannedWatch>) -> Plan {
    let mut names = BTreeSet::new();
    watches.retain(|watch| {
        let is_usable = watch.check().is_ok() && names.insert(watch.name.clone());
        if !is_usable {
            tracing::warn!(watch = %watch.name, "Watch left out of a plan: it is not valid, or its name is taken");
        }
        is_usable
    });
    watches.truncate(MAX_WATCHES);
    let content = serde_json::to_vec(&watches).expect("watches are plain data with string keys");
    Plan::new(short_digest(&content, 16), watches)
        .expect("each watch was checked, names are unique, the number is bounded")
}

/// Name of a Watcher's watch in the plan.
pub fn watch_name(key: &KymaKey) -> String {
    format!("watcher/{}/{}", key.namespace, key.name)
}

fn watch_of(key: &KymaKey, watcher: &Watcher) -> Result<(PlannedWatch, Option<Target>), WatcherError> {
    let spec = &watcher.spec;
    let info = &watcher.spec.service_info;
    let named = |manager: &&str| !manager.is_empty();
    let manager = spec.manager.as_deref().filter(named);
    let manager = manager.or_else(|| watcher.labels().get(label::MANAGED_BY).map(String::as_str).filter(named));
    let manager = manager.ok_or(WatcherError::NoManager)?;
    if info.name.is_empty() || info.namespace.is_empty() {
        return Err(WatcherError::NoService);
    }
    let port = u16::try_from(info.port).ok().filter(|port| *port > 0).ok_or(WatcherError::Port(info.port))?;
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
    watch.check().map_err(WatcherError::Watch)?;
    if manager == OWN_MANAGER {
        return Ok((watch, None));
    }
    let service = Service::new(&info.name, &info.namespace, port).ok_or(WatcherError::Service)?;
    let invalid_manager = || WatcherError::Manager(manager.chars().take(120).collect());
    let target = Target::new(manager, service).ok_or_else(invalid_manager)?;
    Ok((watch, Some(target)))
}

/// Returns whether the built-in watch of the Kyma covers a watch: a runtime has only that one Kyma of interest.
fn is_covered(watch: &PlannedWatch) -> bool {
    watch.manager == OWN_MANAGER
        && watch.group == GROUP
        && watch.resource == "kymas"
        && watch.field == Field::Spec
        && matches!(&*watch.version, "*" | VERSION)
}

/// Builds a label selector in the query syntax of the API. Every key and value is validated, so that none injects
/// further requirements.
fn selector<'a>(labels: impl Iterator<Item = (&'a String, &'a String)>) -> Result<String, WatcherError> {
    let requirements = labels.map(|(key, value)| {
        let requirement = format!("{key}={value}");
        let holds = is_label_key(key) && is_label_value(value);
        if holds { Ok(requirement) } else { Err(WatcherError::Label(requirement.chars().take(120).collect())) }
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

    fn planned(watchers: &[Watcher]) -> (Plan, BTreeMap<KymaKey, WatcherError>) {
        let watchers: Vec<_> = watchers.iter().cloned().map(std::sync::Arc::new).collect();
        let (plan, _, rejected) = plan(Vec::new(), &watchers);
        (plan, rejected)
    }

    #[test]
    fn builtin_watches_cover_kyma_catalog_crds_and_namespace() {
        let (plan, rejected) = planned(&[]);
        assert!(rejected.is_empty());
        let summary: Vec<_> = plan
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
            summary,
            [
                ("kyma", "kymas", system, "", "metadata.name=default"),
                ("catalog/moduletemplates", "moduletemplates", system, ours, ""),
                ("catalog/modulereleasemetas", "modulereleasemetas", system, ours, ""),
                ("crds", "customresourcedefinitions", None, ours, ""),
                ("namespace", "namespaces", None, "", "metadata.name=kyma-system"),
            ]
        );
        assert!(plan.watches().iter().all(|watch| watch.manager == "lifecycle-manager"));
        Plan::parse(&serde_json::to_string(&plan).unwrap()).unwrap();
    }

    #[test]
    fn watcher_becomes_a_planned_watch() {
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

        for none in [json!(null), json!({})] {
            let all = watcher("w", |watcher| watcher["spec"]["labelsToWatch"] = none);
            assert_eq!(planned(&[all]).0.watches().last().unwrap().label_selector, "");
        }

        let by_label = watcher("w", |watcher| {
            watcher["spec"].as_object_mut().unwrap().remove("manager");
            watcher["metadata"]["labels"] = json!({"operator.kyma-project.io/managed-by": "lifecycle-manager"});
        });
        assert_eq!(planned(&[by_label]).0, plan);
    }

    #[test]
    fn covered_and_deleted_watchers_are_not_planned() {
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
    fn invalid_watchers_are_rejected_individually() {
        let spec = |member: &'static str, value: Value| {
            move |watcher: &mut Value| *watcher["spec"].pointer_mut(member).unwrap() = value
        };
        for (error, bad) in [
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
            ("everything of a built-in group", watcher("bad", spec("/resourceToWatch/resource", json!("*")))),
            (
                "everything of a group with a built-in name",
                watcher("bad", spec("/resourceToWatch", json!({"group": "x.k8s.io", "version": "*", "resource": "*"}))),
            ),
            (
                "everything of our group",
                watcher("bad", spec("/resourceToWatch", json!({"group": GROUP, "version": "*", "resource": "*"}))),
            ),
            ("group", watcher("bad", spec("/resourceToWatch/group", json!("*")))),
            ("no resource", watcher("bad", spec("/resourceToWatch/resource", json!("")))),
            ("no version", watcher("bad", spec("/resourceToWatch/version", json!("")))),
            ("label", watcher("bad", spec("/labelsToWatch", json!({"a": "b,c!=d"})))),
            ("label prefix", watcher("bad", spec("/labelsToWatch", json!({"example..com/a": "b"})))),
            ("name", watcher(&"n".repeat(250), |_| ())),
        ] {
            let name = bad.name_any();
            let (plan, rejected) = planned(&[watcher("good", |_| ()), bad]);
            assert_eq!(plan, planned(&[watcher("good", |_| ())]).0, "{error}");
            assert_eq!(rejected.keys().map(|watcher| watcher.name.as_str()).collect::<Vec<_>>(), [name], "{error}");
            assert!(rejected.values().all(|error| !error.to_string().is_empty()));
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
        let (plan, routes, rejected) = plan(Vec::new(), &watchers);
        assert!(rejected.is_empty());
        let watch = plan.watches().iter().find(|watch| watch.name == "watcher/kcp-system/o").unwrap();
        assert_eq!((&*watch.manager, &watch.work), ("other", &BTreeSet::from([Work::Forward])));
        let target = routes.of("watcher/kcp-system/o").unwrap();
        assert_eq!((target.manager(), target.service().to_string()), ("other", "n/s:8082".to_owned()));
        assert_eq!(routes.targets().count(), 1, "ours needs none");
        assert_eq!(super::plan::<std::sync::Arc<Watcher>>(Vec::new(), &[]).1, Routes::default());
    }

    /// The Watcher that cloud-manager publishes.
    fn cloud_manager() -> Watcher {
        watcher("cloud-manager", |watcher| {
            watcher["spec"] = json!({"field": "spec", "gateway": {"selector": {}}, "manager": "cloud-manager",
                "resourceToWatch": {"group": "cloud-resources.kyma-project.io", "version": "*", "resource": "*"},
                "serviceInfo": {"name": "cloud-manager", "namespace": "kcp-system", "port": 8083}});
        })
    }

    #[test]
    fn watcher_on_all_resources_of_a_group_is_forwarded() {
        let more = watcher("more", |watcher| {
            watcher["spec"]["resourceToWatch"] = json!(cloud_manager().spec.resource_to_watch);
        });
        let (plan, routes, rejected) = plan(Vec::new(), &[cloud_manager(), more].map(std::sync::Arc::new));
        assert!(rejected.is_empty(), "{rejected:?}");
        let [.., first, second] = plan.watches() else { panic!("two watches: {plan:?}") };
        assert!(first.is_of_group() && second.is_of_group());
        assert_eq!((&*first.version, &*first.label_selector), ("*", ""));
        assert_eq!((&*second.label_selector, second.field), ("team=a,x/y=", Field::Status));
        let target = routes.of("watcher/kcp-system/cloud-manager").unwrap();
        assert_eq!(target.service().to_string(), "kcp-system/cloud-manager:8083");
    }

    #[test]
    fn refused_group_is_named() {
        let everything = watcher("bad", |watcher| watcher["spec"]["resourceToWatch"]["resource"] = json!("*"));
        let (_, rejected) = planned(&[everything]);
        let reason = rejected.values().next().unwrap().to_string();
        assert!(reason.contains("may not be watched in the group \"apps\""), "{reason}");
    }

    #[test]
    fn extension_leaves_out_watches_that_are_not_valid_or_whose_name_is_taken() {
        let (base, _) = planned(&[]);
        let watch = |name: &str, resource: &str| PlannedWatch {
            name: name.to_owned(),
            resource: resource.to_owned(),
            ..base.watches()[0].clone()
        };
        let more = [("pods/m", "pods"), ("pods/m", "things"), ("kyma", "things"), ("Pods", "pods"), ("pods/n", "pods")];
        let extended = extend(&base, more.map(|(name, resource)| watch(name, resource)).into());
        let (kept, added) = extended.watches().split_at(base.watches().len());
        assert_eq!(kept, base.watches());
        let added: Vec<_> = added.iter().map(|watch| (&*watch.name, &*watch.resource)).collect();
        assert_eq!(added, [("pods/m", "pods"), ("pods/n", "pods")], "the first one of a name stays");
        let many = (0..=MAX_WATCHES).map(|n| watch(&format!("pods/m{n}"), "pods")).collect();
        assert_eq!(extend(&base, many).watches().len(), MAX_WATCHES);
    }

    #[test]
    fn plan_is_bounded_and_its_revision_depends_on_its_content() {
        let many: Vec<_> = (0..=MAX_WATCHES).map(|n| watcher(&format!("w{n:04}"), |_| ())).collect();
        let (full, rejected) = planned(&many);
        assert_eq!(full.watches().len(), MAX_WATCHES);
        assert_eq!(rejected.len(), builtin_watches().len() + 1);
        let mut turned = many.clone();
        turned.reverse();
        assert_eq!(planned(&turned).0, full);
        assert_ne!(planned(&many[..1]).0.revision(), planned(&[]).0.revision());
    }
}
