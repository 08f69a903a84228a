//! The plan: the watches of an agent, written by the receiver to the ConfigMap `kyma-system/tidewatch-agent`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize, Serializer};
use strum::{IntoStaticStr, VariantArray};
use thiserror::Error;

use crate::names::{GROUP, OWN_MANAGER};

/// Watches per plan, at most.
pub const MAX_WATCHES: usize = 500;
/// The resource of a watch on all resources of its group.
pub const ALL_RESOURCES: &str = "*";

/// The error for which a plan is rejected as a whole.
#[derive(Debug, Error)]
pub enum ParsePlanError {
    /// Not JSON of the expected shape.
    #[error("the plan is not valid JSON of its shape")]
    Json(#[from] serde_json::Error),
    /// More than [`MAX_WATCHES`].
    #[error("the plan has more than {MAX_WATCHES} watches")]
    TooMany,
    /// Two watches have the same name.
    #[error("the plan names the watch {0:?} twice")]
    DuplicateName(String),
    /// A member has an invalid value.
    #[error("watch {watch:?}: {field} is not valid")]
    Invalid {
        /// The name of the watch; empty for a member of the plan itself.
        watch: String,
        /// The name of the member.
        field: &'static str,
    },
    /// The resource carries secrets or tokens.
    #[error("watch {watch:?}: {resource:?} may not be watched")]
    Forbidden {
        /// The name of the watch.
        watch: String,
        /// The resource.
        resource: String,
    },
    /// All resources of a group that may contain resources other than custom ones.
    #[error(
        "watch {watch:?}: \"*\" may not be watched in the group {group:?}, only in a group that CRDs define: its name has a \
         dot, and it is neither {GROUP} nor k8s.io, kubernetes.io or below them"
    )]
    ForbiddenGroup {
        /// The name of the watch.
        watch: String,
        /// The group.
        group: String,
    },
}

/// The changes that a watch reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Field {
    /// Every change except one of the status alone.
    Spec,
    /// Every change.
    Status,
}

/// The work that the events of a watch trigger. An event is settled when all of it has ended.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, IntoStaticStr, VariantArray,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Work {
    /// The Kyma reconcile of this runtime.
    Kyma,
    /// The catalog sync of this runtime.
    Catalog,
    /// The Manifests of this runtime.
    Manifest,
    /// The agent's installation in this runtime.
    Installer,
    /// Forwarding to another manager.
    Forward,
}

/// A watch of the plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedWatch {
    /// Name, unique in the plan: 1 to 253 lower-case letters, digits, '-', '.' or '/'.
    pub name: String,
    /// API group; empty for the core group.
    #[serde(default)]
    pub group: String,
    /// API version, or `*` for the preferred version, which the agent discovers.
    pub version: String,
    /// Plural resource name, or [`ALL_RESOURCES`] for all resources of a group of CRDs, which the agent discovers.
    pub resource: String,
    /// Restricts the watch to a namespace; absent for all namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Label selector in query syntax; empty for all objects.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label_selector: String,
    /// Field selector in query syntax; empty for all objects.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub field_selector: String,
    /// The changes to report.
    pub field: Field,
    /// The manager to notify.
    pub manager: String,
    /// The work that events trigger.
    pub work: BTreeSet<Work>,
}

/// A valid plan: names are unique, and every resource may be watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Opaque; changes with the content.
    revision: String,
    /// Those on groups follow the others.
    watches: Vec<PlannedWatch>,
}

/// The JSON form of a plan.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WirePlan<R, W> {
    revision: R,
    watches: Vec<W>,
    /// The watches on groups. They have a member of their own, because an agent that does not know them refuses a plan
    /// with `*` among the resources of `watches`; it ignores this member and follows the rest.
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    group_watches: Vec<W>,
}

impl Serialize for Plan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (group_watches, watches) = self.watches.iter().partition(|watch| watch.is_of_group());
        WirePlan::<&str, &PlannedWatch> { revision: &self.revision, watches, group_watches }.serialize(serializer)
    }
}

impl Plan {
    /// Parses the plan in a ConfigMap.
    ///
    /// # Errors
    /// [`ParsePlanError`]; an invalid watch invalidates the plan as a whole.
    pub fn parse(text: &str) -> Result<Self, ParsePlanError> {
        let WirePlan::<String, PlannedWatch> { revision, mut watches, group_watches } = serde_json::from_str(text)?;
        watches.extend(group_watches);
        Self::new(revision, watches)
    }

    /// Creates a plan of valid watches.
    ///
    /// # Errors
    /// [`ParsePlanError`]; the revision must have 1 to 128 bytes.
    pub fn new(revision: String, mut watches: Vec<PlannedWatch>) -> Result<Self, ParsePlanError> {
        if watches.len() > MAX_WATCHES {
            return Err(ParsePlanError::TooMany);
        }
        if revision.is_empty() || revision.len() > 128 {
            return Err(ParsePlanError::Invalid { watch: String::new(), field: "revision" });
        }
        let mut names = BTreeSet::new();
        for watch in &watches {
            watch.check()?;
            if !names.insert(&watch.name) {
                return Err(ParsePlanError::DuplicateName(watch.name.clone()));
            }
        }
        watches.sort_by_key(PlannedWatch::is_of_group);
        Ok(Self { revision, watches })
    }

