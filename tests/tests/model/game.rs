//! The game: what can happen, what must always hold, and what must hold once nothing fails any more.

mod lost;
pub(crate) mod moves;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use proptest::{prop_assert, prop_assert_eq, test_runner::TestCaseError};
use tidewatch_agent::telemetry::Metrics as AgentMetrics;
use tidewatch_receiver::{
    hub::Metrics as HubMetrics,
    queue::{Priority, Works},
};
use tidewatch_shared::{digest::Digest, event::What, exchange::Settled, identity::Epoch, plan::Work};
use tokio::time;

use crate::{
    agent::{Agent, Answer, Body, LARGE, Object, Request, SMALL, Sender},
    cluster::{COUNT, Cluster, Deed, Name, PlanId, WATCHES},
    receiver::{End, Fate, Ghost, Receiver, Records},
};
use moves::{Move, Spoil};

/// Rounds in which everything must have come to rest: the longest wait of either side is over after one.
const ROUNDS: usize = 12;
/// Longer than any wait of either side.
const LONG: Duration = Duration::from_secs(3_600);

pub(crate) type Checked = Result<(), TestCaseError>;

/// By sequence: when it was given, and to what.
type Sequences = BTreeMap<u64, (u64, About)>;

/// What an event is about.
#[derive(Clone, Copy, Debug)]
enum About {
    Object(Name),
    Watch,
    /// A watch, and objects of it of which no event tells.
    Unnamed,
}

/// Metrics are made once: to register them costs more than a whole game.
#[derive(Clone)]
pub(crate) struct Metrics {
    pub(crate) agent: AgentMetrics,
    pub(crate) hub: HubMetrics,
}

pub(crate) struct Game {
    metrics: Metrics,
    cap: usize,
    cluster: Cluster,
    saved: Option<Cluster>,
    agent: Agent,
    receivers: Vec<Receiver>,
    /// Counts the lives of both sides.
    lives: u64,
    tick: u64,
    requests: Vec<Request>,
    answers: Vec<(Sender, Answer)>,
    ghosts: Vec<Ghost>,
    records: Records,
    /// In KCP, in the cluster, and the number of revisions.
    plan: PlanId,
    written: (PlanId, u64),
    turn: u64,
    /// Per watch: when it last left the plan, and when it last stood for other works.
    left: [u64; COUNT],
    stood: [u64; COUNT],
    /// Per epoch and watch: sequences that no answer called settled yet, when each was given, and to which object.
    unsettled: BTreeMap<(Epoch, usize), Sequences>,
    /// Per epoch: the highest sequence that was ever given.
    given: BTreeMap<Epoch, u64>,
    /// The next event that arrives is turned into one about nothing.
    corrupt: bool,
    /// Digests differ on purpose.
    pub(crate) corrupted: bool,
}

impl Game {
    pub(crate) fn new(instances: usize, metrics: Metrics) -> Self {
        let plan = PlanId::ALL;
        let cap = if instances == 1 { SMALL } else { LARGE };
        let agent = Agent::start(0, cap, &plan.plan(0), metrics.agent.clone());
        let mut game = Self {
            cap,
            cluster: Cluster::new(),
            saved: None,
            agent,
            receivers: Vec::new(),
            lives: 0,
            tick: 0,
            requests: Vec::new(),
            answers: Vec::new(),
            ghosts: Vec::new(),
            records: Records::default(),
            plan,
            written: (plan, 0),
            turn: 0,
            left: [0; COUNT],
            stood: [0; COUNT],
            unsettled: BTreeMap::new(),
            given: BTreeMap::new(),
            corrupt: false,
            corrupted: false,
            metrics,
        };
        for _ in 0..instances {
            let receiver = game.receiver();
            receiver.synced();
            game.receivers.push(receiver);
        }
        game
    }

    fn receiver(&mut self) -> Receiver {
        self.lives += 1;
        Receiver::start(self.lives, Arc::new(self.plan.plan(self.turn)), self.metrics.hub.clone())
    }

