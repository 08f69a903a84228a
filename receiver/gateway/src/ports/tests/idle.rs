//! A port without connections sets no timer.

use std::io;

use tokio::{
    io::DuplexStream,
    sync::{Mutex, mpsc},
};

use super::*;

/// Listener whose connections a test opens.
pub(super) struct Incoming(pub(super) Mutex<mpsc::Receiver<DuplexStream>>);

impl Listen for Incoming {
    type Stream = DuplexStream;

    async fn next(&self) -> io::Result<DuplexStream> {
        match self.0.lock().await.recv().await {
            Some(stream) => Ok(stream),
            None => std::future::pending().await,
        }
    }
}

/// Parks of the thread during a sleep of an hour, which the levels of the timer wheel divide.
const SLEEP: u64 = 20;

/// Time advances to the next timer whenever nothing else runs, so each other timer shows as a park of the thread.
#[tokio::test(start_paused = true)]
async fn port_without_connections_does_not_wake() {
    let (open, incoming) = mpsc::channel(1);
    let ca = ca(unix_now());
    let server = ca.make_server(&["kcp.test".try_into().unwrap()], unix_now(), SERVER_VALIDITY).unwrap();
    let tls = ServerIdentity::new(&server.identity().unwrap(), &ca.trust_bundle()).unwrap().config;
    let metrics = testing::metrics();
    let port = metrics.port.clone();
    let service = |settings: &Settings| Arc::new(V3Handler::new(settings, RecordingIntake::default(), metrics));
    let listener = Incoming(Mutex::new(incoming));
    let tls = Arc::new(ArcSwap::new(tls));
    let gateway = Gateway::with_listener(listener, "127.0.0.1:1".parse().unwrap(), settings(), tls, service);
    let shutdown = CancellationToken::new();
    let served = tokio::spawn(gateway.run(shutdown.clone()));
    let executor = tokio::runtime::Handle::current().metrics();
    let hour = async || {
        let before = executor.worker_park_count(0);
        sleep(Duration::from_secs(3_600)).await;
        executor.worker_park_count(0) - before
    };
    hour().await;
    assert!(hour().await <= SLEEP, "nothing but the hour of this test wakes the thread");

    let (client, server) = tokio::io::duplex(1 << 10);
    open.send(server).await.unwrap();
    assert!(hour().await > SLEEP, "with a connection the lag is measured");
    drop(client);
    while port.connections.get() > 0 {
        sleep(LAG_INTERVAL).await;
    }
    hour().await;
    assert!(hour().await <= SLEEP, "the last connection has ended");
    shutdown.cancel();
    served.await.unwrap();
}
