//! The task at work: a hub that hears heartbeats, a control plane that is a function, and passes that the test makes.

use std::sync::{Arc, Mutex};

use http::{Method, StatusCode};
use kube::runtime::{
    reflector::{self, store::Writer},
    watcher::Event,
};
use serde_json::{Value, json};
use tidewatch_shared::{
    identity::{Instance, RuntimeId},
    names::annotation,
    plan::Plan,
};

use super::*;
use crate::{base::pause::Pause, fleet::hub, kube::record, testing};

/// The ConfigMap in KCP.
#[derive(Clone, Default)]
struct Kcp(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    map: Option<Value>,
    version: u64,
    writes: usize,
    refuses: bool,
}

impl Kcp {
    fn client(&self) -> Client {
        let state = self.0.clone();
        testing::client("kcp-system", move |parts, body| {
            let state = &mut *state.lock().unwrap();
            let body: Value = serde_json::from_slice(body).unwrap_or_default();
            let (status, answer) = state.answer(&parts.method, body);
            Some((status, answer.to_string()))
        })
    }

    fn map(&self) -> Option<ConfigMap> {
        self.0.lock().unwrap().map.clone().map(|map| serde_json::from_value(map).unwrap())
    }

    fn data(&self, key: &str) -> Option<String> {
        self.map()?.data?.remove(key)
    }

    fn writes(&self) -> usize {
        self.0.lock().unwrap().writes
    }

    fn edit(&self, change: impl FnOnce(&mut Option<Value>)) {
        let state = &mut *self.0.lock().unwrap();
        change(&mut state.map);
        state.version += 1;
        if let Some(map) = &mut state.map {
            map["metadata"]["resourceVersion"] = state.version.to_string().into();
        }
    }
}

impl State {
    fn answer(&mut self, method: &Method, mut body: Value) -> (StatusCode, Value) {
        let failure = |status: StatusCode| {
            (
                status,
                json!({"kind": "Status", "status": "Failure", "reason": "x", "message": "m", "code": status.as_u16()}),
            )
        };
        if *method == Method::GET {
            let items: Vec<_> = self.map.iter().collect();
            return (
                StatusCode::OK,
                json!({"kind": "ConfigMapList", "apiVersion": "v1", "metadata": {}, "items": items}),
            );
        }
        let is_as_read = match &self.map {
            Some(map) => map["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"],
            None => *method == Method::POST,
        };
        if self.refuses {
            return failure(StatusCode::FORBIDDEN);
        }
        if !is_as_read {
            return failure(StatusCode::CONFLICT);
        }
        self.version += 1;
        self.writes += 1;
        body["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.map = Some(body.clone());
        (StatusCode::OK, body)
    }
}

/// Runtimes whose agents are all well at first.
struct Bed {
    kcp: Kcp,
    hub: Hub,
    stores: Stores,
    kymas: Writer<Kyma>,
    count: u32,
    /// Agents with it say nothing.
    bad: Option<&'static str>,
    counter: u64,
}

fn key(n: u32) -> KymaKey {
    KymaKey::new("kcp-system", format!("k{n}"))
}

fn id(n: u32) -> RuntimeId {
    format!("r-{n}").parse().unwrap()
}

fn kyma(n: u32, labels: Value) -> Kyma {
    serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
        "metadata": {"name": format!("k{n}"), "namespace": "kcp-system", "labels": labels}, "spec": {"channel": "regular"}}))
    .unwrap()
}

impl Bed {
    fn new(count: u32) -> Self {
        let (kymas, writer) = reflector::store();
        let stores = Stores {
            kymas,
            templates: reflector::store().0,
            release_metas: reflector::store().0,
            manifests: reflector::store().0,
            watchers: reflector::store().0,
            secrets: reflector::store().0,
        };
        let mut bed =
            Self { kcp: Kcp::default(), hub: Self::hub(count), stores, kymas: writer, count, bad: None, counter: 0 };
        (0..count).for_each(|n| bed.kymas.apply_watcher_event(&Event::Apply(kyma(n, json!({})))));
        bed
    }

