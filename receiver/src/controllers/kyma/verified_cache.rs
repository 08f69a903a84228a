//! What was verified in each runtime, so that a pass without news reads the two Kymas and nothing else.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use tidewatch_shared::names::AGENT_OBJECT;

use crate::{base::key::KymaKey, controllers::installer::Installed, fleet::queue::Drift};

/// What is known of one runtime. Everything in it is proved again when the runtime's agent speaks of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Verified {
    /// The client that it was verified through, by its number.
    pub(super) client: u64,
    /// The namespace has its labels.
    pub(super) namespace: bool,
    /// CRDs that are as they shall be.
    pub(super) crds: BTreeSet<String>,
    /// Forms in which this API server keeps our CRDs, where it adds something of its own: hash by name.
    pub(super) forms: BTreeMap<String, u64>,
    /// Revision of the plan that stands in the agent's ConfigMap, where nobody installs the agent.
    pub(super) plan: Option<String>,
    /// What is known of the agent's installation.
    pub(super) installed: Installed,
}

impl Verified {
    /// Forgets what `drift` casts doubt on.
    fn doubt(&mut self, drift: &Drift) {
        match drift {
            Drift::None => {}
            Drift::All => {
                let (forms, mut installed) = (std::mem::take(&mut self.forms), std::mem::take(&mut self.installed));
                installed.doubt_all();
                *self = Self { client: self.client, forms, installed, ..Self::default() };
            }
            Drift::Objects(objects) => {
                for object in objects {
                    self.installed.doubt(&object.subject.resource, &object.subject.name);
                    match (object.subject.resource.as_str(), object.subject.name.as_str()) {
                        ("namespaces", _) => self.namespace = false,
                        ("customresourcedefinitions", name) => {
                            self.crds.remove(name);
                        }
                        ("configmaps" | "leases", AGENT_OBJECT) => self.plan = None,
                        _ => {}
                    }
                }
            }
        }
    }
}

/// The memory of all runtimes; an entry is as large as a runtime has CRDs of ours, and goes with its Kyma.
#[derive(Debug, Default)]
pub(super) struct Memory(Mutex<HashMap<KymaKey, Verified>>);

impl Memory {
    /// Takes what is known of a runtime out, less what a changed client or drift casts doubt on. A pass puts back what it proved: one
    /// that fails or is dropped leaves nothing, and the next one reads everything.
    pub(super) fn take(&self, key: &KymaKey, client: u64, drift: &Drift) -> Verified {
        let known = self.lock().remove(key).filter(|known| known.client == client);
        let mut known = known.unwrap_or_else(|| Verified { client, ..Verified::default() });
        known.doubt(drift);
        known
    }

    /// Keeps what a pass proved.
    pub(super) fn keep(&self, key: &KymaKey, verified: Verified) {
        self.lock().insert(key.clone(), verified);
    }

    /// Forgets a runtime.
    pub(super) fn forget(&self, key: &KymaKey) {
        self.lock().remove(key);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<KymaKey, Verified>> {
        // Every change is a single insertion or removal: a panic elsewhere leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_shared::event::{Change, Object};

    use super::*;

    fn drift(subject: &str) -> Drift {
        Drift::of(Object {
            subject: subject.parse().unwrap(),
            kind: String::new(),
            uid: String::new(),
            resource_version: String::new(),
            generation: None,
            change: Change::Spec,
        })
    }

    fn proved() -> Verified {
        Verified {
            client: 1,
            namespace: true,
            crds: ["kymas.x".to_owned(), "others.x".to_owned()].into(),
            forms: BTreeMap::new(),
            plan: Some("1".into()),
            installed: Installed::default(),
        }
    }

    #[test]
    fn drift_and_a_changed_client_cast_doubt_on_what_they_concern() {
        let key = KymaKey::new("ns", "k");
        let take = |client: u64, drift: &Drift| {
            let memory = Memory::default();
            memory.keep(&key, proved());
            memory.take(&key, client, drift)
        };
        assert_eq!(take(1, &Drift::None), proved());
        assert_eq!(take(2, &Drift::None), Verified { client: 2, ..Verified::default() });
        assert_eq!(take(1, &Drift::All), Verified { client: 1, ..Verified::default() });
        assert_eq!(take(1, &drift("g/v1/kymas/kyma-system/default")), proved());
        let crd = take(1, &drift("apiextensions.k8s.io/v1/customresourcedefinitions//kymas.x"));
        assert_eq!(crd.crds, ["others.x".to_owned()].into());
        assert!(!take(1, &drift("/v1/namespaces//kyma-system")).namespace);
        assert_eq!(take(1, &drift("/v1/configmaps/kyma-system/tidewatch-agent")).plan, None);
        assert_eq!(take(1, &drift("/v1/configmaps/kyma-system/other")).plan, Some("1".into()));
    }

    #[test]
    fn what_was_taken_and_not_kept_is_unknown() {
        let (memory, key) = (Memory::default(), KymaKey::new("ns", "k"));
        memory.keep(&key, proved());
        memory.take(&key, 1, &Drift::None);
        assert_eq!(memory.take(&key, 1, &Drift::None), Verified { client: 1, ..Verified::default() });
    }
}
