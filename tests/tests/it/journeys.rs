//! Journeys of a runtime, written to KCP as the broker and the infrastructure manager of Kyma's landscape write them, in
//! their order: provisioning, a move of the account, both rotations of the kubeconfig, suspension, deprovisioning. Admission
//! policies as in BTP runtimes stand beside each.

mod guards;
mod landscape;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{Api, ResourceExt as _, api::ListParams};
use tidewatch_api::{Kyma, KymaStatus, Manifest, State, names::label};
use tidewatch_testing::{
    bed,
    landscape::{Runtime, until},
};

use self::{
    guards::guard,
    landscape::{Access, Broker},
};
use crate::support::{Fleet, Member, TestResult, module, quick_options};

/// The registry of the agent's image, which the policy lists.
const LISTED: &str = "example.test/";
const KYMA_CRD: &str = "kymas.operator.kyma-project.io";
/// Changes of labels while the receiver works.
const MOVES: usize = 12;
/// Attempts after which a write with a freshly read version counts as refused: so many conflicts in a row are no coincidence,
/// also on a slow machine.
const ATTEMPTS: usize = 20;

/// Waits until the Kyma in a runtime is as expected.
async fn runtime_becomes(runtime: &Runtime, what: &str, expected: impl Fn(&KymaStatus) -> bool) -> Result<()> {
    until(&format!("{what} in {}", runtime.name()), async || {
        let status = runtime.skr_kyma().await?.and_then(|kyma| kyma.status);
        Ok(status.filter(&expected).map(drop))
    })
    .await
}

/// Waits for what the terraform module waits for: the CRD, and a Kyma that is ready. The deadline of a wait is far below
/// its 480 s.
async fn is_provisioned(runtime: &Runtime) -> Result<()> {
    let crds = Api::<CustomResourceDefinition>::all(runtime.user());
    until("the CRD of the Kyma", async || {
        let conditions = crds.get(KYMA_CRD).await?.status.and_then(|status| status.conditions).unwrap_or_default();
        Ok(conditions.iter().any(|one| one.type_ == "Established" && one.status == "True").then_some(()))
    })
    .await?;
    runtime_becomes(runtime, "a Kyma that is ready", |status| status.state() == State::Ready).await
}

/// Two guarded runtimes, or one, of which KCP knows nothing yet.
async fn start(name: &str, runtimes: usize) -> Result<Fleet> {
    let (mut fleet, clusters) = Fleet::prepare(name, runtimes, quick_options()).await?;
    for cluster in &clusters {
        // The infrastructure manager creates the namespace bare, before anybody else needs it.
        cluster.ensure_namespace(tidewatch_api::names::SKR_NAMESPACE).await?;
        guard(cluster, LISTED).await?;
    }
    fleet.prepare_members(clusters).await?;
    Ok(fleet)
}

/// Provisions a runtime, and waits until it is ready.
async fn provision(fleet: &Fleet, member: &Member) -> Result<()> {
    let runtime = &member.runtime;
    Broker::of(fleet).create_kyma(runtime.name(), runtime.id().as_str()).await?;
    Access::of(fleet, runtime.name()).create(&runtime.control_plane_kubeconfig().await?).await?;
    is_provisioned(runtime).await?;
    member.path_proven().await
}

#[tokio::test]
async fn a_runtime_is_provisioned_whether_its_access_comes_early_or_late() -> TestResult {
    let fleet = start("provision", 2).await?;
    let [early, late] = fleet.members.as_slice() else { return Err(anyhow::anyhow!("two runtimes").into()) };
    // The cluster takes longer than the receiver's first attempts.
    let broker = Broker::of(&fleet);
    broker.create_kyma(late.runtime.name(), late.runtime.id().as_str()).await?;
    until("the missing access to be reported", async || {
        let status = late.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status);
        Ok(status.filter(|status| status.condition("RuntimeAccess").is_some_and(|it| !it.is_true())).map(drop))
    })
    .await?;

    provision(&fleet, early).await?;

    Access::of(&fleet, late.runtime.name()).create(&late.runtime.control_plane_kubeconfig().await?).await?;
    is_provisioned(&late.runtime).await?;
    late.path_proven().await?;
    Ok(())
}

