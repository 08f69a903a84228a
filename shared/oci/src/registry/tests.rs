//! Tests of lookups, with a registry in the process and paused time.

mod signed;

use std::{path::Path, time::Duration};

use serde_json::json;
use tokio::time::{self, timeout};

use super::*;
use crate::testing::{FakeRegistry, Protection, Reply, digest_of, of_reason, of_result};

const REPOSITORY: &str = "component-descriptors/example.org/tide";
const LAYER: &str = "kind: ConfigMap\n";

/// A registry with a worker, and the server that it uses.
struct Fixture {
    server: FakeRegistry,
    registry: Registry,
    metrics: Metrics,
    stop: CancellationToken,
    tasks: JoinSet<&'static str>,
}

impl Fixture {
    fn with(server: FakeRegistry, folder: &Path, source: Source, max_bytes: usize) -> Self {
        let metrics = Metrics::default();
        let fetcher = Fetcher::new(server.transport().into(), [].into(), metrics.clone());
        let store = Store::open(folder, 1 << 20, metrics.clone());
        let (registry, worker) = Registry::with(fetcher, store, source, max_bytes, metrics.clone());
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(worker.run(stop.clone()));
        Self { server, registry, metrics, stop, tasks }
    }

    fn open(server: FakeRegistry, folder: &Path) -> Self {
        Self::with(server, folder, Source::Host("registry.example.com".parse().unwrap()), 1 << 20)
    }

    /// Waits for a change of this key, and for no other before it.
    async fn changed(&self, key: &Key) {
        let change = timeout(Duration::from_secs(3_600), self.registry.changed()).await.unwrap();
        assert_eq!(change, Change::Key(key.clone()));
    }

    async fn unchanged_for(&self, seconds: u64) {
        let change = timeout(Duration::from_secs(seconds), self.registry.changed()).await;
        assert_eq!(change.ok(), None);
    }

    fn failure(&self) -> Arc<LookupError> {
        match self.registry.descriptor(&component()) {
            Lookup::Failed(error) => error,
            other => panic!("{other:?}"),
        }
    }

