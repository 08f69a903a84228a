//! What fails in a pass, and what that means for the rest of it and for the next one.

use http::StatusCode;

use super::*;
use crate::base::class::Class;

const UNAVAILABLE: Option<StatusCode> = Some(StatusCode::SERVICE_UNAVAILABLE);

#[tokio::test]
async fn a_template_that_cannot_be_read_may_be_missing() {
    let bed = Bed::new();
    bed.runtime.refuse("moduletemplates/omega-1.0.0", true);
    bed.try_sync(Drift::None).await.unwrap_err();
    bed.runtime.refuse("moduletemplates/omega-1.0.0", false);
    bed.runtime.answers("get moduletemplates/omega-1.0.0", UNAVAILABLE);
    let error = bed.try_sync(Drift::None).await.unwrap_err();
    assert_eq!(bed.runtime.object("modulereleasemetas/omega"), None);
    assert_eq!(error.to_string(), "read moduletemplates/omega-1.0.0; 1 wait for them");
    bed.runtime.answers("get moduletemplates/omega-1.0.0", None);
    bed.sync(Drift::None).await;
    assert_eq!(bed.runtime.ids(), ALL);
}

#[tokio::test]
async fn a_release_meta_that_cannot_be_read_may_point_to_its_templates() {
    let mut bed = Bed::synced().await;
    bed.meta("omega", &[]);
    bed.runtime.refuse("modulereleasemetas/omega", true);
    bed.try_sync(Drift::None).await.unwrap_err();
    bed.runtime.refuse("modulereleasemetas/omega", false);
    bed.runtime.answers("get modulereleasemetas/omega", UNAVAILABLE);
    let error = bed.try_sync(Drift::None).await.unwrap_err();
    assert_eq!(bed.runtime.ids(), ALL);
    assert_eq!(error.to_string(), "read modulereleasemetas/omega; 1 wait for them");
    bed.runtime.answers("get modulereleasemetas/omega", None);
    bed.sync(Drift::None).await;
    assert_eq!(bed.runtime.ids(), [ALL[0], ALL[2], ALL[3]]);
}

#[tokio::test]
async fn a_webhook_of_the_users_that_cannot_be_reached_holds_up_the_catalog_alone() {
    let bed = Bed::new();
    bed.runtime.answers("moduletemplates/alpha-2.0.0", Some(StatusCode::INTERNAL_SERVER_ERROR));
    let error = bed.try_sync(Drift::None).await.unwrap_err();
    assert_eq!((error.class(), error.is_of_catalog_alone()), (Class::Refused, true), "{error:?}");
    assert!(bed.runtime.object("modulereleasemetas/omega").is_some(), "the others are done");
    // But an API server that cannot even list is not well.
    bed.runtime.answers("list moduletemplates", Some(StatusCode::INTERNAL_SERVER_ERROR));
    let error = bed.try_sync(Drift::All).await.unwrap_err();
    assert_eq!((error.class(), error.is_of_catalog_alone()), (Class::Transport, false), "{error:?}");
}

#[tokio::test]
async fn what_has_too_many_bytes_is_left_out_and_the_rest_arrives() {
    let mut bed = Bed::new();
    let long = "x".repeat(desired::MAX_OBJECT);
    let template = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
        "metadata": {"name": "alpha-3.0.0", "namespace": "kcp-system"},
        "spec": {"moduleName": "alpha", "version": "3.0.0", "descriptor": {"text": &long}}}));
    bed.templates.apply_watcher_event(&Event::Apply(template));
    bed.meta("alpha", &[("fast", "3.0.0"), ("regular", "1.0.0")]);
    let meta = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
        "metadata": {"name": "omega", "namespace": "kcp-system"},
        "spec": {"moduleName": "omega", "channels": [{"channel": "regular", "version": "1.0.0"}],
                 "versions": [{"version": "1.0.0", "deprecationMessage": &long}]}}));
    bed.metas.apply_watcher_event(&Event::Apply(meta));
    let renewed = bed.catalog.renew(&bed.stores);
    let left_out = bed.catalog.snapshot(&bed.stores);
    let said: Vec<_> = left_out.left_out().iter().map(|left| (left.id.to_string(), left.fault.as_str())).collect();
    let expected = [
        ("moduletemplates/alpha-3.0.0", "unfit"),
        ("modulereleasemetas/alpha", "unknown-version"),
        ("modulereleasemetas/omega", "unfit"),
    ];
    assert_eq!(said, expected.map(|(id, fault)| (id.to_owned(), fault)));
    let told: Vec<_> = renewed.left_out.iter().map(|left| left.id.to_string()).collect();
    assert_eq!(told, ["modulereleasemetas/omega"], "the others were told before");
    assert!(renewed.left_out[0].fault.to_string().ends_with("more than 1048576"), "{}", renewed.left_out[0].fault);
    bed.sync(Drift::None).await;
    assert_eq!(bed.runtime.ids(), [ALL[0], ALL[2], ALL[3]]);
    assert_eq!(bed.spec(ALL[0])["channels"], json!([{"channel": "regular", "version": "1.0.0"}]));
}

#[tokio::test]
async fn a_new_process_without_an_inventory_goes_by_what_is_there() {
    let mut bed = Bed::synced().await;
    let uid = |bed: &Bed, id: &str| bed.runtime.object(id).map(|object| object["metadata"]["uid"].clone());
    let before: Vec<_> = ALL.iter().map(|id| uid(&bed, id)).collect();
    bed.runtime.edit("moduletemplates/users-1.0.0", |object| object["spec"] = json!({"own": true}));
    bed.runtime.remove("configmaps/tidewatch-catalog");
    bed.catalog = Catalog::new(Settings::default(), Metrics::default());
    // While nobody was there, a channel moved and a template went.
    bed.meta("alpha", &[("regular", "2.0.0")]);
    bed.delete_template("alpha-1.0.0");
    bed.runtime.inventory_calls();
    let calls = bed.sync(Drift::None).await;
    let writes: Vec<_> = calls.iter().filter(|call| !call.starts_with("list ")).collect();
    assert_eq!(writes, ["apply modulereleasemetas/alpha", "delete moduletemplates/alpha-1.0.0"]);
    let kept = [0, 1, 3, 4];
    assert!(kept.into_iter().all(|at| uid(&bed, ALL[at]) == before[at]), "nothing is made anew");
    assert!(bed.runtime.object("moduletemplates/users-1.0.0").is_some());
    let ids: Vec<_> = bed.runtime.inventory().iter().map(|line| line.split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(ids, [ALL[3], ALL[4], ALL[0], ALL[1]]);
    assert!(bed.sync(Drift::None).await.is_empty());
}

#[tokio::test]
async fn an_inventory_that_could_not_be_written_is_written_by_the_next_pass() {
    let mut bed = Bed::synced().await;
    bed.meta("omega", &[]);
    bed.runtime.answers("configmaps", UNAVAILABLE);
    bed.try_sync(Drift::None).await.unwrap_err();
    bed.try_sync(Drift::None).await.unwrap_err();
    bed.runtime.answers("configmaps", None);
    assert_eq!(bed.runtime.inventory().len(), 5, "it tells of what is gone");
    bed.sync(Drift::None).await;
    assert_eq!(bed.runtime.inventory().len(), 3);
    // A process that believed the old one would not bring back what is wanted again.
    bed.meta("omega", &[("regular", "1.0.0")]);
    bed.catalog.forget(&bed.key);
    bed.sync(Drift::None).await;
    assert_eq!(bed.runtime.ids(), ALL);
}
