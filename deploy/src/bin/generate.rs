//! `cargo generate`: writes the generated files. With `--check` it only lists differences and fails if there are any.

use std::{env, process::ExitCode};

use anyhow::{Result, bail};
use tidewatch_deploy::generated;

fn main() -> Result<ExitCode> {
    // The alias ends with `--`, but users may type it as well.
    let arguments: Vec<String> = env::args().skip(1).filter(|argument| argument != "--").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let check = match arguments.as_slice() {
        [] => false,
        ["--check"] => true,
        _ => bail!("usage: cargo generate [-- --check]"),
    };
    let mut differ = false;
    for (folder, files) in generated()? {
        let differences = if check { folder.compare(&files)? } else { folder.write(&files)? };
        for difference in &differences {
            eprintln!("{}: {difference}{}", folder.path.display(), if check { "" } else { "; fixed" });
        }
        differ |= !differences.is_empty();
    }
    if check && differ {
        eprintln!("generated files differ from the Rust code: run `cargo generate` and commit the result");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}
