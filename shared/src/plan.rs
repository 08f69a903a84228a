//! The plan: what an agent watches, as the receiver writes it to the ConfigMap `kyma-system/tidewatch-agent`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Watches of one plan, at most.
pub const MAX_WATCHES: usize = 500;

/// Why a plan is refused whole.
#[derive(Debug, Error)]
pub enum ParsePlan {
    /// Not JSON of the plan's shape.
    #[error("the plan is not readable")]
    Json(#[from] serde_json::Error),
    /// More than [`MAX_WATCHES`].
    #[error("the plan has more than {MAX_WATCHES} watches")]
    TooMany,
    /// Two watches of one name.
    #[error("the plan names the watch {0:?} twice")]
    Doubled(String),
    /// A name or part that cannot be.
    #[error("watch {watch:?}: {field} is not valid")]
    Invalid {
        /// Which watch.
        watch: String,
        /// Which member of it.
        field: &'static str,
    },
    /// A kind that carries secrets or tokens.
    #[error("watch {watch:?}: {resource:?} may not be watched")]
    Forbidden {
        /// Which watch.
        watch: String,
        /// Which resource.
        resource: String,
    },
}

/// What a watch reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Field {
    /// Everything but pure status changes.
    Spec,
    /// Every change.
    Status,
}

/// The work that a watch stands for: what must have ended before its events are settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// The Kyma reconcile of this runtime.
    Kyma,
    /// The catalog sync of this runtime.
    Catalog,
    /// The Manifests of this runtime.
    Manifest,
    /// What we installed in this runtime.
    Installer,
    /// Forwarding to another manager.
    Forward,
}

/// One watch of the plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedWatch {
    /// Unique in the plan: 1 to 253 lower-case letters, digits, '-', '.' or '/'.
    pub name: String,
    /// API group, empty for the core group.
    #[serde(default)]
    pub group: String,
    /// API version, or `*`: the agent asks discovery for the preferred one.
    pub version: String,
    /// Plural resource name.
    pub resource: String,
    /// Only this namespace; absent for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Label selector in the API's query syntax; empty for all.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label_selector: String,
    /// Field selector in the API's query syntax; empty for all.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub field_selector: String,
    /// What it reports.
    pub field: Field,
    /// Who is told.
    pub manager: String,
    /// What it stands for.
    pub work: BTreeSet<Work>,
}

/// A plan that holds: every watch has a name of its own and a kind that may be watched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Changes with the content; opaque.
    revision: String,
    watches: Vec<PlannedWatch>,
}

impl Plan {
    /// Reads the plan of a ConfigMap.
    ///
    /// # Errors
    /// [`ParsePlan`]; a plan is taken whole or not at all.
    pub fn parse(text: &str) -> Result<Self, ParsePlan> {
        #[derive(Deserialize)]
        struct Wire {
            revision: String,
            watches: Vec<PlannedWatch>,
        }
        let Wire { revision, watches } = serde_json::from_str(text)?;
        Self::new(revision, watches)
    }

    /// Checks the watches and makes a plan of them.
    ///
    /// # Errors
    /// [`ParsePlan`]; the revision must have 1 to 128 characters.
    pub fn new(revision: String, watches: Vec<PlannedWatch>) -> Result<Self, ParsePlan> {
        if watches.len() > MAX_WATCHES {
            return Err(ParsePlan::TooMany);
        }
        if revision.is_empty() || revision.len() > 128 {
            return Err(ParsePlan::Invalid { watch: String::new(), field: "revision" });
        }
        let mut names = BTreeSet::new();
        for watch in &watches {
            watch.check()?;
            if !names.insert(&watch.name) {
                return Err(ParsePlan::Doubled(watch.name.clone()));
            }
        }
        Ok(Self { revision, watches })
    }

    /// Changes with the content; opaque.
    #[must_use]
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// The watches, each name once.
    #[must_use]
    pub fn watches(&self) -> &[PlannedWatch] {
        &self.watches
    }
}

impl PlannedWatch {
    /// Checks one watch by itself.
    ///
    /// # Errors
    /// [`ParsePlan::Invalid`] and [`ParsePlan::Forbidden`].
    pub fn check(&self) -> Result<(), ParsePlan> {
        let invalid = |field| Err(ParsePlan::Invalid { watch: self.name.chars().take(253).collect(), field });
        if !is_name(&self.name, "-./") {
            return invalid("name");
        }
        if !self.group.is_empty() && !is_name(&self.group, "-.") {
            return invalid("group");
        }
        if self.version != "*" && !is_name(&self.version, "") {
            return invalid("version");
        }
        if self.namespace.as_deref().is_some_and(|namespace| !is_name(namespace, "-")) {
            return invalid("namespace");
        }
        if self.manager.is_empty() || self.manager.len() > 253 {
            return invalid("manager");
        }
        if self.label_selector.len() > 4_096 || self.field_selector.len() > 4_096 {
            return invalid("selector");
        }
        if self.work.is_empty() {
            return invalid("work");
        }
        if carries_secrets(&self.group, &self.resource) {
            let resource = self.resource.chars().take(253).collect();
            return Err(ParsePlan::Forbidden { watch: self.name.clone(), resource });
        }
        if !is_name(&self.resource, "-.") {
            return invalid("resource");
        }
        Ok(())
    }
}

/// Whether a resource carries secrets or tokens, or stands for all resources and so for those too. Subresources are none of a
/// watch's business either: `serviceaccounts/token` is one of them.
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

    fn parse(watches: &[Value]) -> Result<Plan, ParsePlan> {
        Plan::parse(&json!({"revision": "r", "watches": watches}).to_string())
    }

    #[test]
    fn a_plan_survives_being_written_and_read() {
        let plan = parse(&[watch()]).unwrap();
        assert_eq!(Plan::parse(&serde_json::to_string(&plan).unwrap()).unwrap(), plan);
        assert_eq!(plan.watches()[0].work, BTreeSet::from([Work::Kyma]));
    }

    #[test]
    fn kinds_with_secrets_are_refused_also_through_wildcards() {
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
    fn a_plan_with_one_bad_watch_is_refused_whole() {
        assert!(matches!(parse(&[watch(), watch()]), Err(ParsePlan::Doubled(_))));
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