    fn hub(count: u32) -> Hub {
        let metrics = hub::Metrics::register(&mut tidewatch_shared::metrics::Registry::default());
        let hub = Hub::new(Instance::new(1), hub::Settings::default(), metrics, Instant::now());
        let plan = Arc::new(Plan::new("1".into(), Vec::new()).unwrap());
        (0..count).for_each(|n| hub.place(key(n), Some(id(n)), plan.clone()));
        hub.set_synced();
        hub
    }

    /// A receiver that is told of this image, as it begins.
    async fn receiver(&mut self, image: &str) -> Upgrade {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            flags: Flags,
        }
        self.hub = Self::hub(self.count);
        let rooms = Rooms {
            hub: self.hub.clone(),
            stores: self.stores.clone(),
            pause: Pause::default(),
            takeover: Takeover::default(),
            record: Record::new(record::Metrics::default()),
            metrics: Metrics::default(),
        };
        let line = ["x", "--agent-upgrade-stages", "1%,50%,100%", "--agent-upgrade-pause-seconds", "0"];
        let Line { flags } = <Line as clap::Parser>::parse_from(line);
        let (upgrade, _) = Upgrade::open(self.kcp.client(), "kcp-system", image, flags, rooms).await.unwrap();
        upgrade
    }

    /// Half a minute: passes where they are wanted, heartbeats of those whose agents are well, looks of the task.
    async fn go_on(&mut self, upgrade: &mut Upgrade, has: &mut [String]) {
        self.counter += 1;
        for (n, has) in (0..).zip(has.iter_mut()) {
            match upgrade.course.image_of(&id(n)) {
                Decided::Is(image) => *has = image.to_string(),
                Decided::KeepOr(image) if has.is_empty() => *has = image.to_string(),
                Decided::KeepOr(_) => {}
            }
            upgrade.course.saw(&key(n), &has.as_str().into(), self.bad != Some(has.as_str()));
        }
        time::advance(Duration::from_secs(1)).await;
        let well = (0..).zip(has.iter()).filter(|(_, has)| self.bad != Some(has.as_str()));
        for (n, _) in well {
            let heartbeat = json!({"epoch": "0000000000000001", "sequence": 0, "counter": self.counter, "waiting": 0, "parked": 0,
                "agentVersion": "1", "planRevision": "1", "certificate": {"notAfter": "", "fingerprint": ""},
                "canary": {"ageSeconds": 1}, "watches": []});
            self.hub.heartbeat(&id(n), 1, serde_json::from_value(heartbeat).unwrap(), 1_700_000_000).unwrap();
        }
        upgrade.look(Instant::now()).await;
        upgrade.take(self.kcp.map().as_ref());
        time::advance(Duration::from_secs(29)).await;
    }

    async fn settle(&mut self, upgrade: &mut Upgrade, has: &mut [String]) {
        for _ in 0..60 {
            self.go_on(upgrade, has).await;
        }
    }
}

fn all(count: usize, image: &str) -> Vec<String> {
    vec![image.to_owned(); count]
}

fn with(has: &[String], image: &str) -> usize {
    has.iter().filter(|has| *has == image).count()
}

#[tokio::test(start_paused = true)]
async fn the_first_image_is_everybodys_and_the_next_one_comes_in_stages() {
    let mut bed = Bed::new(9);
    let mut has = all(9, "");
    let mut upgrade = bed.receiver("a").await;
    bed.settle(&mut upgrade, &mut has).await;
    assert_eq!((has.clone(), bed.kcp.data("stage").as_deref()), (all(9, "a"), Some("done")));
    let writes = bed.kcp.writes();
    bed.settle(&mut upgrade, &mut has).await;
    assert_eq!(bed.kcp.writes(), writes, "who rests writes nothing");

    let mut upgrade = bed.receiver("b").await;
    let mut seen = vec![0];
    for _ in 0..60 {
        bed.go_on(&mut upgrade, &mut has).await;
        let upgraded = with(&has, "b");
        if seen.last() != Some(&upgraded) {
            seen.push(upgraded);
            // Whoever comes after a receiver that was killed does not draw anew.
            upgrade = bed.receiver("b").await;
        }
    }
    assert_eq!(seen, [0, 1, 4, 9]);
    assert_eq!(bed.kcp.data("stage").as_deref(), Some("done"));
}

