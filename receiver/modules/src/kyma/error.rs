//! Errors of a reconcile: their class, which decides on the backoff, and their text in the status.

use std::time::Duration;

use thiserror::Error;
use tidewatch_cluster::{
    error_class::ErrorClass,
    kinds,
    object::{self, WriteError},
    runtime_access::{ClientError, classify, describe, forbidden_address, is_unreached, untrusted_server},
};
use tidewatch_installer::{Readiness, watcher::ApplyError};

use super::status::CONTROL_PLANE_CAUSE;
use crate::catalog::SyncError;

pub(super) const READ_KYMA: &str = "read the Kyma in the control plane";
pub(super) const MARK_KYMA: &str = "mark the Kyma in the control plane";
pub(super) const WRITE_STATUS: &str = "write the status of the Kyma in the control plane";
pub(super) const SHOW_STATUS: &str = "write the status of the Kyma in the runtime";
pub(super) const LIST_SECRETS: &str = "list the access Secrets in the control plane";
pub(super) const COPY_PULL_SECRET: &str = "copy the image pull secret of the modules to the runtime";
/// The copy of it in the runtime cluster.
pub(super) const PULL_SECRET: &str = "the image pull secret of the modules";
pub(super) const DELETE_OURS: &str = "delete what is ours in the runtime";
/// Operations on a Manifest.
pub(super) const DELETE: &str = "delete";
pub(super) const LABEL: &str = "label";

