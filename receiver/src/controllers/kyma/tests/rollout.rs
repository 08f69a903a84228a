//! A version to which a channel has moved comes with the Kyma's turn, whatever a pass was made for.

use k8s_openapi::api::core::v1::ConfigMap;

use super::*;

/// A day, so that nobody's turn comes while a test runs.
const WINDOW: u32 = 86_400;

/// One where `keda` is installed at 1.0.0 and its channel has moved to 1.1.0, `since` so many seconds ago as KCP's releases say.
async fn moved(since: Option<i64>) -> Bed {
    let mut bed = Bed::with_keda().await;
    let version = |version: &str| {
        let spec = json!({"moduleName": "keda", "version": version, "descriptor": {}});
        of_kyma_group("ModuleTemplate", &format!("keda-{version}"), spec)
    };
    let meta = of_kyma_group(
        "ModuleReleaseMeta",
        "keda",
        json!({"moduleName": "keda", "ocmComponentName": "kyma-project.io/module/keda", "channels": [
            {"channel": "regular", "version": "1.1.0"}, {"channel": "fast", "version": "1.1.0"}]}),
    );
    bed.ctx.stores.templates = filled::<ModuleTemplate>(&[version("1.0.0"), version("1.1.0")]).0;
    bed.ctx.stores.release_metas = filled::<ModuleReleaseMeta>(&[meta]).0;
    let flags = catalog::Flags { module_upgrade_rollout_max_delay_seconds: WINDOW, ..catalog::Flags::default() };
    let settings = catalog::Settings { flags, ..catalog::Settings::default() };
    bed.ctx.catalog = Catalog::new(settings, catalog::Metrics::default());
    let pointer = match since {
        Some(since) => json!({"version": "1.1.0", "since": Timestamp::now().as_second() - since}),
        None => json!({"version": "1.0.0"}),
    };
    let accepted =
        json!({"keda": {"whom": "everyone", "channels": {"regular": pointer, "fast": {"version": "1.1.0"}}}});
    let map: ConfigMap = serde_json::from_value(json!({"data": {"accepted": accepted.to_string()}})).unwrap();
    bed.ctx.catalog.take_releases(Some(&map));
    bed
}

fn installed(bed: &Bed) -> String {
    bed.manifest().unwrap().1["spec"]["version"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_pass_for_another_reason_does_not_bring_the_version_early_and_says_when_to_come_again() {
    // Nobody saw it move before this process, which begins to count.
    for since in [None, Some(0)] {
        let mut bed = moved(since).await;
        let outcome = bed.kyma().await;
        assert_eq!((outcome.ended, outcome.failed), (Works::of(&[Work::Kyma]), Works::EMPTY));
        let turn = outcome.turn.unwrap();
        assert!(turn > Duration::ZERO && turn <= Duration::from_secs(WINDOW.into()), "{turn:?}");
        assert_eq!(outcome.again_in, None);
        assert_eq!(installed(&bed), "1.0.0");
        bed.forget_calls();
        // As a verification does, or a start.
        bed.pass(Works::RUNTIME, Drift::All).await;
        assert_eq!(installed(&bed), "1.0.0");
        assert_eq!(bed.status()["modules"][0]["version"], "1.0.0");
        assert_eq!(bed.status()["modules"][0]["template"]["metadata"]["name"], "keda-1.0.0");
    }
}

#[tokio::test]
async fn it_comes_with_its_turn() {
    let mut bed = moved(Some(WINDOW.into())).await;
    assert_eq!(bed.kyma().await, Outcome::ended(Works::of(&[Work::Kyma])));
    assert_eq!(installed(&bed), "1.1.0");
}

#[tokio::test]
async fn a_user_who_changes_the_channel_waits_for_nobody() {
    let mut bed = moved(Some(0)).await;
    bed.runtime.edit("kymas/default", |kyma| {
        kyma["spec"]["modules"] = json!([{"name": "keda", "managed": true, "channel": "fast"}]);
    });
    assert_eq!(bed.kyma().await, Outcome::ended(Works::of(&[Work::Kyma])));
    assert_eq!(installed(&bed), "1.1.0");
}

#[tokio::test]
async fn a_failing_catalog_is_tried_again_long_before_the_turn_which_comes_all_the_same() {
    let mut bed = moved(Some(0)).await;
    bed.runtime.refuse("GET configmaps/tidewatch-catalog", 503);
    let outcome = bed.pass(Works::of(&[Work::Kyma, Work::Catalog]), Drift::None).await;
    assert_eq!((outcome.failed, outcome.again_in), (Works::of(&[Work::Catalog]), None));
    assert!(outcome.turn.is_some());
    assert_eq!(installed(&bed), "1.0.0");
}
