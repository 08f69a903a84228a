//! The reference page of all metrics of the agent and the receiver.

use tidewatch_agent::telemetry;
use tidewatch_kit::metrics::markdown_list;
use tidewatch_receiver::app;

use crate::render::File;

const HEAD: &str = "# Metrics

<!-- Generated from the programs' registries by `cargo generate`; changes made here are lost. -->

Durations are in seconds, sizes in bytes, timestamps in Unix seconds. A series is exposed from its first sample on. Label values are from
closed sets, except for the names of managers, services, watches, Kymas and modules: their cardinality is bounded by the number of Watchers,
Kymas and modules.
";

const RECEIVER: &str = "
## Receiver

Exposed at `/metrics` on `--metrics-address`. Metrics named `lifecycle_mgr_…` and `watcher_listener_…` have the names, labels and meanings of
those of the lifecycle manager and its listener. A receiver that stands by exposes them too, without those of runtimes.

";

const AGENT: &str = "
## Agent

Exposed at `/metrics` on `--metrics-address`. Metrics named `watcher_…` have the names, labels and meanings of those of the runtime watcher.

";

/// Renders `docs/reference/metrics.md`.
pub fn metrics() -> File {
    let receiver = markdown_list(&app::metrics());
    let agent = markdown_list(&telemetry::Metrics::described());
    File { name: "metrics.md".to_owned(), content: format!("{HEAD}{RECEIVER}{receiver}{AGENT}{agent}") }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_metric_is_described_once_and_named_by_convention() {
        for described in [app::metrics(), telemetry::Metrics::described()] {
            let names: BTreeSet<_> = described.iter().map(|metric| metric.name.as_str()).collect();
            assert_eq!(names.len(), described.len(), "two metrics of one name");
            for metric in &described {
                assert!(!metric.help.is_empty() && !metric.help.ends_with('.'), "{metric:?}");
                assert_eq!(metric.kind == "counter", metric.name.ends_with("_total"), "{metric:?}");
                assert!(metric.kind != "histogram" || metric.name.ends_with("_seconds"), "{metric:?}");
                assert!(metric.labels.iter().all(|label| !label.is_empty()), "{metric:?}");
                // Dashboards and tests that match text expect the order of the Prometheus clients.
                assert!(metric.labels.is_sorted(), "{metric:?}");
            }
        }
    }

    #[test]
    fn the_page_lists_lifecycle_managers_metrics() {
        let page = metrics().content;
        for item in [
            "* `lifecycle_mgr_kyma_state` (gauge; `instance_id`, `kyma_name`, `shoot`, `state`): ",
            "* `lifecycle_mgr_module_state` (gauge; `instance_id`, `kyma_name`, `module_name`, `shoot`, `state`): ",
            "* `lifecycle_mgr_requeue_reason_total` (counter; `requeue_reason`, `requeue_type`): ",
            "* `watcher_listener_requests_total` (counter; `server_name`): ",
            "* `watcher_failed_kcp_total` (counter; `error_reason`): ",
            "* `watcher_request_duration` (gauge): ",
        ] {
            assert!(page.contains(item), "{item}");
        }
    }
}
