//! Whose agent may be broken, as its silence or its own word tells.

use super::*;

const AFTER: Duration = Duration::from_secs(5);

#[tokio::test(start_paused = true)]
async fn who_let_go_of_its_connection_and_stays_silent_is_lost_once() {
    let hub = placed(4, 3);
    (0..3).for_each(|n| drop(beat(&hub, n, 1)));
    time::advance(AFTER).await;
    let ends = |id| hub.closed(&id, time::Instant::now());
    ends(id(0));
    ends(id(1));
    ends("unknown".parse().unwrap());
    assert!(hub.lost(AFTER).is_empty(), "it may come back at once");
    time::advance(AFTER / 2).await;
    beat(&hub, 1, 2);
    time::advance(AFTER / 2).await;
    assert_eq!(hub.lost(AFTER), [key(0)]);
    assert!(hub.lost(AFTER).is_empty());
    ends(id(0));
    hub.remove(&key(0));
    time::advance(AFTER).await;
    assert!(hub.lost(AFTER).is_empty(), "its Kyma is gone");
}

#[tokio::test(start_paused = true)]
async fn over_whose_connection_nothing_came_is_lost_at_once_unless_it_was_heard_over_another() {
    let hub = placed(4, 3);
    (0..3).for_each(|n| drop(beat(&hub, n, 1)));
    let quiet = time::Instant::now();
    time::advance(AFTER * 9).await;
    beat(&hub, 1, 2);
    hub.closed(&id(2), time::Instant::now());
    (0..3).for_each(|n| hub.closed(&id(n), quiet));
    assert_eq!(hub.lost(AFTER), [key(0)]);
    time::advance(AFTER).await;
    assert_eq!(hub.lost(AFTER), [key(2)], "the one that was used last ended later");
}

#[tokio::test(start_paused = true)]
async fn what_an_agent_misses_of_its_own_is_made_again() {
    let hub = placed(4, 1);
    let beat = |counter: u64, incomplete: bool| {
        let heartbeat = json!({
            "epoch": EPOCH, "sequence": 0, "counter": counter, "waiting": 0, "parked": 0, "agentVersion": "1",
            "incomplete": incomplete, "certificate": {"notAfter": "", "fingerprint": ""}, "watches": [],
        });
        hub.heartbeat(&id(0), 1, serde_json::from_value(heartbeat).unwrap(), 1_700_000_000).unwrap();
    };
    beat(1, false);
    assert!(hub.incomplete(AFTER).is_empty());
    beat(2, true);
    assert!(hub.next().now_or_never().is_none(), "many may say so at once, and some of them are paused");
    assert_eq!(hub.incomplete(AFTER), [key(0)]);
    time::advance(AFTER).await;
    assert!(hub.incomplete(AFTER).is_empty(), "it has not said so again");

    beat(3, true);
    assert_eq!(hub.incomplete(AFTER), [key(0)]);
    beat(4, true);
    assert!(hub.incomplete(AFTER).is_empty(), "a runtime that refuses it is not asked with each heartbeat");
    time::advance(AFTER).await;
    assert_eq!(hub.incomplete(AFTER), [key(0)]);

    beat(5, false);
    beat(6, true);
    assert_eq!(hub.incomplete(AFTER), [key(0)], "it was whole in between");
    beat(7, false);
    beat(8, true);
    beat(9, false);
    assert!(hub.incomplete(AFTER).is_empty(), "it is whole again");
    beat(10, true);
    hub.remove(&key(0));
    assert!(hub.incomplete(AFTER).is_empty(), "its Kyma is gone");
    hub.place(key(0), Some(id(0)), plan("1"));
    hub.repair(&key(0));
    let job = hub.next().await;
    assert_eq!((job.wanted.works, &job.wanted.drift), (Works::INSTALLER, &Drift::All));
}
