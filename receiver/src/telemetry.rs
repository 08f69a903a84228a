//! What operators see: logs on stderr, metrics and probes on a port of their own.

mod readiness;

use std::{io, sync::Arc};

use arc_swap::ArcSwap;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
};
use thiserror::Error;
use tidewatch_shared::metrics::{MetricDescription, Registry};
use tracing_subscriber::{EnvFilter, util::SubscriberInitExt};

pub use readiness::{Pending, Readiness};

/// Why there are no logs.
#[derive(Debug, Error)]
pub enum InitLogs {
    /// The filter's directives.
    #[error("the log filter is not valid")]
    Filter(#[source] tracing_subscriber::filter::ParseError),
    /// Somebody has set up logs before.
    #[error("logs are set up already")]
    Twice(#[source] tracing_subscriber::util::TryInitError),
}

/// Sends logs to stderr, one JSON object a line, filtered by directives such as `info,tidewatch_receiver=debug`.
///
/// # Errors
/// [`InitLogs`].
pub fn init_logs(filter: &str) -> Result<(), InitLogs> {
    tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_current_span(true)
        .with_span_list(false)
        .with_writer(io::stderr)
        .with_env_filter(EnvFilter::try_new(filter).map_err(InitLogs::Filter)?)
        .finish()
        .try_init()
        .map_err(InitLogs::Twice)
}

/// The metrics that are shown now: those of a receiver that waits, and then those of the one that works.
pub type Page = Arc<ArcSwap<Metrics>>;

/// All metrics of the process. Rooms register theirs at the start; then it is only read.
#[derive(Debug)]
pub struct Metrics(Registry);

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Build {
    version: &'static str,
}

impl Metrics {
    /// A registry that knows the build.
    #[must_use]
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let build = Family::<Build, Gauge>::default();
        build.get_or_create(&Build { version: env!("CARGO_PKG_VERSION") }).set(1);
        let ours = registry.sub_registry_with_prefix("tidewatch");
        ours.register("build_info", "Which build this is; always 1", build);
        Self(registry)
    }

    /// Where rooms register theirs; everything there begins with `tidewatch_`.
    pub fn rooms(&mut self) -> &mut Registry {
        self.0.sub_registry_with_prefix("tidewatch")
    }

    /// Where metrics stand that keep the incumbent's names: without a prefix.
    pub fn incumbent(&mut self) -> &mut Registry {
        &mut self.0
    }

    /// All of it as OpenMetrics text; `None` when a metric cannot be written, which is a defect.
    #[must_use]
    pub fn encode(&self) -> Option<String> {
        self.0.encode()
    }

    /// What there is, whether it was counted yet or not.
    #[must_use]
    pub fn described(&self) -> Vec<MetricDescription> {
        self.0.described()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}
