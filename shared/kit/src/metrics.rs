//! A registry of metrics with descriptions, and [`metric_set!`](crate::metric_set), which declares metrics.
//!
//! `prometheus-client` exposes a metric once it has a sample. [`Registry`] also describes every registered metric before its first
//! sample, by name, type, labels and help text, for the reference page of the operators. [`markdown_list`] renders that page.

mod label;

use std::{
    fmt::{Debug, Write as _},
    hash::Hash,
};

use prometheus_client::{
    collector::Collector,
    encoding::{EncodeLabelSet, EncodeMetric, text},
    metrics::{MetricType, counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{self, Metric},
};

pub use crate::{label_sets, metric_set};
pub use label::{
    KindLabel, OutcomeLabel, PlaceLabel, PriorityLabel, ReasonLabel, ResultLabel, RouteLabel, StateLabel, VersionLabel,
};

/// Counts one in a gauge until dropped.
pub struct Counted<'a>(&'a Gauge);

impl<'a> Counted<'a> {
    /// Begins to count.
    pub fn new(gauge: &'a Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// The description of a metric.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MetricDescription {
    /// The full name, as in a query: with the prefix, and with `_total` if it is a counter.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// The names of the labels.
    pub labels: Vec<String>,
    /// The help text, without a full stop.
    pub help: String,
}

/// A metric with label names that are known before it has a sample.
pub trait DescribedMetric: Metric {
    /// The names of the labels, in the order of exposition; none by default.
    fn labels() -> Vec<String> {
        Vec::new()
    }
}

impl<N, A> DescribedMetric for Counter<N, A> where Self: Metric {}
impl<N, A> DescribedMetric for Gauge<N, A> where Self: Metric {}
impl DescribedMetric for Histogram {}

impl<S, M, C> DescribedMetric for Family<S, M, C>
where
    Self: Metric,
    S: EncodeLabelSet + Default + Clone + Debug + Eq + Hash + Send + Sync + 'static,
{
    fn labels() -> Vec<String> {
        let sample = Family::<S, Gauge>::default();
        let mut registry = registry::Registry::default();
        sample.get_or_create(&S::default()).set(1);
        registry.register("sample", "", sample);
        let mut text = String::new();
        // A label set that cannot be encoded here cannot be encoded in the exposition either, which has a test.
        let _ = text::encode(&mut text, &registry);
        let labels = text.lines().find_map(|line| line.strip_prefix("sample{")?.split_once('}'));
        let pairs = labels.map_or("", |(labels, _)| labels).split(',');
        pairs.filter_map(|pair| Some(pair.split_once('=')?.0.to_owned())).collect()
    }
}

/// The metrics of a process, or those under one prefix.
#[derive(Debug, Default)]
pub struct Registry {
    prefix: String,
    metrics: registry::Registry,
    descriptions: Vec<MetricDescription>,
    children: Vec<Registry>,
}

impl Registry {
    /// Creates an empty registry; every name in it begins with the prefix and `_`.
    pub fn with_prefix(prefix: impl Into<String>) -> Self {
        let prefix = prefix.into();
        Self { metrics: registry::Registry::with_prefix(prefix.clone()), prefix, ..Self::default() }
    }

    /// Registers a metric. The name of a counter is given without `_total`, the help text without a full stop: encoding appends both.
    pub fn register<M: DescribedMetric>(&mut self, name: &str, help: &str, metric: M) {
        let (kind, suffix) = kind_and_suffix(EncodeMetric::metric_type(&metric));
        let prefix = if self.prefix.is_empty() { String::new() } else { format!("{}_", self.prefix) };
        let full_name = format!("{prefix}{name}{suffix}");
        let description = MetricDescription { name: full_name, kind, labels: M::labels(), help: help.to_owned() };
        self.descriptions.push(description);
        self.metrics.register(name, help, metric);
    }

    /// Registers `build_info` with the version as its label.
    pub fn register_build_info(&mut self, version: &'static str) {
        let build = Family::<VersionLabel, Gauge>::default();
        build.get_or_create(&VersionLabel { version }).set(1);
        self.register("build_info", "Version of this build; always 1", build);
    }

    /// Registers a collector, which computes its samples at each scrape. `descriptions` describes them, with full names.
    pub fn collect(&mut self, descriptions: Vec<MetricDescription>, collector: Box<dyn Collector>) {
        self.descriptions.extend(descriptions);
        self.metrics.register_collector(collector);
    }

