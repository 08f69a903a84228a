use std::collections::BTreeMap;

use proptest::prelude::*;
use tidewatch_api::key::KymaKey;
use tidewatch_contract::{admin::rotation::PhaseName, certificate::KeyId};
use tidewatch_fleet::Unproven;
use tidewatch_trust::{
    Ca, TrustBundle,
    testing::{NOW, phases, root},
};

use super::*;

const LEAF: Duration = Duration::from_secs(86_400);
const MAX_ROOT_AGE: Duration = Duration::from_secs(500_000);

fn next_transition(state: &CaState, followers: &[RuntimeReport], requested: bool, now: i64) -> Transition {
    let waiting_for = followers.iter().filter(|follower| straggler_reason(state, follower, now).is_some()).count();
    super::next_transition(state, MAX_ROOT_AGE, Some(waiting_for), requested, now)
}

fn straggler_reason(state: &CaState, follower: &RuntimeReport, now: i64) -> Option<StragglerReason> {
    let revision = state.trust().agents.revision().to_owned();
    super::straggler_reason(state, LEAF, &revision, follower, now)
}

fn follower(state: &CaState) -> RuntimeReport {
    RuntimeReport {
        kyma: KymaKey::new("kcp-system", "k-1"),
        runtime: "r-1".parse().unwrap(),
        path: PathState::Proven,
        last_heartbeat: None,
        trust_revision: Some(state.trust().agents.revision().to_owned()),
        authority: Some(state.issuing().id.clone()),
        silent: Duration::from_secs(1),
    }
}

#[test]
fn rotation_begins_only_on_request_or_by_age() {
    let [steady, ..] = phases();
    let good = [follower(&steady)];
    assert_eq!(next_transition(&steady, &good, false, NOW), Transition::Wait);
    assert_eq!(next_transition(&steady, &good, true, NOW), Transition::Next);
    assert_eq!(next_transition(&steady, &good, false, NOW + 499_999), Transition::Wait);
    assert_eq!(next_transition(&steady, &good, false, NOW + 500_000), Transition::Next);
}

#[test]
fn every_phase_waits_for_exactly_its_stragglers() {
    for state in phases().into_iter().skip(1) {
        let name = state.name();
        let good = follower(&state);
        let state = CaState { force_after: None, ..state };
        let evaluate = |follower: &RuntimeReport, now| {
            (
                straggler_reason(&state, follower, now),
                next_transition(&state, std::slice::from_ref(follower), false, now),
            )
        };
        assert_eq!(evaluate(&good, NOW), (None, Transition::Next), "{name}");
        assert_eq!(next_transition(&state, &[], true, NOW), Transition::Next, "{name}: no stragglers");
        let unheard = RuntimeReport { trust_revision: None, authority: None, path: PathState::Unknown, ..good.clone() };
        assert_eq!(evaluate(&unheard, NOW), (Some(StragglerReason::Unheard), Transition::Wait), "{name}");
        let old = RuntimeReport { trust_revision: Some("0".into()), ..good.clone() };
        assert_eq!(evaluate(&old, NOW), (Some(StragglerReason::Bundle), Transition::Wait), "{name}");
        let old_leaf = RuntimeReport { authority: Some(root("another").id), ..good.clone() };
        let expected = match name {
            PhaseName::Spread => (None, Transition::Next),
            _ => (Some(StragglerReason::Certificate), Transition::Wait),
        };
        assert_eq!(evaluate(&old_leaf, NOW), expected, "{name}");
        assert_eq!(evaluate(&old_leaf, NOW + 86_400), (None, Transition::Next), "{name}: no old leaf holds any more");
        for path in [Unproven::Away, Unproven::LegacyAgent] {
            let gone = RuntimeReport { path: PathState::Unproven(path), ..unheard.clone() };
            assert_eq!(evaluate(&gone, NOW), (None, Transition::Next), "{name}");
        }
        let silent = RuntimeReport { path: PathState::Unproven(Unproven::NoHeartbeat), ..old.clone() };
        assert_eq!(evaluate(&silent, NOW).1, Transition::Wait, "{name}");
        let silent = RuntimeReport { silent: LEAF, ..silent };
        assert_eq!(evaluate(&silent, NOW), (None, Transition::Next), "{name}: its leaf has ended");

        let forced = CaState { force_after: Some(60), ..state.clone() };
        let two = [good, old];
        assert_eq!(next_transition(&forced, &two, false, NOW + 59), Transition::Wait, "{name}");
        assert_eq!(next_transition(&forced, &two, false, NOW + 60), Transition::Next, "{name}");
    }
}

