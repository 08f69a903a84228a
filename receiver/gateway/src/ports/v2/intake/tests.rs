use std::{future::poll_fn, pin::Pin};

use futures::{FutureExt as _, future::join_all};
use serde_json::json;
use tidewatch_api::plan::Plan;
use tidewatch_fleet::{
    forward::{Routes, Service},
    table,
};
use tidewatch_kit::metrics::Registry;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use super::*;
use crate::enrolment::tests::testing::certificate;

fn target(manager: &str, port: u16) -> Target {
    Target::new(manager, Service::new("s", "n", port).unwrap()).unwrap()
}

/// An adapter with other managers on these loopback ports.
fn adapter(managers: &[(&str, u16)]) -> V2Adapter {
    let metrics = table::Metrics::register(&mut Registry::default());
    let fleet = RuntimeTable::alone(1, table::Settings::default(), metrics);
    let routes: Routes =
        managers.iter().map(|(manager, port)| ((*manager).to_owned(), target(manager, *port))).collect();
    fleet.set_routes(routes);
    let watch = |manager: &str| json!({"name": manager, "version": "v1", "resource": "things", "field": "spec", "manager": manager, "work": ["forward"]});
    let watches: Vec<_> = managers.iter().map(|(manager, _)| watch(manager)).collect();
    let plan = Plan::parse(&json!({"revision": "1", "watches": watches}).to_string()).unwrap();
    let client = forward::Client::new("http://127.0.0.1:{port}".parse().unwrap());
    V2Adapter::new(fleet, Plans::fixed(plan), V2AllowList::default(), client)
}

fn caller(runtime: &str) -> RuntimeCertificate {
    certificate(runtime, "")
}

fn event() -> Event {
    Event::parse(b"{}").unwrap()
}

/// Serves one connection after the other and accepts each event.
async fn accept_all(listener: TcpListener) {
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        while !request.ends_with(event().to_body().as_bytes()) {
            assert!(stream.read_buf(&mut request).await.unwrap() > 0);
        }
        let response = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        stream.write_all(response).await.unwrap();
    }
}

#[tokio::test]
async fn hung_manager_blocks_only_its_own_slots_and_no_runtime_takes_them_all() {
    let [hung, well] =
        [TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap()];
    let adapter = adapter(&[("hung", hung.local_addr().unwrap().port()), ("well", well.local_addr().unwrap().port())]);
    let well = tokio::spawn(accept_all(well));
    let callers = ["r-1", "r-2", "r-3"].map(caller);
    let take = |n: usize, manager| adapter.take(manager, &callers[n], event());
    let mut waiting: Vec<Pin<Box<_>>> = (0..MAX_FORWARDS).map(|n| Box::pin(take(n % 2, "hung"))).collect();
    poll_fn(|context| {
        assert!(
            waiting.iter_mut().all(|pending| pending.as_mut().poll(context).is_pending()),
            "each waits for a response"
        );
        std::task::Poll::Ready(())
    })
    .await;
    assert_eq!(take(2, "hung").now_or_never(), Some(Err(Refusal::ManagerUnreachable)), "it does not wait for a slot");
    assert_eq!(join_all([take(0, "well"), take(2, "well")]).await, [Ok(()), Ok(())]);
    assert_eq!(take(0, OWN_MANAGER).await, Err(PlacementError::NotSynced.into()));

    // Ends every second forward, all of one runtime.
    let mut n = 0;
    waiting.retain(|_| {
        n += 1;
        n % 2 == 0
    });
    assert_eq!(
        take(1, "hung").now_or_never(),
        Some(Err(Refusal::ManagerUnreachable)),
        "the runtime has used its share"
    );
    let free = adapter.forwards.acquire(&adapter.fleet.target_of("hung").unwrap(), &callers[2].runtime);
    assert!(free.is_some());
    drop((free, waiting));
    assert!(adapter.forwards.lock().is_empty());
    well.abort();
}

#[tokio::test]
async fn manager_may_be_unknown_only_while_the_receiver_starts() {
    let adapter = adapter(&[("other", 1)]);
    let runtime = &caller("r-1").runtime;
    assert!(adapter.is_manager(OWN_MANAGER) && adapter.is_manager("other") && !adapter.is_manager("nobody"));
    assert!(adapter.is_starting(runtime));
    adapter.fleet.set_synced();
    assert!(!adapter.is_starting(runtime));
}
