//! Layers of the modules from their component descriptors, and the Kymas that wait for one.

use std::collections::{BTreeSet, HashMap};

use parking_lot::Mutex;
use tidewatch_api::key::KymaKey;
use tidewatch_oci::{
    component::ComponentVersion,
    credentials::RegistryAddress,
    descriptor::Descriptor,
    registry::{Change, Key, Lookup, Registry},
};
use tidewatch_select::kyma::layer::{LayerLookup, ModuleLayer};

/// Looks up the layers of modules in a registry.
pub struct ComponentLayers {
    registry: Registry,
    /// Kymas without a layer, by component. Bounded by the modules that Kymas select.
    waiting: Mutex<HashMap<ComponentVersion, BTreeSet<KymaKey>>>,
}

impl ComponentLayers {
    /// Creates a lookup without waiting Kymas.
    pub fn new(registry: Registry) -> Self {
        Self { registry, waiting: Mutex::default() }
    }

    /// The layer of a component's version. While its descriptor or the address of the registry is missing, the Kyma
    /// waits for a change of either.
    pub fn layer(&self, key: &KymaKey, component: &str, version: &str) -> LayerLookup {
        let component = match ComponentVersion::new(component, version) {
            Ok(component) => component,
            Err(error) => return LayerLookup::Failed(error.to_string()),
        };
        if let Lookup::Ready(descriptor) = self.registry.descriptor(&component)
            && let Some(registry) = self.registry.address()
        {
            return layer_of(&descriptor, &registry);
        }
        // Recorded before both are read again: a change in between enqueues the Kyma.
        self.waiting.lock().entry(component.clone()).or_default().insert(key.clone());
        match self.registry.descriptor(&component) {
            // A descriptor outlives the Secret that names the registry.
            Lookup::Ready(descriptor) => match self.registry.address() {
                Some(registry) => layer_of(&descriptor, &registry),
                None => LayerLookup::Failed("the Secret that names the registry does not exist".to_owned()),
            },
            Lookup::Pending => LayerLookup::Pending,
            Lookup::Failed(error) => LayerLookup::Failed(error.to_string()),
        }
    }

    /// Returns the Kymas that wait for a changed lookup; their next reconcile looks it up again.
    pub fn take_waiting(&self, change: &Change) -> BTreeSet<KymaKey> {
        match change {
            Change::Key(Key::Descriptor(component)) => self.waiting.lock().remove(component).unwrap_or_default(),
            Change::Key(Key::Layer(_)) => BTreeSet::new(),
            Change::All => std::mem::take(&mut *self.waiting.lock()).into_values().flatten().collect(),
        }
    }
}

/// The layer that a component descriptor names, or the reason why it names none.
fn layer_of(descriptor: &Descriptor, registry: &RegistryAddress) -> LayerLookup {
    ModuleLayer::of(descriptor, &registry.to_string()).map_or_else(LayerLookup::Failed, LayerLookup::Ready)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use tidewatch_oci::{descriptor::RAW_MANIFEST, digest::Digest, flags::Source, testing::FakeRegistry};
    use tokio::{task::JoinSet, time::timeout};
    use tokio_util::sync::CancellationToken;

    use super::*;

    /// A registry by a Secret, with the component `example.org/m` 1.0.0, and the task that fetches.
    fn registry_by_secret(folder: &std::path::Path) -> (Registry, JoinSet<&'static str>) {
        let digest = Digest::of(b"").to_string();
        let access = json!({"type": "localBlob", "localReference": digest, "mediaType": "text/yaml"});
        let resource = json!({
            "name": RAW_MANIFEST, "version": "1.0.0", "type": "directoryTree", "relation": "local", "access": access,
        });
        let content = json!({
            "meta": {"schemaVersion": "v2"},
            "component": {
                "name": "example.org/m", "version": "1.0.0", "provider": "p", "repositoryContexts": [], "sources": [],
                "componentReferences": [], "resources": [resource],
            },
        });
        let server = FakeRegistry::default();
        server.component("component-descriptors/example.org/m", "1.0.0", &content.to_string());
        let source = Source::Secret { name: "oci-creds".into(), subpath: String::new() };
        let (registry, worker) = server.lookups(folder, source);
        let mut tasks = JoinSet::new();
        tasks.spawn(worker.run(CancellationToken::new()));
        (registry, tasks)
    }

    #[tokio::test(start_paused = true)]
    async fn kyma_without_the_address_of_the_registry_waits_for_its_secret() {
        let folder = tempfile::tempdir().unwrap();
        let (registry, _tasks) = registry_by_secret(folder.path());
        let layers = ComponentLayers::new(registry.clone());
        let key = KymaKey::new("ns", "kyma");
        let layer = || layers.layer(&key, "example.org/m", "1.0.0");
        let changed = async || timeout(Duration::from_secs(3_600), registry.changed()).await.unwrap();
        let secret: &[u8] = br#"{"auths": {"registry.example.com": {}}}"#;
        assert_eq!(registry.set_credentials(Some(secret)), Ok(true));
        assert_eq!(changed().await, Change::All);
        assert_eq!(layer(), LayerLookup::Pending);
        assert_eq!(layers.take_waiting(&changed().await), [key.clone()].into());
        assert!(matches!(layer(), LayerLookup::Ready(_)));

        assert_eq!(registry.set_credentials(None), Ok(true));
        let LayerLookup::Failed(error) = layer() else { panic!("the registry has no address") };
        assert!(error.contains("the Secret that names the registry does not exist"), "{error}");
        assert_eq!(registry.set_credentials(Some(secret)), Ok(true));
        assert_eq!(layers.take_waiting(&changed().await), [key.clone()].into());
        assert!(matches!(layer(), LayerLookup::Ready(_)));
    }
}
