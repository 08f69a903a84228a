//! Visibility of modules: labels of templates and of Kymas, and the selectors of restricted modules.

use super::*;

#[tokio::test]
async fn a_runtime_gets_the_visible_objects_with_the_same_spec() -> TestResult {
    let setup = SingleRuntime::without_agent("visible", &[KEDA]).await?;
    let kcp = setup.landscape.kcp().client().await?;
    let mut mandatory = template("warden", "1.0.0");
    mandatory["spec"]["mandatory"] = json!(true);
    let templates = Api::<ModuleTemplate>::namespaced(kcp.clone(), setup.landscape.namespace());
    templates.create(&PostParams::default(), &serde_json::from_value(mandatory)?).await?;
    let mut beta = template("serverless", "1.0.0");
    beta["metadata"]["labels"] = json!({"operator.kyma-project.io/beta": "true"});
    templates.create(&PostParams::default(), &serde_json::from_value(beta)?).await?;
    setup.landscape.write_channels("serverless", &[("regular", "1.0.0")]).await?;
    catalog_is_synced(&setup).await?;
    assert_eq!(names::<ModuleTemplate>(&setup).await?, ["keda-1.0.0", "keda-1.1.0"].map(str::to_owned).into());
    assert_eq!(names::<ModuleReleaseMeta>(&setup).await?, ["keda".to_owned()].into());
    let there = user_api::<ModuleTemplate>(&setup).await?.get("keda-1.0.0").await?;
    assert_eq!(spec(&there)?, spec(&templates.get("keda-1.0.0").await?)?);
    let metas = Api::<ModuleReleaseMeta>::namespaced(kcp, setup.landscape.namespace());
    let there = user_api::<ModuleReleaseMeta>(&setup).await?.get("keda").await?;
    assert_eq!(spec(&there)?, spec(&metas.get("keda").await?)?);

    // A Kyma that becomes a beta Kyma gets more modules, and one that ceases to be one gets fewer.
    let kymas = setup.kcp_kymas().await?;
    for (value, seen) in [(json!("true"), true), (json!(null), false)] {
        let labels = Patch::Merge(json!({"metadata": {"labels": {"operator.kyma-project.io/beta": value}}}));
        kymas.patch(setup.runtime.name(), &PatchParams::default(), &labels).await?;
        until("the beta module to come or go", async || {
            let there = names::<ModuleReleaseMeta>(&setup).await?.contains("serverless");
            let template = names::<ModuleTemplate>(&setup).await?.contains("serverless-1.0.0");
            Ok((there == seen && template == seen).then_some(()))
        })
        .await?;
    }
    Ok(())
}

/// `acceptance.md` C2 36.
#[tokio::test]
async fn visibility_follows_all_sixteen_combinations_of_beta_and_internal() -> TestResult {
    let setup = SingleRuntime::without_agent("sixteen", &[]).await?;
    let sets = [("plain", false, false), ("beta", true, false), ("internal", false, true), ("both", true, true)];
    for (name, beta, internal) in sets {
        let mut body = template(name, "1.0.0");
        body["metadata"]["labels"] =
            json!({label::BETA: beta.to_string(), label::INTERNAL: if internal { "True" } else { "no" }});
        apply::<ModuleTemplate>(&setup, &format!("{name}-1.0.0"), &body).await?;
        setup.landscape.write_channels(name, &[("regular", "1.0.0")]).await?;
    }
    for (beta, internal) in [(false, false), (true, false), (true, true), (false, true)] {
        let value = |set: bool| if set { json!("true") } else { Value::Null };
        set_labels(&setup, json!({label::BETA: value(beta), label::INTERNAL: value(internal)})).await?;
        let seen = sets.iter().filter(|(_, of_beta, of_internal)| (!of_beta || beta) && (!of_internal || internal));
        modules_become(&setup, &seen.map(|(name, ..)| *name).collect::<Vec<_>>()).await?;
    }
    Ok(())
}

