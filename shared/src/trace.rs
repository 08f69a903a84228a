//! Traces from a change in a runtime to the pass that works on it, exported over OTLP (gRPC) in builds with the feature `otlp`. In other
//! builds there are no spans, and what is here costs nothing.

#[cfg(feature = "otlp")]
mod otlp;

#[cfg(feature = "otlp")]
pub use otlp::{Exporter, Span, Start};

use std::time::SystemTime;

/// A span that is under way; it ends when it is dropped. There is none in a build without the feature.
#[cfg(not(feature = "otlp"))]
#[derive(Debug)]
pub struct Span(std::convert::Infallible);

#[cfg(not(feature = "otlp"))]
impl Span {
    /// The `traceparent` of W3C for what this span causes.
    #[must_use]
    pub fn traceparent(&self) -> String {
        match self.0 {}
    }
}

/// Begins a span, if traces are exported: now, or when it did begin. It continues one of `causes`, which are `traceparent`s of W3C: the
/// first that is sampled, or the first; it links to the others. What is no `traceparent` is passed over. A span that continues another
/// is sampled as that one is; others are, unless the environment says otherwise (`OTEL_TRACES_SAMPLER`).
#[cfg_attr(not(feature = "otlp"), inline)]
#[must_use]
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
