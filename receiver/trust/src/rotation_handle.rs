//! Handle of the CA rotation: its progress, its stragglers, and requests to begin one.

use std::{sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tidewatch_contract::admin::rotation::{RotationProgress, RotationRequest, RotationResponse};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::timeout,
};

use super::Stragglers;

/// Timeout of a request to rotate.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

/// Failure of a request to rotate. Its JSON is part of the answers between replicas.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RotationError {
    /// This receiver has no built-in CA.
    #[error("there is no built-in CA")]
    NoCa,
    /// The Secret is gone or its content is rejected.
    #[error("the Secret of the CA is gone or cannot be used")]
    Secret,
    /// The write of the Secret failed.
    #[error("the Secret of the CA could not be written")]
    Write,
    /// The request timed out, or another replica carries the rotation out from now on.
    #[error("there was no answer in time")]
    Timeout,
}

/// Exposes the rotation and accepts requests. Clones share it.
#[derive(Clone)]
pub struct RotationHandle {
    /// Requests to begin a rotation.
    pub requests: mpsc::Sender<PendingRotation>,
    /// Progress of the rotation; `None` without a built-in CA, before the first reconcile, and in a replica without the fleet role.
    pub progress: watch::Receiver<Option<Arc<RotationProgress>>>,
    /// Runtimes of this replica's shards that the rotation waits for; `None` before the first reconcile.
    pub stragglers: watch::Receiver<Option<Arc<Stragglers>>>,
}

impl RotationHandle {
    /// Begins a rotation, or joins the one that is under way. Returns once that is stored.
    ///
    /// # Errors
    /// [`RotationError`].
    pub async fn request(&self, request: RotationRequest) -> Result<RotationResponse, RotationError> {
        let (response, responded) = oneshot::channel();
        let exchange = async {
            self.requests.send((request, response)).await.map_err(|_| RotationError::NoCa)?;
            responded.await.map_err(|_| RotationError::NoCa)?
        };
        timeout(REQUEST_TIMEOUT, exchange).await.map_err(|_| RotationError::Timeout)?
    }
}

/// A request with the sender of its response.
pub type PendingRotation = (RotationRequest, oneshot::Sender<Result<RotationResponse, RotationError>>);
