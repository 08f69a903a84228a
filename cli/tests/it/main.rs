//! The program as a process: exit codes, output, and the requests that it sends.
#![expect(clippy::unwrap_used, reason = "a test fails by a panic, in its helpers too")]

mod module;
mod registry;
mod server;

use std::{
    fs,
    path::PathBuf,
    process::{Output, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::request::Parts;
use serde_json::{Value, json};
use server::{Answer, Server};
use tempfile::TempDir;
use tokio::{process::Command, time::timeout};

/// Runs the program with these arguments only, without the environment of the tests.
async fn tidewatch(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidewatch"));
    command.args(arguments).env_clear().stdin(Stdio::null()).kill_on_drop(true);
    timeout(Duration::from_secs(60), command.output()).await.expect("it ends").unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A file in a directory of its own.
fn file(content: &str) -> (TempDir, String) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, content).unwrap();
    (dir, path.to_str().unwrap().to_owned())
}

fn report(active: bool, path: &str) -> Value {
    json!({
        "receiver": {"instance": "00000000000000ff", "version": "0.1.0", "active": active, "uptimeSeconds": 5},
        "summary": {"kymas": 1, "paths": {}, "waiting": 0, "parked": 0, "gaps": 0, "duplicates": 0, "unsettled": 0},
        "runtimes": [{
            "kyma": "kyma-1", "namespace": "kcp-system", "runtimeId": "r-1", "ambiguous": false,
            "path": {"state": path, "reason": "Reason"}, "contract": "v3", "lastSeenSeconds": 12, "heartbeatSeconds": 30,
            "canaryAgeSeconds": null, "agentVersion": "0.1.0", "planRevision": "p", "planIsCurrent": true,
            "certificateNotAfter": null, "waiting": 0, "parked": 0, "gaps": 0, "duplicates": 0, "unsettled": [],
            "wanted": [], "paused": [], "inWork": false, "failures": 0, "epochs": [],
        }],
    })
}

#[tokio::test]
async fn fleet_check_distinguishes_broken_paths_and_a_standby() {
    for (active, path, expected) in
        [(true, "True", 0), (true, "Unknown", 0), (true, "False", 3), (false, "True", 4), (false, "False", 4)]
    {
        let admin = Server::http(move |_| Answer::Json(200, report(active, path))).await;
        let url = ["fleet", "--admin-url", &admin.url()];
        let checked = tidewatch(&[&url[..], &["--check"]].concat()).await;
        assert_eq!(code(&checked), expected, "{active} {path} {}", stderr(&checked));
        assert_eq!(stderr(&checked).contains("not active"), !active);
        let shown = tidewatch(&[&url[..], &["--json"]].concat()).await;
        assert_eq!(code(&shown), 0);
        assert_eq!(stdout(&shown), report(active, path).to_string(), "unchanged");
        assert_eq!(admin.received(), ["GET /fleet"; 2]);
    }
}

#[tokio::test]
async fn no_response_is_1_and_invalid_arguments_are_2() {
    let refusing = Server::http(|_| Answer::Json(403, json!("no"))).await;
    let url = refusing.url();
    for command in [&["fleet"][..], &["fleet", "--check"], &["shards"], &["rotate-ca"], &["rotate-ca", "--no-wait"]] {
        let refused = tidewatch(&[command, &["--admin-url", &url]].concat()).await;
        assert_eq!((code(&refused), stdout(&refused)), (1, String::new()));
        assert!(stderr(&refused).contains("403") && stderr(&refused).contains(&url), "{}", stderr(&refused));
        let absent = tidewatch(&[command, &["--admin-url", "http://127.0.0.1:1"]].concat()).await;
        assert_eq!(code(&absent), 1, "{}", stderr(&absent));
    }
    for invalid in [&[][..], &["fleets"], &["fleet", "--what"], &["status"], &["catalog", "check"]] {
        assert_eq!(code(&tidewatch(invalid).await), 2, "{invalid:?}");
    }
    assert_eq!(code(&tidewatch(&["--help"]).await), 0);
}

#[tokio::test]
async fn rotation_ends_with_the_steady_phase() {
    let progress = |phase: &str| {
        json!({"phase": phase, "since": 1, "target": "ab", "targetNotAfter": 0, "secret": "good", "runtimes": 1,
            "waitingFor": 0, "stragglers": []})
    };
    let queries = AtomicUsize::new(0);
    let admin = Server::http(move |parts| match parts.uri.path() {
        "/rotate-ca" => Answer::Json(202, json!({"target": "ab"})),
        _ => match queries.fetch_add(1, Ordering::Relaxed) {
            0 => Answer::Json(200, progress("spread")),
            // A failover in between.
            1 => Answer::Json(404, json!("not active")),
            _ => Answer::Json(200, progress("steady")),
        },
    })
    .await;
    let rotated = tidewatch(&["rotate-ca", "--admin-url", &admin.url()]).await;
    assert_eq!(code(&rotated), 0, "{}", stderr(&rotated));
    assert!(stdout(&rotated).starts_with("spread: the root ab"), "{}", stdout(&rotated));
    assert_eq!(admin.received(), ["POST /rotate-ca", "GET /rotation", "GET /rotation", "GET /rotation"]);
    let begun = tidewatch(&["rotate-ca", "--no-wait", "--json", "--admin-url", &admin.url()]).await;
    assert_eq!((code(&begun), stdout(&begun)), (0, "{\"target\":\"ab\"}\n".to_owned()));
}

fn list(kind: &str, items: &Value) -> Answer {
    Answer::Json(200, json!({"apiVersion": "v1", "kind": kind, "metadata": {}, "items": items}))
}

fn status(code: u16, message: &str) -> Answer {
    Answer::Json(
        code,
        json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": message, "reason": "x", "code": code}),
    )
}

/// A KCP with two receivers; `holder` is a member, and port-forwards to its pod are answered so.
fn receivers(holder: &'static str, forwarded: Answer) -> impl Fn(&Parts) -> Answer + Send + Sync + 'static {
    move |parts| match parts.uri.path() {
        "/apis/coordination.k8s.io/v1/namespaces/kcp/leases/tidewatch-replica-0" => {
            member("tidewatch-replica-0", holder, "2026-11-25T20:00:00.000000Z")
        }
        lease if lease.starts_with("/apis/coordination.k8s.io/v1/namespaces/kcp/leases/") => no_lease(),
        "/api/v1/namespaces/kcp/pods" => {
            let pod = |name: &str, uid: &str| json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {"name": name, "uid": uid}});
            let items = json!([pod("receiver-a", "u-a"), pod("receiver-b", "u-b")]);
            list("PartialObjectMetadataList", &items)
        }
        "/api/v1/namespaces/kcp/pods/receiver-b/portforward" => forwarded.clone(),
        other => status(404, other),
    }
}

