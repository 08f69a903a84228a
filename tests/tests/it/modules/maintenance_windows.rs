//! Upgrades that require a downtime wait for a maintenance window (`acceptance.md` C1 24).

use jiff::{SignedDuration, Timestamp};
use tidewatch_api::{Kyma, ModuleStatus};
use tidewatch_testing::landscape::Options;

use super::*;

impl ModuleRuntime {
    /// Marks a version of the sample module as one that requires a downtime.
    async fn require_downtime(&self, version: &str) -> Result<()> {
        let landscape = &self.setup.landscape;
        let api = Api::<ModuleTemplate>::namespaced(landscape.operator(), landscape.namespace());
        let patch = Patch::Merge(json!({"spec": {"requiresDowntime": true}}));
        api.patch(&format!("sample-{version}"), &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Waits until both Kymas are Ready, and the sample module waits for its window.
    async fn waits(&self, version: &str) -> Result<()> {
        let holds = |module: &ModuleStatus| {
            let message = module.message.as_deref().unwrap_or_default();
            module.state == State::Ready
                && module.version.as_deref() == Some(version)
                && module.maintenance == Some(true)
                && message.starts_with("waiting for next maintenance window to update module version")
        };
        let holds = |status: &KymaStatus| status.state() == State::Ready && module(status, "sample").is_some_and(holds);
        self.setup.kcp_status("sample waits for its window", holds).await?;
        self.setup.skr_status("sample waits for its window", holds).await.map(drop)
    }

    /// Waits until the sample module has this version, and waits for nothing.
    async fn is_upgraded(&self, version: &str) -> Result<()> {
        let holds = |module: &ModuleStatus| {
            module.state == State::Ready
                && module.version.as_deref() == Some(version)
                && module.maintenance == Some(false)
                && module.message.is_none()
        };
        let holds = |status: &KymaStatus| module(status, "sample").is_some_and(holds);
        self.setup.kcp_status(&format!("sample {version}"), holds).await?;
        self.setup.skr_status(&format!("sample {version}"), holds).await.map(drop)
    }
}

/// Replaces the policy by one whose window for the test's region begins after this time, and lasts four hours.
fn write_policy(path: &Path, after: SignedDuration) -> Result<()> {
    let begin = Timestamp::now() + after;
    let end = begin + SignedDuration::from_hours(4);
    let window = json!({"begin": begin.to_string(), "end": end.to_string()});
    let never = json!({"begin": "2000-01-01T00:00:00Z", "end": "2000-01-02T00:00:00Z"});
    let policy = json!({"rules": [{"match": {"region": "^eu-"}, "windows": [window]}], "default": never});
    let next = path.with_extension("next");
    std::fs::write(&next, policy.to_string())?;
    Ok(std::fs::rename(next, path)?)
}

#[tokio::test]
async fn an_upgrade_with_downtime_waits_until_the_policy_opens_its_window() -> TestResult {
    let closed = SignedDuration::from_hours(24);
    let open = SignedDuration::from_hours(-1);
    let folder = tempfile::tempdir()?;
    let policy = folder.path().join("policy.json");
    write_policy(&policy, closed)?;
    let receiver = vec![format!("--maintenance-window-policy={}", policy.display())];
    let options = Options { receiver, ..quick_options() };
    let modules = ModuleRuntime::without_agent("windows", &[("sample", &["1.0.0", "1.1.0", "2.0.0"])], options).await?;
    for version in ["1.0.0", "1.1.0", "2.0.0"] {
        modules.require_downtime(version).await?;
    }
    let kymas: Api<Kyma> = modules.setup.kcp_kymas().await?;
    let patch = async |patch: Value| {
        kymas.patch(modules.setup.runtime.name(), &PatchParams::default(), &Patch::Merge(patch)).await
    };
    patch(json!({"metadata": {"labels": {"kyma-project.io/region": "eu-central-1"}}})).await?;
    modules.start_agent().await?;

    // A first installation never waits.
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    // A Kyma may skip its windows.
    modules.point("sample", "1.1.0").await?;
    modules.waits("1.0.0").await?;
    patch(json!({"spec": {"skipMaintenanceWindows": true}})).await?;
    modules.is_upgraded("1.1.0").await?;
    patch(json!({"spec": {"skipMaintenanceWindows": false}})).await?;

    modules.point("sample", "2.0.0").await?;
    modules.waits("1.1.0").await?;
    write_policy(&policy, open)?;
    modules.is_upgraded("2.0.0").await?;
    modules.leave().await?;
    Ok(())
}
