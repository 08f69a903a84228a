//! What can happen, and how often.

use proptest::prelude::*;
use tidewatch_shared::event::Reason;

use crate::{
    cluster::{Deed, NAMES, Name, PlanId, RESOURCES, WATCHES},
    receiver::{End, Fate},
};

/// What can happen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Move {
    /// Somebody changes an object.
    Act(usize, Name, Deed),
    Redefine,
    SaveStore,
    SetStoreBack,
    /// The agent hears the next word of a stream.
    Feed(usize),
    /// The next step of a list; `true` begins one also where a watch works.
    List(usize, bool),
    BreakOff(usize),
    Send,
    GiveUp,
    Beat,
    /// One request arrives; `keep` leaves a copy behind.
    Deliver {
        at: usize,
        instance: usize,
        keep: bool,
        spoil: Spoil,
    },
    Lose(usize),
    Hear(usize),
    LoseAnswer(usize),
    Begin(usize),
    End(usize, End),
    /// An event leaves for another manager.
    Hand(usize),
    /// What became of one.
    Handed(usize, usize, Fate),
    /// Something in KCP changes, and wakes.
    Want(usize, bool, bool),
    Unpause(usize),
    RestartAgent,
    /// `true`: its caches take their time.
    RestartReceiver(usize, bool),
    Sync(usize),
    /// The Kyma goes and comes again under the same name, and everything known of its runtime with it.
    Forget(usize),
    LandGhost,
    /// The plan changes in KCP.
    Plan(u8),
    /// The plan is written to the cluster of the agent.
    WritePlan,
    /// The agent reads it.
    Follow,
    Wait(u16),
}

/// What goes wrong with a request that arrives.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Spoil {
    Nothing,
    /// One of its events is refused.
    Event(usize, Reason),
    /// It is refused.
    Whole,
    /// Its signature is refused.
    Signature,
    /// It is taken, but its answer is not sent.
    Mute,
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        4 => Just(Deed::Spec),
        2 => Just(Deed::TakeBack),
        2 => Just(Deed::Metadata),
        2 => Just(Deed::Status),
        2 => Just(Deed::Label),
        2 => Just(Deed::Delete),
        1 => Just(Deed::Recreate),
    ]
}

fn spoil() -> impl Strategy<Value = Spoil> {
    let reason = prop_oneof![Just(Reason::TooLarge), Just(Reason::Malformed), Just(Reason::UnknownType)];
    prop_oneof![
        16 => Just(Spoil::Nothing),
        4 => (0usize..4, reason).prop_map(|(at, reason)| Spoil::Event(at, reason)),
        1 => Just(Spoil::Whole),
        1 => Just(Spoil::Signature),
        2 => Just(Spoil::Mute),
    ]
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![
        8 => Just(End::Good),
        2 => Just(End::Failed),
        2 => Just(End::CatalogFailed),
        1 => Just(End::CatalogPaused),
        1 => Just(End::Paused),
        1 => Just(End::Dropped),
    ]
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        5 => Just(Fate::Taken),
        2 => Just(Fate::Failed(None)),
        1 => (1u16..90).prop_map(|seconds| Fate::Failed(Some(seconds))),
        3 => prop::sample::select(vec![302u16, 401, 403, 404]).prop_map(Fate::Refused),
    ]
}

/// One move, with so many instances of the receiver.
pub(crate) fn a_move(instances: usize) -> impl Strategy<Value = Move> {
    let (at, watch, instance) = (0usize..4, 0..WATCHES.len(), 0..instances);
    let deliver = (at.clone(), instance.clone(), prop::bool::weighted(0.15), spoil());
    let mishaps = prop_oneof![
        3 => Just(Move::GiveUp),
        2 => at.clone().prop_map(Move::Lose),
        2 => at.clone().prop_map(Move::LoseAnswer),
        2 => watch.clone().prop_map(Move::BreakOff),
        1 => Just(Move::RestartAgent),
        1 => (instance.clone(), any::<bool>()).prop_map(|(at, slow)| Move::RestartReceiver(at, slow)),
        1 => Just(Move::Redefine),
        1 => Just(Move::SaveStore),
        1 => Just(Move::SetStoreBack),
        1 => Just(Move::LandGhost),
    ];
    let rest = prop_oneof![
        2 => (0..PlanId::COUNT).prop_map(Move::Plan),
        2 => Just(Move::WritePlan),
        2 => Just(Move::Follow),
        1 => (instance.clone(), any::<bool>(), any::<bool>()).prop_map(|(at, kyma, catalog)| Move::Want(at, kyma, catalog)),
        1 => instance.clone().prop_map(Move::Unpause),
        1 => instance.clone().prop_map(Move::Sync),
        1 => instance.clone().prop_map(Move::Forget),
        3 => (1u16..400).prop_map(Move::Wait),
    ];
    prop_oneof![
        12 => (0..RESOURCES.len(), 0..NAMES, deed()).prop_map(|(resource, name, deed)| Move::Act(resource, name, deed)),
        16 => watch.clone().prop_map(Move::Feed),
        10 => (watch, prop::bool::weighted(0.1)).prop_map(|(watch, again)| Move::List(watch, again)),
        14 => Just(Move::Send),
        5 => Just(Move::Beat),
        18 => deliver.prop_map(|(at, instance, keep, spoil)| Move::Deliver { at, instance, keep, spoil }),
        15 => at.prop_map(Move::Hear),
        10 => instance.clone().prop_map(Move::Begin),
        10 => (instance.clone(), end()).prop_map(|(at, how)| Move::End(at, how)),
        6 => instance.clone().prop_map(Move::Hand),
        6 => (instance, 0usize..3, fate()).prop_map(|(at, which, fate)| Move::Handed(at, which, fate)),
        6 => mishaps,
        5 => rest,
    ]
}

/// One move of the two sides and the network between them, while nothing changes.
pub(crate) fn an_exchange(instances: usize) -> impl Strategy<Value = Move> {
    let (at, instance) = (0usize..3, 0..instances);
    let deliver = (at.clone(), instance.clone(), prop::bool::weighted(0.15), spoil());
    prop_oneof![
        10 => Just(Move::Send),
        6 => Just(Move::Beat),
        16 => deliver.prop_map(|(at, instance, keep, spoil)| Move::Deliver { at, instance, keep, spoil }),
        14 => at.clone().prop_map(Move::Hear),
        8 => instance.clone().prop_map(Move::Begin),
        8 => (instance.clone(), end()).prop_map(|(at, how)| Move::End(at, how)),
        4 => instance.clone().prop_map(Move::Hand),
        4 => (instance.clone(), 0usize..3, fate()).prop_map(|(at, which, fate)| Move::Handed(at, which, fate)),
        2 => Just(Move::GiveUp),
        1 => at.clone().prop_map(Move::Lose),
        1 => at.prop_map(Move::LoseAnswer),
        2 => (instance.clone(), prop::bool::weighted(0.2)).prop_map(|(at, slow)| Move::RestartReceiver(at, slow)),
        1 => instance.clone().prop_map(Move::Sync),
        1 => instance.prop_map(Move::Forget),
        1 => Just(Move::LandGhost),
        2 => (1u16..40).prop_map(Move::Wait),
    ]
}
