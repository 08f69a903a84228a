//! Least privilege: the API servers report exactly the rights listed here for our service accounts, and each of them is
//! needed.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use k8s_openapi::api::{
    authorization::v1::{
        ResourceRule, SelfSubjectRulesReview, SelfSubjectRulesReviewSpec, SubjectAccessReview, SubjectRulesReviewStatus,
    },
    rbac::v1::{ClusterRole, PolicyRule, Role},
};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma, Manifest, Watcher,
    names::{AGENT_OBJECT, SKR_NAMESPACE, finalizer, label},
};
use tidewatch_receiver::rights;
use tidewatch_testing::{
    control_plane::Cluster,
    http,
    kubelet::PodState,
    landscape::{DEADLINE, until, watchers::watcher},
};

use crate::support::{Fleet, Member, TestResult, quick_options};

/// The receiver's service account.
const RECEIVER: &str = "tidewatch-receiver";
/// A service account without any role binding.
const UNPRIVILEGED: &str = "unprivileged";
const GROUP: &str = "operator.kyma-project.io";
const RBAC: &str = "rbac.authorization.k8s.io";
/// Port of the agent's admin listener in its pod.
const ADMIN: u16 = 2113;

/// Group, resource, name (empty: every one), verbs.
type Right<'a> = (&'a str, &'a str, &'a str, &'a str);

/// Verbs for all planned watches. The design grants `get` as well, although the agent only lists and watches, also
/// single objects.
const WATCH_VERBS: &str = "get list watch";

