//! Least privilege: what the API servers say that our accounts may do is what stands here and nothing more, and each right is needed.

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
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tidewatch_receiver::rights;
use tidewatch_shared::{
    api::{Kyma, Watcher},
    names::{AGENT_OBJECT, SKR_NAMESPACE, finalizer, label},
};
use tidewatch_tests::{
    control_plane::Cluster,
    http,
    kubelet::Played,
    landscape::{DEADLINE, until, watchers::watcher},
};

use crate::support::{Member, Nothing, Tested, quick};

/// The receiver's account.
const RECEIVER: &str = "tidewatch-receiver";
/// An account that nobody gave any right.
const NOBODY: &str = "nobody";
const GROUP: &str = "operator.kyma-project.io";
const RBAC: &str = "rbac.authorization.k8s.io";
/// The agent's own listener in its pod.
const ADMIN: u16 = 2113;

/// Group, resource, name (empty: every one), verbs.
type Right<'a> = (&'a str, &'a str, &'a str, &'a str);

/// The design wants `get` for all that is planned, although the agent lists and watches, also single objects.
const READ: &str = "get list watch";

/// One right of the agent, and what does not work without it.
type Needed = (Right<'static>, Lack);

/// What an agent says when it lacks a right.
#[derive(Clone, Copy, Debug)]
enum Lack {
    /// It does not get ready.
    Pending(&'static str),
    /// It enrols, but the next one has to do so again.
    Kept,
    /// It has not seen its canary.
    Canary,
    /// A watch of its plan is refused.
    Watch(&'static str),
}

/// Cluster-wide.
const AGENT_EVERYWHERE: [Needed; 4] = [
    (("apiextensions.k8s.io", "customresourcedefinitions", "", READ), Lack::Watch("crds")),
    ((RBAC, "clusterrolebindings", "tidewatch-agent", READ), Lack::Watch("installer/clusterrolebindings")),
    ((RBAC, "clusterroles", "tidewatch-agent", READ), Lack::Watch("installer/clusterroles")),
    (("scheduling.k8s.io", "priorityclasses", "skr-webhook-priority", READ), Lack::Watch("installer/priorityclasses")),
];

/// How many of the rights in its namespace come first: without its ConfigMap an agent knows of no watch, and of nobody to enrol with.
const FIRST: usize = 2;

/// In its namespace.
const AGENT_HERE: [Needed; 12] = [
    (("", "configmaps", "tidewatch-agent", READ), Lack::Pending("plan")),
    (("", "secrets", "skr-webhook-tls", "list patch watch"), Lack::Kept),
    (("coordination.k8s.io", "leases", "tidewatch-agent", "list patch watch"), Lack::Canary),
    (("", "serviceaccounts", "tidewatch-agent", READ), Lack::Watch("installer/serviceaccounts")),
    (("", "services", "skr-webhook-metrics", READ), Lack::Watch("installer/services")),
    (("apps", "deployments", "skr-webhook", READ), Lack::Watch("installer/deployments")),
    // By label: see there.
    (("networking.k8s.io", "networkpolicies", "", READ), Lack::Watch("installer/networkpolicies")),
    ((RBAC, "rolebindings", "tidewatch-agent", READ), Lack::Watch("installer/rolebindings")),
    ((RBAC, "roles", "tidewatch-agent", READ), Lack::Watch("installer/roles")),
    ((GROUP, "kymas", "default", READ), Lack::Watch("kyma")),
    ((GROUP, "modulereleasemetas", "", READ), Lack::Watch("catalog/modulereleasemetas")),
    ((GROUP, "moduletemplates", "", READ), Lack::Watch("catalog/moduletemplates")),
];

/// In its namespace of KCP, and why. Each `list` and `watch` is of a cache, and readiness waits for all of them; in brackets the room of
/// tests that uses a verb.
const RECEIVER_HERE: [(Right<'static>, &str); 16] = [
    (
        (GROUP, "kymas", "", "get list patch watch"),
        "get: every pass begins with a quorum read; patch: finalizer (kyma)",
    ),
    ((GROUP, "kymas/status", "", "patch"), "see below"),
    (
        (GROUP, "manifests", "", "create delete list patch update watch"),
        "create, delete: see below; patch: every apply; update: stays for what others add to a spec, in no test of landscapes",
    ),
    ((GROUP, "modulereleasemetas", "", "list watch"), "a cache"),
    ((GROUP, "moduletemplates", "", "list watch"), "a cache"),
    ((GROUP, "watchers", "", "list patch watch"), "patch: see below"),
    ((GROUP, "watchers/status", "", "patch"), "what becomes of a Watcher (watches)"),
    (("", "secrets", "", "create list watch"), "access Secrets, of any name; create: the CA (nothing)"),
    (("", "secrets", "tidewatch-ca", "get update"), "get: at each start (nothing); update: a rotation (rotation)"),
    (("", "configmaps", "tidewatch", "list watch"), "whether all are paused"),
    (("", "configmaps", "tidewatch-revocations", "list watch"), "who is revoked (enrolment)"),
    (
        ("", "configmaps", "tidewatch-releases", "list patch watch"),
        "what is accepted of the catalog, and since when (catalog)",
    ),
    (
        ("", "configmaps", "", "create"),
        "releases and how far an upgrade of agents is: create cannot be limited by name (upgrade)",
    ),
    (("", "configmaps", "tidewatch-agent-upgrade", "list update watch"), "the same, from stage to stage (upgrade)"),
    (("coordination.k8s.io", "leases", "", "create get update"), "one is active, of any name (active)"),
    (
        ("events.k8s.io", "events", "", "create patch"),
        "the record (record); patch: stays for what comes again, in a series",
    ),
];

/// What a review says, one entry for each group, resource and name, and all verbs of it; and the addresses that are no resources.
async fn review(
    client: Client,
    namespace: &str,
) -> Result<(BTreeMap<[String; 3], BTreeSet<String>>, BTreeSet<String>)> {
    let spec = SelfSubjectRulesReviewSpec { namespace: Some(namespace.to_owned()) };
    let asked = SelfSubjectRulesReview { spec, ..SelfSubjectRulesReview::default() };
    let answer = Api::<SelfSubjectRulesReview>::all(client).create(&PostParams::default(), &asked).await?;
    let SubjectRulesReviewStatus { resource_rules, non_resource_rules, incomplete, .. } =
        answer.status.context("a status")?;
    anyhow::ensure!(!incomplete, "the API server does not know all of its own rules");
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

/// What an account may do in a namespace and everywhere, beyond what any account of its namespace may. Sorted.
async fn held(cluster: &Cluster, home: &str, account: &str, namespace: &str) -> Result<Vec<[String; 4]>> {
    cluster.ensure_service_account(home, NOBODY).await?;
    let of = async |account: &str| {
        let token = cluster.service_account_token(home, account).await?;
        review(cluster.client_for_token(&token).await?, namespace).await
    };
    let ((mut rights, addresses), (others, of_others)) = (of(account).await?, of(NOBODY).await?);
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

/// The rule of a right.
fn rule((group, resource, name, verbs): Right<'_>) -> PolicyRule {
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(vec![resource.to_owned()]),
        resource_names: (!name.is_empty()).then(|| vec![name.to_owned()]),
        verbs: verbs.split(' ').map(str::to_owned).collect(),
        ..PolicyRule::default()
    }
}

#[tokio::test]
async fn accounts_may_do_what_stands_here_and_nothing_more() -> Tested {
    let nothing = Nothing::one("privilege", quick()).await?;
    let member = nothing.only();
    until("the Kyma in the runtime", async || member.runtime.skr_kyma().await).await?;
    member.delivers(&["keda"]).await?;
    let runtime = member.runtime.cluster();
    let everywhere = AGENT_EVERYWHERE.map(|(right, _)| right);
    let here = everywhere.into_iter().chain(AGENT_HERE.map(|(right, _)| right));
    assert_eq!(held(runtime, SKR_NAMESPACE, AGENT_OBJECT, SKR_NAMESPACE).await?, sorted(here));
    for elsewhere in ["default", "kube-system"] {
        assert_eq!(held(runtime, SKR_NAMESPACE, AGENT_OBJECT, elsewhere).await?, sorted(everywhere), "{elsewhere}");
    }
    let (kcp, home) = (nothing.landscape.kcp(), nothing.landscape.namespace());
    assert_eq!(held(kcp, home, RECEIVER, home).await?, sorted(RECEIVER_HERE.map(|(right, _)| right)));
    for elsewhere in ["default", "kube-system"] {
        assert_eq!(held(kcp, home, RECEIVER, elsewhere).await?, sorted([]), "{elsewhere}");
    }
    Ok(())
}

/// An agent without any right, and its roles.
struct Stripped<'a> {
    member: &'a Member,
    everywhere: Api<ClusterRole>,
    here: Api<Role>,
    agent: Played,
}

impl<'a> Stripped<'a> {
    /// Takes all rights away, and starts the agent anew: who watches already is not asked again. The receiver must leave it alone.
    async fn of(member: &'a Member) -> Result<Self> {
        let client = member.runtime.cluster().client().await?;
        let (everywhere, here) = (Api::all(client.clone()), Api::namespaced(client, SKR_NAMESPACE));
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

    async fn grant(&self, everywhere: &[Needed], here: &[Needed]) -> Result<()> {
        let rules = |needed: &[Needed]| -> Patch<Value> {
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

    /// Waits until the agent lacks this, or does no longer.
    async fn is(&self, lack: Lack, lacking: bool) -> Result<()> {
        until(&format!("{lack:?} to be lacking: {lacking}"), async || {
            let status = self.status().await?;
            Ok((lack.shows(&status) == Some(lacking)).then_some(()))
        })
        .await
    }
}

impl Lack {
    /// Whether an agent says so; `None` while it has not tried.
    fn shows(self, status: &Value) -> Option<bool> {
        match self {
            Self::Pending(what) => Some(status["pending"].as_array()?.iter().any(|pending| pending == what)),
            Self::Kept => status["identity"]["from"].is_string().then(|| status["identity"]["unkept"] == true),
            Self::Canary => Some(status["canaryAgeSeconds"].is_null()),
            Self::Watch(name) => {
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

/// Rights only add up, and no two of these are for one resource: what an agent lacks without all of them but some, and has with them,
/// it lacks without that one.
#[tokio::test]
async fn each_right_of_an_agent_is_needed() -> Tested {
    let resources: BTreeSet<_> =
        AGENT_HERE.iter().chain(&AGENT_EVERYWHERE).map(|((group, resource, ..), _)| (group, resource)).collect();
    assert_eq!(resources.len(), AGENT_HERE.len() + AGENT_EVERYWHERE.len());
    let nothing = Nothing::one("needed", quick()).await?;
    let member = nothing.only();
    // Else the installer brings them back.
    pause(&nothing, member, true).await?;
    member.said("Paused", "True", "Label").await?;
    let stripped = Stripped::of(member).await?;
    for at in 0..FIRST {
        stripped.is(AGENT_HERE[at].1, true).await?;
        stripped.grant(&[], &AGENT_HERE[..=at]).await?;
        stripped.is(AGENT_HERE[at].1, false).await?;
    }
    let rest = || AGENT_HERE[FIRST..].iter().chain(&AGENT_EVERYWHERE).map(|(_, lack)| *lack);
    for lack in rest() {
        stripped.is(lack, true).await?;
    }
    stripped.grant(&AGENT_EVERYWHERE, &AGENT_HERE).await?;
    for lack in rest() {
        stripped.is(lack, false).await?;
    }
    let status = stripped.status().await?;
    let watches = status["runtime"]["watches"].as_array().context("watches")?;
    assert_eq!(watches.len(), rest().count(), "no watch is left out: {status}");
    pause(&nothing, member, false).await?;
    member.proven().await?;
    member.delivers(&["keda"]).await?;
    Ok(())
}

/// The receiver's role in KCP, and what its account is told there.
struct Limited<'a> {
    nothing: &'a Nothing,
    roles: Api<Role>,
}

impl Limited<'_> {
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

    /// Waits until KCP's authorizer, which follows the Role, says that the receiver may not.
    async fn is_gone(&self, resource: &str, verb: &str) -> Result<()> {
        let landscape = &self.nothing.landscape;
        let namespace = landscape.namespace();
        let (plural, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let review: SubjectAccessReview = serde_json::from_value(json!({"metadata": {}, "spec": {
            "user": format!("system:serviceaccount:{namespace}:{RECEIVER}"),
            "resourceAttributes": {"namespace": namespace, "group": "operator.kyma-project.io", "resource": plural,
                                   "subresource": subresource, "verb": verb}}}))?;
        let reviews = Api::<SubjectAccessReview>::all(landscape.kcp().client().await?);
        until("the right to be gone", async || {
            let status = reviews.create(&PostParams::default(), &review).await?.status.context("a status")?;
            Ok((!status.allowed).then_some(()))
        })
        .await
    }

    /// Takes one verb away, does what needs it, and waits until the receiver says in its log what it lacks. Gives it back then.
    async fn lacks(&self, resource: &str, verb: &str, act: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
        let log = self.nothing.landscape.stamp_file().with_file_name("receiver.log");
        let words = format!("cannot {verb} resource \\\"{resource}\\\"");
        let count = || -> Result<usize> { Ok(std::fs::read_to_string(&log)?.matches(&words).count()) };
        let before = count()?;
        self.grant(Some((resource, verb))).await?;
        self.is_gone(resource, verb).await?;
        act().await?;
        until(&format!("the receiver to say that it {words}"), async || Ok((count()? > before).then_some(()))).await?;
        self.grant(None).await
    }
}

/// Those of which no other test would tell by name, and one whose lack would be seen by users alone. Each heals by itself.
#[tokio::test]
async fn a_receiver_says_which_right_it_lacks_and_goes_on_when_it_has_it() -> Tested {
    let nothing = Nothing::one("limited", quick()).await?;
    let (member, landscape) = (nothing.only(), &nothing.landscape);
    let roles = Api::<Role>::namespaced(landscape.operator(), landscape.namespace());
    let limited = Limited { nothing: &nothing, roles };
    until("the Kyma in the runtime", async || member.runtime.skr_kyma().await).await?;

    for (resource, verb, modules) in
        [("kymas/status", "patch", &["keda"][..]), ("manifests", "delete", &[]), ("manifests", "create", &["keda"])]
    {
        limited.lacks(resource, verb, async || member.runtime.select(modules).await.map(drop)).await?;
        until(&format!("{modules:?} in the status in KCP, after {verb} of {resource}"), async || {
            let status = member.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status);
            let named = status.map(|status| status.modules().iter().map(|it| it.name.clone()).collect::<Vec<_>>());
            Ok(named.filter(|named| named == modules))
        })
        .await?;
    }
    // Nobody else takes the incumbent's finalizer off.
    let mut going = watcher("going", ("", "v1", "configmaps"), "spec");
    going["metadata"]["finalizers"] = json!([finalizer::WATCHER]);
    landscape.write_watcher(&going).await?;
    limited.lacks("watchers", "patch", async || landscape.delete_watcher("going").await).await?;
    let watchers: Api<Watcher> = landscape.watchers();
    until("the Watcher to go", async || Ok(watchers.get_opt("going").await?.is_none().then_some(()))).await?;
    member.proven().await?;
    Ok(())
}

async fn pause(nothing: &Nothing, member: &Member, is_paused: bool) -> Result<()> {
    let kymas = Api::<Kyma>::namespaced(nothing.landscape.operator(), nothing.landscape.namespace());
    let value = is_paused.then_some("true");
    let labels = Patch::Merge(json!({"metadata": {"labels": {label::PAUSE: value}}}));
    kymas.patch(member.runtime.name(), &PatchParams::default(), &labels).await?;
    Ok(())
}
