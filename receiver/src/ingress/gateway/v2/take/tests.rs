use std::{future::poll_fn, pin::Pin};

use arc_swap::ArcSwap;
use futures::{FutureExt as _, future::join_all};
use serde_json::json;
use tidewatch_shared::{identity::Instance, metrics::Registry, plan::Plan};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    time::Instant,
};

use super::*;
use crate::fleet::{
    forward::{Routes, Service},
    hub,
};

fn target(manager: &str, port: u16) -> Target {
    Target::new(manager, Service::new("s", "n", port).unwrap()).unwrap()
}

/// With other managers that listen on these ports of the loopback.
fn legacy(managers: &[(&str, u16)]) -> Legacy {
    let metrics = hub::Metrics::register(&mut Registry::default());
    let hub = Hub::new(Instance::new(1), hub::Settings::default(), metrics, Instant::now());
    let routes: Routes =
        managers.iter().map(|(manager, port)| ((*manager).to_owned(), target(manager, *port))).collect();
    hub.set_routes(routes);
    let watch = |manager: &str| json!({"name": manager, "version": "v1", "resource": "things", "field": "spec", "manager": manager, "work": ["forward"]});
    let watches: Vec<_> = managers.iter().map(|(manager, _)| watch(manager)).collect();
    let plan = Plan::parse(&json!({"revision": "1", "watches": watches}).to_string()).unwrap();
    let client = forward::Client::new("http://127.0.0.1:{port}".parse().unwrap());
    Legacy::new(hub, Arc::new(ArcSwap::from_pointee(plan)), Allowed::default(), client)
}

fn caller(runtime: &str) -> Caller {
    let (leaf, fingerprint) = (vec![0].into(), String::new());
    Caller { runtime: runtime.parse().unwrap(), leaf, fingerprint, not_before: 0, not_after: i64::MAX }
}

fn event() -> Event {
    Event::parse(b"{}").unwrap()
}

/// Takes whatever it is told, one connection after the other.
async fn take_all(listener: TcpListener) {
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut said = Vec::new();
        while !said.ends_with(event().to_body().as_bytes()) {
            assert!(stream.read_buf(&mut said).await.unwrap() > 0);
        }
        let answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        stream.write_all(answer).await.unwrap();
    }
}

#[tokio::test]
async fn who_hangs_holds_its_own_places_and_no_runtime_holds_them_all() {
    let [hung, well] =
        [TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap()];
    let legacy = legacy(&[("hung", hung.local_addr().unwrap().port()), ("well", well.local_addr().unwrap().port())]);
    let well = tokio::spawn(take_all(well));
    let callers = ["r-1", "r-2", "r-3"].map(caller);
    let tell = |n: usize, manager| legacy.take(manager, &callers[n], event());
    let mut waiting: Vec<Pin<Box<_>>> = (0..PASSING).map(|n| Box::pin(tell(n % 2, "hung"))).collect();
    poll_fn(|context| {
        assert!(waiting.iter_mut().all(|told| told.as_mut().poll(context).is_pending()), "each waits for a word");
        std::task::Poll::Ready(())
    })
    .await;
    assert_eq!(tell(2, "hung").now_or_never(), Some(Err(NotTaken::Unreachable)), "it waits for nobody");
    assert_eq!(join_all([tell(0, "well"), tell(2, "well")]).await, [Ok(()), Ok(())]);
    assert_eq!(tell(0, OWN_MANAGER).await, Err(NotTaken::NotSynced));

    // Half of them end, those of one runtime.
    let mut n = 0;
    waiting.retain(|_| {
        n += 1;
        n % 2 == 0
    });
    assert_eq!(tell(1, "hung").now_or_never(), Some(Err(NotTaken::Unreachable)), "it has its share");
    let free = legacy.passing.enter(&legacy.hub.target_of("hung").unwrap(), &callers[2].runtime);
    assert!(free.is_some());
    drop((free, waiting));
    assert!(legacy.passing.lock().is_empty());
    well.abort();
}

#[tokio::test]
async fn who_is_starting_knows_no_manager_for_certain() {
    let legacy = legacy(&[("other", 1)]);
    let runtime = &caller("r-1").runtime;
    assert!(legacy.is_manager(OWN_MANAGER) && legacy.is_manager("other") && !legacy.is_manager("nobody"));
    assert!(legacy.is_starting(runtime));
    legacy.hub.set_synced();
    assert!(!legacy.is_starting(runtime));
}
