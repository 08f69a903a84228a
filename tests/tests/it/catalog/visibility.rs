//! Who sees and may have what: labels of templates and of Kymas, and the selectors of restricted modules.

use tidewatch_shared::api::Manifest;

use super::*;

#[tokio::test]
async fn a_runtime_has_what_it_may_see_with_the_same_spec() -> Tested {
    let one = One::without_agent("visible", &[KEDA]).await?;
    let kcp = one.landscape.kcp().client().await?;
    let mut mandatory = template("warden", "1.0.0");
    mandatory["spec"]["mandatory"] = json!(true);
    let templates = Api::<ModuleTemplate>::namespaced(kcp.clone(), one.landscape.namespace());
    templates.create(&PostParams::default(), &serde_json::from_value(mandatory)?).await?;
    let mut beta = template("serverless", "1.0.0");
    beta["metadata"]["labels"] = json!({"operator.kyma-project.io/beta": "true"});
    templates.create(&PostParams::default(), &serde_json::from_value(beta)?).await?;
    one.landscape.write_channels("serverless", &[("regular", "1.0.0")]).await?;
    synced(&one).await?;
    assert_eq!(names::<ModuleTemplate>(&one).await?, ["keda-1.0.0", "keda-1.1.0"].map(str::to_owned).into());
    assert_eq!(names::<ModuleReleaseMeta>(&one).await?, ["keda".to_owned()].into());
    let there = user_api::<ModuleTemplate>(&one).await?.get("keda-1.0.0").await?;
    assert_eq!(spec(&there)?, spec(&templates.get("keda-1.0.0").await?)?);
    let metas = Api::<ModuleReleaseMeta>::namespaced(kcp, one.landscape.namespace());
    let there = user_api::<ModuleReleaseMeta>(&one).await?.get("keda").await?;
    assert_eq!(spec(&there)?, spec(&metas.get("keda").await?)?);

    // A Kyma that becomes a beta Kyma sees more, and one that ceases to be one sees less.
    let kymas = one.kcp_kymas().await?;
    for (value, seen) in [(json!("true"), true), (json!(null), false)] {
        let labels = Patch::Merge(json!({"metadata": {"labels": {"operator.kyma-project.io/beta": value}}}));
        kymas.patch(one.runtime.name(), &PatchParams::default(), &labels).await?;
        until("the beta module to come or go", async || {
            let there = names::<ModuleReleaseMeta>(&one).await?.contains("serverless");
            let template = names::<ModuleTemplate>(&one).await?.contains("serverless-1.0.0");
            Ok((there == seen && template == seen).then_some(()))
        })
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn all_sixteen_combinations_of_beta_and_internal() -> Tested {
    let one = One::without_agent("sixteen", &[]).await?;
    let sets = [("plain", false, false), ("beta", true, false), ("internal", false, true), ("both", true, true)];
    for (name, beta, internal) in sets {
        let mut body = template(name, "1.0.0");
        body["metadata"]["labels"] =
            json!({label::BETA: beta.to_string(), label::INTERNAL: if internal { "True" } else { "no" }});
        apply::<ModuleTemplate>(&one, &format!("{name}-1.0.0"), &body).await?;
        one.landscape.write_channels(name, &[("regular", "1.0.0")]).await?;
    }
    for (beta, internal) in [(false, false), (true, false), (true, true), (false, true)] {
        let value = |set: bool| if set { json!("true") } else { Value::Null };
        set_labels(&one, json!({label::BETA: value(beta), label::INTERNAL: value(internal)})).await?;
        let seen = sets.iter().filter(|(_, of_beta, of_internal)| (!of_beta || beta) && (!of_internal || internal));
        modules_are(&one, &seen.map(|(name, ..)| *name).collect::<Vec<_>>()).await?;
    }
    Ok(())
}

#[tokio::test]
async fn restricted_modules_are_seen_and_kept_by_those_whom_they_select() -> Tested {
    let receiver = ["--restricted-default-modules", "locked"].map(str::to_owned).to_vec();
    let one = One::with("locked", &[("open", "1.0.0", "1.0.0")], Options { receiver, ..quick() }).await?;
    one.landscape.write_template("locked", "1.0.0").await?;
    let select = async |selector: Value| {
        let mut body = release_meta("locked", &[("regular", "1.0.0")]);
        if !selector.is_null() {
            body["spec"]["kymaSelector"] = selector;
        }
        apply::<ModuleReleaseMeta>(&one, "locked", &body).await
    };
    let team = |name: &str| json!({"matchLabels": {"team": name}});
    set_labels(&one, json!({"team": "a"})).await?;
    for selector in [Value::Null, json!({}), team("b")] {
        select(selector).await?;
        modules_are(&one, &["open"]).await?;
    }
    select(team("a")).await?;
    modules_are(&one, &["locked", "open"]).await?;
    one.runtime.start_agent().await?;
    one.runtime.select(&["locked", "open"]).await?;
    until("both Manifests", async || Ok((one.manifests().await?.len() == 2).then_some(()))).await?;

    // A label of the Kyma, and then the selector, takes it away and gives it back.
    set_labels(&one, json!({"team": "c"})).await?;
    modules_are(&one, &["open"]).await?;
    until("the Manifest to go", async || Ok((one.manifests().await?.len() == 1).then_some(()))).await?;
    let status =
        one.kcp_status("the error", |status| module(status, "locked").is_some_and(|it| it.state == State::Error));
    let message = module(&status.await?, "locked").and_then(|locked| locked.message.clone());
    let message = message.context("a message")?;
    assert_eq!(message, "module template not allowed: restricted module not allowed for this Kyma");
    select(team("c")).await?;
    modules_are(&one, &["locked", "open"]).await?;
    until("the Manifest to come back", async || Ok((one.manifests().await?.len() == 2).then_some(()))).await?;

    // A selector on a module that is not restricted hides it.
    let mut body = release_meta("open", &[("regular", "1.0.0")]);
    body["spec"]["kymaSelector"] = team("c");
    apply::<ModuleReleaseMeta>(&one, "open", &body).await?;
    modules_are(&one, &["locked"]).await?;
    let status =
        one.kcp_status("the error", |status| module(status, "open").is_some_and(|it| it.state == State::Error));
    let message = module(&status.await?, "open").and_then(|open| open.message.clone()).context("a message")?;
    assert!(message.ends_with("module has kymaSelector but is not in restricted modules list"), "{message}");
    Ok(())
}

/// Sets labels of a template in KCP, as its operator.
async fn relabel(one: &One, template: &str, labels: Value) -> Result<()> {
    let api = Api::<ModuleTemplate>::namespaced(one.landscape.operator(), one.landscape.namespace());
    let labels = Patch::Merge(json!({"metadata": {"labels": labels}}));
    api.patch(template, &PatchParams::default(), &labels).await?;
    Ok(())
}

#[tokio::test]
async fn a_template_that_is_relabelled_goes_and_comes_back_with_its_channel() -> Tested {
    let one = One::without_agent("relabelled", &[KEDA]).await?;
    synced(&one).await?;
    let metas = user_api::<ModuleReleaseMeta>(&one).await?;
    for key in [label::BETA, label::INTERNAL] {
        for (value, seen) in [(json!("true"), false), (Value::Null, true)] {
            relabel(&one, "keda-1.1.0", json!({key: value})).await?;
            until(&format!("{key}={value} in the runtime"), async || {
                let has_channel = metas.get("keda").await?.spec.version_of("fast").is_some();
                let has_template = names::<ModuleTemplate>(&one).await?.contains("keda-1.1.0");
                Ok((has_channel == seen && has_template == seen).then_some(()))
            })
            .await?;
            assert_eq!(metas.get("keda").await?.spec.version_of("regular"), Some("1.0.0"), "nothing else moves");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_module_that_a_plain_kyma_may_not_have_is_in_error_until_it_may() -> Tested {
    let one = One::start("not-allowed", &[KEDA, ("serverless", "1.0.0", "1.0.0")]).await?;
    synced(&one).await?;
    relabel(&one, "serverless-1.0.0", json!({label::BETA: "true"})).await?;
    until("the module to go", async || {
        Ok((!names::<ModuleReleaseMeta>(&one).await?.contains("serverless")).then_some(()))
    })
    .await?;
    one.runtime.select(&["serverless"]).await?;
    let is_in = |state: State| {
        move |status: &tidewatch_shared::api::KymaStatus| {
            module(status, "serverless").is_some_and(|it| it.state == state)
        }
    };
    let status = one.skr_status("the error", is_in(State::Error)).await?;
    let message = module(&status, "serverless").and_then(|it| it.message.clone());
    assert_eq!(message.as_deref(), Some("module template not allowed: beta module"));
    assert_eq!((status.state(), one.manifests().await?.len()), (State::Error, 0));

    relabel(&one, "serverless-1.0.0", json!({label::BETA: null})).await?;
    one.skr_status("the module on its way", is_in(State::Processing)).await?;
    let manifest = one.manifests().await?.pop().context("the Manifest")?;
    // As whoever installs modules does.
    let manifests = Api::<Manifest>::namespaced(one.landscape.operator(), one.landscape.namespace());
    let ready = Patch::Merge(json!({"status": {"state": "Ready"}}));
    manifests.patch_status(&manifest.name_any(), &PatchParams::default(), &ready).await?;
    let status = one.skr_status("the module to be ready", is_in(State::Ready)).await?;
    assert_eq!(status.state(), State::Ready);
    Ok(())
}
