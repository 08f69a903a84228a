//! The registry of the test bed, with the clients of the product: the operators' program pushes to it, and the fetcher of the
//! receiver pulls.

use anyhow::{Context as _, Result, ensure};
use hyper_util::client::proxy::matcher::Matcher;
use tidewatch_kit::addresses::AddressRules;
use tidewatch_oci::{
    credentials::RegistryTarget,
    fetch::{FetchError, Fetcher, Reference, Size},
    metrics::Metrics,
    tls,
};
use tidewatch_testing::{
    bed,
    modules::folder,
    registry::{Access, Login, Options, Registry, Transport},
};

use crate::support::{TestResult, run_with_input};

const REPOSITORY: &str = "component-descriptors/kyma-project.io/module/sample";
const VERSION: &str = "1.0.0";
const WRONG: Login<'static> = Login { password: "wrong", ..Login::TEST };
/// Host of the token server, which has another port than the registry.
const TOKEN_HOST: &str = "127.0.0.1";

async fn start(name: &str, transport: Transport, access: Access) -> Result<Registry> {
    tidewatch_testing::install_crypto();
    Ok(Registry::start(bed::shared().await?, name, Options { transport, access }).await?)
}

/// Packs and pushes a module with a login.
async fn push(registry: &Registry, login: Option<Login<'_>>) -> Result<()> {
    let output = tempfile::tempdir()?;
    let [module, output] = [&folder("sample", VERSION), output.path()].map(|path| path.to_string_lossy().into_owned());
    let host = registry.host();
    let ca = registry.ca_file().map(|file| file.to_string_lossy().into_owned());
    let mut arguments = vec!["module", "pack", &module, "--output", &output, "--push", &host];
    arguments.extend(["--oci-registry-allowed-hosts", TOKEN_HOST]);
    arguments.extend(ca.as_deref().into_iter().flat_map(|file| ["--ca-file", file]));
    arguments.extend(login.iter().flat_map(|login| ["--username", login.user, "--password-stdin"]));
    let pushed = run_with_input("tidewatch", &arguments, login.map_or("", |login| login.password)).await?;
    ensure!(pushed.status.success(), "{}", String::from_utf8_lossy(&pushed.stderr));
    Ok(())
}

/// Fetches the manifest by tag and by digest, and all blobs, with a login in a dockerconfigjson.
async fn pull(registry: &Registry, login: Option<Login<'_>>, with_ca: bool) -> Result<(), FetchError> {
    let roots = tls::roots(registry.ca_file().filter(|_| with_ca).as_ref()).unwrap();
    let proxy = Matcher::builder().build();
    let transports = tls::transports(roots, proxy, AddressRules::default()).unwrap();
    let allowed = [TOKEN_HOST.parse().unwrap()].into();
    let fetcher = Fetcher::new(transports, allowed, Metrics::default());
    let target = RegistryTarget::from_docker_config(registry.dockerconfigjson(login).as_bytes(), "").unwrap();
    let (manifest, digest, content) = fetcher.manifest(&target, REPOSITORY, Reference::Tag(VERSION)).await?;
    assert_eq!(fetcher.manifest(&target, REPOSITORY, Reference::Digest(digest)).await?.2, content);
    for blob in manifest.layers.iter().chain([&manifest.config]) {
        fetcher.blob(&target, REPOSITORY, blob.digest, Size::Exactly(blob.size)).await?;
    }
    Ok(())
}

/// The login pushes and pulls; no other one does.
async fn only_the_login_pushes_and_pulls(registry: &Registry) -> Result<()> {
    push(registry, registry.login()).await.context("push")?;
    pull(registry, registry.login(), true).await.context("pull")?;
    for other in [Some(WRONG), None] {
        let refused = pull(registry, other, true).await;
        let is_as_sent = |sent: &bool| *sent == other.is_some();
        assert!(
            matches!(&refused, Err(FetchError::Unauthorized { with_credentials }) if is_as_sent(with_credentials)),
            "{refused:?}"
        );
        assert!(push(registry, other).await.is_err(), "{other:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_registry_with_tls_and_password_serves_what_was_pushed() -> TestResult {
    let registry = start("password", Transport::Tls, Access::Basic).await?;
    only_the_login_pushes_and_pulls(&registry).await?;
    let untrusted = pull(&registry, registry.login(), false).await;
    assert!(matches!(untrusted, Err(FetchError::Transport(_))), "{untrusted:?}");
    Ok(())
}

#[tokio::test]
async fn a_registry_accepts_the_tokens_of_its_token_server() -> TestResult {
    for (name, transport) in [("token", Transport::Tls), ("plain-token", Transport::Plain)] {
        only_the_login_pushes_and_pulls(&start(name, transport, Access::Token).await?).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_registry_without_authentication_needs_no_login() -> TestResult {
    let registry = start("plain", Transport::Plain, Access::Anonymous).await?;
    assert_eq!((registry.login(), registry.ca_file()), (None, None));
    let missing = pull(&registry, None, true).await;
    assert!(matches!(missing, Err(FetchError::NotFound { .. })), "{missing:?}");
    push(&registry, None).await?;
    Ok(pull(&registry, None, true).await?)
}
