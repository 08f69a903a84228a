//! Objects that controllers of Kubernetes finish, delete or fill: Jobs with a time to live, aggregated ClusterRoles, tokens of
//! ServiceAccounts; and Secrets with `stringData`.

use std::fs;

use k8s_openapi::api::{batch::v1::Job, core::v1::Secret};
use tidewatch_api::names::field_manager;
use tidewatch_testing::control_plane::audit::{Mark, Write};

use super::*;

const JOB: &str = "rendering-job";
const AGGREGATED: &str = "rendering-aggregated";
const SOURCE: &str = "rendering-source";
const TEXTS: &str = "rendering-texts";
const TOKEN: &str = "rendering-token";

/// The objects of a version. The Job needs no pod: it is complete at once, and deleted.
fn manifest(version: &str, image: &str, texts: &Value) -> String {
    let meta = |name: &str| json!({"name": name, "namespace": "kyma-system", "labels": {label::VERSION: version}});
    let aggregate = json!({"example.test/aggregate": "true"});
    let objects = [
        json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta(JOB), "spec": {
            "ttlSecondsAfterFinished": 0, "completions": 0, "parallelism": 0,
            "template": {"metadata": {"labels": {label::VERSION: version}}, "spec": {
                "restartPolicy": "Never", "containers": [{"name": "c", "image": image}]}}}}),
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": meta(TEXTS), "stringData": texts}),
        json!({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token", "metadata": {
            "name": TOKEN, "namespace": "kyma-system", "annotations": {"kubernetes.io/service-account.name": "rendering"}}}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta("rendering")}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": AGGREGATED},
            "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": aggregate}]}, "rules": []}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
            "metadata": {"name": SOURCE, "labels": aggregate},
            "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]}),
    ];
    objects.map(|object| object.to_string()).join("\n---\n")
}

impl ModuleRuntime {
    async fn publish_rendering(&self, version: &str, manifest: &str) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let module = format!("component: kyma-project.io/module/rendering\nversion: {version}\n");
        fs::write(folder.path().join("module.yaml"), module)?;
        fs::write(folder.path().join("manifest.yaml"), manifest)?;
        self.publish_folder(folder.path()).await?;
        self.point("rendering", version).await
    }

    /// Our writes of an object since the mark.
    fn writes_of(&self, mark: Mark, name: &str) -> Result<Vec<String>> {
        let writes = self.setup.runtime.cluster().writes_since(mark)?.into_iter();
        let ours = writes.filter(|write: &Write| !write.is_kubernetes_own() && write.name == name);
        Ok(ours.map(|write| write.verb).collect())
    }
}

