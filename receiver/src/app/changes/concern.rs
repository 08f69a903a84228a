//! Whom a change concerns.

use std::{collections::BTreeSet, sync::Arc};

use kube::ResourceExt;
use tidewatch_shared::api::Kyma;

use super::essence::{self, Decided, Follows, Moved, Release, key_of};
use crate::base::key::KymaKey;

/// What a change of a Kyma asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum KymaMoved {
    /// Its reconcile.
    Reconcile,
    /// Its reconcile and its catalog: it is new, or may see something else.
    Everything,
}

/// A Kyma moved.
pub(super) fn kyma(now: &Decided, moved: &Moved<Decided>) -> KymaMoved {
    match moved {
        Moved::From(old) if !now.labels_moved(old) => KymaMoved::Reconcile,
        _ => KymaMoved::Everything,
    }
}

/// Whom a movement of the catalog concerns.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Concerned {
    /// Those who are to know at once.
    pub(super) users: BTreeSet<KymaKey>,
    /// Those whose channel of a module moved, each in its own time.
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
        Self { key: key_of(kyma.as_ref()), uid, module: module.to_owned(), channel: channel.to_owned() }
    }
}

impl Concerned {
    pub(super) fn add(&mut self, mut other: Self) {
        self.users.append(&mut other.users);
        self.followers.append(&mut other.followers);
    }
}

/// A release meta moved. Who follows a channel that moved has time. Who is admitted now and was not before, or the other way round, is to
/// know at once; so is who uses the module, when something else is said of it or of its versions, or when it came or went. Where channels
/// point is no concern of those with a version of their own.
pub(super) fn release(kymas: &[Arc<Kyma>], module: &str, now: Option<&Release>, old: Option<&Release>) -> Concerned {
    let (Some(now), Some(old)) = (now, old) else { return users(kymas, module) };
    let (channels, rest) = (now.moved_channels(old), now.rest_moved(old));
    let mut concerned = Concerned::default();
    for kyma in kymas {
        let waits = match essence::follows(kyma, module) {
            None => continue,
            Some(Follows::Channel(channel)) => {
                if channels.iter().any(|moved| moved == channel) {
                    concerned.followers.insert(Follower::of(kyma, module, channel));
                }
                false
            }
            Some(Follows::Version) => false,
            Some(Follows::Unresolved) => !channels.is_empty(),
        };
        if waits || rest || now.admits_otherwise(old, kyma.labels()) {
            concerned.users.insert(key_of(kyma.as_ref()));
        }
    }
    concerned
}

/// The removal of a module, or of a part of it, was held and is not any more: who was kept from losing it may lose it now. Where a channel
/// moved meanwhile, that counts from now on.
pub(super) fn released(kymas: &[Arc<Kyma>], module: &str) -> Concerned {
    let follower = |kyma: &Arc<Kyma>| match essence::follows(kyma, module) {
        Some(Follows::Channel(channel)) => Some(Follower::of(kyma, module, channel)),
        _ => None,
    };
    Concerned { followers: kymas.iter().filter_map(follower).collect(), ..users(kymas, module) }
}

/// All that use a module.
fn users(kymas: &[Arc<Kyma>], module: &str) -> Concerned {
    let users = kymas.iter().filter(|kyma| essence::follows(kyma, module).is_some());
    Concerned { users: users.map(|kyma| key_of(kyma.as_ref())).collect(), ..Concerned::default() }
}

