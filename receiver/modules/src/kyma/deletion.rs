//! Deletion of a Kyma: first its Manifests, reporting the objects that block it; then our objects in the runtime
//! cluster; our finalizer last. Each reconcile progresses as far as possible and starts from the observed state.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::json;
use tidewatch_api::{
    Kyma, Manifest, State,
    facts::KymaFacts,
    key::KymaKey,
    names::{SKR_KYMA, field_manager, finalizer, label},
};
use tidewatch_cluster::{
    object,
    runtime_access::{ClientError, RuntimeAccessError},
};
use tidewatch_installer::{Readiness, SECRET_DELETED, SECRET_MISSING, pending_removal::PendingRemoval};
use tidewatch_select::kyma::mandatory::is_mandatory;
use tracing::info;

use super::{
    Context, Error, apply, base, crd, error, fetch, leave, module_status, pull_secret, requests,
    status::{Conditions, Findings, WAITING_FOR_MODULES, unreachable_since, write_runtime},
};

/// Time after which a runtime cluster counts as gone if its access Secret was seen being deleted during the deletion of its
/// Kyma. infrastructure-manager deletes the Secret right before the cluster.
const GONE_AFTER_DELETED_SECRET: Duration = Duration::from_secs(60);
/// Interval of checks for Manifests without progress; a changed or deleted Manifest enqueues its Kyma.
const REMIND: Duration = Duration::from_secs(60);

/// Continues the deletion of a Kyma with a deletion timestamp. Returns the delay until the next step, `None` after the
/// last one.
pub(super) async fn step(ctx: &Context, key: &KymaKey, mut kyma: Kyma) -> Result<Option<Duration>, Error> {
    if !has_finalizer(&kyma, finalizer::KYMA) {
        return left_to_others(ctx, key, kyma).await;
    }
    let begins = kyma.status.as_ref().is_none_or(|status| status.state() != State::Deleting);
    let left = delete_manifests(ctx, &kyma).await?;
    let access = match (ctx.clients)(key) {
        Ok((client, _)) => Ok(client),
        Err(ClientError::Access(unusable)) => Err(confirmed(ctx, &kyma, unusable).await?),
        // There is a Secret: nothing of this counts as a runtime that is gone.
        Err(error) => return Err(error.into()),
    };
    record(ctx, &mut kyma, &left, access.as_ref().err()).await?;
    if begins {
        ctx.metrics.requeues.intended("kyma_deletion");
    }
    let waits = || PendingRemoval::after(REMIND, mandatory_blockers(&left));
    let removal = match access {
        Ok(client) if left.is_empty() => clean(ctx, key, &client, &kyma).await,
        Ok(client) => show(&client, &kyma).await.map(|()| Some(waits())),
        Err(RuntimeAccessError::Missing | RuntimeAccessError::SecretDeleted(_)) => {
            without_runtime(ctx, key, &kyma, &left).await
        }
        Err(unusable) if !left.is_empty() => {
            Ok(Some(PendingRemoval::after(REMIND, Some(leave::without_access(&unusable.to_string())))))
        }
        Err(unusable) => Err(ClientError::Access(unusable).into()),
    };
    let pending = leave::after(ctx, &mut kyma, removal).await?;
    if pending.is_some() {
        return Ok(pending);
    }
    finish(ctx, key, kyma).await
}

fn has_finalizer(kyma: &Kyma, name: &str) -> bool {
    kyma.finalizers().iter().any(|finalizer| finalizer == name)
}

/// Ends our part of the deletion: names the finalizers of others in the status, which nobody updates once they remove them,
/// then removes ours. The same write removes the finalizer of lifecycle-manager's purge, which only versions before 1.21
/// remove themselves.
async fn finish(ctx: &Context, key: &KymaKey, mut kyma: Kyma) -> Result<Option<Duration>, Error> {
    let is_others = |name: &&String| ![finalizer::KYMA, finalizer::PURGE].contains(&name.as_str());
    let others: Vec<_> = kyma.finalizers().iter().filter(is_others).cloned().collect();
    if !others.is_empty() {
        let waits = Some(format!("waiting for others to remove their finalizers: {}", others.join(", ")));
        let findings = Findings { waits, deleting: true, ..Findings::default() };
        ctx.write_status(&mut kyma, &findings).await?;
    }
    if others.len() < kyma.finalizers().len() {
        base::patch_metadata(ctx, &kyma, json!({"finalizers": others})).await?;
    }
    ctx.forget(key);
    Ok(None)
}

