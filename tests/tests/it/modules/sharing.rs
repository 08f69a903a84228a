//! Objects that two modules contain, and objects of a module in which users have stored something.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, Namespace, PersistentVolumeClaim};
use kube::core::NamespaceResourceScope;
use serde::de::DeserializeOwned;

use super::*;

impl ModuleRuntime {
    /// Publishes a version of a module without a manager, with these objects.
    async fn publish_objects(&self, module: &str, version: &str, objects: &[Value]) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let description = format!("component: kyma-project.io/module/{module}\nversion: {version}\n");
        std::fs::write(folder.path().join("module.yaml"), description)?;
        let documents: Vec<_> = objects.iter().map(ToString::to_string).collect();
        std::fs::write(folder.path().join("manifest.yaml"), documents.join("\n---\n"))?;
        self.publish_folder(folder.path()).await?;
        self.point(module, version).await
    }

    async fn named<K>(&self, namespace: &str) -> Result<Api<K>>
    where
        K: kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Ok(Api::namespaced(self.client().await?, namespace))
    }
}

fn map(name: &str, data: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": SKR_NAMESPACE}, "data": data})
}

fn namespace(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
}

/// A CRD of the group `shared.test`.
fn definition(plural: &str, kind: &str) -> Value {
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.shared.test")},
        "spec": {"group": "shared.test", "scope": "Namespaced", "names": {"plural": plural, "kind": kind},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema":
                {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]}})
}

fn resource(kind: &str, name: &str) -> Result<DynamicObject> {
    Ok(serde_json::from_value(json!({"apiVersion": "shared.test/v1", "kind": kind, "metadata": {"name": name}}))?)
}

async fn is_gone<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: kube::Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    let condition = format!("{name} to be deleted");
    until(&condition, async || {
        let found = api.get_opt(name).await?;
        Ok(found.is_none_or(|found| found.meta().deletion_timestamp.is_some()).then_some(()))
    })
    .await
}

#[tokio::test]
async fn modules_share_objects_and_leave_what_users_have_stored_in_them() -> TestResult {
    let modules = ModuleRuntime::start("module-sharing", &[]).await?;
    modules.publish_objects("gamma", "1.0.0", &with_content()?).await?;
    modules.publish_objects("delta", "1.0.0", &[namespace("delta-space"), map("gamma", &json!({}))]).await?;
    shared_objects_are_never_fought_over(&modules).await?;
    content_of_users_outlives_versions_and_modules(&modules).await?;
    Ok(())
}

async fn shared_objects_are_never_fought_over(modules: &ModuleRuntime) -> Result<()> {
    let things = definition("things", "Thing");
    let with = |data: Value| [map("shared", &data), things.clone()];
    modules.publish_objects("alpha", "1.0.0", &with(json!({"mode": "a", "alpha": "1"}))).await?;
    modules.publish_objects("beta", "1.0.0", &with(json!({"mode": "a", "beta": "1"}))).await?;
    let runtime = &modules.setup.runtime;
    let maps = modules.named::<ConfigMap>(SKR_NAMESPACE).await?;
    runtime.select(&["alpha"]).await?;
    modules.becomes("alpha", "1.0.0", State::Ready).await?;
    let created = maps.get("shared").await?;
    runtime.select(&["alpha", "beta"]).await?;
    modules.becomes("beta", "1.0.0", State::Ready).await?;
    let shared = async || anyhow::Ok(maps.get("shared").await?);
    let data = async || anyhow::Ok(json!(shared().await?.data));
    assert_eq!(data().await?, json!({"mode": "a", "alpha": "1", "beta": "1"}));
    let managers: Vec<_> = shared().await?.managed_fields().iter().filter_map(|it| it.manager.clone()).collect();
    assert_eq!(managers.len(), 2, "{managers:?}");
    let definitions = Api::<CustomResourceDefinition>::all(modules.client().await?);
    let managers = definitions.get("things.shared.test").await?;
    let joined = |entry: &str| entry.contains("tidewatch-shared");
    let has_joined = managers.managed_fields().iter().any(|it| it.manager.as_deref().is_some_and(joined));
    assert!(!has_joined, "an equal object is not written");
    modules.setup.becomes_idle().await?;
    let mark = runtime.cluster().audit_mark()?;

    // A verification of all objects, and a change by a user of a field that both have.
    let edited = Patch::Merge(json!({"data": {"mode": "user"}}));
    maps.patch("shared", &PatchParams::default(), &edited).await?;
    until("the value of the modules", async || Ok((data().await?["mode"] == "a").then_some(()))).await?;
    modules.setup.becomes_idle().await?;
    let writes = runtime.cluster().writes_since(mark)?;
    let of_ours = writes.iter().filter(|write| write.name == "shared").count();
    assert!(of_ours <= 4, "the user's, a repair by each module at most, and one refusal: {writes:?}");

    modules.publish_objects("beta", "2.0.0", &with(json!({"mode": "b", "beta": "2"}))).await?;
    modules.says("beta", State::Warning, "ConfigMap kyma-system/shared is shared with the module alpha").await?;
    modules.says("beta", State::Warning, ".data.mode").await?;
    assert_eq!(data().await?["mode"], "a");
    modules.becomes("alpha", "1.0.0", State::Ready).await?;
    modules.setup.becomes_idle().await?;

    // The CRD moves to the other module together with the resources of users.
    let kind = GroupVersionKind::gvk("shared.test", "v1", "Thing");
    let resources: Api<DynamicObject> =
        Api::namespaced_with(modules.client().await?, "default", &ApiResource::from_gvk(&kind));
    resources.create(&PostParams::default(), &resource("Thing", "mine")?).await?;
    let moved = definitions.get("things.shared.test").await?;
    runtime.select(&["beta"]).await?;
    modules.becomes("beta", "2.0.0", State::Ready).await?;
    assert_eq!(data().await?, json!({"mode": "b", "beta": "2"}));
    let owned_by = |object: &BTreeMap<String, String>| object.get(annotation::OWNED_BY).cloned();
    let owner = format!("{}/{}", modules.setup.landscape.namespace(), modules.manifest("beta").await?.name_any());
    assert_eq!(owned_by(shared().await?.annotations()), Some(owner.clone()));
    assert_eq!(shared().await?.uid(), created.uid());
    assert_eq!(
        shared().await?.managed_fields().iter().filter(|it| it.manager.as_deref().is_some_and(joined)).count(),
        0
    );
    until("the CRD to belong to the module that stays", async || {
        let definition = definitions.get("things.shared.test").await?;
        Ok((owned_by(definition.annotations()) == Some(owner.clone())).then_some(()))
    })
    .await?;
    assert_eq!(definitions.get("things.shared.test").await?.uid(), moved.uid());
    resources.get("mine").await?;

    // Without another module, the user's resource blocks the removal.
    runtime.select(&[]).await?;
    modules.says("beta", State::Deleting, "Thing default/mine").await?;
    resources.delete("mine", &DeleteParams::default()).await?;
    modules.is_clean().await
}

