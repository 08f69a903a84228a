//! Prometheus alert rules and the page that explains them, from one table.

mod table;

use std::fmt::Write as _;

use serde_json::{Value, json};

use self::table::{ALERTS, Alert};
use crate::render::File;

/// Published location of the page; each rule links its section.
const RUNBOOKS: &str = "https://github.com/kyma-project/tidewatch/blob/main/docs/operations/alerts.md";

const HEAD: &str = "# Alerts

<!-- Generated from the table of alerts by `cargo generate`; changes made here are lost. -->

`deploy/base/prometheusrule.yaml` defines these rules for the Prometheus operator. Each section explains one alert: its meaning, the checks
that find the cause, and the remedy. The metrics are described in the [metrics reference](../reference/metrics.md), the conditions in
[conditions](conditions.md).
";

/// The `spec` of the PrometheusRule.
pub(crate) fn rules() -> Value {
    let rule = |alert: &Alert| {
        json!({
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.pending,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook_url": format!("{RUNBOOKS}#{}", alert.name.to_lowercase())},
        })
    };
    json!({"groups": [{"name": "tidewatch", "rules": ALERTS.iter().map(rule).collect::<Vec<_>>()}]})
}

/// Renders `docs/operations/alerts.md`.
pub(crate) fn page() -> File {
    let mut content = HEAD.to_owned();
    for Alert { name, expression, pending, severity, summary, meaning, checks, remedy } in ALERTS {
        // Writing to a String cannot fail.
        let _ = write!(
            content,
            "\n## {name}\n\n{summary}.\n\n| severity | pending for | expression |\n|---|---|---|\n| {severity} | {pending} | `{}` |\n\n\
             **Meaning.** {meaning}\n\n**Checks.** {checks}\n\n**Remedy.** {remedy}\n",
            expression.replace('|', "\\|"),
        );
    }
    File { name: "alerts.md".to_owned(), content }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use clap::Parser as _;
    use tidewatch_receiver::config::Config;
    use tidewatch_trust::REPLICA_VALIDITY;

    use super::*;

    /// The words of an expression that look like metrics of ours or of lifecycle-manager.
    fn metrics_of(expression: &str) -> impl Iterator<Item = &str> {
        let words = expression.split(|char: char| !char.is_ascii_alphanumeric() && char != '_');
        words.filter(|word| ["tidewatch_", "lifecycle_mgr_", "watcher_"].iter().any(|prefix| word.starts_with(prefix)))
    }

    #[test]
    fn alerts_name_existing_metrics() {
        let known: BTreeSet<_> = tidewatch_receiver::app::metrics().into_iter().map(|metric| metric.name).collect();
        for alert in ALERTS {
            assert!(metrics_of(alert.expression).count() > 0, "{}", alert.name);
            for metric in metrics_of(alert.expression) {
                assert!(known.contains(metric), "{}: {metric} does not exist", alert.name);
            }
        }
    }

    #[test]
    fn first_increment_of_a_labelled_counter_alerts() {
        let metrics = tidewatch_receiver::app::metrics();
        let labelled: BTreeSet<_> =
            metrics.iter().filter(|metric| !metric.labels.is_empty()).map(|metric| metric.name.as_str()).collect();
        for alert in ALERTS.iter().filter(|alert| alert.expression.contains("]) > 0")) {
            for metric in metrics_of(alert.expression).filter(|metric| labelled.contains(metric)) {
                // The series begins with the first increment, so that it does not increase by it.
                let begins = format!("({metric} > 0 unless {metric} offset 1h)");
                assert!(alert.expression.contains(&begins), "{}", alert.name);
            }
        }
    }

    #[test]
    fn every_broken_event_path_alerts() {
        let expression = alert("TidewatchEventPathBroken").expression;
        for state in tidewatch_fleet::PathState::names() {
            // The condition `EventPath` shows all others as False.
            let is_broken = !["Unknown", "Proven", "Away", "LegacyAgent"].contains(&state);
            assert_eq!(expression.contains(state), is_broken, "{state}");
        }
    }

    fn alert(name: &str) -> &'static Alert {
        ALERTS.iter().find(|alert| alert.name == name).unwrap()
    }

    #[test]
    fn shards_without_a_holder_alert_after_a_take_over_should_have_ended() {
        let config = Config::try_parse_from(["receiver", "--authority=kcp:8443", "--oci-registry-host=r"]).unwrap();
        let pending = format!("{}s", config.lease.lease_duration.as_secs() + 60);
        for name in ["TidewatchShardWithoutHolder", "TidewatchFleetRoleWithoutHolder"] {
            assert_eq!(alert(name).pending, pending, "{name}");
        }
    }

    #[test]
    fn replica_certificate_alerts_between_its_renewal_and_its_end() {
        let (_, seconds) = alert("TidewatchReplicaCertificateExpiring").expression.split_once(" < ").unwrap();
        let left = Duration::from_secs(seconds.parse().unwrap());
        assert!(left < REPLICA_VALIDITY / 3 && left >= REPLICA_VALIDITY / 8, "{left:?}");
    }

    #[test]
    fn alert_names_are_unique() {
        let names: BTreeSet<_> = ALERTS.iter().map(|alert| alert.name).collect();
        assert_eq!(names.len(), ALERTS.len());
    }
}
