//! The condition `SKRWebhook`: whether the agent is installed and has been proven, and if not, what is wrong.

use std::time::Duration;

use kube::{
    Client,
    api::{DynamicObject, ListParams},
};
use serde_json::Value;
use tidewatch_shared::api::{ConditionStatus, Kyma};

use super::{Installed, Installer, Part, Report, objects::pod_selector, part::PODS};
use crate::{
    base::{class::Class, key::KymaKey},
    fleet::{PathState, Unproven},
    kube::object,
};

/// Until an agent that does not run yet is looked at again; doubles with each look.
const FIRST_LOOK: Duration = Duration::from_secs(2);
/// The longest of these waits.
const LAST_LOOK: Duration = Duration::from_secs(300);
/// Characters of others' words in a condition.
const MAX_WORDS: usize = 512;

/// What the condition says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// Installed, and its path was proven.
    Ready,
    /// Not yet, or not any more.
    Not {
        /// A CamelCase word of a closed set.
        reason: &'static str,
        /// One sentence, stable while the fault is the same.
        message: String,
    },
}

impl Readiness {
    fn not(reason: &'static str, message: impl Into<String>) -> Self {
        let message: String = message.into();
        Self::Not { reason, message: message.chars().take(MAX_WORDS).collect() }
    }
}

/// How the Deployment stands.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Standing {
    Available,
    /// Its pod could not even be made.
    Refused(String),
    Pending,
}

impl Installer {
    /// What the condition shall say, if it is to say anything now, and when to look again. `kyma` is the one in KCP. Asks the runtime only
    /// while there is a doubt.
    pub(crate) async fn readiness(
        &self,
        client: &Client,
        key: &KymaKey,
        kyma: &Kyma,
        report: &Report,
        installed: &mut Installed,
    ) -> (Option<Readiness>, Option<Duration>) {
        if let Some(failure) = report.failures.first() {
            let error = &failure.error;
            // Who cannot be reached is told by another condition.
            let told = error.class() == Class::Refused;
            return (told.then(|| Readiness::not(error.reason(), error.line())), None);
        }
        let path = (self.path)(key);
        let was_ready = was_ready(kyma);
        if !installed.settling && was_ready && !is_lost(path.as_ref()) {
            return (Some(Readiness::Ready), None);
        }
        let standing = match object::get(&Part::Deployment.kind().api(client), Part::Deployment.name()).await {
            Ok(Some(deployment)) => standing(&deployment),
            // Its deletion is told, and mended, by the next pass.
            Ok(None) => Standing::Pending,
            Err(_) => return (None, None),
        };
        let proven = path == Some(PathState::Proven);
        let says = match standing {
            Standing::Available => {
                installed.settling = false;
                self.note(key, installed);
                if proven || was_ready {
                    installed.looks = 0;
                    return (Some(Readiness::Ready), None);
                }
                unproven(kyma)
            }
            Standing::Refused(words) if words.contains("exceeded quota") => Readiness::not("Quota", words),
            Standing::Refused(words) => Readiness::not("Refused", words),
            Standing::Pending => self.pending(client).await,
        };
        let wait = FIRST_LOOK.saturating_mul(2u32.saturating_pow(installed.looks.into())).min(LAST_LOOK);
        installed.looks = installed.looks.saturating_add(1);
        // An agent that is on its way is no news where it was ready before.
        let is_fault = !matches!(&says, Readiness::Not { reason: "Pending" | "NoCertificate", .. });
        ((is_fault || !was_ready).then_some(says), Some(wait))
    }

    /// What keeps the pod from being ready.
    async fn pending(&self, client: &Client) -> Readiness {
        let params = ListParams::default().labels(&pod_selector()).limit(5);
        if let Ok(pods) = PODS.api(client).list(&params).await
            && let Some(fault) = pods.items.iter().find_map(fault)
        {
            return fault;
        }
        match super::apply::metadata(&Part::Secret.kind().api(client), Part::Secret.name()).await {
            Ok(Some(secret)) if !has_certificate(&secret) => {
                Readiness::not("NoCertificate", "the agent has no certificate yet")
            }
            _ => Readiness::not("Pending", "the agent is not ready yet"),
        }
    }
}

/// Whether the condition says that the agent is installed and was proven.
pub(crate) fn was_ready(kyma: &Kyma) -> bool {
    shown(kyma, "SKRWebhook").is_some_and(|(status, _)| status == ConditionStatus::True)
}

/// Whether events do not come although they should.
fn is_lost(path: Option<&PathState>) -> bool {
    match path {
        None | Some(PathState::Unknown | PathState::Proven) => false,
        Some(PathState::Unproven(flaw)) => !matches!(flaw, Unproven::Away | Unproven::LegacyAgent),
    }
}

fn shown<'a>(kyma: &'a Kyma, kind: &str) -> Option<(ConditionStatus, &'a tidewatch_shared::api::Condition)> {
    let condition = kyma.status.as_ref()?.condition(kind)?;
    Some((condition.status, condition))
}

/// The pod runs, and nothing is heard of it, or not what should be.
fn unproven(kyma: &Kyma) -> Readiness {
    let since = shown(kyma, "EventPath").filter(|(status, _)| *status == ConditionStatus::False);
    let message = match since {
        Some((_, condition)) => {
            format!("the agent runs, but its event path is not proven since {}", condition.last_transition_time.0)
        }
        None => "the agent runs, but its event path has not been proven yet".to_owned(),
    };
    Readiness::not("PathNotProven", message)
}

/// Whether the pod of a Deployment runs as it says now.
pub(super) fn is_available(deployment: &DynamicObject) -> bool {
    standing(deployment) == Standing::Available
}

