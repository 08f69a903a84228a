//! Packing of folders, from files to the artefact that readers decode.

#[path = "../../tests/it/registry.rs"]
pub(super) mod registry;

use std::{fs, path::PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use tidewatch_author::check;
use tidewatch_oci::{
    credentials::{Credentials, RegistryTarget},
    descriptor::{self, Descriptor},
    layer::{self, LayerKind},
    testing::Reply,
};

use super::{
    InvalidError,
    artefact::{Artefact, Blob},
    constructor,
    folder::Folder,
    layout::{self, Layout},
    push::{self, Effect},
    registry::{Registry, RegistryFlags},
    template,
};

/// The sample module, which docs and other tests use, too.
pub(super) fn sample() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/modules/sample/1.0.0")
}

pub(super) fn pack(folder: &Folder) -> Artefact {
    constructor::pack(folder, None).unwrap()
}

/// A folder with a module of one ConfigMap, after changes to its files.
fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    let manifest = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n";
    let base =
        [("module.yaml", "component: kyma-project.io/module/tide\nversion: 1.2.3\n"), ("manifest.yaml", manifest)];
    for (name, content) in base.iter().chain(files) {
        fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

/// The error of packing a folder, which must be one of the folder's content.
fn refusal(files: &[(&str, &str)]) -> String {
    let folder = folder(files);
    let packed = Folder::read(folder.path())
        .and_then(|folder| constructor::pack(&folder, None).and_then(|_| template::render(&folder)));
    let error = packed.unwrap_err();
    assert!(error.is::<InvalidError>(), "{error:#}");
    error.to_string()
}

fn decode(artefact: &Artefact) -> Descriptor {
    let config = &artefact.blobs[0];
    let pointer = descriptor::component_descriptor_pointer(&config.content).unwrap();
    let layer = artefact.blobs.iter().find(|blob| blob.digest == pointer.digest).unwrap();
    assert_eq!((&*pointer.media_type, pointer.size), (&*layer.media_type, layer.content.len() as u64));
    descriptor::parse(&pointer.media_type, &layer.content).unwrap().descriptor(&artefact.component).unwrap()
}

/// The component descriptor as text.
fn descriptor_text(artefact: &Artefact) -> String {
    layer::yaml_text(LayerKind::Dir, &artefact.blobs[1].content).unwrap()
}

#[test]
fn descriptor_of_the_sample_equals_the_golden_file() {
    let artefact = pack(&Folder::read(&sample()).unwrap());
    assert_eq!(descriptor_text(&artefact), include_str!("tests/component-descriptor.yaml"));
}

#[test]
fn packed_sample_is_decoded_with_layer_and_images() {
    let folder = Folder::read(&sample()).unwrap();
    assert_eq!(folder.warnings(), [""; 0]);
    let artefact = pack(&folder);
    let descriptor = decode(&artefact);
    assert_eq!(descriptor.images, ["tidewatch.local/sample-operator:1.0.0"]);
    let raw = descriptor.raw_manifest.unwrap();
    assert!(raw.is_tar());
    let blob = artefact.blobs.iter().find(|blob| raw.digests == [blob.digest]).unwrap();
    let text = layer::yaml_text(LayerKind::Dir, &blob.content).unwrap();
    assert_eq!(text, fs::read_to_string(sample().join("manifest.yaml")).unwrap());
    assert_eq!(layer::documents(&text).unwrap().len(), 5);
    for resource in &descriptor.resources[..2] {
        let digest = resource.digest.as_ref().unwrap();
        assert_eq!((&*digest.hash_algorithm, &*digest.normalisation_algorithm), ("SHA-256", "genericBlobDigest/v1"));
        assert!(artefact.blobs.iter().any(|blob| blob.digest.hex() == digest.value), "{}", resource.name);
    }
}

#[test]
fn manifest_has_the_form_that_other_tools_read() {
    let artefact = pack(&Folder::read(&sample()).unwrap());
    let manifest: Value = serde_json::from_slice(&artefact.manifest.content).unwrap();
    let [config, descriptor, raw, default] = &*artefact.blobs else { panic!("{}", artefact.blobs.len()) };
    let layer = |blob: &Blob, name: &str| {
        let mut layer = blob.reference();
        layer["annotations"] =
            json!({"software.ocm.artifact": format!(r#"[{{"identity":{{"name":"{name}"}},"kind":"resource"}}]"#)});
        layer
    };
    assert_eq!(
        manifest,
        json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config.reference(),
            "layers": [descriptor.reference(), layer(raw, "raw-manifest"), layer(default, "default-cr")],
            "annotations": {
                "software.ocm.componentversion": "kyma-project.io/module/sample:1.0.0", "software.ocm.creator": "tidewatch",
            },
        })
    );
    assert_eq!(config.media_type, "application/vnd.ocm.software.component.config.v1+json");
    assert_eq!(descriptor.media_type, "application/vnd.ocm.software.component-descriptor.v2+yaml+tar");
    assert_eq!((&*raw.media_type, &*default.media_type), ("application/x-tar", "application/x-tar"));
    let mut archive = tar::Archive::new(&*descriptor.content);
    let paths: Vec<_> = archive.entries().unwrap().map(|entry| entry.unwrap().path_bytes().into_owned()).collect();
    assert_eq!(paths, [b"component-descriptor.yaml"], "exactly this name is read by lifecycle-manager");
}

#[test]
fn equal_folders_make_equal_artefacts_whatever_the_files_times_are() {
    let first = folder(&[]);
    let second = folder(&[]);
    let later = fs::File::options().write(true).open(second.path().join("manifest.yaml")).unwrap();
    later.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    let artefacts = [first, second].map(|folder| pack(&Folder::read(folder.path()).unwrap()));
    assert_eq!(artefacts[0], artefacts[1]);
    let other = folder(&[("manifest.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: b}\n")]);
    assert_ne!(artefacts[0].manifest.digest, pack(&Folder::read(other.path()).unwrap()).manifest.digest);
}

#[test]
fn registry_of_the_descriptor_is_the_folders_then_the_pushes() {
    let context = |files: &[(&str, &str)], push: Option<&str>| {
        let folder = folder(files);
        let push = push.map(|push| push.parse().unwrap());
        let artefact = constructor::pack(&Folder::read(folder.path()).unwrap(), push.as_ref()).unwrap();
        let text = descriptor_text(&artefact);
        let line = |key: &str| text.lines().find_map(|line| Some(line.trim().strip_prefix(key)?.to_owned()));
        (line("- baseUrl: ").or_else(|| line("baseUrl: ")).unwrap(), line("subPath: "))
    };
    let named = ("module.yaml", "component: kyma-project.io/module/tide\nversion: 1.2.3\nregistry: a.example.org/x\n");
    assert_eq!(context(&[named], Some("b.example.org")), ("a.example.org".into(), Some("x".into())));
    assert_eq!(context(&[], Some("http://b.example.org:5000")), ("http://b.example.org:5000".into(), None));
    assert_eq!(context(&[], None), ("registry.invalid".into(), None));
}

#[test]
fn ambiguous_text_of_the_descriptor_stays_text() {
    let module = "component: kyma-project.io/module/tide\nversion: 1.2.3\nprovider: 'yes'\n\
        componentLabels: {a: '1e3', b: 'null', c: '0x1', d: '2022-01-01'}\nimages: ['x/tide:1.0']\n";
    let folder = folder(&[("module.yaml", module)]);
    let text = descriptor_text(&pack(&Folder::read(folder.path()).unwrap()));
    // The reader of the module understands YAML 1.1, as lifecycle-manager does.
    let object = format!("apiVersion: v1\nkind: A\nmetadata: {{name: a}}\n{text}");
    let read = &layer::documents(&object).unwrap()[0]["component"];
    assert_eq!(read["provider"], "yes", "{text}");
    let labels: Vec<_> = read["labels"].as_array().unwrap().iter().map(|label| &label["value"]).collect();
    assert_eq!(labels, ["1e3", "null", "0x1", "2022-01-01"], "{text}");
}

#[test]
fn images_of_equal_name_and_version_have_identities_of_their_own() {
    let module = "component: kyma-project.io/module/tide\nversion: 1.2.3\nimages: ['a/tide:1.0.0', 'b/tide:1.0.0', 'a/tide:1.0.0']\n";
    let folder = folder(&[("module.yaml", module)]);
    let resources = decode(&pack(&Folder::read(folder.path()).unwrap())).resources;
    let names: Vec<_> = resources.iter().map(|resource| &*resource.name).collect();
    let [raw, first, second] = &*names else { panic!("{names:?}") };
    assert_eq!((*raw, *first), ("raw-manifest", "tide"));
    assert!(second.strip_prefix("tide-").is_some_and(|digits| digits.len() == 8), "{second}");
}

#[test]
fn template_of_the_sample_releases_it_with_default_cr_and_manager() {
    let folder = Folder::read(&sample()).unwrap();
    let text = template::render(&folder).unwrap();
    let template = &layer::documents(&text).unwrap()[0];
    assert_eq!(template["metadata"]["name"], "sample-1.0.0");
    assert_eq!(template["metadata"]["annotations"], json!({"operator.kyma-project.io/is-cluster-scoped": "false"}));
    let spec = &template["spec"];
    assert_eq!(
        (&spec["moduleName"], &spec["version"], &spec["descriptor"]),
        (&json!("sample"), &json!("1.0.0"), &json!({}))
    );
    assert_eq!(spec["data"]["kind"], "Sample");
    assert_eq!(spec["manager"]["name"], "sample-manager");
    assert_eq!(spec["info"]["documentation"], "https://example.com/sample/docs");
    assert_eq!(spec["associatedResources"][0]["kind"], "Sample");
}

#[test]
fn every_sample_module_is_packed_without_warnings() {
    let modules = sample().join("../..").canonicalize().unwrap();
    let folders =
        |path: PathBuf| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    let mut packed = 0;
    // A shape is the content of a module alone.
    for path in folders(modules).filter(|path| !path.ends_with("shapes")).flat_map(folders) {
        let folder = Folder::read(&path).unwrap();
        assert_eq!(folder.warnings(), [""; 0], "{}", path.display());
        decode(&pack(&folder));
        template::render(&folder).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        packed += 1;
    }
    assert!(packed > 0);
}

#[test]
fn template_of_the_sample_passes_the_catalog_check_without_warnings() {
    let text = template::render(&Folder::read(&sample()).unwrap()).unwrap();
    let release = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
        "metadata": {"name": "sample", "namespace": "kcp-system"}, "spec": {"moduleName": "sample",
            "ocmComponentName": "kyma-project.io/module/sample", "channels": [{"channel": "regular", "version": "1.0.0"}]}});
    let source = |name: &str, text: String| check::Source { name: name.into(), text };
    let sources = [source("template", text), source("release", release.to_string())];
    let options = check::CheckOptions { restricted: None, today: jiff::civil::date(2026, 1, 1), whole: true };
    let report = check::check(&sources, None, &options).unwrap();
    assert!(report.is_clean(true), "{report}");
}

