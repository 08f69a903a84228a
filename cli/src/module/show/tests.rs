//! Reports of artefacts on disk and in a registry.

use std::{fs, path::Path};

use serde_json::{Value, json};
use tempfile::TempDir;
use tidewatch_oci::testing::Reply;

use super::*;
use crate::module::{
    artefact::Artefact,
    folder::Folder,
    layout, push,
    tests::{pack, registry, sample},
};

fn artefact() -> Artefact {
    pack(&Folder::read(&sample()).unwrap())
}

async fn show(reference: &str) -> Result<(Value, bool)> {
    let registry = Some("reg.example.org/x".parse().unwrap());
    let show = Show {
        reference: reference.to_owned(),
        receiver_registry: registry,
        registry: RegistryFlags::default(),
        json: true,
    };
    let report = show.report().await?;
    assert!(report.to_string().starts_with(&format!("{}:", json!(report)["component"].as_str().unwrap())));
    Ok((json!(report), report.is_valid()))
}

/// A layout of the artefact in a directory of its own.
fn written(artefact: &Artefact) -> (TempDir, String) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("layout");
    layout::write_folder(artefact.contents(), &path).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (dir, path)
}

fn blob(layout: &str, digest: Digest) -> std::path::PathBuf {
    Path::new(layout).join("blobs/sha256").join(digest.hex())
}

fn verifications(report: &Value) -> Vec<&str> {
    let resources = report["resources"].as_array().unwrap();
    resources.iter().map(|resource| resource["verification"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn report_of_a_packed_module_is_complete() {
    let artefact = artefact();
    let (_dir, layout) = written(&artefact);
    let (report, is_valid) = show(&layout).await.unwrap();
    assert!(is_valid, "{report:#}");
    assert_eq!(report["component"], "kyma-project.io/module/sample");
    assert_eq!((&report["version"], &report["schema"]), (&json!("1.0.0"), &json!("v2")));
    assert_eq!(report["digest"], artefact.manifest.digest.to_string());
    assert_eq!(report["descriptor"]["digest"], artefact.blobs[1].digest.to_string());
    assert_eq!(verifications(&report), ["verified", "verified", "no-digest"]);
    let objects = report["objects"].as_array().unwrap();
    let kinds: Vec<_> = objects.iter().map(|object| object["kind"].as_str().unwrap()).collect();
    assert_eq!(
        kinds,
        ["CustomResourceDefinition", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Deployment"]
    );
    assert_eq!((&objects[4]["namespace"], &objects[4]["name"]), (&json!("kyma-system"), &json!("sample-manager")));
    assert_eq!(
        report["manifest"],
        json!({
            "source": {
                "repo": "reg.example.org/x/component-descriptors", "name": "kyma-project.io/module/sample",
                "ref": artefact.blobs[2].digest.to_string(), "type": "oci-dir",
            },
            "localizedImages": ["tidewatch.local/sample-operator:1.0.0"],
        })
    );
}

#[tokio::test]
async fn folder_archive_and_registry_show_the_same() {
    let artefact = artefact();
    let (dir, folder) = written(&artefact);
    let archive = dir.path().join("layout.tar");
    layout::write_archive(artefact.contents(), &archive).unwrap();
    let server = registry::Registry::start(None).await;
    let client = RegistryFlags::default().connect(server.url().parse().unwrap()).await.unwrap();
    let pushed = push::push(&client, &artefact, false).await.unwrap();
    let expected = show(&folder).await.unwrap();
    assert_eq!(show(archive.to_str().unwrap()).await.unwrap(), expected);
    assert_eq!(show(&pushed.reference).await.unwrap(), expected);
}

#[tokio::test]
async fn damaged_layer_is_reported_with_the_rest() {
    let artefact = artefact();
    let (_dir, layout) = written(&artefact);
    fs::write(blob(&layout, artefact.blobs[3].digest), "other").unwrap();
    let (report, is_valid) = show(&layout).await.unwrap();
    assert!(!is_valid);
    assert_eq!(verifications(&report), ["verified", "mismatch", "no-digest"]);
    fs::remove_file(blob(&layout, artefact.blobs[2].digest)).unwrap();
    let (report, is_valid) = show(&layout).await.unwrap();
    assert!(!is_valid);
    assert_eq!((verifications(&report)[0], &report["objects"]), ("mismatch", &json!([])));
}

#[tokio::test]
async fn content_that_a_registry_changed_is_reported() {
    let artefact = artefact();
    let server = registry::Registry::start(None).await;
    let client = RegistryFlags::default().connect(server.url().parse().unwrap()).await.unwrap();
    let pushed = push::push(&client, &artefact, false).await.unwrap();
    let layer = &artefact.blobs[2];
    let other = Reply::content(vec![b' '; layer.content.len()]);
    server.server.put(format!("{}blobs/{}", registry::REPOSITORY, layer.digest), other);
    let (report, is_valid) = show(&pushed.reference).await.unwrap();
    assert!(!is_valid && verifications(&report)[0] == "mismatch", "{report:#}");
}

#[tokio::test]
async fn undecodable_artefact_is_invalid_and_an_absent_one_unreadable() {
    let artefact = artefact();
    for damaged in [&artefact.blobs[0], &artefact.blobs[1], &artefact.manifest] {
        let (_dir, layout) = written(&artefact);
        fs::write(blob(&layout, damaged.digest), "other").unwrap();
        let error = show(&layout).await.unwrap_err();
        assert!(error.is::<InvalidError>(), "{}: {error:#}", damaged.media_type);
    }
    let server = registry::Registry::start(None).await;
    let absent = format!("{}/component-descriptors/kyma-project.io/module/sample:1.0.0", server.url());
    for absent in ["no/such/folder", &absent] {
        let error = show(absent).await.unwrap_err();
        assert!(!error.is::<InvalidError>(), "{absent}: {error:#}");
    }
}
