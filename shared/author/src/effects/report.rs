//! The report of a preview for the Kymas.

use std::fmt;

use serde::Serialize;
use tidewatch_kit::table;

/// Effect of a change of the catalog on the Kymas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KymaEffects {
    /// Number of all Kymas.
    pub total: usize,
    /// Number of Kymas that are being deleted or handed back, on which nothing is decided.
    pub left_out: usize,
    /// Number of Kymas without a recorded selection in KCP; their installed modules count as selected.
    pub unknown_selections: usize,
    /// Number of modules in Kymas whose version requires a downtime, if the maintenance windows are not known: they may
    /// wait for one.
    pub unknown_windows: usize,
    /// Modules whose ring rollouts have invalid rules: no further Kyma gets a moved channel.
    pub invalid_rollouts: Vec<InvalidRollout>,
    /// Effects by module, the most severe ones first.
    pub effects: Vec<Effect>,
}

/// A mistake in the rules of a module's ring rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InvalidRollout {
    /// Name of the module.
    pub module: String,
    /// The mistake.
    pub message: String,
}

/// An effect that a number of Kymas has in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Effect {
    /// Name of the module.
    pub module: String,
    /// Outcome, flattened.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Number of Kymas.
    pub kymas: usize,
    /// Names of the first ones, sorted.
    pub names: Vec<String>,
    /// Start of the maintenance window that they wait for; absent unless they have it in common.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opens: Option<String>,
}

/// Outcome of a change of the catalog for one module of one Kyma, the most severe ones first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum Outcome {
    /// The installed module is removed.
    Loses {
        /// Installed version.
        version: String,
        /// Message of the module in the status, if its user lists it.
        #[serde(skip_serializing_if = "Option::is_none")]
        message: Option<String>,
    },
    /// The module gets an error or warning state; an installed version stays.
    Refused {
        /// Installed version, if any.
        #[serde(skip_serializing_if = "Option::is_none")]
        version: Option<String>,
        /// Message of the module in the status.
        message: String,
    },
    /// Nothing happens yet.
    Waits {
        /// Reason.
        reason: WaitReason,
        /// Outcome after the wait.
        then: Box<Self>,
    },
    /// The module gets another version.
    Upgrades {
        /// Installed version.
        from: String,
        /// Version after the change.
        to: String,
    },
    /// The module is installed, which it is not yet.
    Installs {
        /// Version.
        version: String,
    },
    /// The Manifest of the installed version changes: default module CR, manager or component.
    Changes {
        /// Installed version.
        version: String,
    },
    /// The installed version stays, which would otherwise be replaced, refused or removed.
    Stays {
        /// Installed version.
        version: String,
    },
}

/// Reason of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum WaitReason {
    /// The removal guard holds the change until it is confirmed.
    Held,
    /// The Kyma's slot in the roll-out has not come; the jitter of a slot counts as passed.
    Rollout,
    /// The ring of the Kyma has not begun.
    #[strum(to_string = "ring rollout")]
    Ring,
    /// The version requires a downtime, and the maintenance window of the Kyma is not open.
    #[strum(to_string = "maintenance window")]
    Window,
    /// The label `tidewatch-pause` pauses the runtime.
    Paused,
    /// The label `skip-reconciliation` stops the reconcile.
    Skipped,
}

impl Outcome {
    /// This outcome after a wait.
    pub(super) fn waiting(self, reason: WaitReason) -> Self {
        Self::Waits { reason, then: Box::new(self) }
    }

    /// This outcome in a Kyma whose reconcile is stopped, whatever else it waits for.
    pub(super) fn stopped(self, reason: WaitReason) -> Self {
        match self {
            Self::Waits { then, .. } => then.stopped(reason),
            outcome => outcome.waiting(reason),
        }
    }

    /// Name of the outcome, and its details.
    pub(super) fn texts(&self) -> (&'static str, String) {
        let installed =
            |version: &Option<String>| version.as_ref().map_or("not installed", |version| version).to_owned();
        match self {
            Self::Loses { version, message: None } => ("loses", version.clone()),
            Self::Loses { version, message: Some(message) } => ("loses", format!("{version}: {message}")),
            Self::Refused { version, message } => ("refused", format!("{}: {message}", installed(version))),
            Self::Waits { reason, then } => {
                let (outcome, detail) = then.texts();
                ("waits", format!("{reason}, then {outcome} {detail}"))
            }
            Self::Upgrades { from, to } => ("upgrades", format!("{from} → {to}")),
            Self::Installs { version } => ("installs", version.clone()),
            Self::Changes { version } => ("changes", version.clone()),
            Self::Stays { version } => ("stays", version.clone()),
        }
    }
}

impl KymaEffects {
    /// Returns true if any Kyma is affected.
    pub const fn is_change(&self) -> bool {
        !self.effects.is_empty()
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names.join(", "))?;
        match self.kymas.checked_sub(self.names.len()).filter(|more| *more > 0) {
            Some(more) if self.names.is_empty() => write!(f, "{more} Kymas"),
            Some(more) => write!(f, " and {more} more"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for KymaEffects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.effects.is_empty() {
            writeln!(f, "no module of {} Kymas would be affected", self.total)?;
        } else {
            let rows = self.effects.iter().map(|effect| {
                let (outcome, mut detail) = effect.outcome.texts();
                if let Some(opens) = &effect.opens {
                    detail.push_str(&format!("; the window opens at {opens}"));
                }
                [effect.module.clone(), outcome.to_owned(), effect.kymas.to_string(), detail, effect.to_string()]
            });
            f.write_str(&table::aligned(["MODULE", "OUTCOME", "KYMAS", "DETAIL", "NAMES"], rows.collect()))?;
        }
        if self.left_out > 0 {
            writeln!(f, "{} Kymas that are being deleted or handed back are left out", self.left_out)?;
        }
        if self.unknown_selections > 0 {
            let unknown = self.unknown_selections;
            writeln!(f, "the selections of {unknown} Kymas are not known; their installed modules stand for them")?;
        }
        if self.unknown_windows > 0 {
            let unknown = self.unknown_windows;
            writeln!(
                f,
                "the maintenance windows are not known, for which {unknown} upgrades may wait; name the policy with \
                 --maintenance-window-policy"
            )?;
        }
        for InvalidRollout { module, message } in &self.invalid_rollouts {
            writeln!(f, "{}", table::sanitize(&format!("the ring rollout of {module} is invalid: {message}")))?;
        }
        Ok(())
    }
}
