//! Logs on stderr.

use std::io;

use thiserror::Error;
use tracing_subscriber::{EnvFilter, util::SubscriberInitExt};

/// Failure to set up logging.
#[derive(Debug, Error)]
pub enum InitLogsError {
    /// The filter directives are not valid.
    #[error("the log filter is not valid")]
    Filter(#[source] tracing_subscriber::filter::ParseError),
    /// A global subscriber is set already.
    #[error("logging is set up already")]
    Twice(#[source] tracing_subscriber::util::TryInitError),
}

/// Writes logs to stderr, one JSON object per line, filtered by directives such as `info,tidewatch=debug`. A directive holds for
/// all targets that begin with its name, here for all crates of Tidewatch.
///
/// # Errors
/// [`InitLogsError`].
pub fn init_logs(filter: &str) -> Result<(), InitLogsError> {
    tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_current_span(true)
        .with_span_list(false)
        .with_writer(io::stderr)
        .with_env_filter(EnvFilter::try_new(filter).map_err(InitLogsError::Filter)?)
        .finish()
        .try_init()
        .map_err(InitLogsError::Twice)
}