    /// The revision: opaque, changes with the content.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// The watches; names are unique.
    pub fn watches(&self) -> &[PlannedWatch] {
        &self.watches
    }
}

impl PlannedWatch {
    /// A watch for lifecycle-manager's work on all objects of a resource, of which it reports every change except one of the status
    /// alone.
    pub fn ours(name: &str, group: &str, version: &str, resource: &str, work: Work) -> Self {
        Self {
            name: name.to_owned(),
            group: group.to_owned(),
            version: version.to_owned(),
            resource: resource.to_owned(),
            namespace: None,
            label_selector: String::new(),
            field_selector: String::new(),
            field: Field::Spec,
            manager: OWN_MANAGER.to_owned(),
            work: BTreeSet::from([work]),
        }
    }

    /// Validates one watch independently of the plan.
    ///
    /// # Errors
    /// [`ParsePlanError::Invalid`], [`ParsePlanError::Forbidden`] and [`ParsePlanError::ForbiddenGroup`].
    pub fn check(&self) -> Result<(), ParsePlanError> {
        let invalid = |field| Err(ParsePlanError::Invalid { watch: self.name.chars().take(253).collect(), field });
        let members = [
            ("name", is_name(&self.name, "-./")),
            ("group", self.group.is_empty() || is_name(&self.group, "-.")),
            ("version", self.version == "*" || is_name(&self.version, "")),
            ("namespace", self.namespace.as_deref().is_none_or(|namespace| is_name(namespace, "-"))),
            ("manager", (1..=253).contains(&self.manager.len())),
            ("selector", self.label_selector.len().max(self.field_selector.len()) <= 4_096),
            ("work", !self.work.is_empty()),
        ];
        if let Some((field, _)) = members.into_iter().find(|(_, is_valid)| !is_valid) {
            return invalid(field);
        }
        if carries_secrets(&self.group, &self.resource) {
            let watch = self.name.clone();
            return Err(if self.is_of_group() {
                ParsePlanError::ForbiddenGroup { watch, group: self.group.clone() }
            } else {
                ParsePlanError::Forbidden { watch, resource: self.resource.chars().take(253).collect() }
            });
        }
        if !self.is_of_group() && !is_name(&self.resource, "-.") {
            return invalid("resource");
        }
        Ok(())
    }

    /// True if the watch is on all resources of its group.
    pub fn is_of_group(&self) -> bool {
        self.resource == ALL_RESOURCES
    }

    /// The part of a watch on a group that is on one of its resources.
    ///
    /// # Errors
    /// As [`Self::check`]: a resource that carries secrets is no part of the watch. Neither is [`ALL_RESOURCES`].
    pub fn of_resource(&self, resource: &str) -> Result<Self, ParsePlanError> {
        if resource == ALL_RESOURCES {
            return Err(ParsePlanError::Invalid { watch: self.name.clone(), field: "resource" });
        }
        let part = Self { resource: resource.to_owned(), ..self.clone() };
        part.check().map(|()| part)
    }
}

/// True if a resource carries secrets or tokens, or includes such resources through a wildcard. Subresources are
/// included, because `serviceaccounts/token` is one of them. All resources of a group ([`ALL_RESOURCES`]) count as
/// harmless if only CRDs define the group.
pub fn carries_secrets(group: &str, resource: &str) -> bool {
    const SECRET: &[&str] =
        &["secrets", "tokenreviews", "tokenrequests", "selfsubjectreviews", "certificatesigningrequests"];
    if resource == ALL_RESOURCES {
        return !is_group_of_definitions(group);
    }
    group == "*"
        || resource.contains('*')
        || resource.contains('/')
        || SECRET.contains(&resource.to_ascii_lowercase().as_str())
}

/// True if only CRDs can define a group, and it is not Tidewatch's own. Kubernetes reserves `k8s.io` and `kubernetes.io`
/// and all groups below them; its other groups have no dot.
fn is_group_of_definitions(group: &str) -> bool {
    const RESERVED: [&str; 2] = ["k8s.io", "kubernetes.io"];
    let is_label = |label: &str| is_name(label, "-") && !label.starts_with('-') && !label.ends_with('-');
    let is_below =
        |reserved: &&str| group.strip_suffix(*reserved).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    group.contains('.') && group.split('.').all(is_label) && group != GROUP && !RESERVED.iter().any(is_below)
}