/// A template moved: the Kymas that rest on it, or may wait for it.
pub(super) fn template(kymas: &[Arc<Kyma>], module: &str, template: &str) -> Concerned {
    let concerned = kymas.iter().filter(|kyma| essence::rests_on(kyma, module, template));
    Concerned { users: concerned.map(|kyma| key_of(kyma.as_ref())).collect(), ..Concerned::default() }
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

    /// `meta` may say more of it than where its channels point.
    fn release_with(channels: &[(&str, &str)], meta: impl FnOnce(&mut Value)) -> Release {
        let channels: Vec<_> =
            channels.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
        let mut value = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": "keda", "labels": {"x": "a"}, "generation": 1},
            "spec": {"moduleName": "keda", "channels": channels, "kymaSelector": {"matchLabels": {"team": "a"}}}
        });
        meta(&mut value);
        let restricted = ["keda".to_owned()].into();
        Release::of(&serde_json::from_value::<ModuleReleaseMeta>(value).unwrap(), &restricted)
    }

    fn names(concerned: &Concerned) -> (Vec<&str>, Vec<&str>) {
        let users = concerned.users.iter().map(|key| key.name.as_str()).collect();
        (users, concerned.followers.iter().map(|follower| follower.key.name.as_str()).collect())
    }

    const STILL: [(&str, &str); 2] = [("fast", "1.0.0"), ("regular", "1.0.0")];
    const MOVED: [(&str, &str); 2] = [("fast", "2.0.0"), ("regular", "1.0.0")];
    /// All who use the module.
    const ALL: [&str; 4] = ["fast", "fixed", "regular", "unresolved"];

    /// Who is to know at once, and who in time, when the release meta becomes this one.
    fn check(now: Option<&Release>, users: &[&str], followers: &[&str]) {
        let old = release_with(&STILL, |_| ());
        let concerned = release(&kymas(), "keda", now, Some(&old));
        assert_eq!(names(&concerned), (users.to_vec(), followers.to_vec()));
    }

    #[test]
    fn a_moved_channel_wakes_those_who_follow_it_and_nobody_else() {
        let with = |channels: &[(&str, &str)], versions: Value| {
            release_with(channels, |meta| meta["spec"]["versions"] = versions)
        };
        check(Some(&with(&MOVED, Value::Null)), &["unresolved"], &["fast"]);
        check(Some(&with(&STILL[1..], Value::Null)), &["unresolved"], &["fast"]);
        check(None, &ALL, &[]);
        let told = json!([{"version": "0.9.0", "deprecationMessage": "leave"}]);
        check(Some(&with(&STILL, told.clone())), &ALL, &[]);
        check(Some(&with(&MOVED, told)), &ALL, &["fast"]);
        let new = release_with(&STILL, |_| ());
        assert_eq!(names(&release(&kymas(), "keda", Some(&new), None)), (ALL.to_vec(), vec![]));
    }

    #[test]
    fn a_selector_wakes_those_whom_it_admits_now_and_did_not_or_the_other_way_round() {
        // `fast` is of team b, and all others are of team a.
        let selecting = |channels: &[(&str, &str)], selector: Value| {
            release_with(channels, |meta| meta["spec"]["kymaSelector"] = selector)
        };
        let team = |operator: &str, teams: &[&str]| json!({"matchExpressions": [{"key": "team", "operator": operator, "values": teams}]});
        let others = ["fixed", "regular", "unresolved"];
        check(Some(&selecting(&STILL, team("In", &["a", "b"]))), &["fast"], &[]);
        check(Some(&selecting(&STILL, team("In", &["b"]))), &ALL, &[]);
        check(Some(&selecting(&STILL, team("In", &["c"]))), &others, &[]);
        check(Some(&selecting(&STILL, team("In", &["a", "c"]))), &[], &[]);
        check(Some(&selecting(&STILL, json!({}))), &ALL, &[]);
        // What moved in the same write keeps its time.
        check(Some(&selecting(&MOVED, team("In", &["a", "c"]))), &["unresolved"], &["fast"]);
        check(Some(&selecting(&MOVED, team("In", &["c"]))), &others, &["fast"]);
    }

    #[test]
    fn what_decides_nothing_wakes_nobody() {
        let old = release_with(&STILL, |_| ());
        for (member, value) in [
            ("labels", json!({"x": "b", "operator.kyma-project.io/beta": "true"})),
            ("annotations", json!({"x": "y"})),
            ("generation", json!(2)),
        ] {
            let now = release_with(&STILL, |meta| meta["metadata"][member] = value);
            assert_ne!(now, old, "{member}: catalogs are another matter");
            check(Some(&now), &[], &[]);
            let now = release_with(&MOVED, |meta| meta["metadata"][member] = json!(null));
            check(Some(&now), &["unresolved"], &["fast"]);
        }
    }

    #[test]
    fn the_end_of_a_hold_wakes_all_who_use_the_module_and_begins_their_time() {
        assert_eq!(names(&released(&kymas(), "keda")), (ALL.to_vec(), vec!["fast", "regular"]));
        assert_eq!(names(&released(&kymas(), "nobodys")), (vec![], vec![]));
    }

    #[test]
    fn a_template_wakes_those_who_rest_on_it_or_wait() {
        let kymas = kymas();
        assert_eq!(names(&template(&kymas, "keda", "keda-1.0.0")).0, ["fast", "regular", "unresolved"]);
        assert_eq!(names(&template(&kymas, "keda", "keda-0.9.0")).0, ["fixed", "unresolved"]);
        assert_eq!(names(&template(&kymas, "keda", "keda-3.0.0")).0, ["unresolved"]);
    }
}
