//! Read-only OCI registry over plain HTTP that has every version of every component, those of `tests/modules`, the shapes, the
//! published manifests and the large modules included: an artefact is made when its tag is read first. Real registries are used
//! where the registry itself is under test.

use std::{
    collections::HashMap,
    convert::Infallible,
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;
use http::{Request, Response, StatusCode, header::CONTENT_TYPE};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tidewatch_api::names::annotation;
use tidewatch_kit::hex;
use tokio::{
    net::TcpListener,
    task::{AbortHandle, JoinSet},
};

use crate::modules::{self, large, published, shapes};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.ocm.software.component.config.v1+json";
const DESCRIPTOR: &str = "application/vnd.ocm.software.component-descriptor.v2+yaml+tar";

/// The running registry; ends when dropped.
#[derive(Debug)]
pub struct ArtefactServer {
    address: SocketAddr,
    contents: Arc<Contents>,
    task: AbortHandle,
}

/// Contents by digest, and the number of requests.
#[derive(Debug, Default)]
struct Contents(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    by_digest: HashMap<String, Bytes>,
    requests: Vec<String>,
}

impl ArtefactServer {
    /// Listens on a free port of the loopback interface.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let contents = Arc::<Contents>::default();
        let task = tokio::spawn(serve(listener, contents.clone())).abort_handle();
        Ok(Self { address, contents, task })
    }

    /// Value of the receiver's flag for the registry's host.
    #[must_use]
    pub fn host(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Paths of the requests so far.
    #[must_use]
    pub fn requests(&self) -> Vec<String> {
        self.contents.lock().requests.clone()
    }
}

impl Drop for ArtefactServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Digest of the layer with the resources of a version of a component.
#[must_use]
pub fn layer_digest(component: &str, version: &str) -> String {
    digest_of(&layer(component, version))
}

impl Contents {
    fn lock(&self) -> parking_lot::MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Stores a content, and returns its OCI descriptor.
    fn put(&self, media_type: &str, content: Vec<u8>) -> Value {
        let digest = digest_of(&content);
        let size = content.len();
        self.lock().by_digest.insert(digest.clone(), content.into());
        json!({"mediaType": media_type, "digest": digest, "size": size})
    }

    /// Makes the artefact of a version, and returns its manifest.
    fn artefact(&self, component: &str, version: &str) -> Bytes {
        let layer = self.put("application/x-tar", layer(component, version));
        let text = component_descriptor(component, version, &layer["digest"]).to_string();
        let descriptor = self.put(DESCRIPTOR, tar("component-descriptor.yaml", text.as_bytes()));
        let config = self.put(CONFIG, json!({"componentDescriptorLayer": descriptor}).to_string().into_bytes());
        let manifest =
            json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [descriptor, layer]});
        Bytes::from(manifest.to_string())
    }

    fn respond(&self, path: &str) -> Option<(&'static str, Bytes)> {
        self.lock().requests.push(path.to_owned());
        let path = path.strip_prefix("/v2/")?;
        if let Some((_, digest)) = path.split_once("/blobs/") {
            return Some(("application/octet-stream", self.lock().by_digest.get(digest)?.clone()));
        }
        let (repository, reference) = path.split_once("/manifests/")?;
        let component = repository.strip_prefix("component-descriptors/")?;
        if reference.starts_with("sha256:") {
            return Some((MANIFEST, self.lock().by_digest.get(reference)?.clone()));
        }
        let manifest = self.artefact(component, reference);
        self.lock().by_digest.insert(digest_of(&manifest), manifest.clone());
        Some((MANIFEST, manifest))
    }
}

async fn serve(listener: TcpListener, contents: Arc<Contents>) {
    let mut connections = JoinSet::new();
    while let Ok((tcp, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        let contents = contents.clone();
        connections.spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let found = contents.respond(request.uri().path());
                async move { Ok::<_, Infallible>(response(found)) }
            });
            // The client handles the end of its connection.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(tcp), service).await;
        });
    }
}

