//! The admin listeners, and the commands that query them.

use std::{fs, process::Output};

use ::http::StatusCode;
use anyhow::{Context as _, Result};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_testing::{
    http,
    landscape::{DEADLINE, Options, until},
    ports,
};

use crate::support::{SingleRuntime, TestResult, quick_options, run, text};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

/// The state of path, plan and accepted events, from the agent's status and from the fleet report, to compare them.
fn comparable_state(agent_status: &Value, runtime: &Value) -> [Value; 2] {
    let agent_status = &agent_status["runtime"];
    let epochs = runtime["epochs"].as_array().into_iter().flatten();
    let accepted =
        epochs.filter(|epoch| epoch["epoch"] == agent_status["epoch"]).map(|epoch| &epoch["accepted"]).next();
    let of = |path: &Value, plan: &Value, accepted: &Value| json!([path, plan, accepted]);
    [
        of(&agent_status["path"], &agent_status["heartbeat"]["planRevision"], &agent_status["accepted"]),
        of(&runtime["path"], &runtime["planRevision"], accepted.unwrap_or(&json!("no epoch"))),
    ]
}

/// Checks that the agent's status agrees with the fleet report, and that the status command fails once the agent is
/// killed.
async fn agent_status_agrees(setup: &SingleRuntime, fleet: impl AsyncFn(&[&str]) -> Result<Output>) -> Result<()> {
    let agent = setup.runtime.with_agent(async |agent| agent.admin()).await?.context("its admin listener")?;
    let agent = agent.to_string();
    let status =
        async |more: &[&str]| run("tidewatch-agent", &[&["status", "--admin-address", &agent], more].concat()).await;
    // The two requests are not simultaneous.
    let (agent_status, fleet) = until("the agent's status to agree with the fleet report", async || {
        let agent_status: Value = serde_json::from_slice(&status(&["--json"]).await?.stdout)?;
        let fleet: Value = serde_json::from_slice(&fleet(&["--json"]).await?.stdout)?;
        let [from_agent, from_fleet] = comparable_state(&agent_status, &fleet["runtimes"][0]);
        anyhow::ensure!(from_agent == from_fleet, "the agent reports {from_agent}, the fleet {from_fleet}");
        Ok(Some((agent_status, fleet)))
    })
    .await?;
    assert_eq!((&agent_status["pending"], &agent_status["clockOffsetSeconds"]), (&json!([]), &json!(0)));
    let agent_runtime = &agent_status["runtime"];
    let runtime = &fleet["runtimes"][0];
    assert_eq!(agent_runtime["id"], runtime["runtimeId"]);
    assert_eq!(agent_runtime["planRevision"], runtime["planRevision"]);
    // The report shows the instance of the process, and not those of its shards.
    let instances = [&agent_runtime["instance"], &fleet["receiver"]["instance"]];
    assert!(instances.iter().all(|instance| instance.as_str().is_some_and(|text| text.len() == 16)), "{instances:?}");
    let heartbeat = &agent_runtime["heartbeat"];
    assert!(heartbeat["secondsAgo"].is_u64() && heartbeat["intervalSeconds"] == 1, "{agent_status}");
    assert!(
        heartbeat["resend"].is_array() && agent_runtime["gaps"].is_u64() && agent_runtime["resends"].is_u64(),
        "{agent_status}"
    );
    let watches = agent_runtime["watches"].as_array().context("its watches")?;
    let is_settled = |watch: &Value| watch["name"].as_str().is_some_and(|name| heartbeat["settled"][name].is_u64());
    assert!(!watches.is_empty() && watches.iter().all(is_settled), "{agent_status}");
    assert!(
        agent_status["answeredSecondsAgo"].is_u64()
            && agent_status["canaryAgeSeconds"].is_u64()
            && agent_status["certificateNotAfter"].is_string()
    );
    let page = text(&status(&[]).await?.stdout);
    assert!(
        page.starts_with("agent ") && page.contains(", ready\n") && page.contains(setup.runtime.id().as_str()),
        "{page}"
    );
    setup.runtime.with_agent(async |agent| agent.kill9()).await?;
    assert_eq!(status(&[]).await?.status.code(), Some(1));
    Ok(())
}

