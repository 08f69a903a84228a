//! A channel that moves reaches those who follow it over time.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tidewatch_receiver::catalog::facts;

use super::*;

/// When the channel `regular` of `keda` moved, in unix seconds, as KCP's releases tell.
async fn moved_at(one: &One) -> Result<Option<i64>> {
    let releases = Api::<ConfigMap>::namespaced(one.landscape.operator(), one.landscape.namespace());
    let data = releases.get(RELEASES).await?.data.unwrap_or_default();
    let accepted: Value = serde_json::from_str(&data["accepted"])?;
    Ok(accepted["keda"]["channels"]["regular"]["since"].as_i64())
}

#[tokio::test]
async fn a_channel_that_moves_is_rolled_out_over_time_and_seen_at_once() -> Tested {
    // A random time within a day: nobody's turn comes while this test runs.
    // After a start everybody is verified at once.
    let receiver = ["--restart-spread-seconds", "0"].map(str::to_owned).to_vec();
    let options = Options { rollout_seconds: 86_400, receiver, ..quick() };
    let one = One::with("rollout", &[KEDA], options).await?;
    one.runtime.start_agent().await?;
    synced(&one).await?;
    one.runtime.select(&["keda"]).await?;
    until("the Manifest", async || Ok(runs(&one).await?.map(drop))).await?;
    one.quiet().await?;
    let metas = user_api::<ModuleReleaseMeta>(&one).await?;
    let sees = async |version: &str| {
        until("the moved channel in the catalog", async || {
            Ok((metas.get("keda").await?.spec.version_of("regular") == Some(version)).then_some(()))
        })
        .await
    };
    one.landscape.write_channels("keda", &[("regular", "1.1.0"), ("fast", "1.1.0")]).await?;
    sees("1.1.0").await?;
    one.quiet().await?;
    assert_eq!(runs(&one).await?.as_deref(), Some("1.0.0"));

    // When the channel moved is written down.
    let before = moved_at(&one).await?.context("since when it points there")?;
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    one.landscape.start_receiver().await?;
    until("a condition of the new process", async || {
        Ok(one.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status?.condition("EventPath").map(drop)))
    })
    .await?;
    assert_eq!(moved_at(&one).await?, Some(before));
    // Neither a start nor a pass for another reason brings the version early.
    set_labels(&one, json!({label::GLOBAL_ACCOUNT_ID: "another"})).await?;
    until("the label in the runtime", async || {
        let kyma = one.runtime.skr_kyma().await?.context("the Kyma")?;
        Ok(kyma.labels().get(label::GLOBAL_ACCOUNT_ID).filter(|id| *id == "another").map(drop))
    })
    .await?;
    one.quiet().await?;
    assert_eq!(runs(&one).await?.as_deref(), Some("1.0.0"));
    // What the user changes is acted on with all that is known.
    one.runtime.patch_kyma(&json!({"spec": {"channel": "fast"}})).await?;
    comes_to_run(&one, "1.1.0").await?;
    Ok(())
}

#[tokio::test]
async fn a_roll_out_reaches_its_kyma_in_time_although_the_receiver_was_killed_meanwhile() -> Tested {
    const WINDOW: u32 = 600;
    // Nobody is verified while this test runs.
    let receiver = ["--restart-spread-seconds", "86400"].map(str::to_owned).to_vec();
    let options = Options { rollout_seconds: WINDOW, receiver, ..quick() };
    let one = One::with("rollout-restart", &[KEDA], options).await?;
    one.runtime.start_agent().await?;
    synced(&one).await?;
    one.runtime.select(&["keda"]).await?;
    comes_to_run(&one, "1.0.0").await?;
    one.quiet().await?;
    let uid = one.runtime.kcp_kyma().await?.and_then(|kyma| kyma.uid()).context("its uid")?;
    let delay = |version: &str| facts::delay(&uid, "keda", version, Duration::from_secs(WINDOW.into())).as_secs();
    // A version whose turn comes after the receiver's start, and before this test ends.
    let mut versions = (2..).map(|minor| format!("1.{minor}.0"));
    let version = versions.find(|version| (25..35).contains(&delay(version))).context("a version")?;
    one.landscape.write_template("keda", &version).await?;
    one.landscape.write_channels("keda", &[("regular", &version), ("fast", "1.1.0")]).await?;
    let since = until("when the channel moved", async || moved_at(&one).await).await?;
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    one.landscape.start_receiver().await?;
    comes_to_run(&one, &version).await?;
    let passed = Timestamp::now().as_second() - since;
    assert!(passed >= i64::try_from(delay(&version))?, "{passed} of {} seconds", delay(&version));
    assert_eq!(moved_at(&one).await?, Some(since));
    Ok(())
}
