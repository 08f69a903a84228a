//! Errors of API requests, and the requested representations.

use std::{error::Error, time::Duration};

use http::StatusCode;
use thiserror::Error as ThisError;

use crate::telemetry::status_label;

/// Requested representation of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accept {
    /// Complete objects.
    Full,
    /// `PartialObjectMetadata`.
    Metadata,
    /// `PartialObjectMetadataList`.
    MetadataList,
}

impl Accept {
    /// Value of the `Accept` header. No fallback to complete objects is offered: a hostile API server may send them
    /// anyway, and the size limits apply to both.
    pub(crate) const fn header(self) -> &'static str {
        match self {
            Self::Full => "application/json",
            Self::Metadata => "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
            Self::MetadataList => "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
        }
    }
}

/// Errors of a request without a usable response.
#[derive(Debug, ThisError)]
pub(crate) enum ApiError {
    #[error("failed to build the request")]
    Request(#[source] http::Error),
    #[error("failed to send the request to the API server")]
    Send(#[source] Box<dyn Error + Send + Sync>),
    #[error("the API server responded with {status}")]
    Status {
        status: StatusCode,
        /// Delay from `Retry-After`.
        retry_after: Option<Duration>,
    },
    #[error("failed to read the API server's response")]
    Body(#[source] Box<dyn Error + Send + Sync>),
    #[error("the API server's response exceeds {limit} bytes")]
    TooLarge { limit: usize },
    #[error("the API server did not respond in time")]
    Deadline,
    #[error("failed to parse the API server's response")]
    Parse(#[source] serde_json::Error),
    #[error("the API server does not serve {0}")]
    NotServed(String),
    #[error("the API server cannot list and watch {0}")]
    Unwatchable(String),
    #[error("the watch delivered neither events nor bookmarks")]
    Silent,
}

impl ApiError {
    /// Status of the response, if there was one.
    pub(crate) const fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// Label of this failure in metrics, from a closed set.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Status { status, .. } => status_label(*status),
            Self::Request(_) | Self::Send(_) | Self::Body(_) => "transport",
            Self::TooLarge { .. } => "too-large",
            Self::Deadline => "deadline",
            Self::Parse(_) => "parse",
            Self::NotServed(_) => "not-served",
            Self::Unwatchable(_) => "unwatchable",
            Self::Silent => "silent",
        }
    }

    /// Reports whether the server responded, though not usably.
    pub(crate) const fn was_answered(&self) -> bool {
        matches!(self, Self::Status { .. } | Self::TooLarge { .. } | Self::Parse(_))
    }

    /// The same error for another request that shares its response; `None` if it has a cause that cannot be copied.
    pub(crate) const fn copy(&self) -> Option<Self> {
        match self {
            Self::Status { status, retry_after } => Some(Self::Status { status: *status, retry_after: *retry_after }),
            Self::TooLarge { limit } => Some(Self::TooLarge { limit: *limit }),
            Self::Deadline => Some(Self::Deadline),
            _ => None,
        }
    }

    /// Delay that the API server requested.
    pub(crate) const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Reports whether the requested resourceVersion has expired (410).
    pub(crate) fn is_gone(&self) -> bool {
        self.status() == Some(StatusCode::GONE)
    }
}
