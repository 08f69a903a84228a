//! Modules with a webhook for their own resources, which their operator serves.

use std::fs;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use tidewatch_testing::{control_plane::credentials, ports};

use super::*;

impl ModuleRuntime {
    /// Publishes a module with address and certificate of its webhook in the manifest.
    async fn publish_webhook(&self, module: &str, version: &str) -> Result<()> {
        let (ca, certificate, key) = credentials::certificates(module)?;
        let encoded = |pem: &str| BASE64_STANDARD.encode(pem);
        let values = [
            ("${ADDRESS}", format!("127.0.0.1:{}", ports::free()?)),
            ("${CA}", encoded(&ca)),
            ("${CERTIFICATE}", encoded(&certificate)),
            ("${KEY}", encoded(&key)),
        ];
        let filled = tempfile::tempdir()?;
        for entry in fs::read_dir(folder(module, version))? {
            let entry = entry?;
            let text = fs::read_to_string(entry.path())?;
            let text = values.iter().fold(text, |text, (name, value)| text.replace(name, value));
            fs::write(filled.path().join(entry.file_name()), text)?;
        }
        self.publish_folder(filled.path()).await?;
        self.point(module, version).await
    }
}

#[tokio::test]
async fn resources_of_a_module_wait_for_the_webhook_that_guards_them() -> TestResult {
    let modules = ModuleRuntime::start("webhook", &[]).await?;
    modules.publish_webhook("webhook", "1.0.0").await?;
    modules.setup.runtime.select(&["webhook"]).await?;
    modules.becomes("webhook", "1.0.0", State::Ready).await?;
    let samples = modules.samples("v1alpha1", "GuardedSample").await?;
    let exists = async |name: &str| anyhow::Ok(samples.get_opt(name).await?.is_some().then_some(()));
    until("the resource of the manifest", async || exists("internal").await).await?;
    until("the default module CR", async || exists("default").await).await?;

    let many = Patch::Merge(json!({"spec": {"replicas": 11}}));
    let refused = samples.patch("default", &PatchParams::default(), &many).await;
    let message = match refused {
        Err(kube::Error::Api(status)) => status.message.clone(),
        other => format!("{other:?}"),
    };
    assert!(message.contains("at most 10 replicas"), "the webhook is called: {message}");
    modules.leave().await?;
    Ok(())
}