    fn created(&self) -> i64 {
        // Signatures have whole seconds: two lives of an agent may well share one.
        i64::try_from(self.tick / 4).unwrap()
    }

    pub(crate) async fn play(&mut self, step: Move) -> Checked {
        self.tick += 1;
        match step {
            Move::Act(resource, name, deed) => self.act(resource, name, deed),
            Move::Redefine => {
                self.cluster.redefine();
                (0..WATCHES.len()).filter(|at| WATCHES[*at].resource == 0).for_each(|at| self.agent.break_off(at));
            }
            Move::SaveStore => self.saved = Some(self.cluster.clone()),
            Move::SetStoreBack => {
                if let Some(older) = self.saved.clone() {
                    self.cluster.set_back(older);
                    (0..WATCHES.len()).for_each(|at| self.agent.break_off(at));
                }
            }
            Move::Feed(watch) => drop(self.agent.feed(watch)),
            Move::List(watch, again) => self.agent.list(&self.cluster, watch, again, self.tick),
            Move::BreakOff(watch) => self.agent.break_off(watch),
            Move::Send => self.send(),
            Move::GiveUp => self.agent.give_up(),
            Move::Beat => self.beat(),
            Move::Deliver { at, instance, keep, spoil } => self.deliver(at, instance, keep, spoil)?,
            Move::Lose(at) => drop((at < self.requests.len()).then(|| self.requests.remove(at))),
            Move::Hear(at) => self.hear(at)?,
            Move::LoseAnswer(at) => drop((at < self.answers.len()).then(|| self.answers.remove(at))),
            Move::Begin(at) => drop(self.begin(at)),
            Move::End(at, how) => drop(self.receivers[at].end(how, &mut self.records)),
            Move::Want(at, kyma, catalog) => self.want(at, kyma, catalog),
            Move::Unpause(at) => self.receivers[at].unpause(),
            Move::RestartAgent => self.restart_agent(),
            Move::RestartReceiver(at, slow) => self.restart_receiver(at, slow),
            Move::Sync(at) => self.receivers[at].synced(),
            Move::Hand(at) => drop(self.hand(at)),
            Move::Handed(at, which, fate) => drop(self.receivers[at].handed(which, fate, &mut self.records)),
            Move::Forget(at) => self.receivers[at].forget(Arc::new(self.plan.plan(self.turn))),
            Move::LandGhost => {
                if let Some(ghost) = self.ghosts.pop() {
                    ghost.land(&mut self.records);
                }
            }
            Move::Plan(plan) => self.change_plan(PlanId(plan)),
            Move::WritePlan => self.written = (self.plan, self.turn),
            Move::Follow => self.follow(),
            Move::Wait(seconds) => time::advance(Duration::from_secs(seconds.into())).await,
        }
        self.check_held()
    }

    fn act(&mut self, resource: usize, name: Name, deed: Deed) {
        let said = self.cluster.act(resource, name, deed, self.tick);
        self.agent.hear_streams(said);
    }

    fn send(&mut self) {
        let created = self.created();
        let Some(request) = self.agent.events(created) else { return };
        if let Body::Events(events) = &request.body {
            for event in events.iter().map(|event| event.as_ref().unwrap()) {
                let at = WATCHES.iter().position(|watch| watch.name == event.watch).unwrap();
                let highest = self.given.entry(event.id.epoch).or_default();
                if event.id.sequence > *highest {
                    *highest = event.id.sequence;
                    let name = match &event.what {
                        What::Object(object) => About::Object(object.subject.name.parse().unwrap()),
                        What::Watch => About::Watch,
                        What::Unnamed { .. } => About::Unnamed,
                    };
                    let given = self.unsettled.entry((event.id.epoch, at)).or_default();
                    given.insert(event.id.sequence, (self.tick, name));
                }
            }
        }
        self.requests.push(request);
    }

    fn beat(&mut self) {
        let beat = self.agent.beat(self.created());
        self.requests.push(beat);
    }

