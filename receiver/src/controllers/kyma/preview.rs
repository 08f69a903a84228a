//! Preview of a change of KCP's catalog for the Kymas: which of them would upgrade, wait, be refused, or lose a module.
//!
//! Each Kyma is decided on by the functions of its reconcile, with the catalog before and after the change. Its selection is
//! the one that the last reconcile accepted, since a preview reads no runtime cluster. Pure.

mod report;
mod selection;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use jiff::{Timestamp, civil::Date};
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tidewatch_shared::{
    api::{Kyma, Manifest},
    names::label,
};

pub use report::{Effect, KymaEffects, Outcome, WaitReason};

use self::selection::{Selection, selection_of};
use super::{
    is_skipped,
    layer::{LayerLookup, ModuleLayer},
    lookup::{Resolved, Sources},
    mandatory::{self, Owned},
    modules::{self, Decisions, module_of},
    validate::Validated,
};
use crate::{
    base::{
        pause::Pause,
        takeover::{self, Takeover},
    },
    controllers::{
        catalog::{
            RolloutBoard, RolloutSlot, VersionSource,
            check::Objects,
            preview::{Live, Outlook, PreviewOptions, changed_modules},
            retirement,
            snapshot::Snapshot,
        },
        windows::WindowState,
    },
};

/// The Kymas of KCP with the Manifests of the changed modules; see [`changed_modules`].
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    /// Kymas that the receiver manages.
    pub kymas: Vec<Kyma>,
    /// Manifests; their status is not used.
    pub manifests: Vec<Manifest>,
    /// Value of `--kyma-selector`.
    pub kyma_selector: String,
}

/// Computes the effect of applying these objects to KCP on each Kyma. Of each group of Kymas with the same effect, at most
/// `limit` are named.
#[must_use]
pub fn effects(live: &Live, objects: &Objects, options: &PreviewOptions, fleet: Fleet, limit: usize) -> KymaEffects {
    let changed = changed_modules(&live.objects, objects, options);
    let outlook = Outlook::new(live, objects, options);
    let today = retirement::day(Timestamp::from_second(options.now).unwrap_or_default());
    let Fleet { kymas, manifests, kyma_selector } = fleet;
    let takeover = Takeover::new(&kyma_selector, Duration::ZERO);
    let is_changed = |manifest: &Manifest| module_of(manifest).is_some_and(|module| changed.contains(module));
    let mut manifests = by_kyma(&kymas, manifests.into_iter().filter(is_changed));
    let mut report = KymaEffects { total: kymas.len(), ..KymaEffects::default() };
    let mut groups: BTreeMap<(String, Outcome), BTreeSet<String>> = BTreeMap::new();
    for kyma in &kymas {
        if kyma.metadata.deletion_timestamp.is_some() || takeover::is_hand_back_requested(kyma) {
            report.left_out += 1;
            continue;
        }
        let manifests = manifests.remove(&kyma.name_any()).unwrap_or_default();
        let selection = selection_of(kyma, &manifests);
        report.unknown_selections += usize::from(matches!(selection, Selection::Installed(_)));
        let stop = stop_of(kyma, &takeover);
        let preview =
            KymaPreview { kyma, manifests, selection: selection.validated(&changed), changed: &changed, today };
        for (module, outcome) in preview.effects(&outlook) {
            let outcome = match stop {
                Some(reason) => outcome.stopped(reason),
                None => outcome,
            };
            groups.entry((module, outcome)).or_default().insert(kyma.name_any());
        }
    }
    report.effects = groups
        .into_iter()
        .map(|((module, outcome), names)| Effect {
            module,
            outcome,
            kymas: names.len(),
            names: names.into_iter().take(limit).collect(),
        })
        .collect();
    report
}

/// Reason for which nothing is reconciled in a Kyma.
fn stop_of(kyma: &Kyma, takeover: &Takeover) -> Option<WaitReason> {
    let is_paused = Pause::default().of(kyma).is_some();
    is_paused.then_some(WaitReason::Paused).or_else(|| is_skipped(kyma, takeover).then_some(WaitReason::Skipped))
}

/// Manifests by the name of their Kyma, which their label names, else their owner reference. All are of one namespace.
fn by_kyma(kymas: &[Kyma], manifests: impl Iterator<Item = Manifest>) -> HashMap<String, Vec<Arc<Manifest>>> {
    let uids: HashMap<_, _> = kymas.iter().filter_map(|kyma| Some((kyma.uid()?, kyma.name_any()))).collect();
    let mut found: HashMap<String, Vec<Arc<Manifest>>> = HashMap::new();
    for manifest in manifests {
        let label = manifest.labels().get(label::KYMA_NAME).cloned();
        let owner = || manifest.owner_references().iter().find_map(|owner| uids.get(&owner.uid).cloned());
        if let Some(kyma) = label.or_else(owner) {
            found.entry(kyma).or_default().push(Arc::new(manifest));
        }
    }
    found
}

/// The inputs of the decisions on one Kyma.
struct KymaPreview<'a> {
    kyma: &'a Kyma,
    manifests: Vec<Arc<Manifest>>,
    /// Selected modules among the changed ones; `None` if the selection is invalid.
    selection: Option<Validated>,
    changed: &'a BTreeSet<String>,
    /// Day of the decisions, UTC.
    today: Date,
}

/// The decision on one module, as far as a change of the catalog affects it.
#[derive(Clone, Debug, PartialEq)]
enum Decided {
    /// Its Manifest is to have this version and content.
    Written { version: String, body: Value },
    /// Its Manifest stays as it is.
    Kept,
    /// The module is in an error state with this message; an installed version stays.
    Refused(String),
    /// The module is uninstalled; with the message if the user lists it.
    Removed(Option<String>),
}

