//! Issues certificates to runtimes by the current CA or through another issuer, and publishes the current trust.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use tidewatch_api::{
    identity::{RuntimeId, TrustDomain},
    replica::ReplicaName,
};
use tidewatch_contract::certificate::{KeyId, Leaf};
use tidewatch_kit::tls;
use tokio::sync::watch;

use super::{BACKDATE, Ca, CertManager, IssueError, PemIdentity, REPLICA_VALIDITY, SigningRequest, TrustBundle};

/// Trust anchors of both sides and the current issuer; replaced as a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trust {
    /// Roots that agents trust: those of this receiver's own certificate. Distributed in the agents' ConfigMaps.
    pub agents: TrustBundle,
    /// Roots that this receiver accepts: those of the agents' certificates.
    pub clients: TrustBundle,
    /// Key that signs new leaves; `None` with another issuer, since its key is unknown.
    pub issuer: Option<KeyId>,
}

impl Trust {
    /// True if this receiver accepts leaves that name this issuing key. The built-in CA signs leaves with a root; with
    /// another issuer an intermediate authority may sign, and the verification of the chain alone decides.
    pub fn accepts(&self, authority: Option<&KeyId>) -> bool {
        self.issuer.is_none() || authority.is_some_and(|authority| self.clients.has_authority(authority))
    }
}

/// An issued certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// PEM, leaf first, without the root.
    pub chain: String,
    /// Hex SHA-256 of the leaf.
    pub fingerprint: String,
    /// notAfter of the leaf, in Unix seconds.
    pub not_after: i64,
}

/// Issues certificates to runtimes; clones share it.
#[derive(Clone)]
pub struct Authority(Arc<Inner>);

struct Inner {
    domain: TrustDomain,
    validity: Duration,
    issuer: Issuer,
    trust: watch::Sender<Arc<Trust>>,
}

pub(super) enum Issuer {
    /// The built-in CA, replaced in a rotation.
    Builtin(ArcSwap<Ca>),
    CertManager(Box<CertManager>),
}

impl Authority {
    /// Time by which notBefore of an issued certificate precedes its issuance.
    pub fn backdate(&self) -> Duration {
        match self.0.issuer {
            Issuer::Builtin(_) => BACKDATE,
            Issuer::CertManager(_) => Duration::ZERO,
        }
    }

    pub(super) fn new(
        issuer: Issuer,
        domain: TrustDomain,
        validity: Duration,
        trust: watch::Sender<Arc<Trust>>,
    ) -> Self {
        Self(Arc::new(Inner { domain, validity, issuer, trust }))
    }

    /// Issues the certificate of a runtime for the key of a request. Ends within ten seconds.
    ///
    /// The built-in CA takes only the key from the request. Another issuer signs the names in the request, so it must
    /// name exactly this runtime.
    ///
    /// # Errors
    /// [`IssueError`].
    pub async fn issue(&self, runtime: &RuntimeId, request: &SigningRequest) -> Result<Issued, IssueError> {
        let Inner { domain, validity, issuer, trust } = &*self.0;
        let now = jiff::Timestamp::now().as_second();
        let chain = match issuer {
            Issuer::Builtin(ca) => ca.load().issue_runtime(runtime, domain, &request.key, now, *validity)?,
            Issuer::CertManager(issuer) => {
                let clients = trust.borrow().clients.clone();
                issuer.issue(runtime, domain, request, *validity, &clients).await?
            }
        };
        let leaf = tls::certificates(chain.as_bytes()).map_err(IssueError::Chain)?.into_iter().next();
        let leaf = Leaf::read(&leaf.ok_or(IssueError::Foreign("is missing"))?)?;
        Ok(Issued { chain, fingerprint: leaf.fingerprint, not_after: leaf.not_after })
    }

    /// Issues the certificate of a replica, for a key that is generated here and stays in memory. Ends within ten seconds.
    ///
    /// # Errors
    /// [`IssueError`].
    pub(super) async fn issue_replica(&self, replica: &ReplicaName) -> Result<PemIdentity, IssueError> {
        let Inner { domain, issuer, trust, .. } = &*self.0;
        match issuer {
            Issuer::Builtin(ca) => {
                let now = jiff::Timestamp::now().as_second();
                Ok(ca.load().make_replica(replica, domain, now, REPLICA_VALIDITY)?)
            }
            Issuer::CertManager(issuer) => {
                let clients = trust.borrow().clients.clone();
                issuer.issue_replica(replica, domain, REPLICA_VALIDITY, &clients).await
            }
        }
    }

    /// Current trust, and every change of it.
    pub fn trust(&self) -> watch::Receiver<Arc<Trust>> {
        self.0.trust.subscribe()
    }

    /// Replaces the CA that issues. Has no effect with another issuer.
    pub(super) fn set_ca(&self, ca: Arc<Ca>) {
        if let Issuer::Builtin(current) = &self.0.issuer {
            current.store(ca);
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use tidewatch_contract::certificate::RuntimeCertificate;

    use super::*;
    use crate::{CA_VALIDITY, RUNTIME_VALIDITY, testing::fixed_authority};

    #[tokio::test]
    async fn issued_leaf_names_its_issuer_and_a_replaced_ca_issues_at_once() {
        let now = jiff::Timestamp::now().as_second();
        let [first, second] = ["a", "b"].map(|name| Ca::generate(name, now, CA_VALIDITY).unwrap());
        let ids = [&first, &second].map(|ca| ca.key_id().cloned().unwrap());
        assert_ne!(ids[0], ids[1]);
        let (runtime, domain): (RuntimeId, TrustDomain) = ("r-1".parse().unwrap(), "kyma.local".parse().unwrap());
        let authority = fixed_authority(first, domain.clone(), RUNTIME_VALIDITY);
        assert_eq!(authority.trust().borrow().issuer.as_ref(), Some(&ids[0]));
        let request = CertificateParams::default().serialize_request(&KeyPair::generate().unwrap()).unwrap();
        let request = SigningRequest::from_der(request.der()).unwrap();
        for (second, id) in [(None, &ids[0]), (Some(second), &ids[1])] {
            if let Some(second) = second {
                authority.set_ca(Arc::new(second));
            }
            let issued = authority.issue(&runtime, &request).await.unwrap();
            let leaf = tls::certificates(issued.chain.as_bytes()).unwrap().remove(0);
            let read = RuntimeCertificate::read(&leaf, &domain).unwrap();
            assert_eq!((read.runtime, read.leaf.authority.as_ref()), (runtime.clone(), Some(id)));
            assert_eq!((read.leaf.fingerprint, read.leaf.not_after), (issued.fingerprint, issued.not_after));
        }
    }
}
