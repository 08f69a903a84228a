//! The rollout of a moved channel: its followers get the new version spread over a window of time.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tidewatch_select::catalog::rollout;

use super::*;

/// The time at which the channel `regular` of `keda` moved, in Unix seconds, as recorded in KCP.
async fn moved_at(setup: &SingleRuntime) -> Result<Option<i64>> {
    let releases = Api::<ConfigMap>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    let data = releases.get(RELEASES).await?.data.unwrap_or_default();
    let accepted: Value = serde_json::from_str(&data["accepted"])?;
    Ok(accepted["keda"]["channels"]["regular"]["since"].as_i64())
}

#[tokio::test]
async fn a_moved_channel_is_visible_at_once_and_rolled_out_over_time() -> TestResult {
    // With a window of a day no rollout slot begins while this test runs. After a start all runtimes are verified at
    // once.
    let receiver = ["--restart-spread-seconds", "0"].map(str::to_owned).to_vec();
    let options = Options { rollout_seconds: 86_400, receiver, ..quick_options() };
    let setup = SingleRuntime::with_options("rollout", &[KEDA], options).await?;
    setup.runtime.start_agent().await?;
    catalog_is_synced(&setup).await?;
    setup.runtime.select(&["keda"]).await?;
    until("the Manifest", async || Ok(installed_version(&setup).await?.map(drop))).await?;
    setup.becomes_idle().await?;
    let metas = user_api::<ModuleReleaseMeta>(&setup).await?;
    let sees = async |version: &str| {
        until("the moved channel in the catalog", async || {
            Ok((metas.get("keda").await?.spec.version_of("regular") == Some(version)).then_some(()))
        })
        .await
    };
    setup.landscape.write_channels("keda", &[("regular", "1.1.0"), ("fast", "1.1.0")]).await?;
    sees("1.1.0").await?;
    setup.becomes_idle().await?;
    assert_eq!(installed_version(&setup).await?.as_deref(), Some("1.0.0"));

    // The time of the move is persisted.
    let before = moved_at(&setup).await?.context("since when it points there")?;
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    setup.landscape.start_receiver().await?;
    until("a condition of the new process", async || {
        Ok(setup.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status?.condition("EventPath").map(drop)))
    })
    .await?;
    assert_eq!(moved_at(&setup).await?, Some(before));
    // Neither a restart nor a reconcile for another reason brings the version early.
    set_labels(&setup, json!({label::GLOBAL_ACCOUNT_ID: "another"})).await?;
    until("the label in the runtime", async || {
        let kyma = setup.runtime.skr_kyma().await?.context("the Kyma")?;
        Ok(kyma.labels().get(label::GLOBAL_ACCOUNT_ID).filter(|id| *id == "another").map(drop))
    })
    .await?;
    setup.becomes_idle().await?;
    assert_eq!(installed_version(&setup).await?.as_deref(), Some("1.0.0"));
    // A user's change is reconciled with the newest versions.
    setup.runtime.patch_kyma(&json!({"spec": {"channel": "fast"}})).await?;
    version_becomes(&setup, "1.1.0").await?;
    Ok(())
}

#[tokio::test]
async fn a_rollout_reaches_its_kyma_in_time_across_a_receiver_crash() -> TestResult {
    const WINDOW: u32 = 600;
    // No runtime is verified while this test runs.
    let receiver = ["--restart-spread-seconds", "86400"].map(str::to_owned).to_vec();
    let options = Options { rollout_seconds: WINDOW, receiver, ..quick_options() };
    let setup = SingleRuntime::with_options("rollout-restart", &[KEDA], options).await?;
    setup.runtime.start_agent().await?;
    catalog_is_synced(&setup).await?;
    setup.runtime.select(&["keda"]).await?;
    version_becomes(&setup, "1.0.0").await?;
    setup.becomes_idle().await?;
    let uid = setup.runtime.kcp_kyma().await?.and_then(|kyma| kyma.uid()).context("its uid")?;
    let delay = |version: &str| rollout::delay(&uid, "keda", version, Duration::from_secs(WINDOW.into())).as_secs();
    // A version with a rollout slot that begins after the receiver's restart, and before this test ends.
    let mut versions = (2..).map(|minor| format!("1.{minor}.0"));
    let version = versions.find(|version| (25..35).contains(&delay(version))).context("a version")?;
    setup.landscape.write_template("keda", &version).await?;
    setup.landscape.write_channels("keda", &[("regular", &version), ("fast", "1.1.0")]).await?;
    let since = until("when the channel moved", async || moved_at(&setup).await).await?;
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    setup.landscape.start_receiver().await?;
    version_becomes(&setup, &version).await?;
    let passed = Timestamp::now().as_second() - since;
    assert!(passed >= i64::try_from(delay(&version))?, "{passed} of {} seconds", delay(&version));
    assert_eq!(moved_at(&setup).await?, Some(since));
    Ok(())
}
