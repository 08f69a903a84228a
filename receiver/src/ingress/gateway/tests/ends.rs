//! How connections end, over both protocols: nothing is lost, and who is told of it.

use super::*;

impl Bed {
    pub(super) fn ended(&self, reason: &'static str) -> u64 {
        self.metrics.connections_ended.get_or_create(&metrics::Why { reason }).get()
    }

    /// Waits until as many connections have ended for one of these reasons.
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

    /// Asks without waiting, until the connection ends.
    pub(super) async fn flood(&self, agent: &Agent, is_http2: bool) {
        let mut sender = self.open(agent, is_http2).await;
        timeout(PATIENCE, async {
            while sender.is_ready().await {
                let _ = sender.send(self.request(agent, 1, is_http2)).await;
            }
        })
        .await
        .expect("who floods is refused for good");
    }
}

#[tokio::test]
async fn idle_connections_end() {
    for is_http2 in [true, false] {
        let bed = Bed::start(|settings| settings.idle = Duration::from_millis(200)).await;
        let agent = bed.agent("r-1");
        let mut sender = bed.open(&agent, is_http2).await;
        bed.says(&mut sender, &agent, 1).await;
        sender.ends().await;
        bed.until_ended(&["idle"], 1).await;
        assert_eq!(bed.intake.closed(), 0, "we have ended it");
        bed.stop().await;
    }
}

/// Every connection is old enough from the beginning. HTTP/2 tells which requests it takes, and HTTP/1.1 takes all that come before it has
/// told with an answer that it ends.
#[tokio::test]
async fn old_connections_end_and_no_request_is_lost() {
    for is_http2 in [true, false] {
        let bed = Bed::start(|settings| settings.max_age = Duration::ZERO).await;
        let agent = bed.agent("r-1");
        let mut sender = bed.open(&agent, is_http2).await;
        // Long enough for a connection to be ended that is old.
        let other = bed.agent("r-2");
        let mut others = bed.open(&other, false).await;
        bed.says(&mut others, &other, 1).await;
        others.ends().await;
        let answer = sender.send(bed.request(&agent, 1, is_http2)).await;
        if !is_http2 {
            let answer = answer.unwrap();
            assert_eq!(
                (answer.status(), &answer.headers()[header::CONNECTION]),
                (StatusCode::ACCEPTED, &"close".parse().unwrap())
            );
        }
        sender.ends().await;
        bed.until_ended(&["age"], 2).await;
        assert_eq!(bed.intake.closed(), 0, "we have ended them");
        bed.stop().await;
    }
}

#[tokio::test]
async fn who_lets_go_of_its_connection_or_breaks_it_may_be_gone() {
    for is_http2 in [true, false] {
        let bed = Bed::start(|_| {}).await;
        let agent = bed.agent("r-1");
        let mut sender = bed.open(&agent, is_http2).await;
        bed.says(&mut sender, &agent, 1).await;
        drop(sender);
        bed.until_ended(&["peer"], 1).await;
        assert_eq!(bed.intake.closed(), 1);
        bed.stop().await;
    }

    let bed = Bed::start(|_| {}).await;
    let agent = bed.agent("r-1");
    let mut stream = bed.http1(&agent).await;
    stream.write_all(head(&bed.request(&agent, 1, false), "content-length: 100").as_bytes()).await.unwrap();
    let path = metrics::Path { route: "events" };
    timeout(PATIENCE, async {
        while bed.metrics.begun.get_or_create(&path).get() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the request has begun");
    drop(stream);
    bed.until_ended(&["incomplete", "error", "peer"], 1).await;
    assert_eq!(bed.intake.closed(), 1, "in the middle of a request as well");
    bed.stop().await;
}

/// Of a body that nobody will read so much is announced that the connection has to end: this is not the agent's doing.
#[tokio::test]
async fn who_is_refused_over_http1_and_cannot_go_on_has_not_gone() {
    let bed = Bed::start(|settings| settings.max_body = 10_000).await;
    let agent = bed.agent("r-1");
    for (field, status) in
        [("content-length: 9000000", "413"), ("content-length: 20000\r\nexpect: 100-continue", "413")]
    {
        let mut stream = bed.http1(&agent).await;
        stream.write_all(head(&bed.request(&agent, 1, false), field).as_bytes()).await.unwrap();
        let said = rest(stream).await;
        assert!(said.starts_with(&format!("HTTP/1.1 {status} ")) && said.contains("connection: close\r\n"), "{said}");
    }
    bed.until_ended(&["refused"], 2).await;
    assert_eq!(bed.intake.closed(), 0);
    bed.stop().await;
}

/// Whatever ends TCP in between answers probes: only the next heartbeat shows that somebody is there.
#[tokio::test]
async fn over_http1_a_heartbeat_that_does_not_come_is_told_once() {
    let second = Duration::from_secs(1);
    let bed = Bed::start(|settings| {
        (settings.interval, settings.head_deadline) = (crate::fleet::hub::Interval::of(second), second);
    })
    .await;
    let agent = bed.agent("r-1");
    let mut sender = bed.open(&agent, false).await;
    for counter in 1..=2 {
        bed.says(&mut sender, &agent, counter).await;
        timeout(PATIENCE, async {
            while bed.intake.closed() < usize::try_from(counter).unwrap() {
                sleep(Duration::from_millis(10)).await;
            }
        })
        .await
        .expect("it is missed");
    }
    drop(sender);
    bed.until_ended(&["peer"], 1).await;
    assert_eq!(bed.intake.closed(), 2, "once for each rest");
    bed.stop().await;
}

#[tokio::test]
async fn a_second_head_that_is_slow_ends_the_connection() {
    let bed = Bed::start(|settings| settings.head_deadline = Duration::from_secs(1)).await;
    let agent = bed.agent("r-1");
    let mut stream = bed.http1(&agent).await;
    let (parts, body) = bed.request(&agent, 1, false).into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let whole = head(&Request::from_parts(parts, Full::default()), &format!("content-length: {}", body.len()));
    stream.write_all(&[whole.as_bytes(), &body].concat()).await.unwrap();
    let mut answer = [0; 13];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 202 ");
    stream.write_all(b"POST /v3/events HTTP/1.1\r\nhost: ").await.unwrap();
    rest(stream).await;
    bed.until_ended(&["timeout"], 1).await;
    assert_eq!(bed.intake.count(), 1);
    bed.stop().await;
}
