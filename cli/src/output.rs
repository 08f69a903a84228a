//! Standard output.

use std::io::{self, Write as _};

use anyhow::{Context as _, Result};
use serde::Serialize;

/// Writes bytes and flushes.
pub(crate) fn write(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).context("write to stdout")
}

/// Writes a report as indented JSON or as text.
pub(crate) fn report(json: bool, report: &(impl Serialize + ToString)) -> Result<()> {
    let text =
        if json { serde_json::to_string_pretty(report).context("write JSON")? + "\n" } else { report.to_string() };
    write(text.as_bytes())
}