#[test]
fn unknown_stragglers_are_waited_for_like_known_ones() {
    for state in phases().into_iter().skip(1) {
        let name = state.name();
        let at = |force_after, waiting_for, now| {
            let state = CaState { force_after, ..state.clone() };
            super::next_transition(&state, MAX_ROOT_AGE, waiting_for, false, now)
        };
        assert_eq!(at(None, None, NOW), Transition::Wait, "{name}");
        assert_eq!(at(None, Some(1), NOW), Transition::Wait, "{name}");
        assert_eq!(at(None, Some(0), NOW), Transition::Next, "{name}");
        assert_eq!(at(Some(60), None, NOW + 59), Transition::Wait, "{name}");
        assert_eq!(at(Some(60), None, NOW + 60), Transition::Next, "{name}: an operator forces it");
        assert_eq!(at(None, None, NOW + 1_000_000), Transition::Replace, "{name}: no certificate is valid any more");
    }
}

#[test]
fn expired_roots_do_not_wait_for_stragglers() {
    for state in phases() {
        let behind = RuntimeReport { trust_revision: None, authority: None, ..follower(&state) };
        assert_eq!(next_transition(&state, std::slice::from_ref(&behind), false, NOW + 1_000_000), Transition::Replace);
        let replaced =
            apply_transition(&state, Transition::Replace, LEAF, Some(1), NOW, || Ok(root("newest"))).unwrap().unwrap();
        assert_eq!((replaced.name(), replaced.force_after), (PhaseName::Steady, None));
        assert_ne!(replaced.target().id, state.target().id);
    }
    let next = Root::new(Ca::generate("next", NOW, Duration::from_secs(2_000_000)).unwrap()).unwrap();
    for phase in [Phase::Spread { next: next.clone() }, Phase::Reissue { next, leaves_end: i64::MAX }] {
        let state = CaState { root: root("old"), phase, since: NOW, force_after: None };
        let behind = RuntimeReport { trust_revision: None, authority: None, ..follower(&state) };
        assert_eq!(next_transition(&state, &[behind], false, NOW + 1_000_000), Transition::Next);
    }
}

#[test]
fn transitions_lead_through_the_phases_in_their_order() {
    let order = [PhaseName::Steady, PhaseName::Spread, PhaseName::Reissue, PhaseName::Retire, PhaseName::Steady];
    for (at, state) in phases().into_iter().enumerate() {
        assert_eq!(state.name(), order[at]);
        let after =
            |transition| apply_transition(&state, transition, LEAF, None, NOW + 5, || Ok(root("made"))).unwrap();
        assert!(after(Transition::Wait).is_none(), "{state:?}");
        let changed = after(Transition::Next).unwrap();
        assert_eq!(changed.name(), order[at + 1], "{state:?}");
        if at > 0 {
            assert_eq!((changed.target().id.clone(), changed.since), (state.target().id.clone(), NOW + 5));
        }
        assert_eq!(
            apply_transition(&state, Transition::Replace, LEAF, None, NOW, || Err(PkiError::Serial))
                .err()
                .map(|error| error.to_string()),
            Some(PkiError::Serial.to_string())
        );
    }
}

