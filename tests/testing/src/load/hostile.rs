//! Hostile runtimes: their agents have valid certificates, and the contract binds them as little as their API servers.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use rcgen::KeyPair;
use tidewatch_api::identity::Epoch;
use tidewatch_contract::{exchange::EVENTS_PATH, signature::Nonce};
use tokio::{
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep},
};

use super::{Agent, AgentHandle, EnrolmentClient, EnrolmentEndpoint, Flood, Flooder, SimulatedFleet, fleet::select};
use crate::fake::FakeCluster;

/// Requests per second of a flooding runtime, one and a half times its rate.
const FLOOD_RATE: u32 = 300;
/// Bodies that a runtime holds open, the number of its connections.
const HELD_BODIES: u64 = 4;
/// The largest body of the contract.
const BODY_BYTES: usize = 1 << 20;
/// Pause between two bodies of one connection.
const BODY_PAUSE: Duration = Duration::from_secs(1);
/// Interval at which a user changes the whole selection.
const SELECTION_INTERVAL: Duration = Duration::from_millis(500);
/// Interval at which the runtime's controller puts its changes back.
const CONTEST_INTERVAL: Duration = Duration::from_millis(500);
/// Interval of forged tokens; each needs a TLS handshake.
const FORGERY_INTERVAL: Duration = Duration::from_millis(500);
/// Selected modules that do not exist.
const UNKNOWN_MODULES: usize = 430;
/// Length of their names, for selections just below the receiver's limit of 32 KiB, and far above it.
const NAME_LENGTHS: [usize; 2] = [70, 250];

/// Attack of one hostile runtime. Each would hinder the others if one runtime made them all: a runtime that floods is no
/// longer served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Attack {
    /// Its agent sends above its rate over four connections, and ignores each `Retry-After`.
    Flood,
    /// Its agent holds four request bodies at the size limit open, one byte before their end.
    HeldBodies,
    /// Its user toggles 430 unknown modules and a real one; its API server is that of [`FakeCluster::turn_hostile`]; its
    /// controllers change what the receiver writes, and hold it by finalizers; and it sends forged tokens.
    Runtime,
}

impl Attack {
    /// Series of the receiver's metrics, counters of refusals, that are above zero once the attack takes effect.
    pub const fn effects(self) -> &'static [&'static str] {
        match self {
            Self::Flood => &[r#"tidewatch_gateway_requests_refused_total{reason="replay",route="events"}"#],
            Self::HeldBodies => &[r#"tidewatch_gateway_requests_refused_total{reason="slow",route="events"}"#],
            // Lists of tiny elements, and costly token keys. The receiver fetches the latter a minute after the good ones.
            Self::Runtime => &[
                r#"tidewatch_runtime_answers_refused_total{reason="too_large"}"#,
                r#"tidewatch_enrolment_requests_refused_total{reason="token-signature",route="certificates"}"#,
            ],
        }
    }
}

/// Running attacks; dropping them ends them.
#[derive(Default)]
pub struct Attacks {
    floods: Vec<Flood>,
    tasks: JoinSet<()>,
}

impl Attacks {
    /// Lets a runtime of the fleet attack from now on. Its agent must not run yet. The runtime is hostile for ever.
    ///
    /// # Errors
    /// When the runtime's agent runs, or the attack cannot be prepared.
    pub fn begin(
        &mut self,
        attack: Attack,
        fleet: &mut SimulatedFleet,
        member: usize,
        endpoint: &EnrolmentEndpoint,
        module: &str,
    ) -> Result<()> {
        let agent = fleet.members_mut()[member].take_agent().context("the agent runs already")?;
        match attack {
            Attack::Flood => self.floods.push(Flooder::new(agent)?.open_in_background(fleet.receiver()?, FLOOD_RATE)?),
            Attack::HeldBodies => self.hold_bodies(agent),
            Attack::Runtime => {
                let client = fleet.enrolment_client(member, endpoint, false);
                let member = &fleet.members()[member];
                let cluster = member.cluster().clone();
                let handle = member.handle().clone();
                cluster.turn_hostile().ok().context("draw token keys")?;
                self.tasks.spawn(agent.run());
                self.tasks.spawn(toggle(cluster.clone(), handle.clone(), module.to_owned()));
                self.tasks.spawn(contest(cluster, handle));
                self.tasks.spawn(forge(client, KeyPair::generate()?));
            }
        }
        Ok(())
    }

    fn hold_bodies(&mut self, agent: Agent) {
        let client = Arc::new(agent.into_client());
        let body = Bytes::from(vec![b' '; BODY_BYTES]);
        for connection in 1..=HELD_BODIES {
            let client = client.clone();
            let body = body.clone();
            self.tasks.spawn(async move {
                for counter in 1.. {
                    let nonce = Nonce { epoch: Epoch::new(connection), counter };
                    // The receiver refuses it, or closes the connection after a while; both begin the next one.
                    let _ = client.hold_body(EVENTS_PATH, body.clone(), nonce).await;
                    sleep(BODY_PAUSE).await;
                }
            });
        }
    }
}

/// Selects two sets of unknown modules, one with the real module, one that is too large, and none, in turn.
async fn toggle(cluster: FakeCluster, handle: AgentHandle, module: String) {
    let [short, long] = NAME_LENGTHS;
    let names = |set: &str, length: usize| -> Vec<_> {
        (0..UNKNOWN_MODULES).map(|number| format!("{set}{number:0width$}", width = length - set.len())).collect()
    };
    let mut selections = [names("a", short), names("b", short), names("c", long), Vec::new()];
    selections[0].push(module.clone());
    selections[3].push(module);
    let mut ticks = interval(SELECTION_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for selection in selections.iter().cycle() {
        ticks.tick().await;
        select(&cluster, &selection.iter().map(String::as_str).collect::<Vec<_>>());
        handle.update(|state| state.mark("kyma", 0));
    }
}

async fn contest(cluster: FakeCluster, handle: AgentHandle) {
    let mut ticks = interval(CONTEST_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if cluster.contest() > 0 {
            handle.update(super::ProtocolState::mark_lists);
        }
    }
}

async fn forge(client: EnrolmentClient, key: KeyPair) {
    let mut ticks = interval(FORGERY_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in 0.. {
        ticks.tick().await;
        // Each is refused, or not answered; neither ends the attack.
        let _ = client.forge(&key, number).await;
    }
}
