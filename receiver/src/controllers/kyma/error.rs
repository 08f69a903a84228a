//! What can fail in a pass, and what that means for the next one and for whoever reads the status.

use std::time::Duration;

use thiserror::Error;

use super::{SECRET_MISSING, crd, status::Access};
use crate::{
    base::class::Class,
    controllers::{catalog::SyncError, installer, watcher::ApplyError},
    kube::object,
    kube::runtime_access::{self, Unusable, classify, describe, forbidden_address},
};

pub(super) const READ_KYMA: &str = "read the Kyma in the control plane";
pub(super) const MARK_KYMA: &str = "mark the Kyma in the control plane";
pub(super) const LIST_SECRETS: &str = "list the access Secrets in the control plane";
pub(super) const DELETE_OURS: &str = "delete what is ours in the runtime";
pub(super) const WRITE_REMOTE_STATUS: &str = "write the status of the Kyma in the runtime";
/// Of a Manifest.
pub(super) const DELETE: &str = "delete";

/// What failed in a pass.
#[derive(Debug, Error)]
pub enum Error {
    /// There is no client for the runtime.
    #[error("access the runtime")]
    Access(#[source] Unusable),
    /// A call to KCP.
    #[error("{doing}")]
    Kcp {
        /// What was tried.
        doing: &'static str,
        /// Why not.
        source: kube::Error,
    },
    /// A call to KCP about one Manifest.
    #[error("{doing} the Manifest {name}")]
    Manifest {
        /// What was tried.
        doing: &'static str,
        /// Which Manifest.
        name: String,
        /// Why not.
        source: kube::Error,
    },
    /// A call to the runtime.
    #[error("{doing}")]
    Runtime {
        /// What was tried.
        doing: &'static str,
        /// Why not.
        source: kube::Error,
    },
    /// A call to the runtime about one of our definitions.
    #[error("{doing} the CRD {name} in the runtime")]
    Crd {
        /// What was tried.
        doing: &'static str,
        /// Which definition.
        name: String,
        /// Why not.
        source: kube::Error,
    },
    /// A definition is not served in time.
    #[error("the CRD {0} is not established in the runtime")]
    NotEstablished(String),
    /// Somebody deletes one of our definitions; when it is gone, it is made again.
    #[error("the CRD {0} is being deleted in the runtime")]
    CrdTerminating(String),
    /// Somebody deletes the namespace of a Kyma; when it is gone, it is made again.
    #[error("{0} is being deleted in the runtime")]
    Terminating(String),
    /// The agent's plan.
    #[error("bring the plan to the runtime")]
    Plan(#[source] ApplyError),
    /// The catalog.
    #[error("bring the catalog to the runtime")]
    Catalog(#[source] SyncError),
    /// The agent, on its way out.
    #[error("remove the agent")]
    Agent(#[source] installer::Error),
    /// The runtime answers, but so slowly that others would wait for it.
    #[error("the pass took more than {} s, and was cut", .0.as_secs())]
    TooLong(Duration),
}

impl Error {
    pub(super) fn kcp(doing: &'static str) -> impl FnOnce(kube::Error) -> Self {
        move |source| Self::Kcp { doing, source }
    }

    pub(super) fn runtime(doing: &'static str) -> impl FnOnce(kube::Error) -> Self {
        move |source| Self::Runtime { doing, source }
    }

    pub(super) fn crd(doing: &'static str, wanted: &crd::Wanted) -> impl FnOnce(kube::Error) -> Self {
        let name = wanted.name.clone();
        move |source| Self::Crd { doing, name, source }
    }

    /// The call to the runtime that failed.
    fn runtime_call(&self) -> Option<&kube::Error> {
        match self {
            Self::Runtime { source, .. } | Self::Crd { source, .. } => Some(source),
            Self::Plan(error) => error.call(),
            Self::Agent(error) => error.call(),
            _ => None,
        }
    }

    fn kcp_call(&self) -> Option<&kube::Error> {
        match self {
            Self::Kcp { source, .. } | Self::Manifest { source, .. } => Some(source),
            _ => None,
        }
    }

    /// The incumbent's name for what has to be done again.
    pub(super) fn requeue_reason(&self) -> &'static str {
        match self {
            Self::Runtime { source: kube::Error::Api(status), .. } if status.code == 401 => "kyma_unauthorized",
            Self::Access(_) => "sync_context_retrieval",
            Self::Kcp { doing: READ_KYMA, .. } => "kyma_retrieval",
            Self::Kcp { doing: MARK_KYMA, .. } => "labels_and_finalizers_update",
            Self::Kcp { doing: LIST_SECRETS, .. } => "kyma_under_deletion_with_no_access_secret",
            Self::Kcp { .. } | Self::TooLong(_) => "processing_kyma_state",
            Self::Manifest { doing: DELETE, .. } => "manifest_crs_cleanup",
            Self::Manifest { .. } => "manifest_reconciliation",
            Self::Runtime { doing: DELETE_OURS, .. } => "remote_kyma_deletion",
            Self::Runtime { doing: WRITE_REMOTE_STATUS, .. } => "status_sync_to_remote",
            Self::Runtime { .. } => "spec_replacement_from_remote",
            Self::Crd { .. } | Self::NotEstablished(_) | Self::CrdTerminating(_) | Self::Terminating(_) => "crds_sync",
            Self::Plan(_) => "skr_webhook_installation",
            Self::Agent(_) => "remote_kyma_deletion",
            Self::Catalog(_) => "module_catalog_sync",
        }
    }

    /// Somebody else wrote in between: the work begins anew, and nobody needs to know.
    pub(super) fn is_conflict(&self) -> bool {
        self.runtime_call().or(self.kcp_call()).is_some_and(object::is_conflict)
    }

    /// What decides on the delay before the next try.
    #[must_use]
    pub fn class(&self) -> Class {
        match (self, self.runtime_call()) {
            (_, Some(call)) if object::is_conflict(call) => Class::Ours,
            // A kind that is not served yet, or a namespace that went: what makes them is tried again with the pass.
            (_, Some(kube::Error::Api(status))) if status.code == 404 => Class::Transport,
            (_, Some(call)) => classify(call),
            (Self::Access(_), _) => Class::Auth,
            (Self::Catalog(error), _) => error.class(),
            (Self::NotEstablished(_) | Self::CrdTerminating(_) | Self::Terminating(_) | Self::TooLong(_), _) => {
                Class::Transport
            }
            _ => Class::Ours,
        }
    }

    /// What the condition about access says of it, if it is about access.
    pub(super) fn access(&self) -> Option<Access> {
        if let Self::Access(error) = self {
            return Some(unusable(error));
        }
        let call = self.runtime_call()?;
        if let Some(forbidden) = forbidden_address(call) {
            return Some(Access::Unusable { reason: "ForbiddenAddress", message: forbidden.to_string() });
        }
        match (runtime_access::classify(call), call) {
            (Class::Auth, kube::Error::Api(status)) if status.code == 403 => None,
            (Class::Auth, _) => Some(Access::Unusable {
                reason: "Unauthorized",
                message: "the runtime does not accept our credentials".into(),
            }),
            // Details differ from try to try; they are for the log.
            (Class::Transport, _) => Some(Access::Unusable {
                reason: "Unreachable",
                message: "the runtime's API server cannot be reached".into(),
            }),
            _ => None,
        }
    }

    /// One line for the status: stable while the fault is the same.
    pub(super) fn line(&self) -> String {
        if let Some(Access::Unusable { message, .. }) = self.access() {
            return message;
        }
        if let Self::Agent(error) = self {
            return error.line();
        }
        match self.runtime_call().or(self.kcp_call()) {
            Some(call) => format!("failed to {self}: {}", describe(call)),
            None => self.to_string(),
        }
    }
}

/// What the condition says without a client.
pub(super) fn unusable(error: &Unusable) -> Access {
    let reason = match error {
        Unusable::Missing => SECRET_MISSING,
        Unusable::Several(_) => "SeveralAccessSecrets",
        Unusable::Kubeconfig(_) => "KubeconfigRefused",
    };
    Access::Unusable { reason, message: error.to_string() }
}