#[tokio::test]
async fn active_receiver_is_reached_by_port_forward() {
    for holder in ["u-b_00000000000000ff", "receiver-b_00000000000000ff"] {
        let kcp = Server::http(receivers(holder, Answer::Pod(report(true, "False")))).await;
        let (_dir, kubeconfig) = file(&kcp.kubeconfig());
        let fleet = tidewatch(&["fleet", "--check", "--kubeconfig", &kubeconfig, "-n", "kcp"]).await;
        assert_eq!(code(&fleet), 3, "{}", stderr(&fleet));
        assert!(stdout(&fleet).contains("kyma-1"), "{}", stdout(&fleet));
        let received = kcp.received();
        let last = received.last().unwrap().to_ascii_lowercase();
        assert!(last.starts_with("get /fleet http/1.1\r\n") && last.contains("host: localhost:8085\r\n"), "{last}");
        assert!(received[received.len() - 2].ends_with("ports=8085"), "{received:?}");
    }
}

fn member(name: &str, holder: &str, renewed: &str) -> Answer {
    Answer::Json(
        200,
        json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name},
            "spec": {"holderIdentity": holder, "renewTime": renewed}}),
    )
}

/// A Lease that the installation does not contain.
fn no_lease() -> Answer {
    Answer::Json(
        404,
        json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}),
    )
}

