//! Whom a change concerns (`03`, Which Kymas wake).

use std::{collections::BTreeSet, sync::Arc};

use kube::ResourceExt;
use tidewatch_shared::api::Kyma;

use super::essence::{self, Decided, Follows, Moved, Release, key_of};
use crate::key::KymaKey;

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

impl Concerned {
    pub(super) fn add(&mut self, mut other: Self) {
        self.users.append(&mut other.users);
        self.followers.append(&mut other.followers);
    }
}

/// A release meta moved: the Kymas that follow one of the channels that moved, in time; or all that use the module, when something
/// else moved than where channels point. Those with a version of their own are no concern of channels, but of what is said of versions.
pub(super) fn release(kymas: &[Arc<Kyma>], module: &str, now: Option<&Release>, old: Option<&Release>) -> Concerned {
    let channels = match (now, old) {
        (Some(now), Some(old)) if !now.audience_moved(old) => Some(now.moved_channels(old)),
        _ => None,
    };
    let channels = channels.filter(|moved| !moved.is_empty());
    let rest = matches!((now, old), (Some(now), Some(old)) if now.rest_moved(old));
    let mut concerned = Concerned::default();
    for kyma in kymas {
        let key = key_of(kyma.as_ref());
        match (&channels, essence::follows(kyma, module)) {
            (_, None) => {}
            (Some(moved), Some(Follows::Channel(channel))) if moved.iter().any(|moved| moved == channel) => {
                let (uid, module) = (kyma.uid().unwrap_or_default(), module.to_owned());
                concerned.followers.insert(Follower { key, uid, module, channel: channel.to_owned() });
            }
            (Some(_), Some(Follows::Channel(_) | Follows::Version)) if !rest => {}
            (_, Some(_)) => drop(concerned.users.insert(key)),
        }
    }
    concerned
}

/// A template moved: the Kymas that rest on it, or may wait for it.
pub(super) fn template(kymas: &[Arc<Kyma>], module: &str, template: &str) -> Concerned {
    let concerned = kymas.iter().filter(|kyma| essence::rests_on(kyma, module, template));
    Concerned { users: concerned.map(|kyma| key_of(kyma.as_ref())).collect(), ..Concerned::default() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_shared::api::ModuleReleaseMeta;

    use super::*;

    fn kyma_with(name: &str, status: serde_json::Value) -> Arc<Kyma> {
        let kyma = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": name, "namespace": "kcp-system", "uid": name},
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

    fn release_of(channels: &[(&str, &str)], label: &str, selector: &str) -> Release {
        release_with(channels, label, selector, &json!(null))
    }

    fn release_with(channels: &[(&str, &str)], label: &str, selector: &str, versions: &serde_json::Value) -> Release {
        let channels: Vec<_> =
            channels.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
        let meta = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": "keda", "labels": {"x": label}},
            "spec": {
                "moduleName": "keda", "channels": channels, "versions": versions,
                "kymaSelector": {"matchLabels": {"team": selector}}
            }
        });
        Release::of(&serde_json::from_value::<ModuleReleaseMeta>(meta).unwrap())
    }

    fn names(concerned: &Concerned) -> (Vec<&str>, Vec<&str>) {
        let users = concerned.users.iter().map(|key| key.name.as_str()).collect();
        (users, concerned.followers.iter().map(|follower| follower.key.name.as_str()).collect())
    }

    #[test]
    fn a_moved_channel_wakes_those_who_follow_it_and_nobody_else() {
        let old = release_of(&[("fast", "1.0.0"), ("regular", "1.0.0")], "a", "a");
        let check = |now: Option<&Release>, users: &[&str], followers: &[&str]| {
            let concerned = release(&kymas(), "keda", now, Some(&old));
            assert_eq!(names(&concerned), (users.to_vec(), followers.to_vec()));
        };
        let all = ["fast", "fixed", "regular", "unresolved"];
        check(Some(&release_of(&[("fast", "2.0.0"), ("regular", "1.0.0")], "a", "a")), &["unresolved"], &["fast"]);
        check(Some(&release_of(&[("regular", "1.0.0")], "a", "a")), &["unresolved"], &["fast"]);
        check(Some(&release_of(&[("fast", "1.0.0"), ("regular", "1.0.0")], "b", "a")), &all, &[]);
        check(Some(&release_of(&[("fast", "2.0.0"), ("regular", "1.0.0")], "a", "b")), &all, &[]);
        check(None, &all, &[]);
        let moved = [("fast", "2.0.0"), ("regular", "1.0.0")];
        let told = json!([{"version": "0.9.0", "deprecationMessage": "leave"}]);
        check(Some(&release_with(&moved, "a", "a", &told)), &["fixed", "regular", "unresolved"], &["fast"]);
    }

    #[test]
    fn a_template_wakes_those_who_rest_on_it_or_wait() {
        let kymas = kymas();
        assert_eq!(names(&template(&kymas, "keda", "keda-1.0.0")).0, ["fast", "regular", "unresolved"]);
        assert_eq!(names(&template(&kymas, "keda", "keda-0.9.0")).0, ["fixed", "unresolved"]);
        assert_eq!(names(&template(&kymas, "keda", "keda-3.0.0")).0, ["unresolved"]);
    }
}