fn standing(deployment: &DynamicObject) -> Standing {
    let status = &deployment.data["status"];
    let observed = status["observedGeneration"].as_i64() >= deployment.metadata.generation;
    if observed && status["availableReplicas"].as_i64() >= Some(1) && status["updatedReplicas"].as_i64() >= Some(1) {
        return Standing::Available;
    }
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let refused =
        conditions.into_iter().find(|condition| condition["type"] == "ReplicaFailure" && condition["status"] == "True");
    match refused.filter(|_| observed).and_then(|condition| condition["message"].as_str()) {
        Some(words) => Standing::Refused(words.to_owned()),
        None => Standing::Pending,
    }
}

/// What is wrong with a pod, as its status says.
fn fault(pod: &DynamicObject) -> Option<Readiness> {
    let status = &pod.data["status"];
    let containers = status["containerStatuses"].as_array().into_iter().flatten();
    let waiting = containers.map(|container| &container["state"]["waiting"]).find(|waiting| waiting.is_object());
    if let Some((reason, words)) = waiting.and_then(|waiting| Some((waiting["reason"].as_str()?, &waiting["message"])))
    {
        let words = words.as_str().unwrap_or_default();
        match reason {
            "ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull" => {
                let image = pod.data["spec"]["containers"][0]["image"].as_str().unwrap_or_default();
                // The kubelet's words move from try to try.
                return Some(Readiness::not("ImagePull", format!("the agent's image {image} cannot be pulled")));
            }
            "CrashLoopBackOff" => return Some(Readiness::not("CrashLoop", crashed(pod))),
            "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => {
                return Some(Readiness::not("Container", format!("the agent's container cannot be started: {words}")));
            }
            _ => {}
        }
    }
    let unscheduled = |condition: &&Value| condition["type"] == "PodScheduled" && condition["status"] == "False";
    let condition = status["conditions"].as_array().into_iter().flatten().find(unscheduled)?;
    let words = condition["message"].as_str().unwrap_or_default();
    Some(Readiness::not("Unschedulable", format!("no node takes the agent: {words}")))
}

/// The last words of a process that ends again and again.
fn crashed(pod: &DynamicObject) -> String {
    let ended = &pod.data["status"]["containerStatuses"][0]["lastState"]["terminated"];
    let words = ended["message"].as_str().unwrap_or_default().trim();
    match ended["exitCode"].as_i64() {
        Some(code) if words.is_empty() => format!("the agent ends again and again with code {code}"),
        Some(code) => {
            // How a program says why it ends; what it logged before has times in it.
            let is_error = |line: &&str| line.get(..6).is_some_and(|start| start.eq_ignore_ascii_case("error:"));
            let line = words.lines().find(is_error).or_else(|| words.lines().last()).unwrap_or_default();
            format!("the agent ends again and again with code {code}: {line}")
        }
        None => "the agent ends again and again".to_owned(),
    }
}

/// Whether the Secret has a certificate, told by who owns which of its members: what is in them is not looked at.
fn has_certificate(secret: &DynamicObject) -> bool {
    let fields = secret.metadata.managed_fields.iter().flatten().filter_map(|entry| entry.fields_v1.as_ref());
    fields.into_iter().any(|fields| fields.0["f:data"].get("f:tls.crt").is_some())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> DynamicObject {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_deployment_is_available_when_this_generation_is() {
        let deployment = |observed: i64, available: i64| {
            standing(&object(json!({"metadata": {"generation": 2}, "status": {"observedGeneration": observed,
                "availableReplicas": available, "updatedReplicas": 1,
                "conditions": [{"type": "ReplicaFailure", "status": "True", "message": "pods \"x\" is forbidden"}]}})))
        };
        assert_eq!(deployment(2, 1), Standing::Available);
        assert_eq!(deployment(1, 1), Standing::Pending);
        assert_eq!(deployment(2, 0), Standing::Refused("pods \"x\" is forbidden".into()));
        assert_eq!(standing(&object(json!({"metadata": {"generation": 1}}))), Standing::Pending);
    }

    #[test]
    fn a_pods_fault_is_named() {
        let waiting = |reason: &str| {
            fault(&object(
                json!({"metadata": {}, "spec": {"containers": [{"image": "i:1"}]}, "status": {"containerStatuses": [
                {"state": {"waiting": {"reason": reason, "message": "m"}},
                 "lastState": {"terminated": {"exitCode": 3, "message": "a\nerror: no plan\nb\n"}}}]}}),
            ))
        };
        let named = |reason| match waiting(reason) {
            Some(Readiness::Not { reason, message }) => (reason, message),
            other => panic!("{other:?}"),
        };
        assert_eq!(named("ImagePullBackOff"), ("ImagePull", "the agent's image i:1 cannot be pulled".to_owned()));
        assert_eq!(
            named("CrashLoopBackOff"),
            ("CrashLoop", "the agent ends again and again with code 3: error: no plan".to_owned())
        );
        assert_eq!(waiting("ContainerCreating"), None);
        let unscheduled = object(json!({"metadata": {}, "status": {"conditions": [
            {"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}]}}));
        assert_eq!(fault(&unscheduled), Some(Readiness::not("Unschedulable", "no node takes the agent: 0/3 nodes")));
    }

    #[test]
    fn a_certificate_is_seen_without_being_read() {
        let secret = |fields: Value| {
            has_certificate(&object(json!({"metadata": {"managedFields": [{"manager": "m", "fieldsV1": fields}]}})))
        };
        assert!(secret(json!({"f:data": {"f:tls.crt": {}, "f:tls.key": {}}})));
        assert!(!secret(json!({"f:type": {}})));
        assert!(!has_certificate(&object(json!({"metadata": {}}))));
    }
}
