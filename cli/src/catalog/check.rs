//! `catalog check`.

use anyhow::Result;
use clap::Args;
use jiff::{Timestamp, tz::TimeZone};
use tidewatch_receiver::controllers::catalog::{
    check::{self, CheckOptions, Report},
    visibility::restricted_modules,
};

use super::{LiveFlags, current, files};
use crate::{block_on, cluster::ClusterFlags, exit, output};

/// Arguments of `catalog check`.
#[derive(Clone, Debug, Args)]
pub struct Check {
    /// Files with YAML or JSON documents; - for standard input
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<String>,

    /// File with the current catalog, and with Kymas, if they matter; repeatable. Finds channels that move down and edits of
    /// templates, and permits files with only the new objects
    #[arg(long, value_name = "FILE", group = "current")]
    pub against: Vec<String>,

    /// Take the current catalog and the Kymas from the control plane, instead of --against
    #[arg(long, group = "current")]
    pub live: bool,

    /// Control plane with the current catalog.
    #[command(flatten)]
    pub cluster: ClusterFlags,

    /// The files are the whole catalog: objects only in the current one are removed
    #[arg(long, requires = "current")]
    pub whole: bool,

    /// Modules visible only to runtimes that match their release meta's kymaSelector, as for the receiver. Without it
    /// selectors of unrestricted modules are not found
    #[arg(long, env = "TIDEWATCH_RESTRICTED_DEFAULT_MODULES", value_delimiter = ',')]
    pub restricted_default_modules: Option<Vec<String>>,

    /// Treat warnings as errors
    #[arg(long)]
    pub deny_warnings: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Check {
    pub(super) fn run(&self) -> Result<u8> {
        let report = self.report()?;
        output::report(self.json, &report)?;
        Ok(if report.is_clean(self.deny_warnings) { exit::SUCCESS } else { exit::FAILURE })
    }

    fn report(&self) -> Result<Report> {
        let mut sources = files::read(self.files.iter().chain(&self.against))?;
        let mut against = sources.split_off(self.files.len());
        if self.live {
            let live = LiveFlags { cluster: self.cluster.clone(), restricted_default_modules: Vec::new() };
            against.push(block_on(current::read(&live))?);
        }
        let options = CheckOptions {
            restricted: self.restricted_default_modules.as_ref().map(restricted_modules),
            today: Timestamp::now().to_zoned(TimeZone::UTC).date(),
            whole: self.whole,
        };
        let against = (!against.is_empty()).then_some(&*against);
        Ok(check::check(&sources, against, &options)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catalogs of the check's own tests.
    const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../receiver/src/controllers/catalog/check/tests");

    #[test]
    fn current_catalog_is_separate_from_the_checked_files() {
        let file = |name: &str| format!("{FIXTURES}/{name}");
        let report = |files: &[&str], against: &[&str]| {
            let named = |names: &[&str]| names.iter().map(|name| file(name)).collect();
            let (files, against) = (named(files), named(against));
            let check = Check {
                files,
                against,
                live: false,
                cluster: ClusterFlags { kubeconfig: None, namespace: "kcp-system".to_owned() },
                whole: false,
                restricted_default_modules: None,
                deny_warnings: false,
                json: false,
            };
            check.report().map(|report| (report.summary.files, report.is_clean(true)))
        };
        assert_eq!(report(&["good.yaml"], &[]).unwrap(), (1, true));
        assert_eq!(report(&["good.yaml"], &["wrong.yaml"]).unwrap(), (1, false), "its channels move down from there");
        assert_eq!(report(&["wrong.yaml", "good.yaml"], &[]).unwrap(), (2, false));
        assert!(report(&["good.yaml", "missing.yaml"], &[]).is_err());
    }
}
