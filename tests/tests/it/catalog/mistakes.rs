//! Malformed templates and release metas are left out by name, and the rest of the catalog is synced.

use super::*;

/// Waits until so many objects are left out for this fault.
async fn left_out(setup: &SingleRuntime, fault: &str, count: u64) -> Result<()> {
    metric_becomes(setup, &format!(r#"catalog_left_out{{fault="{fault}"}}"#), count).await
}

#[tokio::test]
async fn malformed_objects_are_left_out_by_name_and_the_others_are_synced() -> TestResult {
    let receiver = ["--restricted-default-modules", "locked"].map(str::to_owned).to_vec();
    let setup = SingleRuntime::with_options("mistakes", &[KEDA], Options { receiver, ..quick_options() }).await?;
    catalog_is_synced(&setup).await?;

    let mut misnamed = template("keda", "3.0.0");
    misnamed["metadata"]["name"] = json!("keda-three");
    apply::<ModuleTemplate>(&setup, "keda-three", &misnamed).await?;
    setup.landscape.write_template("nowhere", "1.0.0").await?;
    setup.landscape.write_channels("nowhere", &[("regular", "1.0.0"), ("fast", "9.9.9")]).await?;
    setup.landscape.write_template("locked", "1.0.0").await?;
    let mut locked = release_meta("locked", &[("regular", "1.0.0")]);
    let expression = json!({"key": "team", "operator": "Like", "values": ["a"]});
    locked["spec"]["kymaSelector"] = json!({"matchExpressions": [expression]});
    apply::<ModuleReleaseMeta>(&setup, "locked", &locked).await?;
    setup.landscape.write_template("keda", "1.2.0").await?;
    setup.landscape.write_channels("keda", &[("regular", "1.0.0"), ("fast", "1.2.0")]).await?;

    for (fault, object, words) in [
        ("name", ("ModuleTemplate", "keda-three"), "its name should be keda-3.0.0"),
        ("unknown-version", ("ModuleReleaseMeta", "nowhere"), "there is no template of the version 9.9.9"),
        ("selector", ("ModuleReleaseMeta", "locked"), "\"Like\""),
    ] {
        let note = event_note(&setup, "LeftOutOfCatalog", object).await?;
        assert!(note.contains(words), "{note}");
        left_out(&setup, fault, 1).await?;
    }
    until("all that is well", async || {
        let is_there = names::<ModuleTemplate>(&setup).await?
            == ["keda-1.0.0", "keda-1.1.0", "keda-1.2.0", "nowhere-1.0.0"].map(str::to_owned).into();
        let metas = names::<ModuleReleaseMeta>(&setup).await? == ["keda", "nowhere"].map(str::to_owned).into();
        Ok((is_there && metas).then_some(()))
    })
    .await?;
    let metas = user_api::<ModuleReleaseMeta>(&setup).await?;
    let version = async |module: &str, channel: &str| {
        anyhow::Ok(metas.get(module).await?.spec.version_of(channel).map(str::to_owned))
    };
    assert_eq!(version("nowhere", "fast").await?, None, "the channel alone is left out");
    assert_eq!(version("nowhere", "regular").await?.as_deref(), Some("1.0.0"));
    // Templates are written before the release meta that names them.
    until("the moved channel", async || Ok((version("keda", "fast").await?.as_deref() == Some("1.2.0")).then_some(())))
        .await?;

    // Repaired objects are synced as if there had been no fault.
    let templates = Api::<ModuleTemplate>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    templates.delete("keda-three", &DeleteParams::default()).await?;
    setup.landscape.write_template("nowhere", "9.9.9").await?;
    locked["spec"]["kymaSelector"] = json!({"matchLabels": {"team": "a"}});
    apply::<ModuleReleaseMeta>(&setup, "locked", &locked).await?;
    for fault in ["name", "unknown-version", "selector"] {
        left_out(&setup, fault, 0).await?;
    }
    until("the channel", async || Ok(version("nowhere", "fast").await?.map(drop))).await?;
    Ok(())
}