    fn deliver(&mut self, at: usize, instance: usize, keep: bool, spoil: Spoil) -> Checked {
        if at >= self.requests.len() {
            return Ok(());
        }
        let mut request = if keep { self.requests[at].clone() } else { self.requests.remove(at) };
        let from = request.from;
        if let (Spoil::Event(at, reason), Body::Events(events)) = (spoil, &mut request.body)
            && let Some(event) = events.get_mut(at)
        {
            *event = Err((event.as_ref().unwrap().id, reason));
        }
        if let (true, Body::Events(events)) = (self.corrupt, &mut request.body)
            && let Some(Ok(event)) = events.first_mut()
        {
            // Whoever wrote this event had lost what it was about.
            event.delta = Digest::ZERO;
            if let What::Object(object) = &mut event.what {
                object.subject.name = "99".to_owned();
            }
            self.corrupt = false;
        }
        let sent = if let Body::Beat(beat) = &request.body { beat.sequence } else { 0 };
        let may_ask = self.corrupted || self.receivers[instance].may_ask(from.epoch, sent);
        let answer = match spoil {
            Spoil::Whole => Answer::RefusedWhole,
            Spoil::Signature => Answer::NewEpoch,
            _ => self.receivers[instance].take(request),
        };
        match &answer {
            Answer::Events(answer) => self.check_settled(from.epoch, answer.since, &answer.settled)?,
            Answer::Beat(answer) => {
                let since = self.receivers[instance].since(from.epoch);
                prop_assert_eq!(answer.since, Some(since), "where what is called settled begins");
                self.check_settled(from.epoch, since, &answer.settled)?;
                prop_assert!(may_ask || answer.resend.is_empty(), "a false alarm about {:?}", answer.resend);
            }
            Answer::RefusedWhole | Answer::NewEpoch | Answer::Fault => {}
        }
        if !matches!(spoil, Spoil::Mute) {
            self.answers.push((from, answer));
        }
        Ok(())
    }

    /// What is called settled has been looked at, by a pass that began after the event was there, for each work of its watch; or its
    /// manager has been told since. Of what lies below `since` an answer says nothing: the agent knows that, and sends it again.
    fn check_settled(&mut self, epoch: Epoch, since: u64, settled: &Settled) -> Checked {
        for (name, sequence) in settled {
            let at = WATCHES.iter().position(|watch| watch.name == name).unwrap();
            let Some(given) = self.unsettled.get_mut(&(epoch, at)) else { continue };
            let later = given.split_off(&(sequence + 1));
            let settled = std::mem::replace(given, later);
            for (sequence, (tick, about)) in settled.into_iter().filter(|(_, (tick, _))| *tick > self.left[at]) {
                // A watch may have stood for less at the time.
                let works = if self.stood[at] >= tick { WATCHES[at].works_always() } else { self.plan.works(at) };
                for work in works.iter().filter(|_| self.plan.has(at)) {
                    let began = match (work, about) {
                        (Work::Forward, About::Watch) => continue,
                        (Work::Forward, _) if sequence < since => continue,
                        (Work::Forward, About::Object(name)) => self.records.handed_at(at, name),
                        (Work::Forward, About::Unnamed) => self.records.handed_all_at(at),
                        _ => self.records.began(*work, at),
                    };
                    prop_assert!(
                        began > tick,
                        "{name} {sequence} is settled, but {work:?} began at {began}, not after {tick}"
                    );
                }
            }
        }
        Ok(())
    }

    fn hear(&mut self, at: usize) -> Checked {
        if at >= self.answers.len() {
            return Ok(());
        }
        let (to, answer) = self.answers.remove(at);
        let before = self.agent.figures();
        self.agent.hear(to, &answer);
        let after = self.agent.figures();
        prop_assert!(
            after.waiting + after.parked >= before.waiting + before.parked,
            "an answer took what was never sent: {before:?} {after:?}"
        );
        Ok(())
    }

