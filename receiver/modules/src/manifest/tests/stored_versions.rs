//! Upgrades to CRDs without a version in which resources are stored.

use tokio::time::advance;

use super::*;

const DEFINITION: &str = "customresourcedefinitions/samples.example.test";
/// Time until API servers have noticed a new storage version.
const SETTLES: Duration = Duration::from_secs(5);
const WAITS: &str =
    "waiting for the resources of CRDs to be stored in a version that stays: samples.example.test in v2";

impl Fixture {
    /// An upgrade to a CRD with `v2` alone, while this many resources are stored in `v1`.
    async fn dropping_v1(resources: usize) -> Self {
        let mut fixture = Self::installed().await;
        fixture.runtime = fixture.runtime.with_pages_of(50);
        fixture.runtime.edit(DEFINITION, |crd| crd["status"]["storedVersions"] = json!(["v1"]));
        for n in 0..resources {
            let name = format!("n{n:04}");
            let sample = object("example.test/v1", "Sample", &name);
            fixture.runtime.edit(&format!("samples/{name}"), |found| *found = sample);
        }
        let mut next = objects();
        next[2]["spec"]["versions"][0]["name"] = json!("v2");
        next[0]["spec"]["template"]["spec"]["containers"][0]["image"] = json!("i:2");
        fixture.set_layer(ModuleObjects::Ready(Arc::new(next)));
        fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
        fixture.runtime.calls();
        fixture
    }

    /// A reconcile in which the migration goes on. Returns the number of resources that it wrote.
    async fn waits(&mut self) -> usize {
        let outcome = self.reconcile().await;
        assert!(outcome.failed.is_empty(), "{:?}", self.state());
        assert!(outcome.requeue_after.unwrap() <= Duration::from_secs(1), "{outcome:?}");
        assert_eq!(self.state(), (State::Processing, WAITS.to_owned()));
        self.written(false)
    }

    /// Number of resources that were written; the manager is written in the end alone, since that of the former version
    /// converts them.
    fn written(&self, is_complete: bool) -> usize {
        let writes = self.runtime.writes();
        assert_eq!(writes.contains(&"PATCH deployments/d".to_owned()), is_complete, "{writes:?}");
        writes.iter().filter(|call| call.starts_with("PATCH samples/")).count()
    }

    /// The reconcile that changes the storage version, and the time until API servers have noticed it.
    async fn changes_the_storage_version(&mut self) {
        assert_eq!(self.waits().await, 0);
        advance(SETTLES / 2).await;
        assert_eq!(self.waits().await, 0, "an API server may not have noticed it");
        advance(SETTLES / 2).await;
    }

    async fn completes(&mut self) -> usize {
        assert_eq!(self.reconcile().await, ended());
        assert_eq!(self.state().0, State::Ready);
        let definition = self.runtime.object(DEFINITION).unwrap();
        let versions = definition["spec"]["versions"].as_array().unwrap().iter().map(|it| it["name"].clone());
        assert_eq!(
            json!([versions.collect::<Vec<_>>(), definition["status"]["storedVersions"]]),
            json!([["v2"], ["v2"]])
        );
        self.written(true)
    }
}

#[tokio::test(start_paused = true)]
async fn resources_are_stored_in_the_version_that_stays_before_the_crd_is_applied() {
    // With the default module CR.
    let mut fixture = Fixture::dropping_v1(699).await;
    fixture.changes_the_storage_version().await;
    assert_eq!(fixture.waits().await, 500);
    assert_eq!(fixture.completes().await, 200);
    fixture.verify().await;
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn migration_begins_anew_after_a_restart_and_ends_with_another_version() {
    let mut fixture = Fixture::dropping_v1(699).await;
    fixture.changes_the_storage_version().await;
    assert_eq!(fixture.waits().await, 500);
    fixture.ctx.memories.forget(&key());
    assert_eq!(fixture.waits().await, 0, "a new process does not know when it changed");
    advance(SETTLES).await;
    assert_eq!(fixture.waits().await, 500);
    // The module moves back to the version that still has it: what is stored in `v2` by now is stored in `v1` again.
    fixture.set_layer(ModuleObjects::Ready(Arc::new(objects())));
    fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(DIGEST));
    let mut turns = 0;
    while fixture.reconcile().await != ended() {
        turns += 1;
        advance(Duration::from_secs(1)).await;
        assert!(turns < 20, "{:?}", fixture.state());
    }
    let definition = fixture.runtime.object(DEFINITION).unwrap();
    assert_eq!(definition["status"]["storedVersions"], json!(["v1"]));
    assert_eq!(fixture.state().0, State::Ready, "{:?}", fixture.state());
}

#[tokio::test(start_paused = true)]
async fn resource_that_cannot_be_stored_is_named() {
    let mut fixture = Fixture::dropping_v1(3).await;
    fixture.changes_the_storage_version().await;
    fixture.runtime.refuse("WRITE samples/n0001", 422);
    assert!(!fixture.reconcile().await.failed.is_empty());
    let (state, operation) = fixture.state();
    assert_eq!(state, State::Error);
    assert!(operation.starts_with("failed to store Sample kyma-system/n0001 in the version v2: "), "{operation}");
    fixture.runtime.refuse_nothing();
    fixture.runtime.writes();
    assert_eq!(fixture.completes().await, 4);
}

/// A CRD that the API server refuses for another reason.
#[tokio::test(start_paused = true)]
async fn other_refusals_are_reported_as_they_are() {
    let mut fixture = Fixture::dropping_v1(0).await;
    fixture.runtime.edit(DEFINITION, |crd| crd["status"] = json!({}));
    fixture.runtime.refuse(&format!("PATCH {DEFINITION}"), 422);
    fixture.reconcile().await;
    let (state, operation) = fixture.state();
    assert_eq!(state, State::Error);
    assert!(operation.starts_with("failed to apply CustomResourceDefinition samples.example.test"), "{operation}");
}

/// The removal waits for the resources of the user meanwhile.
#[tokio::test(start_paused = true)]
async fn migration_goes_on_while_a_removal_waits() {
    let mut fixture = Fixture::dropping_v1(1).await;
    fixture.delete_manifest();
    for says in [format!("; {WAITS}"), String::new()] {
        fixture.reconcile().await;
        let blocked = "waiting for module crs deletion: Sample kyma-system/n0000";
        assert_eq!(fixture.state(), (State::Deleting, format!("{blocked}{says}")));
        advance(SETTLES).await;
    }
    assert_eq!(fixture.runtime.object(DEFINITION).unwrap()["status"]["storedVersions"], json!(["v2"]));
}
