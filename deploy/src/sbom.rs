//! Software bill of materials of an image, in CycloneDX 1.6: the crates that its programs are built from, as Cargo
//! resolves them. Equal input produces equal bytes, so there is neither a time nor a serial number.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

/// Crates of one program.
pub struct Program<'a> {
    /// Name of its package.
    pub package: &'a str,
    /// See [`metadata`].
    pub metadata: &'a Value,
}

/// Returns the packages of a manifest with these features as Cargo resolves them for Linux on this architecture.
///
/// # Errors
/// Cargo cannot be run, or fails.
pub fn metadata(manifest: &Path, features: &str) -> Result<Value> {
    let mut metadata = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    metadata.args(["metadata", "--format-version", "1", "--locked", "--features", features]);
    metadata.args(["--filter-platform", &format!("{}-unknown-linux-gnu", env::consts::ARCH)]);
    metadata.arg("--manifest-path").arg(manifest);
    let output = metadata.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    ensure!(output.status.success(), "the dependencies of {} could not be resolved", manifest.display());
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Returns the document of an image.
///
/// # Errors
/// The metadata does not contain the package, or is not of Cargo's form.
pub fn document(image: &str, version: &str, programs: &[Program<'_>], lock: &str) -> Result<Value> {
    let checksums = checksums(lock);
    let mut components = BTreeMap::new();
    let mut dependencies = BTreeMap::new();
    let mut roots = BTreeSet::new();
    for program in programs {
        let graph = Graph::of(program.metadata)?;
        let root = graph.package(program.package)?;
        roots.insert(reference(graph.packages[root])?);
        for id in graph.reachable(root) {
            let package = graph.packages.get(id).with_context(|| format!("the package {id} is missing"))?;
            let name = reference(package)?;
            let needed = graph.needed(id).filter_map(|id| reference(graph.packages.get(id)?).ok());
            dependencies.entry(name.clone()).or_insert_with(BTreeSet::new).extend(needed);
            components.insert(name, component(package, &checksums)?);
        }
    }
    let image = json!({"type": "container", "bom-ref": image, "name": image, "version": version});
    let root = json!({"ref": image["bom-ref"], "dependsOn": roots});
    let edges = dependencies.iter().map(|(name, needed)| json!({"ref": name, "dependsOn": needed}));
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": image},
        "components": components.values().collect::<Vec<_>>(),
        "dependencies": std::iter::once(root).chain(edges).collect::<Vec<_>>(),
    }))
}

/// Packages and edges of `cargo metadata`.
struct Graph<'a> {
    packages: BTreeMap<&'a str, &'a Value>,
    /// Dependencies of the code, by package; build and development dependencies are not part of a program.
    edges: BTreeMap<&'a str, Vec<&'a str>>,
}

impl<'a> Graph<'a> {
    fn of(metadata: &'a Value) -> Result<Self> {
        let packages = metadata["packages"].as_array().context("the metadata has no packages")?;
        let nodes = metadata["resolve"]["nodes"].as_array().context("the metadata has no graph")?;
        let id = |value: &'a Value| Some((value["id"].as_str()?, value));
        let edges = nodes.iter().filter_map(|node| {
            let of_code = |kind: &Value| kind["kind"].is_null();
            let is_needed =
                |dependency: &&Value| dependency["dep_kinds"].as_array().is_some_and(|all| all.iter().any(of_code));
            let needed = node["deps"].as_array()?.iter().filter(is_needed);
            Some((node["id"].as_str()?, needed.filter_map(|dependency| dependency["pkg"].as_str()).collect()))
        });
        Ok(Self { packages: packages.iter().filter_map(id).collect(), edges: edges.collect() })
    }

    /// Id of the package with this name.
    fn package(&self, name: &str) -> Result<&'a str> {
        let found = self.packages.iter().find(|(_, package)| package["name"] == name);
        found.map(|(id, _)| *id).with_context(|| format!("the metadata has no package {name}"))
    }

    fn needed(&self, id: &str) -> impl Iterator<Item = &'a str> {
        self.edges.get(id).into_iter().flatten().copied()
    }

    fn reachable(&self, root: &'a str) -> BTreeSet<&'a str> {
        let mut reached = BTreeSet::from([root]);
        let mut open = vec![root];
        while let Some(id) = open.pop() {
            open.extend(self.needed(id).filter(|needed| reached.insert(needed)));
        }
        reached
    }
}

/// Name of a component in the document: the package URL, for a crate of this repository its name and version.
fn reference(package: &Value) -> Result<String> {
    let (name, version) = name_and_version(package)?;
    let is_ours = package["source"].is_null();
    Ok(if is_ours { format!("{name}@{version}") } else { format!("pkg:cargo/{name}@{version}") })
}

fn name_and_version(package: &Value) -> Result<(&str, &str)> {
    let text = |member: &str| package[member].as_str().with_context(|| format!("a package has no {member}"));
    Ok((text("name")?, text("version")?))
}

