//! Restricted modules: only Kymas that their release meta selects may use them (`acceptance.md` C1 28).

use tidewatch_api::{Kyma, ModuleReleaseMeta};
use tidewatch_testing::landscape::{Options, catalog::release_meta};

use super::*;

impl ModuleRuntime {
    /// Lets the release meta of a module select the Kymas of a team.
    async fn select_team(&self, module: &str, team: &str) -> Result<()> {
        let mut meta = release_meta(module, &[("regular", "1.0.0")]);
        meta["spec"]["kymaSelector"] = json!({"matchLabels": {"team": team}});
        let landscape = &self.setup.landscape;
        let api = Api::<ModuleReleaseMeta>::namespaced(landscape.operator(), landscape.namespace());
        api.patch(module, &PatchParams::apply("operator").force(), &Patch::Apply(&meta)).await?;
        Ok(())
    }

    /// Waits until nothing of the sample module is left in the runtime, and no Manifest in KCP.
    async fn sample_goes(&self) -> Result<()> {
        let deployments = Api::<Deployment>::namespaced(self.client().await?, SKR_NAMESPACE);
        until("the sample module to go", async || {
            let is_gone = deployments.get_opt("sample-manager").await?.is_none();
            let mut manifests = self.setup.manifests().await?.into_iter();
            let is_released = !manifests.any(|it| it.labels().get(label::MODULE_NAME).is_some_and(|of| of == "sample"));
            Ok((is_gone && is_released).then_some(()))
        })
        .await
    }
}

#[tokio::test]
async fn a_restricted_module_is_uninstalled_by_its_user_or_by_deselection() -> TestResult {
    // A module that does not exist changes nothing.
    let receiver = vec!["--restricted-default-modules=sample, no-such-module".to_owned()];
    let versions: &[(&str, &[&str])] = &[("sample", &["1.0.0"]), ("without-default", &["1.0.0"])];
    let options = Options { receiver, ..quick_options() };
    let modules = ModuleRuntime::without_agent("restricted", versions, options).await?;
    let kymas: Api<Kyma> = modules.setup.kcp_kymas().await?;
    let team = Patch::Merge(json!({"metadata": {"labels": {"team": "a"}}}));
    kymas.patch(modules.setup.runtime.name(), &PatchParams::default(), &team).await?;
    modules.select_team("sample", "a").await?;
    modules.start_agent().await?;
    let ready = |status: &KymaStatus| status.state() == State::Ready;

    modules.setup.runtime.select(&["sample", "without-default"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.becomes("without-default", "1.0.0", State::Ready).await?;
    modules.setup.runtime.select(&["without-default"]).await?;
    modules.sample_goes().await?;
    modules.setup.skr_status("Ready", ready).await?;
    modules.setup.runtime.select(&["sample", "without-default"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;

    modules.select_team("sample", "b").await?;
    modules.sample_goes().await?;
    let refused = "module template not allowed: restricted module not allowed for this Kyma";
    modules.says("sample", State::Error, refused).await?;
    let is_error = |status: &KymaStatus| status.state() == State::Error;
    modules.setup.kcp_status("Error", is_error).await?;
    modules.setup.skr_status("Error", is_error).await?;
    modules.becomes("without-default", "1.0.0", State::Ready).await?;
    let metas = Api::<ModuleReleaseMeta>::namespaced(modules.client().await?, SKR_NAMESPACE);
    until("the catalog without the module", async || Ok(metas.get_opt("sample").await?.is_none().then_some(())))
        .await?;

    // A Kyma that is selected again gets the module again.
    let team = Patch::Merge(json!({"metadata": {"labels": {"team": "b"}}}));
    kymas.patch(modules.setup.runtime.name(), &PatchParams::default(), &team).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.setup.skr_status("Ready", ready).await?;

    // A selector on a module that is not restricted is a mistake.
    modules.select_team("without-default", "b").await?;
    let refused = "module template not allowed: module has kymaSelector but is not in restricted modules list";
    modules.says("without-default", State::Error, refused).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.setup.skr_status("Ready", ready).await?;
    modules.leave().await?;
    Ok(())
}