/// Continues after our finalizer is gone: updates the finalizers in the status, and removes the one of lifecycle-manager's
/// purge that an earlier version of this receiver left.
async fn left_to_others(ctx: &Context, key: &KymaKey, kyma: Kyma) -> Result<Option<Duration>, Error> {
    let is_cleaned_up = KymaFacts::from(&kyma).is_managed()
        && (!has_finalizer(&kyma, finalizer::PURGE) || fetch::list_manifests(ctx, &kyma).await?.is_empty());
    if is_cleaned_up { finish(ctx, key, kyma).await } else { Ok(None) }
}

/// Deletes all Manifests of the Kyma, mandatory ones included. Returns those that still exist in KCP by a quorum read.
async fn delete_manifests(ctx: &Context, kyma: &Kyma) -> Result<Vec<Manifest>, Error> {
    let api: Api<Manifest> = fetch::in_kcp(ctx, &kyma.namespace().unwrap_or_default());
    let manifests = fetch::list_manifests(ctx, kyma).await?;
    let deleted = requests::run(manifests.into_iter().map(|manifest| apply::delete(&api, manifest)).collect()).await;
    let left: Result<Vec<_>, _> = deleted.into_iter().collect();
    Ok(left?.into_iter().flatten().collect())
}

/// Writes state Deleting to the KCP Kyma, with the objects that block it and the reachability of the runtime cluster.
async fn record(
    ctx: &Context,
    kyma: &mut Kyma,
    left: &[Manifest],
    unusable: Option<&RuntimeAccessError>,
) -> Result<(), Error> {
    let old = kyma.status.clone().unwrap_or_default();
    // A returned Secret is reported at once: if it disappears again, the wait restarts.
    let was_deleted = unreachable_since(&old, SECRET_DELETED).is_some();
    let is_back = unusable.is_none() && (was_deleted || unreachable_since(&old, SECRET_MISSING).is_some());
    // The process that saw the deletion may have been another one.
    let unusable = unusable.filter(|unusable| !(was_deleted && **unusable == RuntimeAccessError::Missing));
    let access = unusable.map(Readiness::from).or(is_back.then_some(Readiness::Ready));
    let before = |manifest: &Manifest| {
        let module = manifest.labels().get(label::MODULE_NAME)?;
        old.modules().iter().find(|status| status.name == *module)
    };
    // Keeps the last blocking reason; the step that reported it removes it.
    let said = old.last_operation.as_ref().filter(|_| old.state() == State::Deleting);
    let said = said.map(|said| said.operation.clone());
    let said = said.filter(|said| !left.is_empty() || !said.starts_with(WAITING_FOR_MODULES));
    let waits = said.or_else(|| mandatory_blockers(left));
    let selected = left.iter().filter(|manifest| !is_mandatory(manifest));
    let findings = Findings {
        modules: Some(selected.map(|manifest| module_status::removed(manifest, before(manifest))).collect()),
        conditions: Conditions { access, ..Conditions::default() },
        waits,
        deleting: true,
        ..Findings::default()
    };
    ctx.write_status(kyma, &findings).await
}

/// The modules that a deletion waits for if all of them are mandatory: they are in no status, but users may have to delete
/// their resources.
fn mandatory_blockers(left: &[Manifest]) -> Option<String> {
    if left.is_empty() || !left.iter().all(is_mandatory) {
        return None;
    }
    let reason = |manifest: &Manifest| {
        let module = manifest.labels().get(label::MODULE_NAME).cloned().unwrap_or_else(|| manifest.name_any());
        match module_status::operation_of(manifest) {
            Some(operation) => format!("{module} ({operation})"),
            None => module,
        }
    };
    let mut reasons: Vec<_> = left.iter().map(reason).collect();
    reasons.sort_unstable();
    Some(format!("{WAITING_FOR_MODULES}: {}", reasons.join(", ")))
}

