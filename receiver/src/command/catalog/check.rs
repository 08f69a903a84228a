//! `catalog check`.

use anyhow::Result;
use clap::Args;
use jiff::{Timestamp, tz::TimeZone};

use super::{File, Outcome, print, texts};
use crate::controllers::catalog::check::{self, Report, Terms};

/// What is checked.
#[derive(Clone, Debug, Args)]
pub struct Check {
    /// Files with YAML or JSON documents; - is the standard input.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<File>,

    /// A file with the catalog as it is now; may be given more than once. With it, channels that move down are found, and the files
    /// need to have only what is new.
    #[arg(long, value_name = "FILE")]
    pub against: Vec<File>,

    /// The files are the whole catalog: what only the files of --against have is removed.
    #[arg(long, requires = "against")]
    pub whole: bool,

    /// Modules that only runtimes selected by their release meta's `kymaSelector` may see, as the receiver is told. Without it a
    /// selector of a module that is not restricted is not found.
    #[arg(long, env = "TIDEWATCH_RESTRICTED_DEFAULT_MODULES", value_delimiter = ',')]
    pub restricted_default_modules: Option<Vec<String>>,

    /// Warnings count as errors.
    #[arg(long)]
    pub deny_warnings: bool,

    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

impl Check {
    pub(super) fn run(&self) -> Result<Outcome> {
        let report = self.report()?;
        print(self.json, &report)?;
        Ok(if report.is_clean(self.deny_warnings) { Outcome::Nothing } else { Outcome::Something })
    }

    fn report(&self) -> Result<Report> {
        let mut sources = texts::read(self.files.iter().chain(&self.against))?;
        let against = sources.split_off(self.files.len());
        let terms = Terms {
            restricted: self.restricted_default_modules.as_ref().map(|modules| modules.iter().cloned().collect()),
            today: Timestamp::now().to_zoned(TimeZone::UTC).date(),
            whole: self.whole,
        };
        let against = (!self.against.is_empty()).then_some(&*against);
        Ok(check::check(&sources, against, &terms)?)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_state_before_is_told_from_what_is_checked() {
        let file =
            |name: &str| File::Path(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/catalog/check/tests").join(name));
        let report = |files: &[&str], against: &[&str]| {
            let named = |names: &[&str]| names.iter().map(|name| file(name)).collect();
            let (files, against) = (named(files), named(against));
            let check = Check {
                files,
                against,
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
