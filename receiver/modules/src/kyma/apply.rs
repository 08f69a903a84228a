//! Applies and deletes the Manifests of a Kyma in KCP, and records its selection there.

use futures::future::join;
use kube::{Api, ResourceExt, api::ApiResource, runtime::reflector::ObjectRef};
use serde_json::Value;
use tidewatch_api::{
    Kyma, KymaStatus, Manifest, ModuleStatus,
    key::{KymaKey, ManifestKey},
    names::label,
    plan::Work,
};
use tidewatch_cluster::object;
use tidewatch_fleet::{queue::WorkSet, stores::manifests::ManifestWriter};
use tidewatch_select::kyma::{
    build::Desired,
    is_installable,
    modules::{Decision, Decisions},
    validate::{Follow, Validated},
};

use super::{
    Context, Error, Reconcile, base, error, fetch, module_status,
    requests::{self, run},
};

impl Reconcile<'_> {
    /// Applies the decisions, meanwhile records the selection, and keeps the resulting statuses of the modules.
    pub(super) async fn apply(&mut self, wanted: &Validated, decisions: Decisions<'_>) -> Result<(), Error> {
        self.wait_for(&decisions);
        self.wait_for_window(&decisions);
        if decisions.is_pending() {
            // Parked until the descriptor is known or failed: the events that it would settle stay unsettled.
            self.outcome.ended = self.outcome.ended.minus(WorkSet::of(&[Work::Kyma]));
        }
        let unrecorded = self.unrecorded.take();
        let Self { ctx, key, kyma, .. } = self;
        let old = kyma.status.clone().unwrap_or_default();
        let statuses = Box::pin(carry_out(ctx, key, kyma, decisions, &old));
        let (statuses, recorded) = join(statuses, record(ctx, kyma, unrecorded)).await;
        // The status is written with the version that the record has, also after a failure.
        if let Some(recorded) = recorded? {
            self.kyma = recorded;
        }
        let mut statuses = statuses?;
        if let Some(refused) = module_status::limit_refused(&mut statuses) {
            self.findings.failure.get_or_insert(refused);
        }
        self.findings.modules = Some(statuses);
        self.findings.channel = Some(wanted.channel.clone());
        Ok(())
    }

    /// Records the selection in KCP, unless it is recorded.
    pub(super) async fn record_selection(&mut self) -> Result<(), Error> {
        let unrecorded = self.unrecorded.take();
        if let Some(recorded) = record(self.ctx, &self.kyma, unrecorded).await? {
            self.kyma = recorded;
        }
        Ok(())
    }
}

/// Writes the members of the metadata that record a selection. Returns the Kyma as stored, unless there are none.
async fn record(ctx: &Context, kyma: &Kyma, members: Option<Value>) -> Result<Option<Kyma>, Error> {
    let Some(members) = members else { return Ok(None) };
    base::record_metadata(ctx, kyma, members).await.map(Some)
}

/// Carries out the decisions and returns the resulting module statuses. A failing Manifest stops no other; the first
/// failure is returned.
pub(super) async fn carry_out(
    ctx: &Context,
    key: &KymaKey,
    kyma: &Kyma,
    decisions: Decisions<'_>,
    old: &KymaStatus,
) -> Result<Vec<ModuleStatus>, Error> {
    let api: Api<Manifest> = fetch::in_kcp(ctx, &kyma.namespace().unwrap_or_default());
    let before = |name: &str| old.modules().iter().find(|module| module.name == name);
    let mut statuses = Vec::new();
    let today = decisions.today;
    let written = run(decisions.wanted.into_iter().map(|decision| write(ctx, key, decision)).collect()).await;
    let mut failed = None;
    for result in written {
        match result {
            Ok((Decision { module, found: Ok(found), waiting, .. }, manifest)) => {
                let status = module_status::resolved(module, &found, manifest.as_ref(), today);
                statuses.push(match waiting {
                    Some(waiting) => module_status::waiting(status, &waiting),
                    None => status,
                });
            }
            Ok((Decision { module, found: Err(error), .. }, manifest)) => {
                statuses.push(module_status::unresolved(module, &error, before(&module.name), manifest.as_ref()));
            }
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    for upgraded in run(decisions.upgrades.iter().map(|desired| put(ctx, desired)).collect()).await {
        match upgraded {
            Ok(written) => ctx.stores.manifests.wrote(&written, ManifestWriter::Other),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    let unwanted = decisions.unwanted.iter();
    let removals = unwanted.map(|it| requests::write(ctx, key, it, delete(&api, Manifest::clone(it))));
    for result in run(removals.collect()).await {
        match result {
            Ok(None) => {}
            Ok(Some(manifest)) => {
                let name = manifest.labels().get(label::MODULE_NAME).cloned().unwrap_or_default();
                // A selected module that cannot be resolved reports that error, not its removal.
                if !statuses.iter().any(|status| status.name == name) {
                    statuses.push(module_status::removed(&manifest, before(&name)));
                }
            }
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    failed.map_or(Ok(statuses), Err)
}

async fn write<'a>(
    ctx: &Context,
    key: &KymaKey,
    decision: Decision<'a>,
) -> Result<(Decision<'a>, Option<Manifest>), Error> {
    let desired = decision.write.as_ref().filter(|_| !is_outdated(ctx, key, &decision));
    let Some(desired) = desired else {
        let manifest = decision.manifest.as_deref().cloned();
        return Ok((decision, manifest));
    };
    let name = ManifestKey::new(&key.namespace, &desired.name);
    ctx.stores.manifests.begin_write(name, key);
    let written = put(ctx, desired).await?;
    ctx.stores.manifests.wrote(&written, ManifestWriter::Kyma);
    Ok((decision, Some(written)))
}

/// Returns true for the creation of a Manifest whose mandatory module is not to be installed any more. Its release meta
/// may go as soon as the requests of this moment have ended.
fn is_outdated(ctx: &Context, key: &KymaKey, decision: &Decision<'_>) -> bool {
    let Decision { module, manifest, .. } = decision;
    if module.follows != Ok(Follow::Mandatory) || manifest.is_some() {
        return false;
    }
    let meta = ctx.stores.release_metas.get(&ObjectRef::new(&module.name).within(&key.namespace));
    !meta.is_some_and(|meta| is_installable(&meta))
}

async fn put(ctx: &Context, desired: &Desired) -> Result<Manifest, Error> {
    let failed = |source| Error::Manifest { doing: "apply", name: desired.name.clone(), source };
    let namespace = desired.body["metadata"]["namespace"].as_str().unwrap_or_default();
    let api = Api::namespaced_with(ctx.kcp.clone(), namespace, &ApiResource::erase::<Manifest>(&()));
    let converged = desired.target().converge(&api, None, &mut None).await;
    let converged = converged.map_err(|error| error.request().map_or(Error::Contested("the Manifest"), failed))?;
    object::parse(&converged.object).map_err(failed)
}

/// Deletes a Manifest by uid, so that a later one of the same name stays. Returns the Manifest if it is still being
/// deleted.
pub(super) async fn delete(api: &Api<Manifest>, manifest: Manifest) -> Result<Option<Manifest>, Error> {
    if manifest.metadata.deletion_timestamp.is_some() {
        return Ok(Some(manifest));
    }
    let name = manifest.name_any();
    let left = object::delete(api, &name, manifest.uid()).await;
    left.map_err(|source| Error::Manifest { doing: error::DELETE, name, source })
}
