//! What the agent shows of itself: logs, metrics, probes.

mod metrics;
mod readiness;
mod server;

use std::{error::Error, io};

use thiserror::Error;
use tracing_subscriber::{Layer, filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

pub use metrics::Metrics;
pub(crate) use metrics::{Outcome, Route};
pub use readiness::{Guard, Readiness};
pub(crate) use server::Server;

/// An error with all its causes, for a log line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// Why there are no logs.
#[derive(Debug, Error)]
pub enum Logging {
    /// The filter is not of the form `info,tidewatch_agent=debug`.
    #[error("the log filter is not valid")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// Something else has set a logger.
    #[error("a logger is set already")]
    Set(#[from] tracing_subscriber::util::TryInitError),
}

/// Writes logs as JSON to stderr, filtered by target and level (`info,tidewatch_agent=debug`).
///
/// # Errors
/// [`Logging`].
pub fn log(filter: &str) -> Result<(), Logging> {
    let filter: Targets = filter.parse()?;
    let lines = fmt::layer().json().flatten_event(true).with_current_span(false).with_span_list(false);
    tracing_subscriber::registry().with(lines.with_writer(io::stderr).with_filter(filter)).try_init()?;
    Ok(())
}
