//! Our definitions in a runtime come back, with all that is ours of them, and nothing else is touched.

use anyhow::{Context as _, Result};
use k8s_openapi::{
    api::core::v1::ConfigMap, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    names::{GROUP, SKR_NAMESPACE},
};
use tidewatch_tests::{
    control_plane::Person,
    landscape::{catalog::template, until},
};

use crate::support::{One, Tested, condition, module};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");
/// The condition that tells of it.
const SYNC: &str = "CRDsSync";

/// What users have in a runtime.
struct Theirs {
    crds: Api<CustomResourceDefinition>,
    maps: Api<ConfigMap>,
    templates: Api<ModuleTemplate>,
    metas: Api<ModuleReleaseMeta>,
}

impl Theirs {
    async fn of(one: &One) -> Result<Self> {
        let client = one.runtime.cluster().client_as(Person::User).await?;
        Ok(Self {
            crds: Api::all(client.clone()),
            maps: Api::namespaced(client.clone(), "default"),
            templates: Api::namespaced(client.clone(), SKR_NAMESPACE),
            metas: Api::namespaced(client, SKR_NAMESPACE),
        })
    }

    /// A kind and an object of their own.
    async fn write(&self) -> Result<()> {
        let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let crd = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "things.example.test"},
            "spec": {"group": "example.test", "scope": "Namespaced",
                "names": {"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"},
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}]},
        });
        self.crds.create(&PostParams::default(), &serde_json::from_value(crd)?).await?;
        let is_served = |crd: &CustomResourceDefinition| {
            let conditions = crd.status.iter().flat_map(|status| status.conditions.iter().flatten());
            conditions.into_iter().any(|condition| condition.type_ == "Established" && condition.status == "True")
        };
        until("the user's kind", async || {
            Ok(self.crds.get("things.example.test").await.ok().filter(is_served).map(drop))
        })
        .await?;
        let map = json!({"metadata": {"name": "theirs"}, "data": {"a": "b"}});
        self.maps.create(&PostParams::default(), &serde_json::from_value(map)?).await?;
        Ok(())
    }

    /// The versions of what is theirs.
    async fn versions(&self) -> Result<[Option<String>; 2]> {
        let crd = self.crds.get("things.example.test").await?.resource_version();
        Ok([crd, self.maps.get("theirs").await?.resource_version()])
    }

    /// Waits until the definition is as it was, and the Kyma and the catalog are there with all that they had.
    async fn whole(&self, one: &One, crd: &CustomResourceDefinition) -> Result<()> {
        until(&format!("{} and all that is of it", crd.name_any()), async || {
            let is = self.crds.get(&crd.name_any()).await?;
            let is_same = is.spec == crd.spec && is.labels() == crd.labels();
            let templates = ["keda-1.0.0", "keda-1.1.0"].map(async |name| self.templates.get_opt(name).await);
            let [low, high] = templates;
            let has_catalog =
                low.await?.is_some() && high.await?.is_some() && self.metas.get_opt("keda").await?.is_some();
            let kyma = one.runtime.skr_kyma().await?;
            let selects = kyma.is_some_and(|kyma| kyma.spec.modules().iter().any(|module| module.name == "keda"));
            Ok((is_same && is.metadata.deletion_timestamp.is_none() && has_catalog && selects).then_some(()))
        })
        .await?;
        one.kcp_status("the condition", |status| status.condition(SYNC).is_some_and(|said| said.is_true())).await?;
        Ok(())
    }
}

/// Another schema of the one version, and more names: an edit and an addition.
fn tampered(crd: &CustomResourceDefinition) -> [Value; 2] {
    let mut versions = json!(crd.spec.versions);
    versions[0]["schema"]["openAPIV3Schema"]["properties"]["spec"] =
        json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    [json!({"spec": {"versions": versions}}), json!({"spec": {"names": {"categories": ["everything"]}}})]
}

#[tokio::test]
async fn our_definitions_come_back_with_all_that_is_ours_and_nothing_else_is_touched() -> Tested {
    let one = One::start("definitions", &[KEDA]).await?;
    let theirs = Theirs::of(&one).await?;
    theirs.write().await?;
    one.runtime.select(&["keda"]).await?;
    one.kcp_status("the module", |status| module(status, "keda").is_some_and(|keda| keda.manifest.is_some())).await?;
    let manifest = async || Ok::<_, anyhow::Error>(one.manifests().await?.first().and_then(|found| found.uid()));
    let (versions, installed) = (theirs.versions().await?, manifest().await?);
    for plural in ["kymas", "moduletemplates", "modulereleasemetas"] {
        let before = theirs.crds.get(&format!("{plural}.{GROUP}")).await?;
        theirs.whole(&one, &before).await?;
        for edit in tampered(&before) {
            let edited = theirs.crds.patch(&before.name_any(), &PatchParams::default(), &Patch::Merge(&edit)).await?;
            assert_ne!(edited.spec, before.spec, "the user's write must be a change");
            theirs.whole(&one, &before).await?;
        }
        theirs.crds.delete(&before.name_any(), &DeleteParams::default()).await?;
        until("another definition", async || {
            Ok(theirs.crds.get_opt(&before.name_any()).await?.filter(|crd| crd.uid() != before.uid()).map(drop))
        })
        .await?;
        theirs.whole(&one, &before).await?;
    }
    assert_eq!(theirs.versions().await?, versions);
    assert_eq!(manifest().await?, installed, "nothing was uninstalled meanwhile");
    Ok(())
}

#[tokio::test]
async fn a_definition_that_cannot_go_is_told_until_it_is_back() -> Tested {
    let one = One::start("terminating", &[KEDA]).await?;
    let theirs = Theirs::of(&one).await?;
    one.runtime.select(&["keda"]).await?;
    let before = theirs.crds.get(&format!("moduletemplates.{GROUP}")).await?;
    theirs.whole(&one, &before).await?;
    let mut mine = template("mine", "1.0.0");
    mine["metadata"]["finalizers"] = json!(["example.test/held"]);
    theirs.templates.create(&PostParams::default(), &serde_json::from_value(mine)?).await?;
    theirs.crds.delete(&before.name_any(), &DeleteParams::default()).await?;
    let told = one.kcp_status("what is wrong", |status| status.condition(SYNC).is_some_and(|said| !said.is_true()));
    let (_, message) = condition(&told.await?, SYNC)?;
    assert!(
        message.ends_with(&format!(": the CRD moduletemplates.{GROUP} is being deleted in the runtime")),
        "{message}"
    );

    let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    theirs.templates.patch("mine-1.0.0", &PatchParams::default(), &free).await?;
    let after = until("another definition", async || {
        Ok(theirs.crds.get_opt(&before.name_any()).await?.filter(|crd| crd.uid() != before.uid()))
    });
    assert_eq!(after.await.context("it comes back")?.spec, before.spec);
    theirs.whole(&one, &before).await?;
    Ok(())
}
