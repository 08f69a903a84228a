//! Minimal writes to the runtime's catalog: only differences are written, a user's changes are reverted, and a refused
//! object does not hold up other work.

use super::*;

#[tokio::test]
async fn a_moved_channel_is_one_patch_and_its_event_causes_no_write() -> TestResult {
    let setup = SingleRuntime::start("patches", &[KEDA]).await?;
    catalog_is_synced(&setup).await?;
    setup.becomes_idle().await?;
    let mark = setup.runtime.cluster().audit_mark()?;
    setup.landscape.write_channels("keda", &[("regular", "1.1.0"), ("fast", "1.1.0")]).await?;
    let metas = user_api::<ModuleReleaseMeta>(&setup).await?;
    until("the channel in the runtime", async || {
        Ok((metas.get("keda").await?.spec.version_of("regular") == Some("1.1.0")).then_some(()))
    })
    .await?;
    let writes = setup.after_canaries(mark, 4).await?;
    // Template 1.0.0 stays although no channel names it, because it can still be installed.
    assert_eq!(catalog_requests(&writes), [("patch", "keda")]);
    Ok(())
}

#[tokio::test]
async fn user_changes_to_the_catalog_are_reverted_and_user_objects_stay() -> TestResult {
    let setup = SingleRuntime::start("tamper", &[KEDA]).await?;
    catalog_is_synced(&setup).await?;
    let metas = user_api::<ModuleReleaseMeta>(&setup).await?;
    let templates = user_api::<ModuleTemplate>(&setup).await?;
    let mine = template("mine", "1.0.0");
    templates.create(&PostParams::default(), &serde_json::from_value(mine)?).await?;
    let before = metas.get("keda").await?;
    let same = async || Ok((spec(&metas.get("keda").await?)? == spec(&before)?).then_some(()));
    for tampered in [
        json!([{"channel": "regular", "version": "9.9.9"}, {"channel": "fast", "version": "1.1.0"}]),
        json!([{"channel": "regular", "version": "1.0.0"}, {"channel": "fast", "version": "1.1.0"}, {"channel": "added", "version": "1.1.0"}]),
        json!([{"channel": "fast", "version": "1.1.0"}]),
    ] {
        let patch = Patch::Merge(json!({"spec": {"channels": tampered}}));
        let tampered = metas.patch("keda", &PatchParams::default(), &patch).await?;
        assert_ne!(spec(&tampered)?, spec(&before)?, "the user's write must be a change");
        until("the release meta as it was", same).await?;
    }
    let whole = templates.get("keda-1.0.0").await?;
    for tampered in [
        json!({"info": {"repository": "https://example.test/evil"}}),
        json!({"manager": {"group": "apps", "version": "v1", "kind": "Deployment", "name": "another"}}),
        json!({"resources": [{"name": "rawManifest", "link": "https://example.test/evil.yaml"}]}),
    ] {
        let patch = Patch::Merge(json!({"spec": tampered}));
        let tampered = templates.patch("keda-1.0.0", &PatchParams::default(), &patch).await?;
        assert_ne!(spec(&tampered)?, spec(&whole)?, "the user's write must be a change");
        until("the template as it was", async || {
            Ok((spec(&templates.get("keda-1.0.0").await?)? == spec(&whole)?).then_some(()))
        })
        .await?;
    }
    // A foreign label is added, and one of ours is removed; of another template, since the repairs of each are limited.
    for labels in [json!({"added": "label"}), json!({"operator.kyma-project.io/managed-by": null})] {
        templates
            .patch("keda-1.1.0", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"labels": labels}})))
            .await?;
        until("the template's labels as they were", async || {
            let labels = templates.get("keda-1.1.0").await?.metadata.labels.unwrap_or_default();
            let ours = labels.get("operator.kyma-project.io/managed-by").is_some_and(|by| by == "kyma");
            Ok((ours && !labels.contains_key("added")).then_some(()))
        })
        .await?;
    }
    let deleted = templates.get("keda-1.1.0").await?.uid();
    templates.delete("keda-1.1.0", &DeleteParams::default()).await?;
    until("the template to come back", async || {
        Ok(templates.get_opt("keda-1.1.0").await?.filter(|template| template.uid() != deleted).map(drop))
    })
    .await?;
    templates.get("mine-1.0.0").await.context("the user's own template")?;
    Ok(())
}