/// The error of a reconcile.
#[derive(Debug, Error)]
pub enum Error {
    /// There is no client for the runtime. Or the runtime came into a shard of this replica a moment ago: then the end of the
    /// fetch of its access Secret enqueues the Kyma.
    #[error("access the runtime")]
    Client(#[from] ClientError),
    /// A request to KCP, with its operation.
    #[error("{0}")]
    Kcp(&'static str, #[source] kube::Error),
    /// A request to KCP about one Manifest.
    #[error("{doing} the Manifest {name}")]
    Manifest {
        /// Operation.
        doing: &'static str,
        /// Name of the Manifest.
        name: String,
        /// Cause.
        source: kube::Error,
    },
    /// A request to the runtime cluster, with its operation.
    #[error("{0}")]
    Runtime(&'static str, #[source] kube::Error),
    /// A request to the runtime cluster about one of our CRDs.
    #[error("{doing} the CRD {name} in the runtime")]
    Crd {
        /// Operation.
        doing: &'static str,
        /// Name of the CRD.
        name: String,
        /// Cause.
        source: kube::Error,
    },
    /// A step of the migration of one of our CRDs to our version, with its operation.
    #[error("{0} in the runtime")]
    CrdMigration(String, #[source] kube::Error),
    /// One of our CRDs has too many objects to store them in our version at once.
    #[error("the objects of the CRD {0} in the runtime are not all stored in our version yet")]
    CrdNotMigrated(String),
    /// A CRD was not established in time.
    #[error("the CRD {0} is not established in the runtime")]
    NotEstablished(String),
    /// One of our CRDs is being deleted; it is recreated once it is gone.
    #[error("the CRD {0} is being deleted in the runtime")]
    CrdTerminating(String),
    /// A CRD was repaired too often within a short time; its repair waits.
    #[error("the CRD {0} is changed again and again in the runtime")]
    CrdContested(String),
    /// An object was repaired too often within a short time; its repair waits.
    #[error("{0} is changed again and again in the runtime")]
    Contested(&'static str),
    /// The namespace of the Kyma is being deleted; it is recreated once it is gone.
    #[error("{0} is being deleted in the runtime")]
    Terminating(String),
    /// The plan of the agent was not applied.
    #[error("bring the plan to the runtime")]
    Plan(#[source] ApplyError),
    /// The catalog was not synchronized.
    #[error("bring the catalog to the runtime")]
    Catalog(#[source] SyncError),
    /// The agent was not installed, because nothing answered.
    #[error("install the agent")]
    Install(#[source] tidewatch_installer::Error),
    /// The agent was not removed.
    #[error("remove the agent")]
    Agent(#[source] tidewatch_installer::Error),
    /// The reconcile exceeded its time limit, because the runtime cluster responds slowly; it was aborted so that
    /// others proceed.
    #[error("the pass took more than {} s, and was cut", .0.as_secs())]
    TooLong(Duration),
}

impl Error {
    pub(super) fn kcp(doing: &'static str) -> impl FnOnce(kube::Error) -> Self {
        move |source| Self::Kcp(doing, source)
    }

    pub(super) fn runtime(doing: &'static str) -> impl FnOnce(kube::Error) -> Self {
        move |source| Self::Runtime(doing, source)
    }

    /// Maps the error of a convergence of an object in the runtime cluster.
    pub(super) fn converge(doing: &'static str, object: &'static str) -> impl FnOnce(WriteError) -> Self {
        move |error| error.request().map_or(Self::Contested(object), Self::runtime(doing))
    }

    /// Returns true if the repair of an object waits, because a competing writer changes it back.
    pub(super) const fn is_contested(&self) -> bool {
        matches!(self, Self::CrdContested(_) | Self::Contested(_))
    }

    /// Returns true if the runtime cluster does not serve the kind of the request, which proves nothing about the object.
    pub(super) fn is_unserved(&self) -> bool {
        self.runtime_call().is_some_and(kinds::is_unserved)
    }

    /// Returns true if the image pull secret of the modules is not in the runtime cluster as in KCP.
    pub(super) fn is_of_pull_secret(&self) -> bool {
        matches!(self, Self::Runtime(COPY_PULL_SECRET, _) | Self::Contested(PULL_SECRET))
    }

    pub(super) fn plan(error: ApplyError) -> Self {
        match error {
            ApplyError::Contested => Self::Contested("the agent's ConfigMap"),
            error => Self::Plan(error),
        }
    }

    pub(super) fn crd(doing: &'static str, name: &str) -> impl FnOnce(kube::Error) -> Self {
        let name = name.to_owned();
        move |source| Self::Crd { doing, name, source }
    }

    /// The failed request to the runtime cluster.
    fn runtime_call(&self) -> Option<&kube::Error> {
        match self {
            Self::Runtime(_, source) | Self::Crd { source, .. } | Self::CrdMigration(_, source) => Some(source),
            Self::Plan(error) => error.call(),
            Self::Install(error) | Self::Agent(error) => error.call(),
            _ => None,
        }
    }

    fn kcp_call(&self) -> Option<&kube::Error> {
        match self {
            Self::Kcp(_, source) | Self::Manifest { source, .. } => Some(source),
            _ => None,
        }
    }

    /// lifecycle-manager's label value for the requeue.
    pub(super) fn requeue_reason(&self) -> &'static str {
        match self {
            Self::Runtime(_, kube::Error::Api(status)) if status.code == 401 => "kyma_unauthorized",
            Self::Client(_) => "sync_context_retrieval",
            Self::Kcp(READ_KYMA, _) => "kyma_retrieval",
            Self::Kcp(MARK_KYMA, _) => "labels_and_finalizers_update",
            Self::Kcp(LIST_SECRETS, _) => "kyma_under_deletion_with_no_access_secret",
            Self::Kcp(..) | Self::TooLong(_) => "processing_kyma_state",
            Self::Manifest { doing: DELETE, .. } => "manifest_crs_cleanup",
            Self::Manifest { .. } => "manifest_reconciliation",
            Self::Runtime(COPY_PULL_SECRET, _) => "image_pull_secret_sync",
            Self::Runtime(DELETE_OURS, _) | Self::Agent(_) => "remote_kyma_deletion",
            Self::Runtime(SHOW_STATUS, _) => "status_sync_to_remote",
            Self::Runtime(..) | Self::Contested(_) => "spec_replacement_from_remote",
            Self::Crd { .. }
            | Self::CrdMigration(..)
            | Self::CrdNotMigrated(_)
            | Self::NotEstablished(_)
            | Self::CrdTerminating(_)
            | Self::CrdContested(_)
            | Self::Terminating(_) => "crds_sync",
            Self::Plan(_) | Self::Install(_) => "skr_webhook_installation",
            Self::Catalog(_) => "module_catalog_sync",
        }
    }

    /// Returns true for a conflict with another writer: the reconcile restarts and reports nothing.
    pub(super) fn is_conflict(&self) -> bool {
        self.runtime_call().or(self.kcp_call()).is_some_and(object::is_conflict)
    }

    /// Returns false for an error that the retry resolves and that says nothing about the Kyma: no status reports it.
    pub(super) fn is_reported(&self) -> bool {
        !self.is_conflict() && !matches!(self, Self::Client(ClientError::Body(_)))
    }

    /// Returns whether the API server of the runtime cluster was not reached.
    pub(super) fn is_unreached(&self) -> bool {
        match self {
            Self::Catalog(error) => error.is_unreached(),
            _ => self.runtime_call().is_some_and(is_unreached),
        }
    }

    /// The class, which decides on the backoff.
    pub fn class(&self) -> ErrorClass {
        match (self, self.runtime_call()) {
            _ if self.is_conflict() => ErrorClass::Conflict,
            // A kind that is not served yet, or a deleted namespace: the retried reconcile creates it.
            (_, Some(kube::Error::Api(status))) if status.code == 404 => ErrorClass::Transport,
            (_, Some(call)) => classify(call),
            (Self::Client(ClientError::Access(_)), _) => ErrorClass::Auth,
            (Self::Catalog(error), _) => error.class(),
            _ if self.is_contested() => ErrorClass::Refused,
            (
                Self::NotEstablished(_)
                | Self::CrdNotMigrated(_)
                | Self::CrdTerminating(_)
                | Self::Terminating(_)
                | Self::TooLong(_),
                _,
            ) => ErrorClass::Transport,
            _ => ErrorClass::Ours,
        }
    }

    /// The condition `RuntimeAccess` for errors about access.
    pub(super) fn access(&self) -> Option<Readiness> {
        if let Self::Client(ClientError::Access(error)) = self {
            return Some(Readiness::from(error));
        }
        let call = self.runtime_call()?;
        let not = |reason, message: String| Some(Readiness::Not { reason, message });
        if let Some(forbidden) = forbidden_address(call) {
            return not("ForbiddenAddress", forbidden.to_string());
        }
        if let Some(untrusted) = untrusted_server(call) {
            let message = format!("the certificate of the runtime's API server is not trusted: {untrusted}");
            return not("UntrustedServer", message);
        }
        match (classify(call), call) {
            (ErrorClass::Auth, kube::Error::Api(status)) if status.code == 403 => None,
            (ErrorClass::Auth, _) => not("Unauthorized", "the runtime does not accept our credentials".into()),
            // Details differ between attempts; the log has them.
            _ if is_unreached(call) => not("Unreachable", "the runtime's API server cannot be reached".into()),
            _ => None,
        }
    }

    /// One line for the status, equal for equal faults.
    pub(super) fn line(&self) -> String {
        if let Some(Readiness::Not { message, .. }) = self.access() {
            return message;
        }
        if let Self::Install(error) | Self::Agent(error) = self {
            return error.line();
        }
        match (self.runtime_call(), self.kcp_call()) {
            (Some(call), _) => format!("failed to {self}: {}", describe(call)),
            (None, Some(call)) => format!("failed to {self}{CONTROL_PLANE_CAUSE}{}", describe(call)),
            (None, None) => self.to_string(),
        }
    }
}
