//! The admin listeners and the command lines that ask them.

use std::{fs, process::Output};

use ::http::StatusCode;
use anyhow::{Context as _, Result};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_tests::{
    http,
    landscape::{DEADLINE, Options, until},
    ports,
};

use crate::support::{One, Tested, quick, run, text};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

/// What an agent says of its path, of the plan that it was told, and of what was accepted, and what the fleet shows of that.
fn both(said: &Value, runtime: &Value) -> [Value; 2] {
    let said = &said["runtime"];
    let epochs = runtime["epochs"].as_array().into_iter().flatten();
    let accepted = epochs.filter(|epoch| epoch["epoch"] == said["epoch"]).map(|epoch| &epoch["accepted"]).next();
    let of = |path: &Value, plan: &Value, accepted: &Value| json!([path, plan, accepted]);
    [
        of(&said["path"], &said["heartbeat"]["planRevision"], &said["accepted"]),
        of(&runtime["path"], &runtime["planRevision"], accepted.unwrap_or(&json!("of no epoch"))),
    ]
}

/// The one agent says of itself what the fleet shows of it; then it is killed, and can no longer be asked.
async fn says_the_same(one: &One, fleet: impl AsyncFn(&[&str]) -> Result<Output>) -> Result<()> {
    let agent = one.runtime.with_agent(async |agent| agent.admin()).await?.context("its admin listener")?;
    let agent = agent.to_string();
    let status =
        async |more: &[&str]| run("tidewatch-agent", &[&["status", "--admin-address", &agent], more].concat()).await;
    // They are not asked in one moment.
    let (said, fleet) = until("the agent to say what the fleet shows", async || {
        let said: Value = serde_json::from_slice(&status(&["--json"]).await?.stdout)?;
        let fleet: Value = serde_json::from_slice(&fleet(&["--json"]).await?.stdout)?;
        let [says, shows] = both(&said, &fleet["runtimes"][0]);
        anyhow::ensure!(says == shows, "{says} is not {shows}");
        Ok(Some((said, fleet)))
    })
    .await?;
    assert_eq!((&said["pending"], &said["clockOffsetSeconds"]), (&json!([]), &json!(0)));
    let (said_runtime, runtime) = (&said["runtime"], &fleet["runtimes"][0]);
    assert_eq!(said_runtime["id"], runtime["runtimeId"]);
    assert_eq!(
        (&said_runtime["planRevision"], &said_runtime["instance"]),
        (&runtime["planRevision"], &fleet["receiver"]["instance"])
    );
    let heartbeat = &said_runtime["heartbeat"];
    assert!(heartbeat["secondsAgo"].is_u64() && heartbeat["intervalSeconds"] == 1, "{said}");
    assert!(
        heartbeat["resend"].is_array() && said_runtime["gaps"].is_u64() && said_runtime["resends"].is_u64(),
        "{said}"
    );
    let watches = said_runtime["watches"].as_array().context("its watches")?;
    let is_settled = |watch: &Value| watch["name"].as_str().is_some_and(|name| heartbeat["settled"][name].is_u64());
    assert!(!watches.is_empty() && watches.iter().all(is_settled), "{said}");
    assert!(
        said["answeredSecondsAgo"].is_u64()
            && said["canaryAgeSeconds"].is_u64()
            && said["certificateNotAfter"].is_string()
    );
    let page = text(&status(&[]).await?.stdout);
    assert!(
        page.starts_with("agent ") && page.contains(", ready\n") && page.contains(one.runtime.id().as_str()),
        "{page}"
    );
    one.runtime.with_agent(async |agent| agent.kill9()).await?;
    assert_eq!(status(&[]).await?.status.code(), Some(1));
    Ok(())
}