/// Actual state of an agent, and the state that the receiver knows of it.
#[derive(Clone)]
struct Agent {
    bundle: TrustBundle,
    leaf: Root,
    reported: Option<(String, KeyId)>,
}

#[derive(Clone, Debug)]
enum Act {
    /// The receiver reconciles; `true` with a request for a rotation.
    Reconcile(bool),
    /// An agent takes the bundle of its ConfigMap.
    Take(usize),
    Renew(usize),
    Heartbeat(usize),
    /// The receiver is killed, and another one reads the stored state.
    Restart,
}

fn actions() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => any::<bool>().prop_map(Act::Reconcile),
        3 => (0..3usize).prop_map(Act::Take),
        3 => (0..3usize).prop_map(Act::Renew),
        5 => (0..3usize).prop_map(Act::Heartbeat),
        1 => Just(Act::Restart),
    ]
}

struct World {
    state: CaState,
    agents: Vec<Agent>,
    now: i64,
    roots: BTreeMap<KeyId, Root>,
}

impl World {
    fn new() -> Self {
        let first = root("first");
        let state = CaState::steady(first.clone(), NOW);
        let agent = Agent { bundle: state.trust().agents, leaf: first.clone(), reported: None };
        Self { agents: vec![agent; 3], now: NOW, roots: [(first.id.clone(), first)].into(), state }
    }

    fn followers(&self) -> Vec<RuntimeReport> {
        let of = |agent: &Agent| RuntimeReport {
            trust_revision: agent.reported.as_ref().map(|(revision, _)| revision.clone()),
            authority: agent.reported.as_ref().map(|(_, id)| id.clone()),
            ..follower(&self.state)
        };
        self.agents.iter().map(of).collect()
    }

    fn act(&mut self, act: &Act) {
        match *act {
            Act::Reconcile(requested) => {
                self.now += 1;
                let next = next_transition(&self.state, &self.followers(), requested, self.now);
                let changed =
                    apply_transition(&self.state, next, LEAF, None, self.now, || Ok(root("another"))).unwrap();
                if let Some(changed) = changed {
                    self.roots.insert(changed.target().id.clone(), changed.target().clone());
                    self.state = changed;
                }
            }
            Act::Take(at) => self.agents[at].bundle = self.state.trust().agents,
            Act::Renew(at) => self.agents[at].leaf = self.state.issuing().clone(),
            Act::Heartbeat(at) => {
                let agent = &mut self.agents[at];
                agent.reported = Some((agent.bundle.revision().to_owned(), agent.leaf.id.clone()));
            }
            Act::Restart => {
                self.state = CaState::read(&self.state.write()).unwrap();
                self.agents.iter_mut().for_each(|agent| agent.reported = None);
            }
        }
    }

    /// Every agent can connect, in both directions, at any moment.
    fn check(&self) {
        let trust = self.state.trust();
        for agent in &self.agents {
            let serving = self.state.root.ca.certificate();
            assert!(agent.bundle.roots().contains(serving), "an agent cannot trust the server in {:?}", self.state);
            let leaf = self.roots[&agent.leaf.id].ca.certificate();
            assert!(trust.clients.roots().contains(leaf), "an agent is refused in {:?}", self.state);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// In any order of events, with a crash anywhere: no agent that follows, however slowly, is ever locked out, and
    /// the rotation ends once all follow.
    #[test]
    fn no_agent_is_ever_locked_out(actions in proptest::collection::vec(actions(), 0..120)) {
        let mut world = World::new();
        for act in &actions {
            world.act(act);
            world.check();
        }
        for _ in 0..4 {
            world.act(&Act::Reconcile(false));
            for at in 0..3 {
                [Act::Take(at), Act::Renew(at), Act::Heartbeat(at)].iter().for_each(|act| world.act(act));
            }
            world.check();
        }
        prop_assert_eq!(world.state.name(), PhaseName::Steady);
        prop_assert_eq!(world.state.trust().clients.roots().len(), 1);
    }
}