    fn reason(&self) -> &'static str {
        self.failure().fetch().unwrap().reason()
    }

    fn text(&self, content: &str) -> Lookup<String> {
        self.registry.layer(REPOSITORY, &[Digest::of(content.as_bytes())], LayerKind::Plain)
    }

    fn is_ready(&self) -> bool {
        matches!(self.registry.descriptor(&component()), Lookup::Ready(_))
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn component() -> ComponentVersion {
    ComponentVersion::new("example.org/tide", "1.2.0").unwrap()
}

fn key() -> Key {
    Key::Descriptor(component())
}

fn layer_key(contents: &[&str]) -> Key {
    let digests = contents.iter().map(|content| Digest::of(content.as_bytes())).collect();
    Key::Layer(LayerKey { repository: REPOSITORY.into(), digests, kind: LayerKind::Plain })
}

fn descriptor() -> String {
    let access = json!({"type": "localBlob", "localReference": digest_of(LAYER.as_bytes()), "mediaType": "text/yaml"});
    let resource = json!({
        "name": "raw-manifest", "version": "1.2.0", "type": "directoryTree", "relation": "local", "access": access,
    });
    json!({
        "meta": {"schemaVersion": "v2"},
        "component": {
            "name": "example.org/tide", "version": "1.2.0", "provider": "p", "repositoryContexts": [], "sources": [],
            "componentReferences": [], "resources": [resource],
        },
    })
    .to_string()
}

/// A server with the component and its layer.
fn server() -> FakeRegistry {
    let server = FakeRegistry::default();
    server.component(REPOSITORY, "1.2.0", &descriptor());
    server.blob(REPOSITORY, LAYER.as_bytes());
    server
}

#[tokio::test(start_paused = true)]
async fn first_lookup_is_pending_and_its_result_is_announced() {
    let folder = folder();
    let server = server();
    let fixture = Fixture::open(server, folder.path());
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
    assert_eq!(fixture.metrics.pending.get(), 1);
    fixture.changed(&key()).await;
    let Lookup::Ready(descriptor) = fixture.registry.descriptor(&component()) else { panic!("not ready") };
    let digests = &descriptor.raw_manifest.as_ref().unwrap().digests;
    assert_eq!(fixture.registry.layer(REPOSITORY, digests, LayerKind::Plain), Lookup::Pending);
    fixture.changed(&layer_key(&[LAYER])).await;
    assert_eq!(fixture.text(LAYER), Lookup::Ready(Arc::new(LAYER.to_owned())));
    fixture.unchanged_for(600).await;
    assert_eq!(
        (fixture.server.received().len(), fixture.metrics.pending.get(), fixture.metrics.failed.get()),
        (4, 0, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn concurrent_lookups_of_a_key_are_one_fetch() {
    let folder = folder();
    let server = server();
    let fixture = Fixture::open(server, folder.path());
    let mut lookups = JoinSet::new();
    for _ in 0..100 {
        let registry = fixture.registry.clone();
        lookups.spawn(async move {
            tokio::task::yield_now().await;
            registry.descriptor(&component())
        });
    }
    lookups.join_all().await;
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
    assert_eq!((fixture.server.count("/manifests/"), fixture.server.count("/blobs/")), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn slow_fetches_are_bounded_and_do_not_outlive_the_worker() {
    let folder = folder();
    let server = server();
    server.script("/v2/", [Reply::Silent]);
    let mut fixture = Fixture::open(server, folder.path());
    for number in 0..10 {
        assert_eq!(fixture.text(&number.to_string()), Lookup::Pending);
    }
    time::sleep(Duration::from_secs(1)).await;
    assert_eq!((fixture.server.received().len(), fixture.metrics.pending.get()), (CONCURRENCY, 10));
    fixture.stop.cancel();
    fixture.tasks.join_next().await.unwrap().unwrap();
    time::sleep(Duration::from_secs(600)).await;
    assert_eq!(fixture.server.received().len(), CONCURRENCY);
}

#[tokio::test(start_paused = true)]
async fn failure_is_repeated_until_it_recovers_and_announced_once() {
    let folder = folder();
    let server = server();
    server.script("/manifests/", [Reply::Down]);
    let fixture = Fixture::open(server, folder.path());
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
    fixture.changed(&key()).await;
    assert_eq!((fixture.reason(), fixture.metrics.failed.get()), ("transport", 1));
    fixture.unchanged_for(3_600).await;
    // From 0.5 s to 5 min: at least every 5 min, and far from every second.
    assert!((12..60).contains(&fixture.server.received().len()), "{}", fixture.server.received().len());
    fixture.server.script("/manifests/", [Reply::status(503)]);
    fixture.changed(&key()).await;
    assert_eq!(fixture.reason(), "server");
    fixture.server.recover("/manifests/");
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
    assert_eq!((fixture.metrics.failed.get(), fixture.metrics.pending.get()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn demanded_delay_is_kept() {
    let folder = folder();
    let server = server();
    server.script("/manifests/", [Reply::with(429, "retry-after", "200")]);
    let fixture = Fixture::open(server, folder.path());
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
    fixture.changed(&key()).await;
    fixture.server.recover("/manifests/");
    fixture.unchanged_for(199).await;
    assert_eq!(fixture.server.received().len(), 1);
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
}

#[tokio::test(start_paused = true)]
async fn failure_that_is_not_looked_up_for_a_day_is_forgotten() {
    let folder = folder();
    let server = server();
    server.script("/manifests/", [Reply::Down]);
    let fixture = Fixture::open(server, folder.path());
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
    fixture.changed(&key()).await;
    time::sleep(Duration::from_secs(24 * 3_600 + 600)).await;
    let requests = fixture.server.received().len();
    time::sleep(Duration::from_secs(3_600)).await;
    assert_eq!((fixture.server.received().len(), fixture.metrics.failed.get()), (requests, 0));
    fixture.server.recover("/manifests/");
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
}

#[tokio::test(start_paused = true)]
async fn warm_restart_needs_no_registry() {
    let folder = folder();
    let first = Fixture::open(server(), folder.path());
    let _ = (first.registry.descriptor(&component()), first.text(LAYER));
    let _ = (first.registry.changed().await, first.registry.changed().await);
    let down = FakeRegistry::default();
    down.script("/v2/", [Reply::Down]);
    let fixture = Fixture::open(down, folder.path());
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
    assert_eq!(fixture.text(LAYER), Lookup::Pending);
    fixture.changed(&layer_key(&[LAYER])).await;
    assert!(matches!(fixture.text(LAYER), Lookup::Ready(_)));
    assert_eq!((fixture.server.received().len(), of_result(&fixture.metrics.store_reads, "hit")), (0, 4));
}

#[tokio::test(start_paused = true)]
async fn damaged_content_is_fetched_again() {
    let folder = folder();
    let first = Fixture::open(server(), folder.path());
    let _ = first.text(LAYER);
    first.changed(&layer_key(&[LAYER])).await;
    let path = first.registry.0.resolver.store.path(&Digest::of(LAYER.as_bytes())).unwrap();
    std::fs::write(path, "kind: Something\n").unwrap();
    let fixture = Fixture::open(server(), folder.path());
    let _ = fixture.text(LAYER);
    fixture.changed(&layer_key(&[LAYER])).await;
    assert_eq!(fixture.text(LAYER), Lookup::Ready(Arc::new(LAYER.to_owned())));
    assert_eq!((of_result(&fixture.metrics.store_reads, "corrupt"), fixture.server.received().len()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn lookups_work_without_a_usable_folder() {
    let folder = folder();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let fixture = Fixture::open(server(), &file);
    let _ = fixture.registry.descriptor(&component());
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
    assert_eq!(of_reason(&fixture.metrics.store_errors, "open"), 1);
}

#[tokio::test(start_paused = true)]
async fn text_evicted_from_memory_is_read_from_the_store_again() {
    let folder = folder();
    let server = server();
    let other = "kind: Secret\n";
    server.blob(REPOSITORY, other.as_bytes());
    let fixture = Fixture::with(server, folder.path(), Source::Host("registry.example.com".parse().unwrap()), 20);
    for content in [LAYER, other] {
        assert_eq!(fixture.text(content), Lookup::Pending);
        fixture.changed(&layer_key(&[content])).await;
    }
    assert!(matches!(fixture.text(other), Lookup::Ready(_)));
    assert_eq!(fixture.metrics.pending.get(), 0);
    assert_eq!(fixture.text(LAYER), Lookup::Pending);
    fixture.changed(&layer_key(&[LAYER])).await;
    assert!(matches!(fixture.text(LAYER), Lookup::Ready(_)));
    assert_eq!(fixture.server.received().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn unusable_artefact_is_reported_with_its_component() {
    let pointer =
        |size: u64| json!({"componentDescriptorLayer": {"mediaType": "", "digest": digest_of(b""), "size": size}});
    for (config, expected) in [
        ("{}".to_owned(), "component descriptor example.org/tide:1.2.0 is not usable"),
        (pointer(1 << 40).to_string(), "is not usable"),
        (pointer(7).to_string(), "does not exist"),
        ("x".repeat((64 << 10) + 1), "larger than the limit of 65536 bytes"),
        ("\u{1b}[31m\r\n".to_owned(), "is not usable"),
    ] {
        let folder = folder();
        let server = FakeRegistry::default();
        server.configured(REPOSITORY, "1.2.0", &config, &[]);
        let fixture = Fixture::open(server, folder.path());
        let _ = fixture.registry.descriptor(&component());
        fixture.changed(&key()).await;
        let error = fixture.failure();
        let text = error.to_string();
        assert!(text.contains(expected) && !error.is_retryable(), "{text}");
        assert!(!text.contains(char::is_control) && text.chars().count() < 1_000, "{text:?}");
        // A corrected artefact is found although its tag was fetched before.
        fixture.server.component(REPOSITORY, "1.2.0", &descriptor());
        fixture.changed(&key()).await;
        assert!(fixture.is_ready());
    }
}

#[tokio::test(start_paused = true)]
async fn known_tag_whose_manifest_is_gone_is_fetched_by_name() {
    let folder = folder();
    let first = Fixture::open(server(), folder.path());
    let _ = first.registry.descriptor(&component());
    first.changed(&key()).await;
    std::fs::remove_dir_all(folder.path().join("oci/sha256")).unwrap();
    let moved = FakeRegistry::default();
    moved.component(REPOSITORY, "1.2.0", &format!("{} ", descriptor()));
    let fixture = Fixture::open(moved, folder.path());
    let _ = fixture.registry.descriptor(&component());
    fixture.changed(&key()).await;
    assert!(fixture.is_ready());
}

#[tokio::test(start_paused = true)]
async fn layer_is_the_concatenation_of_its_blobs() {
    let folder = folder();
    let server = server();
    let parts = ["kind: ", "Pod\n"];
    for part in parts {
        server.blob(REPOSITORY, part.as_bytes());
    }
    let fixture = Fixture::open(server, folder.path());
    let digests = parts.map(|part| Digest::of(part.as_bytes()));
    let lookup = || fixture.registry.layer(REPOSITORY, &digests, LayerKind::Plain);
    assert_eq!(lookup(), Lookup::Pending);
    fixture.changed(&layer_key(&parts)).await;
    assert_eq!(lookup(), Lookup::Ready(Arc::new("kind: Pod\n".to_owned())));
    let _ = fixture.registry.layer(REPOSITORY, &[], LayerKind::Plain);
    fixture.changed(&layer_key(&[])).await;
    let none = fixture.registry.layer(REPOSITORY, &[], LayerKind::Plain);
    assert_eq!(none, Lookup::Failed(Arc::new(LookupError::Blobs(layer_key(&[])))));
}

/// `acceptance.md` C1 30.
#[tokio::test(start_paused = true)]
async fn credentials_are_replaced_at_run_time() {
    let config = |auth: &str| json!({"auths": {"registry.example.com": {"auth": auth}}}).to_string().into_bytes();
    let folder = folder();
    let server = server();
    server.protect("Basic dTpw", "Basic");
    let source = Source::Secret { name: "oci-creds".into(), subpath: String::new() };
    let fixture = Fixture::with(server, folder.path(), source, 1 << 20);
    let _ = fixture.registry.descriptor(&component());
    fixture.changed(&key()).await;
    assert_eq!(*fixture.failure(), LookupError::SecretMissing { secret: "oci-creds".into() });

    let error = CredentialsError::Count(0);
    assert_eq!(fixture.registry.set_credentials(Some(br#"{"auths":{}}"#)), Err(error));
    fixture.changed(&key()).await;
    assert_eq!(*fixture.failure(), LookupError::SecretMalformed { secret: "oci-creds".into(), error });
    assert_eq!(fixture.server.received(), []);

    assert_eq!(fixture.registry.set_credentials(Some(&config("dTpx"))), Ok(true));
    assert_eq!(fixture.registry.changed().await, Change::All);
    fixture.changed(&key()).await;
    assert_eq!(fixture.reason(), "unauthorized");
    let requests = fixture.server.received().len();

    // The previous value stays, and is known to be unchanged.
    assert_eq!(
        fixture.registry.set_credentials(Some(b"{")).map_err(|error| error.to_string().contains("line 1")),
        Err(true)
    );
    assert_eq!(fixture.registry.set_credentials(Some(&config("dTpx"))), Ok(true));
    assert_eq!(fixture.registry.set_credentials(Some(&config("dTpx"))), Ok(false));
    time::sleep(Duration::from_secs(1)).await;
    assert!(fixture.server.received().len() > requests && fixture.reason() == "unauthorized");

    assert_eq!(fixture.registry.set_credentials(Some(&config("dTpw"))), Ok(true));
    let begin = Instant::now();
    fixture.changed(&key()).await;
    assert!(fixture.is_ready() && begin.elapsed() < Duration::from_millis(100), "without backoff");
    // Fetched results outlive the Secret.
    assert_eq!(fixture.registry.set_credentials(None), Ok(true));
    assert!(fixture.is_ready() && fixture.registry.address().is_none());
    fixture.unchanged_for(600).await;
    assert_eq!(fixture.registry.set_credentials(Some(&config("dTpw"))), Ok(true));
    assert_eq!(fixture.registry.changed().await, Change::All, "what is known is not fetched again");
    assert!(fixture.is_ready() && fixture.registry.address().is_some());
}

#[tokio::test(start_paused = true)]
async fn fetch_with_replaced_credentials_is_repeated_without_backoff() {
    let folder = folder();
    let server = server();
    server.script("/manifests/", [Reply::Silent]);
    let source = Source::Secret { name: "oci-creds".into(), subpath: String::new() };
    let fixture = Fixture::with(server, folder.path(), source, 1 << 20);
    let config = |password: &str| {
        let entry = json!({"username": "u", "password": password});
        fixture.registry.set_credentials(Some(json!({"auths": {"registry.example.com": entry}}).to_string().as_bytes()))
    };
    assert_eq!(config("p"), Ok(true));
    assert_eq!(fixture.registry.changed().await, Change::All);
    let begin = Instant::now();
    assert_eq!(fixture.registry.descriptor(&component()), Lookup::Pending);
    time::sleep(Duration::from_secs(1)).await;
    fixture.server.recover("/manifests/");
    assert_eq!(config("q"), Ok(true));
    fixture.changed(&key()).await;
    assert_eq!(fixture.reason(), "timeout");
    fixture.changed(&key()).await;
    assert!(fixture.is_ready() && begin.elapsed() < Duration::from_millis(20_400));
}

#[tokio::test(start_paused = true)]
async fn fetch_that_lacks_credentials_names_the_flags_that_give_them() {
    for (status, cause) in [
        (401, "the registry refused the request without credentials"),
        (
            403,
            "the registry does not permit reading registry.example.com/component-descriptors/example.org/tide:1.2.0 without credentials",
        ),
        (404, "does not exist, or is not visible without credentials"),
    ] {
        let folder = folder();
        let server = server();
        let refusal = Reply::status(status);
        server.refuse(Protection { authorization: String::new(), ping: refusal.clone(), refusal });
        let fixture = Fixture::open(server, folder.path());
        let _ = fixture.registry.descriptor(&component());
        fixture.changed(&key()).await;
        let text = fixture.failure().to_string();
        let expected = format!(
            "{cause}; credentials come from the Secret of --oci-registry-cred-secret, or with --oci-registry-google-credentials"
        );
        assert!(text.ends_with(&expected), "{text}");
    }
}

#[tokio::test]
async fn registry_by_host_takes_no_credentials() {
    let folder = folder();
    let fixture = Fixture::open(server(), folder.path());
    assert_eq!(fixture.registry.set_credentials(None), Err(CredentialsError::Unexpected));
}

#[tokio::test(start_paused = true)]
async fn key_displaced_before_its_result_is_announced() {
    let folder = folder();
    let server = server();
    server.script("/v2/", [Reply::Silent]);
    let fixture = Fixture::open(server, folder.path());
    for number in 0..table::MAX_KEYS {
        assert_eq!(fixture.text(&number.to_string()), Lookup::Pending);
    }
    // The first ones are being fetched and keep their places.
    time::sleep(Duration::from_secs(1)).await;
    let _ = fixture.text(&CONCURRENCY.to_string());
    assert_eq!(fixture.text("one more"), Lookup::Pending);
    fixture.changed(&layer_key(&[&(CONCURRENCY + 1).to_string()])).await;
    assert_eq!(fixture.metrics.pending.get(), table::MAX_KEYS as i64);
}