fn is_name(text: &str, also: &str) -> bool {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || also.contains(c);
    (1..=253).contains(&text.len()) && text.chars().all(allowed)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn watch() -> Value {
        json!({"name": "kyma", "group": "operator.kyma-project.io", "version": "v1beta2", "resource": "kymas",
               "namespace": "kyma-system", "fieldSelector": "metadata.name=default", "field": "spec",
               "manager": "lifecycle-manager", "work": ["kyma"]})
    }

    fn parse(watches: &[Value]) -> Result<Plan, ParsePlanError> {
        Plan::parse(&json!({"revision": "r", "watches": watches}).to_string())
    }

    #[test]
    fn a_plan_survives_being_written_and_read() {
        let plan = parse(&[watch()]).unwrap();
        assert_eq!(Plan::parse(&serde_json::to_string(&plan).unwrap()).unwrap(), plan);
        assert_eq!(plan.watches()[0].work, BTreeSet::from([Work::Kyma]));
    }

    #[test]
    fn resources_with_secrets_are_rejected_also_through_wildcards() {
        for (group, resource) in [
            ("", "secrets"),
            ("", "*"),
            ("*", "kymas"),
            ("", "serviceaccounts/token"),
            ("authentication.k8s.io", "tokenreviews"),
        ] {
            let mut bad = watch();
            bad["group"] = json!(group);
            bad["resource"] = json!(resource);
            assert!(parse(&[bad]).is_err(), "{group}/{resource}");
        }
    }

    #[test]
    fn all_resources_may_be_watched_in_groups_of_definitions_only() {
        for (group, allowed) in [
            ("cloud-resources.kyma-project.io", true),
            ("example.com", true),
            ("notk8s.io", true),
            ("k8s.io.example", true),
            ("sub.operator.kyma-project.io", true),
            ("operator.kyma-project.io", false),
            ("*", false),
            ("", false),
            ("apps", false),
            ("batch", false),
            ("policy", false),
            ("extensions", false),
            ("k8s.io", false),
            ("apiextensions.k8s.io", false),
            ("rbac.authorization.k8s.io", false),
            ("snapshot.storage.k8s.io", false),
            ("kubernetes.io", false),
            ("x.kubernetes.io", false),
            (".", false),
            (".example", false),
            ("example.", false),
            ("a..b", false),
            ("-a.b", false),
            ("Apps.K8S.io", false),
            ("a.*", false),
            ("*.example.com", false),
        ] {
            assert_eq!(carries_secrets(group, "*"), !allowed, "{group}");
            let mut watch = watch();
            watch["group"] = json!(group);
            watch["resource"] = json!("*");
            let parsed = parse(&[watch]);
            assert_eq!(parsed.is_ok(), allowed, "{group}");
            if let Err(error) = parsed {
                assert!(error.to_string().contains("group"), "{error}");
            }
        }
        for resource in ["**", "things*", "*/status", "*/*"] {
            assert!(carries_secrets("example.com", resource), "{resource}");
        }
    }

    #[test]
    fn watch_on_a_group_has_a_part_for_each_harmless_resource() {
        let mut group = watch();
        group["group"] = json!("example.com");
        group["resource"] = json!("*");
        let plan = parse(&[group]).unwrap();
        let group = &plan.watches()[0];
        let part = group.of_resource("things").unwrap();
        assert_eq!((&*part.name, &*part.resource, part.check().is_ok()), ("kyma", "things", true));
        for resource in ["secrets", "tokenreviews", "things/status", "*", "", "../x", "Things"] {
            assert!(group.of_resource(resource).is_err(), "{resource}");
        }
    }

    #[test]
    fn agents_that_know_no_watches_on_groups_can_follow_the_rest() {
        let mut group = watch();
        (group["name"], group["group"], group["resource"]) = (json!("all"), json!("example.com"), json!("*"));
        let plan = parse(&[group, watch()]).unwrap();
        let written = serde_json::to_value(&plan).unwrap();
        let names =
            |member: &str| written[member].as_array().unwrap().iter().map(|watch| watch["name"].clone()).collect();
        let (watches, groups): (Vec<_>, Vec<_>) = (names("watches"), names("groupWatches"));
        assert_eq!((watches, groups), (vec![json!("kyma")], vec![json!("all")]));
        assert_eq!(Plan::parse(&written.to_string()).unwrap(), plan);
        assert_eq!(serde_json::to_value(parse(&[watch()]).unwrap()).unwrap().get("groupWatches"), None);
    }

    #[test]
    fn one_invalid_watch_invalidates_the_plan() {
        assert!(matches!(parse(&[watch(), watch()]), Err(ParsePlanError::DuplicateName(_))));
        for (member, value) in [
            ("name", json!("")),
            ("name", json!("Kyma")),
            ("version", json!("../v1")),
            ("namespace", json!("a/b")),
            ("resource", json!("kymas?x=1")),
            ("field", json!("all")),
            ("work", json!([])),
            ("manager", json!("")),
        ] {
            let mut bad = watch();
            bad["name"] = json!("other");
            bad[member] = value;
            assert!(parse(&[watch(), bad]).is_err(), "{member}");
        }
        assert!(Plan::parse("{").is_err());
    }
}
