//! Logs, metrics and readiness.

mod metrics;

use std::io;

use thiserror::Error;
use tracing_subscriber::{Layer, filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

pub use metrics::{Metrics, Stats};
pub(crate) use metrics::{RequestOutcome, Route, status_label};
pub use tidewatch_kit::{
    error_levels::line as error_chain,
    readiness::{Pending, Readiness},
};

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
