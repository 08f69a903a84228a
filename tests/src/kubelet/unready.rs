//! Why a container cannot be started yet; what the pod's status says of it.

use std::io;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unready {
    /// An object that a volume or a variable is filled from.
    #[error("{0} {1:?} not found")]
    NotFound(&'static str, String),
    /// A key of such an object.
    #[error("{0} {1:?} has no key {2:?}")]
    NoKey(&'static str, String, String),
    /// A path that would leave its volume.
    #[error("{0:?} is no path in a volume")]
    Path(String),
    /// Something that real kubelets know, and this one does not.
    #[error("the test bed's kubelet does not know {0}")]
    Unknown(String),
    /// The API server refused.
    #[error("ask the API server: {0}")]
    Api(#[source] Box<kube::Error>),
    /// The API server did not answer.
    #[error("the API server did not answer")]
    Silent,
    /// Files, ports or the process.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] io::Error),
}

impl Unready {
    /// The reason in the container's state, as real kubelets name it.
    pub(super) const fn reason(&self) -> &'static str {
        match self {
            Self::NoKey(..) | Self::Unknown(_) | Self::Path(_) => "CreateContainerConfigError",
            Self::NotFound(..) | Self::Api(_) | Self::Silent | Self::Host(..) => "ContainerCreating",
        }
    }
}
