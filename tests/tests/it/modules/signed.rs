//! Component descriptors that have to be signed (`--component-keys`).

use std::fs;

use rcgen::{KeyPair, PKCS_RSA_SHA256, RsaKeySize};

use super::*;

/// Packs a version of a sample module, signs it with a new key, pushes it, and returns the public key.
async fn publish_signed(modules: &ModuleRuntime, name: &str, version: &str, signature: &str) -> Result<String> {
    let output = tempfile::tempdir()?;
    let host = modules.registry.host();
    let key = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048)?;
    let private = output.path().join("private.pem");
    fs::write(&private, key.serialize_pem())?;
    let paths = [&folder(name, version), output.path(), &output.path().join("layout"), &private];
    let [folder, out, layout, private] = paths.map(|path| path.to_string_lossy().into_owned());
    let packed = run("tidewatch", &["module", "pack", &folder, "--output", &out]).await?;
    ensure!(packed.status.success(), "pack: {}", text(&packed.stderr));
    let arguments = ["module", "sign", &layout, "--key", &private, "--signature-name", signature, "--push", &host];
    let signed = run("tidewatch", &arguments).await?;
    ensure!(signed.status.success(), "sign: {}", text(&signed.stderr));
    modules.apply_template(output.path()).await?;
    Ok(key.public_key_pem())
}

#[tokio::test]
async fn only_modules_that_a_trusted_key_signed_are_installed_and_upgraded() -> TestResult {
    tidewatch_testing::install_crypto();
    let keys = tempfile::tempdir()?;
    // The receiver needs a key at start, before the registry of the test has an address.
    fs::write(
        keys.path().join("first.pem"),
        KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048)?.public_key_pem(),
    )?;
    let receiver = vec!["--component-keys".to_owned(), keys.path().to_string_lossy().into_owned()];
    let options = Options { receiver, ..quick_options() };
    let versions: &[(&str, &[&str])] = &[("own-resource", &["1.0.0"])];
    let modules = ModuleRuntime::without_agent("signed", versions, options).await?;
    let public = publish_signed(&modules, "sample", "1.0.0", "release").await?;
    fs::write(keys.path().join("release.pem"), public)?;
    modules.point("sample", "1.0.0").await?;
    modules.start_agent().await?;
    modules.setup.runtime.select(&["own-resource", "sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules
        .says("own-resource", State::Error, "it has no signature; expected is one of \"first\", \"release\"")
        .await?;

    let public = publish_signed(&modules, "sample", "1.1.0", "next").await?;
    modules.point("sample", "1.1.0").await?;
    modules.says("sample", State::Error, "its signatures \"next\" are not of a trusted key").await?;
    let installed = modules.manifest("sample").await?;
    assert_eq!(installed.spec.version.as_deref(), Some("1.0.0"), "the installed version stays");

    // Keys are read again while the receiver runs.
    fs::write(keys.path().join("next.pem"), public)?;
    modules.becomes("sample", "1.1.0", State::Ready).await?;
    modules.leave().await?;
    Ok(())
}
