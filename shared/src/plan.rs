//! The plan: the watches of an agent, written by the receiver to the ConfigMap `kyma-system/tidewatch-agent`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};
use thiserror::Error;

/// Watches per plan, at most.
pub const MAX_WATCHES: usize = 500;

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
    /// Plural resource name.
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Opaque; changes with the content.
    revision: String,
    watches: Vec<PlannedWatch>,
}

impl Plan {
    /// Parses the plan in a ConfigMap.
    ///
    /// # Errors
    /// [`ParsePlanError`]; an invalid watch invalidates the plan as a whole.
    pub fn parse(text: &str) -> Result<Self, ParsePlanError> {
        #[derive(Deserialize)]
        struct Wire {
            revision: String,
            watches: Vec<PlannedWatch>,
        }
        let Wire { revision, watches } = serde_json::from_str(text)?;
        Self::new(revision, watches)
    }

    /// Creates a plan of valid watches.
    ///
    /// # Errors
    /// [`ParsePlanError`]; the revision must have 1 to 128 bytes.
    pub fn new(revision: String, watches: Vec<PlannedWatch>) -> Result<Self, ParsePlanError> {
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
        Ok(Self { revision, watches })
    }

    /// The revision: opaque, changes with the content.
    #[must_use]
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// The watches; names are unique.
    #[must_use]
    pub fn watches(&self) -> &[PlannedWatch] {
        &self.watches
    }
}

impl PlannedWatch {
    /// Validates one watch independently of the plan.
    ///
    /// # Errors
    /// [`ParsePlanError::Invalid`] and [`ParsePlanError::Forbidden`].
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
            let resource = self.resource.chars().take(253).collect();
            return Err(ParsePlanError::Forbidden { watch: self.name.clone(), resource });
        }
        if !is_name(&self.resource, "-.") {
            return invalid("resource");
        }
        Ok(())
    }
}

/// True if a resource carries secrets or tokens, or includes such resources through a wildcard. Subresources are
/// included, because `serviceaccounts/token` is one of them.
#[must_use]
pub fn carries_secrets(group: &str, resource: &str) -> bool {
    const SECRET: &[&str] =
        &["secrets", "tokenreviews", "tokenrequests", "selfsubjectreviews", "certificatesigningrequests"];
    group == "*"
        || resource.contains('*')
        || resource.contains('/')
        || SECRET.contains(&resource.to_ascii_lowercase().as_str())
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