#[test]
fn content_that_is_no_module_is_refused_with_file_and_cause() {
    let module =
        |version: &str, extra: &str| format!("component: kyma-project.io/module/tide\nversion: {version}\n{extra}");
    for (name, content, causes) in [
        ("module.yaml", module("1.2.3+build", ""), &["module.yaml", "1.2.3+build", "tag"][..]),
        ("module.yaml", module("1.2", ""), &["module.yaml", "spec.version"]),
        ("module.yaml", "component: tide\nversion: 1.2.3\n".into(), &["module.yaml", "component"]),
        (
            "module.yaml",
            "component: kyma-project.io/module/x1\nversion: 1.2.3\n".into(),
            &["module.yaml", "\"x1\""],
        ),
        ("module.yaml", module("1.2.3", "registry: ftp://a\n"), &["module.yaml", "ftp://a"]),
        ("module.yaml", module("1.2.3", "images: ['a/b']\n"), &["module.yaml", "a/b", "neither a tag nor a digest"]),
        ("module.yaml", module("1.2.3", "manifest: ../manifest.yaml\n"), &["module.yaml", "../manifest.yaml"]),
        ("module.yaml", module("1.2.3", "manifest: /etc/passwd\n"), &["module.yaml", "/etc/passwd"]),
        ("module.yaml", module("1.2.3", "manifest: ._manifest.yaml\n"), &["module.yaml", "._manifest.yaml"]),
        ("manifest.yaml", "# nothing\n".into(), &["manifest.yaml", "no object"]),
        ("manifest.yaml", "a: [".into(), &["manifest.yaml", "line"]),
        (
            "manifest.yaml",
            "apiVersion: v1\nkind: A\nmetadata: {name: a}\n---\n- 1\n".into(),
            &["manifest.yaml", "document 2", "line 5"],
        ),
        (
            "manifest.yaml",
            "apiVersion: v1\nkind: Service\nmetadata: {name: a}\n---\napiVersion: v1\nkind: Service\nmetadata: {name: a}\n".into(),
            &["manifest.yaml", "document 2 from line 5", "the same object as document 1 from line 1"],
        ),
        (
            "manifest.yaml",
            "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {ports: [{port: 1}, {port: 1}]}\n".into(),
            &["manifest.yaml", "spec.ports[0] and [1] have the same port 1"],
        ),
        (
            "manifest.yaml",
            "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: a.b}\n".into(),
            &["manifest.yaml", "document 1", "the CRD has no spec"],
        ),
        ("manifest.yaml", "apiVersion: v1\nkind: A\n".into(), &["manifest.yaml", "document 1", "metadata.name"]),
        (
            "manifest.yaml",
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: c, image: tide}]}\n".into(),
            &["manifest.yaml", "tide", "neither a tag nor a digest"],
        ),
    ] {
        let error = refusal(&[(name, &content)]);
        assert!(causes.iter().all(|cause| error.contains(cause)), "{causes:?}: {error}");
    }
    let default = module("1.2.3", "defaultCR: default-cr.yaml\n");
    let two = "apiVersion: v1\nkind: A\nmetadata: {name: a}\n---\napiVersion: v1\nkind: A\nmetadata: {name: b}\n";
    assert!(refusal(&[("module.yaml", &default), ("default-cr.yaml", two)]).contains("2 objects"));
}

