//! The actions of a schedule, and their probabilities.

use proptest::prelude::*;
use tidewatch_contract::event::Reason;

use crate::{
    cluster::{Mutation, NAMES, Name, PlanId, RESOURCES, WATCHES},
    receiver::{ManagerResponse, ReconcileResult},
};

/// One step of a schedule.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    /// Changes an object in the cluster.
    Mutate(usize, Name, Mutation),
    ToggleStatusSubresource,
    BackUpStore,
    RestoreStore,
    /// Delivers the next event of a watch stream to the agent.
    DeliverWatchEvent(usize),
    /// Runs the next step of a list; `true` starts one also for a watch that follows its stream.
    List(usize, bool),
    BreakWatch(usize),
    SendEvents,
    AbandonRequest,
    SendHeartbeat,
    /// Delivers a request; `duplicate` keeps a copy in flight.
    Deliver {
        index: usize,
        instance: usize,
        duplicate: bool,
        fault: RequestFault,
    },
    LoseRequest(usize),
    DeliverResponse(usize),
    LoseResponse(usize),
    BeginReconcile(usize),
    EndReconcile(usize, ReconcileResult),
    /// Sends an event to another manager.
    BeginDelivery(usize),
    /// Applies the response to such an event.
    EndDelivery(usize, usize, ManagerResponse),
    /// Changes an object in KCP, which enqueues work on the Kyma, the catalog, or both.
    Enqueue(usize, bool, bool),
    Unpause(usize),
    RestartAgent,
    /// Restarts a receiver; `true` delays the sync of its caches.
    RestartReceiver(usize, bool),
    SetSynced(usize),
    /// Deletes and recreates the Kyma under the same name, which drops all state of its runtime.
    ReplaceKyma(usize),
    ApplyLateWrite,
    /// Changes the plan in KCP.
    ChangePlan(u8),
    /// Writes the plan to the cluster of the agent.
    WritePlan,
    /// Makes the agent read the plan.
    ApplyPlan,
    /// Steps the wall clock of the receivers, in seconds.
    StepClock(i16),
    Wait(u16),
}

/// A fault in the handling of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RequestFault {
    None,
    /// One of its events is refused.
    InvalidEvent(usize, Reason),
    /// The whole request is refused.
    Rejected,
    /// Its signature is refused.
    Unauthorized,
    /// The request is accepted, but its response is lost.
    NoResponse,
}

fn mutation() -> impl Strategy<Value = Mutation> {
    prop_oneof![
        4 => Just(Mutation::Spec),
        2 => Just(Mutation::RevertSpec),
        2 => Just(Mutation::Metadata),
        2 => Just(Mutation::Status),
        2 => Just(Mutation::Label),
        2 => Just(Mutation::Delete),
        1 => Just(Mutation::Recreate),
    ]
}

fn fault() -> impl Strategy<Value = RequestFault> {
    let reason = prop_oneof![Just(Reason::TooLarge), Just(Reason::Malformed), Just(Reason::UnknownType)];
    prop_oneof![
        16 => Just(RequestFault::None),
        4 => (0usize..4, reason).prop_map(|(at, reason)| RequestFault::InvalidEvent(at, reason)),
        1 => Just(RequestFault::Rejected),
        1 => Just(RequestFault::Unauthorized),
        2 => Just(RequestFault::NoResponse),
    ]
}

fn reconcile_result() -> impl Strategy<Value = ReconcileResult> {
    prop_oneof![
        8 => Just(ReconcileResult::Succeeded),
        2 => Just(ReconcileResult::Failed),
        2 => Just(ReconcileResult::CatalogFailed),
        1 => Just(ReconcileResult::CatalogPaused),
        1 => Just(ReconcileResult::Paused),
        1 => Just(ReconcileResult::Aborted),
    ]
}

fn manager_response() -> impl Strategy<Value = ManagerResponse> {
    prop_oneof![
        5 => Just(ManagerResponse::Accepted),
        2 => Just(ManagerResponse::Failed(None)),
        1 => (1u16..90).prop_map(|seconds| ManagerResponse::Failed(Some(seconds))),
        3 => prop::sample::select(vec![302u16, 401, 403, 404]).prop_map(ManagerResponse::Refused),
    ]
}

