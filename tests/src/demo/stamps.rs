//! The receiver's stamps: one line for every event that made a Kyma wanted.

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use k8s_openapi::jiff::Timestamp;
use tidewatch_shared::identity::RuntimeId;

/// One line.
#[derive(Clone, Debug)]
pub struct Stamp {
    /// When the event made its Kyma wanted.
    pub wanted: SystemTime,
    /// Whose event.
    pub runtime: String,
    /// Of which watch of the plan.
    pub watch: String,
    /// What happened to the object, `watch` for a whole watch.
    pub change: String,
    /// The object's, `-` for a whole watch.
    pub resource_version: String,
    /// When the agent saw it, by its clock.
    pub seen: Option<SystemTime>,
}

/// Reads all whole lines.
pub fn read(path: &Path) -> Result<Vec<Stamp>> {
    let text = fs::read_to_string(path).context("read the receiver's stamps")?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| parse(line).with_context(|| format!("stamp {line:?}"))).collect()
}

/// The first event of a watch of a runtime that was wanted after a time.
pub fn first(path: &Path, runtime: &RuntimeId, watch: &str, after: SystemTime) -> Result<Option<Stamp>> {
    let matches = |stamp: &Stamp| stamp.runtime == runtime.as_str() && stamp.watch == watch && stamp.wanted >= after;
    Ok(read(path)?.into_iter().find(matches))
}

fn parse(line: &str) -> Option<Stamp> {
    let mut fields = line.split(' ');
    let wanted = SystemTime::UNIX_EPOCH + Duration::from_nanos(fields.next()?.parse().ok()?);
    let mut text = || fields.next().map(str::to_owned);
    let (runtime, watch, change, resource_version) = (text()?, text()?, text()?, text()?);
    let seen = fields.next()?.parse::<Timestamp>().ok().map(SystemTime::from);
    Some(Stamp { wanted, runtime, watch, change, resource_version, seen })
}