/// `acceptance.md` C1 27 and 28.
#[tokio::test]
async fn restricted_modules_are_visible_to_selected_kymas_only() -> TestResult {
    let receiver = ["--restricted-default-modules", "locked"].map(str::to_owned).to_vec();
    let setup =
        SingleRuntime::with_options("locked", &[("open", "1.0.0", "1.0.0")], Options { receiver, ..quick_options() })
            .await?;
    setup.landscape.write_template("locked", "1.0.0").await?;
    let select = async |selector: Value| {
        let mut body = release_meta("locked", &[("regular", "1.0.0")]);
        if !selector.is_null() {
            body["spec"]["kymaSelector"] = selector;
        }
        apply::<ModuleReleaseMeta>(&setup, "locked", &body).await
    };
    let team = |name: &str| json!({"matchLabels": {"team": name}});
    set_labels(&setup, json!({"team": "a"})).await?;
    for selector in [Value::Null, json!({}), team("b")] {
        select(selector).await?;
        modules_become(&setup, &["open"]).await?;
    }
    select(team("a")).await?;
    modules_become(&setup, &["locked", "open"]).await?;
    setup.runtime.start_agent().await?;
    setup.runtime.select(&["locked", "open"]).await?;
    until("both Manifests", async || Ok((setup.manifests().await?.len() == 2).then_some(()))).await?;

    // A label of the Kyma, and then the selector, removes the module and restores it.
    set_labels(&setup, json!({"team": "c"})).await?;
    modules_become(&setup, &["open"]).await?;
    until("the Manifest to go", async || Ok((setup.manifests().await?.len() == 1).then_some(()))).await?;
    let status =
        setup.kcp_status("the error", |status| module(status, "locked").is_some_and(|it| it.state == State::Error));
    let message = module(&status.await?, "locked").and_then(|locked| locked.message.clone());
    let message = message.context("a message")?;
    assert_eq!(message, "module template not allowed: restricted module not allowed for this Kyma");
    select(team("c")).await?;
    modules_become(&setup, &["locked", "open"]).await?;
    until("the Manifest to come back", async || Ok((setup.manifests().await?.len() == 2).then_some(()))).await?;

    // A selector hides a module that is not restricted.
    let mut body = release_meta("open", &[("regular", "1.0.0")]);
    body["spec"]["kymaSelector"] = team("c");
    apply::<ModuleReleaseMeta>(&setup, "open", &body).await?;
    modules_become(&setup, &["locked"]).await?;
    let status =
        setup.kcp_status("the error", |status| module(status, "open").is_some_and(|it| it.state == State::Error));
    let message = module(&status.await?, "open").and_then(|open| open.message.clone()).context("a message")?;
    assert!(message.ends_with("module has kymaSelector but is not in restricted modules list"), "{message}");
    Ok(())
}

/// Sets labels of a template in KCP as the operator.
async fn relabel(setup: &SingleRuntime, template: &str, labels: Value) -> Result<()> {
    let api = Api::<ModuleTemplate>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    let labels = Patch::Merge(json!({"metadata": {"labels": labels}}));
    api.patch(template, &PatchParams::default(), &labels).await?;
    Ok(())
}

/// `acceptance.md` C1 25.
#[tokio::test]
async fn a_relabelled_template_is_removed_and_restored_with_its_channel() -> TestResult {
    let setup = SingleRuntime::without_agent("relabelled", &[KEDA]).await?;
    catalog_is_synced(&setup).await?;
    let metas = user_api::<ModuleReleaseMeta>(&setup).await?;
    for key in [label::BETA, label::INTERNAL] {
        for (value, seen) in [(json!("true"), false), (Value::Null, true)] {
            relabel(&setup, "keda-1.1.0", json!({key: value})).await?;
            until(&format!("{key}={value} in the runtime"), async || {
                let has_channel = metas.get("keda").await?.spec.version_of("fast").is_some();
                let has_template = names::<ModuleTemplate>(&setup).await?.contains("keda-1.1.0");
                Ok((has_channel == seen && has_template == seen).then_some(()))
            })
            .await?;
            assert_eq!(metas.get("keda").await?.spec.version_of("regular"), Some("1.0.0"), "nothing else moves");
        }
    }
    Ok(())
}

/// `acceptance.md` C1 26; the label of internal modules is covered where modules are looked up.
#[tokio::test]
async fn a_selected_but_hidden_module_is_in_error_until_it_is_visible() -> TestResult {
    let setup = SingleRuntime::start("not-allowed", &[KEDA, ("serverless", "1.0.0", "1.0.0")]).await?;
    catalog_is_synced(&setup).await?;
    relabel(&setup, "serverless-1.0.0", json!({label::BETA: "true"})).await?;
    until("the module to go", async || {
        Ok((!names::<ModuleReleaseMeta>(&setup).await?.contains("serverless")).then_some(()))
    })
    .await?;
    setup.runtime.select(&["serverless"]).await?;
    let is_in = |state: State| {
        move |status: &tidewatch_api::KymaStatus| module(status, "serverless").is_some_and(|it| it.state == state)
    };
    let status = setup.skr_status("the error", is_in(State::Error)).await?;
    let message = module(&status, "serverless").and_then(|it| it.message.clone());
    assert_eq!(message.as_deref(), Some("module template not allowed: beta module"));
    assert_eq!((status.state(), setup.manifests().await?.len()), (State::Error, 0));

    relabel(&setup, "serverless-1.0.0", json!({label::BETA: null})).await?;
    let status = setup.skr_status("the module to be ready", is_in(State::Ready)).await?;
    assert_eq!(status.state(), State::Ready);
    Ok(())
}
