//! `catalog`: checks a module catalog, compares it with the live one, and shows one runtime's view of it.

mod check;
mod current;
mod diff;
pub(crate) mod files;
mod live;
mod shared;
mod show;

use anyhow::Result;
use clap::Subcommand;

pub use check::Check;
pub use diff::Diff;
pub use live::LiveFlags;
pub use show::Show;

/// Commands of `catalog`.
#[derive(Clone, Debug, Subcommand)]
pub enum Catalog {
    /// Check ModuleTemplates and ModuleReleaseMetas in files, without a cluster unless --live is given
    #[command(
        after_help = "Exit codes: 0 no errors; 1 errors, or warnings with --deny-warnings; 2 a file cannot be read, or \
        invalid arguments."
    )]
    Check(Check),
    /// Show the changes in each visibility class, and the Kymas that would upgrade, wait, be refused or lose a module, if the
    /// objects in files were applied to the control plane
    #[command(after_help = "Exit codes: 0 no change; 1 changes; 2 files or control plane cannot be read, or invalid \
        arguments.")]
    Diff(Diff),
    /// Show the catalog that one runtime may see, and the rule that hides the rest
    #[command(after_help = "Exit codes: 0 shown; 2 the control plane cannot be read, or invalid arguments.")]
    Show(Show),
}

impl Catalog {
    pub(crate) fn run(&self) -> Result<u8> {
        match self {
            Self::Check(check) => check.run(),
            Self::Diff(diff) => diff.run(),
            Self::Show(show) => show.run(),
        }
    }
}
