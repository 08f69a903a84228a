//! Detection of broken agents by lost connections and by their own reports.

use super::*;

const AFTER: Duration = Duration::from_secs(5);

#[tokio::test(start_paused = true)]
async fn silent_runtime_is_lost_once_after_its_connection_ends() {
    let fleet = table_with(4, 3);
    (0..3).for_each(|n| drop(send_heartbeat(&fleet, n, 1)));
    time::advance(AFTER).await;
    let ends = |id| fleet.connection_lost(&id, time::Instant::now());
    ends(id(0));
    ends(id(1));
    ends("unknown".parse().unwrap());
    assert!(fleet.lost(AFTER).is_empty(), "it may reconnect at once");
    time::advance(AFTER / 2).await;
    send_heartbeat(&fleet, 1, 2);
    time::advance(AFTER / 2).await;
    assert_eq!(fleet.lost(AFTER), [key(0)]);
    assert!(fleet.lost(AFTER).is_empty());
    ends(id(0));
    fleet.remove(&key(0));
    time::advance(AFTER).await;
    assert!(fleet.lost(AFTER).is_empty(), "its Kyma is cancellation");
}

#[tokio::test(start_paused = true)]
async fn quiet_connection_is_lost_at_once_unless_another_carried_a_request() {
    let fleet = table_with(4, 3);
    (0..3).for_each(|n| drop(send_heartbeat(&fleet, n, 1)));
    let quiet = time::Instant::now();
    time::advance(AFTER * 9).await;
    send_heartbeat(&fleet, 1, 2);
    fleet.connection_lost(&id(2), time::Instant::now());
    (0..3).for_each(|n| fleet.connection_lost(&id(n), quiet));
    assert_eq!(fleet.lost(AFTER), [key(0)]);
    time::advance(AFTER).await;
    assert_eq!(fleet.lost(AFTER), [key(2)], "the connection used last was lost later");
}

#[tokio::test(start_paused = true)]
async fn incomplete_agent_is_reported_and_repaired() {
    let fleet = table_with(4, 1);
    let heartbeat = |counter: u64, incomplete: bool| {
        let heartbeat = json!({
            "epoch": EPOCH, "sequence": 0, "counter": counter, "waiting": 0, "parked": 0, "agentVersion": "1",
            "incomplete": incomplete, "certificate": {"notAfter": "", "fingerprint": ""}, "watches": [],
        });
        let heartbeat = serde_json::from_value(heartbeat).unwrap();
        fleet.heartbeat(Verified::unchecked(&id(0), EPOCH, 1, heartbeat), 1_700_000_000).unwrap();
    };
    heartbeat(1, false);
    assert!(fleet.incomplete(AFTER).is_empty());
    heartbeat(2, true);
    assert!(fleet.next().now_or_never().is_none(), "a heartbeat alone enqueues nothing");
    assert_eq!(fleet.incomplete(AFTER), [key(0)]);
    time::advance(AFTER).await;
    assert!(fleet.incomplete(AFTER).is_empty(), "no further report");

    heartbeat(3, true);
    assert_eq!(fleet.incomplete(AFTER), [key(0)]);
    heartbeat(4, true);
    assert!(fleet.incomplete(AFTER).is_empty(), "at most once per interval");
    time::advance(AFTER).await;
    assert_eq!(fleet.incomplete(AFTER), [key(0)]);

    heartbeat(5, false);
    heartbeat(6, true);
    assert_eq!(fleet.incomplete(AFTER), [key(0)], "it was complete in between");
    heartbeat(7, false);
    heartbeat(8, true);
    heartbeat(9, false);
    assert!(fleet.incomplete(AFTER).is_empty(), "it is complete again");
    heartbeat(10, true);
    fleet.remove(&key(0));
    assert!(fleet.incomplete(AFTER).is_empty(), "its Kyma is cancellation");
    fleet.place(key(0), "", Some(id(0)), plan("1"));
    fleet.repair(&key(0));
    let job = fleet.next().await;
    assert_eq!((job.queued.work, &job.queued.drift), (WorkSet::INSTALLER, &Drift::All));
}

#[tokio::test(start_paused = true)]
async fn repair_is_needed_until_the_agent_is_back() {
    let fleet = table_with(4, 3);
    (0..2).for_each(|n| drop(send_heartbeat(&fleet, n, 1)));
    time::advance(AFTER * 30).await;
    let suspect_since = time::Instant::now();
    let needing = || (0..3).filter(|n| fleet.needs_repair(&key(*n), suspect_since)).collect::<Vec<_>>();
    assert_eq!(needing(), [0, 1, 2]);
    time::advance(AFTER).await;
    send(&fleet, 0, 1).unwrap();
    assert_eq!(needing(), [1, 2], "a request proves the connection");
    send_heartbeat_of(&fleet, 1, 2, &json!([{"name": "w", "objects": 1, "error": "forbidden"}]));
    assert_eq!(needing(), [1, 2], "a watch fails");
    send_heartbeat(&fleet, 1, 3);
    assert_eq!(needing(), [2]);
    fleet.remove(&key(2));
    assert_eq!(needing(), [] as [u32; 0]);
}

fn send_heartbeat_of(fleet: &RuntimeTable, n: u32, counter: u64, watches: &serde_json::Value) {
    let heartbeat = json!({
        "epoch": EPOCH, "sequence": 1, "counter": counter, "waiting": 0, "parked": 0, "agentVersion": "1", "planRevision": "1",
        "certificate": {"notAfter": "", "fingerprint": ""}, "canary": {"ageSeconds": 1}, "watches": watches,
    });
    let heartbeat = serde_json::from_value(heartbeat).unwrap();
    fleet.heartbeat(Verified::unchecked(&id(n), EPOCH, 1, heartbeat), 1_700_000_000).unwrap();
}
