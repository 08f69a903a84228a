//! The page that describes every metric of both programs.

use tidewatch_agent::telemetry;
use tidewatch_receiver::app;
use tidewatch_shared::metrics::table;

use crate::render::File;

const HEAD: &str = "# Metrics

<!-- Generated from the programs' registries by `cargo generate`; changes made here are lost. -->

Times are seconds, sizes bytes, points in time Unix seconds. A series appears with its first sample; values of labels come from closed
sets, except names of managers, services, watches, Kymas and modules, of which there are as many as there are Watchers, Kymas and modules.
";

const RECEIVER: &str = "
## Receiver

At `/metrics` of `--metrics-address`. Names that begin with `lifecycle_mgr_` or `watcher_listener_` have the names, labels and meanings of
the lifecycle manager's and its listener's. A receiver that waits for its turn shows `tidewatch_active`, `tidewatch_lease_writes_total`,
`tidewatch_build_info`, `tidewatch_gateway_certificate_end_timestamp_seconds` and `tidewatch_pki_…` alone.

";

const AGENT: &str = "
## Agent

At `/metrics` of `--metrics-address`. Names that begin with `watcher_` have the names, labels and meanings of the runtime watcher's.

";

/// `deploy/metrics.md`.
#[must_use]
pub fn metrics() -> File {
    let (receiver, agent) = (table(&app::metrics()), table(&telemetry::Metrics::described()));
    File { name: "metrics.md".to_owned(), content: format!("{HEAD}{RECEIVER}{receiver}{AGENT}{agent}") }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_metric_is_described_once_and_by_the_rules_of_names() {
        for described in [app::metrics(), telemetry::Metrics::described()] {
            let names: BTreeSet<_> = described.iter().map(|metric| metric.name.as_str()).collect();
            assert_eq!(names.len(), described.len(), "two metrics of one name");
            for metric in &described {
                assert!(!metric.help.is_empty() && !metric.help.ends_with('.'), "{metric:?}");
                assert_eq!(metric.kind == "counter", metric.name.ends_with("_total"), "{metric:?}");
                assert!(metric.kind != "histogram" || metric.name.ends_with("_seconds"), "{metric:?}");
                assert!(metric.labels.iter().all(|label| !label.is_empty()), "{metric:?}");
            }
        }
    }

    #[test]
    fn the_page_has_what_dashboards_read() {
        let page = metrics().content;
        for line in [
            "| `lifecycle_mgr_kyma_state` | gauge | `kyma_name`, `state`, `shoot`, `instance_id` |",
            "| `lifecycle_mgr_module_state` | gauge | `module_name`, `kyma_name`, `state`, `shoot`, `instance_id` |",
            "| `lifecycle_mgr_requeue_reason_total` | counter | `requeue_reason`, `requeue_type` |",
            "| `watcher_listener_requests_total` | counter | `server_name` |",
            "| `watcher_failed_kcp_total` | counter | `error_reason` |",
            "| `watcher_request_duration` | gauge |  |",
        ] {
            assert!(page.contains(line), "{line}");
        }
    }
}
