//! `shards`: the holder of each shard of the fleet.

use anyhow::{Context as _, Result};
use clap::Args;
use jiff::Timestamp;
use tidewatch_contract::admin::{
    SHARDS_PATH,
    shards::{HolderView, Ownership, ShardView, ShardsReport},
};
use tidewatch_kit::table;

use crate::{admin::AdminFlags, block_on, exit, output};

/// Arguments of `shards`.
#[derive(Clone, Debug, Args)]
pub struct Shards {
    /// Print the receiver's JSON unchanged
    #[arg(long)]
    pub json: bool,

    /// Exit with 3 if a shard or the fleet role has no holder, and with 4 if the receiver is not active
    #[arg(long)]
    pub check: bool,

    /// The receiver to query.
    #[command(flatten)]
    pub admin: AdminFlags,
}

impl Shards {
    pub(crate) fn run(&self) -> Result<u8> {
        block_on(async {
            let client = self.admin.connect().await?;
            let body = client.get(SHARDS_PATH).await.with_context(|| format!("query the receiver: {client}"))?;
            let report: ShardsReport = serde_json::from_slice(&body).context("parse the response")?;
            let text = if self.json { body } else { page(&report, Timestamp::now()).into() };
            output::write(&text)?;
            let code = if self.check { check(&report) } else { exit::SUCCESS };
            match code {
                exit::NOT_ACTIVE => eprintln!("tidewatch shards: the receiver is not active: {client}"),
                exit::UNHELD_SHARD => eprintln!("tidewatch shards: without a holder: {}", unheld(&report)),
                _ => {}
            }
            Ok(code)
        })
    }
}

/// Exit code of `--check`.
fn check(report: &ShardsReport) -> u8 {
    match &report.ownership {
        None => exit::NOT_ACTIVE,
        Some(ownership) if ownership.fleet.is_some() && ownership.unheld().next().is_none() => exit::SUCCESS,
        Some(_) => exit::UNHELD_SHARD,
    }
}

/// Names of the shards, and of the fleet role, that have no holder.
fn unheld(report: &ShardsReport) -> String {
    let Some(ownership) = &report.ownership else { return String::new() };
    let role = ownership.fleet.is_none().then(|| "fleet role".to_owned());
    let shards = ownership.unheld().map(|shard| format!("shard {shard}"));
    role.into_iter().chain(shards).collect::<Vec<_>>().join(", ")
}

/// Text form: a line of the fleet role, and a table of the shards.
fn page(report: &ShardsReport, now: Timestamp) -> String {
    match &report.ownership {
        None => "the receiver is not active and holds no shard\n".to_owned(),
        Some(Ownership { fleet, shards }) => {
            let [holder, renewed, moved] = cells(fleet.as_ref(), now);
            let role = table::sanitize(&holder);
            let rows = shards.iter().map(|ShardView { shard, holder, runtimes }| {
                let [holder, renewed, moved] = cells(holder.as_ref(), now);
                [shard.to_string(), holder, renewed, runtimes.to_string(), moved]
            });
            let head = ["SHARD", "HOLDER", "RENEWED", "RUNTIMES", "MOVED"];
            let table = table::aligned(head, rows.collect());
            format!("fleet role: {role}, renewed {renewed}, moved {moved}\n\n{table}")
        }
    }
}

/// Name of a holder, and the times since its last renewal and the last move.
fn cells(holder: Option<&HolderView>, now: Timestamp) -> [String; 3] {
    let Some(HolderView { name, renewed_seconds, moved }) = holder else {
        return ["none".to_owned(), "-".to_owned(), "-".to_owned()];
    };
    let since = |moved: &Timestamp| u64::try_from(now.as_second().saturating_sub(moved.as_second())).unwrap_or(0);
    [name.clone(), table::age(Some(*renewed_seconds)), table::age(moved.as_ref().map(since))]
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn report(ownership: &Value) -> ShardsReport {
        let receiver = json!({"instance": "00000000000000ff", "version": "0.1.0", "active": true, "uptimeSeconds": 5});
        serde_json::from_value(json!({"receiver": receiver, "ownership": ownership})).unwrap()
    }

    fn sharded(fleet: &Value, holders: &[Value]) -> ShardsReport {
        let shards = (0..).zip(holders).map(|(n, holder)| json!({"shard": n, "holder": holder, "runtimes": n + 5}));
        report(&json!({"fleet": fleet, "shards": shards.collect::<Vec<_>>()}))
    }

    fn holder() -> Value {
        json!({"name": "pod-1\u{1b}", "renewedSeconds": 3, "moved": "2026-11-25T20:00:00Z"})
    }

    #[test]
    fn check_fails_for_a_shard_or_role_without_a_holder_and_for_a_standby() {
        let held = holder();
        let none = Value::Null;
        assert_eq!(check(&sharded(&held, &[held.clone(), held.clone()])), exit::SUCCESS);
        let partly = sharded(&held, &[held.clone(), none.clone()]);
        assert_eq!((check(&partly), &*unheld(&partly)), (exit::UNHELD_SHARD, "shard 1"));
        let leaderless = sharded(&none, std::slice::from_ref(&held));
        assert_eq!((check(&leaderless), &*unheld(&leaderless)), (exit::UNHELD_SHARD, "fleet role"));
        assert_eq!(check(&report(&none)), exit::NOT_ACTIVE);
    }

    #[test]
    fn page_has_a_line_for_each_shard_and_no_control_characters() {
        let now = "2026-11-25T20:01:05Z".parse().unwrap();
        let page = |report: &ShardsReport| super::page(report, now);
        let text = page(&sharded(&holder(), &[holder(), Value::Null]));
        let expected = "fleet role: pod-1\u{fffd}, renewed 3s, moved 1m5s\n\n\
            SHARD  HOLDER  RENEWED  RUNTIMES  MOVED\n\
            0      pod-1\u{fffd}  3s       5         1m5s\n\
            1      none    -        6         -\n";
        assert_eq!(text, expected);
        assert!(page(&report(&Value::Null)).contains("not active"));
    }
}
