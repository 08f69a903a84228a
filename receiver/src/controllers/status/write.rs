//! Writes of a status, each only when it says something new.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tidewatch_shared::{
    api::{Kyma, KymaStatus},
    names::{GROUP, SKR_KYMA, VERSION, field_manager},
};

use super::{
    Findings, compute,
    condition::{is_anothers, is_ours_alone, without_installer},
    for_runtime, same,
};
use crate::controllers::kyma::{Context, Error, error, fetch};

const WRITE_STATUS: &str = "write the status of the Kyma in the control plane";

/// Writes what was found out to the KCP Kyma, unless somebody wrote to it since it was read. Returns the status and the
/// resource version as they are then.
pub(crate) async fn write_kcp(
    ctx: &Context,
    kyma: &Kyma,
    findings: &Findings,
    now: &Time,
) -> Result<(KymaStatus, Option<String>), Error> {
    let old = kyma.status.clone().unwrap_or_default();
    let mut known = old.clone();
    if ctx.installer.is_none() {
        without_installer(&mut known);
    }
    let new = compute(&known, findings, now);
    let mut ours = old.clone();
    ours.conditions.get_or_insert_default().retain(|condition| !is_anothers(condition));
    if same(&ours, &new) {
        return Ok((old, kyma.resource_version()));
    }
    let namespace = kyma.namespace().unwrap_or_default();
    let body = json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Kyma", "status": new, "metadata": {
        "name": kyma.name_any(), "namespace": namespace, "resourceVersion": kyma.resource_version().unwrap_or_default(),
    }});
    let api: Api<Kyma> = fetch::in_kcp(ctx, &namespace);
    let params = PatchParams::apply(field_manager::LIFECYCLE).force();
    let written = api.patch_status(&kyma.name_any(), &params, &Patch::Apply(&body)).await;
    let written = written.map_err(Error::kcp(WRITE_STATUS))?;
    let version = written.resource_version();
    Ok((written.status.unwrap_or(new), version))
}

/// Takes what the incumbent would not say out of the status of the KCP Kyma, whoever wrote it: nobody would look after it any more.
/// Returns the Kyma as it is then.
pub(crate) async fn withdraw(ctx: &Context, kyma: Kyma) -> Result<Kyma, Error> {
    let all = kyma.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let (ours, kept): (Vec<_>, Vec<_>) = all.partition(|condition| is_ours_alone(condition));
    if ours.is_empty() {
        return Ok(kyma);
    }
    let patch = json!({
        "metadata": {"resourceVersion": kyma.resource_version().unwrap_or_default()}, "status": {"conditions": kept},
    });
    let api: Api<Kyma> = fetch::in_kcp(ctx, &kyma.namespace().unwrap_or_default());
    let params = PatchParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PatchParams::default() };
    let written = api.patch_status(&kyma.name_any(), &params, &Patch::Merge(&patch)).await;
    written.map_err(Error::kcp(WRITE_STATUS))
}

/// Shows the status in the runtime. A Kyma that the user is deleting is left alone.
pub(crate) async fn write_runtime(client: &Client, kyma: &Kyma, status: &KymaStatus) -> Result<(), Error> {
    let new = for_runtime(status);
    let old = kyma.status.clone().unwrap_or_default();
    if same(&old, &new) || kyma.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    let mut shown = kyma.clone();
    shown.metadata.managed_fields = None;
    shown.status = Some(new);
    let params = PostParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PostParams::default() };
    let written = fetch::in_runtime(client).replace_status(SKR_KYMA, &params, &shown).await;
    written.map_err(Error::runtime(error::WRITE_REMOTE_STATUS)).map(drop)
}
