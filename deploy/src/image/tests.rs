use std::{fs, io::Read, process::Command};

use flate2::read::GzDecoder;
use tempfile::TempDir;
use tidewatch_oci::digest::Digest;

use super::*;

/// A program that exists on every build machine.
const SHELL: &str = "/bin/sh";
/// Another one, with other libraries on most of them.
const LIST: &str = "/bin/ls";

fn packed(folder: &TempDir, name: &str) -> (PathBuf, String) {
    let to = folder.path().join(name);
    let executables = [("shell", SHELL), ("tool", LIST)].map(|(name, path)| Executable { name, path: path.into() });
    let digest = write("shell", "1.2.3", &executables, &to).unwrap();
    (to, digest)
}

/// Reads a blob and checks it against the size and digest of its descriptor.
fn blob(layout: &Path, descriptor: &Value) -> Vec<u8> {
    let name = descriptor["digest"].as_str().unwrap();
    let content = fs::read(layout.join("blobs").join(name.replace(':', "/"))).unwrap();
    assert_eq!((&*Digest::of(&content).to_string(), Some(content.len() as u64)), (name, descriptor["size"].as_u64()));
    content
}

fn parsed(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

#[test]
fn every_blob_matches_its_descriptor() {
    let folder = TempDir::new().unwrap();
    let (layout, manifest_digest) = packed(&folder, "image");
    let index = parsed(&fs::read(layout.join("index.json")).unwrap());
    let [descriptor] = index["manifests"].as_array().unwrap().as_slice() else { panic!("{index}") };
    assert_eq!(descriptor["digest"], manifest_digest);
    assert_eq!(descriptor["annotations"]["org.opencontainers.image.ref.name"], "1.2.3");
    let manifest = parsed(&blob(&layout, descriptor));
    let config = parsed(&blob(&layout, &manifest["config"]));
    assert_eq!(
        (&config["config"]["User"], &config["config"]["Entrypoint"][0]),
        (&json!("65532:65532"), &json!("/shell"))
    );
    for (layer, unpacked) in
        manifest["layers"].as_array().unwrap().iter().zip(config["rootfs"]["diff_ids"].as_array().unwrap())
    {
        let mut tar = Vec::new();
        GzDecoder::new(blob(&layout, layer).as_slice()).read_to_end(&mut tar).unwrap();
        assert_eq!(Digest::of(&tar).to_string(), *unpacked.as_str().unwrap());
    }
    assert_eq!(packed(&folder, "again").1, manifest_digest, "equal input produces equal bytes");
}

#[test]
fn the_packed_program_runs_with_the_packed_libraries() {
    let folder = TempDir::new().unwrap();
    let (layout, _) = packed(&folder, "image");
    let root = folder.path().join("root");
    let index = parsed(&fs::read(layout.join("index.json")).unwrap());
    let manifest = parsed(&blob(&layout, &index["manifests"][0]));
    for layer in manifest["layers"].as_array().unwrap() {
        tar::Archive::new(GzDecoder::new(blob(&layout, layer).as_slice())).unpack(&root).unwrap();
    }
    let inside = |path: &Path| root.join(path.strip_prefix("/").unwrap());
    let libraries = libraries::of(Path::new(SHELL)).unwrap();
    let folders = libraries.iter().map(|library| inside(library.parent().unwrap()).display().to_string());
    let folders = folders.collect::<Vec<_>>().join(":");
    let loader = libraries.iter().find(|library| library.file_name().unwrap().to_string_lossy().starts_with("ld-"));
    // A static program needs no loader.
    let mut command = match loader {
        Some(loader) => Command::new(inside(loader)),
        None => Command::new(root.join("shell")),
    };
    if loader.is_some() {
        command.arg("--inhibit-cache").arg("--library-path").arg(folders).arg(root.join("shell"));
    }
    let output = command.args(["-c", "echo works"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "works\n", "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn an_image_replaces_the_previous_one_and_a_failure_does_not() {
    let folder = TempDir::new().unwrap();
    let (layout, _) = packed(&folder, "image");
    fs::write(layout.join("old"), "").unwrap();
    let missing = || Executable { name: "none", path: "/nowhere/none".into() };
    let shell = Executable { name: "shell", path: SHELL.into() };
    for executables in [vec![missing()], vec![shell, missing()]] {
        let error = write("image", "1", &executables, &layout).unwrap_err();
        assert_eq!(error.to_string(), "the libraries of /nowhere/none cannot be listed");
    }
    assert!(layout.join("old").exists());
    packed(&folder, "image");
    assert!(!layout.join("old").exists());
}
