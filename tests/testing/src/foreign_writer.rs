//! Other writers of a runtime's objects: users with the real kubectl, Helm, an injector of CA bundles, an autoscaler, and
//! operators. Each writes as the field manager and in the way that the program it stands for does.

use std::{path::PathBuf, process::Stdio};

use anyhow::{Context as _, Result, ensure};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DynamicObject, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
    discovery::{self, Scope},
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, process::Command};

use crate::{
    bed,
    control_plane::{Cluster, ClusterUser, Tool},
};

/// A user of a runtime, with all rights.
pub struct ForeignWriter {
    client: Client,
    kubectl: PathBuf,
    kubeconfig: PathBuf,
}

impl ForeignWriter {
    /// # Errors
    /// When there is no kubectl, and none can be built.
    pub async fn new(cluster: &Cluster) -> Result<Self> {
        let kubectl = bed::shared().await?.binaries().get(Tool::Kubectl).await?;
        let client = cluster.client_as(ClusterUser::User).await?;
        Ok(Self { client, kubectl, kubeconfig: cluster.kubeconfig_path(ClusterUser::User) })
    }

    /// Runs kubectl with this text on its standard input.
    ///
    /// # Errors
    /// When it fails; the error has its words.
    pub async fn kubectl(&self, arguments: &[&str], input: &str) -> Result<()> {
        let mut command = Command::new(&self.kubectl);
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(arguments).kill_on_drop(true);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let mut stdin = child.stdin.take().context("its standard input")?;
        stdin.write_all(input.as_bytes()).await?;
        drop(stdin);
        let output = child.wait_with_output().await?;
        ensure!(output.status.success(), "kubectl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Installs an object as Helm does: a create as the field manager `helm`, with Helm's label and annotations.
    ///
    /// # Errors
    /// When the runtime refuses it.
    pub async fn helm_install(&self, object: &Value) -> Result<()> {
        let mut object: DynamicObject = serde_json::from_value(object.clone())?;
        object.labels_mut().insert("app.kubernetes.io/managed-by".to_owned(), "Helm".to_owned());
        object.annotations_mut().insert("meta.helm.sh/release-name".to_owned(), "release".to_owned());
        let params = PostParams { field_manager: Some("helm".to_owned()), ..PostParams::default() };
        self.api(&object).await?.create(&params, &object).await?;
        Ok(())
    }

    /// Writes a CA bundle into the conversion webhook of a CRD, as cert-manager's injector does.
    ///
    /// # Errors
    /// When the runtime refuses it.
    pub async fn inject_ca(&self, definition: &str, bundle: &str) -> Result<()> {
        let patch = json!({"spec": {"conversion": {"webhook": {"clientConfig": {"caBundle": bundle}}}}});
        let crd = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": definition}});
        self.update("cert-manager-cainjector", &crd, &patch).await
    }

    /// Creates an autoscaler of a Deployment, and scales it as Kubernetes' controller does.
    ///
    /// # Errors
    /// When the runtime refuses it.
    pub async fn autoscale(&self, namespace: &str, deployment: &str, replicas: u32) -> Result<()> {
        let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment});
        let autoscaler = json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": deployment, "namespace": namespace},
            "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 9}});
        let autoscaler: DynamicObject = serde_json::from_value(autoscaler)?;
        self.api(&autoscaler).await?.create(&PostParams::default(), &autoscaler).await?;
        let target: DynamicObject = serde_json::from_value(
            json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": deployment, "namespace": namespace}}),
        )?;
        let scale = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        self.api(&target).await?.patch_scale(deployment, &as_manager("kube-controller-manager"), &scale).await?;
        Ok(())
    }

    /// Merges a patch into an object as a controller with this name.
    ///
    /// # Errors
    /// When the runtime refuses it.
    pub async fn update(&self, manager: &str, object: &Value, patch: &Value) -> Result<()> {
        let object: DynamicObject = serde_json::from_value(object.clone())?;
        let api = self.api(&object).await?;
        api.patch(&object.name_any(), &as_manager(manager), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// The API of an object's kind, in its namespace.
    async fn api(&self, object: &DynamicObject) -> Result<Api<DynamicObject>> {
        let kind = GroupVersionKind::try_from(object.types.as_ref().context("a type")?)?;
        let (resource, capabilities) = discovery::pinned_kind(&self.client, &kind).await?;
        let client = self.client.clone();
        Ok(match capabilities.scope {
            Scope::Cluster => Api::all_with(client, &resource),
            Scope::Namespaced => Api::namespaced_with(client, &object.namespace().unwrap_or_default(), &resource),
        })
    }
}

fn as_manager(name: &str) -> PatchParams {
    PatchParams { field_manager: Some(name.to_owned()), ..PatchParams::default() }
}
