//! Failures of a fetch.

use std::{error::Error, io, iter, net::IpAddr, time::Duration};

use http::{HeaderMap, StatusCode, header::RETRY_AFTER};
use strum::IntoStaticStr;
use thiserror::Error;
use tidewatch_kit::{
    addresses::{ForbiddenAddressError, ForbiddenReason},
    foreign_text,
    variant::VariantName as _,
};
use tokio::time;
use tower::timeout::error::Elapsed;

use super::CONNECT_TIMEOUT;
use crate::digest::Digest;

/// Longest quoted text of a peer or of a library, in characters.
const MAX_TEXT_CHARS: usize = 200;
/// Longest delay that a registry can demand.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(300);

/// Failure to fetch a manifest or a blob. Texts contain no secret and no control character, and are bounded; they do
/// not contain the artefact's name, except where it helps. The variants' names are metric labels.
#[derive(Clone, Debug, PartialEq, Eq, Error, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum FetchError {
    /// The registry has no such artefact (404).
    #[error("{artefact} does not exist{}", if *.with_credentials { "" } else { ", or is not visible without credentials" })]
    NotFound {
        /// Repository with tag or digest.
        artefact: String,
        /// False for anonymous access.
        with_credentials: bool,
    },
    /// The registry refused the credentials, or demands some (401).
    #[error("the registry refused {}", if *.with_credentials { "the credentials" } else { "the request without credentials" })]
    Unauthorized {
        /// False for anonymous access.
        with_credentials: bool,
    },
    /// The credentials, or their absence, do not permit the artefact (403).
    #[error(
        "{} reading {artefact}{}",
        if *.with_credentials { "the registry's credentials do not permit" } else { "the registry does not permit" },
        if *.with_credentials { "" } else { " without credentials" }
    )]
    Denied {
        /// Repository with tag or digest.
        artefact: String,
        /// False for anonymous access.
        with_credentials: bool,
    },
    /// Too many requests (429).
    #[error("the registry limits the rate of requests (429)")]
    RateLimited {
        /// Delay demanded by the registry, capped.
        after: Option<Duration>,
    },
    /// The registry failed (5xx).
    #[error("the registry failed with status {status}")]
    Server {
        /// Status code.
        status: u16,
        /// Delay demanded by the registry, capped.
        after: Option<Duration>,
    },
    /// A status that pulling does not know.
    #[error("the registry answered with the unexpected status {0}")]
    UnexpectedStatus(u16),
    /// A host to which the registry redirects refuses the request. Its URLs are signed for a short time.
    #[error("{host}, to which the registry redirects, answered with status {status}")]
    Redirected {
        /// Host of the last redirect.
        host: String,
        /// Status code.
        status: u16,
    },
    /// The metadata server of the cloud issues no token.
    #[error("the metadata server of Google Cloud issues no token: {0}")]
    Metadata(String),
    /// No connection, or a broken one.
    #[error("no exchange with the registry: {0}")]
    Transport(String),
    /// A deadline passed.
    #[error("{stage} within {} s", .after.as_secs())]
    Timeout {
        /// Missing step, as the beginning of a sentence.
        stage: Stage,
        /// Deadline.
        after: Duration,
    },
    /// The content is larger than its limit.
    #[error("the content is larger than the limit of {limit} bytes")]
    TooLarge {
        /// Limit in bytes.
        limit: u64,
    },
    /// The content's length is not the declared one.
    #[error("the content has {actual} bytes instead of the declared {expected}")]
    SizeMismatch {
        /// Declared size in bytes.
        expected: u64,
        /// Bytes received until the difference was certain.
        actual: u64,
    },
    /// The content is not that of its digest.
    #[error("the content's digest is {actual} instead of {expected}")]
    DigestMismatch {
        /// Digest in the request or in `Docker-Content-Digest`.
        expected: Digest,
        /// Digest of the received bytes.
        actual: Digest,
    },
    /// A redirect that is not followed.
    #[error("a redirect of the registry is not followed: {0}")]
    Redirect(RedirectError),
    /// The challenge names a token server that gets no credentials.
    #[error(
        "the registry names the token server {0}, which is not its own host, not listed in --oci-registry-allowed-hosts, or without TLS"
    )]
    TokenRealm(String),
    /// The tag leads to an image index, a list of manifests.
    #[error("{artefact} is an image index ({kind}); a module is a single image manifest")]
    Index {
        /// Repository with tag or digest.
        artefact: String,
        /// Name of its format.
        kind: &'static str,
    },
    /// A response that is not of the specified form.
    #[error("malformed response of the registry: {0}")]
    Malformed(&'static str),
    /// A name that cannot be in a request.
    #[error("malformed {0}")]
    Name(&'static str),
}

/// Step of an exchange that missed its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum Stage {
    /// Name resolution, TCP and TLS.
    #[strum(to_string = "no connection to the registry")]
    Connect,
    /// Head of the response.
    #[strum(to_string = "no answer from the registry")]
    Head,
    /// Minimum progress of the body.
    #[strum(to_string = "no progress of the registry's response")]
    Progress,
    /// All of it: authorization, redirects, and the body.
    #[strum(to_string = "no complete response of the registry")]
    Whole,
}