#[tokio::test]
async fn objects_removed_from_kcp_are_removed_from_the_runtime() -> TestResult {
    let setup = SingleRuntime::without_agent("leave", &[KEDA, ("warden", "2.0.0", "2.1.0")]).await?;
    catalog_is_synced(&setup).await?;
    until("both modules", async || Ok(names::<ModuleReleaseMeta>(&setup).await?.contains("warden").then_some(())))
        .await?;
    setup.landscape.delete_template("keda", "1.1.0").await?;
    until("the template and its channel to go", async || {
        let meta = user_api::<ModuleReleaseMeta>(&setup).await?.get("keda").await?;
        Ok((meta.spec.version_of("fast").is_none() && !names::<ModuleTemplate>(&setup).await?.contains("keda-1.1.0"))
            .then_some(()))
    })
    .await?;
    let metas =
        Api::<ModuleReleaseMeta>::namespaced(setup.landscape.kcp().client().await?, setup.landscape.namespace());
    metas.delete("warden", &DeleteParams::default()).await?;
    until("the module to go", async || {
        let templates = names::<ModuleTemplate>(&setup).await?;
        let gone = !names::<ModuleReleaseMeta>(&setup).await?.contains("warden");
        Ok((gone && templates == ["keda-1.0.0".to_owned()].into()).then_some(()))
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn a_new_process_uses_the_inventory_and_recreates_a_lost_one() -> TestResult {
    let setup = SingleRuntime::start("ledger", &[KEDA]).await?;
    catalog_is_synced(&setup).await?;
    setup.becomes_idle().await?;
    let written = inventory(&setup).await?.context("the inventory")?;
    let objects = written.data.clone().unwrap_or_default()["objects"].clone();
    assert_eq!(objects.lines().count(), 3, "{objects}");
    for line in objects.lines() {
        let [id, hash, uid, generation] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        assert!(hash.len() == 64 && uid.len() == 36 && generation == "1", "{id}");
    }

    let mark = setup.runtime.cluster().audit_mark()?;
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    setup.landscape.write_channels("keda", &[("regular", "1.1.0"), ("fast", "1.1.0")]).await?;
    setup.landscape.start_receiver().await?;
    let metas = user_api::<ModuleReleaseMeta>(&setup).await?;
    until("the changes made meanwhile", async || {
        Ok((metas.get("keda").await?.spec.version_of("regular") == Some("1.1.0")).then_some(()))
    })
    .await?;
    let writes = setup.after_canaries(mark, 4).await?;
    assert_eq!(catalog_requests(&writes), [("patch", "keda")]);

    let api = Api::<ConfigMap>::namespaced(setup.runtime.cluster().client().await?, SKR_NAMESPACE);
    api.delete(CATALOG_INVENTORY, &DeleteParams::default()).await?;
    let mark = setup.runtime.cluster().audit_mark()?;
    setup.landscape.write_template("keda", "1.2.0").await?;
    until("the inventory as it was, with the new version", async || {
        let objects = inventory(&setup).await?.and_then(|map| map.data).unwrap_or_default();
        Ok(objects.get("objects").filter(|objects| objects.lines().count() == 4).map(drop))
    })
    .await?;
    let writes = setup.after_canaries(mark, 2).await?;
    assert_eq!(catalog_requests(&writes), [("patch", "keda-1.2.0")]);
    Ok(())
}

#[tokio::test]
async fn a_refused_object_is_reported_and_delays_no_other_work() -> TestResult {
    let setup = SingleRuntime::start("refuses", &[KEDA]).await?;
    catalog_is_synced(&setup).await?;
    // An admission policy of the user refuses the template of this version.
    let admission = setup.runtime.cluster().client().await?;
    let policies = Api::<kube::core::DynamicObject>::all_with(
        admission.clone(),
        &kube::core::ApiResource::from_gvk(&kube::core::GroupVersionKind::gvk(
            "admissionregistration.k8s.io",
            "v1",
            "ValidatingAdmissionPolicy",
        )),
    );
    let policy = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "no-two"}, "spec": {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [
            {"apiGroups": ["operator.kyma-project.io"], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"],
             "resources": ["moduletemplates"]}]},
        "validations": [{"expression": "object.metadata.name != 'keda-2.0.0'", "message": "not this one"}]}});
    policies.create(&PostParams::default(), &serde_json::from_value(policy)?).await?;
    let bindings = Api::<kube::core::DynamicObject>::all_with(
        admission,
        &kube::core::ApiResource::from_gvk(&kube::core::GroupVersionKind::gvk(
            "admissionregistration.k8s.io",
            "v1",
            "ValidatingAdmissionPolicyBinding",
        )),
    );
    let binding = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "no-two"}, "spec": {"policyName": "no-two", "validationActions": ["Deny"]}});
    bindings.create(&PostParams::default(), &serde_json::from_value(binding)?).await?;
    let templates = user_api::<ModuleTemplate>(&setup).await?;
    until("the rule to hold", async || {
        let mine = serde_json::from_value(template("keda", "2.0.0"))?;
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        Ok(templates.create(&dry, &mine).await.is_err().then_some(()))
    })
    .await?;
    setup.landscape.write_template("keda", "2.0.0").await?;
    setup.landscape.write_template("keda", "2.1.0").await?;
    let status = setup.kcp_status("the condition", |status| {
        status
            .condition("ModuleCatalog")
            .is_some_and(|condition| condition.message.contains("moduletemplates/keda-2.0.0"))
    });
    let (holds, message) = condition(&status.await?, "ModuleCatalog")?;
    assert!(!holds && message.contains("not this one"), "{message}");
    until("the other template", async || Ok(templates.get_opt("keda-2.1.0").await?.map(drop))).await?;
    // The user's next change is reconciled without delay.
    setup.runtime.select(&["keda"]).await?;
    until("the Manifest", async || Ok(setup.manifests().await?.first().map(drop))).await?;

    bindings.delete("no-two", &DeleteParams::default()).await?;
    until("the template, by a later try", async || Ok(templates.get_opt("keda-2.0.0").await?.map(drop))).await?;
    let status = setup.kcp_status("the condition", |status| {
        status.condition("ModuleCatalog").is_some_and(|condition| condition.is_true())
    });
    assert_eq!(condition(&status.await?, "ModuleCatalog")?.1, "module templates are synchronized");
    Ok(())
}
