//! `fleet`: every runtime of the fleet.

use anyhow::{Context as _, Result};
use clap::Args;
use tidewatch_api::{ConditionStatus, plan::Work};
use tidewatch_contract::admin::{
    FLEET_PATH,
    fleet::{Report, RuntimeView, Summary},
};
use tidewatch_kit::{table, variant::VariantName as _};

use crate::{admin::AdminFlags, block_on, exit, output};

/// Arguments of `fleet`.
#[derive(Clone, Debug, Args)]
pub struct Fleet {
    /// Print the receiver's JSON unchanged
    #[arg(long)]
    pub json: bool,

    /// Exit with 3 if an event path is broken (condition EventPath is False; Unknown is no evidence), and with 4 if the
    /// receiver is not the active one, which has no runtimes
    #[arg(long)]
    pub check: bool,

    /// The receiver to query.
    #[command(flatten)]
    pub admin: AdminFlags,
}

impl Fleet {
    pub(crate) fn run(&self) -> Result<u8> {
        block_on(async {
            let client = self.admin.connect().await?;
            let body = client.get(FLEET_PATH).await.with_context(|| format!("query the receiver: {client}"))?;
            let report: Report = serde_json::from_slice(&body).context("parse the response")?;
            let text = if self.json { body } else { page(&report).into() };
            output::write(&text)?;
            let code = if self.check { check(&report) } else { exit::SUCCESS };
            if code == exit::NOT_ACTIVE {
                eprintln!("tidewatch fleet: the receiver is not active and has no runtimes: {client}");
            }
            Ok(code)
        })
    }
}

/// Exit code of `--check`.
fn check(report: &Report) -> u8 {
    let is_broken = |runtime: &RuntimeView| runtime.path.state == ConditionStatus::False;
    if !report.receiver.active {
        exit::NOT_ACTIVE
    } else if report.runtimes.iter().any(is_broken) {
        exit::BROKEN_PATH
    } else {
        exit::SUCCESS
    }
}

/// Text form: a summary, and a table of the runtimes.
fn page(report: &Report) -> String {
    let receiver = &report.receiver;
    let active = if receiver.active { "active" } else { "standby" };
    let uptime = table::age(Some(receiver.uptime_seconds));
    let mut page =
        format!("receiver {} {}, {active}, up {uptime}\n", receiver.instance, table::sanitize(&receiver.version));
    if receiver.active {
        page.push_str(&figures(&report.summary));
        let rows = report.runtimes.iter().map(|runtime| COLUMNS.map(|(_, cell)| cell(runtime)));
        page.push_str(&table::aligned(COLUMNS.map(|(title, _)| title), rows.collect()));
    }
    page
}

fn figures(summary: &Summary) -> String {
    let Summary { kymas, paths, waiting, parked, gaps, duplicates, unsettled, renewals_failing } = summary;
    let paths: Vec<_> = paths.iter().map(|(path, count)| format!("{count} {}", table::sanitize(path))).collect();
    let paths = if paths.is_empty() { String::new() } else { format!(" ({})", paths.join(", ")) };
    format!(
        "{kymas} Kymas{paths}; {waiting} waiting, {parked} parked, {gaps} gaps, {duplicates} duplicates, {unsettled} unsettled, {renewals_failing} fail to renew\n\n"
    )
}

