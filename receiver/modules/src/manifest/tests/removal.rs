//! Removals that wait for the default module CR.

use tidewatch_contract::event::Change;

use super::*;

const DEPLOYMENT: (&str, &str, Change) = ("apps/v1/deployments/kyma-system/d", "Deployment", Change::Deleted);
const LEFT: &str = "waiting for the default module CR to be deleted: Sample kyma-system/default (finalizer f)";

impl Fixture {
    /// A module whose Manifest is being deleted, and whose default CR its manager holds.
    async fn with_held_default() -> Self {
        let mut fixture = Self::installed().await;
        fixture.runtime.edit("samples/default", |sample| sample["metadata"]["finalizers"] = json!(["f"]));
        fixture.delete_manifest();
        fixture.reconcile().await;
        assert_eq!(fixture.state(), (State::Deleting, LEFT.to_owned()));
        assert_eq!(fixture.runtime.writes(), ["DELETE samples/default"]);
        fixture
    }

    fn release_default(&self) {
        self.runtime.edit("samples/default", |sample| sample["metadata"]["finalizers"] = json!([]));
    }

    /// Runs a reconcile that completes the removal. Returns its writes.
    async fn leaves(&mut self) -> Vec<String> {
        assert_eq!(self.reconcile().await, ended());
        assert!(self.manifest().is_none(), "{:?}", self.state());
        self.runtime.writes()
    }
}

#[tokio::test(start_paused = true)]
async fn module_is_repaired_by_events_while_its_default_cr_terminates() {
    let mut fixture = Fixture::with_held_default().await;
    fixture.kcp.calls();
    fixture.reconcile().await;
    assert_eq!((fixture.runtime.writes(), fixture.kcp.writes()), (Vec::new(), Vec::new()), "nothing has changed");
    // A user deletes the manager, without which the finalizer would stay for ever.
    fixture.runtime.remove("deployments/d");
    fixture.report(&[DEPLOYMENT]).await;
    assert_eq!(fixture.runtime.writes(), ["PATCH deployments/d"]);
    assert!(fixture.state().1.starts_with(&format!("{LEFT}; the module is not ready: ")), "{}", fixture.state().1);
    fixture.make_available();
    fixture.release_default();
    let deleted =
        ["DELETE deployments/d", "DELETE configmaps/a", "DELETE customresourcedefinitions/samples.example.test"];
    assert_eq!(fixture.leaves().await, deleted, "the default CR is not created again");
}

#[tokio::test(start_paused = true)]
async fn version_is_applied_while_the_default_cr_terminates_and_prunes_no_crd() {
    let mut fixture = Fixture::with_held_default().await;
    let mut next = manager();
    next["spec"]["template"]["spec"]["containers"][0]["image"] = json!("i:2");
    fixture.set_layer(ModuleObjects::Ready(Arc::new(vec![object("v1", "ConfigMap", "b"), next])));
    fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
    fixture.reconcile().await;
    assert_eq!(fixture.runtime.writes(), ["PATCH configmaps/b", "PATCH deployments/d", "DELETE configmaps/a"]);
    assert_eq!(fixture.state().0, State::Deleting);
    fixture.reconcile().await;
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
    fixture.release_default();
    let deleted =
        ["DELETE deployments/d", "DELETE configmaps/b", "DELETE customresourcedefinitions/samples.example.test"];
    assert_eq!(fixture.leaves().await, deleted);
}

/// The webhook of a manager that does not run refuses the deletion.
#[tokio::test(start_paused = true)]
async fn module_is_repaired_while_the_deletion_of_its_default_cr_is_refused() {
    let mut fixture = Fixture::installed().await;
    fixture.runtime.remove("deployments/d");
    fixture.ctx.memories.forget(&key());
    fixture.runtime.refuse("DELETE samples/default", 500);
    fixture.delete_manifest();
    assert!(!fixture.reconcile().await.failed.is_empty());
    assert_eq!(fixture.runtime.writes(), ["DELETE samples/default", "PATCH deployments/d"]);
    let (state, operation) = fixture.state();
    assert_eq!(state, State::Deleting);
    assert!(operation.starts_with("failed to delete Sample kyma-system/default"), "{operation}");
    fixture.runtime.refuse_nothing();
    fixture.leaves().await;
}

#[tokio::test(start_paused = true)]
async fn refused_version_is_named_while_the_removal_waits() {
    let mut fixture = Fixture::with_held_default().await;
    let mut next = objects();
    next[0]["spec"]["template"]["spec"]["containers"][0]["image"] = json!("i:2");
    fixture.set_layer(ModuleObjects::Ready(Arc::new(next)));
    fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
    fixture.runtime.refuse("WRITE deployments", 403);
    fixture.reconcile().await;
    let operation = fixture.state().1;
    assert!(operation.starts_with(&format!("{LEFT}; failed to apply Deployment kyma-system/d: ")), "{operation}");
}

#[tokio::test(start_paused = true)]
async fn own_words_of_the_default_cr_are_shown_and_do_not_shorten_the_wait() {
    let mut fixture = Fixture::with_held_default().await;
    let mut delays = Vec::new();
    for count in (1..=8).rev() {
        let status = json!({"state": "Warning", "conditions": [
            {"type": "Ready", "status": "False", "message": format!("{count} instances exist")}]});
        fixture.runtime.edit("samples/default", |sample| sample["status"] = status);
        delays.push(fixture.reconcile().await.requeue_after.unwrap());
        assert_eq!(fixture.state().1, format!("{LEFT}; it says: Warning: {count} instances exist"));
    }
    assert!(delays.last().unwrap() > &Duration::from_secs(20), "{delays:?}");
}

