//! The default module CR: which object it is, and what holds it while it is being deleted, by its finalizers and by its own
//! status. Pure.

use std::fmt;

use kube::{ResourceExt as _, api::DynamicObject};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidewatch_api::{Manifest, names::annotation};
use tidewatch_kit::foreign_text::{MAX_NAME_BYTES, line};

use super::{
    inventory::{ObjectKey, split_api_version},
    status::is_default_created,
};

/// Finalizers that a sentence names.
const MAX_FINALIZERS: usize = 5;
/// Characters of the CR's own message in a sentence.
const MAX_MESSAGE_CHARS: usize = 300;

/// The default module CR that was created for a Manifest, as an annotation records it once a version names another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreatedDefault {
    /// Version in which it was created.
    pub api_version: String,
    /// Kind.
    pub kind: String,
    /// Namespace; of no meaning for a cluster-scoped kind.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl CreatedDefault {
    /// The recorded one. `None` if nothing is recorded: then it is the one that the Manifest names.
    pub fn recorded(manifest: &Manifest) -> Option<Self> {
        serde_json::from_str(manifest.annotations().get(annotation::CREATED_DEFAULT)?).ok()
    }

    /// Record of a Manifest that gets another default module CR, or none: the created one stays. `None` if
    /// nothing is to be recorded.
    pub fn beside(manifest: &Manifest, resource: Option<&Value>) -> Option<Self> {
        let named = manifest.spec.resource().filter(|_| is_default_created(manifest));
        let replaced = || named.filter(|named| resource.map(ObjectKey::of) != Some(ObjectKey::of(named)));
        Self::recorded(manifest).or_else(|| replaced().map(Self::of))
    }

    fn of(resource: &Value) -> Self {
        let ObjectKey { kind, namespace, name, .. } = ObjectKey::of(resource);
        let api_version = resource["apiVersion"].as_str().unwrap_or_default().to_owned();
        Self { api_version, kind, namespace, name }
    }

    /// Value of the annotation.
    pub fn to_text(&self) -> String {
        json!(self).to_string()
    }

    /// API group.
    pub fn group(&self) -> &str {
        split_api_version(&self.api_version).0
    }

    fn key(&self) -> ObjectKey {
        ObjectKey::new(self.group(), &self.kind, &self.namespace, &self.name)
    }
}

/// The default module CR of a Manifest: the created one, which stays the same in later versions, else the one that the
/// Manifest names.
pub(super) fn of(manifest: &Manifest) -> Option<ObjectKey> {
    let recorded = CreatedDefault::recorded(manifest).map(|created| created.key());
    recorded.or_else(|| manifest.spec.resource().map(ObjectKey::of))
}

/// A default module CR that is being deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Going {
    key: ObjectKey,
    finalizers: Vec<String>,
    /// State and message of its own status.
    pub(super) says: Option<String>,
}

impl Going {
    /// The CR as last read.
    pub(super) fn of(key: &ObjectKey, object: &DynamicObject) -> Self {
        let finalizers = object.finalizers().iter().take(MAX_FINALIZERS + 1);
        Self {
            key: key.clone(),
            finalizers: finalizers.map(|name| line(name, MAX_NAME_BYTES)).collect(),
            says: says(&object.data["status"]),
        }
    }
}

impl fmt::Display for Going {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.key)?;
        let named = self.finalizers.get(..MAX_FINALIZERS).unwrap_or(&self.finalizers);
        match (named, self.finalizers.len() > MAX_FINALIZERS) {
            ([], _) => Ok(()),
            ([one], _) => write!(f, " (finalizer {one})"),
            (named, false) => write!(f, " (finalizers {})", named.join(", ")),
            (named, true) => write!(f, " (finalizers {} and more)", named.join(", ")),
        }
    }
}

