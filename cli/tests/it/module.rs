//! `module pack` and `module show` as processes: files, registry, exit codes.

use std::{fs, path::Path, process::Stdio, time::Duration};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{io::AsyncWriteExt as _, process::Command, time::timeout};

use crate::{code, registry::Registry, stderr, stdout, tidewatch};

/// The sample module.
const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/modules/sample/1.0.0");
/// Path of the sample below a registry.
const COMPONENT: &str = "component-descriptors/kyma-project.io/module/sample:1.0.0";

/// Packs a folder and returns the report.
async fn pack(folder: &str, arguments: &[&str]) -> Value {
    let packed = tidewatch(&[&["module", "pack", folder, "--json"], arguments].concat()).await;
    assert_eq!(code(&packed), 0, "{}", stderr(&packed));
    serde_json::from_str(&stdout(&packed)).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A copy of the sample with other text in one file.
fn variant(file: &str, from: &str, to: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    for name in ["module.yaml", "manifest.yaml", "default-cr.yaml"] {
        let content = fs::read_to_string(Path::new(SAMPLE).join(name)).unwrap();
        let content = if name == file { content.replace(from, to) } else { content };
        fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

#[tokio::test]
async fn module_packed_twice_has_one_digest_and_is_shown() {
    let dir = TempDir::new().unwrap();
    let (folder, archive) = (dir.path().join("a"), dir.path().join("b"));
    let first = pack(SAMPLE, &["--output", text(&folder)]).await;
    let second = pack(SAMPLE, &["--output", text(&archive), "--tar"]).await;
    assert_eq!((&first["digest"], &first["blobs"]), (&second["digest"], &second["blobs"]));
    assert_eq!(first["warnings"], json!([]));
    let template = fs::read_to_string(folder.join("moduletemplate.yaml")).unwrap();
    assert_eq!(template, fs::read_to_string(archive.join("moduletemplate.yaml")).unwrap());
    for layout in [folder.join("layout"), archive.join("layout.tar")] {
        let shown = tidewatch(&["module", "show", text(&layout)]).await;
        assert_eq!(code(&shown), 0, "{}", stderr(&shown));
        for part in [first["digest"].as_str().unwrap(), "raw-manifest", "verified", "sample-manager", "oci-dir"] {
            assert!(stdout(&shown).contains(part), "{part}: {}", stdout(&shown));
        }
    }
}

#[tokio::test]
async fn published_version_is_replaced_on_demand_only() {
    let registry = Registry::start(None).await;
    let url = registry.url();
    let first = pack(SAMPLE, &["--push", &url]).await;
    assert_eq!(first["pushed"], json!({"reference": format!("{url}/{COMPONENT}"), "effect": "created"}));
    registry.received();
    let other = variant("default-cr.yaml", "replicas: 1", "replicas: 2");
    let other = text(other.path());
    let refused = tidewatch(&["module", "pack", other, "--push", &url]).await;
    assert_eq!((code(&refused), stdout(&refused)), (1, String::new()));
    for part in [first["digest"].as_str().unwrap(), "--overwrite", COMPONENT] {
        assert!(stderr(&refused).contains(part), "{part}: {}", stderr(&refused));
    }
    assert_eq!(registry.received(), ["GET manifests/1.0.0"], "a refused push has no effect");
    let replaced = pack(other, &["--push", &url, "--overwrite"]).await;
    assert_eq!(replaced["pushed"]["effect"], "replaced");
    let requests = registry.received();
    let uploads = requests.iter().filter(|request| request.starts_with("POST")).count();
    assert_eq!(uploads, 3, "the layer raw-manifest is in the registry: {requests:?}");
}

#[tokio::test]
async fn credentials_come_from_standard_input_or_docker() {
    let registry = Registry::start(Some("sesame")).await;
    let url = registry.url();
    let docker = TempDir::new().unwrap();
    let auths = json!({"auths": {url.trim_start_matches("http://").trim_end_matches("/modules"): {"username": "tide", "password": "sesame"}}});
    fs::write(docker.path().join("config.json"), auths.to_string()).unwrap();
    let run = async |arguments: &[&str], password: &str, docker: Option<&Path>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidewatch"));
        command.args(["module"]).args(arguments).env_clear().kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(docker) = docker {
            command.env("DOCKER_CONFIG", docker);
        }
        let mut child = command.spawn().unwrap();
        // A program that reads no password may have ended already.
        let _ = child.stdin.take().unwrap().write_all(password.as_bytes()).await;
        timeout(Duration::from_secs(60), child.wait_with_output()).await.expect("it ends").unwrap()
    };
    let push = ["pack", SAMPLE, "--push", &*url];
    let user = [&push[..], &["--username", "tide", "--password-stdin"]].concat();
    for (arguments, password) in [(&push[..], ""), (&user, "wrong\n")] {
        let refused = run(arguments, password, None).await;
        assert_eq!(code(&refused), 1);
        assert!(stderr(&refused).contains("refused"), "{}", stderr(&refused));
        assert!(!stderr(&refused).contains("wrong"), "{}", stderr(&refused));
    }
    assert!(registry.content.lock().unwrap().blobs.is_empty(), "nothing was uploaded");
    let pushed = run(&user, "sesame\n", None).await;
    assert_eq!(code(&pushed), 0, "{}", stderr(&pushed));
    let shown = run(&["show", &format!("{url}/{COMPONENT}")], "", Some(docker.path())).await;
    assert_eq!(code(&shown), 0, "{}", stderr(&shown));
}

#[tokio::test]
async fn exit_code_3_means_an_invalid_folder_or_artefact() {
    let dir = TempDir::new().unwrap();
    let output = dir.path().join("out");
    let version = variant("module.yaml", "version: 1.0.0", "version: 1.0.0+a");
    let object = variant("manifest.yaml", "kind: ServiceAccount", "sort: ServiceAccount");
    for (folder, expected, cause) in [
        (text(version.path()), 3, "module.yaml"),
        (text(object.path()), 3, "document 2"),
        (text(dir.path()), 1, "module.yaml"),
    ] {
        let packed = tidewatch(&["module", "pack", folder, "--output", text(&output)]).await;
        assert_eq!((code(&packed), stdout(&packed)), (expected, String::new()), "{}", stderr(&packed));
        assert!(stderr(&packed).contains(cause), "{cause}: {}", stderr(&packed));
    }
    assert!(!output.exists(), "nothing was written");

    let report = pack(SAMPLE, &["--output", text(&output)]).await;
    let layout = output.join("layout");
    let blob = |index: usize| {
        let digest = report["blobs"][index]["digest"].as_str().unwrap();
        layout.join("blobs/sha256").join(digest.strip_prefix("sha256:").unwrap())
    };
    fs::write(blob(3), "other").unwrap();
    let damaged = tidewatch(&["module", "show", "--json", text(&layout)]).await;
    assert_eq!(code(&damaged), 3, "{}", stderr(&damaged));
    let shown: Value = serde_json::from_str(&stdout(&damaged)).unwrap();
    assert_eq!(shown["resources"][0]["verification"], "verified");
    assert_eq!(shown["resources"][1]["verification"], "mismatch", "default-cr");
    fs::write(blob(1), "other").unwrap();
    let undecodable = tidewatch(&["module", "show", text(&layout)]).await;
    assert_eq!((code(&undecodable), stdout(&undecodable)), (3, String::new()));
    for absent in ["no/such/folder", "http://127.0.0.1:1/component-descriptors/kyma-project.io/module/tide:1.0.0"] {
        assert_eq!(code(&tidewatch(&["module", "show", absent]).await), 1, "{absent}");
    }
}