fn component(package: &Value, checksums: &BTreeMap<(&str, &str), &str>) -> Result<Value> {
    let (name, version) = name_and_version(package)?;
    let reference = reference(package)?;
    let mut component = json!({"type": "library", "bom-ref": reference, "name": name, "version": version});
    if let Some(license) = package["license"].as_str() {
        // A slash is Cargo's former notation.
        component["licenses"] = json!([{"expression": license.replace('/', " OR ")}]);
    }
    if !package["source"].is_null() {
        component["purl"] = json!(reference);
    }
    if let Some(checksum) = checksums.get(&(name, version)) {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    Ok(component)
}

/// Checksums of the archives in Cargo.lock, by name and version.
fn checksums(lock: &str) -> BTreeMap<(&str, &str), &str> {
    let packages = lock.split("[[package]]").skip(1);
    let value = |package: &'static str, text: &'_ str| -> Option<(usize, usize)> {
        let start = text.find(package)? + package.len();
        Some((start, start + text[start..].find('"')?))
    };
    let read = packages.filter_map(|text| {
        let part = |key| value(key, text).map(|(start, end)| &text[start..end]);
        Some(((part("\nname = \"")?, part("\nversion = \"")?), part("\nchecksum = \"")?))
    });
    read.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = "version = 4\n\n[[package]]\nname = \"hyper\"\nversion = \"1.2.3\"\nsource = \"registry\"\n\
        checksum = \"abcd\"\ndependencies = [\n \"bytes\",\n]\n\n[[package]]\nname = \"agent\"\nversion = \"0.1.0\"\n";

    fn small() -> Value {
        let package = |name: &str, version: &str, source: Value, license: &str| json!({"id": format!("{name}#{version}"), "name": name, "version": version, "source": source, "license": license});
        let edge = |id: &str, kind: Value| json!({"pkg": id, "dep_kinds": [{"kind": kind}]});
        json!({
            "packages": [
                package("agent", "0.1.0", Value::Null, "Apache-2.0"),
                package("hyper", "1.2.3", json!("registry"), "MIT/Apache-2.0"),
                package("cc", "1.0.0", json!("registry"), "MIT"),
                package("unused", "1.0.0", json!("registry"), "MIT"),
            ],
            "resolve": {"nodes": [
                {"id": "agent#0.1.0", "deps": [edge("hyper#1.2.3", Value::Null), edge("unused#1.0.0", json!("dev"))]},
                {"id": "hyper#1.2.3", "deps": [edge("cc#1.0.0", json!("build")), edge("agent#0.1.0", Value::Null)]},
            ]},
        })
    }

    #[test]
    fn crates_of_a_program_have_checksum_license_and_package_url() {
        let metadata = small();
        let programs = [Program { package: "agent", metadata: &metadata }];
        let document = document("tidewatch-agent", "0.1.0", &programs, LOCK).unwrap();
        let names: Vec<_> = document["components"].as_array().unwrap().iter().map(|it| &it["bom-ref"]).collect();
        assert_eq!(names, ["agent@0.1.0", "pkg:cargo/hyper@1.2.3"], "neither build nor development dependencies");
        let hyper = &document["components"][1];
        assert_eq!(hyper["hashes"][0]["content"], "abcd");
        assert_eq!(hyper["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(hyper["purl"], "pkg:cargo/hyper@1.2.3");
        assert_eq!(document["dependencies"][0], json!({"ref": "tidewatch-agent", "dependsOn": ["agent@0.1.0"]}));
    }

    #[test]
    fn real_agent_has_its_crates_with_checksums_and_none_of_its_tests() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let metadata = metadata(&workspace.join("agent/Cargo.toml"), "").unwrap();
        let lock = std::fs::read_to_string(workspace.join("Cargo.lock")).unwrap();
        let programs = [Program { package: "tidewatch-agent", metadata: &metadata }];
        let document = document("tidewatch-agent", "0.1.0", &programs, &lock).unwrap();
        let components = document["components"].as_array().unwrap();
        let find = |name: &str| components.iter().find(|component| component["name"] == name);
        for name in ["tidewatch-agent", "tidewatch-contract", "tokio", "rustls"] {
            assert!(find(name).is_some(), "{name} is missing");
        }
        assert!(find("proptest").is_none() && find("tidewatch-receiver").is_none());
        for component in components.iter().filter(|component| component.get("purl").is_some()) {
            assert_eq!(component["hashes"][0]["content"].as_str().map(str::len), Some(64), "{component}");
        }
    }

    #[test]
    fn unknown_package_and_malformed_metadata_are_errors() {
        let metadata = small();
        let document = |package, metadata| document("i", "1", &[Program { package, metadata }], LOCK);
        assert!(document("missing", &metadata).unwrap_err().to_string().contains("no package missing"));
        assert!(document("agent", &json!({})).is_err());
    }
}
