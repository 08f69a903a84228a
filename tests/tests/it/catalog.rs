//! Catalog sync on real control planes (`acceptance.md` 25-28, 36, 38; `03`, Catalog sync and Which Kymas wake).

mod commands;

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Resource, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tidewatch_shared::{
    api::{Kyma, ModuleReleaseMeta, ModuleTemplate, State},
    names::{CATALOG_INVENTORY, RELEASES, SKR_NAMESPACE, annotation, label},
};
use tidewatch_tests::{
    control_plane::{Person, audit::Write},
    http,
    landscape::{
        DEADLINE, Options,
        catalog::{release_meta, template},
        until,
    },
};

use crate::support::{One, Tested, condition, module, quick};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

async fn names<K>(one: &One) -> Result<BTreeSet<String>>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let api = Api::<K>::namespaced(one.runtime.cluster().client().await?, SKR_NAMESPACE);
    Ok(api.list(&Default::default()).await?.items.iter().map(|object| object.name_any()).collect())
}

async fn user_api<K>(one: &One) -> Result<Api<K>>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>,
{
    Ok(Api::namespaced(one.runtime.cluster().client_as(Person::User).await?, SKR_NAMESPACE))
}

async fn synced(one: &One) -> Result<()> {
    until("the catalog in the runtime", async || {
        let whole =
            names::<ModuleReleaseMeta>(one).await?.contains("keda") && names::<ModuleTemplate>(one).await?.len() >= 2;
        Ok(whole.then_some(()))
    })
    .await
}

fn of_catalog(writes: &[Write]) -> Vec<&Write> {
    let catalog = |write: &&Write| write.resource == "moduletemplates" || write.resource == "modulereleasemetas";
    writes.iter().filter(|write| write.user != Person::User.name()).filter(catalog).collect()
}

/// What was called for the catalog: verb and name.
fn calls(writes: &[Write]) -> Vec<(&str, &str)> {
    of_catalog(writes).into_iter().map(|write| (write.verb.as_str(), write.name.as_str())).collect()
}

fn spec<K: Serialize>(object: &K) -> Result<Value> {
    Ok(serde_json::to_value(object)?["spec"].clone())
}

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
async fn a_moved_channel_is_one_patch_and_its_echo_is_nothing() -> Tested {
    let one = One::start("patches", &[KEDA]).await?;
    synced(&one).await?;
    one.quiet().await?;
    let mark = one.runtime.cluster().audit_mark()?;
    one.landscape.write_channels("keda", &[("regular", "1.1.0"), ("fast", "1.1.0")]).await?;
    let metas = user_api::<ModuleReleaseMeta>(&one).await?;
    until("the channel in the runtime", async || {
        Ok((metas.get("keda").await?.spec.version_of("regular") == Some("1.1.0")).then_some(()))
    })
    .await?;
    let writes = one.after_canaries(mark, 4).await?;
    // 1.0.0 is not named by any channel now, but can still be installed.
    assert_eq!(calls(&writes), [("patch", "keda")]);
    Ok(())
}