/// State and message of a CR's status, as the operators of modules write them. `None` without a message.
fn says(status: &Value) -> Option<String> {
    let text = |value: &Value| value.as_str().filter(|text| !text.trim().is_empty()).map(str::to_owned);
    let conditions = status["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let unmet = |condition: &&Value| condition["status"] != "True" && text(&condition["message"]).is_some();
    let ready = conditions.iter().find(|condition| condition["type"] == "Ready" && unmet(condition));
    // Times of one format compare as texts.
    let newest = || {
        let changed = |condition: &&Value| text(&condition["lastTransitionTime"]);
        conditions.iter().filter(unmet).max_by_key(changed)
    };
    let of_condition = ready.or_else(newest).and_then(|condition| text(&condition["message"]));
    let message = of_condition.or_else(|| text(&status["description"])).or_else(|| text(&status["message"]))?;
    let said = match text(&status["state"]) {
        Some(state) => format!("{state}: {message}"),
        None => message,
    };
    Some(line(said.trim(), MAX_MESSAGE_CHARS))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn manifest(created: bool, annotations: &Value, resource: &Value) -> Manifest {
        let status = if created { "True" } else { "False" };
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "annotations": annotations},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}, "resource": resource},
            "status": {"state": "Ready", "conditions": [{"type": "ModuleCR", "status": status, "reason": "R",
                "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}))
        .unwrap()
    }

    fn sample(version: &str, name: &str) -> Value {
        json!({"apiVersion": format!("example.test/{version}"), "kind": "Sample",
            "metadata": {"name": name, "namespace": "kyma-system"}})
    }

    #[test]
    fn created_default_is_recorded_when_a_version_names_another_one() {
        let old = sample("v1", "default");
        let other = sample("v1", "other");
        let beside = |manifest: &Manifest, resource: Option<&Value>| {
            CreatedDefault::beside(manifest, resource).map(|created| created.to_text())
        };
        let created = manifest(true, &json!({}), &old);
        let text = beside(&created, Some(&other)).unwrap();
        assert_eq!(
            text,
            r#"{"apiVersion":"example.test/v1","kind":"Sample","name":"default","namespace":"kyma-system"}"#
        );
        assert_eq!(beside(&created, None), Some(text.clone()), "a version without a default module CR");
        for same in [&old, &sample("v2", "default")] {
            assert_eq!(beside(&created, Some(same)), None);
        }
        assert_eq!(beside(&manifest(false, &json!({}), &old), Some(&other)), None, "none was created");
        // It stays recorded.
        let recorded = manifest(true, &json!({annotation::CREATED_DEFAULT: text}), &other);
        for resource in [None, Some(&old), Some(&other)] {
            assert_eq!(beside(&recorded, resource), Some(text.clone()));
        }
        assert_eq!(of(&recorded), Some(ObjectKey::of(&old)));
        assert_eq!(of(&created), Some(ObjectKey::of(&old)));
        let malformed = manifest(true, &json!({annotation::CREATED_DEFAULT: "{"}), &other);
        assert_eq!(of(&malformed), Some(ObjectKey::of(&other)));
    }

    fn going(finalizers: &[String], status: &Value) -> Going {
        let key = ObjectKey::new("example.test", "Sample", "kyma-system", "default");
        let object = json!({"metadata": {"name": "default", "finalizers": finalizers}, "status": status});
        Going::of(&key, &serde_json::from_value(object).unwrap())
    }

    #[test]
    fn finalizers_are_named_and_bounded() {
        let named = |count: usize| {
            let finalizers: Vec<_> = (0..count).map(|n| format!("f{n}")).collect();
            going(&finalizers, &Value::Null).to_string()
        };
        let sample = "Sample kyma-system/default";
        assert_eq!((named(0), named(1)), (sample.to_owned(), format!("{sample} (finalizer f0)")));
        assert_eq!(named(5), format!("{sample} (finalizers f0, f1, f2, f3, f4)"));
        assert_eq!(named(50), format!("{sample} (finalizers f0, f1, f2, f3, f4 and more)"));
        let hostile = going(&["x\u{1b}[2J\n".repeat(10_000)], &Value::Null).to_string();
        assert!(hostile.len() < 400 && !hostile.contains('\n'), "{hostile}");
    }

    #[test]
    fn own_message_is_that_of_the_unmet_condition() {
        let condition = |kind: &str, status: &str, message: &str, changed: &str| json!({"type": kind, "status": status, "reason": "R", "message": message, "lastTransitionTime": changed});
        let says = |status: Value| going(&[], &status).says;
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(says(Value::Null), None);
        assert_eq!(says(json!({"state": "Deleting"})), None, "no more than is known");
        assert_eq!(
            says(json!({"state": "Warning", "description": "instances exist"})),
            some("Warning: instances exist")
        );
        assert_eq!(says(json!({"message": " instances exist "})), some("instances exist"));
        let older = condition("Deleted", "False", "older", "2026-01-01T00:00:00Z");
        let newer = condition("Cleaned", "Unknown", "newer", "2026-01-02T00:00:00Z");
        let met = condition("Installed", "True", "met", "2026-01-03T00:00:00Z");
        let ready = condition("Ready", "False", "2 instances exist", "2026-01-01T00:00:00Z");
        assert_eq!(says(json!({"conditions": [newer, older, met]})), some("newer"));
        assert_eq!(
            says(json!({"state": "Warning", "description": "d", "conditions": [newer, ready, met]})),
            some("Warning: 2 instances exist")
        );
        assert_eq!(says(json!({"conditions": [met], "description": "d"})), some("d"));
        assert_eq!(says(json!({"conditions": {"not": "a list"}, "state": 5, "message": []})), None);
        assert_eq!(says(json!({"message": "x\n".repeat(1_000)})).unwrap().chars().count(), MAX_MESSAGE_CHARS);
    }
}