#[test]
fn descriptor_above_the_limit_of_readers_is_refused() {
    let images: Vec<_> = (0..400).map(|index| format!("registry.example.org/module/image-{index}:1.0.0")).collect();
    let module = json!({"component": "kyma-project.io/module/tide", "version": "1.2.3", "images": images}).to_string();
    let error = refusal(&[("module.yaml", &module)]);
    assert!(error.contains("component descriptor") && error.contains("102400"), "{error}");
}

/// The ModuleTemplate of a folder, after changes to its files.
fn packed_template(files: &[(&str, &str)]) -> Value {
    let folder = folder(files);
    let text = template::render(&Folder::read(folder.path()).unwrap()).unwrap();
    layer::documents(&text).unwrap().remove(0)
}

#[test]
fn template_always_says_whether_the_default_cr_is_cluster_scoped() {
    let module = "component: kyma-project.io/module/tide\nversion: 1.2.3\n";
    let scope = |files: &[(&str, &str)]| {
        let template = packed_template(files);
        template["metadata"]["annotations"]["operator.kyma-project.io/is-cluster-scoped"].clone()
    };
    assert_eq!(scope(&[]), "false", "the smallest folder");
    let stated = format!("{module}annotations: {{operator.kyma-project.io/is-cluster-scoped: 'true'}}\n");
    assert_eq!(scope(&[("module.yaml", &stated)]), "true", "the manifest does not tell");
    let default = format!("{stated}defaultCR: default-cr.yaml\n");
    let object = "apiVersion: operator.kyma-project.io/v1\nkind: Tide\nmetadata: {name: a}\n";
    let definition = |scope: &str| {
        format!(
            "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {{name: a}}\n\
             spec: {{group: operator.kyma-project.io, scope: {scope}, names: {{kind: Tide}}, versions: []}}\n"
        )
    };
    for (declared, expected) in [("Cluster", "true"), ("Namespaced", "false")] {
        let files = [("module.yaml", &*default), ("default-cr.yaml", object), ("manifest.yaml", &definition(declared))];
        assert_eq!(scope(&files), expected, "the manifest decides");
    }
}

