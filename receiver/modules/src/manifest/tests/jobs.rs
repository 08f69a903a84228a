//! Jobs that Kubernetes deletes after their end, and Jobs that a version changes.

use super::*;

const WAITING: &str = "waiting for the end of Jobs of an earlier version: Job kyma-system/j";

fn job(image: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut job = object("batch/v1", "Job", "j");
    job["spec"] = json!({"ttlSecondsAfterFinished": 0, "template": {
        "metadata": {"labels": {"app": "j"}}, "spec": {"containers": [{"name": "c", "image": image}]}}});
    change(&mut job);
    job
}

impl Fixture {
    fn set_job(&mut self, job: Value, reference: &str) {
        self.set_layer(ModuleObjects::Ready(Arc::new([objects(), vec![job]].concat())));
        self.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(reference));
    }

    /// A ready module whose Job has run with this image.
    async fn with_job(image: &str) -> Self {
        let mut fixture = Self::new();
        fixture.set_job(job(image, |_| ()), DIGEST);
        fixture.reconcile().await;
        fixture.make_available();
        fixture.end("Complete");
        assert_eq!(fixture.reconcile().await, ended());
        fixture.runtime.calls();
        fixture.kcp.calls();
        fixture
    }

    /// Ends the Job like its controller.
    fn end(&self, condition: &str) {
        let met = json!([{"type": condition, "status": "True"}]);
        self.runtime.edit("jobs/j", |job| job["status"]["conditions"] = met);
    }

    /// Another process, or another replica.
    fn restart(&mut self) {
        self.ctx.memories = Memories::default();
    }

    fn image(&self) -> Option<String> {
        let job = self.runtime.object("jobs/j")?;
        Some(job["spec"]["template"]["spec"]["containers"][0]["image"].as_str().unwrap().to_owned())
    }
}

#[tokio::test(start_paused = true)]
async fn job_that_is_gone_after_its_end_does_not_run_again_with_the_same_content() {
    let mut fixture = Fixture::with_job("i:1").await;
    let recorded = fixture.manifest().unwrap().annotations()[annotation::JOBS].clone();
    assert!(recorded.starts_with(r#"{"kyma-system/j":""#), "{recorded}");
    fixture.runtime.remove("jobs/j");
    for is_restarted in [false, true, true] {
        if is_restarted {
            fixture.restart();
        }
        assert_eq!(fixture.verify().await, ended());
        assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()));
        assert_eq!((fixture.image(), fixture.kcp.writes()), (None, Vec::new()));
    }
    // Another version with the same Job, and one with another one.
    let version = |job: &mut Value| job["spec"]["template"]["metadata"]["labels"]["helm.sh/chart"] = json!("c-2");
    fixture.set_job(job("i:1", version), NEXT);
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!((fixture.image(), fixture.state().0), (None, State::Ready));
    fixture.set_job(job("i:2", |_| ()), DIGEST);
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.image().as_deref(), Some("i:2"));
    assert_ne!(fixture.manifest().unwrap().annotations()[annotation::JOBS], recorded);
}

#[tokio::test(start_paused = true)]
async fn record_of_a_job_is_part_of_a_write_that_is_made_anyway() {
    let mut fixture = Fixture::new();
    let writes = |fixture: &Fixture| fixture.kcp.writes().len();
    fixture.reconcile().await;
    fixture.make_available();
    fixture.reconcile().await;
    let without = writes(&fixture);
    let mut fixture = Fixture::new();
    fixture.set_job(job("i:1", |_| ()), DIGEST);
    fixture.reconcile().await;
    fixture.make_available();
    fixture.reconcile().await;
    assert_eq!(writes(&fixture), without);
    assert!(fixture.manifest().unwrap().annotations().contains_key(annotation::JOBS));
}

#[tokio::test(start_paused = true)]
async fn deleted_job_without_a_time_to_live_runs_again() {
    let mut fixture = Fixture::new();
    fixture.set_job(job("i:1", |job| job["spec"]["ttlSecondsAfterFinished"] = Value::Null), DIGEST);
    fixture.reconcile().await;
    fixture.make_available();
    fixture.reconcile().await;
    assert!(!fixture.manifest().unwrap().annotations().contains_key(annotation::JOBS));
    fixture.runtime.remove("jobs/j");
    fixture.verify().await;
    assert_eq!(fixture.image().as_deref(), Some("i:1"));
}