/// Title of a column, and its cell for a runtime.
type Column = (&'static str, fn(&RuntimeView) -> String);

const COLUMNS: [Column; 14] = [
    ("KYMA", |runtime| runtime.kyma.clone()),
    ("RUNTIME", |runtime| or_dash(runtime.runtime_id.as_deref().unwrap_or_default())),
    ("PATH", |runtime| runtime.path.reason.clone()),
    ("SEEN", |runtime| table::age(runtime.last_seen_seconds)),
    ("CANARY", |runtime| table::age(runtime.canary_age_seconds)),
    ("WAITING", |runtime| runtime.waiting.to_string()),
    ("PARKED", |runtime| runtime.parked.to_string()),
    ("GAPS", |runtime| runtime.gaps.to_string()),
    ("DUPLICATES", |runtime| runtime.duplicates.to_string()),
    ("UNSETTLED", |runtime| works(&runtime.unsettled)),
    ("WANTED", |runtime| if runtime.in_progress { "in work".to_owned() } else { works(&runtime.queued) }),
    ("CONTRACT", |runtime| runtime.contract.clone()),
    ("VERSION", |runtime| or_dash(runtime.agent_version.as_deref().unwrap_or_default())),
    ("MESSAGE", message),
];

fn works(works: &[Work]) -> String {
    or_dash(&works.iter().map(Work::as_str).collect::<Vec<_>>().join(","))
}

fn message(runtime: &RuntimeView) -> String {
    let ambiguous = runtime.ambiguous.then(|| "another Kyma has this runtime id".to_owned());
    let first = ambiguous.or_else(|| runtime.path.message.clone());
    let renewal = runtime.renewal_failed_since.as_ref();
    let renewal = renewal.map(|since| format!("renewal of the certificate fails since {since}"));
    first.into_iter().chain(renewal).collect::<Vec<_>>().join("; ")
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn report(runtimes: &Value) -> Report {
        serde_json::from_value(json!({
            "receiver": {"instance": "00000000000000ff", "version": "0.1.0", "active": true, "uptimeSeconds": 3_725},
            "summary": {
                "kymas": 2, "paths": {"FailingWatch": 1, "Proven": 1}, "waiting": 3, "parked": 0, "gaps": 1, "duplicates": 0,
                "unsettled": 1,
            },
            "runtimes": runtimes,
        }))
        .unwrap()
    }

    fn runtime(kyma: &str, path: &Value, version: &str) -> Value {
        json!({
            "kyma": kyma, "namespace": "kcp-system", "runtimeId": "r-1", "ambiguous": false, "path": path, "contract": "v3",
            "lastSeenSeconds": 12, "heartbeatSeconds": 30, "canaryAgeSeconds": null, "agentVersion": version,
            "planRevision": "p", "planIsCurrent": true, "certificateNotAfter": null, "waiting": 3, "parked": 0, "gaps": 1,
            "duplicates": 0, "unsettled": ["kyma", "catalog"], "wanted": [], "paused": [], "inWork": true, "failures": 0,
            "epochs": [],
        })
    }

    fn proven() -> Value {
        json!({"state": "True", "reason": "Proven"})
    }

    #[test]
    fn check_fails_for_a_broken_path_and_for_a_standby() {
        let of = |paths: &[&str]| {
            let path = |state: &&str| runtime("k", &json!({"state": state, "reason": "r"}), "1");
            check(&report(&json!(paths.iter().map(path).collect::<Vec<_>>())))
        };
        assert_eq!(of(&[]), exit::SUCCESS);
        assert_eq!(of(&["True", "Unknown"]), exit::SUCCESS, "no evidence against it");
        assert_eq!(of(&["True", "False"]), exit::BROKEN_PATH);
        let mut standby = report(&json!([]));
        standby.receiver.active = false;
        assert_eq!(check(&standby), exit::NOT_ACTIVE);
    }

    #[test]
    fn page_shows_broken_paths_and_no_control_characters() {
        let failing = json!({"state": "False", "reason": "FailingWatch", "message": "pods: \u{1b}[31mno\nrights"});
        let report = report(&json!([runtime("b", &failing, "\u{7}1"), runtime("a", &proven(), "0.1.0")]));
        let page = page(&report);
        let lines: Vec<_> = page.lines().collect();
        assert_eq!(lines.len(), 6, "{page}");
        assert_eq!(lines[0], "receiver 00000000000000ff 0.1.0, active, up 1h2m");
        assert!(lines[1].starts_with("2 Kymas (1 FailingWatch, 1 Proven); 3 waiting"), "{page}");
        assert!(lines[4].starts_with("b ") && lines[4].contains("FailingWatch") && lines[4].contains("kyma,catalog"));
        assert!(page.chars().all(|char| char == '\n' || !char.is_control()), "{page:?}");
        let column = lines[3].find("PATH").unwrap();
        assert!(lines[4][column..].starts_with("FailingWatch") && lines[5][column..].starts_with("Proven"), "{page}");
        assert!(!lines[5].contains("renewal"), "{page}");
    }

    #[test]
    fn page_shows_a_failed_renewal_beside_other_messages() {
        let failing = json!({"state": "False", "reason": "FailingWatch", "message": "pods: no rights"});
        let mut runtimes = json!([runtime("b", &failing, "1"), runtime("a", &proven(), "1")]);
        for at in 0..2 {
            runtimes[at]["renewalFailedSince"] = json!("2026-11-21T20:00:00Z");
        }
        let mut report = report(&runtimes);
        report.summary.renewals_failing = 2;
        let page = page(&report);
        let lines: Vec<_> = page.lines().collect();
        let fails = "renewal of the certificate fails since 2026-11-21T20:00:00Z";
        assert!(lines[1].ends_with("1 unsettled, 2 fail to renew"), "{page}");
        assert!(lines[4].ends_with(&format!("  pods: no rights; {fails}")), "{page}");
        assert!(lines[5].ends_with(&format!("  {fails}")), "{page}");
    }
}