    /// The agent holds something of each watch of which it was told more than anybody has looked at.
    fn check_held(&self) -> Checked {
        let open = |at: &usize| {
            let told = self.agent.told(*at).filter(|told| *told > self.left[*at].max(self.stood[*at]));
            let passes = self.plan.works(*at).iter().filter(|work| **work != Work::Forward);
            let behind = |told| passes.clone().any(|work| self.records.began(*work, *at) < told);
            let objects = self.agent.objects(*at).into_iter().filter(|(_, object)| object.tick > self.left[*at]);
            // One that came and went need not be told to a manager that never found it.
            let unknown = |name: Name, object: Object| object.gone && self.records.handed(*at, name).is_none();
            let behind_on = |name: Name, object: Object| self.records.handed_at(*at, name) < object.tick;
            let mut unheard = objects.filter(|(name, object)| behind_on(*name, *object) && !unknown(*name, *object));
            self.plan.has(*at) && (told.is_some_and(behind) || unheard.next().is_some())
        };
        let open = (0..WATCHES.len()).filter(open).count();
        let figures = self.agent.figures();
        let held = figures.waiting + figures.unsettled + figures.parked;
        prop_assert!(held >= open, "{open} watches moved, and the agent holds {held}");
        Ok(())
    }

    fn begin(&mut self, at: usize) -> bool {
        let (cluster, plan, tick) = (&self.cluster, self.plan, self.tick);
        self.receivers[at].begin(|| cluster.truth(), plan, tick)
    }

    fn hand(&mut self, at: usize) -> bool {
        let (cluster, tick) = (&self.cluster, self.tick);
        self.receivers[at].hand(|| cluster.truth(), tick)
    }

    fn want(&self, at: usize, kyma: bool, catalog: bool) {
        let wanted = [(Work::Kyma, kyma), (Work::Catalog, catalog)];
        let works: Works = wanted.into_iter().filter(|(_, wanted)| *wanted).map(|(work, _)| work).collect();
        self.receivers[at].want(works, Priority::Catalog);
    }

    fn restart_agent(&mut self) {
        self.lives += 1;
        let (plan, turn) = self.written;
        self.agent = Agent::start(self.lives, self.cap, &plan.plan(turn), self.metrics.agent.clone());
    }

    fn restart_receiver(&mut self, at: usize, slow: bool) {
        let receiver = self.receiver();
        if !slow {
            receiver.synced();
        }
        // Every start verifies everything. Only what a watch settled by leaving the plan needs it: with the process, the memory that it
        // was never worked on is gone; and so does what a late write spoilt when whoever was to look once more has died too. Elsewhere
        // the agent alone must be enough.
        if self.left.iter().any(|left| *left > 0) || !self.ghosts.is_empty() {
            receiver.verify();
        }
        let ghost = std::mem::replace(&mut self.receivers[at], receiver).die();
        // With several instances at once, conflicts keep their writes apart, and there are no late ones.
        self.ghosts.extend(ghost.filter(|_| self.receivers.len() == 1));
    }

    fn change_plan(&mut self, plan: PlanId) {
        self.turn += 1;
        for at in 0..WATCHES.len() {
            if self.plan.has(at) && !plan.has(at) {
                self.left[at] = self.tick;
            }
            if self.plan.works(at) != plan.works(at) {
                self.stood[at] = self.tick;
            }
        }
        self.plan = plan;
        let plan = Arc::new(plan.plan(self.turn));
        self.receivers.iter().for_each(|receiver| receiver.place(plan.clone()));
    }

    fn follow(&mut self) {
        let (plan, turn) = self.written;
        for stopped in self.agent.follow(&plan.plan(turn)) {
            // What became of its objects since then, a new list tells; what was sent before is nobody's.
            self.unsettled.retain(|(_, at), _| *at != stopped || !WATCHES[*at].is_forwarded());
        }
    }

