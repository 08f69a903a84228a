//! What can go wrong with one request, and what is asked for in it.

use std::{error::Error, time::Duration};

use http::StatusCode;
use thiserror::Error as ThisError;

/// Which form of objects is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accept {
    /// Whole objects.
    Whole,
    /// `PartialObjectMetadata` and nothing else.
    Metadata,
    /// A list of `PartialObjectMetadata`.
    MetadataList,
}

impl Accept {
    /// Value of the header `Accept`. No fallback: whole objects in the place of metadata would be what a hostile API server
    /// sends anyway, and the byte limits hold for both.
    pub(crate) const fn header(self) -> &'static str {
        match self {
            Self::Whole => "application/json",
            Self::Metadata => "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
            Self::MetadataList => "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
        }
    }
}

/// Why a request has no answer that is of use.
#[derive(Debug, ThisError)]
pub(crate) enum Call {
    #[error("the request could not be written")]
    Request(#[source] http::Error),
    #[error("the API server could not be reached")]
    Send(#[source] Box<dyn Error + Send + Sync>),
    #[error("the API server answered {status}")]
    Status {
        status: StatusCode,
        /// As the answer's `Retry-After` says.
        retry_after: Option<Duration>,
    },
    #[error("the API server's answer broke off")]
    Body(#[source] Box<dyn Error + Send + Sync>),
    #[error("the API server's answer has more than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("the API server did not answer in time")]
    Deadline,
    #[error("the API server's answer is not readable")]
    Parse(#[source] serde_json::Error),
    #[error("the API server does not serve {0}")]
    NotServed(String),
    #[error("the watch says nothing, not even a bookmark")]
    Silent,
}

impl Call {
    /// The status of the answer, if there was one.
    pub(crate) const fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// The server was there and said something, though nothing that is of use.
    pub(crate) const fn was_answered(&self) -> bool {
        matches!(self, Self::Status { .. } | Self::TooLarge { .. } | Self::Parse(_))
    }

    /// How long the API server wants us to wait.
    pub(crate) const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// The resource version asked for is no longer there (410).
    pub(crate) fn is_gone(&self) -> bool {
        self.status() == Some(StatusCode::GONE)
    }
}
