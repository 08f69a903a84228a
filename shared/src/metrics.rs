//! A registry of metrics that can say what there is before anything was counted: name, type, labels and help of every metric, for the
//! page that operators read.

use std::fmt::{Debug, Write as _};
use std::hash::Hash;

use prometheus_client::{
    collector::Collector,
    encoding::{EncodeLabelSet, EncodeMetric, text},
    metrics::{MetricType, counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{self, Metric},
};

/// What a metric is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Described {
    /// Its name, as a query writes it: with the prefix, and with `_total` if it is a counter.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// The names of its labels.
    pub labels: Vec<String>,
    /// What it says.
    pub help: String,
}

/// A metric whose labels are known before it has a sample.
pub trait Measure: Metric {
    /// The names of its labels.
    fn labels() -> Vec<String>;
}

impl<N, A> Measure for Counter<N, A>
where
    Self: Metric,
{
    fn labels() -> Vec<String> {
        Vec::new()
    }
}

impl<N, A> Measure for Gauge<N, A>
where
    Self: Metric,
{
    fn labels() -> Vec<String> {
        Vec::new()
    }
}

impl Measure for Histogram {
    fn labels() -> Vec<String> {
        Vec::new()
    }
}

impl<S, M, C> Measure for Family<S, M, C>
where
    Self: Metric,
    S: EncodeLabelSet + Default + Clone + Debug + Eq + Hash + Send + Sync + 'static,
{
    fn labels() -> Vec<String> {
        let (sample, mut registry) = (Family::<S, Gauge>::default(), registry::Registry::default());
        sample.get_or_create(&S::default()).set(1);
        registry.register("sample", "", sample);
        let mut text = String::new();
        // What cannot be written here cannot be written on the page of metrics either, which has a test.
        let _ = text::encode(&mut text, &registry);
        let labels = text.lines().find_map(|line| line.strip_prefix("sample{")?.split_once('}'));
        let pairs = labels.map_or("", |(labels, _)| labels).split(',');
        pairs.filter_map(|pair| Some(pair.split_once('=')?.0.to_owned())).collect()
    }
}

/// All metrics of a process, or those under one prefix.
#[derive(Debug, Default)]
pub struct Registry {
    prefix: String,
    metrics: registry::Registry,
    described: Vec<Described>,
    under: Vec<Registry>,
}

impl Registry {
    /// An empty registry; every name in it begins with the prefix and `_`.
    #[must_use]
    pub fn with_prefix(prefix: impl Into<String>) -> Self {
        let prefix = prefix.into();
        Self { metrics: registry::Registry::with_prefix(prefix.clone()), prefix, ..Self::default() }
    }

    /// Adds a metric. A counter's name goes without `_total`, a help text without its full stop.
    pub fn register<M: Measure>(&mut self, name: &str, help: &str, metric: M) {
        let (kind, end) = kind(EncodeMetric::metric_type(&metric));
        let prefix = if self.prefix.is_empty() { String::new() } else { format!("{}_", self.prefix) };
        let name_in_full = format!("{prefix}{name}{end}");
        self.described.push(Described { name: name_in_full, kind, labels: M::labels(), help: help.to_owned() });
        self.metrics.register(name, help, metric);
    }

    /// Adds what is computed when somebody asks; `described` says what that will be, with full names.
    pub fn collect(&mut self, described: Vec<Described>, collector: Box<dyn Collector>) {
        self.described.extend(described);
        self.metrics.register_collector(collector);
    }

    /// A registry within this one, whose names have one more prefix.
    #[must_use]
    pub fn sub_registry_with_prefix(&mut self, prefix: &str) -> &mut Self {
        let prefix = if self.prefix.is_empty() { prefix.to_owned() } else { format!("{}_{prefix}", self.prefix) };
        // No index is out of range, because the element is pushed first.
        let at = self.under.len();
        self.under.push(Self::with_prefix(prefix));
        &mut self.under[at]
    }

    /// Everything that was registered, in order of the names.
    #[must_use]
    pub fn described(&self) -> Vec<Described> {
        let mut all = self.described.clone();
        all.extend(self.under.iter().flat_map(Self::described));
        all.sort();
        all
    }

    /// All samples as OpenMetrics text; `None` when a metric cannot be written, which is a defect.
    #[must_use]
    pub fn encode(&self) -> Option<String> {
        let mut text = String::new();
        self.write(&mut text).ok()?;
        text::encode_eof(&mut text).ok()?;
        Some(text)
    }

    fn write(&self, text: &mut String) -> std::fmt::Result {
        text::encode_registry(text, &self.metrics)?;
        self.under.iter().try_for_each(|under| under.write(text))
    }
}

/// A page that describes metrics, in Markdown: one table.
#[must_use]
pub fn table(described: &[Described]) -> String {
    let mut table = "| Name | Type | Labels | Says |\n|---|---|---|---|\n".to_owned();
    for Described { name, kind, labels, help } in described {
        let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
        let (labels, help) = (labels.join(", "), help.replace('|', "\\|"));
        // Writing to a string does not fail.
        let _ = writeln!(table, "| `{name}` | {kind} | {labels} | {help} |");
    }
    table
}

/// A type's name, and how the names of its metrics end.
const fn kind(kind: MetricType) -> (&'static str, &'static str) {
    match kind {
        MetricType::Counter => ("counter", "_total"),
        MetricType::Gauge => ("gauge", ""),
        MetricType::Histogram => ("histogram", ""),
        _ => ("untyped", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct Labels {
        r#where: &'static str,
        reason: String,
    }

    #[test]
    fn what_has_no_sample_is_described_all_the_same() {
        let (mut registry, family) = (Registry::with_prefix("a"), Family::<Labels, Counter>::default());
        registry.register("things", "Things | stuff", family.clone());
        let gauge = Gauge::<i64>::default();
        registry.sub_registry_with_prefix("b").register("seconds", "Seconds", gauge.clone());
        let said: Vec<_> = registry.described().into_iter().map(|it| (it.name, it.kind, it.labels.join(" "))).collect();
        let expected = [("a_b_seconds", "gauge", ""), ("a_things_total", "counter", "where reason")];
        assert_eq!(said, expected.map(|(name, kind, labels)| (name.to_owned(), kind, labels.to_owned())));
        assert!(
            table(&registry.described())
                .ends_with("| `a_things_total` | counter | `where`, `reason` | Things \\| stuff |\n")
        );

        assert!(!registry.encode().unwrap().contains("things"), "without a sample there is nothing to show");
        family.get_or_create(&Labels { r#where: "here", reason: "x".into() }).inc();
        gauge.set(7);
        let text = registry.encode().unwrap();
        for line in ["a_things_total{where=\"here\",reason=\"x\"} 1\n", "a_b_seconds 7\n"] {
            assert!(text.contains(line), "{text}");
        }
        assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1, "{text}");
    }
}
