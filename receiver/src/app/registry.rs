//! Connects the registry of modules with the control plane: its credentials from a Secret, the keys that sign component
//! descriptors, the Kymas that wait for a component descriptor, and the Manifests that wait for a layer.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use anyhow::Context as _;
use futures::{FutureExt as _, StreamExt as _};
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use tidewatch_api::plan::Work;
use tidewatch_cluster::object;
use tidewatch_fleet::{
    manifest_queue::ManifestQueue,
    queue::{Priority, WorkSet},
    table::RuntimeTable,
};
use tidewatch_kit::last_good::{FILE_POLL_INTERVAL, LastGood};
use tidewatch_modules::kyma::ComponentLayers;
use tidewatch_oci::{
    key_folder::{self, KeyFiles, KeyFolderError},
    registry::{Change, Registry},
    signature::ComponentKeys,
};
use tokio::time::{self, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::Task;

/// Key of the credentials in their Secret.
const KEY: &str = ".dockerconfigjson";
/// Kymas, or Manifests, that are enqueued at once after a change of a lookup; further ones are paced.
const AT_ONCE: usize = 20;

/// Enqueues the Kymas and the Manifests that wait for a lookup whenever it changes, for ever. The only consumer of the
/// registry's changes.
pub(super) async fn enqueue_waiting(
    registry: Registry,
    layers: Arc<ComponentLayers>,
    fleet: RuntimeTable,
    manifests: ManifestQueue,
    per_second: u32,
) -> &'static str {
    loop {
        enqueue(&registry.changed().await, &layers, &fleet, &manifests, per_second);
    }
}

fn enqueue(
    change: &Change,
    layers: &ComponentLayers,
    fleet: &RuntimeTable,
    manifests: &ManifestQueue,
    per_second: u32,
) {
    // Only work of this replica waits.
    let work = WorkSet::of(&[Work::Kyma]);
    let per_second = fleet.share_of_rate(per_second);
    let (kymas, paced) = at_once(layers.take_waiting(change));
    kymas.iter().for_each(|key| fleet.enqueue(key, work, Priority::User));
    fleet.enqueue_paced(paced, work, per_second);
    let (waiting, paced) = at_once(manifests.take_waiting(change));
    waiting.iter().for_each(|key| manifests.enqueue(key, Priority::User, false));
    manifests.enqueue_paced(paced, per_second);
}

/// Divides waiting keys into those to enqueue at once, and the others.
fn at_once<K: Ord>(waiting: BTreeSet<K>) -> (Vec<K>, Vec<K>) {
    let mut waiting: Vec<_> = waiting.into_iter().collect();
    let paced = waiting.split_off(waiting.len().min(AT_ONCE));
    (waiting, paced)
}

/// Reads the Secret with the registry's credentials once, so that lookups do not fail until its watch has started; it may also
/// be created later. Returns the task that follows its changes.
///
/// # Errors
/// The control plane refused the request or did not respond.
pub(super) async fn follow_credentials(
    client: Client,
    namespace: &str,
    name: &str,
    registry: Registry,
    synced: CancellationToken,
) -> kube::Result<Task> {
    let api = Api::<Secret>::namespaced(client, namespace);
    set_credentials(&registry, name, object::get_by_list(&api, name).await?.as_ref());
    let name = name.to_owned();
    let follow = async move {
        synced.cancelled().await;
        let mut secrets = object::watch(api, &name, "Secret of the registry's credentials");
        while let Some(secret) = secrets.next().await {
            set_credentials(&registry, &name, secret.as_ref());
        }
        "watch of the registry's credentials"
    };
    Ok(follow.boxed())
}

/// Replaces the credentials. Invalid ones do not replace the last valid ones.
fn set_credentials(registry: &Registry, name: &str, secret: Option<&Secret>) {
    let content = secret.and_then(|secret| secret.data.as_ref()?.get(KEY));
    match registry.set_credentials(content.map(|content| content.0.as_slice())) {
        Ok(true) => {
            tracing::info!(secret = name, exists = content.is_some(), "Credentials of the registry changed");
        }
        Ok(false) => {}
        Err(error) => tracing::error!(
            %error, secret = name, "Credentials of the registry are not usable, the last valid ones stay in use"
        ),
    }
}

/// Keeps the keys of `--component-keys` up to date with their folder.
pub(super) struct ComponentKeyFiles {
    folder: PathBuf,
    files: LastGood<KeyFiles>,
    registry: Registry,
    metrics: tidewatch_trust::Metrics,
}

impl ComponentKeyFiles {
    /// Reads the files, and takes them into use.
    ///
    /// # Errors
    /// A file is not readable, or has no usable key.
    pub(super) fn open(
        folder: PathBuf,
        registry: Registry,
        metrics: tidewatch_trust::Metrics,
    ) -> Result<Self, KeyFolderError> {
        let contents = key_folder::read(&folder)?;
        match ComponentKeys::parse(&contents) {
            Ok(keys) => registry.set_component_keys(keys),
            Err(source) => return Err(KeyFolderError::Keys { path: folder, source }),
        }
        Ok(Self { folder, files: LastGood::new("Component keys", contents), registry, metrics })
    }

