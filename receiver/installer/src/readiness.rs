//! Condition `SKRWebhook`: the agent is installed and its event path was proven; otherwise the fault.

use std::time::Duration;

use futures::future::join;
use kube::{
    Client,
    api::{DynamicObject, ListParams},
};
use tidewatch_api::{Condition, ConditionStatus, Kyma, key::KymaKey, selectors};
use tidewatch_cluster::{
    error_class::ErrorClass,
    object,
    runtime_access::{RuntimeAccessError, list_first},
    workload::{self, PodFault, Termination},
};
use tidewatch_fleet::{PathState, Unproven};
use tidewatch_kit::foreign_text;

use super::{Component, InstallationState, Installer, Report, component::PODS};

/// First delay until an agent that is not running is checked again; it doubles with each check.
const MIN_RECHECK: Duration = Duration::from_secs(2);
/// Upper limit of that delay.
const MAX_RECHECK: Duration = Duration::from_secs(300);
/// Delay before an object that the agent does not need is written again after a refusal.
const ADDITIONAL_AGAIN: Duration = Duration::from_secs(600);
/// Maximum number of pods whose status is read.
const MAX_PODS: u16 = 5;
/// Maximum length in characters of a message with text from the runtime.
const MAX_MESSAGE_CHARS: usize = 512;

/// Message of the condition `SKRWebhook` while it is met.
pub const SYNCHRONIZED: &str = "skrwebhook is synchronized";

/// Reason of the condition `RuntimeAccess` if there is no access Secret.
pub const SECRET_MISSING: &str = "AccessSecretMissing";
/// Its reason if a process saw how the access Secret was deleted during the deletion of the Kyma.
pub const SECRET_DELETED: &str = "AccessSecretDeleted";

/// State of a condition of a runtime: `SKRWebhook`, or its access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The condition is met; for `SKRWebhook` the agent is installed, and its path was proven.
    Ready,
    /// The condition is met, with a remark.
    ReadyWith {
        /// CamelCase word of a closed set.
        reason: &'static str,
        /// One sentence, stable while the remark is the same.
        message: String,
    },
    /// Not yet, or no longer.
    Not {
        /// CamelCase word of a closed set.
        reason: &'static str,
        /// One sentence, stable while the fault is the same.
        message: String,
    },
}

impl From<&RuntimeAccessError> for Readiness {
    fn from(error: &RuntimeAccessError) -> Self {
        let reason = match error {
            RuntimeAccessError::Missing => SECRET_MISSING,
            RuntimeAccessError::SecretDeleted(_) => SECRET_DELETED,
            RuntimeAccessError::Several(_) => "SeveralAccessSecrets",
            RuntimeAccessError::Kubeconfig(_) => "KubeconfigRefused",
        };
        Self::Not { reason, message: error.to_string() }
    }
}

/// Evidence about an event path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathEvidence {
    /// The path is proven.
    Proven,
    /// The path is known to be broken.
    Lost,
    /// Neither is known, or no path is expected.
    None,
}

impl PathEvidence {
    /// Derives the evidence from the state of the path. Until a replica that acquired the Kyma's shard has its own
    /// evidence, the condition `EventPath` has that of its predecessor.
    pub(super) fn of(path: Option<&PathState>, kyma: &Kyma) -> Self {
        match path {
            Some(PathState::Proven) => Self::Proven,
            None | Some(PathState::Unknown) if was_lost(kyma).is_some() => Self::Lost,
            path if is_lost(path) => Self::Lost,
            _ => Self::None,
        }
    }
}

impl Readiness {
    /// Returns whether the condition is met.
    pub const fn is_met(&self) -> bool {
        matches!(self, Self::Ready | Self::ReadyWith { .. })
    }

    /// Adds an object that the runtime refuses to `SKRWebhook`.
    fn without_additional(self, refusal: &str) -> Self {
        match self {
            Self::Ready | Self::ReadyWith { .. } => {
                let message = format!("{SYNCHRONIZED}, except for an object that the agent does not need: {refusal}");
                let message = foreign_text::shortened(&message, MAX_MESSAGE_CHARS);
                Self::ReadyWith { reason: Condition::READY, message }
            }
            Self::Not { reason, message } => Self::not(reason, format!("{message}; {refusal}")),
        }
    }

    fn not(reason: &'static str, message: impl Into<String>) -> Self {
        Self::Not { reason, message: foreign_text::shortened(&message.into(), MAX_MESSAGE_CHARS) }
    }
}

/// Status of the Deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DeploymentStatus {
    Available,
    /// The pod could not be created.
    Refused(String),
    Pending,
}

