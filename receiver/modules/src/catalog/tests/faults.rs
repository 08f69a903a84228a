//! Failures during a sync, and their effect on the rest of it and on the next one.

use http::StatusCode;
use tidewatch_cluster::error_class::ErrorClass;
use tidewatch_kit::variant::VariantName as _;
use tidewatch_select::catalog::desired;

use super::*;

const UNAVAILABLE: Option<StatusCode> = Some(StatusCode::SERVICE_UNAVAILABLE);

#[tokio::test]
async fn unreadable_template_counts_as_missing() {
    let fixture = Fixture::new();
    fixture.runtime.refuse("moduletemplates/omega-1.0.0", true);
    fixture.try_sync(Drift::None).await.unwrap_err();
    fixture.runtime.refuse("moduletemplates/omega-1.0.0", false);
    fixture.runtime.respond_with("get moduletemplates/omega-1.0.0", UNAVAILABLE);
    let error = fixture.try_sync(Drift::None).await.unwrap_err();
    assert_eq!(fixture.runtime.object("modulereleasemetas/omega"), None);
    assert_eq!(error.to_string(), "read moduletemplates/omega-1.0.0; 1 wait for them");
    fixture.runtime.respond_with("get moduletemplates/omega-1.0.0", None);
    fixture.sync(Drift::None).await;
    assert_eq!(fixture.runtime.ids(), ALL);
}

#[tokio::test]
async fn unreadable_release_meta_keeps_its_templates() {
    let mut fixture = Fixture::synced().await;
    fixture.meta("omega", &[]);
    fixture.runtime.refuse("modulereleasemetas/omega", true);
    fixture.try_sync(Drift::None).await.unwrap_err();
    fixture.runtime.refuse("modulereleasemetas/omega", false);
    fixture.runtime.respond_with("get modulereleasemetas/omega", UNAVAILABLE);
    let error = fixture.try_sync(Drift::None).await.unwrap_err();
    assert_eq!(fixture.runtime.ids(), ALL);
    assert_eq!(error.to_string(), "read modulereleasemetas/omega; 1 wait for them");
    fixture.runtime.respond_with("get modulereleasemetas/omega", None);
    fixture.sync(Drift::None).await;
    assert_eq!(fixture.runtime.ids(), [ALL[0], ALL[2], ALL[3]]);
}

#[tokio::test]
async fn unreachable_user_webhook_delays_only_the_catalog() {
    let fixture = Fixture::new();
    fixture.runtime.respond_with("moduletemplates/alpha-2.0.0", Some(StatusCode::INTERNAL_SERVER_ERROR));
    let error = fixture.try_sync(Drift::None).await.unwrap_err();
    assert_eq!((error.class(), error.is_catalog_only()), (ErrorClass::Refused, true), "{error:?}");
    assert!(fixture.runtime.object("modulereleasemetas/omega").is_some(), "other objects are written");
    // An API server without an answer is not healthy.
    fixture.runtime.respond_with("list moduletemplates", Some(StatusCode::SERVICE_UNAVAILABLE));
    let error = fixture.try_sync(Drift::All).await.unwrap_err();
    assert_eq!((error.class(), error.is_catalog_only()), (ErrorClass::Transport, false), "{error:?}");
}

/// A template of lifecycle-manager's first form has a channel, and neither module nor version.
#[tokio::test]
async fn template_of_the_old_form_is_left_out_without_effect_on_others() {
    let mut fixture = Fixture::new();
    let old = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
        "metadata": {"name": "alpha-fast", "namespace": "kcp-system",
                     "labels": {"operator.kyma-project.io/module-name": "alpha"}},
        "spec": {"channel": "fast", "descriptor": {"component": {"name": "example.org/alpha", "version": "9.0.0"}}}}));
    fixture.templates.apply_watcher_event(&Event::Apply(old));
    let update = fixture.catalog.refresh(&fixture.stores);
    let left_out: Vec<_> = update.left_out.iter().map(|left| (left.id.to_string(), left.reason.as_str())).collect();
    assert_eq!(left_out, [("moduletemplates/alpha-fast".to_owned(), "nameless")]);
    fixture.sync(Drift::None).await;
    assert_eq!(fixture.runtime.ids(), ALL);
}