/// A user creates a CR of the module after its manager was deleted.
#[tokio::test(start_paused = true)]
async fn removal_that_waits_again_restores_what_it_has_deleted() {
    let mut fixture = Fixture::installed().await;
    fixture.runtime.edit("configmaps/a", |map| map["metadata"]["finalizers"] = json!(["f"]));
    fixture.delete_manifest();
    fixture.reconcile().await;
    assert_eq!(fixture.state().1, "waiting for objects to be deleted: ConfigMap kyma-system/a");
    assert!(fixture.runtime.object("deployments/d").is_none());
    fixture.runtime.edit("samples/mine", |sample| *sample = object("example.test/v1", "Sample", "mine"));
    fixture.runtime.writes();
    fixture.reconcile().await;
    assert_eq!(fixture.runtime.writes(), ["PATCH deployments/d"]);
}

/// The CRD of a version is refused, and its default CR has the version that is not served therefore.
#[tokio::test(start_paused = true)]
async fn default_cr_is_deleted_in_a_version_that_is_served() {
    let mut fixture = Fixture::installed().await;
    let mut next = objects();
    next[2]["spec"]["scope"] = json!("Cluster");
    next[2]["spec"]["versions"][0]["name"] = json!("v2");
    fixture.set_layer(ModuleObjects::Ready(Arc::new(next)));
    fixture.edit(|manifest| {
        manifest["spec"]["install"]["source"]["ref"] = json!(NEXT);
        manifest["spec"]["resource"]["apiVersion"] = json!("example.test/v2");
    });
    fixture.runtime.refuse("PATCH customresourcedefinitions/samples.example.test", 422);
    fixture.reconcile().await;
    assert_eq!(fixture.state().0, State::Error);
    fixture.delete_manifest();
    fixture.runtime.writes();
    assert_eq!(fixture.leaves().await[0], "DELETE samples/default");
}

/// The known version of the kind is out of date.
#[tokio::test(start_paused = true)]
async fn default_cr_is_deleted_after_its_kind_moved_to_another_version() {
    let mut fixture = Fixture::with_held_default().await;
    fixture.runtime.edit("customresourcedefinitions/samples.example.test", |crd| {
        crd["spec"]["versions"][0]["name"] = json!("v2");
    });
    fixture.set_layer(ModuleObjects::Pending);
    fixture.release_default();
    fixture.leaves().await;
    let mut fixture = Fixture::with_held_default().await;
    fixture.set_layer(ModuleObjects::Pending);
    fixture.runtime.edit("customresourcedefinitions/samples.example.test", |crd| {
        crd["spec"]["versions"][0]["name"] = json!("v2");
    });
    fixture.reconcile().await;
    assert_eq!(fixture.state(), (State::Deleting, LEFT.to_owned()));
}

/// The operator makes CRs for the default one, which are its own kinds too.
#[tokio::test(start_paused = true)]
async fn what_belongs_to_the_default_cr_goes_before_the_manager() {
    let mut fixture = Fixture::installed().await;
    let mut child = object("example.test/v1", "Sample", "child");
    child["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "example.test/v1", "kind": "Sample", "name": "default", "uid": "u"}]);
    fixture.runtime.edit("samples/child", |sample| *sample = child);
    fixture.delete_manifest();
    fixture.reconcile().await;
    let text = "waiting for the default module CR to be deleted: what belongs to it is left: Sample kyma-system/child";
    assert_eq!(fixture.state(), (State::Deleting, text.to_owned()));
    assert_eq!(fixture.runtime.writes(), ["DELETE samples/default"]);
    fixture.runtime.remove("deployments/d");
    fixture.report(&[DEPLOYMENT]).await;
    assert_eq!(fixture.runtime.writes(), ["PATCH deployments/d"]);
    // The garbage collector deletes it.
    fixture.runtime.remove("samples/child");
    fixture.leaves().await;
}

#[tokio::test(start_paused = true)]
async fn default_cr_that_a_version_renamed_goes_with_the_module() {
    for is_recorded in [true, false] {
        let mut fixture = Fixture::installed().await;
        fixture.edit(|manifest| {
            if is_recorded {
                let created = json!({"apiVersion": "example.test/v1", "kind": "Sample", "namespace": "kyma-system", "name": "default"});
                manifest["metadata"]["annotations"][annotation::CREATED_DEFAULT] = json!(created.to_string());
            }
            manifest["spec"]["resource"]["metadata"]["name"] = json!("other");
        });
        if !is_recorded {
            // It was renamed before it could be recorded.
            fixture.runtime.edit("samples/default", |sample| {
                sample["metadata"]["managedFields"] =
                    json!([{"manager": "resource.kyma-project.io/finalizer", "operation": "Update"}]);
            });
        }
        fixture.reconcile().await;
        assert_eq!(fixture.runtime.writes(), Vec::<String>::new(), "it stays, and no other one is created");
        fixture.delete_manifest();
        assert_eq!(fixture.leaves().await[0], "DELETE samples/default", "{is_recorded}");
    }
}
