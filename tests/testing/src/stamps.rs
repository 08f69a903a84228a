//! The receiver's stamps: one line for every event that enqueued a Kyma.

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use k8s_openapi::jiff::Timestamp;
use tidewatch_api::identity::RuntimeId;

/// One line.
#[derive(Clone, Debug)]
pub struct Stamp {
    /// Instant at which the event enqueued its Kyma.
    pub enqueued: SystemTime,
    /// Runtime of the event.
    pub runtime: String,
    /// Watch of the plan.
    pub watch: String,
    /// Kind of change of the object, `watch` for a whole watch.
    pub change: String,
    /// Resource version of the object, `-` for a whole watch.
    pub resource_version: String,
    /// Instant at which the agent observed the change, by its clock.
    pub observed: Option<SystemTime>,
}

/// Reads all complete lines.
pub fn read(path: &Path) -> Result<Vec<Stamp>> {
    let text = fs::read_to_string(path).context("read the receiver's stamps")?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| parse(line).with_context(|| format!("stamp {line:?}"))).collect()
}

/// The first event of a watch of a runtime that enqueued its Kyma at or after a time.
pub fn first(path: &Path, runtime: &RuntimeId, watch: &str, after: SystemTime) -> Result<Option<Stamp>> {
    let matches = |stamp: &Stamp| stamp.runtime == runtime.as_str() && stamp.watch == watch && stamp.enqueued >= after;
    Ok(read(path)?.into_iter().find(matches))
}

fn parse(line: &str) -> Option<Stamp> {
    let mut fields = line.split(' ');
    let enqueued = SystemTime::UNIX_EPOCH + Duration::from_nanos(fields.next()?.parse().ok()?);
    let mut text = || fields.next().map(str::to_owned);
    let runtime = text()?;
    let watch = text()?;
    let change = text()?;
    let resource_version = text()?;
    let observed = fields.next()?.parse::<Timestamp>().ok().map(SystemTime::from);
    Some(Stamp { enqueued, runtime, watch, change, resource_version, observed })
}
