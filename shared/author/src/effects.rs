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
};

use jiff::{Timestamp, civil::Date};
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tidewatch_api::{Kyma, Manifest, facts::KymaFacts, names::label, selectors::KymaSelector};
use tidewatch_select::{
    catalog::{RolloutSlot, VersionSource, retirement},
    kyma::{
        installed::module_of,
        layer::{LayerLookup, ModuleLayer},
        lookup::{Resolved, Sources},
        mandatory::{self, Owned},
        modules::{self, Decisions},
        validate::Validated,
    },
    windows::WindowState,
};

pub use report::{Effect, InvalidRollout, KymaEffects, Outcome, WaitReason};

use self::selection::{Selection, selection_of};
use crate::{
    check::Objects,
    preview::{Live, Outlook, PreviewOptions, changed_modules},
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
pub fn effects(live: &Live, objects: &Objects, options: &PreviewOptions, fleet: Fleet, limit: usize) -> KymaEffects {
    let changed = changed_modules(&live.objects, objects, options);
    let outlook = Outlook::new(live, objects, options);
    let now = Timestamp::from_second(options.now).unwrap_or_default();
    let today = retirement::day(now);
    let windows = options.windows.clone().unwrap_or_default();
    let Fleet { kymas, manifests, kyma_selector } = fleet;
    let selector = KymaSelector::new(&kyma_selector);
    let is_changed = |manifest: &Manifest| module_of(manifest).is_some_and(|module| changed.contains(module));
    let mut manifests = by_kyma(&kymas, manifests.into_iter().filter(is_changed));
    let mut report = KymaEffects { total: kymas.len(), ..KymaEffects::default() };
    let invalid =
        |(module, error): (&str, &_)| InvalidRollout { module: module.to_owned(), message: ToString::to_string(error) };
    report.invalid_rollouts =
        outlook.invalid_policies().filter(|(module, _)| changed.contains(*module)).map(invalid).collect();
    let mut groups: BTreeMap<(String, Outcome), Group> = BTreeMap::new();
    for kyma in &kymas {
        if kyma.metadata.deletion_timestamp.is_some() || KymaFacts::from(kyma).is_hand_back_requested() {
            report.left_out += 1;
            continue;
        }
        let manifests = manifests.remove(&kyma.name_any()).unwrap_or_default();
        let selection = selection_of(kyma, &manifests);
        report.unknown_selections += usize::from(matches!(selection, Selection::Installed(_)));
        let stop = stop_of(kyma, &selector);
        let selection = selection.validated(kyma, &changed);
        let window = windows.state(kyma, now);
        let is_known = options.windows.is_some();
        let preview = KymaPreview { kyma, manifests, selection, changed: &changed, today, window };
        for KymaEffect { module, outcome, needs_window } in preview.effects(&outlook, is_known) {
            report.unknown_windows += usize::from(needs_window && !is_known);
            let outcome = match stop {
                Some(reason) => outcome.stopped(reason),
                None => outcome,
            };
            let group = groups.entry((module, outcome)).or_default();
            group.names.insert(kyma.name_any());
            group.windows.insert(window.opens().filter(|_| needs_window));
        }
    }
    report.effects = groups
        .into_iter()
        .map(|((module, outcome), Group { names, windows })| Effect {
            module,
            outcome,
            kymas: names.len(),
            names: names.into_iter().take(limit).collect(),
            opens: windows.first().filter(|_| windows.len() == 1).copied().flatten().map(|opens| opens.to_string()),
        })
        .collect();
    report
}

/// Reason for which nothing is reconciled in a Kyma.
fn stop_of(kyma: &Kyma, selector: &KymaSelector) -> Option<WaitReason> {
    let is_paused = KymaFacts::from(kyma).is_paused();
    is_paused.then_some(WaitReason::Paused).or_else(|| selector.skips(kyma).then_some(WaitReason::Skipped))
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

/// Kymas with the same effect.
#[derive(Default)]
struct Group {
    names: BTreeSet<String>,
    /// Starts of the windows that they wait for.
    windows: BTreeSet<Option<Timestamp>>,
}

/// Effect on one module of one Kyma.
struct KymaEffect {
    module: String,
    outcome: Outcome,
    /// The version requires a downtime, and the window is not open.
    needs_window: bool,
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
    /// Maintenance window of the Kyma.
    window: WindowState,
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
    /// Effects of the change. `is_known`: the maintenance windows are known, so that upgrades wait for them.
    fn effects(&self, outlook: &Outlook, is_known: bool) -> Vec<KymaEffect> {
        let uid = self.kyma.uid().unwrap_or_default();
        let held = outlook.held();
        let is_held = |module: &str| held.holds(module);
        let turn = |module: &str, source: VersionSource<'_>, version: &str| {
            outlook.rollout_slot(&uid, module, source, version)
        };
        let finally = Sources {
            namespace: &self.kyma.namespace().unwrap_or_default(),
            kyma_labels: self.kyma.labels(),
            catalog: &outlook.later,
            held: &|_| false,
            today: self.today,
            turn: &|_, _, _| RolloutSlot::Now,
            window: &|| WindowState::Open,
            edited: &|_, _| RolloutSlot::Now,
            rollouts: &outlook.rollouts.1,
        };
        let before = self.decide(&Sources { catalog: &outlook.before, rollouts: &outlook.rollouts.0, ..finally });
        let first = self.decide(&Sources { catalog: &outlook.at_first, held: &is_held, turn: &turn, ..finally });
        let in_window =
            (self.window != WindowState::Open).then(|| self.decide(&Sources { window: &|| self.window, ..finally }));
        let finally = self.decide(&finally);
        let modules: BTreeSet<_> = before.keys().chain(finally.keys()).collect();
        let effect = |module: &String| {
            let later = finally.get(module)?;
            let mut outcome = self.outcome(module, before.get(module), later)?;
            let closed = in_window.as_ref().and_then(|decided| decided.get(module)).filter(|closed| *closed != later);
            match closed {
                Some(Decided::Refused(message)) if is_known && self.window.opens().is_none() => {
                    outcome = Outcome::Refused { version: self.installed(module), message: message.clone() };
                }
                Some(_) if is_known => outcome = outcome.waiting(WaitReason::Window),
                _ => {}
            }
            if first.get(module) != Some(later) {
                outcome = outcome.waiting(match module {
                    module if held.modules.contains(module) => WaitReason::Held,
                    module if outlook.has_rings(module) => WaitReason::Ring,
                    _ => WaitReason::Rollout,
                });
            }
            Some(KymaEffect { module: module.clone(), outcome, needs_window: closed.is_some() })
        };
        modules.into_iter().filter_map(effect).collect()
    }

    /// Installed version of a module.
    fn installed(&self, module: &str) -> Option<String> {
        let manifest = self.manifests.iter().find(|manifest| module_of(manifest) == Some(module));
        manifest.and_then(|manifest| manifest.spec.version.clone())
    }

    /// Decides with the functions of the reconcile; every component descriptor counts as known.
    fn decide(&self, sources: &Sources<'_>) -> ByModule {
        let layer = |found: &Resolved| {
            let source = json!({"name": found.component, "ref": found.version});
            LayerLookup::Ready(ModuleLayer::new(&source, Vec::new()))
        };
        let owned = Owned::divide(self.manifests.clone(), sources.catalog, self.selection.as_ref());
        let mut wanted = mandatory::wanted(sources.catalog, &owned.mandatory);
        wanted.retain(|module| self.changed.contains(&module.name));
        let mut decided = by_module(mandatory::decide(self.kyma, &wanted, &owned.mandatory, sources, &layer));
        if let Some(selection) = &self.selection {
            let selected = modules::decide(self.kyma, &selection.modules, &owned.selected, sources, &layer);
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
        Some(match (later, self.installed(module)) {
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
