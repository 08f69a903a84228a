//! Logs, metrics and readiness.

mod metrics;

use std::{error::Error, io, iter::successors};

use thiserror::Error;
use tracing_subscriber::{Layer, filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

pub use metrics::{Metrics, Stats};
pub(crate) use metrics::{RequestOutcome, Route, status_label};
pub use tidewatch_kit::readiness::{Pending, Readiness};

/// Formats an error with its sources, for a log line. Leaves out a source whose text is in that of an outer error
/// already: errors of some libraries contain it.
pub fn error_chain(error: &dyn Error) -> String {
    let causes = successors(error.source(), |&cause| cause.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}

/// Errors of the logging setup.
#[derive(Debug, Error)]
pub enum LogError {
    /// The filter does not have the form `info,tidewatch_agent=debug`.
    #[error("invalid log filter")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// The process has a logger already.
    #[error("the process has a logger already")]
    Set(#[from] tracing_subscriber::util::TryInitError),
}

/// Writes logs as JSON to stderr, filtered by target and level (`info,tidewatch_agent=debug`).
///
/// # Errors
/// [`LogError`].
pub fn init_logging(filter: &str) -> Result<(), LogError> {
    let filter: Targets = filter.parse()?;
    let lines = fmt::layer().json().flatten_event(true).with_current_span(false).with_span_list(false);
    tracing_subscriber::registry().with(lines.with_writer(io::stderr).with_filter(filter)).try_init()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Error)]
    #[error("not found")]
    struct NotFound;

    /// A foreign error whose text contains that of its cause.
    #[derive(Debug, Error)]
    #[error("failed to load a: {0}")]
    struct Embedding(#[source] NotFound);

    #[derive(Debug, Error)]
    #[error("failed to start")]
    struct Start(#[source] Embedding);

    #[test]
    fn each_cause_is_named_once() {
        assert_eq!(error_chain(&Start(Embedding(NotFound))), "failed to start: failed to load a: not found");
    }
}
