//! Upgrades of Manifests that are being deleted. The user's resources may block that for a long time, and the module
//! serves them meanwhile: it follows its channel, or the user's new selection. Pure.

use kube::ResourceExt as _;
use serde_json::json;
use tidewatch_api::{Kyma, Manifest, names::label};
use tidewatch_engine::finalizers;

use super::{
    build::{self, Desired},
    installed::{is_unmanaged, module_of},
    layer::{LayerLookup, ModuleLayer},
    lookup::Resolved,
    validate::{Follow, WantedModule},
};

/// Decision on a Manifest that is being deleted.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Upgrade {
    /// It stays as it is.
    None,
    /// The component descriptor of the new version is not known.
    Pending,
    /// It gets another version.
    Write(Box<Desired>),
}

/// Returns the module that a Manifest follows while it is being deleted; `None` if it stays as it is.
pub(super) fn followed(manifest: &Manifest, wanted: &[WantedModule]) -> Option<WantedModule> {
    if manifest.metadata.deletion_timestamp.is_none() || is_unmanaged(manifest) {
        return None;
    }
    let name = module_of(manifest)?;
    if let Some(module) = wanted.iter().find(|module| module.name == name) {
        return module.managed.then(|| module.clone());
    }
    // A module whose version was pinned, and that is no longer selected, follows nothing.
    let channel = manifest.labels().get(label::CHANNEL).filter(|channel| !channel.is_empty())?;
    let follows = Ok(Follow::Channel(channel.clone()));
    Some(WantedModule { name: name.to_owned(), follows, managed: true, policy: manifest.spec.policy() })
}

/// Decides on a Manifest that follows a resolved module.
pub(super) fn upgrade(
    kyma: &Kyma,
    manifest: &Manifest,
    module: &WantedModule,
    found: &Resolved,
    layer: LayerLookup,
) -> Upgrade {
    if build::name_of(kyma, module, found) != manifest.name_any() {
        // Another component has a Manifest of its own.
        return Upgrade::None;
    }
    let layer = match layer {
        LayerLookup::Ready(layer) => layer,
        _ if manifest.spec.version.as_ref() == Some(&found.version) => ModuleLayer::installed(manifest),
        // The registry is tried again, and the Kyma reconciled when it responds.
        LayerLookup::Pending | LayerLookup::Failed(_) => return Upgrade::Pending,
    };
    let desired = leaving(build::manifest(kyma, module, found, &layer), manifest);
    if desired.differs_from(manifest) { Upgrade::Write(Box::new(desired)) } else { Upgrade::None }
}