    /// Polls the files forever.
    pub(super) async fn run(mut self) -> &'static str {
        let mut poll = time::interval(FILE_POLL_INTERVAL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            poll.tick().await;
            self.reload();
        }
    }

    /// Reads the files, and uses them if they have changed and are all valid.
    fn reload(&mut self) {
        let Some(contents) = self.files.changed(key_folder::read(&self.folder)) else { return };
        let parsed = ComponentKeys::parse(&contents).context("parse the public keys");
        let result = parsed.map(|keys| {
            let names: Vec<_> = keys.names().map(str::to_owned).collect();
            self.registry.set_component_keys(keys);
            tracing::info!(?names, "Component keys are in use, descriptors are verified again");
        });
        self.metrics.reloaded(result.is_ok());
        self.files.record(contents, result);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use tidewatch_api::key::{KymaKey, ManifestKey};
    use tidewatch_api::plan::Plan;
    use tidewatch_fleet::{Tenure, manifest_queue, queue::ReconcileOutcome, table};
    use tidewatch_kit::metrics::Registry as Metrics;
    use tidewatch_oci::{
        self,
        component::ComponentVersion,
        digest::Digest,
        layer::LayerKind,
        registry::{Key, LayerKey},
    };
    use tidewatch_select::kyma::layer::LayerLookup;

    use super::*;
    use crate::config::Config;

    struct Fixture {
        layers: ComponentLayers,
        fleet: RuntimeTable,
        manifests: ManifestQueue,
    }

    impl Fixture {
        /// A registry without responses, one Kyma, and so many Manifests, each of a runtime of its own.
        fn new(content: &std::path::Path, count: usize) -> Self {
            let registry = registry(content);
            let metrics = &mut Metrics::default();
            let table = table::Metrics::register(metrics);
            let fleet = RuntimeTable::alone(1, table::Settings::default(), table);
            fleet.place(key("kyma"), "", None, Arc::new(Plan::new("r".into(), Vec::new()).unwrap()));
            let queue = manifest_queue::Metrics::register(metrics);
            let manifests =
                ManifestQueue::new(manifest_queue::Settings::default(), queue, Box::new(|_| Tenure::open()));
            (0..count).for_each(|n| manifests.insert(manifest(n), key(&manifest(n).name)));
            let fixture = Self { layers: ComponentLayers::new(registry), fleet, manifests };
            fixture.enqueued();
            fixture
        }

        fn change(&self, change: &Change) {
            enqueue(change, &self.layers, &self.fleet, &self.manifests, 1);
        }

        /// Number of enqueued Kymas, and of Manifests that a user's change would not overtake.
        fn enqueued(&self) -> (usize, usize) {
            let mut kymas = 0;
            let mut manifests = 0;
            while let Some(job) = self.fleet.next().now_or_never() {
                kymas += 1;
                let work = job.queued.work;
                self.fleet.done(job, ReconcileOutcome::ended(work));
            }
            while let Some(job) = self.manifests.next().now_or_never() {
                manifests += usize::from(job.queued.priority == Priority::User);
                self.manifests.done(job, ReconcileOutcome::ended(WorkSet::MANIFEST));
            }
            (kymas, manifests)
        }
    }

    /// A registry without responses.
    fn registry(content: &std::path::Path) -> Registry {
        let flags = ["r", "--authority=kcp.example.com:8443", "--oci-registry-host=registry.invalid"];
        let mut config = Config::try_parse_from(flags).unwrap();
        config.registry.oci_content_dir = Some(content.to_owned());
        let settings = config.registry.settings().unwrap();
        Registry::new(&settings, tidewatch_oci::metrics::Metrics::default()).unwrap().0
    }

    fn key(name: &str) -> KymaKey {
        KymaKey::new("ns", name)
    }

    fn manifest(n: usize) -> ManifestKey {
        ManifestKey::new("ns", format!("m-{n:02}"))
    }

    #[tokio::test]
    async fn component_keys_follow_their_folder_and_unusable_ones_are_refused() {
        let content = tempfile::tempdir().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let open = || {
            ComponentKeyFiles::open(
                folder.path().to_owned(),
                registry(content.path()),
                tidewatch_trust::Metrics::default(),
            )
        };
        assert!(matches!(open(), Err(KeyFolderError::Keys { .. })), "there is no key");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let pair = rcgen::KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, rcgen::RsaKeySize::_2048).unwrap();
        write("release.pem", &pair.public_key_pem());
        let mut files = open().unwrap();
        let mut names_after = |name: &str, text: &str| {
            write(name, text);
            files.reload();
            files.files.in_use().keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(names_after("next.pem", "not a key"), ["release.pem"], "the last good ones stay");
        assert_eq!(names_after("next.pem", &pair.public_key_pem()), ["next.pem", "release.pem"]);
    }

    #[tokio::test(start_paused = true)]
    async fn change_enqueues_the_kymas_of_its_descriptor_or_the_manifests_of_its_layer() {
        let folder = tempfile::tempdir().unwrap();
        let fixture = Fixture::new(folder.path(), AT_ONCE + 5);
        let layer = LayerKey { repository: "r".into(), digests: [Digest::of(b"")].into(), kind: LayerKind::Plain };
        let wait = || {
            (0..AT_ONCE + 5).for_each(|n| fixture.manifests.wait_for_layer(&manifest(n), layer.clone()));
            let found = fixture.layers.layer(&key("kyma"), "example.org/m", "1.0.0");
            assert!(matches!(found, LayerLookup::Pending));
        };
        wait();
        let component = ComponentVersion::new("example.org/m", "1.0.0").unwrap();
        fixture.change(&Change::Key(Key::Descriptor(component)));
        assert_eq!(fixture.enqueued(), (1, 0));
        fixture.change(&Change::Key(Key::Layer(layer.clone())));
        assert_eq!(fixture.enqueued(), (0, AT_ONCE), "the others are paced");
        fixture.change(&Change::All);
        assert_eq!(fixture.enqueued(), (0, 0), "nothing waits");
        wait();
        fixture.change(&Change::All);
        assert_eq!(fixture.enqueued(), (1, AT_ONCE));
    }
}
