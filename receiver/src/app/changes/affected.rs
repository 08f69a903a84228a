//! Kymas that a change of KCP affects.

use std::{collections::BTreeSet, sync::Arc};

use tidewatch_api::key::KymaKey;
use tidewatch_fleet::stores::kymas::CachedKyma;
use tidewatch_select::catalog::VersionSource;

use super::{
    fingerprint::{MandatoryFingerprint, ReleaseFingerprint},
    users::{Follows, User, Users},
};

/// Kymas that a change of the catalog affects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Affected {
    /// Kymas to reconcile at once.
    pub(super) users: BTreeSet<KymaKey>,
    /// Followers of a moved channel of a module, or of a moved mandatory version; each is reconciled after its own roll-out delay.
    pub(super) followers: BTreeSet<Follower>,
}

/// A Kyma that follows a channel of a module, or has a mandatory module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Follower {
    pub(super) key: KymaKey,
    pub(super) uid: String,
    pub(super) module: String,
    /// `None` if the module is mandatory.
    channel: Option<String>,
}

impl Follower {
    fn of(kyma: &CachedKyma, module: &str, channel: Option<&str>) -> Self {
        let key = kyma.key();
        let uid = kyma.facts().uid().to_owned();
        Self { key, uid, module: module.to_owned(), channel: channel.map(str::to_owned) }
    }

