//! The commands of `module` as processes: files, registry, exit codes, texts.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Output, Stdio},
    time::Duration,
};

use rcgen::{KeyPair, PKCS_RSA_SHA256, RsaKeySize};
use serde_json::{Value, json};
use tempfile::TempDir;
use tidewatch_api::names::annotation;
use tidewatch_oci::testing::Access;
use tokio::{io::AsyncWriteExt as _, process::Command, time::timeout};

use crate::{
    code,
    registry::{REPOSITORY, Registry},
    stderr, stdout, tidewatch,
};

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
    let folder = dir.path().join("a");
    let archive = dir.path().join("b");
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

/// Runs `tidewatch module` with an environment, and a text on standard input.
async fn module(arguments: &[&str], input: &str, environment: &[(&str, &Path)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidewatch"));
    command.args(["module"]).args(arguments).env_clear().kill_on_drop(true);
    command.envs(environment.iter().copied());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A program that reads no password may have ended already.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes()).await;
    timeout(Duration::from_secs(60), child.wait_with_output()).await.expect("it ends").unwrap()
}

/// Server of a URL, as docker names it.
fn server(url: &str) -> &str {
    url.trim_start_matches("http://").trim_end_matches("/modules")
}

/// A folder with docker's configuration.
fn docker(config: &Value) -> TempDir {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

#[tokio::test]
async fn credentials_come_from_standard_input_or_docker() {
    let registry = Registry::start(Some("sesame")).await;
    let url = registry.url();
    let docker = docker(&json!({"auths": {server(&url): {"username": "tide", "password": "sesame"}}}));
    let push = ["pack", SAMPLE, "--push", &*url];
    let user = [&push[..], &["--username", "tide", "--password-stdin"]].concat();
    for (arguments, password) in [(&push[..], ""), (&user, "wrong\n")] {
        let refused = module(arguments, password, &[]).await;
        assert_eq!(code(&refused), 1);
        assert!(stderr(&refused).contains("refused"), "{}", stderr(&refused));
        assert!(!stderr(&refused).contains("wrong"), "{}", stderr(&refused));
    }
    assert_eq!(registry.server.paths(), Vec::<String>::new());
    let pushed = module(&user, "sesame\n", &[]).await;
    assert_eq!(code(&pushed), 0, "{}", stderr(&pushed));
    let shown = module(&["show", &format!("{url}/{COMPONENT}")], "", &[("DOCKER_CONFIG", docker.path())]).await;
    assert_eq!(code(&shown), 0, "{}", stderr(&shown));
}

/// A key of a service account has several lines.
#[tokio::test]
async fn password_on_standard_input_may_have_several_lines() {
    const KEY: &str = "{\n  \"type\": \"service_account\"\n}";
    let registry = Registry::start(Some(KEY)).await;
    let user = ["pack", SAMPLE, "--push", &registry.url(), "--username", "tide", "--password-stdin"];
    let pushed = module(&user, &format!("{KEY}\n"), &[]).await;
    assert_eq!(code(&pushed), 0, "{}", stderr(&pushed));
}

#[tokio::test]
async fn module_is_pushed_with_the_tokens_that_the_registry_demands() {
    let of = |entry: Value| move |url: &str| json!({"auths": {server(url): entry}});
    let basic = of(json!({"username": "tide", "password": "sesame"}));
    let identity = of(json!({"auth": "PHRva2VuPjo=", "identitytoken": "sesame"}));
    let fixed = of(json!({"registrytoken": "sesame"}));
    for (access, config) in [
        (Access::Token("sesame"), &basic as &dyn Fn(&str) -> Value),
        (Access::Token("sesame"), &identity),
        (Access::Fixed("sesame"), &fixed),
    ] {
        let registry = Registry::with(access).await;
        let docker = docker(&config(&registry.url()));
        let pushed =
            module(&["pack", SAMPLE, "--push", &registry.url()], "", &[("DOCKER_CONFIG", docker.path())]).await;
        assert_eq!(code(&pushed), 0, "{}", stderr(&pushed));
        assert!(registry.server.paths().contains(&format!("{REPOSITORY}manifests/1.0.0")));
    }
}

#[tokio::test]
async fn credentials_come_from_the_file_of_podman() {
    let registry = Registry::start(Some("sesame")).await;
    let url = registry.url();
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("containers/auth.json");
    fs::create_dir(folder.path().join("containers")).unwrap();
    // `tide:sesame`; the entry of the path counts before that of the server.
    let auths = json!({"auths": {
        server(&url): {"auth": "dGlkZTp3cm9uZw=="},
        format!("{}/modules", server(&url)): {"auth": "dGlkZTpzZXNhbWU="},
    }});
    fs::write(&file, auths.to_string()).unwrap();
    let push = ["pack", SAMPLE, "--push", &*url];
    for environment in [("XDG_RUNTIME_DIR", folder.path()), ("REGISTRY_AUTH_FILE", &file)] {
        let pushed = module(&push, "", &[environment]).await;
        assert_eq!(code(&pushed), 0, "{}", stderr(&pushed));
    }
}

/// A credential helper that runs these lines of a shell.
fn helper(name: &str, lines: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join(format!("docker-credential-{name}"));
    fs::write(&file, format!("#!/bin/sh\n{lines}\n")).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o755)).unwrap();
    folder
}