#[test]
fn published_manifest_is_a_resource_of_the_template() {
    let module = "component: kyma-project.io/module/tide\nversion: 1.2.3\nmanifestURL: https://example.com/m.yaml\n";
    let resources = |extra: &str| {
        let module = format!("{module}{extra}");
        packed_template(&[("module.yaml", &module)])["spec"]["resources"].clone()
    };
    let raw = |link: &str| json!({"name": "rawManifest", "link": link});
    let other = json!({"name": "crds", "link": "https://example.com/crds.yaml"});
    assert_eq!(resources(""), json!([raw("https://example.com/m.yaml")]));
    let listed = "resources:\n- {name: crds, link: 'https://example.com/crds.yaml'}\n";
    assert_eq!(resources(listed), json!([other, raw("https://example.com/m.yaml")]));
    let named = "resources:\n- {name: rawManifest, link: 'https://example.com/other.yaml'}\n";
    assert_eq!(resources(named), json!([raw("https://example.com/other.yaml")]), "the list decides");
}

#[test]
fn errors_are_one_sentence_each() {
    let module = format!("component: kyma-project.io/module/tide\nversion: 1.2.3-{}\n", "a".repeat(40));
    let error = refusal(&[("module.yaml", &module)]);
    assert_eq!(error.matches("spec.version").count(), 1, "{error}");
    let list = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: ConfigMap, metadata: {name: a}}\n\
        - {apiVersion: v1, kind: Secret, metadata: {generateName: tide-}}\n";
    assert_eq!(
        refusal(&[("manifest.yaml", list)]),
        "manifest.yaml: document 1 from line 1 on, item 2, kind \"Secret\", generateName \"tide-\": metadata.name is \
         missing, and generateName would make another object at each application"
    );
}