/// Each replica serves the whole fleet.
#[tokio::test]
async fn replica_with_the_newest_renewal_is_reached() {
    let shards = json!({
        "receiver": {"instance": "00000000000000ff", "version": "0.1.0", "active": true, "uptimeSeconds": 5},
        "ownership": {"fleet": null, "shards": [{"shard": 0, "holder": null, "runtimes": 5}]},
    });
    let replicas = receivers("", Answer::Pod(shards));
    let kcp = Server::http(move |parts| {
        match parts.uri.path().strip_prefix("/apis/coordination.k8s.io/v1/namespaces/kcp/leases/tidewatch-replica-") {
            Some("0") => member("tidewatch-replica-0", "u-a_00ff", "2026-11-25T20:00:00.000000Z"),
            Some("3") => member("tidewatch-replica-3", "u-b_00ff", "2026-11-25T20:00:05.000000Z"),
            Some("4") => member("tidewatch-replica-4", "", "2026-11-25T20:00:09.000000Z"),
            Some(_) => no_lease(),
            None => replicas(parts),
        }
    })
    .await;
    let (_dir, kubeconfig) = file(&kcp.kubeconfig());
    let shown = tidewatch(&["shards", "--check", "--kubeconfig", &kubeconfig, "-n", "kcp"]).await;
    assert_eq!(code(&shown), 3, "{}", stderr(&shown));
    assert!(stderr(&shown).contains("fleet role, shard 0"), "{}", stderr(&shown));
    assert!(stdout(&shown).contains("SHARD  HOLDER"), "{}", stdout(&shown));
}

#[tokio::test]
async fn errors_of_the_port_forward_name_the_cause() {
    for (holder, forwarded, cause) in [
        ("", Answer::Pod(Value::Null), "no receiver holds a membership Lease in kcp"),
        ("elsewhere_00ff", Answer::Pod(Value::Null), "the holder elsewhere_00ff"),
        ("u-b_00ff", Answer::Refusal("connection refused"), "connection refused"),
        ("u-b_00ff", status(403, "may not forward"), "may not forward"),
    ] {
        let kcp = Server::http(receivers(holder, forwarded)).await;
        let (_dir, kubeconfig) = file(&kcp.kubeconfig());
        let fleet = tidewatch(&["fleet", "--kubeconfig", &kubeconfig, "-n", "kcp"]).await;
        assert_eq!(code(&fleet), 1);
        assert!(stderr(&fleet).contains(cause), "{cause}: {}", stderr(&fleet));
    }
}

#[tokio::test]
async fn agent_is_reached_by_port_forward_in_its_runtime() {
    let document = json!({"version": "0.1.0", "pending": ["plan"], "answeredSecondsAgo": 2, "canaryAgeSeconds": null,
        "certificateNotAfter": null, "clockOffsetSeconds": 0, "runtime": null});
    let forwarded = Answer::Pod(document.clone());
    let runtime = Server::https(move |parts| match parts.uri.path() {
        "/api/v1/namespaces/kyma-system/pods" => {
            let pod = |name: &str, phase: &str| {
                json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "status": {"phase": phase}})
            };
            list("PodList", &json!([pod("agent-old", "Failed"), pod("agent-new", "Running")]))
        }
        "/api/v1/namespaces/kyma-system/pods/agent-new/portforward" => forwarded.clone(),
        other => status(404, other),
    })
    .await;
    let config = STANDARD.encode(runtime.kubeconfig());
    let kcp = Server::http(move |parts| {
        let selected = parts.uri.query().is_some_and(|query| query.contains("kyma-name%3Dkyma-1"));
        let secret =
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"config": config}});
        match parts.uri.path() {
            "/api/v1/namespaces/kcp-system/secrets" if selected => list("SecretList", &json!([secret])),
            "/api/v1/namespaces/kcp-system/secrets" => list("SecretList", &json!([])),
            other => status(404, other),
        }
    })
    .await;
    let (_dir, kubeconfig) = file(&kcp.kubeconfig());
    let local = ["--kubeconfig", &*kubeconfig, "--allow-runtime-addresses", "127.0.0.0/8"];

    let shown = tidewatch(&[&["status", "kyma-1"], &local[..]].concat()).await;
    assert_eq!(code(&shown), 0, "{}", stderr(&shown));
    assert!(stdout(&shown).starts_with("agent        0.1.0, not ready: plan\n"), "{}", stdout(&shown));
    let received = runtime.received();
    assert!(received[0].contains("labelSelector=app%3Dskr-webhook%2Capp.kubernetes.io%2Fpart-of%3Dtidewatch"));
    assert!(received[1].ends_with("ports=2113"), "{received:?}");
    let head = received[2].to_ascii_lowercase();
    assert!(head.starts_with("get /status http/1.1\r\n") && head.contains("host: localhost:2113\r\n"), "{head}");
    let json = tidewatch(&[&["status", "kyma-1", "--json"], &local[..]].concat()).await;
    assert_eq!((code(&json), stdout(&json)), (0, document.to_string()));

    for (arguments, cause) in [
        (&["status", "other", local[0], local[1]][..], "no access Secret"),
        // The receiver's rules: no runtime is on loopback.
        (&["status", "kyma-1", local[0], local[1]], "127.0.0.1"),
    ] {
        let refused = tidewatch(arguments).await;
        assert_eq!((code(&refused), stdout(&refused)), (1, String::new()));
        assert!(stderr(&refused).contains(cause), "{cause}: {}", stderr(&refused));
    }
    assert_eq!(runtime.received().len(), 6, "a refused address is not connected to");
}

