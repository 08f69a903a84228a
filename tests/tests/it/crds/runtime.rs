//! Restoration of our CRDs in a runtime: they come back together with their custom resources, and no other object is
//! touched.

use anyhow::{Context as _, Result};
use k8s_openapi::{
    api::core::v1::ConfigMap, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    ModuleReleaseMeta, ModuleTemplate,
    names::{GROUP, SKR_NAMESPACE},
};
use tidewatch_testing::{
    control_plane::ClusterUser,
    landscape::{catalog::template, until},
};

use crate::support::{SingleRuntime, TestResult, condition, module};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");
/// The condition that reports a CRD which could not be synced.
const SYNC: &str = "CRDsSync";

/// Objects of the runtime's users, which the receiver must not touch.
struct UserObjects {
    crds: Api<CustomResourceDefinition>,
    maps: Api<ConfigMap>,
    templates: Api<ModuleTemplate>,
    metas: Api<ModuleReleaseMeta>,
}

impl UserObjects {
    async fn of(setup: &SingleRuntime) -> Result<Self> {
        let client = setup.runtime.cluster().client_as(ClusterUser::User).await?;
        Ok(Self {
            crds: Api::all(client.clone()),
            maps: Api::namespaced(client.clone(), "default"),
            templates: Api::namespaced(client.clone(), SKR_NAMESPACE),
            metas: Api::namespaced(client, SKR_NAMESPACE),
        })
    }

    /// Creates a CRD and a ConfigMap of the user.
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
        until("the user's CRD", async || {
            Ok(self.crds.get("things.example.test").await.ok().filter(is_served).map(drop))
        })
        .await?;
        let map = json!({"metadata": {"name": "theirs"}, "data": {"a": "b"}});
        self.maps.create(&PostParams::default(), &serde_json::from_value(map)?).await?;
        Ok(())
    }

    /// Returns the resource versions of the user's objects.
    async fn versions(&self) -> Result<[Option<String>; 2]> {
        let crd = self.crds.get("things.example.test").await?.resource_version();
        Ok([crd, self.maps.get("theirs").await?.resource_version()])
    }

    /// Waits until the CRD has its former spec, and the Kyma and the catalog are complete again.
    async fn is_restored(&self, setup: &SingleRuntime, crd: &CustomResourceDefinition) -> Result<()> {
        until(&format!("{} with its objects", crd.name_any()), async || {
            let is = self.crds.get(&crd.name_any()).await?;
            let is_same = is.spec == crd.spec && is.labels() == crd.labels();
            let templates = ["keda-1.0.0", "keda-1.1.0"].map(async |name| self.templates.get_opt(name).await);
            let [low, high] = templates;
            let has_catalog =
                low.await?.is_some() && high.await?.is_some() && self.metas.get_opt("keda").await?.is_some();
            let kyma = setup.runtime.skr_kyma().await?;
            let selects = kyma.is_some_and(|kyma| kyma.spec.modules().iter().any(|module| module.name == "keda"));
            Ok((is_same && is.metadata.deletion_timestamp.is_none() && has_catalog && selects).then_some(()))
        })
        .await?;
        setup
            .kcp_status("the condition", |status| status.condition(SYNC).is_some_and(|condition| condition.is_true()))
            .await?;
        Ok(())
    }
}

/// Two changes of a CRD: another schema for its one version, and additional names.
fn tampered_versions(crd: &CustomResourceDefinition) -> [Value; 2] {
    let mut versions = json!(crd.spec.versions);
    versions[0]["schema"]["openAPIV3Schema"]["properties"]["spec"] =
        json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    [json!({"spec": {"versions": versions}}), json!({"spec": {"names": {"categories": ["everything"]}}})]
}

#[tokio::test]
async fn changed_crds_are_restored_with_their_objects_and_others_are_untouched() -> TestResult {
    let setup = SingleRuntime::start("definitions", &[KEDA]).await?;
    let user_objects = UserObjects::of(&setup).await?;
    user_objects.write().await?;
    setup.runtime.select(&["keda"]).await?;
    setup.kcp_status("the module", |status| module(status, "keda").is_some_and(|keda| keda.manifest.is_some())).await?;
    let manifest = async || Ok::<_, anyhow::Error>(setup.manifests().await?.first().and_then(|found| found.uid()));
    let versions = user_objects.versions().await?;
    let installed = manifest().await?;
    for plural in ["kymas", "moduletemplates", "modulereleasemetas"] {
        let before = user_objects.crds.get(&format!("{plural}.{GROUP}")).await?;
        user_objects.is_restored(&setup, &before).await?;
        for edit in tampered_versions(&before) {
            let edited =
                user_objects.crds.patch(&before.name_any(), &PatchParams::default(), &Patch::Merge(&edit)).await?;
            assert_ne!(edited.spec, before.spec, "the user's write must be a change");
            user_objects.is_restored(&setup, &before).await?;
        }
        user_objects.crds.delete(&before.name_any(), &DeleteParams::default()).await?;
        until("a new CRD", async || {
            Ok(user_objects.crds.get_opt(&before.name_any()).await?.filter(|crd| crd.uid() != before.uid()).map(drop))
        })
        .await?;
        user_objects.is_restored(&setup, &before).await?;
    }
    assert_eq!(user_objects.versions().await?, versions);
    assert_eq!(manifest().await?, installed, "the Manifest is unchanged");
    Ok(())
}

#[tokio::test]
async fn a_crd_stuck_in_deletion_is_reported_until_it_is_restored() -> TestResult {
    let setup = SingleRuntime::start("terminating", &[KEDA]).await?;
    let user_objects = UserObjects::of(&setup).await?;
    setup.runtime.select(&["keda"]).await?;
    let before = user_objects.crds.get(&format!("moduletemplates.{GROUP}")).await?;
    user_objects.is_restored(&setup, &before).await?;
    let mut mine = template("mine", "1.0.0");
    mine["metadata"]["finalizers"] = json!(["example.test/held"]);
    user_objects.templates.create(&PostParams::default(), &serde_json::from_value(mine)?).await?;
    user_objects.crds.delete(&before.name_any(), &DeleteParams::default()).await?;
    let status = setup
        .kcp_status("the failed sync", |status| status.condition(SYNC).is_some_and(|condition| !condition.is_true()));
    let (_, message) = condition(&status.await?, SYNC)?;
    assert!(
        message.ends_with(&format!(": the CRD moduletemplates.{GROUP} is being deleted in the runtime")),
        "{message}"
    );

    let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    user_objects.templates.patch("mine-1.0.0", &PatchParams::default(), &free).await?;
    let after = until("a new CRD", async || {
        Ok(user_objects.crds.get_opt(&before.name_any()).await?.filter(|crd| crd.uid() != before.uid()))
    });
    assert_eq!(after.await.context("wait for the new CRD")?.spec, before.spec);
    user_objects.is_restored(&setup, &before).await?;
    Ok(())
}
