//! Ring rollouts for an operator, computed from the objects in KCP, and the confirmation of a halted one. Pure.
//!
//! The functions are those of the task. Its memory is not in KCP: a module that exceeds the deadline without an error state
//! counts as upgrading here, and a runtime that was not upgraded in time as waiting.

mod report;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt as _;
use thiserror::Error;
use tidewatch_api::{
    Kyma, Manifest,
    facts::ManifestFacts,
    facts::{KymaFacts, pauses_all},
    key::KymaKey,
    names::{ROLLOUTS, label},
    selectors::KymaSelector,
};
use tidewatch_rollout::Criteria;
use tidewatch_select::{
    catalog::{
        ChannelTarget,
        rollout::{
            InvalidPolicyError, Rollout, RolloutFlags, RolloutKey, RolloutPolicy, StoredRollouts, accepted_targets,
        },
        visibility::template_name,
    },
    module_rollout::{
        decide,
        members::{self, Member, Observation, Times},
    },
    windows::{WindowState, Windows},
};
use tokio::time::Instant;

pub use report::{InvalidView, RolloutState, RolloutView, RolloutsView, RuntimeCounts};

use crate::check::Objects;

/// Rules of a module's rollout; `None` without rings.
type Policy = Result<Option<RolloutPolicy>, InvalidPolicyError>;

/// Objects of KCP that the rollouts are computed from.
#[derive(Clone, Debug, Default)]
pub struct KcpObjects {
    /// ConfigMap of the rollouts.
    pub rollouts: Option<ConfigMap>,
    /// ConfigMap of the accepted releases.
    pub releases: Option<ConfigMap>,
    /// ConfigMap that pauses all runtimes.
    pub pause: Option<ConfigMap>,
    /// Templates and release metas.
    pub catalog: Objects,
    /// Kymas that the receiver manages.
    pub kymas: Vec<Kyma>,
    /// Manifests of the modules that [`modules_in_progress`] names.
    pub manifests: Vec<Manifest>,
}

/// Options of a view.
#[derive(Clone, Debug, Default)]
pub struct ViewOptions {
    /// Flags of the receiver.
    pub flags: RolloutFlags,
    /// Value of `--kyma-selector`.
    pub kyma_selector: String,
    /// Maintenance windows; `None` if they are not known, so that no runtime counts as blocked by its window.
    pub windows: Option<Windows>,
    /// Includes the rollouts that are complete.
    pub all: bool,
    /// Current time.
    pub now: Timestamp,
}

/// A confirmation of a halted rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confirmation {
    /// Value of the annotation `tidewatch-confirm` of the ConfigMap with this confirmation and those before.
    pub annotation: String,
    /// The ConfigMap has the confirmation already.
    pub is_known: bool,
    /// Description of what continues.
    pub continues: String,
}

/// Refusal of a confirmation that no halted rollout waits for.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ConfirmError {
    /// No rollout is halted.
    #[error("no rollout waits for the confirmation {0:?}: none is halted")]
    NoneHalted(String),
    /// Halted rollouts wait for other confirmations.
    #[error("no rollout waits for the confirmation {id:?}; the halted ones wait for: {}", waiting.join(", "))]
    Unknown {
        /// Identifier that was given.
        id: String,
        /// Confirmations that halted rollouts wait for.
        waiting: Vec<String>,
    },
}

/// Computes the view.
pub fn view(kcp: &KcpObjects, options: &ViewOptions) -> RolloutsView {
    let stored = StoredRollouts::of(kcp.rollouts.as_ref());
    let policies = policies(&kcp.catalog, &options.flags);
    let mut view = RolloutsView { windows_known: options.windows.is_some(), ..RolloutsView::default() };
    view.invalid = stored.invalid.keys().map(|key| InvalidView::stored(key)).collect();
    let errors =
        policies.iter().filter_map(|(module, policy)| Some(InvalidView::rules(module, policy.as_ref().err()?)));
    view.invalid.extend(errors);
    let fleet = Assessor::new(kcp, options);
    for Found { rollout, is_recorded } in rollouts(kcp, &stored, &policies, options) {
        if rollout.progress.is_none() && !options.all {
            continue;
        }
        let policy = policies.get(&rollout.module).map(Result::as_ref);
        let policy = policy.map_or(Ok(None), |policy| policy.map(Option::as_ref));
        view.rollouts.push(fleet.view(&rollout, is_recorded, policy, &stored));
    }
    view
}