#[tokio::test(start_paused = true)]
async fn a_bad_image_halts_stays_halted_and_goes_back_at_once() {
    let mut bed = Bed::new(9);
    bed.bad = Some("b");
    let mut has = all(9, "a");
    let mut upgrade = bed.receiver("a").await;
    bed.settle(&mut upgrade, &mut has).await;
    for _ in 0..2 {
        let mut upgrade = bed.receiver("b").await;
        bed.settle(&mut upgrade, &mut has).await;
        assert_eq!((with(&has, "b"), bed.kcp.data("halted").is_some()), (1, true));
    }
    let mut upgrade = bed.receiver("a").await;
    bed.go_on(&mut upgrade, &mut has).await;
    bed.go_on(&mut upgrade, &mut has).await;
    assert_eq!((has.clone(), bed.kcp.data("halted")), (all(9, "a"), None));

    let mut upgrade = bed.receiver("b").await;
    bed.settle(&mut upgrade, &mut has).await;
    let confirm = |image: &str| {
        bed.kcp.edit(|map| {
            map.as_mut().unwrap()["metadata"]["annotations"] = json!({annotation::CONFIRM_AGENT_IMAGE: image})
        });
    };
    confirm("another");
    bed.settle(&mut upgrade, &mut has).await;
    assert_eq!(with(&has, "b"), 1, "who confirms another image says nothing of this one");
    let confirm = |image: &str| {
        bed.kcp.edit(|map| {
            map.as_mut().unwrap()["metadata"]["annotations"] = json!({annotation::CONFIRM_AGENT_IMAGE: image})
        });
    };
    confirm("b");
    bed.settle(&mut upgrade, &mut has).await;
    assert_eq!(with(&has, "b"), 9);
}

#[tokio::test(start_paused = true)]
async fn who_is_paused_is_not_waited_for_and_makes_no_start() {
    let mut bed = Bed::new(3);
    let mut has = all(3, "a");
    let mut upgrade = bed.receiver("a").await;
    bed.settle(&mut upgrade, &mut has).await;
    let paused = json!({label::PAUSE: "true"});
    (0..3).for_each(|n| bed.kymas.apply_watcher_event(&Event::Apply(kyma(n, paused.clone()))));
    let mut upgrade = bed.receiver("b").await;
    bed.settle(&mut upgrade, &mut has).await;
    assert_eq!(bed.kcp.data("stage").as_deref(), Some("0"), "nobody is there to try it");
    bed.kymas.apply_watcher_event(&Event::Apply(kyma(1, json!({}))));
    bed.settle(&mut upgrade, &mut has).await;
    assert_eq!(bed.kcp.data("stage").as_deref(), Some("done"));
}

