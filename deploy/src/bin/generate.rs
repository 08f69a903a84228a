//! `cargo generate`: writes the generated files; with `--check` it only says which differ, and fails if any does.

use std::{env, process::ExitCode};

use anyhow::{Result, bail};
use tidewatch_deploy::{Folder, crds};

fn main() -> Result<ExitCode> {
    // The alias ends with `--` itself, but people type it as well.
    let arguments: Vec<String> = env::args().skip(1).filter(|argument| argument != "--").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (folder, files) = (Folder::crds(), crds()?);
    let (differences, check) = match arguments.as_slice() {
        [] => (folder.write(&files)?, false),
        ["--check"] => (folder.compare(&files)?, true),
        _ => bail!("usage: cargo generate [-- --check]"),
    };
    for difference in &differences {
        eprintln!("{}: {difference}{}", folder.path().display(), if check { "" } else { "; done" });
    }
    if check && !differences.is_empty() {
        eprintln!("generated files differ from the Rust types: run `cargo generate` and commit the result");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}
