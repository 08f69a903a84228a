//! The registry of the test bed: its protocols and authentications, with blobs and manifests.

use std::{collections::BTreeMap, fs};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};
use tidewatch_testing::{
    bed,
    registry::{
        Access, Login, Options, Registry, Transport,
        client::{ClientError, RegistryClient, digest_of},
        push::push_layout,
    },
};

use crate::support::TestResult;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const REPOSITORY: &str = "component-descriptors/kyma-project.io/module/sample";

async fn start(name: &str, transport: Transport, access: Access) -> Result<Registry> {
    tidewatch_testing::install_crypto();
    Ok(Registry::start(bed::shared().await?, name, Options { transport, access }).await?)
}

/// A manifest whose config and only layer is the same blob.
fn manifest(blob: &[u8]) -> Bytes {
    let reference = json!({"mediaType": "application/x-test", "digest": digest_of(blob), "size": blob.len()});
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": reference, "layers": [reference]});
    Bytes::from(manifest.to_string())
}

/// Pushes a manifest with a blob, and pulls both by digest, the manifest also by tag.
async fn push_and_pull(client: &RegistryClient) -> Result<String> {
    let blob = Bytes::from_static(b"objects");
    let manifest = manifest(&blob);
    let blob_digest = client.push_blob(REPOSITORY, blob.clone()).await?;
    let digest = client.push_manifest(REPOSITORY, "1.0.0", MANIFEST, manifest.clone()).await?;
    assert_eq!(client.blob(REPOSITORY, &blob_digest).await?, blob);
    for reference in [digest.as_str(), "1.0.0"] {
        assert_eq!(client.manifest(REPOSITORY, reference).await?, manifest, "{reference}");
    }
    Ok(digest)
}

fn status<T>(result: Result<T, ClientError>) -> Option<StatusCode> {
    result.err().and_then(|error| error.status())
}

#[tokio::test]
async fn a_registry_with_tls_and_password_serves_what_was_pushed() -> TestResult {
    let registry = start("password", Transport::Tls, Access::Basic).await?;
    let client = registry.client()?;
    let digest = push_and_pull(&client).await?;

    let wrong = registry.client_as(Some(Login { password: "wrong", ..Login::TEST }))?;
    let anonymous = registry.client_as(None)?;
    for client in [wrong, anonymous] {
        assert_eq!(status(client.manifest(REPOSITORY, &digest).await), Some(StatusCode::UNAUTHORIZED));
        assert_eq!(status(client.push_blob(REPOSITORY, Bytes::new()).await), Some(StatusCode::UNAUTHORIZED));
    }
    // Without its CA, the registry is not trusted.
    let login = registry.login();
    let other = RegistryClient::new(registry.url(), None, login)?;
    assert!(matches!(other.check().await, Err(ClientError::Send(..))));

    let config: Value = serde_json::from_str(&registry.dockerconfigjson())?;
    assert_eq!(config["auths"][registry.host()]["auth"], "dGVzdDpwdWxsLWFuZC1wdXNo");
    let ca = fs::read_to_string(registry.ca_file().context("a CA")?)?;
    assert_eq!(Some(ca.as_str()), registry.ca_pem());

    client.delete_manifest(REPOSITORY, &digest).await?;
    assert_eq!(status(client.manifest(REPOSITORY, "1.0.0").await), Some(StatusCode::NOT_FOUND));
    Ok(())
}

#[tokio::test]
async fn a_registry_accepts_the_tokens_of_its_token_server() -> TestResult {
    for (name, transport) in [("token", Transport::Tls), ("plain-token", Transport::Plain)] {
        let registry = start(name, transport, Access::Token).await?;
        let digest = push_and_pull(&registry.client()?).await?;
        let wrong = registry.client_as(Some(Login { password: "wrong", ..Login::TEST }))?;
        let refused = wrong.manifest(REPOSITORY, &digest).await;
        assert!(matches!(
            refused,
            Err(ClientError::Refused { operation: "get a token", status: StatusCode::UNAUTHORIZED, .. })
        ));
        assert_eq!(
            status(registry.client_as(None)?.manifest(REPOSITORY, &digest).await),
            Some(StatusCode::UNAUTHORIZED)
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_layout_is_pushed_to_a_registry_without_authentication() -> TestResult {
    let registry = start("plain", Transport::Plain, Access::Anonymous).await?;
    assert_eq!((registry.login(), registry.ca_pem()), (None, None));
    assert!(registry.host().starts_with("http://127.0.0.1:"));

    let layout = tempfile::tempdir()?;
    let blob = Bytes::from_static(b"layer");
    let content = manifest(&blob);
    let index = json!({"schemaVersion": 2, "manifests": [
        {"mediaType": MANIFEST, "digest": digest_of(&content), "size": content.len()},
    ]});
    let blobs = layout.path().join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    let files: BTreeMap<_, _> = [&blob, &content].map(|content| (digest_of(content), content)).into();
    for (digest, content) in files {
        fs::write(blobs.join(digest.trim_start_matches("sha256:")), content)?;
    }
    fs::write(layout.path().join("index.json"), index.to_string())?;

    let client = registry.client()?;
    let digest = push_layout(&client, layout.path(), REPOSITORY, "2.0.0").await?;
    assert_eq!(digest, digest_of(&content));
    assert_eq!(client.manifest(REPOSITORY, "2.0.0").await?, content);
    assert_eq!(client.blob(REPOSITORY, &digest_of(&blob)).await?, blob);
    Ok(())
}
