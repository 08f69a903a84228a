//! Desired objects of an installation, built once for all runtimes with the same plan, roots and pull secret.

use std::{hash::Hash, sync::Arc};

use serde_json::Value;
use tidewatch_api::{
    identity::RuntimeId,
    names::{AGENT_PULL_SECRET, RUNTIME_ID_KEY, annotation},
    plan::Plan,
};
use tidewatch_kit::hash;
use tidewatch_trust::TrustBundle;

use super::{Component, Settings, objects::objects, upgrade::Image};

/// Set of desired objects.
pub(super) struct DesiredObjects {
    plan: Arc<Plan>,
    trust: String,
    pull_secret: Option<Arc<Value>>,
    /// In the order of the components.
    pub(super) objects: Vec<DesiredObject>,
    pub(super) compat_webhooks: bool,
    /// The Deployment names the Secret with the name of the agent's copy.
    pub(super) names_pull_secret_copy: bool,
}

/// Values that differ between runtimes of one plan.
pub(super) struct Params<'a> {
    pub(super) runtime: &'a RuntimeId,
    /// Image for the runtime's agent.
    pub(super) image: Image,
    /// The event path was not proven when the image replaced another one, nor since.
    pub(super) unproven_before: bool,
    /// The runtime refuses the PriorityClass, without which it would refuse a pod that names it.
    pub(super) without_priority: bool,
}

/// One desired object.
pub(super) struct DesiredObject {
    pub(super) component: Component,
    body: Value,
    hash: u64,
}

impl DesiredObjects {
    pub(super) fn new(
        settings: &Settings,
        plan: Arc<Plan>,
        trust: &TrustBundle,
        pull_secret: Option<&Arc<Value>>,
    ) -> Self {
        let object = |(component, body): (Component, Value)| {
            let hash = hash(&body.to_string());
            DesiredObject { component, body, hash }
        };
        Self {
            objects: objects(settings, &plan, trust, pull_secret.map(AsRef::as_ref)).into_iter().map(object).collect(),
            plan,
            trust: trust.revision().to_owned(),
            pull_secret: pull_secret.cloned(),
            compat_webhooks: settings.compat_webhooks,
            names_pull_secret_copy: settings
                .pull_secret
                .as_ref()
                .is_some_and(|secret| secret.name_in_runtime() == AGENT_PULL_SECRET),
        }
    }

    pub(super) fn is_current(&self, plan: &Arc<Plan>, trust: &TrustBundle, pull_secret: Option<&Arc<Value>>) -> bool {
        (Arc::ptr_eq(&self.plan, plan) || self.plan == *plan)
            && self.trust == trust.revision()
            && self.pull_secret.as_ref() == pull_secret
    }
}

impl DesiredObject {
    /// Returns the object for one runtime.
    pub(super) fn body(&self, Params { runtime, image, unproven_before, without_priority }: &Params<'_>) -> Value {
        let mut body = self.body.clone();
        match self.component {
            Component::ConfigMap => body["data"][RUNTIME_ID_KEY] = runtime.as_str().into(),
            Component::Deployment => {
                body["spec"]["template"]["spec"]["containers"][0]["image"] = image.as_ref().into();
                if *unproven_before {
                    body["metadata"]["annotations"][annotation::UNPROVEN_BEFORE] = image.as_ref().into();
                }
                let pod = body["spec"]["template"]["spec"].as_object_mut().filter(|_| *without_priority);
                pod.and_then(|pod| pod.remove("priorityClassName"));
            }
            _ => {}
        }
        body
    }

    /// Identifies [`Self::body`] within this process.
    pub(super) fn hash(&self, Params { runtime, image, unproven_before, without_priority }: &Params<'_>) -> u64 {
        match self.component {
            Component::ConfigMap => hash(&(self.hash, runtime)),
            Component::Deployment => hash(&(self.hash, image, unproven_before, without_priority)),
            _ => self.hash,
        }
    }
}

/// Hashes a value for comparison within this process; never returns 0, which means *not verified*.
pub(super) fn hash(value: &impl Hash) -> u64 {
    hash::hash(value).max(1)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use tidewatch_trust::{CA_VALIDITY, Ca};

    impl DesiredObjects {
        pub(crate) fn get(&self, component: Component) -> Option<&DesiredObject> {
            self.objects.iter().find(|object| object.component == component)
        }
    }

    /// Settings as parsed from flags.
    pub(crate) fn settings() -> Settings {
        Settings {
            image: "example.test/tidewatch-agent:1".into(),
            receiver: "https://kcp.example:8443".parse().unwrap(),
            enrolment: "https://kcp.example:8444".parse().unwrap(),
            memory: "64Mi".parse().unwrap(),
            pull_secret: None,
            api_server_ports: vec![443, 6443],
            compat_webhooks: false,
            trust_domain: "kyma.local".parse().unwrap(),
        }
    }

    #[test]
    fn config_map_varies_by_runtime_and_roots_and_deployment_by_image() {
        let roots = |name| Ca::generate(name, 1_800_000_000, CA_VALIDITY).unwrap().trust_bundle();
        let plan = Arc::new(Plan::new("1".into(), Vec::new()).unwrap());
        let trust = roots("a");
        let other = roots("b");
        let desired = DesiredObjects::new(&settings(), plan.clone(), &trust, None);
        assert!(desired.is_current(&plan, &trust, None) && !desired.is_current(&plan, &other, None));
        assert!(!desired.is_current(&plan, &trust, Some(&Value::Null.into())));
        let changed = DesiredObjects::new(&settings(), plan, &other, None);
        let runtimes: [RuntimeId; 2] = ["a", "b"].map(|id| id.parse().unwrap());
        let params = |runtime: usize, image: &str| Params {
            runtime: &runtimes[runtime],
            image: image.into(),
            unproven_before: false,
            without_priority: false,
        };
        let [a, b, newer] = [params(0, "i:1"), params(1, "i:1"), params(0, "i:2")];
        let unproven = Params { unproven_before: true, ..params(0, "i:1") };
        let unprioritized = Params { without_priority: true, ..params(0, "i:1") };
        for (objects, after) in desired.objects.iter().zip(&changed.objects) {
            let is_map = objects.component == Component::ConfigMap;
            assert_eq!(objects.hash(&a) != objects.hash(&b), is_map, "{:?}", objects.component);
            assert_eq!(objects.hash(&a) != after.hash(&a), is_map, "{:?}", objects.component);
            let is_deployment = objects.component == Component::Deployment;
            assert_eq!(objects.hash(&a) != objects.hash(&newer), is_deployment, "{:?}", objects.component);
            assert_eq!(objects.hash(&a) != objects.hash(&unproven), is_deployment, "{:?}", objects.component);
            assert_eq!(objects.hash(&a) != objects.hash(&unprioritized), is_deployment, "{:?}", objects.component);
        }
        let body = desired.get(Component::ConfigMap).unwrap().body(&a);
        assert_eq!(
            (&body["data"]["runtime-id"], &body["data"]["receiver-url"]),
            (&"a".into(), &"https://kcp.example:8443".into())
        );
        assert_eq!(body["data"]["ca.crt"], trust.to_pem());
    }
}