/// Objects with which data of users would go.
fn with_content() -> Result<Vec<Value>> {
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "stored", "namespace": SKR_NAMESPACE},
        "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "pv-1", "storageClassName": "",
            "resources": {"requests": {"storage": "1Mi"}}}});
    let mut inner = map("inner", &json!({}));
    inner["metadata"]["namespace"] = json!("gamma-space");
    let own = json!(resource("Gadget", "own")?);
    let rest = map("gamma", &json!({}));
    Ok(vec![definition("gadgets", "Gadget"), namespace("gamma-space"), inner, own, claim, rest])
}

async fn content_of_users_outlives_versions_and_modules(modules: &ModuleRuntime) -> Result<()> {
    let runtime = &modules.setup.runtime;
    runtime.select(&["gamma"]).await?;
    modules.becomes("gamma", "1.0.0", State::Ready).await?;
    let client = modules.client().await?;
    let kind = GroupVersionKind::gvk("shared.test", "v1", "Gadget");
    let resources: Api<DynamicObject> = Api::namespaced_with(client.clone(), "default", &ApiResource::from_gvk(&kind));

    // What a deleted CRD has taken along returns with it.
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    let deleted = resources.get("own").await?.uid();
    definitions.delete("gadgets.shared.test", &DeleteParams::default()).await?;
    until("the module's own resource to return", async || {
        // The kind is not served meanwhile.
        let found = resources.get_opt("own").await.ok().flatten();
        Ok(found.filter(|found| found.uid() != deleted).map(drop))
    })
    .await?;
    modules.becomes("gamma", "1.0.0", State::Ready).await?;

    resources.create(&PostParams::default(), &resource("Gadget", "mine")?).await?;
    let maps = modules.named::<ConfigMap>("gamma-space").await?;
    let mine: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "mine"}}))?;
    maps.create(&PostParams::default(), &mine).await?;
    modules.publish_objects("gamma", "2.0.0", &[map("gamma", &json!({}))]).await?;
    for words in [
        "CustomResourceDefinition gadgets.shared.test is not part of this version any more, and stays because of Gadget \
         default/mine",
        "Namespace gamma-space is not part of this version any more, and stays because of ConfigMap gamma-space/mine",
        "PersistentVolumeClaim kyma-system/stored is not part of this version any more, and stays because of its volume pv-1",
    ] {
        modules.says("gamma", State::Warning, words).await?;
    }
    let namespaces = Api::<Namespace>::all(client.clone());
    let claims = modules.named::<PersistentVolumeClaim>(SKR_NAMESPACE).await?;
    assert!(resources.get_opt("own").await?.is_none() && maps.get_opt("inner").await?.is_none());
    resources.get("mine").await?;
    maps.get("mine").await?;

    // Each of them goes with its content; a marker ends the question.
    resources.delete("mine", &DeleteParams::default()).await?;
    is_gone(&definitions, "gadgets.shared.test").await?;
    let keep = Patch::Merge(json!({"metadata": {"annotations": {annotation::KEEP: "true"}}}));
    claims.patch("stored", &PatchParams::default(), &keep).await?;
    maps.delete("mine", &DeleteParams::default()).await?;
    modules.becomes("gamma", "2.0.0", State::Ready).await?;
    is_gone(&namespaces, "gamma-space").await?;
    assert!(!claims.get("stored").await?.labels().contains_key(label::MANAGED_BY));

    // A removal leaves a Namespace in which others live.
    runtime.select(&["delta"]).await?;
    modules.becomes("delta", "1.0.0", State::Ready).await?;
    let maps = modules.named::<ConfigMap>("delta-space").await?;
    maps.create(&PostParams::default(), &mine).await?;
    modules.leave().await?;
    let left = namespaces.get("delta-space").await?;
    assert!(left.metadata.deletion_timestamp.is_none() && !left.labels().contains_key(label::MANAGED_BY));
    maps.get("mine").await?;
    Ok(())
}
