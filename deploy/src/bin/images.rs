//! `cargo images`: builds both programs and writes their container images as OCI layouts, without a container daemon.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use tidewatch_deploy::image::{self, Program};

/// Program, its profile and its folder in the target folder, and its features.
const PROGRAMS: [(&str, &str, &str); 2] =
    [("tidewatch-agent", "agent", ""), ("tidewatch-receiver", "release", "jemalloc")];
const USAGE: &str = "usage: cargo images [-- --out FOLDER]   (target/images, unless told)";

fn main() -> Result<()> {
    // The alias ends with `--` itself, but people type it as well.
    let arguments: Vec<String> = env::args().skip(1).filter(|argument| argument != "--").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let target = target();
    let out = match arguments.as_slice() {
        [] => target.join("images"),
        ["--out", folder] => PathBuf::from(folder),
        _ => bail!("{USAGE}"),
    };
    for (name, profile, features) in PROGRAMS {
        let mut build = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.args(["build", "--locked", "--manifest-path"]).arg(workspace().join("Cargo.toml"));
        build.args(["--profile", profile, "--package", name, "--features", features]);
        ensure!(build.status().context("run cargo")?.success(), "{name} could not be built");
        let path = target.join(profile).join(name);
        let to = out.join(name);
        let digest = image::write(&Program { name, version: env!("CARGO_PKG_VERSION"), path: &path }, &to)?;
        eprintln!("{} {digest}", to.display());
    }
    Ok(())
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}
