//! Decision on the finalizer of a release meta. Pure.

use std::time::Duration;

use tidewatch_api::ModuleReleaseMeta;
use tidewatch_cluster::limits::REQUEST_DEADLINE;
use tidewatch_select::kyma::mandatory::{is_protected, is_wanted};

/// Time from when a module is no longer mandatory, or its release meta is being deleted, until the finalizer may be
/// removed: a request that creates a Manifest of it may have been sent just before.
const SETTLE: Duration = REQUEST_DEADLINE;

/// Use of a module by the runtimes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    /// It has a Manifest.
    pub(super) has_manifests: bool,
    /// The removal guard has not accepted the removal.
    pub(super) is_held: bool,
    /// Time since the removal was observed; zero if there is none.
    pub(super) leaving_for: Duration,
}

/// Next action on the finalizer of a release meta.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// It stays as it is until the release meta, a Manifest or the guard's decision changes.
    None,
    /// Set it.
    Add,
    /// Decide again after this time.
    Wait(Duration),
    /// Remove it, if KCP has no Manifest of the module.
    Remove,
}

/// Decides on the finalizer of a release meta.
pub(super) fn action(meta: &ModuleReleaseMeta, of: Use) -> Action {
    match (is_wanted(meta), is_protected(meta)) {
        (true, true) | (false, false) => Action::None,
        (true, false) => Action::Add,
        (false, true) if of.has_manifests || of.is_held => Action::None,
        (false, true) => match SETTLE.saturating_sub(of.leaving_for) {
            Duration::ZERO => Action::Remove,
            rest => Action::Wait(rest),
        },
    }
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt as _;
    use serde_json::{Value, json};
    use tidewatch_api::names::finalizer;

    use super::*;

    fn meta(mandatory: bool, is_deleting: bool, is_protected: bool) -> ModuleReleaseMeta {
        let mut metadata = json!({"name": "warden"});
        if is_deleting {
            metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        if is_protected {
            metadata["finalizers"] = json!(["foreign", finalizer::MANDATORY_MODULE]);
        }
        let mut spec = json!({"moduleName": "warden"});
        let (member, value): (_, Value) =
            if mandatory { ("mandatory", json!({"version": "1.0.0"})) } else { ("channels", json!([])) };
        spec[member] = value;
        let meta = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": metadata, "spec": spec});
        serde_json::from_value(meta).unwrap()
    }

    /// `acceptance.md` C2 56.
    #[test]
    fn finalizer_is_set_first_and_removed_last() {
        let long = SETTLE;
        let short = SETTLE - Duration::from_secs(1);
        for (mandatory, is_deleting, is_protected, has_manifests, is_held, leaving_for, expected) in [
            (true, false, false, false, false, Duration::ZERO, Action::Add),
            (true, false, true, false, false, Duration::ZERO, Action::None),
            (true, false, true, true, true, Duration::ZERO, Action::None),
            (true, true, false, true, false, long, Action::None),
            (true, true, true, true, false, long, Action::None),
            (true, true, true, false, true, long, Action::None),
            (true, true, true, false, false, short, Action::Wait(Duration::from_secs(1))),
            (true, true, true, false, false, long, Action::Remove),
            // Its module may be selected now.
            (false, false, true, true, false, long, Action::None),
            (false, false, true, false, false, long, Action::Remove),
            (false, false, false, false, false, Duration::ZERO, Action::None),
            (false, true, true, false, false, long, Action::Remove),
        ] {
            let meta = meta(mandatory, is_deleting, is_protected);
            let found = action(&meta, Use { has_manifests, is_held, leaving_for });
            assert_eq!(found, expected, "mandatory {mandatory}, deleting {is_deleting}, {:?}", meta.finalizers());
        }
    }
}
