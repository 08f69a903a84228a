//! Ends of connections over both protocols: no request is lost, and losses are reported.

use super::*;

impl TestGateway {
    pub(super) fn ended(&self, reason: &'static str) -> u64 {
        self.metrics.connections_ended.get_or_create(&metrics::ReasonLabel { reason }).get()
    }

    /// Waits until this many connections have ended for one of these reasons.
    pub(super) async fn until_ended(&self, reasons: &[&'static str], count: u64) {
        let ended = || reasons.iter().map(|reason| self.ended(reason)).sum::<u64>();
        timeout(PATIENCE, async {
            while ended() < count {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap_or_else(|_| panic!("{reasons:?}"));
    }

    /// Sends requests without pause until the connection ends.
    pub(super) async fn flood(&self, agent: &Agent, is_http2: bool) {
        let mut sender = self.open(agent, is_http2).await;
        timeout(PATIENCE, async {
            while sender.is_ready().await {
                let _ = sender.send(self.request(agent, 1, is_http2)).await;
            }
        })
        .await
        .expect("a flooding client is disconnected");
    }
}

#[tokio::test]
async fn idle_connection_is_closed() {
    for is_http2 in [true, false] {
        let gateway = TestGateway::start(|settings| settings.idle = Duration::from_millis(200)).await;
        let agent = gateway.agent("r-1");
        let mut sender = gateway.open(&agent, is_http2).await;
        gateway.send_accepted(&mut sender, &agent, 1).await;
        sender.ends().await;
        gateway.until_ended(&["idle"], 1).await;
        assert_eq!(gateway.intake.lost_connections(), 0, "the receiver closed it");
        gateway.stop().await;
    }
}

/// Every connection is past its maximum age from the beginning. HTTP/2 states which requests are served; HTTP/1.1
/// serves all requests until a response announces the end.
#[tokio::test]
async fn connection_past_its_maximum_age_is_closed_without_losing_a_request() {
    for is_http2 in [true, false] {
        let gateway = TestGateway::start(|settings| settings.max_age = Duration::ZERO).await;
        let agent = gateway.agent("r-1");
        let mut sender = gateway.open(&agent, is_http2).await;
        // Takes long enough for a connection past its age to be closed.
        let other = gateway.agent("r-2");
        let mut others = gateway.open(&other, false).await;
        gateway.send_accepted(&mut others, &other, 1).await;
        others.ends().await;
        let response = sender.send(gateway.request(&agent, 1, is_http2)).await;
        if !is_http2 {
            let response = response.unwrap();
            assert_eq!(
                (response.status(), &response.headers()[header::CONNECTION]),
                (StatusCode::ACCEPTED, &"close".parse().unwrap())
            );
        }
        sender.ends().await;
        gateway.until_ended(&["age"], 2).await;
        assert_eq!(gateway.intake.lost_connections(), 0, "the receiver closed them");
        gateway.stop().await;
    }
}

#[tokio::test]
async fn connection_closed_or_broken_by_the_agent_is_reported_as_lost() {
    for is_http2 in [true, false] {
        let gateway = TestGateway::start(|_| {}).await;
        let agent = gateway.agent("r-1");
        let mut sender = gateway.open(&agent, is_http2).await;
        gateway.send_accepted(&mut sender, &agent, 1).await;
        drop(sender);
        gateway.until_ended(&["peer"], 1).await;
        assert_eq!(gateway.intake.lost_connections(), 1);
        gateway.stop().await;
    }

    let gateway = TestGateway::start(|_| {}).await;
    let agent = gateway.agent("r-1");
    let mut stream = gateway.http1(&agent).await;
    stream.write_all(head(&gateway.request(&agent, 1, false), "content-length: 100").as_bytes()).await.unwrap();
    let path = metrics::RouteLabel { route: "events" };
    timeout(PATIENCE, async {
        while gateway.metrics.begun.get_or_create(&path).get() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the request has begun");
    drop(stream);
    gateway.until_ended(&["incomplete", "error", "peer"], 1).await;
    assert_eq!(gateway.intake.lost_connections(), 1, "in the middle of a request as well");
    gateway.stop().await;
}

/// The announced body is too long to discard, so the receiver has to close the connection; the agent did not.
#[tokio::test]
async fn connection_closed_after_a_refusal_is_not_reported_as_lost() {
    let gateway = TestGateway::start(|settings| settings.max_body = 10_000).await;
    let agent = gateway.agent("r-1");
    for (field, status) in
        [("content-length: 9000000", "413"), ("content-length: 20000\r\nexpect: 100-continue", "413")]
    {
        let mut stream = gateway.http1(&agent).await;
        stream.write_all(head(&gateway.request(&agent, 1, false), field).as_bytes()).await.unwrap();
        let received = rest(stream).await;
        assert!(
            received.starts_with(&format!("HTTP/1.1 {status} ")) && received.contains("connection: close\r\n"),
            "{received}"
        );
    }
    gateway.until_ended(&["refused"], 2).await;
    assert_eq!(gateway.intake.lost_connections(), 0);
    gateway.stop().await;
}

/// A load balancer that terminates TCP answers keepalive probes: only the next heartbeat proves that the agent is
/// alive.
#[tokio::test]
async fn over_http1_a_missed_heartbeat_is_reported_once() {
    let second = Duration::from_secs(1);
    let gateway = TestGateway::start(|settings| {
        (settings.heartbeat_interval, settings.head_deadline) =
            (tidewatch_fleet::table::HeartbeatInterval::new(second), second);
    })
    .await;
    let agent = gateway.agent("r-1");
    let mut sender = gateway.open(&agent, false).await;
    for counter in 1..=2 {
        gateway.send_accepted(&mut sender, &agent, counter).await;
        timeout(PATIENCE, async {
            while gateway.intake.lost_connections() < usize::try_from(counter).unwrap() {
                sleep(Duration::from_millis(10)).await;
            }
        })
        .await
        .expect("the missed heartbeat is reported");
    }
    drop(sender);
    gateway.until_ended(&["peer"], 1).await;
    assert_eq!(gateway.intake.lost_connections(), 2, "once for each pause between requests");
    gateway.stop().await;
}

#[tokio::test]
async fn slow_second_head_ends_the_connection() {
    let gateway = TestGateway::start(|settings| settings.head_deadline = Duration::from_secs(1)).await;
    let agent = gateway.agent("r-1");
    let mut stream = gateway.http1(&agent).await;
    let (parts, body) = gateway.request(&agent, 1, false).into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let whole = head(&Request::from_parts(parts, Full::default()), &format!("content-length: {}", body.len()));
    stream.write_all(&[whole.as_bytes(), &body].concat()).await.unwrap();
    let mut response = [0; 13];
    stream.read_exact(&mut response).await.unwrap();
    assert_eq!(&response, b"HTTP/1.1 202 ");
    stream.write_all(b"POST /v3/events HTTP/1.1\r\nhost: ").await.unwrap();
    rest(stream).await;
    gateway.until_ended(&["timeout"], 1).await;
    assert_eq!(gateway.intake.count(), 1);
    gateway.stop().await;
}