#[tokio::test]
async fn credentials_come_from_the_helpers_of_docker() {
    let answer = |user: &str| format!(r#"printf '{{"ServerURL":"x","Username":"{user}","Secret":"sesame"}}'"#);
    let user = helper("vault", &format!("test \"$1\" = get || exit 9\nread -r server\n{}", answer("tide")));
    let token = helper("vault", &answer("<token>"));
    for (access, helper) in
        [(Access::Password("sesame"), &user), (Access::Token("sesame"), &user), (Access::Token("sesame"), &token)]
    {
        let registry = Registry::with(access).await;
        let url = registry.url();
        for config in [
            json!({"credsStore": "vault", "auths": {server(&url): {}}}),
            json!({"credsStore": "absent", "credHelpers": {server(&url): "vault", "gcr.io": "gcloud"}}),
        ] {
            let docker = docker(&config);
            let environment = [("DOCKER_CONFIG", docker.path()), ("PATH", helper.path())];
            let pushed = module(&["pack", SAMPLE, "--push", &url], "", &environment).await;
            assert_eq!(code(&pushed), 0, "{config}: {}", stderr(&pushed));
        }
    }
    // The helper gets the name of the server, as docker writes it, and nothing else.
    let registry = Registry::start(Some("sesame")).await;
    let url = registry.url();
    let server = server(&url);
    let strict = helper("vault", &format!("read -r asked\ntest \"$asked\" = '{server}' || exit 1\n{}", answer("tide")));
    let docker = docker(&json!({"credsStore": "vault"}));
    let environment = [("DOCKER_CONFIG", docker.path()), ("PATH", strict.path())];
    let pushed = module(&["pack", SAMPLE, "--push", &url], "", &environment).await;
    assert_eq!(code(&pushed), 0, "{}", stderr(&pushed));
}

#[tokio::test]
async fn failing_helper_is_named() {
    let registry = Registry::start(Some("sesame")).await;
    let url = registry.url();
    let docker = docker(&json!({"credsStore": "vault"}));
    let absent = TempDir::new().unwrap();
    for (helper, causes) in [
        (absent, &["docker-credential-vault", "config.json", "is not installed"][..]),
        (helper("vault", "echo 'the vault is locked'; exit 1"), &["docker-credential-vault", "the vault is locked"]),
        (helper("vault", "echo 'no session' >&2; exit 3"), &["docker-credential-vault", "no session"]),
        (helper("vault", "echo 'secret: sesame'"), &["docker-credential-vault", "not JSON"]),
        (
            helper("vault", "while :; do echo 0123456789012345678901234567890123456789; done"),
            &["more than 65536 bytes"],
        ),
        // Nothing is known about the registry, so that the request is anonymous.
        (
            helper("vault", "echo 'credentials not found in native keychain'; exit 1"),
            &["refused the request without credentials", "docker login"],
        ),
    ] {
        let environment = [("DOCKER_CONFIG", docker.path()), ("PATH", helper.path())];
        let refused = module(&["pack", SAMPLE, "--push", &url], "", &environment).await;
        assert_eq!(code(&refused), 1);
        for cause in causes {
            assert!(stderr(&refused).contains(cause), "{cause}: {}", stderr(&refused));
        }
        assert!(!stderr(&refused).contains("sesame"), "{}", stderr(&refused));
    }
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

/// A version of the sample.
fn sample(version: &str) -> String {
    SAMPLE.replace("1.0.0", version)
}

#[tokio::test]
async fn rendered_objects_are_those_of_the_artefact_or_of_the_runtime() {
    let dir = TempDir::new().unwrap();
    let output = dir.path().join("out");
    let registry = Registry::start(None).await;
    pack(SAMPLE, &["--output", text(&output), "--push", &registry.url()]).await;
    let published = format!("{}/{COMPONENT}", registry.url());
    let render = async |reference: &str, arguments: &[&str]| -> String {
        let rendered = tidewatch(&[&["module", "render", reference], arguments].concat()).await;
        assert_eq!(code(&rendered), 0, "{}", stderr(&rendered));
        stdout(&rendered)
    };
    let json = async |reference: &str, arguments: &[&str]| -> Value {
        serde_json::from_str(&render(reference, &[arguments, &["--json"]].concat()).await).unwrap()
    };
    let layout = output.join("layout");
    let packed = json(text(&output), &[]).await;
    let names = |report: &Value| -> Vec<_> {
        let objects = report["objects"].as_array().unwrap().iter();
        objects.map(|object| object["kind"].as_str().unwrap().to_owned()).collect()
    };
    let kinds = ["CustomResourceDefinition", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Deployment"];
    assert_eq!(names(&packed), kinds);
    assert_eq!((&packed["form"], &packed["leftOut"], &packed["notes"]), (&json!("packed"), &json!([]), &json!([])));
    assert_eq!(packed["objects"][4]["metadata"]["labels"], json!({"app.kubernetes.io/name": "sample-manager"}));
    assert_eq!(
        (&packed["defaultCR"]["kind"], &packed["manager"]["name"]),
        (&json!("Sample"), &json!("sample-manager"))
    );
    assert_eq!(json(text(&layout), &[]).await, packed, "the ModuleTemplate is beside the layout");
    let mut folder = json(SAMPLE, &[]).await;
    folder["digest"] = packed["digest"].clone();
    assert_eq!(folder, packed);
    let mut remote = json(&published, &[]).await;
    assert!(remote["notes"][0].as_str().unwrap().starts_with("no ModuleTemplate is given"), "{remote}");
    remote["notes"] = json!([]);
    assert_eq!(remote, packed, "the artefact has a default module CR, and the first Deployment is the manager");
    let template = output.join("moduletemplate.yaml");
    assert_eq!(json(&published, &["--template", text(&template)]).await, packed);

    let applied = json(text(&output), &["--applied"]).await;
    assert_eq!((names(&applied), &applied["form"]), (kinds.map(str::to_owned).to_vec(), &json!("applied")));
    assert_eq!(
        applied["objects"][1]["metadata"],
        json!({
            "name": "sample-manager", "namespace": "kyma-system",
            "labels": {"app.kubernetes.io/part-of": "Kyma", "operator.kyma-project.io/managed-by": "kyma"},
            "annotations": {annotation::DISCLAIMER: annotation::DISCLAIMER_TEXT},
        })
    );
    assert_eq!(applied["leftOut"].as_array().unwrap().len(), 2, "the scopes of all kinds are known");
    let page = render(text(&output), &["--applied"]).await;
    let head = format!(
        "# kyma-project.io/module/sample:1.0.0 {}, 5 objects as applied\n\
         # manager: Deployment kyma-system/sample-manager\n\
         # left out: the label app.kubernetes.io/component and the annotation operator.kyma-project.io/owned-by, which name the Manifest\n\
         # left out: the image pull secret of the receiver\n\
         ---\napiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\n",
        packed["digest"].as_str().unwrap()
    );
    assert!(page.starts_with(&head), "{page}");
    let tail = "---\n# default module CR: created once, and never changed\napiVersion: operator.kyma-project.io/v1alpha1\n\
                kind: Sample\nmetadata:\n  name: default\n  namespace: kyma-system\nspec:\n  replicas: 1\n";
    assert!(page.ends_with(tail), "{page}");
}

#[tokio::test]
async fn module_diff_shows_what_an_upgrade_changes() {
    let diff = async |from: &str, to: &str, arguments: &[&str]| -> (i32, String) {
        let compared = tidewatch(&[&["module", "diff", from, to], arguments].concat()).await;
        (code(&compared), stdout(&compared) + &stderr(&compared))
    };
    let text = "kyma-project.io/module/sample:1.0.0 → kyma-project.io/module/sample:1.1.0\n\
        CHANGE   KIND                NAMESPACE    NAME                    FIELDS\n\
        added    ClusterRoleBinding  -            sample-manager-samples  -\n\
        removed  ClusterRoleBinding  -            sample-manager          -\n\
        changed  Deployment          kyma-system  sample-manager          1\n\
        \n\
        Deployment kyma-system/sample-manager\n  \
          spec.template.spec.containers[manager].image: \"tidewatch.local/sample-operator:1.0.0\" → \"tidewatch.local/sample-operator:1.1.0\"\n\
        1 added, 1 removed, 1 changed, 3 unchanged\n";
    assert_eq!(diff(SAMPLE, &sample("1.1.0"), &[]).await, (1, text.to_owned()));
    let same = "kyma-project.io/module/sample:1.0.0 → kyma-project.io/module/sample:1.0.0\n\
        0 added, 0 removed, 0 changed, 5 unchanged\n";
    assert_eq!(diff(SAMPLE, SAMPLE, &[]).await, (0, same.to_owned()));

    // Back from 2.0.0, whose CRD has a version more.
    let (exit, page) = diff(&sample("2.0.0"), SAMPLE, &[]).await;
    let end = "default module CR, of new installations only\n  \
          apiVersion: \"operator.kyma-project.io/v1beta1\" → \"operator.kyma-project.io/v1alpha1\"\n\
        \n\
        risk[version-removed]: CustomResourceDefinition samples.operator.kyma-project.io: the version v1beta1 is removed\n\
        0 added, 0 removed, 2 changed, 3 unchanged\n";
    assert!(exit == 1 && page.ends_with(end), "{exit} {page}");
    let (exit, page) = diff(&sample("2.0.0"), SAMPLE, &["--json"]).await;
    let report: Value = serde_json::from_str(&page).unwrap();
    assert_eq!((exit, &report["from"]["version"], &report["unchanged"]), (1, &json!("2.0.0"), &json!(3)));
    assert_eq!(report["risks"][0]["code"], "version-removed", "{report:#}");
    assert_eq!(report["changed"][1]["kind"], "Deployment", "{report:#}");
    assert_eq!(report["changed"][1]["fields"][0]["path"], "spec.template.spec.containers[manager].args", "{report:#}");

    let other = variant("module.yaml", "module/sample", "module/other");
    let (exit, page) = diff(SAMPLE, other.path().to_str().unwrap(), &[]).await;
    assert!(exit == 0 && page.contains("note: the versions are of different components"), "{exit} {page}");
    let invalid = variant("manifest.yaml", "kind: ServiceAccount", "sort: ServiceAccount");
    for (to, cause) in [("no/such/folder", "no/such/folder"), (invalid.path().to_str().unwrap(), "document 2")] {
        let (exit, page) = diff(SAMPLE, to, &[]).await;
        assert!(exit == 2 && page.contains(cause), "{exit} {page}");
    }
}

#[tokio::test]
async fn version_that_cannot_be_rendered_has_the_documented_exit_code() {
    let dir = TempDir::new().unwrap();
    let output = dir.path().join("out");
    let report = pack(SAMPLE, &["--output", text(&output)]).await;
    let template = output.join("moduletemplate.yaml");
    let refused = tidewatch(&["module", "render", &sample("1.1.0"), "--template", text(&template)]).await;
    assert_eq!((code(&refused), stdout(&refused)), (3, String::new()));
    assert!(stderr(&refused).contains("not the ModuleTemplate of sample 1.1.0"), "{}", stderr(&refused));
    let raw = report["blobs"][2]["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
    fs::write(output.join("layout/blobs/sha256").join(raw), "other").unwrap();
    let damaged = tidewatch(&["module", "render", text(&output)]).await;
    assert_eq!((code(&damaged), stdout(&damaged)), (3, String::new()));
    assert!(stderr(&damaged).contains("raw-manifest"), "{}", stderr(&damaged));
    assert_eq!(code(&tidewatch(&["module", "render", "no/such/folder"]).await), 1);
}

/// Writes a key pair to `<name>.key` and `<name>.pem`, and returns their paths.
fn key_pair(dir: &Path, name: &str) -> [String; 2] {
    let pair = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048).unwrap();
    [("key", pair.serialize_pem()), ("pem", pair.public_key_pem())].map(|(ending, pem)| {
        let path = dir.join(format!("{name}.{ending}"));
        fs::write(&path, pem).unwrap();
        text(&path).to_owned()
    })
}

#[tokio::test]
async fn signed_module_is_verified_in_layout_and_registry() {
    let dir = TempDir::new().unwrap();
    let [private, public] = key_pair(dir.path(), "release");
    let [other, _] = key_pair(dir.path(), "other");
    let registry = Registry::start(None).await;
    let url = registry.url();
    for (algorithm, arguments) in [("pkcs1", &["--tar"][..]), ("pss", &[])] {
        let output = dir.path().join(algorithm);
        pack(SAMPLE, &[&["--output", text(&output)], arguments].concat()).await;
        let layout = output.join(if arguments.is_empty() { "layout" } else { "layout.tar" });
        let layout = text(&layout);
        let verify = async |reference: &str, key: &str| {
            let verified = tidewatch(&["module", "verify", reference, "--key", key, "--json"]).await;
            (code(&verified), serde_json::from_str::<Value>(&stdout(&verified)).unwrap())
        };
        let (unsigned, report) = verify(layout, &public).await;
        assert_eq!((unsigned, &report["signatures"]), (3, &json!([])), "{report}");
        assert_eq!(report["problems"], json!(["it has no signature; expected is one of \"release\""]));

        let sign =
            ["module", "sign", layout, "--key", &private, "--signature-name", "release", "--algorithm", algorithm];
        let push = ["--push", &url, "--overwrite", "--json"];
        let signed = tidewatch(&[&sign[..], &push].concat()).await;
        assert_eq!(code(&signed), 0, "{}", stderr(&signed));
        let report: Value = serde_json::from_str(&stdout(&signed)).unwrap();
        // The sample names its image by a tag.
        let warning = "the signature does not cover the content of the resource sample-operator";
        assert_eq!(report["warnings"], json!([warning]));
        for reference in [layout, &format!("{url}/{COMPONENT}")] {
            for key in [&public, &copy_of_public_keys(text(dir.path()))] {
                let (code, report) = verify(reference, key).await;
                assert_eq!((code, &report["problems"]), (0, &json!([])), "{report}");
                assert_eq!(report["signatures"], json!([{"name": "release", "result": "valid"}]));
            }
            let shown = tidewatch(&["module", "show", reference]).await;
            assert_eq!(code(&shown), 0, "{}", stdout(&shown));
        }
        let again = ["module", "sign", layout, "--key", &other, "--signature-name", "release"];
        assert_eq!(code(&tidewatch(&again).await), 0);
        let (code, report) = verify(layout, &public).await;
        assert_eq!((code, &report["signatures"][0]["result"]), (3, &json!("invalid")), "{report}");
    }
}

/// A folder with the public keys of a folder alone.
fn copy_of_public_keys(from: &str) -> String {
    let to = Path::new(from).join("public");
    fs::create_dir_all(&to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap).filter(|entry| text(&entry.path()).ends_with(".pem")) {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    text(&to).to_owned()
}

#[tokio::test]
async fn unusable_keys_are_refused() {
    let dir = TempDir::new().unwrap();
    let [private, public] = key_pair(dir.path(), "release");
    pack(SAMPLE, &["--output", text(dir.path())]).await;
    let layout = dir.path().join("layout");
    let layout = text(&layout);
    let before = fs::read(dir.path().join("layout/index.json")).unwrap();
    for (arguments, expected, cause) in [
        (["sign", layout, "--key", &public, "--signature-name", "a"], 1, "no block PRIVATE KEY"),
        (["sign", "no/layout", "--key", &private, "--signature-name", "a"], 1, "no/layout"),
        (["sign", layout, "--key", &private, "--signature-name", ""], 2, "--signature-name"),
        (["sign", text(dir.path()), "--key", &private, "--signature-name", "a"], 3, "oci-layout"),
    ] {
        let refused = tidewatch(&[&["module"], &arguments[..]].concat()).await;
        assert_eq!((code(&refused), stdout(&refused)), (expected, String::new()), "{arguments:?}");
        assert!(stderr(&refused).contains(cause), "{cause}: {}", stderr(&refused));
    }
    assert_eq!(fs::read(dir.path().join("layout/index.json")).unwrap(), before, "nothing was written");
    for (key, cause) in [(&private, "which is not a public key"), (&"no/key".to_owned(), "no/key")] {
        let refused = tidewatch(&["module", "verify", layout, "--key", key]).await;
        assert_eq!((code(&refused), stdout(&refused)), (1, String::new()));
        assert!(stderr(&refused).contains(cause), "{cause}: {}", stderr(&refused));
    }
}
