use std::collections::BTreeMap;

use proptest::prelude::*;

use tidewatch_shared::certificate::KeyId;

use super::*;
use crate::{
    base::key::KymaKey,
    fleet::Unproven,
    pki::{
        Ca, TrustBundle,
        stored::{
            PhaseName,
            tests::{NOW, phases, root},
        },
    },
};

const LEAF: Duration = Duration::from_secs(86_400);

fn step(stored: &Stored, followers: &[Follower], ordered: bool, now: i64) -> Next {
    let revision = stored.trust().agents.revision().to_owned();
    super::step(stored, terms(&revision), followers, ordered, now)
}

fn behind(stored: &Stored, follower: &Follower, now: i64) -> Option<Behind> {
    let revision = stored.trust().agents.revision().to_owned();
    super::behind(stored, terms(&revision), follower, now)
}

fn terms(revision: &str) -> Terms<'_> {
    Terms { leaf: LEAF, age: Duration::from_secs(500_000), revision }
}

fn follower(stored: &Stored) -> Follower {
    Follower {
        kyma: KymaKey::new("kcp-system", "k-1"),
        runtime: "r-1".parse().unwrap(),
        path: PathState::Proven,
        trust_revision: Some(stored.trust().agents.revision().to_owned()),
        authority: Some(stored.issuing().id.clone()),
        silent: Duration::from_secs(1),
    }
}

fn on(name: PhaseName) -> Next {
    match name {
        PhaseName::Steady => Next::Stay,
        PhaseName::Spread => Next::Reissue,
        PhaseName::Reissue => Next::Retire,
        PhaseName::Retire => Next::Settle,
    }
}

#[test]
fn a_rotation_begins_on_command_or_by_age_alone() {
    let [steady, ..] = phases();
    let good = [follower(&steady)];
    assert_eq!(step(&steady, &good, false, NOW), Next::Stay);
    assert_eq!(step(&steady, &good, true, NOW), Next::Spread);
    assert_eq!(step(&steady, &good, false, NOW + 499_999), Next::Stay);
    assert_eq!(step(&steady, &good, false, NOW + 500_000), Next::Spread);
}

#[test]
fn every_phase_waits_for_exactly_those_who_are_to_follow_it() {
    for stored in phases().into_iter().skip(1) {
        let (name, good) = (stored.name(), follower(&stored));
        let stored = Stored { force_after: None, ..stored };
        let judge = |follower: &Follower, now| {
            (behind(&stored, follower, now), step(&stored, std::slice::from_ref(follower), false, now))
        };
        assert_eq!(judge(&good, NOW), (None, on(name)), "{name}");
        assert_eq!(step(&stored, &[], true, NOW), on(name), "{name}: nobody to wait for");
        let unheard = Follower { trust_revision: None, authority: None, path: PathState::Unknown, ..good.clone() };
        assert_eq!(judge(&unheard, NOW), (Some(Behind::Unheard), Next::Stay), "{name}");
        let old = Follower { trust_revision: Some("0".into()), ..good.clone() };
        assert_eq!(judge(&old, NOW), (Some(Behind::Bundle), Next::Stay), "{name}");
        let hangs = Follower { authority: Some(root("another").id), ..good.clone() };
        let expected = match name {
            PhaseName::Spread => (None, Next::Reissue),
            _ => (Some(Behind::Certificate), Next::Stay),
        };
        assert_eq!(judge(&hangs, NOW), expected, "{name}");
        assert_eq!(judge(&hangs, NOW + 86_400), (None, on(name)), "{name}: no old leaf holds any more");
        for path in [Unproven::Away, Unproven::LegacyAgent] {
            let gone = Follower { path: PathState::Unproven(path), ..unheard.clone() };
            assert_eq!(judge(&gone, NOW), (None, on(name)), "{name}");
        }
        let silent = Follower { path: PathState::Unproven(Unproven::NoHeartbeat), ..old.clone() };
        assert_eq!(judge(&silent, NOW).1, Next::Stay, "{name}");
        let silent = Follower { silent: LEAF, ..silent };
        assert_eq!(judge(&silent, NOW), (None, on(name)), "{name}: its leaf has ended");

        let forced = Stored { force_after: Some(60), ..stored.clone() };
        let two = [good, old];
        assert_eq!(step(&forced, &two, false, NOW + 59), Next::Stay, "{name}");
        assert_eq!(step(&forced, &two, false, NOW + 60), on(name), "{name}");
    }
}

#[test]
fn roots_that_have_ended_wait_for_nobody() {
    for stored in phases() {
        let behind = Follower { trust_revision: None, authority: None, ..follower(&stored) };
        assert_eq!(step(&stored, std::slice::from_ref(&behind), false, NOW + 1_000_000), Next::Replace);
        let made = after(&stored, Next::Replace, LEAF, Some(1), NOW, || Ok(root("newest"))).unwrap().unwrap();
        assert_eq!((made.name(), made.force_after), (PhaseName::Steady, None));
        assert_ne!(made.target().id, stored.target().id);
    }
    let next = Root::new(Ca::generate("next", NOW, Duration::from_secs(2_000_000)).unwrap()).unwrap();
    for phase in [
        Phase::Spread { root: root("old"), next: next.clone() },
        Phase::Reissue { root: root("old"), next, leaves_end: i64::MAX },
    ] {
        let stored = Stored { phase, since: NOW, force_after: None };
        let behind = Follower { trust_revision: None, authority: None, ..follower(&stored) };
        assert_eq!(step(&stored, &[behind], false, NOW + 1_000_000), on(stored.name()));
    }
}