    /// Source of the version that the Kyma follows.
    pub(super) fn source(&self) -> VersionSource<'_> {
        self.channel.as_deref().map_or(VersionSource::Mandatory, VersionSource::Channel)
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
/// versions changed, or if the release meta was created or deleted. The channels do not affect modules with a pinned
/// version.
pub(super) fn release(users: &Users, now: &ReleaseFingerprint, old: Option<&ReleaseFingerprint>) -> Affected {
    let Some(old) = old else { return all(users) };
    let channels = now.moved_channels(old);
    let rest = now.rest != old.rest;
    let mut affected = Affected::default();
    for user in &users.all {
        let is_waiting = match user.follows() {
            Follows::Channel(channel) => {
                if channels.contains(channel) {
                    affected.followers.insert(Follower::of(&user.kyma, &users.module, Some(channel)));
                }
                false
            }
            Follows::Version => false,
            Follows::Unresolved => !channels.is_empty(),
        };
        if is_waiting || rest || now.admission_differs(old, user.kyma.facts().labels()) {
            affected.users.insert(user.key());
        }
    }
    affected
}

/// Kymas that a changed release meta of a mandatory module affects: all. A moved version is rolled out; anything else
/// takes effect at once, as the begin and the end of the installation do.
pub(super) fn mandatory(
    kymas: &[Arc<CachedKyma>],
    module: &str,
    now: Option<&MandatoryFingerprint>,
    old: Option<&MandatoryFingerprint>,
) -> Affected {
    match (now, old) {
        (now, old) if now == old => Affected::default(),
        (Some(now), Some(old)) if now.component == old.component => {
            let followers = kymas.iter().map(|kyma| Follower::of(kyma, module, None)).collect();
            Affected { followers, ..Affected::default() }
        }
        _ => every(kymas),
    }
}

/// All Kymas.
pub(super) fn every(kymas: &[Arc<CachedKyma>]) -> Affected {
    Affected { users: kymas.iter().map(|kyma| kyma.key()).collect(), ..Affected::default() }
}

/// Kymas that the end of a held removal affects: all users of the module, which may lose it or a part of it now. A
/// channel that moved during the hold counts as moved now.
pub(super) fn hold_ended(users: &Users) -> Affected {
    let follower = |user: &User| match user.follows() {
        Follows::Channel(channel) => Some(Follower::of(&user.kyma, &users.module, Some(channel))),
        Follows::Version | Follows::Unresolved => None,
    };
    Affected { followers: users.all.iter().filter_map(follower).collect(), ..all(users) }
}

/// All users of a module.
fn all(users: &Users) -> Affected {
    Affected { users: users.all.iter().map(User::key).collect(), ..Affected::default() }
}

/// Kymas that a changed template of a version affects: those that have or select the version, and those with an
/// unresolved module that may wait for it. `target` is the version of a channel.
pub(super) fn template(users: &Users, version: &str, target: impl Fn(&str) -> Option<String>) -> Affected {
    let affected = users.all.iter().filter(|user| user.may_use(version, &target));
    Affected { users: affected.map(User::key).collect(), ..Affected::default() }
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt as _;
    use serde_json::{Value, json};
    use tidewatch_api::{ModuleReleaseMeta, names::finalizer};
    use tidewatch_fleet::stores::manifests::CachedManifest;

    use super::*;

    fn kyma_with(name: &str, selected: &Value) -> Arc<CachedKyma> {
        let team = if name == "fast" { "b" } else { "a" };
        let pins = if name == "pinned" { json!({"keda": "0.9.0"}) } else { json!({}) };
        let accepted = json!({"channel": "regular", "modules": [selected], "pins": pins}).to_string();
        let kyma = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": name, "namespace": "kcp-system", "uid": name, "labels": {"team": team},
                "annotations": {"operator.kyma-project.io/tidewatch-accepted-spec": accepted}},
            "spec": {"channel": "regular"}
        });
        Arc::new(serde_json::from_value(kyma).unwrap())
    }

    fn installed(kyma: &str, channel: Option<&str>, version: &str) -> Arc<CachedManifest> {
        let mut manifest = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": format!("{kyma}-keda"), "namespace": "kcp-system", "labels": {
                "operator.kyma-project.io/kyma-name": kyma, "operator.kyma-project.io/module-name": "keda"
            }},
            "spec": {"remote": true, "version": version, "install": {"name": "raw-manifest", "source": {}}}
        });
        if let Some(channel) = channel {
            manifest["metadata"]["labels"]["operator.kyma-project.io/channel"] = channel.into();
        }
        Arc::new(serde_json::from_value(manifest).unwrap())
    }

    fn users_of(module: &str) -> Users {
        let kymas = [
            kyma_with("fast", &json!({"name": "keda", "channel": "fast"})),
            kyma_with("other", &json!({"name": "warden", "channel": "fast"})),
            kyma_with("pinned", &json!({"name": "keda", "channel": "fast"})),
            kyma_with("regular", &json!({"name": "keda"})),
            kyma_with("unresolved", &json!({"name": "keda"})),
        ];
        let manifests = [
            installed("fast", Some("fast"), "1.0.0"),
            installed("pinned", None, "0.9.0"),
            installed("regular", Some("regular"), "1.0.0"),
        ];
        Users::among(&kymas, if module == "keda" { &manifests } else { &[] }, module)
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
    const ALL: [&str; 4] = ["fast", "pinned", "regular", "unresolved"];

    /// Checks the Kymas to reconcile at once and those to roll out when the release meta becomes `now`.
    fn check(now: &ReleaseFingerprint, users: &[&str], followers: &[&str]) {
        let old = release_with(&UNCHANGED, |_| ());
        let affected = release(&users_of("keda"), now, Some(&old));
        assert_eq!(names(&affected), (users.to_vec(), followers.to_vec()));
    }

    #[test]
    fn mandatory_module_affects_every_kyma_and_its_version_is_rolled_out() {
        let kymas = ["a", "b"].map(|name| kyma_with(name, &json!({"name": "keda"})));
        let release = |change: &dyn Fn(&mut Value)| {
            release_with(&[], |meta| {
                meta["metadata"]["finalizers"] = json!([finalizer::MANDATORY_MODULE]);
                meta["spec"] =
                    json!({"moduleName": "keda", "ocmComponentName": "a.io/b", "mandatory": {"version": "1.0.0"}});
                change(meta);
            })
            .mandatory
        };
        let same = release(&|_| ());
        let newer = release(&|meta| meta["spec"]["mandatory"]["version"] = json!("1.1.0"));
        let renamed = release(&|meta| meta["spec"]["ocmComponentName"] = json!("a.io/c"));
        let unprotected = release(&|meta| meta["metadata"]["finalizers"] = json!([]));
        let deleting = release(&|meta| meta["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
        assert_eq!((&unprotected, &deleting), (&None, &None));
        let (none, both): (&[&str], &[&str]) = (&[], &["a", "b"]);
        for (now, old, users, followers) in [
            (&same, &same, none, none),
            (&newer, &same, none, both),
            (&renamed, &same, both, none),
            (&same, &None, both, none),
            (&None, &same, both, none),
            (&None, &None, none, none),
        ] {
            let affected = mandatory(&kymas, "keda", now.as_ref(), old.as_ref());
            assert_eq!(names(&affected), (users.to_vec(), followers.to_vec()), "{now:?} {old:?}");
            assert!(affected.followers.iter().all(|follower| follower.source() == VersionSource::Mandatory));
        }
    }

    #[test]
    fn moved_channel_affects_its_followers_only() {
        let with = |channels: &[(&str, &str)], versions: Value| {
            release_with(channels, |meta| meta["spec"]["versions"] = versions)
        };
        check(&with(&MOVED, Value::Null), &["unresolved"], &["fast"]);
        check(&with(&UNCHANGED[1..], Value::Null), &["unresolved"], &["fast"]);
        let deprecated = json!([{"version": "0.9.0", "deprecationMessage": "leave"}]);
        check(&with(&UNCHANGED, deprecated.clone()), &ALL, &[]);
        check(&with(&MOVED, deprecated), &ALL, &["fast"]);
        let new = release_with(&UNCHANGED, |_| ());
        assert_eq!(names(&release(&users_of("keda"), &new, None)), (ALL.to_vec(), vec![]));
    }

    #[test]
    fn changed_selector_affects_kymas_whose_admission_changes() {
        // `fast` is of team b, and all others are of team a.
        let selecting = |channels: &[(&str, &str)], selector: Value| {
            release_with(channels, |meta| meta["spec"]["kymaSelector"] = selector)
        };
        let team = |operator: &str, teams: &[&str]| json!({"matchExpressions": [{"key": "team", "operator": operator, "values": teams}]});
        let others = ["pinned", "regular", "unresolved"];
        check(&selecting(&UNCHANGED, team("In", &["a", "b"])), &["fast"], &[]);
        check(&selecting(&UNCHANGED, team("In", &["b"])), &ALL, &[]);
        check(&selecting(&UNCHANGED, team("In", &["c"])), &others, &[]);
        check(&selecting(&UNCHANGED, team("In", &["a", "c"])), &[], &[]);
        check(&selecting(&UNCHANGED, json!({})), &ALL, &[]);
        // A channel that moved in the same write keeps its roll-out delay.
        check(&selecting(&MOVED, team("In", &["a", "c"])), &["unresolved"], &["fast"]);
        check(&selecting(&MOVED, team("In", &["c"])), &others, &["fast"]);
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
            check(&now, &[], &[]);
            let now = release_with(&MOVED, |meta| meta["metadata"][member] = json!(null));
            check(&now, &["unresolved"], &["fast"]);
        }
    }

    #[test]
    fn end_of_a_hold_affects_all_users_and_starts_the_rollout_delay() {
        assert_eq!(names(&hold_ended(&users_of("keda"))), (ALL.to_vec(), vec!["fast", "regular"]));
        assert_eq!(names(&hold_ended(&users_of("unused"))), (vec![], vec![]));
    }

    #[test]
    fn template_affects_its_users_and_unresolved_modules() {
        let template = |version: &str, fast: &str| {
            let target = |channel: &str| Some(if channel == "fast" { fast.to_owned() } else { "1.0.0".to_owned() });
            let affected = template(&users_of("keda"), version, target);
            affected.users.iter().map(|key| key.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(template("1.0.0", "1.0.0"), ["fast", "regular", "unresolved"]);
        assert_eq!(template("0.9.0", "1.0.0"), ["pinned", "unresolved"]);
        assert_eq!(template("3.0.0", "1.0.0"), ["unresolved"]);
        assert_eq!(template("3.0.0", "3.0.0"), ["fast", "unresolved"], "the channel moved before its template came");
    }

    /// All replicas are given the same Kymas of the fleet, of which those of the others have their turns without effect: so they
    /// keep the rate of the fleet together.
    #[test]
    fn reduced_kymas_are_affected_as_whole_ones() {
        let kymas = users_of("keda").all.into_iter().map(|user| user.kyma).collect::<Vec<_>>();
        let reduced: Vec<_> = kymas.iter().map(|kyma| Arc::new(CachedKyma::reduced(kyma.whole().unwrap()))).collect();
        let manifests = [installed("fast", Some("fast"), "1.0.0"), installed("pinned", None, "0.9.0")];
        let old = release_with(&UNCHANGED, |_| ());
        let now = release_with(&MOVED, |_| ());
        let selecting = release_with(&UNCHANGED, |meta| meta["spec"]["kymaSelector"] = json!({}));
        let affected = |kymas: &[Arc<CachedKyma>]| {
            let users = Users::among(kymas, &manifests, "keda");
            let of_template = template(&users, "1.0.0", |_| Some("1.0.0".to_owned()));
            let of_mandatory = every(kymas);
            let moved = release(&users, &now, Some(&old));
            [moved, release(&users, &selecting, Some(&old)), of_template, hold_ended(&users), of_mandatory]
        };
        assert_eq!(kymas.len(), ALL.len());
        assert_eq!(affected(&reduced), affected(&kymas));
        let expected: (Vec<_>, Vec<_>) = (vec!["regular", "unresolved"], vec!["fast"]);
        assert_eq!(names(&affected(&reduced)[0]), expected);
    }

    #[test]
    fn refused_switch_to_a_channel_is_looked_at_again_when_that_channel_moves() {
        // Its status names the channel of the installed version, since the switch would be a downgrade.
        let kymas = [kyma_with("switched", &json!({"name": "keda", "channel": "regular"}))];
        let users = Users::among(&kymas, &[installed("switched", Some("fast"), "2.0.0")], "keda");
        let old = release_with(&[("fast", "2.0.0"), ("regular", "1.0.0")], |_| ());
        let now = release_with(&[("fast", "2.0.0"), ("regular", "2.1.0")], |_| ());
        assert_eq!(names(&release(&users, &now, Some(&old))), (vec!["switched"], vec![]));
        assert_eq!(names(&release(&users, &old, Some(&old))), (vec![], vec![]));
    }

    #[test]
    fn users_are_found_without_an_accepted_spec() {
        let mut kyma = (**kyma_with("k", &Value::Null).whole().unwrap()).clone();
        kyma.metadata.annotations = None;
        kyma.spec.modules = serde_json::from_value(json!([{"name": "keda"}])).unwrap();
        assert_eq!(Users::among(&[Arc::new(kyma.clone().into())], &[], "keda").all.len(), 1, "by the defaults of KCP");
        kyma.annotations_mut().insert("operator.kyma-project.io/tidewatch-accepted-spec".into(), "{keda".into());
        assert_eq!(
            Users::among(&[Arc::new(kyma.clone().into())], &[], "keda").all.len(),
            1,
            "the annotation is malformed"
        );
        kyma.spec.modules = None;
        assert_eq!(Users::among(&[Arc::new(kyma.clone().into())], &[], "keda").all.len(), 0);
        let users = Users::among(&[Arc::new(kyma.into())], &[installed("k", Some("fast"), "1.0.0")], "keda");
        assert_eq!(users.all[0].follows(), Follows::Channel("fast"), "by its Manifest");
    }
}