#[test]
fn missing_files_are_no_defects_of_the_module() {
    let module = "component: kyma-project.io/module/tide\nversion: 1.2.3\nmanifest: other.yaml\n";
    let folder = folder(&[("module.yaml", module)]);
    let error = Folder::read(folder.path()).unwrap_err();
    assert!(!error.is::<InvalidError>() && error.to_string().contains("other.yaml"), "{error:#}");
}

#[test]
fn probable_mistakes_are_warnings() {
    let module = "component: kyma-project.io/module/tide\nversion: 1.2.3\ndefaultCR: default-cr.yaml\n\
        manager: {group: apps, version: v1, kind: Deployment, namespace: kyma-system, name: tide}\n";
    let default = "apiVersion: operator.kyma-project.io/v1\nkind: Tide\nmetadata: {name: a}\n";
    let definition = "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: a}\n\
        spec: {group: operator.kyma-project.io, names: {kind: Tide}, versions: [{name: v2, served: true}]}\n";
    let warnings = |manifest: &[(&str, &str)]| {
        let folder = folder(&[&[("module.yaml", module), ("default-cr.yaml", default)], manifest].concat());
        Folder::read(folder.path()).unwrap().warnings()
    };
    let [kind, manager] = &*warnings(&[]) else { panic!() };
    assert!(kind.contains("Tide") && manager.contains("Deployment tide"), "{kind} {manager}");
    let unserved = warnings(&[("manifest.yaml", definition)]);
    assert!(unserved[0].contains("does not serve v1"), "{unserved:?}");
}

#[test]
fn layouts_return_what_was_written() {
    let artefact = pack(&Folder::read(&sample()).unwrap());
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("layout");
    let archive = dir.path().join("layout.tar");
    layout::write_folder(artefact.contents(), &folder).unwrap();
    layout::write_archive(artefact.contents(), &archive).unwrap();
    for layout in [&folder, &archive].map(|path| Layout::open(path).unwrap()) {
        assert_eq!(layout.manifest().unwrap(), artefact.manifest.digest);
        for blob in artefact.blobs.iter().chain([&artefact.manifest]) {
            assert_eq!(layout.blob(&blob.digest, blob.content.len() as u64).unwrap(), blob.content);
            assert!(layout.blob(&blob.digest, blob.content.len() as u64 - 1).is_err(), "it is larger");
        }
    }
}

#[test]
fn folder_that_is_no_layout_is_never_replaced() {
    let artefact = pack(&Folder::read(&sample()).unwrap());
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("layout");
    fs::create_dir(&folder).unwrap();
    layout::write_folder(artefact.contents(), &folder).expect("an empty folder is replaced");
    fs::remove_file(folder.join("oci-layout")).unwrap();
    fs::write(folder.join("mine"), "").unwrap();
    assert!(layout::write_folder(artefact.contents(), &folder).is_err());
    assert!(folder.join("mine").exists());
    fs::write(folder.join("oci-layout"), "").unwrap();
    layout::write_folder(artefact.contents(), &folder).unwrap();
    assert!(!folder.join("mine").exists(), "an earlier layout is replaced as a whole");
}

