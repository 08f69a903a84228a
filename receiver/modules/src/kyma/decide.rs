//! Decides on the modules of a Kyma by the catalog, the registry and the windows at this moment; `apply` carries the decisions out.

use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt as _;
use tidewatch_api::{Kyma, KymaStatus, Manifest, plan::Work, selection::UserSelection};
use tidewatch_fleet::queue::WorkSet;
use tidewatch_select::{
    catalog::{RolloutSlot, retirement, snapshot::Snapshot, visibility::template_name},
    kyma::{
        layer::LayerLookup,
        lookup::{Resolved, Sources},
        mandatory::{self, Owned},
        modules::{self, Decisions},
        validate::{Validated, WantedModule, validate},
    },
};

use super::{Error, Reconcile, apply, fetch, log_failure, skip_label};

/// Decides on modules, given the Kyma, the modules, their Manifests, the sources of a lookup, and the layers.
type Decide = for<'w> fn(
    &Kyma,
    &'w [WantedModule],
    &[Arc<Manifest>],
    &Sources<'_>,
    &dyn Fn(&Resolved) -> LayerLookup,
) -> Decisions<'w>;

impl Reconcile<'_> {
    /// Applies the Manifests of the mandatory modules, and those that the runtime cluster's Kyma selects.
    pub(super) async fn modules(&mut self) -> Result<(), Error> {
        let Some((_, runtime)) = &self.runtime else { return Ok(()) };
        let selection = validate(&UserSelection::of(runtime), self.kyma.annotations());
        let (catalog, owned) = self.owned(selection.as_ref().ok()).await?;
        self.mandatory_modules(&catalog, &owned.mandatory).await;
        match selection {
            Ok(wanted) => {
                let decisions = self.decide(modules::decide, &wanted.modules, &owned.selected, &catalog);
                // A module is removed by a recorded selection only.
                if !decisions.unwanted.is_empty() {
                    self.record_selection().await?;
                }
                self.apply(&wanted, decisions).await?;
                self.catalog_used = Some(catalog);
                Ok(())
            }
            Err(invalid) => {
                self.findings.failure = Some(invalid.to_string());
                self.record_selection().await
            }
        }
    }

    /// Returns true if the catalog may have changed for a module that has no version: a change of the catalog enqueues the Kymas
    /// that were known to select the module, and the selection of this one is recorded only now.
    pub(super) fn has_outdated_catalog(&self) -> bool {
        let Some(used) = &self.catalog_used else { return false };
        let catalog = &self.ctx.catalog;
        let unresolved = || self.findings.modules.iter().flatten().filter(|module| module.version.is_none());
        let is_renewed = || !Arc::ptr_eq(used, &catalog.snapshot(&self.ctx.stores));
        unresolved().any(|module| catalog.is_undecided(&module.name)) || unresolved().next().is_some() && is_renewed()
    }

    /// Applies the Manifests of the mandatory modules. Their failure is in no status, and stops no other work.
    async fn mandatory_modules(&mut self, catalog: &Snapshot, owned: &[Arc<Manifest>]) {
        let Self { ctx, key, .. } = *self;
        let wanted = mandatory::wanted(catalog, owned);
        let decisions = self.decide(mandatory::decide, &wanted, owned, catalog);
        self.wait_for(&decisions);
        for (module, fault) in mandatory::faults(&decisions) {
            ctx.mandatory.report(module, fault);
        }
        if let Err(error) = apply::carry_out(ctx, key, &self.kyma, decisions, &KymaStatus::default()).await {
            self.failed(WorkSet::of(&[Work::Kyma]), log_failure(ctx, key, &error));
        }
    }

    /// The Manifests of the Kyma, divided by the catalog at this moment.
    pub(super) async fn owned(&self, selection: Option<&Validated>) -> Result<(Arc<Snapshot>, Owned), Error> {
        let Self { ctx, key, kyma, .. } = self;
        let manifests = fetch::owned_manifests(ctx, key, kyma).await?;
        let manifests = skip_label::add(ctx, key, kyma, manifests).await?;
        let catalog = ctx.catalog.snapshot(&ctx.stores);
        let owned = Owned::divide(manifests, &catalog, selection);
        Ok((catalog, owned))
    }

    /// Decides on modules by one of the functions `decide`.
    pub(super) fn decide<'w>(
        &self,
        decide: Decide,
        wanted: &'w [WantedModule],
        owned: &[Arc<Manifest>],
        catalog: &Snapshot,
    ) -> Decisions<'w> {
        let Self { ctx, kyma, .. } = self;
        let namespace = kyma.namespace().unwrap_or_default();
        let uid = kyma.uid().unwrap_or_default();
        let sources = Sources {
            namespace: &namespace,
            kyma_labels: kyma.labels(),
            catalog,
            held: &|module| ctx.catalog.is_held(module),
            today: retirement::day(Timestamp::now()),
            turn: &|module, source, version| ctx.catalog.rollout_slot(&uid, module, source, version),
            window: &|| ctx.windows.await_window(self.key, kyma, Timestamp::now()),
            edited: &|module, version| match catalog.content(&template_name(module, version)) {
                Some(content) => ctx.catalog.edit_slot(&uid, module, version, content),
                None => RolloutSlot::Now,
            },
            rollouts: ctx.catalog.rollouts(),
        };
        decide(kyma, wanted, owned, &sources, &|found| (ctx.layers)(self.key, found))
    }

    /// Records the roll-outs, the days and the registry's responses that modules wait for.
    pub(super) fn wait_for(&mut self, decisions: &Decisions<'_>) {
        let uid = self.kyma.uid().unwrap_or_default();
        let day = decisions.next_day.map(|day| self.ctx.catalog.day_delay(&uid, day, Timestamp::now()));
        let waits = [self.outcome.rollout_after, decisions.turn, day];
        self.outcome.rollout_after = waits.into_iter().flatten().min();
        self.awaits_registry |= decisions.awaits_registry();
    }

    /// Records the maintenance window that modules wait for; the Kyma is reconciled at its start.
    pub(super) fn wait_for_window(&mut self, decisions: &Decisions<'_>) {
        self.window = decisions.window;
        match decisions.window {
            Some(window) => {
                let after = window.delay(Timestamp::now());
                self.outcome.rollout_after = self.outcome.rollout_after.into_iter().chain(after).min();
            }
            None => self.ctx.windows.forget(self.key),
        }
    }
}
