//! Changes in the runtime that its agent reported.

use tidewatch_shared::event::{Change, Object};

use super::*;

impl Fixture {
    async fn report(&mut self, objects: &[(&str, &str, Change)]) -> ReconcileOutcome {
        let object = |(subject, kind, change): &(&str, &str, Change)| {
            let id = format!("{}/{}", subject.split('/').nth(2).unwrap(), subject.rsplit('/').next().unwrap());
            let version = self.runtime.object(&id).map(|found| found["metadata"]["resourceVersion"].clone());
            Object {
                subject: subject.parse().unwrap(),
                kind: (*kind).to_owned(),
                uid: String::new(),
                resource_version: version.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned(),
                generation: None,
                change: *change,
            }
        };
        let drift = Drift::Objects(objects.iter().map(object).collect());
        self.run(drift).await
    }
}

const MAP: (&str, &str, Change) = ("/v1/configmaps/kyma-system/a", "ConfigMap", Change::Spec);

#[tokio::test(start_paused = true)]
async fn reported_object_is_read_and_repaired_and_no_other() {
    let mut fixture = Fixture::installed().await;
    fixture.verify().await;
    fixture.runtime.calls();
    fixture.runtime.remove("configmaps/a");
    assert_eq!(fixture.report(&[MAP]).await, ended());
    let calls = fixture.runtime.calls();
    assert_eq!(calls, ["GET configmaps/a", "PATCH configmaps/a", "GET deployments/d"]);
    assert_eq!(fixture.kcp.calls(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn echo_of_our_own_write_causes_no_read_once() {
    let mut fixture = Fixture::installed().await;
    fixture.report(&[MAP]).await;
    assert_eq!(fixture.runtime.calls(), ["GET deployments/d"], "the readiness alone");
    fixture.report(&[MAP]).await;
    assert_eq!(fixture.runtime.calls(), ["GET configmaps/a", "GET deployments/d"], "another change");
}

#[tokio::test(start_paused = true)]
async fn unhealthy_manager_is_shown_when_it_is_reported() {
    let mut fixture = Fixture::installed().await;
    fixture.runtime.edit("deployments/d", |deployment| {
        deployment["status"]["availableReplicas"] = json!(0);
        deployment["status"]["readyReplicas"] = json!(0);
        deployment["status"]["conditions"][0]["status"] = json!("False");
    });
    fixture.run(Drift::None).await;
    assert_eq!(fixture.state().0, State::Processing);
    fixture.make_available();
    fixture.run(Drift::None).await;
    assert_eq!(fixture.state().0, State::Ready);
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
}
