//! Logs on stderr.

use std::io;

use anyhow::{Context as _, Result};
use tracing_subscriber::{EnvFilter, util::SubscriberInitExt};

/// Writes logs to stderr, one JSON object per line, filtered by directives such as `info,tidewatch=debug`. A directive holds for
/// all targets that begin with its name, here for all crates of Tidewatch.
///
/// # Errors
/// The filter is not valid, or logging is set up already.
pub fn init_logs(filter: &str) -> Result<()> {
    tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_current_span(true)
        .with_span_list(false)
        .with_writer(io::stderr)
        .with_env_filter(EnvFilter::try_new(filter).context("the log filter is not valid")?)
        .finish()
        .try_init()
        .context("logging is set up already")
}
