//! Requests that arrive while the receiver starts.

use tokio::{
    io::DuplexStream,
    sync::{Mutex, mpsc},
};

use super::{idle::Incoming, *};

/// A gateway on connections in memory, so that time advances only while it waits.
struct StartingGateway {
    ca: Ca,
    open: mpsc::Sender<DuplexStream>,
    begun: Instant,
    shutdown: CancellationToken,
    served: JoinHandle<()>,
}

impl StartingGateway {
    fn with(start_gate: StartGate) -> Self {
        let (ca, (open, incoming)) = (ca(unix_now()), mpsc::channel(1));
        let server = ca.make_server(&["kcp.test".try_into().unwrap()], unix_now(), SERVER_VALIDITY).unwrap();
        let tls = ServerIdentity::new(&server.identity().unwrap(), &ca.trust_bundle()).unwrap().config;
        let settings = Settings { authorities: vec!["kcp.test:1".parse().unwrap()], start_gate, ..settings() };
        let service =
            |settings: &Settings| Arc::new(V3Handler::new(settings, RecordingIntake::default(), testing::metrics()));
        let listener = Incoming(Mutex::new(incoming));
        let tls = Arc::new(ArcSwap::new(tls));
        let gateway = Gateway::with_listener(listener, "127.0.0.1:1".parse().unwrap(), settings, tls, service);
        let shutdown = CancellationToken::new();
        let served = tokio::spawn(gateway.run(shutdown.clone()));
        Self { ca, open, begun: Instant::now(), shutdown, served }
    }

    async fn connect(&self, agent: &Agent) -> TlsStream<DuplexStream> {
        let (client, server) = tokio::io::duplex(64 << 10);
        self.open.send(server).await.unwrap();
        let mut config = tls::client(Some(&agent.identity), self.ca.trust_bundle().store().unwrap()).unwrap();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let name = ServerName::try_from("kcp.test").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, client).await.unwrap()
    }

    /// Seconds from the start until a request on a new connection is accepted.
    async fn accepted_after(&self, runtime: &str) -> u64 {
        let agent = Agent::new(&self.ca, runtime, unix_now());
        let (sender, connection) = http1::handshake(TokioIo::new(self.connect(&agent).await)).await.unwrap();
        tokio::spawn(connection);
        let body = agent.batch().to_string();
        let spec =
            RequestSpec { authority: "kcp.test:1", created: unix_now(), ..RequestSpec::events(body.as_bytes(), 1) };
        let (parts, body) = agent.sign(&spec).into_parts();
        let response = Sender::Http1(sender).send(Request::from_parts(parts, Full::from(body))).await.unwrap();
        assert_eq!(response.status(), StatusCode::ACCEPTED);
        self.begun.elapsed().as_secs()
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.served.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn request_waits_for_the_caches_but_not_for_ever() {
    for (synced_after, answered_after) in [(3, 3), (3_600, 12)] {
        let synced = CancellationToken::new();
        let gateway = StartingGateway::with(StartGate::new(synced.clone()));
        tokio::spawn(async move {
            sleep(Duration::from_secs(synced_after)).await;
            synced.cancel();
        });
        for runtime in ["first", "later"] {
            assert_eq!(gateway.accepted_after(runtime).await, answered_after, "{runtime}");
        }
        gateway.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_the_wait() {
    let gateway = StartingGateway::with(StartGate::new(CancellationToken::new()));
    let mut stream = gateway.connect(&Agent::new(&gateway.ca, "r-1", unix_now())).await;
    let begun = gateway.begun;
    let ended = tokio::spawn(async move { stream.read(&mut [0]).await });
    sleep(Duration::from_secs(1)).await;
    gateway.stop().await;
    // The connection ends in order, or is reset with its session ticket unread.
    let _ = ended.await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 1);
}
