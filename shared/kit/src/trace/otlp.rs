//! Spans in builds with the feature `otlp`.

use std::{
    sync::OnceLock,
    time::{Duration, SystemTime},
};

use opentelemetry::{
    Context, SpanId, TraceFlags, TraceId,
    trace::{
        Link, Span as _, SpanBuilder, SpanContext, SpanKind, TraceContextExt as _, TraceState, TracerProvider as _,
    },
};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::{
    Resource,
    trace::{SdkTracer, SdkTracerProvider},
};
use thiserror::Error;

use crate::hex::is_lower_hex;

/// Links per span, at most.
const LINKS: usize = 16;
/// Time limit of the last export at shutdown; spans not exported by then are dropped.
const LAST_EXPORT: Duration = Duration::from_secs(2);

/// The tracer of the process, set once at start.
static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// The error of starting the exporter.
#[derive(Debug, Error)]
pub enum StartError {
    /// The endpoint is invalid.
    #[error("build the trace exporter")]
    Exporter(#[from] ExporterBuildError),
    /// An exporter was started before.
    #[error("a trace exporter is already running")]
    Twice,
}

/// Exports ended spans in batches, from a thread of its own. Spans are dropped if they arrive faster than they can be
/// exported.
#[derive(Debug)]
pub struct Exporter(SdkTracerProvider);

impl Exporter {
    /// Starts exporting to `http://host:port`. Must be called within the tokio runtime that is to drive the connection.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(service: &'static str, endpoint: &str) -> Result<Self, StartError> {
        let exporter = SpanExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
        let resource = Resource::builder().with_service_name(service).build();
        let provider = SdkTracerProvider::builder().with_resource(resource).with_batch_exporter(exporter).build();
        TRACER.set(provider.tracer(service)).map_err(|_| StartError::Twice)?;
        Ok(Self(provider))
    }

    /// Exports the remaining spans and shuts down. Blocks for up to two seconds, so it must not run on a thread that
    /// drives the connection.
    pub fn shutdown(self) {
        // Traces are diagnostic: losing spans must not fail the shutdown.
        let _ = self.0.shutdown_with_timeout(LAST_EXPORT);
    }
}

/// A span in progress, which ends on drop.
#[derive(Debug)]
pub struct Span(opentelemetry_sdk::trace::Span);

impl Span {
    /// The W3C `traceparent` for work that this span causes.
    pub fn traceparent(&self) -> String {
        let context = self.0.span_context();
        format!("00-{}-{}-{:02x}", context.trace_id(), context.span_id(), context.trace_flags().to_u8())
    }
}

pub(super) fn span<'a>(
    name: &'static str,
    begun: Option<SystemTime>,
    causes: impl IntoIterator<Item = &'a str>,
) -> Option<Span> {
    let tracer = TRACER.get()?;
    let mut causes: Vec<_> = causes.into_iter().filter_map(parse).collect();
    // An unsampled parent is not exported and must not hide a sampled one.
    if let Some(sampled) = causes.iter().position(SpanContext::is_sampled) {
        causes.swap(0, sampled);
    }
    let mut causes = causes.into_iter();
    let parent = causes.next().map_or_else(Context::new, |parent| Context::new().with_remote_span_context(parent));
    let links = causes.take(LINKS).map(Link::with_context).collect();
    let mut span = SpanBuilder::from_name(name).with_kind(SpanKind::Internal).with_links(links);
    if let Some(begun) = begun {
        span = span.with_start_time(begun);
    }
    Some(Span(span.start_with_context(tracer, &parent)))
}

/// Parses a `traceparent` of version 00, or the part of a later version that has the same format.
fn parse(text: &str) -> Option<SpanContext> {
    let mut parts = text.split('-');
    let mut hex = |digits| parts.next().filter(|part| is_lower_hex(part, digits));
    let version = hex(2).filter(|version| *version != "ff")?;
    let trace = hex(32)?;
    let span = hex(16)?;
    let flags = hex(2)?;
    if version == "00" && parts.next().is_some() {
        return None;
    }
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?);
    let trace = TraceId::from_hex(trace).ok()?;
    let span = SpanId::from_hex(span).ok()?;
    let context = SpanContext::new(trace, span, flags, true, TraceState::default());
    context.is_valid().then_some(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_inherits_the_sampling_of_its_parent() {
        TRACER.set(SdkTracerProvider::builder().build().tracer("test")).unwrap();
        let trace = "0af7651916cd43dd8448eb211c80319c";
        let other = "1af7651916cd43dd8448eb211c80319c";
        let cause = |trace, flags| format!("00-{trace}-b7ad6b7169203331-{flags}");
        let kept = cause(trace, "01");
        let dropped = cause(other, "00");
        for (causes, expected) in [
            (vec![&kept], (trace, true)),
            (vec![&dropped], (other, false)),
            (vec![&dropped, &kept], (trace, true)),
            (vec![&kept, &dropped], (trace, true)),
        ] {
            let span = span("test", None, causes.iter().map(|cause| cause.as_str())).unwrap();
            let context = parse(&span.traceparent()).unwrap();
            assert_eq!((&*context.trace_id().to_string(), context.is_sampled()), expected, "{causes:?}");
        }
        assert!(parse(&span("test", None, []).unwrap().traceparent()).unwrap().is_sampled());
    }

    #[test]
    fn malformed_traceparents_are_ignored() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let context = parse(good).unwrap();
        assert_eq!(context.trace_id().to_string(), "0af7651916cd43dd8448eb211c80319c");
        assert!(context.is_remote() && context.is_sampled());
        assert!(parse(&format!("01{}-more", &good[2..])).is_some(), "a later version may have more parts");
        for bad in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b71692033310-01",
        ] {
            assert!(parse(bad).is_none(), "{bad}");
        }
    }
}
