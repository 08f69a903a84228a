//! Whose agent may be broken, as its silence or its own word tells.

use super::*;
use crate::queue::Drift;

const AFTER: Duration = Duration::from_secs(5);

#[tokio::test(start_paused = true)]
async fn who_let_go_of_its_connection_and_stays_silent_is_lost_once() {
    let hub = placed(4, 3);
    (0..3).for_each(|n| drop(beat(&hub, n, 1)));
    time::advance(AFTER).await;
    hub.closed(&id(0));
    hub.closed(&id(1));
    hub.closed(&"unknown".parse().unwrap());
    assert!(hub.lost(AFTER).is_empty(), "it may come back at once");
    time::advance(AFTER / 2).await;
    beat(&hub, 1, 2);
    time::advance(AFTER / 2).await;
    assert_eq!(hub.lost(AFTER), [key(0)]);
    assert!(hub.lost(AFTER).is_empty());
    hub.closed(&id(0));
    hub.remove(&key(0));
    time::advance(AFTER).await;
    assert!(hub.lost(AFTER).is_empty(), "its Kyma is gone");
}

#[tokio::test(start_paused = true)]
async fn what_an_agent_misses_of_its_own_is_made_again() {
    let hub = placed(4, 1);
    beat(&hub, 0, 1);
    assert!(hub.next().now_or_never().is_none());
    let heartbeat = json!({
        "epoch": EPOCH, "sequence": 0, "counter": 2, "waiting": 0, "parked": 0, "agentVersion": "1", "incomplete": true,
        "certificate": {"notAfter": "", "fingerprint": ""}, "watches": [],
    });
    hub.heartbeat(&id(0), 1, serde_json::from_value(heartbeat).unwrap(), 1_700_000_000).unwrap();
    let job = hub.next().await;
    assert_eq!((job.wanted.works, &job.wanted.drift), (Works::of(&[Work::Installer]), &Drift::All));
}