#[tokio::test]
async fn labels_change_by_single_puts_while_the_receiver_works() -> TestResult {
    let fleet = start("account-move", 1).await?;
    let member = fleet.only();
    provision(&fleet, member).await?;
    let broker = Broker::of(&fleet);
    // A user installs and removes a module all the time, so that the receiver writes status after status.
    let works = async {
        loop {
            member.delivers(&["keda"]).await?;
            member.delivers(&[]).await?;
        }
    };
    let moves = async {
        for account in 0..MOVES {
            let mut attempts = 1;
            while !broker.try_label(member.runtime.name(), label::GLOBAL_ACCOUNT_ID, &format!("ga-{account}")).await? {
                ensure!(attempts < ATTEMPTS, "move {account} met a conflict {attempts} times");
                attempts += 1;
            }
        }
        anyhow::Ok(())
    };
    let moved: Result<()> = tokio::select! {
        moved = moves => moved,
        worked = works => worked,
    };
    moved?;
    until("the last account in the runtime", async || {
        let kyma = member.runtime.skr_kyma().await?.context("the Kyma")?;
        let account = kyma.labels().get(label::GLOBAL_ACCOUNT_ID).cloned();
        Ok((account == Some(format!("ga-{}", MOVES - 1))).then_some(()))
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn a_kubeconfig_rotates_in_both_ways_while_a_user_works() -> TestResult {
    let fleet = start("kubeconfig", 1).await?;
    let member = fleet.only();
    provision(&fleet, member).await?;
    let access = Access::of(&fleet, member.runtime.name());

    // The ordinary rotation: another text, in one write.
    access.rotate(&member.runtime.control_plane_kubeconfig().await?).await?;
    member.delivers(&["keda"]).await?;

    // The forced one: first the key goes, and later another text comes. Work goes on with the last good access.
    access.remove_config().await?;
    member.delivers(&[]).await?;
    let status = member.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status).context("the status")?;
    assert!(status.state() != State::Error, "without the key: {status:?}");
    access.rotate(&member.runtime.control_plane_kubeconfig().await?).await?;
    member.delivers(&["keda"]).await?;
    runtime_becomes(&member.runtime, "keda that is ready", |status| {
        module(status, "keda").is_some_and(|keda| keda.state == State::Ready)
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn a_suspended_runtime_returns_under_the_same_ids() -> TestResult {
    let fleet = start("suspend", 2).await?;
    let [first, second] = fleet.members.as_slice() else { return Err(anyhow::anyhow!("two clusters").into()) };
    provision(&fleet, first).await?;
    first.delivers(&["keda"]).await?;
    let before = first.runtime.kcp_kyma().await?.and_then(|kyma| kyma.uid());

    // The suspension ends the Kyma while its cluster is still there, and then the cluster.
    let broker = Broker::of(&fleet);
    let access = Access::of(&fleet, first.runtime.name());
    broker.delete_kyma(first.runtime.name()).await?;
    until("the Kyma to go", async || Ok(first.runtime.kcp_kyma().await?.is_none().then_some(()))).await?;
    access.delete().await?;
    bed::shared().await?.stop(first.runtime.name());

    // Another cluster under the same name and ids.
    broker.create_kyma(first.runtime.name(), first.runtime.id().as_str()).await?;
    access.create(&second.runtime.control_plane_kubeconfig().await?).await?;
    is_provisioned(&second.runtime).await?;
    let after = first.runtime.kcp_kyma().await?.and_then(|kyma| kyma.uid());
    assert!(before != after, "the Kyma is a new one");
    first.path_proven().await?;
    second.delivers(&["keda"]).await?;
    Ok(())
}

#[tokio::test]
async fn a_deprovisioned_runtime_leaves_nothing_behind() -> TestResult {
    let fleet = start("deprovision", 1).await?;
    let member = fleet.only();
    provision(&fleet, member).await?;
    member.delivers(&["keda"]).await?;
    let name = member.runtime.name();
    let landscape = &fleet.landscape;
    let broker = Broker::of(&fleet);
    broker.add_purge_finalizer(name).await?;

    broker.delete_kyma(name).await?;
    until("the deletion timestamp", async || {
        let kyma: Option<Kyma> = member.runtime.kcp_kyma().await?;
        Ok(kyma.is_none_or(|kyma| kyma.metadata.deletion_timestamp.is_some()).then_some(()))
    })
    .await?;
    Access::of(&fleet, name).delete().await?;
    bed::shared().await?.stop(name);
    // The minute begins here, unless the receiver was done before the Secret went.
    until("the deletion of the Secret to be noted", async || {
        let kyma = member.runtime.kcp_kyma().await?;
        let is_noted = |kyma: &Kyma| {
            let access = kyma.status.as_ref().and_then(|status| status.condition("RuntimeAccess"));
            access.is_some_and(|access| access.reason == "AccessSecretDeleted")
        };
        Ok(kyma.as_ref().is_none_or(is_noted).then_some(()))
    })
    .await?;

    until("the Kyma to go", async || Ok(member.runtime.kcp_kyma().await?.is_none().then_some(()))).await?;
    let manifests = Api::<Manifest>::namespaced(landscape.operator(), landscape.namespace());
    let left = manifests.list(&ListParams::default().labels(&format!("{}={name}", label::KYMA_NAME))).await?.items;
    assert!(left.is_empty(), "Manifests are left: {left:?}");
    Ok(())
}
