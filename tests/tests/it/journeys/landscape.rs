//! Writes of the broker and of the infrastructure manager, each as its sources have it; see the contracts in
//! `tests/data/tools`.

use anyhow::{Context as _, Result};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::json;
use tidewatch_api::names::{KUBECONFIG_KEY, label};
use tidewatch_testing::landscape::Landscape;

use crate::support::Fleet;

const LAST_SYNC: &str = "operator.kyma-project.io/last-sync";
const PURGE: &str = "operator.kyma-project.io/purge-finalizer";

/// The broker: it writes Kymas of KCP, untyped and whole.
pub(super) struct Broker {
    kymas: Api<DynamicObject>,
}

impl Broker {
    pub(super) fn of(fleet: &Fleet) -> Self {
        let landscape: &Landscape = &fleet.landscape;
        let kind = GroupVersionKind::gvk("operator.kyma-project.io", "v1beta2", "Kyma");
        let resource = ApiResource::from_gvk_with_plural(&kind, "kymas");
        Self { kymas: Api::namespaced_with(landscape.operator(), landscape.namespace(), &resource) }
    }

    pub(super) async fn create_kyma(&self, name: &str, runtime_id: &str) -> Result<()> {
        let kyma = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {
                "name": name,
                "annotations": {"skr-domain": format!("{name}.kyma.example.test")},
                "labels": {
                    label::INSTANCE_ID: format!("instance-{name}"), label::RUNTIME_ID: runtime_id,
                    "kyma-project.io/broker-plan-id": "361c511f-f939-4621-b228-d0fb79a1fe15",
                    "kyma-project.io/broker-plan-name": "aws",
                    label::GLOBAL_ACCOUNT_ID: "ga", "kyma-project.io/subaccount-id": "sa",
                    "kyma-project.io/shoot-name": name, "kyma-project.io/region": "eu-central-1",
                    "kyma-project.io/platform-region": "cf-eu10", "kyma-project.io/provider": "AWS",
                    label::KYMA_NAME: name, label::MANAGED_BY: "lifecycle-manager",
                },
            },
            "spec": {"channel": "regular", "modules": []},
        });
        self.kymas.create(&PostParams::default(), &serde_json::from_value(kyma)?).await?;
        Ok(())
    }

    /// Changes a label by one PUT of the object as just read. Returns false for a conflict.
    pub(super) async fn try_label(&self, name: &str, label: &str, value: &str) -> Result<bool> {
        let mut kyma = self.kymas.get(name).await?;
        kyma.labels_mut().insert(label.to_owned(), value.to_owned());
        match self.kymas.replace(name, &PostParams::default(), &kyma).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.is_conflict() => Ok(false),
            Err(error) => Err(error).context("change a label"),
        }
    }

    pub(super) async fn delete_kyma(&self, name: &str) -> Result<()> {
        self.kymas.delete(name, &DeleteParams::background()).await?;
        Ok(())
    }

    /// Adds the finalizer that the purge controller of lifecycle-manager leaves on every Kyma.
    pub(super) async fn add_purge_finalizer(&self, name: &str) -> Result<()> {
        let patch = serde_json::from_value(json!([{"op": "add", "path": "/metadata/finalizers/-", "value": PURGE}]))?;
        self.kymas.patch(name, &PatchParams::default(), &Patch::Json::<()>(patch)).await?;
        Ok(())
    }
}

/// The access Secret of a Kyma, as the infrastructure manager writes it.
pub(super) struct Access {
    secrets: Api<Secret>,
    kyma: String,
}

impl Access {
    pub(super) fn of(fleet: &Fleet, kyma: &str) -> Self {
        let landscape: &Landscape = &fleet.landscape;
        Self { secrets: Api::namespaced(landscape.operator(), landscape.namespace()), kyma: kyma.to_owned() }
    }

    fn name(&self) -> String {
        format!("kubeconfig-{}", self.kyma)
    }

    pub(super) async fn create(&self, kubeconfig: &str) -> Result<()> {
        let secret = json!({
            "metadata": {
                "name": self.name(),
                "annotations": {LAST_SYNC: "2026-11-28T12:00:00Z"},
                "labels": {
                    label::KYMA_NAME: self.kyma, "operator.kyma-project.io/cluster-name": self.kyma,
                    label::MANAGED_BY: "infrastructure-manager",
                },
            },
            "stringData": {KUBECONFIG_KEY: kubeconfig},
        });
        self.secrets.create(&PostParams::default(), &serde_json::from_value(secret)?).await?;
        Ok(())
    }

    /// Writes another text, and the time of the write.
    pub(super) async fn rotate(&self, kubeconfig: &str) -> Result<()> {
        let mut secret = self.secrets.get(&self.name()).await?;
        let config = ByteString(kubeconfig.as_bytes().to_vec());
        secret.data.get_or_insert_default().insert(KUBECONFIG_KEY.to_owned(), config);
        secret.annotations_mut().insert(LAST_SYNC.to_owned(), "2026-11-28T20:00:00Z".to_owned());
        self.secrets.replace(&self.name(), &PostParams::default(), &secret).await?;
        Ok(())
    }

    /// The first half of a forced rotation.
    pub(super) async fn remove_config(&self) -> Result<()> {
        let mut secret = self.secrets.get(&self.name()).await?;
        secret.data.get_or_insert_default().remove(KUBECONFIG_KEY);
        secret.annotations_mut().remove(LAST_SYNC);
        self.secrets.replace(&self.name(), &PostParams::default(), &secret).await?;
        Ok(())
    }

    pub(super) async fn delete(&self) -> Result<()> {
        self.secrets.delete(&self.name(), &DeleteParams::default()).await?;
        Ok(())
    }
}
