//! Taking over from the incumbent: its CRDs give way to ours in place, although they still list a version that ours have not.

use anyhow::Result;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tidewatch_shared::api::crds::runtime_crds;
use tidewatch_tests::{bed, control_plane::Person, landscape::until};

use crate::support::{One, Tested};

/// A runtime in which the incumbent was: its CRDs with both versions, `v1beta1` among the stored ones, and an object of a user's.
async fn incumbent(name: &str) -> Result<()> {
    let cluster = bed::shared().await?.runtime(name).await?;
    let api = Api::<CustomResourceDefinition>::all(cluster.client_as(Person::Other).await?);
    for crd in runtime_crds() {
        let mut old = crd.clone();
        let mut beta1 = old.spec.versions[0].clone();
        beta1.name = "v1beta1".to_owned();
        // Stored first as v1beta1, as it was years ago.
        (beta1.storage, beta1.served) = (true, true);
        old.spec.versions[0].storage = false;
        old.spec.versions.push(beta1);
        let created = api.create(&PostParams::default(), &old).await?;
        until("v1beta1 to be stored", async || {
            let stored = api
                .get(&created.name_any())
                .await?
                .status
                .and_then(|status| status.stored_versions)
                .unwrap_or_default();
            Ok(stored.contains(&"v1beta1".to_owned()).then_some(()))
        })
        .await?;
        let versions = json!({"spec": {"versions": old.spec.versions.iter().map(|version| {
            let mut version = version.clone();
            (version.storage, version.served) = (version.name == "v1beta2", version.name == "v1beta2");
            version
        }).collect::<Vec<_>>()}});
        api.patch(&created.name_any(), &PatchParams::default(), &Patch::Merge(versions)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn our_crds_take_the_place_of_the_incumbents() -> Tested {
    incumbent("takeover").await?;
    let one = One::without_agent("takeover", &[("keda", "1.0.0", "1.1.0")]).await?;
    one.skr_status("readiness", |status| status.state() == tidewatch_shared::api::State::Ready).await?;
    let api = Api::<CustomResourceDefinition>::all(one.runtime.cluster().client().await?);
    for crd in runtime_crds() {
        let there = api.get(&crd.name_any()).await?;
        let versions: Vec<_> = there.spec.versions.iter().map(|version| version.name.as_str()).collect();
        assert_eq!(versions, ["v1beta2"], "{}", crd.name_any());
        let stored = there.status.and_then(|status| status.stored_versions);
        assert_eq!(stored, Some(vec!["v1beta2".to_owned()]), "{}", crd.name_any());
    }
    Ok(())
}
