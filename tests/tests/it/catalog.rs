//! Catalog sync on real control planes (`acceptance.md` 25, 38; `03`, Catalog sync).

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    names::SKR_NAMESPACE,
};
use tidewatch_tests::{
    control_plane::{Person, audit::Write},
    landscape::{catalog::template, until},
};

use crate::support::{One, Tested};

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
    let writes: Vec<_> =
        of_catalog(&writes).into_iter().map(|write| (write.verb.as_str(), write.name.as_str())).collect();
    // 1.0.0 is not named by any channel now, so its template goes.
    assert_eq!(writes.iter().filter(|(verb, _)| *verb == "patch").collect::<Vec<_>>(), [&("patch", "keda")]);
    assert_eq!(writes.iter().filter(|(verb, _)| *verb != "patch").collect::<Vec<_>>(), [&("delete", "keda-1.0.0")]);
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