/// Names of the modules with a rollout in progress. `kcp` needs neither Kymas nor Manifests.
pub fn modules_in_progress(kcp: &KcpObjects, options: &ViewOptions) -> BTreeSet<String> {
    let stored = StoredRollouts::of(kcp.rollouts.as_ref());
    let found = rollouts(kcp, &stored, &policies(&kcp.catalog, &options.flags), options);
    let in_progress = found.into_iter().filter(|found| found.rollout.progress.is_some());
    in_progress.map(|found| found.rollout.module).collect()
}

/// Confirms that a halted rollout continues.
///
/// # Errors
/// [`ConfirmError`] if no halted rollout waits for this identifier.
pub fn confirm(map: Option<&ConfigMap>, id: &str) -> Result<Confirmation, ConfirmError> {
    let StoredRollouts { rollouts, mut confirmed, .. } = StoredRollouts::of(map);
    let halted = rollouts.values().filter_map(|rollout| Some((rollout.confirmation()?, rollout)));
    let halted: BTreeMap<_, _> = halted.collect();
    let Some(rollout) = halted.get(id) else {
        let id = id.to_owned();
        let waiting = halted.into_keys().collect::<Vec<_>>();
        return Err(if waiting.is_empty() {
            ConfirmError::NoneHalted(id)
        } else {
            ConfirmError::Unknown { id, waiting }
        });
    };
    let is_known = !confirmed.insert(id.to_owned());
    let annotation = confirmed.into_iter().collect::<Vec<_>>().join(",");
    let Rollout { module, version, .. } = rollout;
    let source = report::source(rollout.channel.as_deref());
    let ring = report::ring(rollout.ring());
    let continues = format!("the rollout of {version} of the module {module} {source} continues in {ring}");
    Ok(Confirmation { annotation, is_known, continues })
}

/// A rollout, recorded or still to be recorded by the receiver.
struct Found {
    rollout: Rollout,
    is_recorded: bool,
}

fn policies(catalog: &Objects, flags: &RolloutFlags) -> BTreeMap<String, Policy> {
    catalog.release_metas.iter().map(|meta| (meta.name_any(), RolloutPolicy::of(meta, flags))).collect()
}

/// Rollouts of the accepted targets of modules with rings, and recorded ones, by module and channel.
fn rollouts(
    kcp: &KcpObjects,
    stored: &StoredRollouts,
    policies: &BTreeMap<String, Policy>,
    options: &ViewOptions,
) -> Vec<Found> {
    let now = options.now.as_second();
    let mut found: BTreeMap<RolloutKey, Found> = BTreeMap::new();
    for (key, rollout) in &stored.rollouts {
        found.insert(key.clone(), Found { rollout: rollout.clone(), is_recorded: true });
    }
    let has_rings = |key: &RolloutKey| matches!(policies.get(&key.module), Some(Ok(Some(_))));
    let targets: BTreeMap<RolloutKey, ChannelTarget> = accepted_targets(kcp.releases.as_ref());
    for (key, target) in targets.into_iter().filter(|(key, _)| has_rings(key)) {
        if let Some((rollout, is_recorded)) = stored.of_target(&key, &target, now) {
            found.insert(key, Found { rollout, is_recorded });
        }
    }
    found.into_values().collect()
}

/// Assesses the runtimes of rollouts.
struct Assessor<'a> {
    kcp: &'a KcpObjects,
    options: &'a ViewOptions,
    kymas: HashMap<String, &'a Kyma>,
    manifests: HashMap<&'a str, Vec<&'a Manifest>>,
    pauses_all: bool,
    selector: KymaSelector,
}

impl<'a> Assessor<'a> {
    fn new(kcp: &'a KcpObjects, options: &'a ViewOptions) -> Self {
        let mut manifests: HashMap<_, Vec<_>> = HashMap::new();
        for manifest in &kcp.manifests {
            if let Some(module) = manifest.labels().get(label::MODULE_NAME) {
                manifests.entry(module.as_str()).or_default().push(manifest);
            }
        }
        let kymas = kcp.kymas.iter().filter(|kyma| kyma.metadata.deletion_timestamp.is_none());
        let kymas = kymas.map(|kyma| (kyma.name_any(), kyma)).collect();
        let pauses_all = pauses_all(kcp.pause.as_ref());
        Self { kcp, options, kymas, manifests, pauses_all, selector: KymaSelector::new(&options.kyma_selector) }
    }

