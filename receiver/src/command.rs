//! The command line: without a subcommand the receiver runs; `fleet` and `rotate-ca` ask one that runs, `catalog` needs none.

mod ask;
mod catalog;
mod fleet;
mod rotate;

use std::process::ExitCode;

use clap::{Args as _, CommandFactory as _, FromArgMatches as _};

use crate::config::Config;

pub use ask::{AdminUrl, ParseAdminUrl, Whom};
pub use catalog::{Catalog, Check, Diff, File, Kcp, Show, What};
pub use fleet::Fleet;
pub use rotate::RotateCa;

/// What the process is to do.
#[derive(Debug)]
pub enum Command {
    /// Run.
    Run(Box<Config>),
    /// Ask something of a catalog.
    Catalog(Catalog),
    /// Show the fleet of a receiver that runs.
    Fleet(Fleet),
    /// Rotate the CA of a receiver that runs.
    RotateCa(RotateCa),
}

const CATALOG: &str = "catalog";
const FLEET: &str = "fleet";
const ROTATE_CA: &str = "rotate-ca";

impl Command {
    /// Reads the process's arguments and environment. Ends the process with the reasons on stderr when they are not valid.
    #[must_use]
    pub fn parse() -> Self {
        Self::from_arguments(std::env::args_os()).unwrap_or_else(|error| error.exit())
    }

    fn from_arguments(
        arguments: impl IntoIterator<Item = impl Into<std::ffi::OsString> + Clone>,
    ) -> Result<Self, clap::Error> {
        let mut matches = grammar().try_get_matches_from(arguments)?;
        let read = match matches.remove_subcommand() {
            Some((name, mut matches)) if name == CATALOG => {
                Catalog::from_arg_matches_mut(&mut matches).map(Self::Catalog)
            }
            Some((name, mut matches)) if name == ROTATE_CA => {
                RotateCa::from_arg_matches_mut(&mut matches).map(Self::RotateCa)
            }
            Some((_, mut matches)) => Fleet::from_arg_matches_mut(&mut matches).map(Self::Fleet),
            None => Config::from_arg_matches_mut(&mut matches).map(|config| Self::Run(Box::new(config))),
        };
        read.map_err(|error| error.format(&mut grammar()))
    }
}

/// Flags of the receiver stand at the top level; a subcommand needs none of them.
fn grammar() -> clap::Command {
    let fleet = Fleet::augment_args(clap::Command::new(FLEET)).about("Shows the runtimes of a receiver that runs");
    let rotate = RotateCa::augment_args(clap::Command::new(ROTATE_CA))
        .about("Rotates the built-in CA of a receiver that runs, and tells how far it is");
    let catalog = Catalog::augment_args(clap::Command::new(CATALOG))
        .about("Checks a module catalog, compares it with a live one, and shows what a runtime may see of it");
    let commands = [catalog, fleet, rotate];
    Config::command().args_conflicts_with_subcommands(true).subcommand_negates_reqs(true).subcommands(commands)
}

impl Fleet {
    /// Asks, and prints the answer. The process ends with 0, or with 1 when there is no answer (2 is what wrong arguments end with). With
    /// `--check` it ends with 3 when a path is broken, and with 4 when the receiver is not the active one.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        match self.show() {
            Ok(fleet::Health::Sound) => ExitCode::SUCCESS,
            Ok(fleet::Health::Broken) => ExitCode::from(3),
            Ok(fleet::Health::NotActive) => {
                eprintln!(
                    "tidewatch-receiver {FLEET}: the receiver at {} is not active: it knows no runtimes",
                    self.whom.admin_url
                );
                ExitCode::from(4)
            }
            Err(error) => {
                eprintln!("tidewatch-receiver {FLEET}: {error:#}");
                ExitCode::FAILURE
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: [&str; 9] = [
        "receiver",
        "--authority=kcp:8443",
        "--oci-registry-host=r",
        "--tls-cert",
        "c",
        "--tls-key",
        "k",
        "--client-ca",
        "a",
    ];

    #[test]
    fn the_receiver_runs_unless_it_is_asked_for_something_else() {
        grammar().debug_assert();
        assert!(matches!(Command::from_arguments(LEAST), Ok(Command::Run(_))));
        assert!(Command::from_arguments(["receiver"]).is_err());
        let Ok(Command::Fleet(fleet)) = Command::from_arguments(["receiver", "fleet", "--json"]) else { panic!() };
        assert!(fleet.json && !fleet.check);
        let rotate = Command::from_arguments(["receiver", "rotate-ca", "--force-after", "60", "--no-wait"]);
        assert!(matches!(rotate, Ok(Command::RotateCa(RotateCa { force_after: Some(60), no_wait: true, .. }))));
        let check =
            Command::from_arguments(["receiver", "catalog", "check", "a.yaml", "-", "--against", "b", "--json"]);
        let Ok(Command::Catalog(Catalog { what: What::Check(check) })) = check else { panic!("{check:?}") };
        assert_eq!((check.files.len(), check.against.len(), check.json, check.whole), (2, 1, true, false));
        for wrong in [&["check"][..], &["check", "a", "--whole"], &["show"], &["diff"], &[]] {
            assert!(Command::from_arguments(["receiver", "catalog"].iter().chain(wrong)).is_err(), "{wrong:?}");
        }
        let show = Command::from_arguments(["receiver", "catalog", "show", "k", "-n", "kcp"]);
        let Ok(Command::Catalog(Catalog { what: What::Show(show) })) = show else { panic!("{show:?}") };
        assert_eq!((&*show.kyma, &*show.kcp.namespace), ("k", "kcp"));
        assert!(Command::from_arguments(["receiver", "--authority=kcp:8443", "--oci-registry-host=r"]).is_ok());
        let half = ["receiver", "--authority=kcp:8443", "--oci-registry-host=r", "--tls-cert", "c"];
        assert!(Command::from_arguments(half).is_err());
        assert!(Command::from_arguments(LEAST.iter().chain(&["fleet"])).is_err());
        assert!(Command::from_arguments(["receiver", "fleet", "--admin-url", "ftp://x"]).is_err());
    }
}