/// One right of the agent, and the symptom of its absence.
type NeededRight = (Right<'static>, Symptom);

/// The symptom that an agent's status shows when it lacks a right.
#[derive(Clone, Copy, Debug)]
enum Symptom {
    /// The agent does not become ready; names the pending step.
    StepPending(&'static str),
    /// The agent enrols but cannot store its identity, so the next process has to enrol again.
    IdentityNotStored,
    /// The agent has not observed its canary.
    CanaryMissing,
    /// The API server refuses a watch of the plan; names the watch.
    WatchRefused(&'static str),
}

/// Rights of the agent in all namespaces.
const AGENT_CLUSTER_RIGHTS: [NeededRight; 5] = [
    (("", "namespaces", "kyma-system", WATCH_VERBS), Symptom::WatchRefused("namespace")),
    (("apiextensions.k8s.io", "customresourcedefinitions", "", WATCH_VERBS), Symptom::WatchRefused("crds")),
    (
        (RBAC, "clusterrolebindings", "tidewatch-agent", WATCH_VERBS),
        Symptom::WatchRefused("installer/clusterrolebindings"),
    ),
    ((RBAC, "clusterroles", "tidewatch-agent", WATCH_VERBS), Symptom::WatchRefused("installer/clusterroles")),
    (
        ("scheduling.k8s.io", "priorityclasses", "skr-webhook-priority", WATCH_VERBS),
        Symptom::WatchRefused("installer/priorityclasses"),
    ),
];

/// Number of rights in [`AGENT_NAMESPACE_RIGHTS`] without which the later ones are not exercised: without its ConfigMap an agent
/// has neither watches nor the address to enrol at.
const PREREQUISITES: usize = 2;

/// Rights of the agent in its own namespace.
const AGENT_NAMESPACE_RIGHTS: [NeededRight; 12] = [
    (("", "configmaps", "tidewatch-agent", WATCH_VERBS), Symptom::StepPending("plan")),
    (("", "secrets", "skr-webhook-tls", "list patch watch"), Symptom::IdentityNotStored),
    (("coordination.k8s.io", "leases", "tidewatch-agent", "list patch watch"), Symptom::CanaryMissing),
    (("", "serviceaccounts", "tidewatch-agent", WATCH_VERBS), Symptom::WatchRefused("installer/serviceaccounts")),
    (("", "services", "skr-webhook-metrics", WATCH_VERBS), Symptom::WatchRefused("installer/services")),
    (("apps", "deployments", "skr-webhook", WATCH_VERBS), Symptom::WatchRefused("installer/deployments")),
    // Selected by label, which RBAC cannot express, so the right has no resource name.
    (("networking.k8s.io", "networkpolicies", "", WATCH_VERBS), Symptom::WatchRefused("installer/networkpolicies")),
    ((RBAC, "rolebindings", "tidewatch-agent", WATCH_VERBS), Symptom::WatchRefused("installer/rolebindings")),
    ((RBAC, "roles", "tidewatch-agent", WATCH_VERBS), Symptom::WatchRefused("installer/roles")),
    ((GROUP, "kymas", "default", WATCH_VERBS), Symptom::WatchRefused("kyma")),
    ((GROUP, "modulereleasemetas", "", WATCH_VERBS), Symptom::WatchRefused("catalog/modulereleasemetas")),
    ((GROUP, "moduletemplates", "", WATCH_VERBS), Symptom::WatchRefused("catalog/moduletemplates")),
];

/// Rights of the receiver in its namespace of KCP, each with its reason. Each `list` and `watch` serves a reflector,
/// and readiness waits for all of them; the module of tests that uses a verb is in parentheses.
const RECEIVER_RIGHTS: [(Right<'static>, &str); 18] = [
    (
        (GROUP, "kymas", "", "get list patch watch"),
        "get: every reconcile begins with a quorum read; patch: finalizer (kyma)",
    ),
    ((GROUP, "kymas/status", "", "patch"), "covered below"),
    (
        (GROUP, "manifests", "", "create delete list patch update watch"),
        "create, delete: covered below; patch: every apply; update: removes what others add to a spec, in no test of landscapes",
    ),
    ((GROUP, "manifests/status", "", "patch"), "state and inventory of a module (modules)"),
    (
        (GROUP, "modulereleasemetas", "", "list patch watch"),
        "a cache; patch: finalizer of a mandatory module (modules::mandatory)",
    ),
    ((GROUP, "moduletemplates", "", "list watch"), "a cache"),
    ((GROUP, "watchers", "", "list patch watch"), "patch: covered below"),
    ((GROUP, "watchers/status", "", "patch"), "state of a Watcher (watches)"),
    (("", "secrets", "", "list watch"), "access Secrets, of any name"),
    (
        ("", "secrets", "tidewatch-ca", "get update"),
        "get: at each start; update: the first start (bootstrap), a rotation (rotation)",
    ),
    (("", "configmaps", "tidewatch", "list watch"), "the pause of all runtimes (path)"),
    (("", "configmaps", "tidewatch-revocations", "list watch"), "revoked certificates and runtimes (enrolment)"),
    (
        ("", "configmaps", "tidewatch-releases", "list patch watch"),
        "the accepted catalog with the times of its changes (catalog)",
    ),
    (
        ("", "configmaps", "", "create"),
        "catalog releases, the states of an agent upgrade and of the ring rollouts: create cannot be limited by name (upgrade)",
    ),
    (
        ("", "configmaps", "tidewatch-agent-upgrade", "list update watch"),
        "state of an agent upgrade, from stage to stage (upgrade)",
    ),
    (
        ("", "configmaps", "tidewatch-rollouts", "list update watch"),
        "state of the ring rollouts, from ring to ring (module_rollout)",
    ),
    (("coordination.k8s.io", "leases", "", "list watch"), "one watch serves all Leases of the shards (replicas)"),
    (("events.k8s.io", "events", "", "create patch"), "Events (record); patch: series of repeated Events"),
];

/// Rights of the receiver to write Leases, in its namespace of KCP: those of the members and of the shards, and that of the fleet
/// role (active, replicas). It creates none.
fn receiver_leases() -> Vec<String> {
    let numbered = |name: &str, count: u8, digits: usize| {
        (0..count).map(|number| format!("tidewatch-{name}-{number:0digits$}")).collect::<Vec<_>>()
    };
    [vec!["tidewatch-fleet".to_owned()], numbered("replica", 8, 1), numbered("shard", 24, 2)].concat()
}

/// Returns the result of a SelfSubjectRulesReview: the verbs by group, resource and name, and the non-resource URLs.
async fn review(
    client: Client,
    namespace: &str,
) -> Result<(BTreeMap<[String; 3], BTreeSet<String>>, BTreeSet<String>)> {
    let spec = SelfSubjectRulesReviewSpec { namespace: Some(namespace.to_owned()) };
    let review_request = SelfSubjectRulesReview { spec, ..SelfSubjectRulesReview::default() };
    let answer = Api::<SelfSubjectRulesReview>::all(client).create(&PostParams::default(), &review_request).await?;
    let SubjectRulesReviewStatus { resource_rules, non_resource_rules, incomplete, .. } =
        answer.status.context("a status")?;
    anyhow::ensure!(!incomplete, "the review of the API server is incomplete");
    let mut rights: BTreeMap<[String; 3], BTreeSet<String>> = BTreeMap::new();
    for ResourceRule { api_groups, resources, resource_names, verbs } in resource_rules {
        let names = resource_names.filter(|names| !names.is_empty()).unwrap_or_else(|| vec![String::new()]);
        for group in api_groups.as_deref().unwrap_or_default() {
            for resource in resources.as_deref().unwrap_or_default() {
                for name in &names {
                    let key = [group.clone(), resource.clone(), name.clone()];
                    rights.entry(key).or_default().extend(verbs.iter().cloned());
                }
            }
        }
    }
    let addresses = non_resource_rules.into_iter().flat_map(|rule| {
        let verbs = rule.verbs.join(" ");
        rule.non_resource_urls.unwrap_or_default().into_iter().map(move |url| format!("{verbs} {url}"))
    });
    Ok((rights, addresses.collect()))
}

/// The rights of an account in a namespace and cluster-wide, sorted, without those that every account of its namespace
/// has.
async fn rights_of(cluster: &Cluster, home: &str, account: &str, namespace: &str) -> Result<Vec<[String; 4]>> {
    cluster.ensure_service_account(home, UNPRIVILEGED).await?;
    let of = async |account: &str| {
        let token = cluster.service_account_token(home, account).await?;
        review(cluster.client_for_token(&token).await?, namespace).await
    };
    let ((mut rights, addresses), (others, of_others)) = (of(account).await?, of(UNPRIVILEGED).await?);
    assert_eq!(addresses, of_others, "{account}");
    for (key, verbs) in &others {
        if let Some(mine) = rights.get_mut(key) {
            mine.retain(|verb| !verbs.contains(verb));
        }
    }
    let rights = rights.into_iter().filter(|(_, verbs)| !verbs.is_empty());
    Ok(rights.map(|([a, b, c], verbs)| [a, b, c, verbs.into_iter().collect::<Vec<_>>().join(" ")]).collect())
}

fn sorted<'a>(rights: impl IntoIterator<Item = Right<'a>>) -> Vec<[String; 4]> {
    let mut rights: Vec<_> = rights.into_iter().map(|(a, b, c, d)| [a, b, c, d].map(str::to_owned)).collect();
    rights.sort();
    rights
}

/// The RBAC rule that grants a right.
fn rule((group, resource, name, verbs): Right<'_>) -> PolicyRule {
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(vec![resource.to_owned()]),
        resource_names: (!name.is_empty()).then(|| vec![name.to_owned()]),
        verbs: verbs.split(' ').map(str::to_owned).collect(),
        ..PolicyRule::default()
    }
}

/// `acceptance.md` C1 33: no more and no fewer.
#[tokio::test]
async fn accounts_have_exactly_the_listed_rights() -> TestResult {
    let fleet = Fleet::with_one_runtime("privilege", quick_options()).await?;
    let member = fleet.only();
    until("the Kyma in the runtime", async || member.runtime.skr_kyma().await).await?;
    let runtime = member.runtime.cluster();
    let everywhere = AGENT_CLUSTER_RIGHTS.map(|(right, _)| right);
    let here = everywhere.into_iter().chain(AGENT_NAMESPACE_RIGHTS.map(|(right, _)| right));
    let here = sorted(here);
    let rights = async || rights_of(runtime, SKR_NAMESPACE, AGENT_OBJECT, SKR_NAMESPACE).await;
    assert_eq!(rights().await?, here);
    // A module brings a right for each kind of its objects, here ConfigMaps, and takes it along.
    let mut with_module = sorted([("", "configmaps", "", WATCH_VERBS)]);
    with_module.extend(here.iter().cloned());
    with_module.sort();
    for (modules, expected) in [(&["keda"][..], &with_module), (&[], &here)] {
        member.delivers(modules).await?;
        until(&format!("the agent's rights with {modules:?}"), async || {
            let found = rights().await?;
            anyhow::ensure!(found == *expected, "{found:?}");
            Ok(Some(()))
        })
        .await?;
    }
    // A Watcher on all resources of a group brings the right to read them, and takes it along.
    let group = "cloud-resources.kyma-project.io";
    fleet.landscape.write_watcher(&watcher("all", (group, "*", "*"), "spec")).await?;
    let mut with_group = sorted([(group, "*", "", WATCH_VERBS)]);
    with_group.extend(here.iter().cloned());
    with_group.sort();
    for expected in [&with_group, &here] {
        until("the agent's rights with and without a group", async || {
            let found = rights().await?;
            Ok((found == *expected).then_some(()))
        })
        .await?;
        member.path_proven().await?;
        if expected == &with_group {
            fleet.landscape.delete_watcher("all").await?;
        }
    }
    for elsewhere in ["default", "kube-system"] {
        assert_eq!(
            rights_of(runtime, SKR_NAMESPACE, AGENT_OBJECT, elsewhere).await?,
            sorted(everywhere),
            "{elsewhere}"
        );
    }
    let kcp = fleet.landscape.kcp();
    let home = fleet.landscape.namespace();
    let leases = receiver_leases();
    let leases = leases.iter().map(|name| ("coordination.k8s.io", "leases", name.as_str(), "get update"));
    let expected = sorted(RECEIVER_RIGHTS.map(|(right, _)| right).into_iter().chain(leases));
    assert_eq!(rights_of(kcp, home, RECEIVER, home).await?, expected);
    for elsewhere in ["default", "kube-system"] {
        assert_eq!(rights_of(kcp, home, RECEIVER, elsewhere).await?, sorted([]), "{elsewhere}");
    }
    Ok(())
}

/// An agent without any right, and its roles.
struct StrippedAgent<'a> {
    member: &'a Member,
    everywhere: Api<ClusterRole>,
    here: Api<Role>,
    agent: PodState,
}

impl<'a> StrippedAgent<'a> {
    /// Revokes all rights and restarts the agent, because the API server does not authorize an open watch again. The
    /// receiver must not repair the roles meanwhile.
    async fn of(member: &'a Member) -> Result<Self> {
        let client = member.runtime.cluster().client().await?;
        let everywhere = Api::all(client.clone());
        let here = Api::namespaced(client, SKR_NAMESPACE);
        let before = member.agent(None).await?;
        let this = Self { member, everywhere, here, agent: before.clone() };
        this.grant(&[], &[]).await?;
        member.kubelet.kill(&before.name);
        let agent = until("the agent without rights", async || {
            let mut running = member.kubelet.running("tidewatch-agent").into_iter();
            Ok(running.find(|agent| agent.pid().is_some() && agent.pid() != before.pid()))
        })
        .await?;
        Ok(Self { agent, ..this })
    }

    async fn grant(&self, everywhere: &[NeededRight], here: &[NeededRight]) -> Result<()> {
        let rules = |needed: &[NeededRight]| -> Patch<Value> {
            let rules: Vec<_> = needed.iter().map(|(right, _)| rule(*right)).collect();
            Patch::Merge(json!({"rules": rules}))
        };
        self.everywhere.patch(AGENT_OBJECT, &PatchParams::default(), &rules(everywhere)).await?;
        self.here.patch(AGENT_OBJECT, &PatchParams::default(), &rules(here)).await?;
        Ok(())
    }

    async fn status(&self) -> Result<Value> {
        let agent = self.member.kubelet.pod(&self.agent.name).context("its pod")?;
        let (_, page) = http::get(agent.address(ADMIN).context("its admin listener")?, "/status", DEADLINE).await?;
        Ok(serde_json::from_str(&page)?)
    }

    /// Waits until the agent shows a symptom, or no longer shows it.
    async fn symptom_becomes(&self, symptom: Symptom, shown: bool) -> Result<()> {
        until(&format!("the symptom {symptom:?}: {shown}"), async || {
            let status = self.status().await?;
            Ok((symptom.is_shown_by(&status) == Some(shown)).then_some(()))
        })
        .await
    }
}

impl Symptom {
    /// Returns true if the agent's status shows the symptom, `None` while the agent has not tried.
    fn is_shown_by(self, status: &Value) -> Option<bool> {
        match self {
            Self::StepPending(step) => Some(status["pending"].as_array()?.iter().any(|pending| pending == step)),
            Self::IdentityNotStored => {
                status["identity"]["from"].is_string().then(|| status["identity"]["unkept"] == true)
            }
            Self::CanaryMissing => Some(status["canaryAgeSeconds"].is_null()),
            Self::WatchRefused(name) => {
                let mut watches = status["runtime"]["watches"].as_array()?.iter();
                let watch = watches.find(|watch| watch["name"] == name)?;
                match watch["error"].as_str() {
                    Some(error) => error.contains("403").then_some(true),
                    None => watch["listedSecondsAgo"].is_u64().then_some(false),
                }
            }
        }
    }
}

/// Rights only add up, and no two of these concern the same resource. So if a symptom shows without any of the later
/// rights, and disappears with all of them, its own right is needed.
#[tokio::test]
async fn each_right_of_an_agent_is_needed() -> TestResult {
    let resources: BTreeSet<_> = AGENT_NAMESPACE_RIGHTS
        .iter()
        .chain(&AGENT_CLUSTER_RIGHTS)
        .map(|((group, resource, ..), _)| (group, resource))
        .collect();
    assert_eq!(resources.len(), AGENT_NAMESPACE_RIGHTS.len() + AGENT_CLUSTER_RIGHTS.len());
    let fleet = Fleet::with_one_runtime("needed", quick_options()).await?;
    let member = fleet.only();
    // Pause the runtime: otherwise the installer restores the roles.
    pause(&fleet, member, true).await?;
    member.condition_becomes("Paused", "True", "Label").await?;
    let agent = StrippedAgent::of(member).await?;
    for at in 0..PREREQUISITES {
        agent.symptom_becomes(AGENT_NAMESPACE_RIGHTS[at].1, true).await?;
        agent.grant(&[], &AGENT_NAMESPACE_RIGHTS[..=at]).await?;
        agent.symptom_becomes(AGENT_NAMESPACE_RIGHTS[at].1, false).await?;
    }
    let rest =
        || AGENT_NAMESPACE_RIGHTS[PREREQUISITES..].iter().chain(&AGENT_CLUSTER_RIGHTS).map(|(_, symptom)| *symptom);
    for symptom in rest() {
        agent.symptom_becomes(symptom, true).await?;
    }
    agent.grant(&AGENT_CLUSTER_RIGHTS, &AGENT_NAMESPACE_RIGHTS).await?;
    for symptom in rest() {
        agent.symptom_becomes(symptom, false).await?;
    }
    let status = agent.status().await?;
    let watches = status["runtime"]["watches"].as_array().context("watches")?;
    assert_eq!(watches.len(), rest().count(), "no watch is left out: {status}");
    pause(&fleet, member, false).await?;
    member.path_proven().await?;
    member.delivers(&["keda"]).await?;
    Ok(())
}

/// The receiver's Role in KCP, from which the test takes single verbs.
struct ReceiverRole<'a> {
    fleet: &'a Fleet,
    roles: Api<Role>,
}