#[tokio::test]
async fn catalog_check_exits_with_0_1_or_2() {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/author/src/check/tests");
    let good = fixtures.join("good.yaml");
    let wrong = fixtures.join("wrong.yaml");
    for (file, expected) in [(&*good, 0), (&*wrong, 1), (&*fixtures.join("missing.yaml"), 2)] {
        let checked = tidewatch(&["catalog", "check", "--json", file.to_str().unwrap()]).await;
        assert_eq!(code(&checked), expected, "{}", stderr(&checked));
        assert_eq!(serde_json::from_str::<Value>(&stdout(&checked)).is_ok(), expected != 2);
    }
    let unreachable = Server::http(|_| status(500, "down")).await;
    let (_dir, kubeconfig) = file(&unreachable.kubeconfig());
    for command in [&["show", "k"][..], &["diff", good.to_str().unwrap()]] {
        let failed = tidewatch(&[&["catalog"], command, &["--kubeconfig", &kubeconfig]].concat()).await;
        assert_eq!((code(&failed), stdout(&failed)), (2, String::new()));
    }
}

/// KCP with a halted rollout. The patch of its ConfigMap has a conflict at first.
fn halted_rollout(kind: &str) -> impl Fn(&Parts) -> Answer + Send + Sync + 'static {
    let rollout = json!({"module": "keda", "channel": "fast", "version": "1.1.0", "moved": 900, "change": "c",
        "earlier": [{"version": "1.0.0"}],
        "progress": {"ring": {"number": 1, "through": "00ff"}, "since": 900, "halted": "2 of 9 upgraded runtimes"}});
    let metadata = json!({"name": "tidewatch-rollouts", "resourceVersion": "7",
        "annotations": {"operator.kyma-project.io/tidewatch-confirm": "d-1"}});
    let value = if kind == "valid" { rollout.to_string() } else { "{".to_owned() };
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"keda_fast": value}});
    let patches = AtomicUsize::new(0);
    move |parts| match (parts.method.as_str(), parts.uri.path().rsplit('/').next().unwrap()) {
        ("GET", "tidewatch-rollouts") => Answer::Json(200, map.clone()),
        ("PATCH", "tidewatch-rollouts") if patches.fetch_add(1, Ordering::Relaxed) == 0 => status(409, "conflict"),
        ("PATCH", "tidewatch-rollouts") => Answer::Json(200, map.clone()),
        ("GET", "moduletemplates" | "modulereleasemetas" | "kymas" | "manifests") => list("List", &json!([])),
        ("GET", "tidewatch-releases" | "tidewatch") => {
            Answer::Json(404, json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}))
        }
        (_, other) => status(404, other),
    }
}