#[test]
fn damaged_layouts_are_invalid() {
    let artefact = pack(&Folder::read(&sample()).unwrap());
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("layout");
    layout::write_folder(artefact.contents(), &folder).unwrap();
    let layout = Layout::open(&folder).unwrap();
    let blob = &artefact.blobs[2];
    let path = folder.join("blobs/sha256").join(blob.digest.hex());
    fs::write(&path, "other").unwrap();
    assert!(layout.blob(&blob.digest, 1 << 20).unwrap_err().is::<InvalidError>());
    fs::remove_file(&path).unwrap();
    assert!(layout.blob(&blob.digest, 1 << 20).unwrap_err().is::<InvalidError>());
    for index in ["", "{}", r#"{"manifests": []}"#, r#"{"manifests": [{"digest": "../x"}]}"#] {
        fs::write(folder.join("index.json"), index).unwrap();
        assert!(layout.manifest().unwrap_err().is::<InvalidError>(), "{index}");
    }
    let text = dir.path().join("text");
    fs::write(&text, "no archive").unwrap();
    for path in [&text, dir.path()] {
        assert!(Layout::open(path).unwrap_err().is::<InvalidError>(), "{}", path.display());
    }
}

/// Client of a registry, with a password of the user `tide`.
async fn client(server: &registry::Registry, password: Option<&str>) -> Registry {
    let mut client = RegistryFlags::default().connect(server.url().parse().unwrap()).await.unwrap();
    let basic = |password: &str| Credentials::Basic { username: "tide".into(), password: password.into() };
    client.target = RegistryTarget::new(client.target.address, password.map(basic));
    client
}

#[tokio::test]
async fn push_uploads_missing_blobs_and_writes_the_tag_last() {
    let server = registry::Registry::start(Some("sesame")).await;
    let client = client(&server, Some("sesame")).await;
    let artefact = pack(&Folder::read(&sample()).unwrap());
    let pushed = push::push(&client, &artefact, false).await.unwrap();
    assert_eq!(pushed.effect, Effect::Created);
    assert_eq!(pushed.reference, format!("{}/component-descriptors/kyma-project.io/module/sample:1.0.0", server.url()));
    let requests = server.received();
    assert_eq!(requests.iter().filter(|request| request.starts_with("POST blobs/uploads/")).count(), 4, "{requests:?}");
    assert_eq!(requests.last().unwrap(), "PUT manifests/1.0.0");
    let stored = server.server.content(&format!("{}manifests/1.0.0", registry::REPOSITORY));
    assert!(matches!(stored, Reply::Of(200, _, content) if content == artefact.manifest.content));

    assert_eq!(push::push(&client, &artefact, false).await.unwrap().effect, Effect::Unchanged);
    assert_eq!(server.received(), ["GET manifests/1.0.0"]);
}

#[tokio::test]
async fn published_version_changes_with_overwrite_only() {
    let server = registry::Registry::start(None).await;
    let client = client(&server, None).await;
    let artefact = pack(&Folder::read(&sample()).unwrap());
    push::push(&client, &artefact, false).await.unwrap();
    server.received();
    let mut folder = Folder::read(&sample()).unwrap();
    folder.default_cr = None;
    let other = pack(&folder);
    let refused = push::push(&client, &other, false).await.unwrap_err().to_string();
    assert!(refused.contains(&artefact.manifest.digest.to_string()) && refused.contains("--overwrite"), "{refused}");
    assert_eq!(server.received(), ["GET manifests/1.0.0"], "a refused push has no effect");
    assert_eq!(push::push(&client, &other, true).await.unwrap().effect, Effect::Replaced);
    let uploads = server.received().iter().filter(|request| request.starts_with("POST")).count();
    assert_eq!(uploads, 2, "config and descriptor; the layer raw-manifest is there");
}

#[tokio::test]
async fn wrong_credentials_upload_nothing() {
    let server = registry::Registry::start(Some("sesame")).await;
    let artefact = pack(&Folder::read(&sample()).unwrap());
    for password in [None, Some("guessed")] {
        let refused = push::push(&client(&server, password).await, &artefact, false).await.unwrap_err();
        let text = format!("{refused:#}");
        assert!(text.contains("refused") && !text.contains("guessed"), "{text}");
        assert!(server.received().iter().all(|request| request == "GET manifests/1.0.0"));
    }
}