#[tokio::test]
async fn the_fleet_and_the_agent_are_shown() -> Tested {
    let one = One::start("shown", &[KEDA]).await?;
    one.quiet().await?;
    let admin = one.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    let url = format!("http://{admin}");
    let fleet =
        async |more: &[&str]| run("tidewatch-receiver", &[&["fleet", "--admin-url", &url], more].concat()).await;

    // A proven runtime.
    let shown = until("a proven path", async || {
        let output = fleet(&["--json", "--check"]).await?;
        let report: Value = serde_json::from_slice(&output.stdout).with_context(|| text(&output.stderr))?;
        let proven = report["runtimes"][0]["path"] == json!({"state": "True", "reason": "Proven"});
        anyhow::ensure!(!proven || output.status.success(), "{}", output.status);
        Ok(proven.then_some(report))
    })
    .await?;
    assert_eq!(shown["receiver"]["active"], true);
    assert_eq!((&shown["summary"]["kymas"], &shown["summary"]["paths"]), (&json!(1), &json!({"Proven": 1})));
    let runtime = &shown["runtimes"][0];
    assert_eq!(runtime["kyma"], one.runtime.name());
    assert_eq!(runtime["runtimeId"], one.runtime.id().as_str());
    assert_eq!(
        (&runtime["contract"], &runtime["planIsCurrent"], &runtime["parked"]),
        (&json!("v3"), &json!(true), &json!(0))
    );
    assert!(runtime["lastSeenSeconds"].is_u64() && runtime["canaryAgeSeconds"].is_u64(), "{runtime}");
    assert_eq!(runtime["agentVersion"], env!("CARGO_PKG_VERSION"));
    let table = text(&fleet(&[]).await?.stdout);
    assert!(table.lines().any(|line| line.starts_with(one.runtime.name()) && line.contains("Proven")), "{table}");

    // Its agent says the same, until it is gone.
    says_the_same(&one, &fleet).await?;
    until("the killed agent to show", async || {
        let output = fleet(&["--check"]).await?;
        let table = text(&output.stdout);
        let line = table.lines().find(|line| line.starts_with(one.runtime.name())).context("its line")?;
        Ok((output.status.code() == Some(3) && line.contains("NoHeartbeat")).then_some(()))
    })
    .await?;

    // One that waits for its turn knows nobody, which is no reason to say that all is well.
    let standby = one.landscape.start_standby("shown-standby", ports::free()?).await?;
    let waiting = format!("http://{}", standby.admin().context("its admin listener")?);
    let asked = ["fleet", "--admin-url", &waiting];
    until("its answer", async || Ok(run("tidewatch-receiver", &asked).await?.status.success().then_some(()))).await?;
    let checked = run("tidewatch-receiver", &[&asked[..], &["--check"]].concat()).await?;
    assert_eq!(checked.status.code(), Some(4), "{}", text(&checked.stdout));
    assert!(text(&checked.stderr).contains("not active"), "{}", text(&checked.stderr));

    // Nobody answers a page that a browser sends here under another name.
    let foreign = tidewatch_tests::http::get(admin, "/other", DEADLINE).await?;
    assert_eq!(foreign.0, StatusCode::NOT_FOUND);
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    let nobody = fleet(&[]).await?;
    assert_eq!(nobody.status.code(), Some(1));
    assert!(text(&nobody.stderr).contains(&url), "{}", text(&nobody.stderr));
    Ok(())
}

/// Lets an account of the landscape's namespace do something at the level of the cluster.
async fn grant(one: &One, name: &str, account: &str, rule: Value) -> Result<()> {
    let client = one.landscape.kcp().client().await?;
    let roles = Api::<ClusterRole>::all(client.clone());
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": [rule]});
    roles.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(&role)).await?;
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": one.landscape.namespace()}],
    });
    let bindings = Api::<ClusterRoleBinding>::all(client);
    bindings.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(&binding)).await?;
    Ok(())
}

#[tokio::test]
async fn elsewhere_than_on_loopback_a_token_and_a_right_are_needed() -> Tested {
    let options = Options { receiver: vec!["--admin-auth".to_owned()], ..quick() };
    let one = One::with("tokens", &[KEDA], options).await?;
    let (kcp, namespace) = (one.landscape.kcp(), one.landscape.namespace());
    let reviews = json!({"apiGroups": ["authentication.k8s.io", "authorization.k8s.io"], "resources": ["tokenreviews", "subjectaccessreviews"], "verbs": ["create"]});
    grant(&one, "tokens-receiver", "tidewatch-receiver", reviews).await?;
    let dir = tempfile::tempdir()?;
    for account in ["allowed", "other"] {
        kcp.ensure_service_account(namespace, account).await?;
        fs::write(dir.path().join(account), kcp.service_account_token(namespace, account).await?)?;
    }
    fs::write(dir.path().join("none"), "not.a.token")?;
    grant(&one, "tokens-allowed", "allowed", json!({"nonResourceURLs": ["/fleet"], "verbs": ["get"]})).await?;
    let ca = dir.path().join("ca.crt");
    fs::write(&ca, one.landscape.ca().trust_bundle().to_pem())?;
    let admin = one.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    let (url, ca) = (format!("https://{admin}"), ca.display().to_string());
    let fleet = async |token: &str| {
        let token = dir.path().join(token).display().to_string();
        run("tidewatch-receiver", &["fleet", "--admin-url", &url, "--ca-file", &ca, "--token-file", &token]).await
    };
    until("the right to be seen", async || Ok(fleet("allowed").await?.status.success().then_some(()))).await?;
    for (account, answer) in [("other", "403"), ("none", "401")] {
        let refused = fleet(account).await?;
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains(answer), "{}", text(&refused.stderr));
    }
    let open = run("tidewatch-receiver", &["fleet", "--admin-url", &url, "--ca-file", &ca]).await?;
    assert!(text(&open.stderr).contains("401"), "{}", text(&open.stderr));
    // In plain HTTP nothing is said.
    assert!(http::get(admin, "/fleet", DEADLINE).await.is_err());

    let client = kcp.client().await?;
    for name in ["tokens-receiver", "tokens-allowed"] {
        Api::<ClusterRoleBinding>::all(client.clone()).delete(name, &DeleteParams::default()).await?;
    }
    Ok(())
}