#[tokio::test]
async fn what_users_do_to_the_catalog_is_undone_and_what_is_theirs_stays() -> Tested {
    let one = One::start("tamper", &[KEDA]).await?;
    synced(&one).await?;
    let (metas, templates) = (user_api::<ModuleReleaseMeta>(&one).await?, user_api::<ModuleTemplate>(&one).await?);
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
    // Labels that are not ours, and ours taken away.
    for labels in [json!({"added": "label"}), json!({"operator.kyma-project.io/managed-by": null})] {
        templates
            .patch("keda-1.0.0", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"labels": labels}})))
            .await?;
        until("the template's labels as they were", async || {
            let labels = templates.get("keda-1.0.0").await?.metadata.labels.unwrap_or_default();
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
async fn what_leaves_kcp_leaves_the_runtime() -> Tested {
    let one = One::without_agent("leave", &[KEDA, ("warden", "2.0.0", "2.1.0")]).await?;
    synced(&one).await?;
    until("both modules", async || Ok(names::<ModuleReleaseMeta>(&one).await?.contains("warden").then_some(())))
        .await?;
    one.landscape.delete_template("keda", "1.1.0").await?;
    until("the template and its channel to go", async || {
        let meta = user_api::<ModuleReleaseMeta>(&one).await?.get("keda").await?;
        Ok((meta.spec.version_of("fast").is_none() && !names::<ModuleTemplate>(&one).await?.contains("keda-1.1.0"))
            .then_some(()))
    })
    .await?;
    let metas = Api::<ModuleReleaseMeta>::namespaced(one.landscape.kcp().client().await?, one.landscape.namespace());
    metas.delete("warden", &DeleteParams::default()).await?;
    until("the module to go", async || {
        let templates = names::<ModuleTemplate>(&one).await?;
        let gone = !names::<ModuleReleaseMeta>(&one).await?.contains("warden");
        Ok((gone && templates == ["keda-1.0.0".to_owned()].into()).then_some(()))
    })
    .await?;
    Ok(())
}

/// Writes to KCP's catalog as its operator.
async fn apply<K>(one: &One, name: &str, body: &Value) -> Result<()>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let api = Api::<K>::namespaced(one.landscape.operator(), one.landscape.namespace());
    api.patch(name, &PatchParams::apply("operator").force(), &Patch::Apply(body)).await?;
    Ok(())
}

async fn set_labels(one: &One, labels: Value) -> Result<()> {
    let labels = Patch::Merge(json!({"metadata": {"labels": labels}}));
    one.kcp_kymas().await?.patch(one.runtime.name(), &PatchParams::default(), &labels).await?;
    Ok(())
}

/// Waits until exactly these modules are in the runtime's catalog, with their templates.
async fn modules_are(one: &One, modules: &[&str]) -> Result<()> {
    until(&format!("the modules {modules:?} and no others"), async || {
        let metas = names::<ModuleReleaseMeta>(one).await?;
        let templates: BTreeSet<_> = names::<ModuleTemplate>(one).await?;
        let expected: BTreeSet<_> = modules.iter().map(|module| (*module).to_owned()).collect();
        let of_templates: BTreeSet<_> =
            templates.iter().filter_map(|name| Some(name.strip_suffix("-1.0.0")?.to_owned())).collect();
        Ok((metas == expected && of_templates == expected).then_some(()))
    })
    .await
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

async fn inventory(one: &One) -> Result<Option<ConfigMap>> {
    let api = Api::<ConfigMap>::namespaced(one.runtime.cluster().client().await?, SKR_NAMESPACE);
    Ok(api.get_opt(CATALOG_INVENTORY).await?)
}

#[tokio::test]
async fn a_new_process_goes_by_the_inventory_and_makes_a_lost_one_anew() -> Tested {
    let one = One::start("ledger", &[KEDA]).await?;
    synced(&one).await?;
    one.quiet().await?;
    let written = inventory(&one).await?.context("the inventory")?;
    let objects = written.data.clone().unwrap_or_default()["objects"].clone();
    assert_eq!(objects.lines().count(), 3, "{objects}");
    for line in objects.lines() {
        let [id, hash, uid, generation] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        assert!(hash.len() == 64 && uid.len() == 36 && generation == "1", "{id}");
    }

    let mark = one.runtime.cluster().audit_mark()?;
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    one.landscape.write_channels("keda", &[("regular", "1.1.0"), ("fast", "1.1.0")]).await?;
    one.landscape.start_receiver().await?;
    let metas = user_api::<ModuleReleaseMeta>(&one).await?;
    until("what changed meanwhile", async || {
        Ok((metas.get("keda").await?.spec.version_of("regular") == Some("1.1.0")).then_some(()))
    })
    .await?;
    let writes = one.after_canaries(mark, 4).await?;
    assert_eq!(calls(&writes), [("patch", "keda")]);

    let api = Api::<ConfigMap>::namespaced(one.runtime.cluster().client().await?, SKR_NAMESPACE);
    api.delete(CATALOG_INVENTORY, &DeleteParams::default()).await?;
    let mark = one.runtime.cluster().audit_mark()?;
    one.landscape.write_template("keda", "1.2.0").await?;
    until("the inventory as it was, with the new version", async || {
        let objects = inventory(&one).await?.and_then(|map| map.data).unwrap_or_default();
        Ok(objects.get("objects").filter(|objects| objects.lines().count() == 4).map(drop))
    })
    .await?;
    let writes = one.after_canaries(mark, 2).await?;
    assert_eq!(calls(&writes), [("patch", "keda-1.2.0")]);
    Ok(())
}

#[tokio::test]
async fn a_fixed_version_stays_and_a_deprecated_one_is_told_of() -> Tested {
    let one = One::start("fixed", &[KEDA]).await?;
    synced(&one).await?;
    one.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "version": "1.0.0"}]}})).await?;
    let runs = async |version: &str| {
        until(&format!("the version {version}"), async || {
            let manifests = one.manifests().await?;
            Ok(manifests.first().filter(|manifest| manifest.spec.version.as_deref() == Some(version)).map(drop))
        })
        .await
    };
    runs("1.0.0").await?;
    let manifest = one.manifests().await?.remove(0);
    assert!(!manifest.labels().contains_key(label::CHANNEL));
    let mut body = release_meta("keda", &[("regular", "1.1.0"), ("fast", "1.1.0")]);
    body["spec"]["versions"] = json!([
        {"version": "1.0.0", "deprecationDate": "2031-01-31", "deprecationMessage": "use 1.1.0"}]);
    apply::<ModuleReleaseMeta>(&one, "keda", &body).await?;
    let metas = user_api::<ModuleReleaseMeta>(&one).await?;
    until("the deprecation in the runtime", async || {
        let meta = metas.get("keda").await?;
        let told = meta.spec.versions().iter().any(|it| it.deprecation_message.as_deref() == Some("use 1.1.0"));
        Ok((told && meta.spec.version_of("regular") == Some("1.1.0")).then_some(()))
    })
    .await?;
    let said = "version 1.0.0 of module keda is deprecated as of 2031-01-31: use 1.1.0";
    one.runtime.patch_kyma(&json!({"metadata": {"annotations": {"look": "again"}}})).await?;
    one.runtime.patch_kyma(&json!({"spec": {"channel": "fast"}})).await?;
    let status = one.skr_status("the deprecation", |status| {
        module(status, "keda").is_some_and(|it| it.message.as_deref() == Some(said))
    });
    let keda = module(&status.await?, "keda").cloned().context("the module")?;
    assert_eq!((keda.state, keda.version.as_deref(), keda.channel), (State::Processing, Some("1.0.0"), None));

    one.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "version": "1.1.0"}]}})).await?;
    runs("1.1.0").await?;
    let both = json!({"spec": {"modules": [{"name": "keda", "version": "1.1.0", "channel": "fast"}]}});
    one.runtime.patch_kyma(&both).await?;
    let status =
        one.skr_status("the error", |status| module(status, "keda").is_some_and(|it| it.state == State::Error));
    let message = module(&status.await?, "keda").and_then(|keda| keda.message.clone()).context("a message")?;
    assert_eq!(message, "invalid module in spec: version and channel are mutually exclusive");
    runs("1.1.0").await?;
    Ok(())
}