/// Decisions by the name of the module.
type ByModule = BTreeMap<String, Decided>;

impl KymaPreview<'_> {
    /// Outcomes of the change, by module.
    fn effects(&self, outlook: &Outlook) -> Vec<(String, Outcome)> {
        let (anything, at_once) = (|_: &str| false, |_: &str, _: VersionSource<'_>, _: &str| RolloutSlot::Now);
        let uid = self.kyma.uid().unwrap_or_default();
        let before = self.decide(&outlook.before, &anything, &at_once);
        let finally = self.decide(&outlook.later, &anything, &at_once);
        let held = outlook.held();
        let first = self.decide(&outlook.at_first, &|module| held.holds(module), &|module, source, version| {
            outlook.rollout_slot(&uid, module, source, version)
        });
        let modules: BTreeSet<_> = before.keys().chain(finally.keys()).collect();
        let effect = |module: &String| {
            let outcome = self.outcome(module, before.get(module), finally.get(module)?)?;
            let reason = if held.modules.contains(module) { WaitReason::Held } else { WaitReason::Rollout };
            let waits = first.get(module) != finally.get(module);
            Some((module.clone(), if waits { outcome.waiting(reason) } else { outcome }))
        };
        modules.into_iter().filter_map(effect).collect()
    }

    /// Decides with the functions of the reconcile; every component descriptor counts as known.
    fn decide(
        &self,
        catalog: &Snapshot,
        held: &(dyn Fn(&str) -> bool + Sync),
        turn: &(dyn Fn(&str, VersionSource<'_>, &str) -> RolloutSlot + Sync),
    ) -> ByModule {
        let namespace = self.kyma.namespace().unwrap_or_default();
        let sources = Sources {
            namespace: &namespace,
            kyma_labels: self.kyma.labels(),
            catalog,
            held,
            today: self.today,
            turn,
            // Neither the delay of the roll-out nor the maintenance window of a runtime is part of the preview.
            window: &|| WindowState::Open,
            edited: &|_, _| RolloutSlot::Now,
            rollouts: &RolloutBoard::default(),
        };
        let layer = |found: &Resolved| {
            let source = json!({"name": found.component, "ref": found.version});
            LayerLookup::Ready(ModuleLayer::new(&source, Vec::new()))
        };
        let owned = Owned::divide(self.manifests.clone(), catalog, self.selection.as_ref());
        let mut wanted = mandatory::wanted(catalog, &owned.mandatory);
        wanted.retain(|module| self.changed.contains(&module.name));
        let mut decided = by_module(mandatory::decide(self.kyma, &wanted, &owned.mandatory, &sources, &layer));
        if let Some(selection) = &self.selection {
            let selected = modules::decide(self.kyma, &selection.modules, &owned.selected, &sources, &layer);
            // A mandatory module that the user lists is installed all the same.
            by_module(selected).into_iter().for_each(|(module, decision)| {
                decided.entry(module).or_insert(decision);
            });
        }
        decided
    }

    /// Outcome for a module whose decision differs; `None` without an effect.
    fn outcome(&self, module: &str, before: Option<&Decided>, later: &Decided) -> Option<Outcome> {
        if before == Some(later) {
            return None;
        }
        let manifest = self.manifests.iter().find(|manifest| module_of(manifest) == Some(module));
        let version = manifest.and_then(|manifest| manifest.spec.version.clone());
        Some(match (later, version) {
            (Decided::Kept, _) => return None,
            (Decided::Refused(message), version) => Outcome::Refused { version, message: message.clone() },
            (Decided::Removed(message), Some(version)) => Outcome::Loses { version, message: message.clone() },
            (Decided::Removed(message), None) => {
                Outcome::Refused { version: None, message: message.clone().unwrap_or_default() }
            }
            (Decided::Written { version, .. }, None) => Outcome::Installs { version: version.clone() },
            (Decided::Written { version: to, .. }, Some(from)) if *to != from => {
                Outcome::Upgrades { from, to: to.clone() }
            }
            (Decided::Written { .. }, Some(version)) => match before {
                Some(Decided::Written { version: earlier, .. }) if *earlier == version => Outcome::Changes { version },
                _ => Outcome::Stays { version },
            },
        })
    }
}

/// The decisions of one function on the modules of a Kyma.
fn by_module(decisions: Decisions<'_>) -> ByModule {
    let Decisions { wanted, unwanted, upgrades, .. } = decisions;
    let is_installed = |manifest: &&Arc<Manifest>| manifest.metadata.deletion_timestamp.is_none();
    let removed: BTreeSet<_> = unwanted.iter().filter(is_installed).filter_map(|it| module_of(it)).collect();
    let mut decided: ByModule = removed.iter().map(|module| ((*module).to_owned(), Decided::Removed(None))).collect();
    for decision in wanted {
        let name = &decision.module.name;
        let found = match (decision.found, decision.write) {
            (Err(error), _) if error.ends_installation() && removed.contains(name.as_str()) => {
                Decided::Removed(Some(error.to_string()))
            }
            (Err(error), _) => Decided::Refused(error.to_string()),
            (Ok(_), Some(desired)) => written(desired.body),
            (Ok(_), None) => Decided::Kept,
        };
        decided.insert(name.clone(), found);
    }
    for desired in upgrades {
        if let Some(module) = desired.body["metadata"]["labels"][label::MODULE_NAME].as_str() {
            decided.insert(module.to_owned(), written(desired.body.clone()));
        }
    }
    decided
}

fn written(body: Value) -> Decided {
    Decided::Written { version: body["spec"]["version"].as_str().unwrap_or_default().to_owned(), body }
}