#[tokio::test(start_paused = true)]
async fn a_pause_is_no_time_to_fail_in() {
    let mut bed = Bed::new(9);
    let mut has = all(9, "a");
    let mut upgrade = bed.receiver("a").await;
    bed.settle(&mut upgrade, &mut has).await;
    let mut upgrade = bed.receiver("b").await;
    bed.bad = Some("b");
    while with(&has, "b") == 0 {
        bed.go_on(&mut upgrade, &mut has).await;
    }
    bed.go_on(&mut upgrade, &mut has).await;
    // The first one has it for a minute, and all are paused for longer than it may be unwell.
    (0..9).for_each(|n| bed.kymas.apply_watcher_event(&Event::Apply(kyma(n, json!({label::PAUSE: "true"})))));
    let since = Instant::now();
    while since.elapsed() < 2 * upgrade.flags.deadline() {
        bed.go_on(&mut upgrade, &mut has).await;
    }
    assert_eq!(bed.kcp.data("halted"), None);
    (0..9).for_each(|n| bed.kymas.apply_watcher_event(&Event::Apply(kyma(n, json!({})))));
    bed.go_on(&mut upgrade, &mut has).await;
    assert_eq!((with(&has, "b"), bed.kcp.data("halted")), (1, None), "it has its time anew");
    bed.bad = None;
    bed.settle(&mut upgrade, &mut has).await;
    assert_eq!((with(&has, "b"), bed.kcp.data("stage").as_deref()), (9, Some("done")));
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_is_made_again_what_cannot_be_read_is_left_and_what_others_wrote_counts() {
    let mut bed = Bed::new(3);
    let mut has = all(3, "a");
    let mut upgrade = bed.receiver("a").await;
    bed.settle(&mut upgrade, &mut has).await;
    bed.kcp.edit(|map| *map = None);
    upgrade.take(None);
    bed.go_on(&mut upgrade, &mut has).await;
    assert_eq!(bed.kcp.data("target").as_deref(), Some("a"));

    bed.kcp.edit(|map| map.as_mut().unwrap()["data"] = json!({"target": "b"}));
    let writes = bed.kcp.writes();
    let mut upgrade = bed.receiver("b").await;
    bed.settle(&mut upgrade, &mut has).await;
    assert_eq!((bed.kcp.writes(), has.clone()), (writes, all(3, "a")), "each keeps what it has");
    bed.kcp.edit(|map| *map = None);
    upgrade.take(None);
    bed.settle(&mut upgrade, &mut has).await;
    assert_eq!((has.clone(), bed.kcp.data("stage").as_deref()), (all(3, "b"), Some("done")));

    // Somebody wrote since this one has read.
    let mut upgrade = bed.receiver("c").await;
    bed.kcp.edit(|_| ());
    let writes = bed.kcp.writes();
    bed.counter += 1;
    upgrade.look(Instant::now()).await;
    assert_eq!((bed.kcp.writes(), bed.kcp.data("target").as_deref()), (writes, Some("b")));
    bed.settle(&mut upgrade, &mut has).await;
    assert_eq!(bed.kcp.data("target").as_deref(), Some("c"));
}

/// After how many ticks it looks.
fn ticks(upgrade: &mut Upgrade) -> Option<u32> {
    (1..=2 * IDLE).find(|_| upgrade.is_turn())
}

#[tokio::test(start_paused = true)]
async fn who_can_do_nothing_looks_seldom_but_at_once_when_somebody_has_written() {
    let mut bed = Bed::new(3);
    bed.bad = Some("b");
    let mut has = all(3, "a");
    let mut upgrade = bed.receiver("a").await;
    bed.settle(&mut upgrade, &mut has).await;
    assert_eq!((ticks(&mut upgrade), ticks(&mut upgrade)), (Some(1), Some(IDLE)), "it is over");

    let mut upgrade = bed.receiver("b").await;
    assert_eq!((ticks(&mut upgrade), ticks(&mut upgrade)), (Some(1), Some(1)), "another image is wanted");
    bed.settle(&mut upgrade, &mut has).await;
    assert!(bed.kcp.data("halted").is_some());
    assert_eq!((ticks(&mut upgrade), ticks(&mut upgrade)), (Some(1), Some(IDLE)), "it has halted");
    bed.kcp
        .edit(|map| map.as_mut().unwrap()["metadata"]["annotations"] = json!({annotation::CONFIRM_AGENT_IMAGE: "b"}));
    upgrade.take(bed.kcp.map().as_ref());
    assert_eq!(ticks(&mut upgrade), Some(1), "it is confirmed");

    bed.kcp.edit(|map| map.as_mut().unwrap()["data"] = json!({"target": "b"}));
    upgrade.take(bed.kcp.map().as_ref());
    assert_eq!((ticks(&mut upgrade), ticks(&mut upgrade)), (Some(1), Some(IDLE)), "it cannot be read");
    upgrade.take(None);
    assert_eq!((ticks(&mut upgrade), ticks(&mut upgrade)), (Some(1), Some(1)), "it is to be made");
}

#[tokio::test(start_paused = true)]
async fn who_is_gone_is_forgotten() {
    let mut bed = Bed::new(2);
    let mut upgrade = bed.receiver("a").await;
    upgrade.asked.extend([key(0), key(1)]);
    bed.hub.remove(&key(0));
    upgrade.look(Instant::now()).await;
    assert_eq!(upgrade.asked, HashSet::from([key(1)]), "should it come back, it is asked anew");
}
