//! Kymas that a change of KCP affects.

use std::{collections::BTreeSet, sync::Arc};

use kube::ResourceExt;
use tidewatch_shared::api::Kyma;

use super::fingerprint::{self, Follows, ReleaseFingerprint};
use crate::base::key::KymaKey;

/// Kymas that a change of the catalog affects.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Affected {
    /// Kymas to reconcile at once.
    pub(super) users: BTreeSet<KymaKey>,
    /// Followers of a moved channel of a module; each is reconciled after its own roll-out delay.
    pub(super) followers: BTreeSet<Follower>,
}

/// A Kyma that follows a channel of a module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Follower {
    pub(super) key: KymaKey,
    pub(super) uid: String,
    pub(super) module: String,
    pub(super) channel: String,
}

impl Follower {
    fn of(kyma: &Arc<Kyma>, module: &str, channel: &str) -> Self {
        let uid = kyma.uid().unwrap_or_default();
        Self { key: KymaKey::of(kyma.as_ref()), uid, module: module.to_owned(), channel: channel.to_owned() }
    }
}

impl Affected {
    pub(super) fn add(&mut self, mut other: Self) {
        self.users.append(&mut other.users);
        self.followers.append(&mut other.followers);
    }
}

/// Kymas that a changed release meta affects. Followers of a moved channel are reconciled after their roll-out delay.
/// Kymas with a changed admission are reconciled at once; so are all users of the module if its other fields or its
/// versions changed, or if the release meta was created or deleted. The channels do not affect modules with a fixed
/// version.
pub(super) fn release(
    kymas: &[Arc<Kyma>],
    module: &str,
    now: Option<&ReleaseFingerprint>,
    old: Option<&ReleaseFingerprint>,
) -> Affected {
    let (Some(now), Some(old)) = (now, old) else { return users(kymas, module) };
    let (channels, rest) = (now.moved_channels(old), now.rest != old.rest);
    let mut affected = Affected::default();
    for kyma in kymas {
        let is_waiting = match fingerprint::follows(kyma, module) {
            None => continue,
            Some(Follows::Channel(channel)) => {
                if channels.contains(channel) {
                    affected.followers.insert(Follower::of(kyma, module, channel));
                }
                false
            }
            Some(Follows::Version) => false,
            Some(Follows::Unresolved) => !channels.is_empty(),
        };
        if is_waiting || rest || now.admission_differs(old, kyma.labels()) {
            affected.users.insert(KymaKey::of(kyma.as_ref()));
        }
    }
    affected
}

/// Kymas that the end of a held removal affects: all users of the module, which may lose it or a part of it now. A
/// channel that moved during the hold counts as moved now.
pub(super) fn hold_ended(kymas: &[Arc<Kyma>], module: &str) -> Affected {
    let follower = |kyma: &Arc<Kyma>| match fingerprint::follows(kyma, module) {
        Some(Follows::Channel(channel)) => Some(Follower::of(kyma, module, channel)),
        _ => None,
    };
    Affected { followers: kymas.iter().filter_map(follower).collect(), ..users(kymas, module) }
}

/// All users of a module.
fn users(kymas: &[Arc<Kyma>], module: &str) -> Affected {
    let users = kymas.iter().filter(|kyma| fingerprint::follows(kyma, module).is_some());
    Affected { users: users.map(|kyma| KymaKey::of(kyma.as_ref())).collect(), ..Affected::default() }
}