#[tokio::test]
async fn the_fleet_report_agrees_with_the_agent_status() -> TestResult {
    let setup = SingleRuntime::start("shown", &[KEDA]).await?;
    setup.becomes_idle().await?;
    let admin =
        setup.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    let url = format!("http://{admin}");
    let fleet = async |more: &[&str]| run("tidewatch", &[&["fleet", "--admin-url", &url], more].concat()).await;

    // A runtime with a proven path.
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
    assert_eq!(runtime["kyma"], setup.runtime.name());
    assert_eq!(runtime["runtimeId"], setup.runtime.id().as_str());
    assert_eq!(
        (&runtime["contract"], &runtime["planIsCurrent"], &runtime["parked"]),
        (&json!("v3"), &json!(true), &json!(0))
    );
    assert!(runtime["lastSeenSeconds"].is_u64() && runtime["canaryAgeSeconds"].is_u64(), "{runtime}");
    assert_eq!(runtime["agentVersion"], env!("CARGO_PKG_VERSION"));
    let table = text(&fleet(&[]).await?.stdout);
    assert!(table.lines().any(|line| line.starts_with(setup.runtime.name()) && line.contains("Proven")), "{table}");

    // The agent's status agrees with the report until the agent is killed.
    agent_status_agrees(&setup, &fleet).await?;
    until("the killed agent in the report", async || {
        let output = fleet(&["--check"]).await?;
        let table = text(&output.stdout);
        let line = table.lines().find(|line| line.starts_with(setup.runtime.name())).context("its line")?;
        Ok((output.status.code() == Some(3) && line.contains("NoHeartbeat")).then_some(()))
    })
    .await?;

    // A standby has no runtimes, so the check must not report success.
    let standby = setup.landscape.start_standby("shown-standby", ports::free()?).await?;
    let waiting = format!("http://{}", standby.admin().context("its admin listener")?);
    let arguments = ["fleet", "--admin-url", &waiting];
    until("its answer", async || Ok(run("tidewatch", &arguments).await?.status.success().then_some(()))).await?;
    let checked = run("tidewatch", &[&arguments[..], &["--check"]].concat()).await?;
    assert_eq!(checked.status.code(), Some(4), "{}", text(&checked.stdout));
    assert!(text(&checked.stderr).contains("not active"), "{}", text(&checked.stderr));

    // An unknown path is answered with 404.
    let foreign = tidewatch_testing::http::get(admin, "/other", DEADLINE).await?;
    assert_eq!(foreign.0, StatusCode::NOT_FOUND);
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    let unreachable = fleet(&[]).await?;
    assert_eq!(unreachable.status.code(), Some(1));
    assert!(text(&unreachable.stderr).contains(&url), "{}", text(&unreachable.stderr));
    Ok(())
}

/// Grants an account of the landscape's namespace a cluster-wide right.
async fn grant(setup: &SingleRuntime, name: &str, account: &str, rule: Value) -> Result<()> {
    let client = setup.landscape.kcp().client().await?;
    let roles = Api::<ClusterRole>::all(client.clone());
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": [rule]});
    roles.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(&role)).await?;
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": setup.landscape.namespace()}],
    });
    let bindings = Api::<ClusterRoleBinding>::all(client);
    bindings.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(&binding)).await?;
    Ok(())
}

#[tokio::test]
async fn an_admin_listener_beyond_loopback_requires_a_token_and_a_right() -> TestResult {
    let options = Options { receiver: vec!["--admin-auth".to_owned()], ..quick_options() };
    let setup = SingleRuntime::with_options("tokens", &[KEDA], options).await?;
    let kcp = setup.landscape.kcp();
    let namespace = setup.landscape.namespace();
    let reviews = json!({"apiGroups": ["authentication.k8s.io", "authorization.k8s.io"], "resources": ["tokenreviews", "subjectaccessreviews"], "verbs": ["create"]});
    grant(&setup, "tokens-receiver", "tidewatch-receiver", reviews).await?;
    let dir = tempfile::tempdir()?;
    for account in ["allowed", "other"] {
        kcp.ensure_service_account(namespace, account).await?;
        fs::write(dir.path().join(account), kcp.service_account_token(namespace, account).await?)?;
    }
    fs::write(dir.path().join("none"), "not.a.token")?;
    grant(&setup, "tokens-allowed", "allowed", json!({"nonResourceURLs": ["/fleet"], "verbs": ["get"]})).await?;
    let ca = dir.path().join("ca.crt");
    fs::write(&ca, setup.landscape.ca().trust_bundle().to_pem())?;
    let admin =
        setup.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    let url = format!("https://{admin}");
    let ca = ca.display().to_string();
    let fleet = async |token: &str| {
        let token = dir.path().join(token).display().to_string();
        run("tidewatch", &["fleet", "--admin-url", &url, "--ca-file", &ca, "--token-file", &token]).await
    };
    until("the right to take effect", async || Ok(fleet("allowed").await?.status.success().then_some(()))).await?;
    for (account, answer) in [("other", "403"), ("none", "401")] {
        let refused = fleet(account).await?;
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains(answer), "{}", text(&refused.stderr));
    }
    let open = run("tidewatch", &["fleet", "--admin-url", &url, "--ca-file", &ca]).await?;
    assert!(text(&open.stderr).contains("401"), "{}", text(&open.stderr));
    // The listener does not answer plain HTTP.
    assert!(http::get(admin, "/fleet", DEADLINE).await.is_err());

    let client = kcp.client().await?;
    for name in ["tokens-receiver", "tokens-allowed"] {
        Api::<ClusterRoleBinding>::all(client.clone()).delete(name, &DeleteParams::default()).await?;
    }
    Ok(())
}
