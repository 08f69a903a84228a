//! Caches the verified objects of each runtime cluster, so that a reconcile without reported drift reads only the two
//! Kymas.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::Value;
use tidewatch_api::{key::KymaKey, names::AGENT_OBJECT};
use tidewatch_fleet::queue::Drift;
use tidewatch_installer::InstallationState;

use super::per_kyma::PerKyma;

/// The verified objects of one runtime cluster; the number of our CRDs bounds their number. Drift reported by its agent removes an
/// object, so that the next reconcile reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Verified {
    /// Revision of the client used for the verification.
    pub(super) client: u64,
    /// True if the namespace has its labels.
    pub(super) namespace: bool,
    /// CRDs that equal the desired ones.
    pub(super) crds: BTreeSet<String>,
    /// Hash by name of CRDs in the form that this API server stores, if it adds fields.
    pub(super) forms: BTreeMap<String, u64>,
    /// Plan revision in the agent's ConfigMap, where the receiver does not install agents.
    pub(super) plan: Option<String>,
    /// Content of the image pull secret of the modules.
    pub(super) pull_secret: Option<Arc<Value>>,
    /// State of the agent's installation.
    pub(super) installed: InstallationState,
}

impl Verified {
    /// Removes the objects that `drift` names.
    fn doubt(&mut self, drift: &Drift) {
        match drift {
            Drift::None => {}
            Drift::All => {
                let forms = std::mem::take(&mut self.forms);
                let mut installed = std::mem::take(&mut self.installed);
                installed.invalidate_all();
                *self = Self { client: self.client, forms, installed, ..Self::default() };
            }
            Drift::Objects(objects) | Drift::Reported(objects) => {
                for object in objects {
                    self.installed.invalidate(&object.subject.resource, &object.subject.name);
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

impl PerKyma<Verified> {
    /// Takes the entry of a runtime cluster, without objects invalidated by a changed client or drift. Without one the reconcile
    /// reads everything.
    pub(super) fn take_valid(&self, key: &KymaKey, client: u64, drift: &Drift) -> Verified {
        let known = self.take(key).filter(|known| known.client == client);
        let mut known = known.unwrap_or_else(|| Verified { client, ..Verified::default() });
        known.doubt(drift);
        known
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_contract::event::{Change, Object};

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
            pull_secret: None,
            installed: InstallationState::default(),
        }
    }

    #[test]
    fn drift_and_a_changed_client_invalidate_entries() {
        let key = KymaKey::new("ns", "k");
        let take = |client: u64, drift: &Drift| {
            let verified = PerKyma::default();
            verified.keep(&key, proved());
            verified.take_valid(&key, client, drift)
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
    fn entry_taken_and_not_kept_is_dropped() {
        let verified = PerKyma::default();
        let key = KymaKey::new("ns", "k");
        verified.keep(&key, proved());
        verified.take_valid(&key, 1, &Drift::None);
        assert_eq!(verified.take_valid(&key, 1, &Drift::None), Verified { client: 1, ..Verified::default() });
    }
}