/// Kymas that a changed template affects: those that use it, and those with an unresolved module that may wait for it.
pub(super) fn template(kymas: &[Arc<Kyma>], module: &str, template: &str) -> Affected {
    let affected = kymas.iter().filter(|kyma| fingerprint::may_use_template(kyma, module, template));
    Affected { users: affected.map(|kyma| KymaKey::of(kyma.as_ref())).collect(), ..Affected::default() }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidewatch_shared::api::ModuleReleaseMeta;

    use super::*;

    fn kyma_with(name: &str, status: Value) -> Arc<Kyma> {
        let team = if name == "fast" { "b" } else { "a" };
        let kyma = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": name, "namespace": "kcp-system", "uid": name, "labels": {"team": team}},
            "spec": {"channel": "regular"}, "status": {"state": "Ready", "modules": [status]}
        });
        Arc::new(serde_json::from_value(kyma).unwrap())
    }

    fn kymas() -> [Arc<Kyma>; 5] {
        let template = |version: &str| json!({"metadata": {"name": format!("keda-{version}")}});
        [
            kyma_with(
                "fast",
                json!({"name": "keda", "state": "Ready", "channel": "fast", "template": template("1.0.0")}),
            ),
            kyma_with("fixed", json!({"name": "keda", "state": "Ready", "template": template("0.9.0")})),
            kyma_with("other", json!({"name": "warden", "state": "Ready", "channel": "fast"})),
            kyma_with(
                "regular",
                json!({"name": "keda", "state": "Ready", "channel": "regular", "template": template("1.0.0")}),
            ),
            kyma_with("unresolved", json!({"name": "keda", "state": "Error"})),
        ]
    }

    /// `meta` changes further fields besides the channels.
    fn release_with(channels: &[(&str, &str)], meta: impl FnOnce(&mut Value)) -> ReleaseFingerprint {
        let channels: Vec<_> =
            channels.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
        let mut value = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": "keda", "labels": {"x": "a"}, "generation": 1},
            "spec": {"moduleName": "keda", "channels": channels, "kymaSelector": {"matchLabels": {"team": "a"}}}
        });
        meta(&mut value);
        let restricted = ["keda".to_owned()].into();
        ReleaseFingerprint::of(&serde_json::from_value::<ModuleReleaseMeta>(value).unwrap(), &restricted)
    }

    fn names(affected: &Affected) -> (Vec<&str>, Vec<&str>) {
        let users = affected.users.iter().map(|key| key.name.as_str()).collect();
        (users, affected.followers.iter().map(|follower| follower.key.name.as_str()).collect())
    }

    const UNCHANGED: [(&str, &str); 2] = [("fast", "1.0.0"), ("regular", "1.0.0")];
    const MOVED: [(&str, &str); 2] = [("fast", "2.0.0"), ("regular", "1.0.0")];
    /// All users of the module.
    const ALL: [&str; 4] = ["fast", "fixed", "regular", "unresolved"];

    /// Checks the Kymas to reconcile at once and those to roll out when the release meta becomes `now`.
    fn check(now: Option<&ReleaseFingerprint>, users: &[&str], followers: &[&str]) {
        let old = release_with(&UNCHANGED, |_| ());
        let affected = release(&kymas(), "keda", now, Some(&old));
        assert_eq!(names(&affected), (users.to_vec(), followers.to_vec()));
    }

    #[test]
    fn moved_channel_affects_its_followers_only() {
        let with = |channels: &[(&str, &str)], versions: Value| {
            release_with(channels, |meta| meta["spec"]["versions"] = versions)
        };
        check(Some(&with(&MOVED, Value::Null)), &["unresolved"], &["fast"]);
        check(Some(&with(&UNCHANGED[1..], Value::Null)), &["unresolved"], &["fast"]);
        check(None, &ALL, &[]);
        let deprecated = json!([{"version": "0.9.0", "deprecationMessage": "leave"}]);
        check(Some(&with(&UNCHANGED, deprecated.clone())), &ALL, &[]);
        check(Some(&with(&MOVED, deprecated)), &ALL, &["fast"]);
        let new = release_with(&UNCHANGED, |_| ());
        assert_eq!(names(&release(&kymas(), "keda", Some(&new), None)), (ALL.to_vec(), vec![]));
    }

    #[test]
    fn changed_selector_affects_kymas_whose_admission_changes() {
        // `fast` is of team b, and all others are of team a.
        let selecting = |channels: &[(&str, &str)], selector: Value| {
            release_with(channels, |meta| meta["spec"]["kymaSelector"] = selector)
        };
        let team = |operator: &str, teams: &[&str]| json!({"matchExpressions": [{"key": "team", "operator": operator, "values": teams}]});
        let others = ["fixed", "regular", "unresolved"];
        check(Some(&selecting(&UNCHANGED, team("In", &["a", "b"]))), &["fast"], &[]);
        check(Some(&selecting(&UNCHANGED, team("In", &["b"]))), &ALL, &[]);
        check(Some(&selecting(&UNCHANGED, team("In", &["c"]))), &others, &[]);
        check(Some(&selecting(&UNCHANGED, team("In", &["a", "c"]))), &[], &[]);
        check(Some(&selecting(&UNCHANGED, json!({}))), &ALL, &[]);
        // A channel that moved in the same write keeps its roll-out delay.
        check(Some(&selecting(&MOVED, team("In", &["a", "c"]))), &["unresolved"], &["fast"]);
        check(Some(&selecting(&MOVED, team("In", &["c"]))), &others, &["fast"]);
    }

    #[test]
    fn changes_without_effect_on_modules_affect_no_kyma() {
        let old = release_with(&UNCHANGED, |_| ());
        for (member, value) in [
            ("labels", json!({"x": "b", "operator.kyma-project.io/beta": "true"})),
            ("annotations", json!({"x": "y"})),
            ("generation", json!(2)),
        ] {
            let now = release_with(&UNCHANGED, |meta| meta["metadata"][member] = value);
            assert_ne!(now, old, "{member}: catalogs are affected");
            check(Some(&now), &[], &[]);
            let now = release_with(&MOVED, |meta| meta["metadata"][member] = json!(null));
            check(Some(&now), &["unresolved"], &["fast"]);
        }
    }

    #[test]
    fn end_of_a_hold_affects_all_users_and_starts_the_rollout_delay() {
        assert_eq!(names(&hold_ended(&kymas(), "keda")), (ALL.to_vec(), vec!["fast", "regular"]));
        assert_eq!(names(&hold_ended(&kymas(), "unused")), (vec![], vec![]));
    }

    #[test]
    fn template_affects_its_users_and_unresolved_modules() {
        let kymas = kymas();
        assert_eq!(names(&template(&kymas, "keda", "keda-1.0.0")).0, ["fast", "regular", "unresolved"]);
        assert_eq!(names(&template(&kymas, "keda", "keda-0.9.0")).0, ["fixed", "unresolved"]);
        assert_eq!(names(&template(&kymas, "keda", "keda-3.0.0")).0, ["unresolved"]);
    }
}
