//! Flags of the maintenance windows.

use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use tidewatch_kit::table;
use tidewatch_select::windows::Windows;

use crate::catalog::files;

/// Flags of the maintenance windows.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct WindowFlags {
    /// File with the maintenance windows, as for the receiver; without it they are not taken into account
    #[arg(long, env = "TIDEWATCH_MAINTENANCE_WINDOW_POLICY", value_name = "FILE")]
    pub maintenance_window_policy: Option<String>,

    /// Time in seconds that a maintenance window must still last for an upgrade to begin, as for the receiver
    #[arg(long, env = "TIDEWATCH_MIN_MAINTENANCE_WINDOW_SIZE", default_value_t = 1_200, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(0..=86_400))]
    pub min_maintenance_window_size: u32,
}

impl WindowFlags {
    /// Reads the policy, and reports its mistakes on stderr; `None` without a file.
    pub(crate) fn read(&self) -> Result<Option<Windows>> {
        let Some(file) = &self.maintenance_window_policy else { return Ok(None) };
        let min_left = Duration::from_secs(self.min_maintenance_window_size.into());
        let sources = files::read([file])?;
        let policy = sources.first().map(|source| source.text.as_bytes()).unwrap_or_default();
        let windows = Windows::parse(policy, min_left).with_context(|| format!("read {file}"))?;
        let mistakes = windows.mistakes();
        if !mistakes.is_empty() {
            let text = format!("{file} has mistakes, which affect only their rule or window: {mistakes}");
            eprintln!("warning: {}", table::sanitize(&text));
        }
        Ok(Some(windows))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn invalid_policy_is_named_with_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("policy.json");
        let read = |content: &str| {
            fs::write(&path, content).unwrap();
            let maintenance_window_policy = Some(path.to_str().unwrap().to_owned());
            WindowFlags { maintenance_window_policy, min_maintenance_window_size: 0 }.read()
        };
        assert!(read(r#"{"rules": []}"#).unwrap().is_some());
        assert_eq!(read(r#"{"default": {"day": 1}}"#).unwrap().unwrap().mistakes().count(), 3);
        let error = format!("{:#}", read(r#"{"rules": 1}"#).unwrap_err());
        assert!(error.ends_with("policy.json: rules is not a list"), "{error}");
    }
}