#[tokio::test]
async fn a_channel_that_moves_is_rolled_out_over_time_and_seen_at_once() -> Tested {
    // A random time within a day: nobody's turn comes while this test runs.
    let one = One::with("rollout", &[KEDA], Options { rollout_seconds: 86_400, ..quick() }).await?;
    one.runtime.start_agent().await?;
    synced(&one).await?;
    one.runtime.select(&["keda"]).await?;
    let version =
        async || Ok::<_, anyhow::Error>(one.manifests().await?.first().and_then(|it| it.spec.version.clone()));
    until("the Manifest", async || Ok(version().await?.map(drop))).await?;
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
    assert_eq!(version().await?.as_deref(), Some("1.0.0"));

    // When the channel moved is written down.
    let releases = Api::<ConfigMap>::namespaced(one.landscape.operator(), one.landscape.namespace());
    let since = async || {
        let data = releases.get(RELEASES).await?.data.unwrap_or_default();
        let accepted: Value = serde_json::from_str(&data["accepted"])?;
        anyhow::Ok(accepted["keda"]["channels"]["regular"]["since"].as_i64())
    };
    let before = since().await?.context("since when it points there")?;
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    one.landscape.start_receiver().await?;
    until("a condition of the new process", async || {
        Ok(one.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status?.condition("EventPath").map(drop)))
    })
    .await?;
    assert_eq!(since().await?, Some(before));
    // What the user changes is acted on with all that is known.
    one.runtime.patch_kyma(&json!({"spec": {"channel": "fast"}})).await?;
    until("the version", async || Ok(version().await?.filter(|version| version == "1.1.0").map(drop))).await?;
    Ok(())
}

