//! Who issues certificates to runtimes, and what is trusted: as it stands now.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use thiserror::Error;
use tidewatch_shared::{
    certificate::{KeyId, Leaf, ReadCertificateError},
    identity::{RuntimeId, TrustDomain},
    tls::{self, TlsConfigError},
};
use tokio::sync::watch;

use super::{Ca, CertManager, Pki, Request, TrustBundle};

/// What is trusted, and whose leaves are new: replaced as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trust {
    /// What agents shall trust: the roots of this receiver's own certificate. Stands in their ConfigMaps.
    pub agents: TrustBundle,
    /// What this receiver accepts: the roots of the agents' certificates.
    pub clients: TrustBundle,
    /// The key that signs new leaves; `None` when somebody else issues and it is not known.
    pub issuer: Option<KeyId>,
}

/// A certificate that was issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// PEM, leaf first, without the root.
    pub chain: String,
    /// Hex SHA-256 of the leaf.
    pub fingerprint: String,
    /// End of the leaf, in Unix seconds.
    pub not_after: i64,
}

/// Why nothing was issued.
#[derive(Debug, Error)]
pub enum Issue {
    /// The built-in CA could not.
    #[error("the built-in CA did not issue")]
    Builtin(#[from] Pki),
    /// The request must name exactly its runtime, because the issuer signs what it says.
    #[error("the certificate request does not name exactly its runtime")]
    Names,
    /// The request cannot be handed to another issuer.
    #[error("the certificate request is not one that another issuer can be given")]
    Request,
    /// The issuer refused, in its words.
    #[error("the issuer refused: {0}")]
    Refused(String),
    /// The issuer did not answer in time.
    #[error("the issuer did not answer within {0:?}")]
    Late(Duration),
    /// Too many requests wait for the issuer.
    #[error("too many certificate requests wait for the issuer")]
    Busy,
    /// The control plane did not take the request or did not give the answer.
    #[error("the control plane could not be asked")]
    Api(#[source] Box<kube::Error>),
    /// What came back is not readable.
    #[error("the issuer's answer is not a chain of certificates")]
    Chain(#[source] TlsConfigError),
    /// What came back is no certificate of this runtime.
    #[error("the issuer's certificate does not name the runtime")]
    Certificate(#[from] ReadCertificateError),
    /// What came back is of another key, does not hold now, or does not chain to the roots that are accepted.
    #[error("the issuer's certificate {0}")]
    Foreign(&'static str),
}

impl Issue {
    /// The reason as metrics and logs name it: one of a closed set.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Builtin(_) => "builtin",
            Self::Names => "names",
            Self::Request => "request",
            Self::Refused(_) => "refused",
            Self::Late(_) => "late",
            Self::Busy => "busy",
            Self::Api(_) => "api",
            Self::Chain(_) | Self::Certificate(_) | Self::Foreign(_) => "foreign",
        }
    }

    /// Whether the request is at fault: asking again with the same one is of no use.
    #[must_use]
    pub const fn is_of_request(&self) -> bool {
        matches!(self, Self::Names | Self::Request)
    }
}

/// Issues certificates to runtimes; clones are the same.
#[derive(Clone)]
pub struct Authority(Arc<Inner>);

struct Inner {
    domain: TrustDomain,
    validity: Duration,
    issuer: Issuer,
    trust: watch::Sender<Arc<Trust>>,
}

pub(super) enum Issuer {
    /// The CA is replaced in a rotation.
    Builtin(ArcSwap<Ca>),
    CertManager(Box<CertManager>),
}

impl Authority {
    pub(super) fn new(
        issuer: Issuer,
        domain: TrustDomain,
        validity: Duration,
        trust: watch::Sender<Arc<Trust>>,
    ) -> Self {
        Self(Arc::new(Inner { domain, validity, issuer, trust }))
    }

    /// A built-in CA that stays as it is, in memory.
    #[must_use]
    pub fn fixed(ca: Ca, domain: TrustDomain, validity: Duration) -> Self {
        let bundle = ca.trust_bundle();
        let trust = Trust { agents: bundle.clone(), clients: bundle, issuer: ca.key_id().cloned() };
        Self::new(Issuer::Builtin(ArcSwap::from_pointee(ca)), domain, validity, watch::Sender::new(Arc::new(trust)))
    }

    /// Issues the certificate of a runtime for the key of a request. Ends within ten seconds.
    ///
    /// The built-in CA takes nothing from the request but its key. Another issuer signs the names that the request says, so there it
    /// must name exactly this runtime.
    ///
    /// # Errors
    /// [`Issue`].
    pub async fn issue(&self, runtime: &RuntimeId, request: &Request) -> Result<Issued, Issue> {
        let Inner { domain, validity, issuer, trust } = &*self.0;
        let now = jiff::Timestamp::now().as_second();
        let chain = match issuer {
            Issuer::Builtin(ca) => ca.load().issue_runtime(runtime, domain, request, now, *validity)?,
            Issuer::CertManager(issuer) => {
                let clients = trust.borrow().clients.clone();
                issuer.issue(runtime, domain, request, *validity, &clients).await?
            }
        };
        let leaf = tls::certificates(chain.as_bytes()).map_err(Issue::Chain)?.into_iter().next();
        let leaf = Leaf::read(&leaf.ok_or(Issue::Foreign("is missing"))?)?;
        Ok(Issued { chain, fingerprint: leaf.fingerprint, not_after: leaf.not_after })
    }

    /// What is trusted, now and after every change.
    #[must_use]
    pub fn trust(&self) -> watch::Receiver<Arc<Trust>> {
        self.0.trust.subscribe()
    }

    /// From now on this CA issues. Nothing changes where somebody else issues.
    pub(super) fn issue_by(&self, ca: Arc<Ca>) {
        if let Issuer::Builtin(current) = &self.0.issuer {
            current.store(ca);
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use tidewatch_shared::certificate::RuntimeCertificate;

    use super::*;
    use crate::pki::{CA_VALIDITY, RUNTIME_VALIDITY};

    #[tokio::test]
    async fn what_is_issued_says_by_whom_and_a_replaced_ca_issues_at_once() {
        let now = jiff::Timestamp::now().as_second();
        let [first, second] = ["a", "b"].map(|name| Ca::generate(name, now, CA_VALIDITY).unwrap());
        let ids = [&first, &second].map(|ca| ca.key_id().cloned().unwrap());
        assert_ne!(ids[0], ids[1]);
        let (runtime, domain): (RuntimeId, TrustDomain) = ("r-1".parse().unwrap(), "kyma.local".parse().unwrap());
        let authority = Authority::fixed(first, domain.clone(), RUNTIME_VALIDITY);
        assert_eq!(authority.trust().borrow().issuer.as_ref(), Some(&ids[0]));
        let request = CertificateParams::default().serialize_request(&KeyPair::generate().unwrap()).unwrap();
        let request = Request::from_der(request.der()).unwrap();
        for (second, id) in [(None, &ids[0]), (Some(second), &ids[1])] {
            if let Some(second) = second {
                authority.issue_by(Arc::new(second));
            }
            let issued = authority.issue(&runtime, &request).await.unwrap();
            let leaf = tls::certificates(issued.chain.as_bytes()).unwrap().remove(0);
            let read = RuntimeCertificate::read(&leaf, &domain).unwrap();
            assert_eq!((read.runtime, read.leaf.authority.as_ref()), (runtime.clone(), Some(id)));
            assert_eq!((read.leaf.fingerprint, read.leaf.not_after), (issued.fingerprint, issued.not_after));
        }
    }
}
