//! Reasons that keep a container from starting, as reported in the pod's status.

use std::io;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    /// A source of a volume or a variable does not exist.
    #[error("{0} {1:?} not found")]
    NotFound(&'static str, String),
    /// A source has no such key.
    #[error("{0} {1:?} has no key {2:?}")]
    NoKey(&'static str, String, String),
    /// A path that would leave its volume.
    #[error("{0:?} is not a path in a volume")]
    Path(String),
    /// A feature of real kubelets that this one does not implement.
    #[error("the test bed's kubelet does not support {0}")]
    Unsupported(String),
    /// The API server refused a request.
    #[error("request to the API server: {0}")]
    Refused(#[source] Box<kube::Error>),
    /// The API server did not answer in time.
    #[error("the API server did not answer")]
    Timeout,
    /// Files, ports or the process.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] io::Error),
}

impl StartError {
    /// The reason in the container's state, as real kubelets name it.
    pub(super) const fn reason(&self) -> &'static str {
        match self {
            Self::NoKey(..) | Self::Unsupported(_) | Self::Path(_) => "CreateContainerConfigError",
            Self::NotFound(..) | Self::Refused(_) | Self::Timeout | Self::Host(..) => "ContainerCreating",
        }
    }
}