#[tokio::test]
async fn a_removal_from_many_waits_until_it_is_confirmed() -> Tested {
    let one = One::without_agent("guard", &[KEDA, ("warden", "1.0.0", "1.0.0")]).await?;
    synced(&one).await?;
    // They have no runtime that could be reached, and count.
    for n in 0..4 {
        let kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": format!("more-{n}")}, "spec": {"channel": "regular"}});
        apply::<Kyma>(&one, &format!("more-{n}"), &kyma).await?;
    }
    let releases = Api::<ConfigMap>::namespaced(one.landscape.operator(), one.landscape.namespace());
    let admin = one.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    until("the receiver to know of all of them", async || {
        let (_, report) = http::get(admin, "/fleet", DEADLINE).await?;
        let report: Value = serde_json::from_str(&report)?;
        Ok((report["summary"]["kymas"] == 5).then_some(()))
    })
    .await?;
    let metas = Api::<ModuleReleaseMeta>::namespaced(one.landscape.operator(), one.landscape.namespace());
    metas.delete("warden", &DeleteParams::default()).await?;
    let held = until("the removal to be held", async || {
        let data = releases.get(RELEASES).await?.data.unwrap_or_default();
        Ok(data.get("held").cloned())
    })
    .await?;
    let held: Value = serde_json::from_str(&held)?;
    assert_eq!((&held["modules"], held["of"].as_u64()), (&json!(["warden"]), Some(5)), "{held}");
    let status = one.kcp_status("the condition", |status| {
        status.condition("ModuleCatalog").is_some_and(|said| said.message.contains("waits until"))
    });
    let change = held["change"].as_str().context("a name")?;
    let (holds, message) = condition(&status.await?, "ModuleCatalog")?;
    assert!(holds && message.contains("a removal of warden") && message.contains(change), "{message}");
    assert!(names::<ModuleReleaseMeta>(&one).await?.contains("warden"));
    // A new process holds it too, and what is not held goes on.
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    one.landscape.write_template("keda", "1.2.0").await?;
    one.landscape.start_receiver().await?;
    until("the new version", async || Ok(names::<ModuleTemplate>(&one).await?.contains("keda-1.2.0").then_some(())))
        .await?;
    assert!(names::<ModuleReleaseMeta>(&one).await?.contains("warden"));

    let confirmed = Patch::Merge(json!({"metadata": {"annotations": {annotation::CONFIRM: change}}}));
    releases.patch(RELEASES, &PatchParams::default(), &confirmed).await?;
    until("the module to go", async || {
        let metas = names::<ModuleReleaseMeta>(&one).await?;
        let templates = names::<ModuleTemplate>(&one).await?;
        Ok((!metas.contains("warden") && !templates.contains("warden-1.0.0")).then_some(()))
    })
    .await?;
    let confirmation =
        async || anyhow::Ok(releases.get(RELEASES).await?.annotations().get(annotation::CONFIRM).cloned());
    until("the confirmation to be used up", async || Ok(confirmation().await?.is_none().then_some(()))).await?;
    until("the condition as it was", async || {
        let status = one.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status).context("a status")?;
        Ok((condition(&status, "ModuleCatalog")?.1 == "module templates are synchronized").then_some(()))
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn what_one_runtime_refuses_is_named_and_holds_up_nothing_else() -> Tested {
    let one = One::start("refuses", &[KEDA]).await?;
    synced(&one).await?;
    // The user's own rule: no template of this version.
    let admission = one.runtime.cluster().client().await?;
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
    let templates = user_api::<ModuleTemplate>(&one).await?;
    until("the rule to hold", async || {
        let mine = serde_json::from_value(template("keda", "2.0.0"))?;
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        Ok(templates.create(&dry, &mine).await.is_err().then_some(()))
    })
    .await?;
    one.landscape.write_template("keda", "2.0.0").await?;
    one.landscape.write_template("keda", "2.1.0").await?;
    let status = one.kcp_status("the condition", |status| {
        status.condition("ModuleCatalog").is_some_and(|said| said.message.contains("moduletemplates/keda-2.0.0"))
    });
    let (holds, message) = condition(&status.await?, "ModuleCatalog")?;
    assert!(!holds && message.contains("not this one"), "{message}");
    until("the other template", async || Ok(templates.get_opt("keda-2.1.0").await?.map(drop))).await?;
    // The user is served at once all the same.
    one.runtime.select(&["keda"]).await?;
    until("the Manifest", async || Ok(one.manifests().await?.first().map(drop))).await?;

    bindings.delete("no-two", &DeleteParams::default()).await?;
    until("the template, by a later try", async || Ok(templates.get_opt("keda-2.0.0").await?.map(drop))).await?;
    let status =
        one.kcp_status("the condition", |status| status.condition("ModuleCatalog").is_some_and(|said| said.is_true()));
    assert_eq!(condition(&status.await?, "ModuleCatalog")?.1, "module templates are synchronized");
    Ok(())
}
