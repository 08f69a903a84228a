//! `module`: packs a module's version as an artefact of the Open Component Model (OCM), shows artefacts, and compares
//! versions.
//!
//! | module | responsibility |
//! |---|---|
//! | `config`, `folder` | `module.yaml` and the files that it names |
//! | `image` | references of images, and the workloads that name them |
//! | `constructor` | the component descriptor and the blobs of a folder |
//! | `template` | the ModuleTemplate of a folder |
//! | `artefact` | blobs, config and manifest of an artefact |
//! | `layout` | OCI image layouts: folders and tar archives |
//! | `registry`, `push` | the access to a registry, and the upload |
//! | `version` | a version as the commands `render` and `diff` read it |
//! | `pack`, `sign`, `verify`, `show`, `render`, `diff` | the commands |

mod artefact;
mod config;
mod constructor;
mod credentials;
mod diff;
mod folder;
mod image;
pub mod layout;
mod pack;
mod push;
mod registry;
mod render;
mod show;
mod sign;
mod template;
#[cfg(test)]
mod tests;
mod verify;
mod version;

use anyhow::Result;
use clap::Subcommand;
use thiserror::Error;

use crate::exit;

pub use artefact::Blob;
pub use diff::Diff;
pub use pack::Pack;
pub use push::PushFlags;
pub use registry::RegistryFlags;
pub use render::Render;
pub use show::Show;
pub use sign::Sign;
pub use verify::Verify;

pub(crate) use show::source::reference;
pub(crate) use version::ComparedModule;

/// Commands of `module`.
#[derive(Clone, Debug, Subcommand)]
pub enum Module {
    /// Pack the folder of a module's version as an OCI artefact, with its ModuleTemplate, and push it to a registry
    #[command(
        after_help = "Exit codes: 0 packed, and pushed with --push; 1 a file cannot be read or written, or the registry \
        refuses; 2 invalid arguments; 3 the folder is not a valid module."
    )]
    Pack(Pack),
    /// Sign the component descriptor of a packed module, and push it to a registry
    #[command(
        after_help = "Exit codes: 0 signed, and pushed with --push; 1 a file cannot be read or written, or the registry \
        refuses; 2 invalid arguments; 3 the artefact is invalid."
    )]
    Sign(Sign),
    /// Verify the signatures of a module's version with public keys, as the receiver does with --component-keys
    #[command(
        after_help = "Exit codes: 0 a signature is valid, and its contents are those of the artefact; 1 the artefact or a \
        key cannot be read; 2 invalid arguments; 3 no valid signature, or the artefact is invalid."
    )]
    Verify(Verify),
    /// Show the artefact of a module's version, verify its digests, and show the Manifest's references to it
    #[command(
        after_help = "Exit codes: 0 shown; 1 the artefact cannot be read; 2 invalid arguments; 3 the artefact is invalid."
    )]
    Show(Show),
    /// Print the objects of a module's version as YAML: as in its artefact, or as the receiver writes them to a runtime
    #[command(
        after_help = "Exit codes: 0 printed; 1 the version cannot be read; 2 invalid arguments; 3 the version is invalid.\n\
        Comments at the begin state what --applied leaves out because only a runtime or the receiver decides it."
    )]
    Render(Render),
    /// Show the changes in a runtime by an upgrade from one version of a module to another, with the risky ones
    #[command(
        after_help = "Exit codes: 0 no differences; 1 differences; 2 a version cannot be read or is invalid, or invalid \
        arguments."
    )]
    Diff(Diff),
}

impl Module {
    pub(crate) fn run(&self) -> Result<u8> {
        let (name, result) = match self {
            Self::Pack(pack) => ("pack", pack.run()),
            Self::Sign(sign) => ("sign", sign.run()),
            Self::Verify(verify) => ("verify", verify.run()),
            Self::Show(show) => ("show", show.run()),
            Self::Render(render) => ("render", render.run()),
            Self::Diff(diff) => ("diff", diff.run()),
        };
        match result {
            Err(error) if matches!(self, Self::Diff(_)) => {
                eprintln!("tidewatch module {name}: {error:#}");
                Ok(exit::UNREADABLE)
            }
            Err(error) if error.is::<InvalidError>() => {
                eprintln!("tidewatch module {name}: {error:#}");
                Ok(exit::INVALID_MODULE)
            }
            result => result,
        }
    }
}

/// Mistakes that an error names.
const MAX_MISTAKES: usize = 5;

/// A folder or an artefact that is not a valid module.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{place}: {problem}")]
pub struct InvalidError {
    /// File with document, or part of the artefact.
    place: String,
    problem: String,
}

impl InvalidError {
    fn new(place: impl ToString, problem: impl ToString) -> Self {
        Self { place: place.to_string(), problem: problem.to_string() }
    }

    /// Refuses mistakes, if there are any, and names the first ones.
    fn of_mistakes(place: impl ToString, mistakes: &[String]) -> Result<(), Self> {
        let more = mistakes.len().saturating_sub(MAX_MISTAKES);
        let named = mistakes.iter().take(MAX_MISTAKES).cloned();
        let named: Vec<_> = named.chain((more > 0).then(|| format!("and {more} more mistakes"))).collect();
        if mistakes.is_empty() { Ok(()) } else { Err(Self::new(place, named.join("; "))) }
    }
}
