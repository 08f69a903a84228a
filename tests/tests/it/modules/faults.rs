//! Faults in the middle of installations, upgrades and removals.

use k8s_openapi::api::rbac::v1::RoleRef;
use tidewatch_api::ModuleReleaseMeta;

use super::*;

/// ClusterRoleBinding of the account of the access Secret.
pub(super) const CONTROL_PLANE: &str = "tidewatch-control-plane";

impl ModuleRuntime {
    /// Changes the selection or a channel, and kills the receiver after this many of its writes to the runtime.
    async fn kill_after(&self, writes: usize, change: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
        let cluster = self.setup.runtime.cluster();
        let account = format!(":{CONTROL_PLANE}");
        let mark = cluster.audit_mark()?;
        change().await?;
        until(&format!("{writes} writes to the runtime"), async || {
            let found = cluster.writes_since(mark)?.into_iter().filter(|write| write.user.ends_with(&account)).count();
            Ok((found >= writes).then_some(()))
        })
        .await?;
        self.setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
        self.setup.landscape.start_receiver().await
    }

    /// Waits until the channel of a module names a version in the runtime's catalog.
    async fn offers(&self, name: &str, version: &str) -> Result<()> {
        let metas = Api::<ModuleReleaseMeta>::namespaced(self.setup.runtime.user(), SKR_NAMESPACE);
        until(&format!("the channel of {name} to name {version}"), async || {
            let meta = metas.get(name).await?;
            Ok((meta.spec.version_of("regular") == Some(version)).then_some(()))
        })
        .await
    }

    /// Binds the account of the access Secret to another ClusterRole.
    async fn bind_control_plane(&self, role: &str) -> Result<()> {
        let bindings = Api::<ClusterRoleBinding>::all(self.client().await?);
        let mut binding = bindings.get(CONTROL_PLANE).await?;
        bindings.delete(CONTROL_PLANE, &DeleteParams::default()).await?;
        (binding.metadata.resource_version, binding.metadata.uid, binding.metadata.managed_fields) = (None, None, None);
        binding.role_ref = RoleRef { name: role.to_owned(), ..binding.role_ref };
        bindings.create(&PostParams::default(), &binding).await?;
        Ok(())
    }
}

#[tokio::test]
async fn a_receiver_killed_at_any_write_completes_installs_upgrades_and_removals() -> TestResult {
    let modules = ModuleRuntime::start("killed-anywhere", &[("sample", &["1.0.0", "1.1.0"])]).await?;
    let select = async |names: &[&str]| modules.setup.runtime.select(names).await.map(drop);
    for (install, upgrade, removal) in [(1, 1, 1), (3, 2, 3), (5, 4, 4)] {
        modules.kill_after(install, async || select(&["sample"]).await).await?;
        modules.becomes("sample", "1.0.0", State::Ready).await?;
        modules.kill_after(upgrade, async || modules.point("sample", "1.1.0").await).await?;
        modules.becomes("sample", "1.1.0", State::Ready).await?;
        modules.kill_after(removal, async || select(&[]).await).await?;
        modules.is_clean().await?;
        // An installation that begins with the later version would refuse the earlier one.
        modules.point("sample", "1.0.0").await?;
        modules.offers("sample", "1.0.0").await?;
    }
    // While the default module CR is created, which a new CRD delays.
    modules.kill_after(6, async || select(&["sample"]).await).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.leave().await?;
    Ok(())
}

#[tokio::test]
async fn revoked_rights_are_shown_and_the_work_continues_when_they_return() -> TestResult {
    let modules = ModuleRuntime::start("revoked", &[("sample", &["1.0.0", "2.0.0"])]).await?;
    let groups =
        ["", "operator.kyma-project.io", "apiextensions.k8s.io", "rbac.authorization.k8s.io", "coordination.k8s.io"];
    let role = json!({"metadata": {"name": "without-workloads"},
        "rules": [{"apiGroups": groups, "resources": ["*"], "verbs": ["*"]}]});
    let roles = Api::<ClusterRole>::all(modules.client().await?);
    roles.create(&PostParams::default(), &serde_json::from_value(role)?).await?;
    modules.bind_control_plane("without-workloads").await?;
    modules.setup.runtime.select(&["sample"]).await?;
    // Nothing is applied before it is known whether the user has installed the module by hand.
    modules.says("sample", State::Error, "read Deployment kyma-system/sample-manager").await?;
    modules.bind_control_plane("cluster-admin").await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;

    modules.bind_control_plane("without-workloads").await?;
    modules.point("sample", "2.0.0").await?;
    modules.says("sample", State::Error, "apply Deployment kyma-system/sample-manager").await?;
    modules.bind_control_plane("cluster-admin").await?;
    modules.becomes("sample", "2.0.0", State::Ready).await?;

    modules.bind_control_plane("without-workloads").await?;
    modules.setup.runtime.select(&[]).await?;
    modules.says("sample", State::Deleting, "delete Deployment kyma-system/sample-manager").await?;
    modules.bind_control_plane("cluster-admin").await?;
    modules.is_clean().await?;
    Ok(())
}
