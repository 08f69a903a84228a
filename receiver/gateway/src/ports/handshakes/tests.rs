use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use tokio::task::{JoinSet, yield_now};

use super::*;

const CONNECTIONS: usize = 20_000;
const PLACES: usize = 1_024;

fn address(n: u32) -> Network {
    Some(IpAddr::V4(n.into()))
}

fn granted(admission: Admission) -> Option<HandshakePlace> {
    match admission {
        Admission::Granted(place) => Some(place),
        Admission::Waits(_) | Admission::Refused => None,
    }
}

fn is_empty(places: &HandshakePlaces) -> bool {
    let table = places.0.lock();
    (table.free, table.networks.len(), table.starved.len()) == (PLACES, 0, 0)
}

#[test]
fn silent_connections_of_one_address_take_no_place_from_a_hundred_others() {
    let places = HandshakePlaces::new(PLACES);
    let silent: Vec<_> = (0..5_000).map(|_| places.request(address(0), CONNECTIONS)).collect();
    let held = silent.iter().filter(|admission| matches!(admission, Admission::Granted(_))).count();
    assert_eq!(held, PLACES / 2, "alone, an address gets half of the places");
    for round in 0..50 {
        let handshakes: Vec<_> = (1..=100).map(|other| granted(places.request(address(other), CONNECTIONS))).collect();
        assert!(handshakes.iter().all(Option::is_some), "round {round}");
    }
    drop(silent);
    assert!(is_empty(&places));
}

#[test]
fn agents_behind_one_address_wait_in_order_and_all_get_a_place() {
    let places = HandshakePlaces::new(PLACES);
    let mut running = VecDeque::new();
    let mut waiting = VecDeque::new();
    for _ in 0..5_000 {
        match places.request(address(0), CONNECTIONS) {
            Admission::Granted(place) => running.push_back(place),
            Admission::Waits(place) => waiting.push_back(place),
            Admission::Refused => panic!("refused"),
        }
    }
    let mut served = 0;
    while let Some(place) = running.pop_front() {
        drop(place);
        served += 1;
        while let Some(Ok(place)) = waiting.front_mut().map(oneshot::Receiver::try_recv) {
            running.push_back(place);
            waiting.pop_front();
        }
    }
    assert_eq!((served, waiting.len()), (5_000, 0));
    assert!(is_empty(&places));
}

#[test]
fn waiting_connections_of_one_address_leave_connections_to_others() {
    let places = HandshakePlaces::new(PLACES);
    let mut open = 0;
    let mut admitted = Vec::new();
    for _ in 0..100_000 {
        match places.request(address(0), CONNECTIONS - open) {
            Admission::Refused => {}
            admission => {
                open += 1;
                admitted.push(admission);
            }
        }
    }
    assert!((CONNECTIONS / 2..CONNECTIONS * 2 / 3).contains(&open), "{open} connections");
    // Their deadlines pass, and others may wait.
    admitted.retain(|admission| matches!(admission, Admission::Granted(_)));
    assert!(matches!(places.request(address(0), 100), Admission::Waits(_)));
}

#[test]
fn without_a_free_place_each_address_waits_for_any_place() {
    let places = HandshakePlaces::new(PLACES);
    let taken: Vec<_> = (0..).map_while(|n| granted(places.request(address(n), CONNECTIONS))).collect();
    assert_eq!(taken.len(), PLACES);
    let others: Vec<_> = (0..10).map(|n| places.request(address(10_000 + n), CONNECTIONS)).collect();
    drop(taken);
    for other in others {
        let Admission::Waits(mut place) = other else { panic!("it has a place, or was refused") };
        assert!(place.try_recv().is_ok());
    }
    assert!(is_empty(&places));
}

#[test]
fn connections_without_a_known_source_have_no_threshold() {
    let places = HandshakePlaces::new(PLACES);
    let taken: Vec<_> = (0..).map_while(|_| granted(places.request(None, CONNECTIONS))).collect();
    assert_eq!(taken.len(), PLACES);
    drop(taken);
    assert!(is_empty(&places));
}

#[tokio::test(start_paused = true)]
async fn wait_for_a_place_ends_with_the_deadline() {
    let places = HandshakePlaces::new(2);
    let deadline = Duration::from_secs(5);
    let source = Some(IpAddr::from([127, 0, 0, 1]));
    let held = places.acquire(source, CONNECTIONS, deadline).await.ok().unwrap();
    let begun = tokio::time::Instant::now();
    assert_eq!(places.acquire(source, CONNECTIONS, deadline).await.err(), Some(CROWDED));
    assert_eq!(begun.elapsed(), deadline);
    assert_eq!(places.acquire(source, 0, deadline).await.err(), Some(CROWDED), "no connection is left for it");
    let (next, ()) = tokio::join!(places.acquire(source, CONNECTIONS, deadline), async { drop(held) });
    assert!(next.is_ok());
}

#[test]
fn deadline_shrinks_as_slots_fill() {
    let deadline = Duration::from_secs(5);
    for (free, seconds) in [(100, 5), (50, 5), (25, 3), (0, 1)] {
        assert_eq!(adaptive_deadline(deadline, free, 100), Duration::from_secs(seconds), "{free}");
    }
    assert_eq!(adaptive_deadline(deadline, 0, 1), Duration::from_secs(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn polls_run_within_the_permits_and_pending_futures_hold_none() {
    let permits = Arc::new(Semaphore::new(1));
    let running = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    let (release, hold) = tokio::sync::oneshot::channel::<()>();
    tasks.spawn(with_permits(permits.clone(), async move {
        let _ = hold.await;
    }));
    for _ in 0..8 {
        let running = running.clone();
        tasks.spawn(with_permits(permits.clone(), async move {
            for _ in 0..50 {
                assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0, "one step at a time");
                thread::yield_now();
                running.fetch_sub(1, Ordering::SeqCst);
                yield_now().await;
            }
        }));
    }
    for _ in 0..8 {
        tasks.join_next().await.unwrap().unwrap();
    }
    release.send(()).unwrap();
    tasks.join_next().await.unwrap().unwrap();
}