impl ReceiverRole<'_> {
    async fn grant(&self, without: Option<(&str, &str)>) -> Result<()> {
        let mut rules = rights::rules();
        for rule in &mut rules {
            if let Some((resource, verb)) = without
                && rule.resources.iter().flatten().any(|held| held == resource)
            {
                rule.verbs.retain(|held| held != verb);
            }
        }
        rules.retain(|rule| !rule.verbs.is_empty());
        let rules = Patch::Merge(json!({"rules": rules}));
        self.roles.patch(RECEIVER, &PatchParams::default(), &rules).await?;
        Ok(())
    }

    /// Waits until the authorizer of KCP, which follows the Role with a delay, denies the receiver a verb.
    async fn becomes_denied(&self, resource: &str, verb: &str) -> Result<()> {
        let landscape = &self.fleet.landscape;
        let namespace = landscape.namespace();
        let (plural, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let review: SubjectAccessReview = serde_json::from_value(json!({"metadata": {}, "spec": {
            "user": format!("system:serviceaccount:{namespace}:{RECEIVER}"),
            "resourceAttributes": {"namespace": namespace, "group": "operator.kyma-project.io", "resource": plural,
                                   "subresource": subresource, "verb": verb}}}))?;
        let reviews = Api::<SubjectAccessReview>::all(landscape.kcp().client().await?);
        until("the right to be revoked", async || {
            let status = reviews.create(&PostParams::default(), &review).await?.status.context("a status")?;
            Ok((!status.allowed).then_some(()))
        })
        .await
    }

    /// Revokes one verb, performs an action that needs it, waits until the receiver logs the missing right, and grants
    /// it again.
    async fn lack_is_logged(&self, resource: &str, verb: &str, act: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
        let log = self.fleet.landscape.stamp_file().with_file_name("receiver.log");
        let words = format!("cannot {verb} resource \\\"{resource}\\\"");
        let count = || -> Result<usize> { Ok(std::fs::read_to_string(&log)?.matches(&words).count()) };
        let before = count()?;
        self.grant(Some((resource, verb))).await?;
        self.becomes_denied(resource, verb).await?;
        act().await?;
        until(&format!("the receiver to log that it {words}"), async || Ok((count()? > before).then_some(()))).await?;
        self.grant(None).await
    }
}