#[test]
fn only_the_step_of_its_phase_changes_anything() {
    use Next::{Reissue, Replace, Retire, Settle, Spread, Stay};
    let order = [PhaseName::Steady, PhaseName::Spread, PhaseName::Reissue, PhaseName::Retire, PhaseName::Steady];
    for (at, stored) in phases().into_iter().enumerate() {
        for next in [Stay, Spread, Reissue, Retire, Settle] {
            let fits = next == on(stored.name()) && next != Stay || next == Spread && at == 0;
            let changed = after(&stored, next, LEAF, None, NOW + 5, || Ok(root("made"))).unwrap();
            assert_eq!(changed.as_ref().map(Stored::name), fits.then(|| order[at + 1]), "{next:?} in {stored:?}");
            if let Some(changed) = changed.filter(|_| at > 0) {
                assert_eq!((changed.target().id.clone(), changed.since), (stored.target().id.clone(), NOW + 5));
            }
        }
        assert_eq!(
            after(&stored, Replace, LEAF, None, NOW, || Err(Pki::Serial)).err().map(|why| why.to_string()),
            Some(Pki::Serial.to_string())
        );
    }
}

/// An agent as it really is, and what the receiver's memory has of it.
#[derive(Clone)]
struct Agent {
    bundle: TrustBundle,
    leaf: Root,
    heard: Option<(String, KeyId)>,
}

#[derive(Clone, Debug)]
enum Act {
    /// The receiver looks; somebody may have asked for a rotation.
    Look(bool),
    /// An agent takes the bundle of its ConfigMap.
    Take(usize),
    Renew(usize),
    Heartbeat(usize),
    /// The receiver is killed, and another one reads what is stored.
    Restart,
}

fn acts() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => any::<bool>().prop_map(Act::Look),
        3 => (0..3usize).prop_map(Act::Take),
        3 => (0..3usize).prop_map(Act::Renew),
        5 => (0..3usize).prop_map(Act::Heartbeat),
        1 => Just(Act::Restart),
    ]
}

struct World {
    stored: Stored,
    agents: Vec<Agent>,
    now: i64,
    roots: BTreeMap<KeyId, Root>,
}

impl World {
    fn new() -> Self {
        let first = root("first");
        let stored = Stored::steady(first.clone(), NOW);
        let agent = Agent { bundle: stored.trust().agents, leaf: first.clone(), heard: None };
        Self { agents: vec![agent; 3], now: NOW, roots: [(first.id.clone(), first)].into(), stored }
    }

    fn followers(&self) -> Vec<Follower> {
        let of = |agent: &Agent| Follower {
            trust_revision: agent.heard.as_ref().map(|(revision, _)| revision.clone()),
            authority: agent.heard.as_ref().map(|(_, id)| id.clone()),
            ..follower(&self.stored)
        };
        self.agents.iter().map(of).collect()
    }

    fn act(&mut self, act: &Act) {
        match *act {
            Act::Look(ordered) => {
                self.now += 1;
                let next = step(&self.stored, &self.followers(), ordered, self.now);
                let changed = after(&self.stored, next, LEAF, None, self.now, || Ok(root("another"))).unwrap();
                if let Some(changed) = changed {
                    self.roots.insert(changed.target().id.clone(), changed.target().clone());
                    self.stored = changed;
                }
            }
            Act::Take(at) => self.agents[at].bundle = self.stored.trust().agents,
            Act::Renew(at) => self.agents[at].leaf = self.stored.issuing().clone(),
            Act::Heartbeat(at) => {
                let agent = &mut self.agents[at];
                agent.heard = Some((agent.bundle.revision().to_owned(), agent.leaf.id.clone()));
            }
            Act::Restart => {
                self.stored = Stored::read(&self.stored.write()).unwrap();
                self.agents.iter_mut().for_each(|agent| agent.heard = None);
            }
        }
    }

    /// Everybody can connect, in both directions, at any moment.
    fn check(&self) {
        let trust = self.stored.trust();
        for agent in &self.agents {
            let serving = self.stored.serving().ca.certificate();
            assert!(agent.bundle.roots().contains(serving), "an agent cannot trust the server in {:?}", self.stored);
            let leaf = self.roots[&agent.leaf.id].ca.certificate();
            assert!(trust.clients.roots().contains(leaf), "an agent is refused in {:?}", self.stored);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever happens in whatever order, with a kill anywhere: nobody who follows, however slowly, is ever locked out, and when all
    /// follow it ends.
    #[test]
    fn nobody_is_ever_locked_out(acts in proptest::collection::vec(acts(), 0..120)) {
        let mut world = World::new();
        for act in &acts {
            world.act(act);
            world.check();
        }
        for _ in 0..4 {
            world.act(&Act::Look(false));
            for at in 0..3 {
                [Act::Take(at), Act::Renew(at), Act::Heartbeat(at)].iter().for_each(|act| world.act(act));
            }
            world.check();
        }
        prop_assert_eq!(world.stored.name(), PhaseName::Steady);
        prop_assert_eq!(world.stored.trust().clients.roots().len(), 1);
    }
}