/// Keeps what the removal depends on: the default module CR, and the finalizers that are left. The uid prevents that a
/// Manifest that is gone by now is created again.
fn leaving(mut desired: Desired, manifest: &Manifest) -> Desired {
    let is_left = |name: &&str| manifest.finalizers().iter().any(|left| left == name);
    let metadata = &mut desired.body["metadata"];
    metadata["uid"] = json!(manifest.uid());
    metadata["finalizers"] = finalizers(true).filter(is_left).collect();
    let spec = &mut desired.body["spec"];
    spec["customResourcePolicy"] = json!(manifest.spec.policy());
    match (manifest.spec.resource(), spec.as_object_mut()) {
        (Some(resource), _) => spec["resource"] = resource.clone(),
        (None, Some(members)) => drop(members.remove("resource")),
        (None, None) => {}
    }
    build::record_default(&mut desired, manifest);
    desired
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::Value;
    use tidewatch_api::{
        CustomResourcePolicy as Policy, ModuleTemplate,
        names::{annotation, finalizer},
    };

    use super::*;
    use crate::kyma::pin::Pin;

    fn kyma() -> Kyma {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k", "namespace": "kcp-system", "uid": "u-1"}, "spec": {"channel": "regular"}}))
        .unwrap()
    }

    fn module(follows: Follow, managed: bool) -> WantedModule {
        WantedModule { name: "keda".into(), follows: Ok(follows), managed, policy: Policy::Ignore }
    }

    fn resolved(version: &str, component: &str) -> Resolved {
        let data = json!({"apiVersion": "a/v2", "kind": "Keda", "spec": {"version": version}});
        let template: ModuleTemplate = serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate", "metadata": {"name": "keda"},
            "spec": {"moduleName": "keda", "version": version, "descriptor": {}, "data": data}}))
        .unwrap();
        let template = Arc::new(template);
        let channel = Some("regular".into());
        Resolved { template, channel, version: version.into(), meta: Arc::default(), component: component.into() }
    }

    fn layer(version: &str) -> LayerLookup {
        let source = json!({"repo": "r", "name": "n", "ref": version, "type": "oci-dir"});
        LayerLookup::Ready(ModuleLayer::new(&source, Vec::new()))
    }

    const COMPONENT: &str = "kyma-project.io/module/keda";

    /// Version 1.0.0 of the channel `regular`, which is being deleted: its default module CR is gone.
    fn leaving_manifest(change: impl FnOnce(&mut Value)) -> Manifest {
        let LayerLookup::Ready(layer) = layer("1.0.0") else { unreachable!() };
        let module = module(Follow::Channel("regular".into()), true);
        let mut body = build::manifest(&kyma(), &module, &resolved("1.0.0", COMPONENT), &layer).body;
        body["metadata"]["uid"] = json!("u-2");
        body["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        body["metadata"]["finalizers"] = json!([finalizer::MANIFEST[0], "foreign"]);
        body["spec"]["customResourcePolicy"] = json!("CreateAndDelete");
        change(&mut body);
        serde_json::from_value(body).unwrap()
    }

    #[test]
    fn deselected_manifest_follows_its_channel_and_a_selected_one_the_selection() {
        let manifest = |change: &dyn Fn(&mut Value)| leaving_manifest(change);
        let none: &dyn Fn(&mut Value) = &|_| ();
        let follows = |manifest: Manifest, wanted: &[WantedModule]| {
            followed(&manifest, wanted).map(|module| (module.follows.unwrap(), module.managed))
        };
        let regular = Some((Follow::Channel("regular".into()), true));
        assert_eq!(follows(manifest(none), &[]), regular);
        let other = WantedModule { name: "other".into(), ..module(Follow::Pin(Pin::at("2.0.0")), true) };
        assert_eq!(follows(manifest(none), &[other]), regular);
        let pinned = Follow::Pin(Pin::at("2.0.0"));
        assert_eq!(follows(manifest(none), &[module(pinned.clone(), true)]), Some((pinned.clone(), true)));
        assert_eq!(follows(manifest(none), &[module(pinned, false)]), None, "an unmanaged module stays as it is");
        for change in [
            &(|body: &mut Value| body["metadata"]["deletionTimestamp"] = Value::Null) as &dyn Fn(&mut Value),
            &|body: &mut Value| body["metadata"]["labels"][label::CHANNEL] = json!(""),
            &|body: &mut Value| drop(body["metadata"]["labels"].as_object_mut().unwrap().remove(label::CHANNEL)),
            &|body: &mut Value| drop(body["metadata"]["labels"].as_object_mut().unwrap().remove(label::MODULE_NAME)),
            &|body: &mut Value| body["metadata"]["annotations"][annotation::UNMANAGED] = json!("true"),
        ] {
            assert_eq!(follows(manifest(change), &[]), None);
        }
    }

    #[test]
    fn upgrade_keeps_the_default_module_cr_and_adds_no_finalizer() {
        let manifest = leaving_manifest(|_| ());
        let module = followed(&manifest, &[]).unwrap();
        let decide = |found: &Resolved, layer| upgrade(&kyma(), &manifest, &module, found, layer);
        let newer = resolved("2.0.0", COMPONENT);
        let Upgrade::Write(desired) = decide(&newer, layer("2.0.0")) else { panic!("a newer version") };
        let metadata = &desired.body["metadata"];
        let spec = &desired.body["spec"];
        assert_eq!((&metadata["uid"], &metadata["finalizers"]), (&json!("u-2"), &json!([finalizer::MANIFEST[0]])));
        assert_eq!((&spec["version"], &spec["install"]["source"]["ref"]), (&json!("2.0.0"), &json!("2.0.0")));
        assert_eq!(spec["customResourcePolicy"], "CreateAndDelete");
        assert_eq!(spec["resource"], *manifest.spec.resource().unwrap());
        assert_eq!(metadata["annotations"].get(annotation::CREATED_DEFAULT), None);
        // One that an earlier version created stays recorded.
        let text = r#"{"apiVersion":"a/v1","kind":"Keda","name":"former","namespace":"kyma-system"}"#;
        let recorded = leaving_manifest(|body| {
            body["metadata"]["annotations"][annotation::CREATED_DEFAULT] = json!(text);
        });
        let Upgrade::Write(desired) = upgrade(&kyma(), &recorded, &module, &newer, layer("2.0.0")) else {
            panic!("a newer version")
        };
        assert_eq!(desired.body["metadata"]["annotations"][annotation::CREATED_DEFAULT], text);
        // One without a default module CR gets none.
        let without = leaving_manifest(|body| drop(body["spec"].as_object_mut().unwrap().remove("resource")));
        let Upgrade::Write(desired) = upgrade(&kyma(), &without, &module, &newer, layer("2.0.0")) else {
            panic!("a newer version")
        };
        assert_eq!(desired.body["spec"].get("resource"), None);

        let current = resolved("1.0.0", COMPONENT);
        let failed = || LayerLookup::Failed("the registry refuses the connection".into());
        assert_eq!(decide(&current, layer("1.0.0")), Upgrade::None);
        assert_eq!(decide(&resolved("2.0.0", "kyma-project.io/module/other"), layer("2.0.0")), Upgrade::None);
        for unavailable in [LayerLookup::Pending, failed()] {
            assert_eq!(decide(&current, unavailable.clone()), Upgrade::None, "an installed version needs no registry");
            assert_eq!(decide(&newer, unavailable), Upgrade::Pending);
        }
    }
}