#[tokio::test]
async fn rollout_shows_a_halt_and_confirms_it_beside_other_confirmations() {
    let kcp = Server::http(halted_rollout("valid")).await;
    let (_dir, kubeconfig) = file(&kcp.kubeconfig());
    let local = ["--kubeconfig", &*kubeconfig, "-n", "kcp"];
    let shown = tidewatch(&[&["rollout", "--json"], &local[..]].concat()).await;
    assert_eq!(code(&shown), 0, "{}", stderr(&shown));
    let report: Value = serde_json::from_str(&stdout(&shown)).unwrap();
    let rollout = &report["rollouts"][0];
    assert_eq!((&rollout["state"], &rollout["confirmation"]), (&json!("halted"), &json!("c-1")), "{report}");
    let page = stdout(&tidewatch(&[&["rollout"], &local[..]].concat()).await);
    assert!(page.contains("to continue: tidewatch rollout confirm c-1\n"), "{page}");

    let refused = tidewatch(&[&["rollout", "confirm", "c-2"], &local[..]].concat()).await;
    assert_eq!((code(&refused), stdout(&refused)), (1, String::new()));
    assert!(stderr(&refused).contains("the halted ones wait for: c-1"), "{}", stderr(&refused));
    assert!(!kcp.received().iter().any(|request| request.starts_with("PATCH")));
    let confirmed = tidewatch(&[&["rollout", "confirm", "c-1"], &local[..]].concat()).await;
    let continues = "confirmed: the rollout of 1.1.0 of the module keda in the channel fast continues in ring 1\n";
    assert_eq!((code(&confirmed), &*stdout(&confirmed)), (0, continues), "{}", stderr(&confirmed));
    let patches = kcp.received().iter().filter(|request| request.starts_with("PATCH")).count();
    assert_eq!(patches, 2, "a conflict is tried again");
    let body = kcp.bodies().pop().unwrap();
    assert_eq!(
        body,
        json!({"metadata": {"resourceVersion": "7",
            "annotations": {"operator.kyma-project.io/tidewatch-confirm": "c-1,d-1"}}})
    );
}

#[tokio::test]
async fn rollout_names_an_invalid_state_and_needs_kcp() {
    let kcp = Server::http(halted_rollout("invalid")).await;
    let (_dir, kubeconfig) = file(&kcp.kubeconfig());
    let shown = tidewatch(&["rollout", "--kubeconfig", &kubeconfig, "-n", "kcp"]).await;
    assert!(stdout(&shown).contains("ConfigMap tidewatch-rollouts, key keda_fast: the stored state is invalid"));
    let (_dir, policy) = file("{");
    let windows = ["rollout", "--kubeconfig", &kubeconfig, "--maintenance-window-policy", &policy];
    let failed = tidewatch(&windows).await;
    assert_eq!(code(&failed), 1);
    assert!(stderr(&failed).contains("the file is not JSON"), "{}", stderr(&failed));
    let absent = Server::http(|_| status(500, "down")).await;
    let (_dir, kubeconfig) = file(&absent.kubeconfig());
    for command in [&["rollout"][..], &["rollout", "confirm", "c-1"]] {
        assert_eq!(code(&tidewatch(&[command, &["--kubeconfig", &kubeconfig]].concat()).await), 1);
    }
}

#[tokio::test]
async fn completions_and_man_pages_cover_every_command() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = tidewatch(&["completions", shell]).await;
        assert_eq!(code(&script), 0);
        assert!(stdout(&script).contains("rotate-ca"), "{shell}");
    }
    let dir = TempDir::new().unwrap();
    let pages = dir.path().join("man1");
    assert_eq!(code(&tidewatch(&["man", pages.to_str().unwrap()]).await), 0);
    for page in [
        "tidewatch.1",
        "tidewatch-fleet.1",
        "tidewatch-catalog-check.1",
        "tidewatch-module-pack.1",
        "tidewatch-status.1",
    ] {
        assert!(fs::read_to_string(pages.join(page)).unwrap().contains(".TH"), "{page}");
    }
    let (_dir, file) = file("");
    assert_eq!(code(&tidewatch(&["man", &file]).await), 1, "a file is no directory");
}