#[tokio::test]
async fn objects_that_controllers_finish_or_fill_are_written_once() -> TestResult {
    let modules = ModuleRuntime::start("rendering", &[]).await?;
    let client = modules.client().await?;
    let mark = modules.setup.runtime.cluster().audit_mark()?;
    let first = json!({"kept": "1", "dropped": "1"});
    modules.publish_rendering("1.0.0", &manifest("1.0.0", "tidewatch.local/job:1", &first)).await?;
    modules.setup.runtime.select(&["rendering"]).await?;
    modules.becomes("rendering", "1.0.0", State::Ready).await?;

    let jobs = Api::<Job>::namespaced(client.clone(), SKR_NAMESPACE);
    let is_gone = async || Ok(jobs.get_opt(JOB).await?.is_none().then_some(()));
    until("the Job to be deleted after its end", is_gone).await?;
    let roles = Api::<ClusterRole>::all(client.clone());
    let rules =
        async |name: &str| anyhow::Ok(roles.get_opt(name).await?.and_then(|role| role.rules).unwrap_or_default());
    until("the rules of the aggregated ClusterRole", async || Ok((rules(AGGREGATED).await?.len() == 1).then_some(())))
        .await?;
    let secrets = Api::<Secret>::namespaced(client.clone(), SKR_NAMESPACE);
    until("the token of the ServiceAccount", async || {
        let data = secrets.get(TOKEN).await?.data.unwrap_or_default();
        Ok(data.contains_key("token").then_some(()))
    })
    .await?;
    modules.setup.becomes_idle().await?;
    assert_eq!(modules.writes_of(mark, JOB)?, ["patch"], "it runs once");
    assert_eq!(modules.writes_of(mark, AGGREGATED)?, ["patch"]);
    assert_eq!(rules(AGGREGATED).await?.len(), 1);

    // Another process compares all objects, because one of them was deleted.
    modules.setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    modules.setup.landscape.start_receiver().await?;
    roles.delete(SOURCE, &DeleteParams::default()).await?;
    until("the ClusterRole to come back", async || Ok(roles.get_opt(SOURCE).await?)).await?;
    modules.setup.becomes_idle().await?;
    assert_eq!(modules.writes_of(mark, JOB)?, ["patch"]);

    // As versions of the receiver wrote it that applied `stringData`; nobody owns the key that left before.
    for texts in [json!({"kept": "1", "dropped": "1", "older": "1"}), first] {
        let body = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": TEXTS}, "stringData": texts});
        secrets.patch(TEXTS, &PatchParams::apply(field_manager::MODULE).force(), &Patch::Apply(&body)).await?;
    }
    let user = Patch::Merge(json!({"stringData": {"users": "1"}}));
    secrets.patch(TEXTS, &PatchParams::default(), &user).await?;
    modules.publish_rendering("1.1.0", &manifest("1.1.0", "tidewatch.local/job:1", &json!({"kept": "2"}))).await?;
    modules.becomes("rendering", "1.1.0", State::Ready).await?;
    let data = secrets.get(TEXTS).await?.data.unwrap_or_default();
    let texts: Vec<_> = data.iter().map(|(key, value)| (key.as_str(), value.0.as_slice())).collect();
    assert_eq!(texts, [("kept", &b"2"[..]), ("users", b"1")]);
    assert_eq!(modules.writes_of(mark, JOB)?, ["patch"], "only its labels differ");

    modules.publish_rendering("1.2.0", &manifest("1.2.0", "tidewatch.local/job:2", &json!({"kept": "2"}))).await?;
    modules.becomes("rendering", "1.2.0", State::Ready).await?;
    until("the Job to be deleted after its end", is_gone).await?;
    modules.setup.becomes_idle().await?;
    assert_eq!(modules.writes_of(mark, JOB)?, ["patch", "patch"], "another content");
    modules.leave().await?;
    modules.setup.becomes_idle().await?;
    for role in [AGGREGATED, SOURCE] {
        assert!(roles.get_opt(role).await?.is_none(), "{role} is left");
    }
    Ok(())
}

#[tokio::test]
async fn job_with_a_changed_pod_template_replaces_the_one_that_has_ended() -> TestResult {
    let modules = ModuleRuntime::start("changed-job", &[]).await?;
    let job = |image: &str, version: &str, completions: u32| {
        json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": JOB, "namespace": "kyma-system"},
            "spec": {"completions": completions, "parallelism": 0, "template": {
                "metadata": {"labels": {label::VERSION: version}},
                "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": image}]}}}})
        .to_string()
    };
    let jobs = Api::<Job>::namespaced(modules.client().await?, SKR_NAMESPACE);
    let live = async || anyhow::Ok(jobs.get(JOB).await?);
    modules.publish_rendering("1.0.0", &job("tidewatch.local/job:1", "1.0.0", 0)).await?;
    modules.setup.runtime.select(&["rendering"]).await?;
    modules.becomes("rendering", "1.0.0", State::Ready).await?;
    until("the Job to end", async || {
        let status = live().await?.status.unwrap_or_default();
        let ended =
            status.conditions.unwrap_or_default().iter().any(|it| it.type_ == "Complete" && it.status == "True");
        Ok(ended.then_some(()))
    })
    .await?;
    let first = live().await?.uid();

    modules.publish_rendering("1.1.0", &job("tidewatch.local/job:1", "1.1.0", 0)).await?;
    modules.becomes("rendering", "1.1.0", State::Ready).await?;
    assert_eq!(live().await?.uid(), first, "the same content");
    modules.publish_rendering("1.2.0", &job("tidewatch.local/job:2", "1.2.0", 1)).await?;
    modules.becomes("rendering", "1.2.0", State::Ready).await?;
    let second = live().await?.uid();
    assert_ne!(second, first);

    // It never ends, until its user deletes it.
    modules.publish_rendering("1.3.0", &job("tidewatch.local/job:3", "1.3.0", 0)).await?;
    let waiting = format!("waiting for the end of Jobs of an earlier version: Job kyma-system/{JOB}");
    modules.says("rendering", State::Processing, &waiting).await?;
    assert_eq!(live().await?.uid(), second);
    jobs.delete(JOB, &DeleteParams::background()).await?;
    modules.becomes("rendering", "1.3.0", State::Ready).await?;
    modules.leave().await?;
    Ok(())
}