/// Covers the rights that no other test would name on failure, and one of which only users would notice the absence.
/// The receiver recovers from each without a restart.
#[tokio::test]
async fn a_receiver_logs_a_missing_right_and_recovers_when_it_is_granted() -> TestResult {
    let fleet = Fleet::with_one_runtime("limited", quick_options()).await?;
    let member = fleet.only();
    let landscape = &fleet.landscape;
    let roles = Api::<Role>::namespaced(landscape.operator(), landscape.namespace());
    let role = ReceiverRole { fleet: &fleet, roles };
    let manifests = Api::<Manifest>::namespaced(landscape.operator(), landscape.namespace());
    until("the Kyma in the runtime", async || member.runtime.skr_kyma().await).await?;

    for (resource, verb, modules) in
        [("kymas/status", "patch", &["keda"][..]), ("manifests", "delete", &[]), ("manifests", "create", &["keda"])]
    {
        role.lack_is_logged(resource, verb, async || member.runtime.select(modules).await.map(drop)).await?;
        // The status names a module before its Manifest exists, if the registry is slow.
        until(&format!("{modules:?} with Manifests in the status in KCP, after {verb} of {resource}"), async || {
            let status = member.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status);
            let named = status.map(|status| status.modules().iter().map(|it| it.name.clone()).collect::<Vec<_>>());
            let installed = manifests.list_metadata(&ListParams::default()).await?.items.len();
            Ok(named.filter(|named| named == modules && installed == modules.len()))
        })
        .await?;
    }
    // Only the receiver removes lifecycle-manager's finalizer.
    let mut going = watcher("going", ("", "v1", "configmaps"), "spec");
    going["metadata"]["finalizers"] = json!([finalizer::WATCHER]);
    landscape.write_watcher(&going).await?;
    role.lack_is_logged("watchers", "patch", async || landscape.delete_watcher("going").await).await?;
    let watchers: Api<Watcher> = landscape.watchers();
    until("the Watcher to go", async || Ok(watchers.get_opt("going").await?.is_none().then_some(()))).await?;
    member.path_proven().await?;
    Ok(())
}

async fn pause(fleet: &Fleet, member: &Member, is_paused: bool) -> Result<()> {
    let kymas = Api::<Kyma>::namespaced(fleet.landscape.operator(), fleet.landscape.namespace());
    let value = is_paused.then_some("true");
    let labels = Patch::Merge(json!({"metadata": {"labels": {label::PAUSE: value}}}));
    kymas.patch(member.runtime.name(), &PatchParams::default(), &labels).await?;
    Ok(())
}