/// Reason why a redirect is not followed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RedirectError {
    /// Requests for tokens contain credentials.
    #[error("a token server must not redirect")]
    Token,
    /// More than the limit.
    #[error("more than 3 in a row")]
    TooMany,
    /// Another host, for a manifest.
    #[error("its host {0} is not listed in --oci-registry-allowed-hosts")]
    Host(String),
    /// Another host without TLS, for a blob.
    #[error("its host {0} has no TLS and is not listed in --oci-registry-allowed-hosts")]
    Plain(String),
    /// Another host with an address that only a listed host may have.
    #[error("its host {host} is not listed in --oci-registry-allowed-hosts, and has the address {address}: {reason}")]
    Address {
        /// Host name or address in the URL.
        host: String,
        /// Resolved address.
        address: IpAddr,
        /// Rule that refuses it.
        reason: ForbiddenReason,
    },
    /// From HTTPS to HTTP.
    #[error("it leads from https to http")]
    Downgrade,
    /// The header `Location` is absent or no URL.
    #[error("its location is malformed")]
    Location,
}

impl FetchError {
    /// Metric label, from a closed set.
    pub fn reason(&self) -> &'static str {
        self.as_str()
    }

    /// Returns whether the same request may succeed soon without a change at the registry.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::RateLimited { .. }
            | Self::Server { .. }
            | Self::Redirected { .. }
            | Self::Metadata(_)
            | Self::Transport(_)
            | Self::Timeout { .. }
            | Self::SizeMismatch { .. }
            | Self::DigestMismatch { .. } => true,
            Self::NotFound { .. }
            | Self::Unauthorized { .. }
            | Self::Denied { .. }
            | Self::UnexpectedStatus(_)
            | Self::TooLarge { .. }
            | Self::Redirect(_)
            | Self::TokenRealm(_)
            | Self::Index { .. }
            | Self::Malformed(_)
            | Self::Name(_) => false,
        }
    }

    /// Delay that the registry demanded, at most five minutes.
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited { after } | Self::Server { after, .. } => *after,
            _ => None,
        }
    }

    /// Failure of the transport below HTTP.
    pub(super) fn transport(error: Cause<'_>) -> Self {
        if causes(error).any(is_timeout) {
            return Self::Timeout { stage: Stage::Connect, after: CONNECT_TIMEOUT };
        }
        let mut text = String::new();
        for cause in causes(error).map(ToString::to_string) {
            if text.len() > 4 * MAX_TEXT_CHARS {
                break;
            }
            if !text.contains(&cause) {
                let separator = if text.is_empty() { "" } else { ": " };
                text = text + separator + &cause;
            }
        }
        Self::Transport(clean(&text))
    }

    /// Failure of the transport to a host that only a redirect names.
    pub(super) fn to_public(error: Cause<'_>, host: &str) -> Self {
        match causes(error).find_map(|cause| cause.downcast_ref::<ForbiddenAddressError>()) {
            Some(ForbiddenAddressError { address, reason }) => {
                Self::Redirect(RedirectError::Address { host: clean(host), address: *address, reason: *reason })
            }
            None => Self::transport(error),
        }
    }

    /// Classifies a status that is neither success, nor a redirect, nor 401.
    pub(super) fn of_status(status: StatusCode, headers: &HeaderMap, artefact: String, with_credentials: bool) -> Self {
        match status {
            StatusCode::NOT_FOUND => Self::NotFound { artefact, with_credentials },
            StatusCode::FORBIDDEN => Self::Denied { artefact, with_credentials },
            StatusCode::TOO_MANY_REQUESTS => Self::RateLimited { after: retry_after(headers) },
            status if status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT => {
                Self::Server { status: status.as_u16(), after: retry_after(headers) }
            }
            status => Self::UnexpectedStatus(status.as_u16()),
        }
    }
}