/// Writes the same status to the runtime cluster's Kyma if that still exists.
async fn show(client: &Client, kyma: &Kyma) -> Result<(), Error> {
    let Some(definition) = crd::wanted().iter().find(|wanted| wanted.kind == "Kyma") else { return Ok(()) };
    let found =
        object::get(&crd::definitions(client), &definition.name).await.map_err(Error::crd("read", &definition.name))?;
    if found.is_none() {
        return Ok(());
    }
    if let Some(runtime) = fetch::runtime_kyma(client).await? {
        write_runtime(client, &runtime, kyma).await?;
    }
    Ok(())
}

/// Deletes our objects from the runtime cluster: catalog, its CRDs, the Kyma, its CRD, the agent. `None` once all are
/// gone.
async fn clean(ctx: &Context, key: &KymaKey, client: &Client, kyma: &Kyma) -> Result<Option<PendingRemoval>, Error> {
    let api = crd::definitions(client);
    let mut of_kyma = None;
    let mut of_catalog = Vec::new();
    for wanted in crd::wanted() {
        let found = object::get(&api, &wanted.name).await.map_err(Error::crd("read", &wanted.name))?;
        match wanted.kind.as_str() {
            "Kyma" => of_kyma = found,
            _ => of_catalog.extend(found),
        }
    }
    let served = |definition: &DynamicObject| definition.metadata.deletion_timestamp.is_none();
    // Without one of the two kinds, its objects are gone as well.
    if of_catalog.len() == 2 && of_catalog.iter().all(served) {
        ctx.catalog.remove_all(key, client).await.map_err(Error::Catalog)?;
    }
    let going = of_catalog.iter().chain(&of_kyma).filter(|definition| !served(definition));
    let mut held: Vec<_> = going.map(|definition| format!("the CRD {}", definition.name_any())).collect();
    let waits = !of_catalog.is_empty() || of_kyma.is_some();
    for definition in of_catalog.iter().filter(|definition| served(definition)) {
        delete(&api, definition.name_any(), definition.uid()).await?;
    }
    if let Some(definition) = of_kyma.filter(served) {
        match fetch::runtime_kyma(client).await? {
            Some(runtime) if runtime.metadata.deletion_timestamp.is_some() => held.push("the Kyma".to_owned()),
            Some(runtime) => {
                write_runtime(client, &runtime, kyma).await?;
                delete(&fetch::in_runtime(client), SKR_KYMA.to_owned(), runtime.uid()).await?;
            }
            None => {
                ctx.catalog.remove_inventory(client).await.map_err(Error::Catalog)?;
                delete(&api, definition.name_any(), definition.uid()).await?;
            }
        }
    }
    if waits {
        return Ok(Some(PendingRemoval::of_objects(&held)));
    }
    if let Some(secret) = &ctx.pull_secret {
        pull_secret::remove(secret, client).await?;
    }
    // Last, because the agent reports the preceding deletions.
    match &ctx.installer {
        Some(installer) => installer.remove(client).await.map_err(|failure| Error::Agent(failure.error)),
        None => Ok(None),
    }
}

async fn delete<K>(api: &Api<K>, name: String, uid: Option<String>) -> Result<(), Error>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    object::delete(api, &name, uid).await.map(drop).map_err(Error::runtime(error::DELETE_OURS))
}

/// Continues without an access Secret: waits until the runtime cluster counts as gone; then removes the finalizers of its
/// Manifests, since nothing can be cleaned up any more. `None` once all Manifests are gone.
async fn without_runtime(
    ctx: &Context,
    key: &KymaKey,
    kyma: &Kyma,
    left: &[Manifest],
) -> Result<Option<PendingRemoval>, Error> {
    let wait = until_gone(ctx, kyma).await?;
    if wait.is_some() || left.is_empty() {
        return Ok(wait);
    }
    info!(kyma = %key, manifests = left.len(), "Runtime is gone, releasing its Manifests");
    let api: Api<Manifest> = fetch::in_kcp(ctx, &key.namespace);
    let released = requests::run(left.iter().map(|manifest| release(&api, manifest)).collect()).await;
    released.into_iter().collect::<Result<(), _>>()?;
    let names: Vec<_> = fetch::list_manifests(ctx, kyma).await?.iter().map(ResourceExt::name_any).collect();
    let message = || format!("waiting for the Manifests to be deleted: {}", names.join(", "));
    Ok((!names.is_empty()).then(|| PendingRemoval::blocked(message())))
}

