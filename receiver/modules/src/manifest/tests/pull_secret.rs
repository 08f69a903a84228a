//! Copies of the image pull secret in namespaces of a module's workloads.

use tidewatch_installer::pull_secret::{ModulePullSecret, PullSecret};

use super::*;

impl Fixture {
    fn set_pull_secret(&mut self, data: &str) {
        let content = json!({"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": data}});
        let secret = PullSecret::fixed(content);
        self.ctx.settings.pull_secret = Some(ModulePullSecret { name: "pull".to_owned(), secret });
    }

    fn copy(&self) -> Option<Value> {
        Some(self.runtime.object("secrets/pull")?["data"][".dockerconfigjson"].clone())
    }
}

/// A module with a DaemonSet in a namespace of its own.
fn elsewhere() -> Vec<Value> {
    let mut workload = manager();
    workload["kind"] = "DaemonSet".into();
    workload["metadata"] = json!({"name": "n", "namespace": "own"});
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "own"}});
    [objects(), vec![workload, namespace]].concat()
}

#[tokio::test(start_paused = true)]
async fn copy_comes_before_the_workloads_follows_kcp_and_goes_with_the_last_of_them() {
    let mut fixture = Fixture::new();
    fixture.set_pull_secret("YQ==");
    fixture.set_layer(ModuleObjects::Ready(Arc::new(elsewhere())));
    fixture.reconcile().await;
    let writes = fixture.runtime.writes();
    let at = |call: &str| writes.iter().position(|write| write == call).unwrap();
    assert!(at("PATCH namespaces/own") < at("PATCH secrets/pull"), "{writes:?}");
    assert!(at("PATCH secrets/pull") < at("PATCH daemonsets/n"), "{writes:?}");
    assert_eq!(fixture.copy(), Some(json!("YQ==")));
    assert!(fixture.synced().contains(&"Secret own/pull".to_owned()));

    fixture.make_available();
    fixture.reconcile().await;
    fixture.set_pull_secret("Yg==");
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.copy(), Some(json!("Yg==")));
    assert_eq!(fixture.runtime.writes(), ["PATCH secrets/pull"]);

    fixture.set_layer(ModuleObjects::Ready(Arc::new(objects())));
    fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
    fixture.reconcile().await;
    assert_eq!(fixture.copy(), None);
}

/// As after a restart of the receiver while KCP has no Secret.
#[tokio::test(start_paused = true)]
async fn copies_stay_while_kcp_lacks_the_secret_and_go_with_the_module() {
    let mut fixture = Fixture::new();
    fixture.set_pull_secret("YQ==");
    fixture.set_layer(ModuleObjects::Ready(Arc::new(elsewhere())));
    fixture.reconcile().await;
    fixture.make_available();
    fixture.reconcile().await;
    fixture.ctx.settings.pull_secret =
        Some(ModulePullSecret { name: "pull".to_owned(), secret: PullSecret::default() });
    fixture.verify().await;
    assert_eq!(fixture.copy(), Some(json!("YQ==")));
    fixture.delete_manifest();
    for _ in 0..3 {
        fixture.reconcile().await;
    }
    assert_eq!(fixture.copy(), None);
}

#[tokio::test(start_paused = true)]
async fn other_secrets_that_a_version_drops_go_while_kcp_lacks_the_pull_secret() {
    let mut fixture = Fixture::new();
    fixture.set_pull_secret("YQ==");
    let mut own = object("v1", "Secret", "s");
    own["metadata"]["namespace"] = "own".into();
    fixture.set_layer(ModuleObjects::Ready(Arc::new([elsewhere(), vec![own]].concat())));
    fixture.reconcile().await;
    fixture.make_available();
    fixture.reconcile().await;
    assert!(fixture.runtime.object("secrets/s").is_some());
    fixture.ctx.settings.pull_secret =
        Some(ModulePullSecret { name: "pull".to_owned(), secret: PullSecret::default() });
    fixture.set_layer(ModuleObjects::Ready(Arc::new(elsewhere())));
    fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
    fixture.reconcile().await;
    assert!(fixture.runtime.object("secrets/s").is_none());
    assert_eq!(fixture.copy(), Some(json!("YQ==")));
}

#[tokio::test(start_paused = true)]
async fn existing_pod_and_job_keep_their_templates_and_new_ones_name_the_secret() {
    let mut fixture = Fixture::new();
    let pod = json!({"containers": [{"name": "c", "image": "i:1"}]});
    let mut job = object("batch/v1", "Job", "j");
    job["spec"] = json!({"template": {"spec": pod}});
    let mut bare = object("v1", "Pod", "p");
    bare["spec"] = pod;
    fixture.set_layer(ModuleObjects::Ready(Arc::new([objects(), vec![job, bare]].concat())));
    fixture.reconcile().await;
    fixture.make_available();
    fixture.reconcile().await;
    fixture.set_pull_secret("YQ==");
    fixture.runtime.calls();
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.runtime.writes(), ["PATCH deployments/d"]);
    assert_eq!(fixture.state().0, State::Ready);
    for id in ["jobs/j", "pods/p"] {
        fixture.runtime.remove(id);
    }
    fixture.verify().await;
    let job = fixture.runtime.object("jobs/j").unwrap();
    assert_eq!(job["spec"]["template"]["spec"]["imagePullSecrets"], json!([{"name": "pull"}]));
    assert_eq!(fixture.runtime.object("pods/p").unwrap()["spec"]["imagePullSecrets"], json!([{"name": "pull"}]));
}