fn response(found: Option<(&'static str, Bytes)>) -> Response<Full<Bytes>> {
    let (status, media_type, content) = match found {
        Some((media_type, content)) => (StatusCode::OK, media_type, content),
        None => (StatusCode::NOT_FOUND, "application/json", Bytes::from_static(br#"{"errors":[]}"#)),
    };
    let mut response = Response::new(Full::new(content));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static(media_type));
    response
}

/// The descriptor, with all members that the schema v2 requires.
fn component_descriptor(component: &str, version: &str, layer: &Value) -> Value {
    let module = component.rsplit('/').next().unwrap_or(component);
    let access = json!({"type": "localBlob", "localReference": layer, "mediaType": "application/x-tar"});
    let image = format!("example.test/{module}:{version}");
    json!({
        "meta": {"schemaVersion": "v2"},
        "component": {
            "name": component, "version": version, "provider": "kyma-project.io",
            "repositoryContexts": [], "sources": [], "componentReferences": [],
            "resources": [
                {"name": "raw-manifest", "version": version, "type": "directoryTree", "relation": "local", "access": access},
                {"name": module, "version": version, "type": "ociArtifact", "relation": "external",
                 "access": {"type": "ociArtifact", "imageReference": image}},
            ],
        },
    })
}

/// Beginning of the names of wide modules: their manifest has [`WIDE_OBJECTS`] objects, a Deployment among them.
pub const WIDE: &str = "wide-";
/// Number of objects in the manifest of a wide module.
const WIDE_OBJECTS: usize = 15;

/// Name of the Deployment of a wide module.
#[must_use]
pub fn manager(module: &str) -> String {
    format!("{module}-manager")
}

/// The module whose Secrets get data of KCP: its manifest has the Secrets [`INJECTED`] and [`NOT_INJECTED`].
pub const DEPLOYER: &str = "deployer";
/// Name of the Secret of [`DEPLOYER`] that gets data of KCP.
pub const INJECTED: &str = "image-pull-secret";
/// Name of the Secret of [`DEPLOYER`] that keeps its own data.
pub const NOT_INJECTED: &str = "own-secret";

/// The manifest of a sample module, of a shape, of a published manifest or of a large module; of any other one, a ConfigMap that
/// names the version, and the CRD of the module's own kind.
fn layer(component: &str, version: &str) -> Vec<u8> {
    let name = component.rsplit('/').next().unwrap_or(component);
    let sample = fs::read_to_string(modules::folder(name, version).join("manifest.yaml")).ok();
    let corpus = || shapes::manifest(name, version).or_else(|| published::manifest(name));
    if let Some(manifest) = sample.or_else(corpus).or_else(|| large::manifest(name)) {
        return tar("manifest.yaml", manifest.as_bytes());
    }
    let mut objects = vec![config_map(name, version), definition(name)];
    if name.starts_with(WIDE) {
        objects.push(deployment(name, version));
        objects.push(json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": manager(name), "namespace": "kyma-system"}}));
        objects.extend((objects.len()..WIDE_OBJECTS).map(|number| config_map(&format!("{name}-{number}"), "any")));
    }
    if name == DEPLOYER {
        objects.extend([(INJECTED, "true"), (NOT_INJECTED, "false")].map(|(name, takes)| secret(name, takes)));
    }
    let texts: Vec<_> = objects.iter().map(Value::to_string).collect();
    tar("manifest.yaml", texts.join("\n---\n").as_bytes())
}

fn config_map(name: &str, version: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "kyma-system"},
        "data": {"version": version}})
}

/// A Secret, and whether it takes the data of KCP.
fn secret(name: &str, takes: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Secret", "stringData": {"key": "own"},
        "metadata": {"name": name, "namespace": "kyma-system", "annotations": {annotation::INJECT_DATA: takes}}})
}

fn deployment(module: &str, version: &str) -> Value {
    let name = manager(module);
    let labels = json!({"app": module});
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": "kyma-system"},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
            "spec": {"serviceAccountName": name,
                     "containers": [{"name": "manager", "image": format!("example.test/{module}:{version}")}]}}}})
}

/// CRD of a module's own kind.
fn definition(module: &str) -> Value {
    let group = module_group(module);
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("samples.{group}")},
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": {"kind": "Sample", "listKind": "SampleList", "plural": "samples", "singular": "sample"},
            "versions": [{"name": "v1alpha1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": true,
            }}}],
        },
    })
}

/// API group of the kind `Sample` of a module, which its layer defines.
#[must_use]
pub fn module_group(module: &str) -> String {
    format!("{module}.example.test")
}

/// A tar with one regular file, equal for equal contents.
fn tar(name: &str, content: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    header.set_mtime(0);
    let mut archive = tar::Builder::new(Vec::new());
    // Writing to memory does not fail, and the name is short.
    let written = archive.append_data(&mut header, name, content).and_then(|()| archive.into_inner());
    written.unwrap_or_default()
}

fn digest_of(content: &[u8]) -> String {
    format!("sha256:{}", hex::encode(digest(&SHA256, content).as_ref()))
}