impl Installer {
    /// Computes the condition and the delay until the next check; `None` for the condition leaves it as it is. `kyma`
    /// is the Kyma in KCP. Sends requests to the runtime only if the report, the path or an earlier check leaves a
    /// doubt.
    pub async fn readiness(
        &self,
        client: &Client,
        key: &KymaKey,
        kyma: &Kyma,
        report: &Report,
        installed: &mut InstallationState,
    ) -> (Option<Readiness>, Option<Duration>) {
        if let Some(failure) = report.failures.iter().find(|failure| !failure.is_of_additional()) {
            let error = &failure.error;
            // An agent that runs does so without the objects that the runtime refuses, and may be upgraded.
            if installed.awaiting_pod && error.class() == ErrorClass::Refused && agent_is_available(client).await {
                installed.awaiting_pod = false;
                self.report_image(key, installed);
            }
            // The condition `RuntimeAccess` reports an unreachable runtime.
            let is_reported = error.class() == ErrorClass::Refused;
            return (is_reported.then(|| Readiness::not(error.reason(), error.line())), None);
        }
        let (readiness, recheck) = self.agent_readiness(client, key, kyma, installed).await;
        let Some(refused) = report.failures.first() else { return (readiness, recheck) };
        let readiness = readiness.map(|readiness| readiness.without_additional(&refused.error.line()));
        (readiness, recheck.into_iter().chain([ADDITIONAL_AGAIN]).min())
    }

    /// As [`Self::readiness`], if no object that the agent needs is refused.
    async fn agent_readiness(
        &self,
        client: &Client,
        key: &KymaKey,
        kyma: &Kyma,
        installed: &mut InstallationState,
    ) -> (Option<Readiness>, Option<Duration>) {
        let path = (self.path)(key);
        let was_ready = was_ready(kyma);
        if !installed.awaiting_pod && was_ready && !is_lost(path.as_ref()) {
            return (Some(Readiness::Ready), None);
        }
        let status = match agent_deployment(client).await {
            Ok(Some(deployment)) => deployment_status(&deployment),
            // The next reconcile reports and repairs a deleted Deployment.
            Ok(None) => DeploymentStatus::Pending,
            Err(_) => return (None, None),
        };
        let proven = path == Some(PathState::Proven);
        let readiness = match status {
            DeploymentStatus::Available => {
                installed.awaiting_pod = false;
                self.report_image(key, installed);
                if proven || was_ready {
                    installed.rechecks = 0;
                    return (Some(Readiness::Ready), None);
                }
                unproven(kyma)
            }
            DeploymentStatus::Refused(message) if message.contains("exceeded quota") => {
                Readiness::not("Quota", message)
            }
            DeploymentStatus::Refused(message) => Readiness::not("Refused", message),
            DeploymentStatus::Pending => self.pending(client).await,
        };
        let wait = MIN_RECHECK.saturating_mul(2u32.saturating_pow(installed.rechecks.into())).min(MAX_RECHECK);
        installed.rechecks = installed.rechecks.saturating_add(1);
        // A restart of an agent that was ready is no fault.
        let is_fault = !matches!(&readiness, Readiness::Not { reason: "Pending" | "NoCertificate", .. });
        ((is_fault || !was_ready).then_some(readiness), Some(wait))
    }

    /// Finds the reason for which the pod is not ready.
    async fn pending(&self, client: &Client) -> Readiness {
        let pods = PODS.api(client);
        let secrets = Component::Secret.kind().api(client);
        let params = ListParams::default().labels(&selectors::agent_pods());
        let listed = list_first(&pods, &params, MAX_PODS);
        let (pods, secret) = join(listed, object::get_metadata(&secrets, Component::Secret.name())).await;
        if let Some(fault) = pods.iter().flatten().find_map(fault) {
            return fault;
        }
        match secret {
            Ok(Some(secret)) if !has_certificate(&secret) => {
                Readiness::not("NoCertificate", "the agent has no certificate yet")
            }
            _ => Readiness::not("Pending", "the agent is not ready yet"),
        }
    }
}

/// Reads the agent's Deployment; `None` if it does not exist.
async fn agent_deployment(client: &Client) -> kube::Result<Option<DynamicObject>> {
    object::get(&Component::Deployment.kind().api(client), Component::Deployment.name()).await
}

/// Returns whether a pod of the agent's Deployment runs; false if that cannot be read.
async fn agent_is_available(client: &Client) -> bool {
    agent_deployment(client).await.is_ok_and(|found| found.is_some_and(|deployment| is_available(&deployment)))
}

/// Returns whether the condition is True.
pub fn was_ready(kyma: &Kyma) -> bool {
    shown(kyma, "SKRWebhook").is_some_and(Condition::is_true)
}

/// Returns whether an expected event path is known to be broken.
fn is_lost(path: Option<&PathState>) -> bool {
    matches!(path, Some(PathState::Unproven(flaw)) if !matches!(flaw, Unproven::Away | Unproven::LegacyAgent))
}

fn shown<'a>(kyma: &'a Kyma, kind: &str) -> Option<&'a Condition> {
    kyma.status.as_ref()?.condition(kind)
}

/// Returns the condition `EventPath` if it is False.
fn was_lost(kyma: &Kyma) -> Option<&Condition> {
    shown(kyma, "EventPath").filter(|condition| condition.status == ConditionStatus::False)
}