/// Only connecting has timeouts below HTTP: one for all of it, and one for each address.
fn is_timeout(cause: Cause<'_>) -> bool {
    let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    cause.is::<Elapsed>() || inner.is_some_and(|inner| inner.is::<time::error::Elapsed>())
}

/// A text of a peer or of a library as one bounded line.
pub(super) fn clean(text: &str) -> String {
    foreign_text::line(text, MAX_TEXT_CHARS)
}

/// Reads `Retry-After` in seconds (RFC 9110, section 10.2.3); the date form is ignored.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok().map(Duration::from_secs)?;
    Some(seconds.min(MAX_RETRY_AFTER))
}

type Cause<'a> = &'a (dyn Error + 'static);

/// An error and its sources. Bounded, because a foreign chain may be of any length.
fn causes(error: Cause<'_>) -> impl Iterator<Item = Cause<'_>> {
    fn source(error: Cause<'_>) -> Option<Cause<'_>> {
        error.source()
    }
    iter::successors(Some(error), |error| source(*error)).take(16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transport_text_is_one_bounded_line() {
        let error = io::Error::other(format!("line\r\nbreak \u{1b}[31m{}", "x".repeat(1_000)));
        let text = FetchError::transport(&error).to_string();
        assert!(!text.contains(char::is_control) && text.chars().count() < 2 * MAX_TEXT_CHARS, "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn timeouts_of_one_address_and_of_all_are_the_same_failure() {
        let elapsed = time::timeout(CONNECT_TIMEOUT, std::future::pending::<()>()).await.err().unwrap();
        let address = io::Error::new(io::ErrorKind::TimedOut, elapsed);
        let all = Elapsed::new();
        for error in [&address as Cause<'_>, &all] {
            let timeout = FetchError::Timeout { stage: Stage::Connect, after: CONNECT_TIMEOUT };
            assert_eq!(FetchError::transport(error), timeout);
        }
        // The kernel's own timeout may hit at any time.
        let kernel = FetchError::transport(&io::Error::from(io::ErrorKind::TimedOut));
        assert_eq!(kernel.reason(), "transport");
    }

    #[test]
    fn retry_after_is_capped() {
        let headers = |value: &'static str| [(RETRY_AFTER, value.parse().unwrap())].into_iter().collect::<HeaderMap>();
        for (value, after) in
            [("7", Some(7)), ("86400", Some(300)), ("-1", None), ("Wed, 21 Oct 2015 07:28:00 GMT", None)]
        {
            for status in [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE] {
                let error = FetchError::of_status(status, &headers(value), String::new(), false);
                assert_eq!(error.retry_after(), after.map(Duration::from_secs), "{value}");
                assert!(error.is_retryable());
            }
        }
    }
}