/// Removes all finalizers of a Manifest that is being deleted; fails with a conflict if it was written since it was read.
async fn release(api: &Api<Manifest>, manifest: &Manifest) -> Result<(), Error> {
    let name = manifest.name_any();
    let metadata = json!({"resourceVersion": manifest.resource_version(), "uid": manifest.uid(), "finalizers": null});
    let patch = Patch::Merge(json!({"metadata": metadata}));
    let params = PatchParams::apply(field_manager::LIFECYCLE_OPERATOR);
    let released = object::if_exists(api.patch_metadata(&name, &params, &patch).await, &name);
    released.map(drop).map_err(|source| Error::Manifest { doing: "release", name, source })
}

/// Returns the reason for the lack of access, after a quorum read of a Secret that the watch reports as deleted: one that
/// merely lost its label exists.
async fn confirmed(ctx: &Context, kyma: &Kyma, unusable: RuntimeAccessError) -> Result<RuntimeAccessError, Error> {
    let RuntimeAccessError::SecretDeleted(name) = &unusable else { return Ok(unusable) };
    let is_recorded = kyma.status.as_ref().is_some_and(|status| unreachable_since(status, SECRET_DELETED).is_some());
    if is_recorded {
        return Ok(unusable);
    }
    let api: Api<Secret> = fetch::in_kcp(ctx, &kyma.namespace().unwrap_or_default());
    // The account of the receiver may list Secrets, but not get them.
    let named = ListParams::default().fields(&format!("metadata.name={name}"));
    let found = api.list_metadata(&named).await.map_err(Error::kcp(error::LIST_SECRETS))?;
    Ok(if found.items.is_empty() { unusable } else { RuntimeAccessError::Missing })
}

/// Remaining wait for a runtime cluster without an access Secret; `None` once it counts as gone. That requires the
/// condition's reason for long enough, the deletion of the Kyma, and a quorum read of the Secrets.
async fn until_gone(ctx: &Context, kyma: &Kyma) -> Result<Option<PendingRemoval>, Error> {
    let since = |reason| kyma.status.as_ref().and_then(|status| unreachable_since(status, reason));
    let gone_after = ctx.runtime_gone_after;
    let (missing, gone_after) = match since(SECRET_DELETED) {
        None => (since(SECRET_MISSING), gone_after),
        deleted => (deleted, gone_after.min(GONE_AFTER_DELETED_SECRET)),
    };
    let message =
        format!("waiting for an access Secret; without one for {} s the runtime counts as gone", gone_after.as_secs());
    let deleted = kyma.metadata.deletion_timestamp.as_ref().map(|time| time.0);
    let left = missing
        .zip(deleted)
        .map_or(gone_after, |(missing, deleted)| left(gone_after, missing.max(deleted), Timestamp::now()));
    if !left.is_zero() {
        return Ok(Some(PendingRemoval::after(left, Some(message))));
    }
    let api: Api<Secret> = fetch::in_kcp(ctx, &kyma.namespace().unwrap_or_default());
    let params = ListParams::default().labels(&format!("{}={}", label::KYMA_NAME, kyma.name_any()));
    let secrets = api.list_metadata(&params).await.map_err(Error::kcp(error::LIST_SECRETS))?;
    Ok((!secrets.items.is_empty()).then(|| PendingRemoval::blocked(message)))
}

/// Remainder of a wait of this length that began at `since`.
fn left(wait: Duration, since: Timestamp, now: Timestamp) -> Duration {
    let waited = Duration::from_secs(u64::try_from(now.as_second() - since.as_second()).unwrap_or(0));
    wait.saturating_sub(waited)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_is_gone_after_the_configured_time_and_not_sooner() {
        let at = |second| Timestamp::from_second(second).unwrap();
        for wait in [5, 600] {
            for (waited, expected) in [(0, wait), (wait - 1, 1), (wait, 0), (100_000, 0)] {
                let begun = i64::try_from(waited).unwrap();
                let rest = left(Duration::from_secs(wait), at(1_000), at(1_000 + begun));
                assert_eq!(rest, Duration::from_secs(expected), "{waited} of {wait}");
            }
            assert_eq!(left(Duration::from_secs(wait), at(5), at(0)).as_secs(), wait, "the clock was set back");
        }
    }
}
