//! All objects of an installation, made once for all runtimes that have the same plan and the same roots.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use serde_json::Value;
use tidewatch_shared::{identity::RuntimeId, names::RUNTIME_ID_KEY, plan::Plan};

use super::{Part, Settings, objects::objects};
use crate::pki::TrustBundle;

/// See the module.
pub(super) struct Kit {
    plan: Arc<Plan>,
    trust: String,
    pulled: Option<Arc<Value>>,
    wanted: Vec<Wanted>,
    pub(super) compat_webhooks: bool,
    /// Whether the image is pulled with a Secret.
    pub(super) pulls: bool,
}

/// What of an object differs between runtimes of one plan.
#[derive(Clone, Copy)]
pub(super) struct Whose<'a> {
    pub(super) runtime: &'a RuntimeId,
    /// The image that its agent gets.
    pub(super) image: &'a str,
}

/// One object as it shall be.
pub(super) struct Wanted {
    pub(super) part: Part,
    body: Value,
    hash: u64,
}

impl Kit {
    pub(super) fn new(settings: &Settings, plan: Arc<Plan>, trust: &TrustBundle, pulled: Option<&Arc<Value>>) -> Self {
        let wanted = objects(settings, &plan, trust, pulled.map(AsRef::as_ref)).into_iter().map(|(part, body)| {
            let hash = hash(&body.to_string());
            Wanted { part, body, hash }
        });
        let wanted = wanted.collect();
        let (trust, pulled, pulls) = (trust.revision().to_owned(), pulled.cloned(), settings.pull_secret.is_some());
        Self { plan, trust, pulled, wanted, compat_webhooks: settings.compat_webhooks, pulls }
    }

    pub(super) fn is_of(&self, plan: &Arc<Plan>, trust: &TrustBundle, pulled: Option<&Arc<Value>>) -> bool {
        (Arc::ptr_eq(&self.plan, plan) || self.plan == *plan)
            && self.trust == trust.revision()
            && self.pulled.as_ref() == pulled
    }

    /// In order.
    pub(super) fn wanted(&self) -> impl Iterator<Item = &Wanted> {
        self.wanted.iter()
    }

    pub(super) fn of(&self, part: Part) -> Option<&Wanted> {
        self.wanted.iter().find(|wanted| wanted.part == part)
    }
}

impl Wanted {
    /// The object of one runtime.
    pub(super) fn body(&self, Whose { runtime, image }: Whose<'_>) -> Value {
        let mut body = self.body.clone();
        match self.part {
            Part::ConfigMap => body["data"][RUNTIME_ID_KEY] = runtime.as_str().into(),
            Part::Deployment => body["spec"]["template"]["spec"]["containers"][0]["image"] = image.into(),
            _ => {}
        }
        body
    }

    /// Stands for [`Self::body`] within this process.
    pub(super) fn hash(&self, Whose { runtime, image }: Whose<'_>) -> u64 {
        match self.part {
            Part::ConfigMap => hash(&(self.hash, runtime)),
            Part::Deployment => hash(&(self.hash, image)),
            _ => self.hash,
        }
    }
}

/// Only compared within this process, and never 0.
pub(super) fn hash(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish().max(1)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::pki::{CA_VALIDITY, Ca};

    /// What flags would say.
    pub(in crate::controllers::installer) fn settings() -> Settings {
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
    fn only_the_config_map_differs_between_runtimes_and_after_new_roots_and_only_the_deployment_by_image() {
        let roots = |name| Ca::generate(name, 1_800_000_000, CA_VALIDITY).unwrap().trust_bundle();
        let plan = Arc::new(Plan::new("1".into(), Vec::new()).unwrap());
        let (trust, other) = (roots("a"), roots("b"));
        let kit = Kit::new(&settings(), plan.clone(), &trust, None);
        assert!(kit.is_of(&plan, &trust, None) && !kit.is_of(&plan, &other, None));
        assert!(!kit.is_of(&plan, &trust, Some(&Value::Null.into())));
        let changed = Kit::new(&settings(), plan, &other, None);
        let [a, b]: [RuntimeId; 2] = ["a", "b"].map(|id| id.parse().unwrap());
        let [a, b, newer] = [(&a, "i:1"), (&b, "i:1"), (&a, "i:2")].map(|(runtime, image)| Whose { runtime, image });
        for (wanted, after) in kit.wanted().zip(changed.wanted()) {
            let is_map = wanted.part == Part::ConfigMap;
            assert_eq!(wanted.hash(a) != wanted.hash(b), is_map, "{:?}", wanted.part);
            assert_eq!(wanted.hash(a) != after.hash(a), is_map, "{:?}", wanted.part);
            assert_eq!(wanted.hash(a) != wanted.hash(newer), wanted.part == Part::Deployment, "{:?}", wanted.part);
        }
        let body = kit.of(Part::ConfigMap).unwrap().body(a);
        assert_eq!(
            (&body["data"]["runtime-id"], &body["data"]["receiver-url"]),
            (&"a".into(), &"https://kcp.example:8443".into())
        );
        assert_eq!(body["data"]["ca.crt"], trust.to_pem());
    }
}
