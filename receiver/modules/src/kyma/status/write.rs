//! Writes of a status, each only if it differs from the stored one.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Api, Client, ResourceExt,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma, KymaStatus,
    names::{GROUP, SKR_KYMA, SKR_NAMESPACE, VERSION, field_manager},
};
use tidewatch_cluster::object;

use super::{
    CONFLICT_RETRIES, Conditions, Findings, compute, compute_conditions,
    condition::{PULL_SECRET, WEBHOOK, is_anothers, is_ours_alone, remove},
    fingerprint, for_runtime, reread, same,
};
use crate::kyma::{
    Context, Error,
    error::{SHOW_STATUS, WRITE_STATUS},
    fetch,
};

impl Context {
    /// Writes the status that follows from the findings to the KCP Kyma, and takes over into `kyma` what KCP stores. Fails
    /// with a conflict if the Kyma was changed since it was read: see [`reread`].
    pub(in crate::kyma) async fn write_status(&self, kyma: &mut Kyma, findings: &Findings) -> Result<(), Error> {
        self.apply_status(kyma, |old, now| compute(old, findings, now)).await
    }

    /// As [`Self::write_status`], for a reconcile that did not look at the modules: see [`compute_conditions`].
    pub(in crate::kyma) async fn write_conditions(
        &self,
        kyma: &mut Kyma,
        conditions: &Conditions,
    ) -> Result<(), Error> {
        self.apply_status(kyma, |old, now| compute_conditions(old, conditions, now)).await
    }

    async fn apply_status(
        &self,
        kyma: &mut Kyma,
        compute: impl Fn(&KymaStatus, &Time) -> KymaStatus,
    ) -> Result<(), Error> {
        let api = fetch::in_kcp(self, &kyma.namespace().unwrap_or_default());
        let mut retries = CONFLICT_RETRIES;
        loop {
            let Err(failure) = self.apply_status_once(&api, kyma, &compute).await else { return Ok(()) };
            *kyma = reread(&api, kyma, failure, &mut retries).await.map_err(Error::kcp(WRITE_STATUS))?;
        }
    }

    async fn apply_status_once(
        &self,
        api: &Api<Kyma>,
        kyma: &mut Kyma,
        compute: &impl Fn(&KymaStatus, &Time) -> KymaStatus,
    ) -> Result<(), kube::Error> {
        let mut old = kyma.status.clone().unwrap_or_default();
        let mut known = old.clone();
        if self.installer.is_none() {
            remove(&mut known, WEBHOOK);
        }
        if self.pull_secret.is_none() {
            remove(&mut known, PULL_SECRET);
        }
        let new = compute(&known, &Time(Timestamp::now()));
        old.conditions.get_or_insert_default().retain(|condition| !is_anothers(condition));
        if same(&old, &new) {
            return Ok(());
        }
        let body = json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Kyma", "status": new, "metadata": {
            "name": kyma.name_any(), "namespace": kyma.namespace(),
            "resourceVersion": kyma.resource_version().unwrap_or_default(),
        }});
        let params = PatchParams::apply(field_manager::LIFECYCLE).force();
        let written = api.patch_status(&kyma.name_any(), &params, &Patch::Apply(&body)).await?;
        kyma.status = written.status.or(Some(new));
        kyma.metadata.resource_version = written.metadata.resource_version;
        Ok(())
    }

    /// Removes the conditions that lifecycle-manager does not know from the status of the KCP Kyma, because no controller
    /// would update them after a hand-back. Returns the Kyma as stored.
    pub(in crate::kyma) async fn withdraw_conditions(&self, kyma: Kyma) -> Result<Kyma, Error> {
        let all = kyma.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let (ours, kept): (Vec<_>, Vec<_>) = all.partition(|condition| is_ours_alone(condition));
        if ours.is_empty() {
            return Ok(kyma);
        }
        let patch = json!({
            "metadata": {"resourceVersion": kyma.resource_version().unwrap_or_default()}, "status": {"conditions": kept},
        });
        let params = PatchParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PatchParams::default() };
        let api: Api<Kyma> = fetch::in_kcp(self, &kyma.namespace().unwrap_or_default());
        let written = api.patch_status(&kyma.name_any(), &params, &Patch::Merge(&patch)).await;
        written.map_err(Error::kcp(WRITE_STATUS))
    }
}

/// A Kyma in a runtime cluster with the status that it shows, as last read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShownStatus {
    uid: String,
    resource_version: String,
    /// Hash of the status.
    status: u64,
}

impl ShownStatus {
    /// `None` for a status with members that [`replacing`] does not cover.
    fn of(metadata: &ObjectMeta, status: &KymaStatus) -> Option<Self> {
        if !status.other.is_empty() {
            return None;
        }
        let uid = metadata.uid.clone()?;
        let resource_version = metadata.resource_version.clone()?;
        Some(Self { uid, resource_version, status: fingerprint(status) })
    }
}

