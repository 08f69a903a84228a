//! The object that decides on the readiness of a module.

use tidewatch_api::{Manifest, names::SKR_NAMESPACE};

use crate::inventory::ObjectKey;

/// The manager of a module: the object that decides on its readiness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Manager {
    pub(crate) key: ObjectKey,
    /// Version of its API group.
    pub(crate) version: String,
}

/// Selects the manager of a module: `spec.manager` of the Manifest, else the first Deployment or StatefulSet of the
/// rendered objects, given with the versions of their API groups. `None` for a module without a workload, which is ready
/// once all its objects are applied.
///
/// A `spec.manager` without a namespace stands for the rendered object of that group, kind and name; if there are
/// several, for the one in `kyma-system`. It may name an object that the module does not bring itself.
pub(crate) fn manager_of<'a>(
    manifest: &Manifest,
    rendered: impl Iterator<Item = (&'a ObjectKey, &'a str)> + Clone,
) -> Option<Manager> {
    let chosen = |(key, version): (&ObjectKey, &str)| Manager { key: key.clone(), version: version.to_owned() };
    let Some(named) = manifest.spec.manager.as_ref().filter(|it| !it.kind.is_empty() && !it.name.is_empty()) else {
        return rendered.clone().find(|(key, _)| is_workload(key)).map(chosen);
    };
    let namespace = named.namespace.as_deref().filter(|namespace| !namespace.is_empty());
    let is_named =
        |(key, _): &(&ObjectKey, &str)| key.group == named.group && key.kind == named.kind && key.name == named.name;
    let is_in = |namespace: &str, key: &ObjectKey| key.namespace == namespace;
    let found = rendered.clone().find(|it| is_named(it) && is_in(namespace.unwrap_or(SKR_NAMESPACE), it.0));
    let elsewhere = || rendered.clone().find(is_named).filter(|_| namespace.is_none());
    let other = || Manager {
        key: ObjectKey::new(&named.group, &named.kind, namespace.unwrap_or(SKR_NAMESPACE), &named.name),
        version: named.version.clone(),
    };
    Some(found.or_else(elsewhere).map_or_else(other, chosen))
}

fn is_workload(key: &ObjectKey) -> bool {
    key.group == "apps" && matches!(key.kind.as_str(), "Deployment" | "StatefulSet")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn key(group: &str, kind: &str, namespace: &str, name: &str) -> ObjectKey {
        ObjectKey::new(group, kind, namespace, name)
    }

    fn chosen(manager: Value, rendered: &[ObjectKey]) -> Option<(ObjectKey, String)> {
        let manifest: Manifest = serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest", "metadata": {"name": "m"},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}, "manager": manager}}))
        .unwrap();
        let rendered = rendered.iter().map(|key| (key, "v1"));
        manager_of(&manifest, rendered).map(|manager| (manager.key, manager.version))
    }

    #[test]
    fn without_a_named_manager_the_first_deployment_or_stateful_set_decides() {
        let daemons = key("apps", "DaemonSet", "a", "d");
        let alien = key("example.com", "Deployment", "a", "alien");
        let set = key("apps", "StatefulSet", "a", "s");
        let deployment = key("apps", "Deployment", "a", "x");
        let v1 = |key: &ObjectKey| Some((key.clone(), "v1".to_owned()));
        let rendered = [daemons.clone(), alien, set.clone(), deployment.clone()];
        assert_eq!(chosen(json!(null), &rendered), v1(&set));
        assert_eq!(chosen(json!(null), &[deployment.clone(), set]), v1(&deployment));
        assert_eq!(chosen(json!(null), &[daemons]), None);
        let unnamed = json!({"group": "apps", "version": "v1", "kind": "Deployment", "name": ""});
        assert_eq!(chosen(unnamed, std::slice::from_ref(&deployment)), v1(&deployment));
    }

    #[test]
    fn named_manager_decides_even_if_the_module_does_not_bring_it() {
        let first = key("apps", "Deployment", "kyma-system", "first");
        let other = key("apps", "Deployment", "other", "x");
        let system = key("apps", "Deployment", "kyma-system", "x");
        let named = |namespace: Value| json!({"group": "apps", "version": "v2", "kind": "Deployment", "namespace": namespace, "name": "x"});
        let rendered = |key: &ObjectKey| Some((key.clone(), "v1".to_owned()));
        let unrendered = |key: &ObjectKey| Some((key.clone(), "v2".to_owned()));
        let all = [first.clone(), other.clone(), system.clone()];
        assert_eq!(chosen(named(json!("other")), &all), rendered(&other));
        assert_eq!(chosen(named(json!(null)), &all), rendered(&system));
        assert_eq!(chosen(named(json!(null)), &all[..2]), rendered(&other));
        assert_eq!(chosen(named(json!(null)), std::slice::from_ref(&first)), unrendered(&system));
        assert_eq!(chosen(named(json!("other")), &[first, system]), unrendered(&other));
    }
}