/// Generates any action, for this number of receiver instances.
pub(crate) fn any_action(instances: usize) -> impl Strategy<Value = Action> {
    let at = 0usize..4;
    let watch = 0..WATCHES.len();
    let instance = 0..instances;
    let deliver = (at.clone(), instance.clone(), prop::bool::weighted(0.15), fault());
    let faults = prop_oneof![
        3 => Just(Action::AbandonRequest),
        2 => at.clone().prop_map(Action::LoseRequest),
        2 => at.clone().prop_map(Action::LoseResponse),
        2 => watch.clone().prop_map(Action::BreakWatch),
        1 => Just(Action::RestartAgent),
        1 => (instance.clone(), any::<bool>()).prop_map(|(at, slow)| Action::RestartReceiver(at, slow)),
        1 => Just(Action::ToggleStatusSubresource),
        1 => Just(Action::BackUpStore),
        1 => Just(Action::RestoreStore),
        1 => Just(Action::ApplyLateWrite),
    ];
    let rare = prop_oneof![
        2 => (0..PlanId::COUNT).prop_map(Action::ChangePlan),
        2 => Just(Action::WritePlan),
        2 => Just(Action::ApplyPlan),
        1 => (instance.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(at, kyma, catalog)| Action::Enqueue(at, kyma, catalog)),
        1 => instance.clone().prop_map(Action::Unpause),
        1 => instance.clone().prop_map(Action::SetSynced),
        1 => instance.clone().prop_map(Action::ReplaceKyma),
        1 => (-4_000i16..4_000).prop_map(Action::StepClock),
        3 => (1u16..400).prop_map(Action::Wait),
    ];
    prop_oneof![
        12 => (0..RESOURCES.len(), 0..NAMES, mutation())
            .prop_map(|(resource, name, mutation)| Action::Mutate(resource, name, mutation)),
        16 => watch.clone().prop_map(Action::DeliverWatchEvent),
        10 => (watch, prop::bool::weighted(0.1)).prop_map(|(watch, relist)| Action::List(watch, relist)),
        14 => Just(Action::SendEvents),
        5 => Just(Action::SendHeartbeat),
        18 => deliver
            .prop_map(|(index, instance, duplicate, fault)| Action::Deliver { index, instance, duplicate, fault }),
        15 => at.prop_map(Action::DeliverResponse),
        10 => instance.clone().prop_map(Action::BeginReconcile),
        10 => (instance.clone(), reconcile_result()).prop_map(|(at, result)| Action::EndReconcile(at, result)),
        6 => instance.clone().prop_map(Action::BeginDelivery),
        6 => (instance, 0usize..3, manager_response())
            .prop_map(|(at, delivery, response)| Action::EndDelivery(at, delivery, response)),
        6 => faults,
        5 => rare,
    ]
}

/// Generates an action of agent, receivers or network, while the cluster does not change.
pub(crate) fn exchange_action(instances: usize) -> impl Strategy<Value = Action> {
    let at = 0usize..3;
    let instance = 0..instances;
    let deliver = (at.clone(), instance.clone(), prop::bool::weighted(0.15), fault());
    prop_oneof![
        10 => Just(Action::SendEvents),
        6 => Just(Action::SendHeartbeat),
        16 => deliver
            .prop_map(|(index, instance, duplicate, fault)| Action::Deliver { index, instance, duplicate, fault }),
        14 => at.clone().prop_map(Action::DeliverResponse),
        8 => instance.clone().prop_map(Action::BeginReconcile),
        8 => (instance.clone(), reconcile_result()).prop_map(|(at, result)| Action::EndReconcile(at, result)),
        4 => instance.clone().prop_map(Action::BeginDelivery),
        4 => (instance.clone(), 0usize..3, manager_response())
            .prop_map(|(at, delivery, response)| Action::EndDelivery(at, delivery, response)),
        2 => Just(Action::AbandonRequest),
        1 => at.clone().prop_map(Action::LoseRequest),
        1 => at.prop_map(Action::LoseResponse),
        2 => (instance.clone(), prop::bool::weighted(0.2)).prop_map(|(at, slow)| Action::RestartReceiver(at, slow)),
        1 => instance.clone().prop_map(Action::SetSynced),
        1 => instance.prop_map(Action::ReplaceKyma),
        1 => Just(Action::ApplyLateWrite),
        1 => (-4_000i16..4_000).prop_map(Action::StepClock),
        2 => (1u16..40).prop_map(Action::Wait),
    ]
}