    fn view(
        &self,
        rollout: &Rollout,
        is_recorded: bool,
        policy: Result<Option<&RolloutPolicy>, &InvalidPolicyError>,
        stored: &StoredRollouts,
    ) -> RolloutView {
        let rules = policy.ok().flatten();
        let confirmation = rollout.confirmation();
        let is_confirmed = confirmation.as_ref().is_some_and(|id| stored.confirmed.contains(id));
        let members = rollout.progress.as_ref().map(|_| self.members(rollout, rules)).unwrap_or_default();
        let waits_for = || match (policy, &confirmation, rules) {
            _ if !is_recorded => Some("the receiver, which has not recorded the move yet".to_owned()),
            (Err(_), ..) => Some("valid annotations of the ModuleReleaseMeta".to_owned()),
            _ if is_confirmed => Some("the receiver, which has not continued yet".to_owned()),
            (Ok(_), _, Some(policy)) => {
                let criteria = Criteria { rules: &policy.rules, is_confirmed, now: self.options.now.as_second() };
                decide::step(rollout, &members, &BTreeSet::new(), criteria).waits_for
            }
            (Ok(_), Some(id), None) => Some(format!("the confirmation {id}")),
            (Ok(_), None, None) => None,
        };
        RolloutView {
            module: rollout.module.clone(),
            channel: rollout.channel.clone(),
            from: rollout.previous().map(str::to_owned),
            to: rollout.version.clone(),
            change: rollout.change.clone(),
            moved: Timestamp::from_second(rollout.moved).unwrap_or_default().to_string(),
            state: match &rollout.progress {
                None => RolloutState::Complete,
                Some(progress) if progress.halted.is_some() => RolloutState::Halted,
                Some(progress) if progress.ring.is_none() => RolloutState::NotStarted,
                Some(_) => RolloutState::InRing,
            },
            ring: rollout.ring(),
            rings: rules.map(|policy| policy.rules.rings.count()),
            runtimes: rollout.progress.as_ref().map(|_| RuntimeCounts::of(&members)),
            waits_for: rollout.progress.as_ref().and_then(|_| waits_for()),
            reason: rollout.halted().map(str::to_owned),
            confirmation,
            confirmed: is_confirmed,
        }
    }

    fn members(&self, rollout: &Rollout, policy: Option<&RolloutPolicy>) -> Vec<Member> {
        let key = rollout.key();
        let now = Instant::now();
        let name = template_name(&rollout.module, &rollout.version);
        let template = self.kcp.catalog.templates.iter().find(|template| template.name_any() == name);
        let awaits_window = key.channel.is_some() && template.is_some_and(|template| template.spec.requires_downtime());
        // How long a runtime is in its state is not known here, so that none exceeds the deadline.
        let deadline = self.options.flags.module_rollout_deadline;
        let mut times = Times::default();
        let assess = |manifest: &&Manifest| {
            let kyma = self.kymas.get(manifest.labels().get(label::KYMA_NAME)?)?;
            if !members::follows(&ManifestFacts::from(*manifest), *kyma, &key) {
                return None;
            }
            let kyma_key = KymaKey::of(*kyma);
            let uid = kyma.uid()?;
            let is_paused = self.pauses_all || KymaFacts::from(*kyma).is_paused();
            let block = members::block(*kyma, !self.selector.reconciles(*kyma, is_paused), || {
                awaits_window && self.is_closed(kyma)
            });
            let observation = Observation::of(&ManifestFacts::from(*manifest), rollout, block, &self.selector);
            let standing = times.assess(&kyma_key, &rollout.change, false, &observation, deadline, now);
            let is_first = policy.is_some_and(|policy| policy.is_first(kyma.labels()));
            let rank = members::rank(&rollout.module, &rollout.version, &uid, is_first);
            Some(Member { kyma: kyma_key, uid, rank, standing })
        };
        let manifests = self.manifests.get(rollout.module.as_str()).into_iter().flatten();
        manifests.filter_map(assess).collect()
    }

    fn is_closed(&self, kyma: &Kyma) -> bool {
        let windows = self.options.windows.as_ref();
        windows.is_some_and(|windows| windows.state(kyma, self.options.now) != WindowState::Open)
    }
}

impl InvalidView {
    fn stored(key: &str) -> Self {
        let message = "the stored state is invalid: its modules keep their versions until it is corrected or deleted";
        Self { place: format!("ConfigMap {ROLLOUTS}, key {key}"), message: message.to_owned() }
    }

    fn rules(module: &str, error: &InvalidPolicyError) -> Self {
        Self { place: format!("ModuleReleaseMeta {module}"), message: error.to_string() }
    }
}