#[tokio::test(start_paused = true)]
async fn changed_job_is_replaced_once_it_has_ended() {
    for end in ["Complete", "Failed"] {
        let mut fixture = Fixture::with_job("i:1").await;
        let uid = |fixture: &Fixture| fixture.runtime.object("jobs/j").unwrap()["metadata"]["uid"].clone();
        let before = uid(&fixture);
        fixture.runtime.edit("jobs/j", |job| job["status"] = json!({"active": 1}));
        fixture.set_job(job("i:2", |_| ()), NEXT);
        let outcome = fixture.reconcile().await;
        assert!(outcome.failed.is_empty() && outcome.requeue_after.is_some(), "{outcome:?}");
        assert_eq!(fixture.state(), (State::Processing, WAITING.to_owned()));
        assert_eq!(fixture.image().as_deref(), Some("i:1"));
        fixture.end(end);
        assert_eq!(fixture.reconcile().await, ended());
        assert_eq!((fixture.image().as_deref(), fixture.state().0), (Some("i:2"), State::Ready), "{end}");
        assert_ne!(uid(&fixture), before);
    }
}

#[tokio::test(start_paused = true)]
async fn job_of_the_same_content_stays_and_gets_the_labels_of_the_version() {
    let mut fixture = Fixture::with_job("i:1").await;
    let labels = json!({"app": "j", label::VERSION: "2"});
    let version = |job: &mut Value| {
        job["metadata"]["labels"] = json!({label::VERSION: "2"});
        job["spec"]["template"]["metadata"]["labels"] = labels;
    };
    fixture.set_job(job("i:1", version), NEXT);
    assert_eq!(fixture.reconcile().await, ended());
    let live = fixture.runtime.object("jobs/j").unwrap();
    assert_eq!(live["metadata"]["labels"][label::VERSION], "2");
    assert_eq!(live["spec"]["template"]["metadata"]["labels"], json!({"app": "j"}));
    assert!(fixture.runtime.writes().iter().all(|call| call == "PATCH jobs/j"), "it is not deleted");
    fixture.restart();
    fixture.verify().await;
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn job_that_may_be_recreated_is_replaced_at_once_but_runs_again_only_with_another_content() {
    let mut fixture = Fixture::with_job("i:1").await;
    let uid = |fixture: &Fixture| fixture.runtime.object("jobs/j").unwrap()["metadata"]["uid"].clone();
    let before = uid(&fixture);
    let version = |job: &mut Value| {
        job["metadata"]["annotations"] = json!({annotation::RECREATE: "true"});
        job["spec"]["template"]["metadata"]["labels"] = json!({"app": "j", label::VERSION: "2"});
    };
    fixture.set_job(job("i:1", version), NEXT);
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(uid(&fixture), before);
    fixture.runtime.edit("jobs/j", |job| job["status"] = json!({"active": 1}));
    fixture.set_job(job("i:2", version), DIGEST);
    assert_eq!(fixture.reconcile().await, ended());
    assert_ne!(uid(&fixture), before);
    assert_eq!((fixture.image().as_deref(), fixture.state().0), (Some("i:2"), State::Ready));
}

#[tokio::test(start_paused = true)]
async fn gone_job_that_is_the_manager_is_ready() {
    let mut fixture = Fixture::with_job("i:1").await;
    let manager = json!({"group": "batch", "version": "v1", "kind": "Job", "name": "j"});
    fixture.edit(|manifest| manifest["spec"]["manager"] = manager);
    fixture.end("Failed");
    fixture.reconcile().await;
    assert_eq!(fixture.state().0, State::Error, "a failed Job that is there is reported, and does not run again");
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
    fixture.runtime.remove("jobs/j");
    fixture.verify().await;
    assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()), "the result is not known any more");
}

#[tokio::test(start_paused = true)]
async fn removal_and_upgrade_without_the_job_do_not_wait_for_one_that_is_gone() {
    for is_removed in [false, true] {
        let mut fixture = Fixture::with_job("i:1").await;
        fixture.runtime.remove("jobs/j");
        if is_removed {
            fixture.delete_manifest();
        } else {
            fixture.set_layer(ModuleObjects::Ready(Arc::new(objects())));
            fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
        }
        assert_eq!(fixture.reconcile().await, ended());
        assert_eq!(fixture.manifest().is_none(), is_removed);
        assert_eq!(fixture.image(), None);
    }
}