#[tokio::test]
async fn oversized_objects_are_left_out_and_the_rest_is_synced() {
    let mut fixture = Fixture::new();
    let long = "x".repeat(desired::MAX_OBJECT_BYTES);
    let template = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
        "metadata": {"name": "alpha-3.0.0", "namespace": "kcp-system"},
        "spec": {"moduleName": "alpha", "version": "3.0.0", "descriptor": {"text": &long}}}));
    fixture.templates.apply_watcher_event(&Event::Apply(template));
    fixture.meta("alpha", &[("fast", "3.0.0"), ("regular", "1.0.0")]);
    let meta = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
        "metadata": {"name": "omega", "namespace": "kcp-system"},
        "spec": {"moduleName": "omega", "channels": [{"channel": "regular", "version": "1.0.0"}],
                 "versions": [{"version": "1.0.0", "deprecationMessage": &long}]}}));
    fixture.metas.apply_watcher_event(&Event::Apply(meta));
    let update = fixture.catalog.refresh(&fixture.stores);
    let snapshot = fixture.catalog.snapshot(&fixture.stores);
    let omitted: Vec<_> = snapshot.omissions().iter().map(|left| (left.id.to_string(), left.reason.as_str())).collect();
    let expected = [
        ("moduletemplates/alpha-3.0.0", "unfit"),
        ("modulereleasemetas/alpha", "unknown-version"),
        ("modulereleasemetas/omega", "unfit"),
    ];
    assert_eq!(omitted, expected.map(|(id, fault)| (id.to_owned(), fault)));
    let reported: Vec<_> = update.left_out.iter().map(|omission| omission.id.to_string()).collect();
    assert_eq!(reported, ["modulereleasemetas/omega"], "the others were reported before");
    assert!(update.left_out[0].reason.to_string().ends_with("more than 1048576"), "{}", update.left_out[0].reason);
    fixture.sync(Drift::None).await;
    assert_eq!(fixture.runtime.ids(), [ALL[0], ALL[2], ALL[3]]);
    assert_eq!(fixture.spec(ALL[0])["channels"], json!([{"channel": "regular", "version": "1.0.0"}]));
}

#[tokio::test]
async fn new_process_without_an_inventory_adopts_existing_objects() {
    let mut fixture = Fixture::synced().await;
    let uid = |fixture: &Fixture, id: &str| fixture.runtime.object(id).map(|object| object["metadata"]["uid"].clone());
    let before: Vec<_> = ALL.iter().map(|id| uid(&fixture, id)).collect();
    fixture.runtime.edit("moduletemplates/users-1.0.0", |object| object["spec"] = json!({"own": true}));
    fixture.runtime.remove("configmaps/tidewatch-catalog");
    fixture.catalog = Catalog::deciding(Settings::default(), Metrics::default(), WriteBudgets::default());
    // A channel moves and a template is deleted while no process runs.
    fixture.meta("alpha", &[("regular", "2.0.0")]);
    fixture.delete_template("alpha-1.0.0");
    fixture.runtime.inventory_calls();
    let calls = fixture.sync(Drift::None).await;
    let writes: Vec<_> = calls.iter().filter(|call| !call.starts_with("list ")).collect();
    assert_eq!(writes, ["apply modulereleasemetas/alpha", "delete moduletemplates/alpha-1.0.0"]);
    let kept = [0, 1, 3, 4];
    assert!(kept.into_iter().all(|at| uid(&fixture, ALL[at]) == before[at]), "no object is recreated");
    assert!(fixture.runtime.object("moduletemplates/users-1.0.0").is_some());
    let ids: Vec<_> =
        fixture.runtime.inventory().iter().map(|line| line.split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(ids, [ALL[3], ALL[4], ALL[0], ALL[1]]);
    assert!(fixture.sync(Drift::None).await.is_empty());
}

#[tokio::test]
async fn failed_inventory_write_is_retried_by_the_next_sync() {
    let mut fixture = Fixture::synced().await;
    fixture.meta("omega", &[]);
    fixture.runtime.respond_with("configmaps", UNAVAILABLE);
    fixture.try_sync(Drift::None).await.unwrap_err();
    fixture.try_sync(Drift::None).await.unwrap_err();
    fixture.runtime.respond_with("configmaps", None);
    assert_eq!(fixture.runtime.inventory().len(), 5, "the stored inventory still lists deleted objects");
    fixture.sync(Drift::None).await;
    assert_eq!(fixture.runtime.inventory().len(), 3);
    // A process that trusted the outdated inventory would not recreate the objects.
    fixture.meta("omega", &[("regular", "1.0.0")]);
    fixture.catalog.forget(&fixture.key);
    fixture.sync(Drift::None).await;
    assert_eq!(fixture.runtime.ids(), ALL);
}

#[tokio::test(start_paused = true)]
async fn contested_object_is_repaired_ever_more_slowly_and_the_rest_is_synced() {
    let fixture = Fixture::synced().await;
    let contested = "moduletemplates/alpha-1.0.0";
    let mut repairs = Vec::new();
    for second in 0..600 {
        fixture.runtime.edit(contested, |template| template["spec"]["mandatory"] = json!(true));
        drop(fixture.try_sync(fixture.event(contested, Change::Spec)).await);
        let calls = fixture.runtime.calls();
        repairs.extend(calls.iter().filter(|call| call.starts_with("apply ")).map(|_| second));
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    assert_eq!(repairs, [0, 1, 2, 3, 60, 180, 420], "the first sync wrote the object as well");

    fixture.runtime.remove("moduletemplates/omega-1.0.0");
    let error = fixture.try_sync(Drift::All).await.unwrap_err();
    assert!(fixture.runtime.object("moduletemplates/omega-1.0.0").is_some());
    assert_eq!((error.class(), error.is_catalog_only()), (ErrorClass::Refused, true));
    let text = "apply moduletemplates/alpha-1.0.0: it is changed again and again in the runtime";
    assert_eq!(error.describe(), text);
    assert!(fixture.runtime.object("modulereleasemetas/alpha").is_some());

    tokio::time::advance(Duration::from_secs(600)).await;
    fixture.sync(Drift::None).await;
    assert_eq!(fixture.spec(contested)["mandatory"], false, "the competing writer is gone");
}