    /// Adds a child registry with one more prefix.
    #[must_use]
    pub fn sub_registry_with_prefix(&mut self, prefix: &str) -> &mut Self {
        let prefix = if self.prefix.is_empty() { prefix.to_owned() } else { format!("{}_{prefix}", self.prefix) };
        // The index is in range, because the element is pushed first.
        let index = self.children.len();
        self.children.push(Self::with_prefix(prefix));
        &mut self.children[index]
    }

    /// The descriptions of all registered metrics, sorted by name.
    pub fn described(&self) -> Vec<MetricDescription> {
        let mut all = self.descriptions.clone();
        all.extend(self.children.iter().flat_map(Self::described));
        all.sort();
        all
    }

    /// Encodes all samples as OpenMetrics text; `None` if a metric cannot be encoded, which is a defect.
    pub fn encode(&self) -> Option<String> {
        let mut text = String::new();
        self.encode_into(&mut text).ok()?;
        text::encode_eof(&mut text).ok()?;
        Some(text)
    }

    fn encode_into(&self, text: &mut String) -> std::fmt::Result {
        let start = text.len();
        text::encode_registry(text, &self.metrics)?;
        if let Some(sorted) = bound_last(&text[start..]) {
            text.truncate(start);
            text.push_str(&sorted);
        }
        self.children.iter().try_for_each(|child| child.encode_into(text))
    }
}

/// Moves the label `le` of histograms behind the other labels, where the Prometheus client of Go has it; `None` if no
/// histogram has other labels.
fn bound_last(text: &str) -> Option<String> {
    const BOUND: &str = "_bucket{le=\"";
    if !text.contains(BOUND) {
        return None;
    }
    let mut rest = text;
    let mut sorted = String::new();
    while let Some((before, bucket)) = rest.split_once(BOUND) {
        // The bound and the last value end with a quote; the former may be the latter.
        let (labels, after) = bucket.split_once("\"} ")?;
        let (bound, others) = labels.split_once("\",").unwrap_or((labels, ""));
        let others = if others.is_empty() { String::new() } else { format!("{others}\",") };
        sorted.extend([before, "_bucket{", others.as_str(), "le=\"", bound, "\"} "]);
        rest = after;
    }
    sorted.push_str(rest);
    (sorted != text).then_some(sorted)
}

/// Declares a struct of metrics, each once: field, type, name and help text.
///
/// The macro defines the struct with `#[derive(Clone)]`, implements [`Default`] and adds two methods with the visibility of the struct:
///
/// * `register(registry: &mut Registry) -> Self` creates the metrics and registers them,
/// * `register_in(&self, registry: &mut Registry)` registers existing metrics, also in a second registry.
///
/// Clones share their values. Metrics are registered in the order of their declaration, under the prefix of the registry.
///
/// The type of a field is any [`DescribedMetric`](crate::metrics::DescribedMetric): `Counter`, `Gauge`, `Histogram`, or a `Family` of
/// them. The form of its declaration determines its registration:
///
/// | Declaration | Meaning |
/// |---|---|
/// | `field: Type = "name",` | A metric. The name of a counter goes without `_total`. |
/// | `field: Type = ..,` | A nested set of metrics, itself declared by this macro, registered in the same registry. |
/// | `field: Type = _,` | A field of any type that is not registered. |
///
/// Every form may be followed by `with expression` for the initial value, which is `Default::default()` otherwise: required for a
/// `Histogram`, which has no default buckets, and for a `Family` of them.
///
/// The doc comment of a metric is its help text: the first paragraph, its lines joined by spaces, without the full stop, which encoding
/// appends. Further paragraphs are for readers of the code only. A metric without a doc comment does not compile. Further attributes
/// are accepted on the struct, but not on its fields.
///
/// # Example
/// ```
/// use prometheus_client::metrics::{
///     counter::Counter,
///     family::Family,
///     gauge::Gauge,
///     histogram::{Histogram, exponential_buckets},
/// };
/// use tidewatch_kit::{metric_set, metrics::{Registry, ResultLabel}};
///
/// metric_set! {
///     /// Metrics of the queue.
///     #[derive(Debug)]
///     pub(crate) struct QueueMetrics {
///         /// Reconciles by result.
///         reconciles: Family<ResultLabel, Counter> = "reconciles",
///         /// Time from the first request until the reconcile has ended.
///         ///
///         /// From 1 ms to about an hour.
///         duration: Histogram = "duration_seconds" with Histogram::new(exponential_buckets(0.001, 2.5, 17)),
///         /// Shared by all sets of workers.
///         workers: WorkerMetrics = ..,
///         /// Requests since the last scrape.
///         recent: usize = _,
///     }
/// }
///
/// metric_set! {
///     /// Metrics of the workers.
///     #[derive(Debug)]
///     pub(crate) struct WorkerMetrics {
///         /// Workers that are busy.
///         busy: Gauge = "workers_busy",
///     }
/// }
///
/// let mut registry = Registry::with_prefix("tidewatch");
/// let metrics = QueueMetrics::register(&mut registry);
/// metrics.reconciles.get_or_create(&ResultLabel { result: "done" }).inc();
/// metrics.workers.busy.set(3);
///
/// let text = registry.encode().expect("every metric can be encoded");
/// assert!(text.contains("# HELP tidewatch_reconciles Reconciles by result.\n"));
/// assert!(text.contains("tidewatch_reconciles_total{result=\"done\"} 1\n"));
/// assert!(text.contains("tidewatch_workers_busy 3\n"));
/// ```
#[macro_export]
macro_rules! metric_set {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $name:ident {
            $(
                $(#[doc = $doc:literal])*
                $field_visibility:vis $field:ident: $type:ty = $metric:tt $(with $initial:expr)?
            ),* $(,)?
        }
    ) => {
        $(#[$attribute])*
        #[derive(Clone)]
        $visibility struct $name {
            $(
                $(#[doc = $doc])*
                $field_visibility $field: $type,
            )*
        }

        impl ::core::default::Default for $name {
            fn default() -> Self {
                Self { $($field: $crate::metric_set!(@initial $($initial)?),)* }
            }
        }

        impl $name {
            /// Creates the metrics and registers them.
            #[allow(dead_code, reason = "the caller uses one of two ways to register")]
            #[must_use]
            $visibility fn register(registry: &mut $crate::metrics::Registry) -> Self {
                let metrics = <Self as ::core::default::Default>::default();
                metrics.register_in(registry);
                metrics
            }

            /// Registers these metrics.
            #[allow(dead_code, reason = "the caller uses one of two ways to register")]
            #[allow(unused_variables, reason = "a set may have no metrics of its own")]
            $visibility fn register_in(&self, registry: &mut $crate::metrics::Registry) {
                $($crate::metric_set!(@register self registry $field $metric $($doc)*);)*
            }
        }
    };
    (@initial) => { ::core::default::Default::default() };
    (@initial $initial:expr) => { $initial };
    (@register $self:ident $registry:ident $field:ident _ $($doc:literal)*) => {};
    (@register $self:ident $registry:ident $field:ident .. $($doc:literal)*) => { $self.$field.register_in($registry) };
    (@register $self:ident $registry:ident $field:ident $metric:literal $($doc:literal)+) => {
        $registry.register($metric, &$crate::metrics::help(&[$($doc),+]), ::core::clone::Clone::clone(&$self.$field))
    };
    (@register $self:ident $registry:ident $field:ident $metric:literal) => {
        ::core::compile_error!(::core::concat!("the metric ", $metric, " has no doc comment, which is its help text"))
    };
}

/// The help text in the lines of a doc comment: see [`metric_set!`](crate::metric_set).
#[doc(hidden)]
pub fn help(lines: &[&str]) -> String {
    let paragraph = lines.iter().map(|line| line.trim()).take_while(|line| !line.is_empty());
    let help = paragraph.collect::<Vec<_>>().join(" ");
    help.strip_suffix('.').map(str::to_owned).unwrap_or(help)
}

/// Renders descriptions as one Markdown list.
pub fn markdown_list(descriptions: &[MetricDescription]) -> String {
    let mut list = String::new();
    for MetricDescription { name, kind, labels, help } in descriptions {
        let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
        let separator = if labels.is_empty() { "" } else { "; " };
        // Writing to a string does not fail.
        let _ = writeln!(list, "* `{name}` ({kind}{separator}{}): {help}", labels.join(", "));
    }
    list
}

/// The name of a metric type, and the suffix that encoding appends to the names of its metrics.
const fn kind_and_suffix(kind: MetricType) -> (&'static str, &'static str) {
    match kind {
        MetricType::Counter => ("counter", "_total"),
        MetricType::Gauge => ("gauge", ""),
        MetricType::Histogram => ("histogram", ""),
        _ => ("untyped", ""),
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::histogram::exponential_buckets;

    use super::*;

    #[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct Labels {
        r#where: &'static str,
        reason: String,
    }

    metric_set! {
        /// A set with every form of declaration.
        #[derive(Debug)]
        struct Metrics {
            /// Things | stuff, by place
            /// and reason.
            things: Family<Labels, Counter> = "things",
            /// Time of e.g. a thing
            ///
            /// From 1 ms.
            duration: Histogram = "duration_seconds" with Histogram::new(exponential_buckets(0.001, 2.0, 3)),
            /// Metrics of another set.
            nested: Nested = ..,
            /// Not registered.
            limit: Gauge = _ with { let limit = Gauge::default(); limit.set(7); limit },
        }
    }

    metric_set! {
        #[derive(Debug)]
        struct Nested {
            /// Units.
            pub(super) units: Gauge = "units"
        }
    }

    /// The same metrics, registered one by one.
    fn registered_by_hand(registry: &mut Registry, metrics: &Metrics) {
        registry.register("things", "Things | stuff, by place and reason", metrics.things.clone());
        registry.register("duration_seconds", "Time of e.g. a thing", metrics.duration.clone());
        registry.register("units", "Units", metrics.nested.units.clone());
    }

    #[test]
    fn a_declared_set_is_registered_as_by_hand() {
        let mut declared = Registry::with_prefix("a");
        let mut by_hand = Registry::with_prefix("a");
        let metrics = Metrics::register(&mut declared);
        registered_by_hand(&mut by_hand, &metrics);
        metrics.things.get_or_create(&Labels { r#where: "here", reason: "x".into() }).inc();
        metrics.duration.observe(0.0015);
        metrics.nested.units.set(metrics.limit.get());
        assert_eq!(declared.described(), by_hand.described());
        assert_eq!(declared.encode(), by_hand.encode());

        let text = declared.encode().unwrap();
        for line in [
            "# HELP a_things Things | stuff, by place and reason.\n",
            "a_duration_seconds_bucket{le=\"0.002\"} 1\n",
            "a_units 7\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn a_set_can_be_registered_in_two_registries_and_shares_its_values() {
        let mut first = Registry::default();
        let mut second = Registry::default();
        let metrics = Nested::default();
        metrics.register_in(&mut first);
        metrics.clone().register_in(&mut second);
        metrics.units.set(2);
        assert_eq!(first.encode(), second.encode());
        assert!(first.encode().unwrap().contains("units 2\n"));
    }

    #[test]
    fn bound_of_a_histogram_is_its_last_label() {
        metric_set! {
            #[derive(Debug)]
            struct Timed {
                /// Time by place.
                times: Family<Labels, Histogram, fn() -> Histogram> = "times_seconds"
                    with Family::new_with_constructor(|| Histogram::new([0.5])),
                /// Time of all.
                all: Histogram = "all_seconds" with Histogram::new([0.5]),
            }
        }
        let mut registry = Registry::with_prefix("a");
        let timed = Timed::register(&mut registry);
        let labels = Labels { r#where: "x} y", reason: "r".into() };
        timed.times.get_or_create(&labels).observe(0.1);
        timed.all.observe(0.1);
        let text = registry.encode().unwrap();
        for line in [
            "a_times_seconds_bucket{where=\"x} y\",reason=\"r\",le=\"0.5\"} 1\n",
            "a_times_seconds_bucket{where=\"x} y\",reason=\"r\",le=\"+Inf\"} 1\n",
            "a_times_seconds_count{where=\"x} y\",reason=\"r\"} 1\n",
            "a_all_seconds_bucket{le=\"0.5\"} 1\n",
            "a_all_seconds_count 1\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }

    #[test]
    fn a_metric_without_samples_is_described() {
        let mut registry = Registry::with_prefix("a");
        let family = Family::<Labels, Counter>::default();
        registry.register("things", "Things | stuff", family.clone());
        let gauge = Gauge::<i64>::default();
        registry.sub_registry_with_prefix("b").register("seconds", "Seconds", gauge.clone());
        let actual: Vec<_> =
            registry.described().into_iter().map(|it| (it.name, it.kind, it.labels.join(" "))).collect();
        let expected = [("a_b_seconds", "gauge", ""), ("a_things_total", "counter", "where reason")];
        assert_eq!(actual, expected.map(|(name, kind, labels)| (name.to_owned(), kind, labels.to_owned())));
        let list =
            "* `a_b_seconds` (gauge): Seconds\n* `a_things_total` (counter; `where`, `reason`): Things | stuff\n";
        assert_eq!(markdown_list(&registry.described()), list);

        assert!(!registry.encode().unwrap().contains("things"), "a family without samples is not exposed");
        family.get_or_create(&Labels { r#where: "here", reason: "x".into() }).inc();
        gauge.set(7);
        let text = registry.encode().unwrap();
        for line in ["a_things_total{where=\"here\",reason=\"x\"} 1\n", "a_b_seconds 7\n"] {
            assert!(text.contains(line), "{text}");
        }
        assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1, "{text}");
    }
}
