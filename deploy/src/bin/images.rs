//! `cargo images`: builds the programs, and writes the container images of agent and receiver as OCI layouts without a
//! container daemon, each with its software bill of materials beside it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use tidewatch_deploy::{
    image::{self, Executable},
    sbom,
};

/// A program to build.
struct Build {
    package: &'static str,
    binary: &'static str,
    /// Profile of cargo, which is also the directory in the target directory.
    profile: &'static str,
    features: &'static str,
}

const AGENT: Build = Build { package: "tidewatch-agent", binary: "tidewatch-agent", profile: "agent", features: "" };
const RECEIVER: Build =
    Build { package: "tidewatch-receiver", binary: "tidewatch-receiver", profile: "release", features: "jemalloc" };
/// The operators' program, next to the receiver.
const CLI: Build = Build { package: "tidewatch-cli", binary: "tidewatch", profile: "release", features: "" };
/// The images by name, which is also that of their entry point.
const IMAGES: [(&str, &[Build]); 2] = [("tidewatch-agent", &[AGENT]), ("tidewatch-receiver", &[RECEIVER, CLI])];
const USAGE: &str = "usage: cargo images [-- --out FOLDER]   (default: target/images)";

fn main() -> Result<()> {
    // The alias ends with `--`, but users may type it as well.
    let arguments: Vec<String> = env::args().skip(1).filter(|argument| argument != "--").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let target = target();
    let out = match arguments.as_slice() {
        [] => target.join("images"),
        ["--out", folder] => PathBuf::from(folder),
        _ => bail!("{USAGE}"),
    };
    for (name, programs) in IMAGES {
        let executables = programs.iter().map(|program| program.run(&target)).collect::<Result<Vec<_>>>()?;
        let to = out.join(name);
        let digest = image::write(name, env!("CARGO_PKG_VERSION"), &executables, &to)?;
        eprintln!("{} {digest}", to.display());
        let to = out.join(format!("{name}.cdx.json"));
        fs::write(&to, bill_of_materials(name, programs)?).with_context(|| format!("cannot write {}", to.display()))?;
        eprintln!("{}", to.display());
    }
    Ok(())
}

impl Build {
    /// Builds it in a call of its own, because one call unifies the features of its packages. Returns the executable.
    fn run(&self, target: &Path) -> Result<Executable<'static>> {
        let Self { package, binary, profile, features } = self;
        let mut build = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.args(["build", "--locked", "--manifest-path"]).arg(workspace().join("Cargo.toml"));
        build.args(["--profile", profile, "--package", package, "--features", features]);
        ensure!(build.status().context("cannot run cargo")?.success(), "{package} could not be built");
        Ok(Executable { name: binary, path: target.join(profile).join(binary) })
    }

    fn metadata(&self) -> Result<Value> {
        let folder = self.package.strip_prefix("tidewatch-").unwrap_or(self.package);
        sbom::metadata(&workspace().join(folder).join("Cargo.toml"), self.features)
    }
}

/// The CycloneDX document of an image, as text.
fn bill_of_materials(image: &str, programs: &[Build]) -> Result<String> {
    let metadata = programs.iter().map(Build::metadata).collect::<Result<Vec<_>>>()?;
    let described = programs.iter().zip(&metadata);
    let described: Vec<_> =
        described.map(|(program, metadata)| sbom::Program { package: program.package, metadata }).collect();
    let lock = fs::read_to_string(workspace().join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let document = sbom::document(image, env!("CARGO_PKG_VERSION"), &described, &lock)?;
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}
