//! Traces from a change in a runtime to the reconcile that it triggers, exported over OTLP (gRPC) in builds with the
//! feature `otlp`. Other builds have no spans, at no cost.

#[cfg(feature = "otlp")]
mod otlp;

#[cfg(feature = "otlp")]
pub use otlp::{Exporter, Span, StartError};

use std::time::SystemTime;

/// A span in progress, which ends on drop. Uninhabited in builds without the feature `otlp`.
#[cfg(not(feature = "otlp"))]
#[derive(Debug)]
pub struct Span(std::convert::Infallible);

#[cfg(not(feature = "otlp"))]
impl Span {
    /// The W3C `traceparent` for work that this span causes.
    pub fn traceparent(&self) -> String {
        match self.0 {}
    }
}

/// Starts a span if traces are exported, now or at the time `begun`. Its parent is the first sampled of `causes`, which
/// are W3C `traceparent`s, or else the first; the others become links. Invalid `traceparent`s are ignored. A span with
/// a parent is sampled like its parent; others are sampled unless the environment configures otherwise
/// (`OTEL_TRACES_SAMPLER`).
#[cfg_attr(not(feature = "otlp"), inline)]
pub fn span<'a>(
    name: &'static str,
    begun: Option<SystemTime>,
    causes: impl IntoIterator<Item = &'a str>,
) -> Option<Span> {
    #[cfg(feature = "otlp")]
    {
        otlp::span(name, begun, causes)
    }
    #[cfg(not(feature = "otlp"))]
    {
        let _ = (name, begun, causes);
        None
    }
}