/// Writes the status of the KCP Kyma to the runtime cluster's Kyma if that differs. A Kyma that the user is deleting is
/// left unchanged. Returns the Kyma with its status; `None` if it does not show that of the KCP Kyma.
pub(crate) async fn write_runtime(client: &Client, runtime: &Kyma, kcp: &Kyma) -> Result<Option<ShownStatus>, Error> {
    let new = for_runtime(kcp.status.clone().unwrap_or_default());
    let old = runtime.status.clone().unwrap_or_default();
    if runtime.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    if same(&old, &new) {
        return Ok(ShownStatus::of(&runtime.metadata, &new));
    }
    let mut shown = runtime.clone();
    shown.metadata.managed_fields = None;
    shown.status = Some(new.clone());
    let params = PostParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PostParams::default() };
    let written = in_runtime(client).replace_status(SKR_KYMA, &params, &shown).await;
    let written = written.map_err(Error::runtime(SHOW_STATUS))?;
    Ok(ShownStatus::of(&written.metadata, &new))
}

/// As [`write_runtime`], without a read of the Kyma. Returns `None` if it was changed since, or is gone.
pub(crate) async fn update_runtime(
    client: &Client,
    shown: &ShownStatus,
    kcp: &Kyma,
) -> Result<Option<ShownStatus>, Error> {
    let new = for_runtime(kcp.status.clone().unwrap_or_default());
    if fingerprint(&new) == shown.status {
        return Ok(Some(shown.clone()));
    }
    let ShownStatus { uid, resource_version, .. } = shown;
    let patch = json!({"metadata": {"uid": uid, "resourceVersion": resource_version}, "status": replacing(&new)});
    let params = PatchParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PatchParams::default() };
    let written = in_runtime(client).patch_status(SKR_KYMA, &params, &Patch::Merge(&patch)).await;
    match object::if_exists(written, SKR_KYMA) {
        Ok(written) => Ok(written.and_then(|written| ShownStatus::of(&written.metadata, &new))),
        // Another uid is invalid if the resourceVersion is equal by chance.
        Err(kube::Error::Api(status)) if matches!(status.code, 409 | 422) => Ok(None),
        Err(error) => Err(Error::Runtime(SHOW_STATUS, error)),
    }
}

/// Members of a merge patch that replaces the whole status: absent ones are removed.
fn replacing(status: &KymaStatus) -> Value {
    let KymaStatus { state, conditions, modules, active_channel, last_operation, other: _ } = status;
    json!({"state": state, "conditions": conditions, "modules": modules, "activeChannel": active_channel,
        "lastOperation": last_operation})
}

/// The Kymas of a runtime cluster.
pub(crate) fn in_runtime(client: &Client) -> Api<Kyma> {
    Api::namespaced(client.clone(), SKR_NAMESPACE)
}

#[cfg(test)]
mod tests {
    use tidewatch_cluster::testing::FakeApiServer;

    use super::*;

    fn kyma(status: Value) -> Kyma {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": SKR_KYMA, "namespace": SKR_NAMESPACE}, "spec": {"channel": "regular"}, "status": status}))
        .unwrap()
    }

    #[test]
    fn patch_replaces_every_member() {
        let full = json!({"state": "Ready", "conditions": [], "modules": [], "activeChannel": "regular",
            "lastOperation": {"operation": "o"}});
        let full = serde_json::from_value(full).unwrap();
        let Value::Object(members) = serde_json::to_value(&full).unwrap() else { panic!("no object") };
        let patch = replacing(&KymaStatus::default());
        assert!(members.keys().all(|name| patch[name].is_null()), "{patch}");
        assert_eq!(replacing(&full)["activeChannel"], "regular");
    }

    #[tokio::test]
    async fn known_version_is_patched_without_a_read_until_another_writer_changes_it() {
        let server = FakeApiServer::default();
        let client = server.client();
        let show = |text: &str| kyma(json!({"state": "Ready", "lastOperation": {"operation": text}}));
        server.edit("kymas/default", |stored| {
            *stored = json!(kyma(json!({"state": "Processing", "modules": [{"name": "m", "state": "Processing"}]})))
        });
        let runtime: Kyma = serde_json::from_value(server.object("kymas/default").unwrap()).unwrap();
        let first = write_runtime(&client, &runtime, &show("1")).await.unwrap().unwrap();
        server.calls();
        assert_eq!(update_runtime(&client, &first, &show("1")).await.unwrap().as_ref(), Some(&first));
        assert_eq!(server.calls(), Vec::<String>::new(), "nothing differs");
        let second = update_runtime(&client, &first, &show("2")).await.unwrap().unwrap();
        assert_eq!(server.calls(), ["PATCH kymas/default/status"]);
        let status = server.object("kymas/default").unwrap()["status"].clone();
        assert_eq!(status, json!({"state": "Ready", "lastOperation": {"operation": "2"}}));
        server.edit("kymas/default", |stored| stored["spec"]["channel"] = json!("fast"));
        assert_eq!(update_runtime(&client, &second, &show("3")).await.unwrap(), None);
        server.remove("kymas/default");
        assert_eq!(update_runtime(&client, &second, &show("3")).await.unwrap(), None);
    }
}
