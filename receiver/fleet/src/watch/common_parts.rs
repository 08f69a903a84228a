//! Parts that many objects have in common: the Manifests of one version of a module differ in little more than their
//! metadata, and a control plane has one for every module of every runtime; the Kymas of many runtimes select the same
//! modules. Their caches store equal parts once.

use std::{collections::HashSet, hash::Hash, sync::Arc};

use serde_json::Value;
use tidewatch_api::{
    Kyma, Manager, Manifest, Resource,
    facts::{ReducedKyma, ReducedManifest, RestDigest},
    key::ManifestKey,
    selection::ModuleSelection,
};

/// Number of parts from which unused ones are dropped.
const MIN_PRUNED: usize = 256;

/// Parts of the Manifests in a cache; bounded by their number.
#[derive(Debug, Default)]
pub struct CommonParts {
    inventories: Pool<Vec<Resource>>,
    images: Pool<Vec<String>>,
    managers: Pool<Manager>,
    values: Pool<Value>,
    /// Texts of reduced Manifests.
    texts: Pool<String>,
}

impl CommonParts {
    /// Replaces parts of a Manifest by equal ones of earlier Manifests.
    pub fn share(&mut self, manifest: &mut Manifest) {
        self.values.share(&mut manifest.spec.install.source);
        manifest.spec.resource.iter_mut().for_each(|resource| self.values.share(resource));
        manifest.spec.localized_images.iter_mut().for_each(|images| self.images.share(images));
        manifest.spec.manager.iter_mut().for_each(|manager| self.managers.share(manager));
        let synced = manifest.status.iter_mut().flat_map(|status| &mut status.synced);
        synced.for_each(|synced| self.inventories.share(synced));
    }

    /// Reduces a Manifest whose parts are shared; `None` if it cannot be reduced.
    #[must_use]
    pub fn reduce(&mut self, key: ManifestKey, manifest: &Manifest) -> Option<ReducedManifest> {
        ReducedManifest::of(key, manifest, |text| {
            let mut text = Arc::new(text.to_owned());
            self.texts.share(&mut text);
            text
        })
    }
}

/// Parts of the reduced Kymas in a cache; bounded by their number.
#[derive(Debug, Default)]
pub struct CommonKymaParts {
    namespaces: Pool<String>,
    selections: Pool<ModuleSelection>,
}

impl CommonKymaParts {
    /// Reduces a Kyma; `rest` is the digest that it keeps.
    #[must_use]
    pub fn reduce(&mut self, kyma: &Kyma, rest: RestDigest) -> ReducedKyma {
        let mut reduced = ReducedKyma::of(kyma, rest);
        self.namespaces.share(&mut reduced.namespace);
        self.selections.share(&mut reduced.selection);
        reduced
    }
}

#[derive(Debug)]
struct Pool<T> {
    parts: HashSet<Arc<T>>,
    /// Number of parts at which unused ones are dropped.
    prune_at: usize,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self { parts: HashSet::new(), prune_at: MIN_PRUNED }
    }
}

impl<T: Eq + Hash> Pool<T> {
    fn share(&mut self, part: &mut Arc<T>) {
        if let Some(known) = self.parts.get(part) {
            part.clone_from(known);
            return;
        }
        if self.parts.len() >= self.prune_at {
            self.parts.retain(|part| Arc::strong_count(part) > 1);
            self.prune_at = MIN_PRUNED.max(self.parts.len() * 2);
        }
        self.parts.insert(part.clone());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn manifest(name: &str, layer: &str) -> Manifest {
        let entry =
            json!({"group": "", "version": "v1", "kind": "ConfigMap", "namespace": "kyma-system", "name": layer});
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": name, "namespace": "ns"},
            "spec": {"remote": true, "install": {"name": "i", "source": {"ref": layer}}, "resource": {"kind": "Sample"},
                "localizedImages": [layer], "manager": {"group": "apps", "version": "v1", "kind": "Deployment", "name": layer}},
            "status": {"state": "Ready", "synced": [entry]}}))
        .unwrap()
    }

    fn synced(manifest: &Manifest) -> &Arc<Vec<Resource>> {
        manifest.status.as_ref().and_then(|status| status.synced.as_ref()).unwrap()
    }

    #[test]
    fn equal_parts_are_stored_once() {
        let mut parts = CommonParts::default();
        let mut manifests = [manifest("a", "1"), manifest("b", "1"), manifest("c", "2")];
        let before = manifests.clone();
        manifests.iter_mut().for_each(|manifest| parts.share(manifest));
        assert_eq!(manifests, before, "the content stays");
        let [a, b, c] = &manifests;
        assert!(Arc::ptr_eq(synced(a), synced(b)) && !Arc::ptr_eq(synced(a), synced(c)));
        assert!(Arc::ptr_eq(&a.spec.install.source, &b.spec.install.source));
        let images = [a, b, c].map(|it| it.spec.localized_images.as_ref().unwrap());
        assert!(Arc::ptr_eq(images[0], images[1]) && !Arc::ptr_eq(images[0], images[2]));
        let managers = [a, b, c].map(|it| it.spec.manager.as_ref().unwrap());
        assert!(Arc::ptr_eq(managers[0], managers[1]) && !Arc::ptr_eq(managers[0], managers[2]));
        let resources = [a, b, c].map(|it| it.spec.resource.as_ref().unwrap());
        assert!(Arc::ptr_eq(resources[0], resources[1]) && Arc::ptr_eq(resources[0], resources[2]));
    }

    #[test]
    fn unused_parts_are_dropped() {
        let mut parts = CommonParts::default();
        let mut kept = manifest("kept", "kept");
        parts.share(&mut kept);
        for number in 0..2 * MIN_PRUNED {
            parts.share(&mut manifest("m", &number.to_string()));
        }
        assert!(parts.inventories.parts.len() <= MIN_PRUNED, "{}", parts.inventories.parts.len());
        let mut again = manifest("again", "kept");
        parts.share(&mut again);
        assert!(Arc::ptr_eq(synced(&kept), synced(&again)));
    }
}