    /// Nothing fails any more, and whatever is under way arrives. Everything comes to rest, and rest is the truth.
    pub(crate) async fn rest(&mut self) -> Checked {
        for receiver in &mut self.receivers {
            receiver.synced();
            receiver.unpause();
        }
        self.play(Move::WritePlan).await?;
        self.play(Move::Follow).await?;
        // A first look at all of it, before the last writes of those who died.
        self.round(Duration::ZERO).await?;
        std::mem::take(&mut self.ghosts).into_iter().for_each(|ghost| ghost.land(&mut self.records));
        let mut quiet = 0;
        for round in 0..ROUNDS {
            if self.agent.figures().parked > 0 && round > 2 {
                // What is parked waits for another plan, if only in its number.
                self.change_plan(self.plan);
                self.play(Move::WritePlan).await?;
                self.play(Move::Follow).await?;
            }
            self.round(LONG).await?;
            quiet = if self.is_quiet() { quiet + 1 } else { 0 };
            if quiet == 2 {
                break;
            }
        }
        let figures = self.agent.figures();
        let held = (figures.waiting, figures.unsettled, figures.parked);
        prop_assert_eq!(held, (0, 0, 0), "waiting, unsettled and parked after {} rounds", ROUNDS);
        for receiver in &self.receivers {
            prop_assert_eq!(receiver.busy_with(), None, "work that never ends");
        }
        // Nobody speaks to the others any more.
        prop_assert!(self.receivers[0].resend().is_empty(), "a watch is asked for in vain");
        let truth = self.cluster.truth();
        for at in (0..WATCHES.len()).filter(|at| self.plan.has(*at)) {
            for work in self.plan.works(at).iter().filter(|work| **work != Work::Forward) {
                let known = self.records.known.get(&(*work, at)).cloned().unwrap_or_default();
                prop_assert_eq!(&known, &truth[at], "{:?} of {}", work, WATCHES[at].name);
            }
            let objects = self.agent.objects(at);
            let listed = truth[at].keys().all(|name| objects.contains_key(name));
            prop_assert!(listed || !WATCHES[at].is_forwarded(), "an object that its manager is never told of");
            // What was settled when the watch left the plan, nobody tells again.
            for (name, object) in objects.into_iter().filter(|(_, object)| object.tick > self.left[at]) {
                let handed = self.records.handed(at, name);
                prop_assert_eq!(
                    handed,
                    truth[at].get(&name).copied(),
                    "{} of {}: {:?}",
                    name,
                    WATCHES[at].name,
                    object
                );
            }
        }
        Ok(())
    }

    fn is_quiet(&self) -> bool {
        let figures = self.agent.figures();
        figures.waiting + figures.unsettled + figures.parked == 0
            && self.receivers.iter().all(|receiver| receiver.busy_with().is_none())
            && self.receivers[0].resend().is_empty()
    }

    /// The agent hears of everything that has changed: nothing that comes later sets right what goes wrong from here.
    pub(crate) async fn hush(&mut self) -> Checked {
        for watch in 0..WATCHES.len() {
            while !self.agent.is_up_to_date(watch) {
                self.play(Move::Feed(watch)).await?;
                self.play(Move::List(watch, false)).await?;
            }
        }
        Ok(())
    }

    /// Whatever is to be said is said and heard; then, after a while, whatever is to be done is done.
    async fn round(&mut self, wait: Duration) -> Checked {
        self.hush().await?;
        self.play(Move::GiveUp).await?;
        for step in [Move::Send, Move::Beat] {
            self.play(step).await?;
            while !self.requests.is_empty() {
                self.play(Move::Deliver { at: 0, instance: 0, keep: false, spoil: Spoil::Nothing }).await?;
            }
            while !self.answers.is_empty() {
                self.play(Move::Hear(0)).await?;
            }
        }
        time::advance(wait).await;
        for at in 0..self.receivers.len() {
            self.tick += 1;
            self.receivers[at].end(End::Good, &mut self.records);
            while self.begin(at) {
                self.tick += 1;
                self.receivers[at].end(End::Good, &mut self.records);
            }
            self.tick += 1;
            while self.receivers[at].handed(0, Fate::Taken, &mut self.records) || self.hand(at) {
                self.tick += 1;
            }
        }
        Ok(())
    }
}