/// Fault of a running pod without a proven event path.
fn unproven(kyma: &Kyma) -> Readiness {
    let message = match was_lost(kyma) {
        Some(condition) => {
            format!("the agent runs, but its event path is not proven since {}", condition.last_transition_time.0)
        }
        None => "the agent runs, but its event path has not been proven yet".to_owned(),
    };
    Readiness::not("PathNotProven", message)
}

/// Returns whether a pod of the current generation of the Deployment runs.
pub(super) fn is_available(deployment: &DynamicObject) -> bool {
    deployment_status(deployment) == DeploymentStatus::Available
}

fn deployment_status(deployment: &DynamicObject) -> DeploymentStatus {
    let status = &deployment.data["status"];
    let observed = workload::is_observed(deployment);
    if observed && status["availableReplicas"].as_i64() >= Some(1) && status["updatedReplicas"].as_i64() >= Some(1) {
        return DeploymentStatus::Available;
    }
    match workload::replica_failure(deployment).filter(|_| observed) {
        Some(message) => DeploymentStatus::Refused(message.to_owned()),
        None => DeploymentStatus::Pending,
    }
}

/// Derives the fault of a pod from its status.
fn fault(pod: &DynamicObject) -> Option<Readiness> {
    Some(match PodFault::of(pod)? {
        PodFault::ImageName { image, .. } | PodFault::ImagePull { image, .. } => {
            Readiness::not("ImagePull", format!("the agent's image {image} cannot be pulled"))
        }
        PodFault::CrashLoop { last, .. } => Readiness::not("CrashLoop", crashed(&last)),
        PodFault::Start { message, .. } => {
            Readiness::not("Container", format!("the agent's container cannot be started: {message}"))
        }
        PodFault::Unschedulable { message, .. } => {
            Readiness::not("Unschedulable", format!("no node takes the agent: {message}"))
        }
    })
}

/// Message for a process that terminates repeatedly.
fn crashed(last: &Termination<'_>) -> String {
    let message = last.message;
    match last.code {
        Some(code) if message.is_empty() => format!("the agent ends again and again with code {code}"),
        Some(code) => {
            // The error line of the process; other log lines contain timestamps.
            let is_error = |line: &&str| line.get(..6).is_some_and(|start| start.eq_ignore_ascii_case("error:"));
            let line = message.lines().find(is_error).or_else(|| message.lines().last()).unwrap_or_default();
            format!("the agent ends again and again with code {code}: {line}")
        }
        None => "the agent ends again and again".to_owned(),
    }
}

/// Returns whether the Secret contains a certificate, according to its managed fields: the content is not read.
fn has_certificate(secret: &DynamicObject) -> bool {
    let mut fields = secret.metadata.managed_fields.iter().flatten().filter_map(|entry| entry.fields_v1.as_ref());
    fields.any(|fields| fields.0["f:data"].get("f:tls.crt").is_some())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object(value: Value) -> DynamicObject {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn deployment_is_available_when_its_current_generation_is() {
        let deployment = |observed: i64, available: i64| {
            deployment_status(&object(json!({"metadata": {"generation": 2}, "status": {"observedGeneration": observed,
                "availableReplicas": available, "updatedReplicas": 1,
                "conditions": [{"type": "ReplicaFailure", "status": "True", "message": "pods \"x\" is forbidden"}]}})))
        };
        assert_eq!(deployment(2, 1), DeploymentStatus::Available);
        assert_eq!(deployment(1, 1), DeploymentStatus::Pending);
        assert_eq!(deployment(2, 0), DeploymentStatus::Refused("pods \"x\" is forbidden".into()));
        assert_eq!(deployment_status(&object(json!({"metadata": {"generation": 1}}))), DeploymentStatus::Pending);
    }

    #[test]
    fn pod_fault_maps_to_reason_and_message() {
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
    fn message_of_a_pod_is_one_short_line() {
        let unscheduled = object(json!({"metadata": {}, "status": {"conditions": [
            {"type": "PodScheduled", "status": "False", "message": format!("a\u{1b}[2J\nb{}", "x".repeat(100_000))}]}}));
        let Some(Readiness::Not { message, .. }) = fault(&unscheduled) else { panic!("no fault") };
        assert!(message.starts_with("no node takes the agent: a [2J bxx"), "{message:.60?}");
        assert_eq!(message.chars().count(), MAX_MESSAGE_CHARS);
    }

    #[test]
    fn certificate_is_detected_from_managed_fields() {
        let secret = |fields: Value| {
            has_certificate(&object(json!({"metadata": {"managedFields": [{"manager": "m", "fieldsV1": fields}]}})))
        };
        assert!(secret(json!({"f:data": {"f:tls.crt": {}, "f:tls.key": {}}})));
        assert!(!secret(json!({"f:type": {}})));
        assert!(!has_certificate(&object(json!({"metadata": {}}))));
    }
}
