//! The handler's checks, in memory.

mod refusals;
mod renewals;

use std::{convert::Infallible, pin::pin, sync::LazyLock, time::Duration};

use http::{HeaderName, Method, Request, header};
use http_body_util::BodyExt;
use proptest::prelude::*;
use serde_json::{Value, json};
use tidewatch_contract::{
    event::MAX_EVENTS,
    signature::{CONTENT_DIGEST, SIGNATURE, SIGNATURE_INPUT},
};
use tidewatch_fleet::table::PlacementError;
use tidewatch_trust::Ca;
use tokio::time::timeout;

use super::*;
use crate::ports::{
    Limits,
    tests::testing::{
        AUTHORITY, Agent, EPOCH, Edit, NOW, RecordingIntake, RequestSpec, at, ca, heartbeat, metrics, peer, settings,
    },
};

struct Fixture {
    handler: V3Handler<RecordingIntake>,
    intake: RecordingIntake,
    ca: Ca,
    agent: Agent,
}

impl Fixture {
    fn new() -> Self {
        Self::with(RecordingIntake::default(), settings())
    }

    fn with(intake: RecordingIntake, settings: Settings) -> Self {
        let ca = ca(NOW);
        let agent = Agent::new(&ca, "r-1", NOW);
        Self { handler: V3Handler::new(&settings, intake.clone(), metrics()), intake, ca, agent }
    }

    fn peer(&self) -> Peer {
        peer(&self.handler, &self.agent)
    }

    /// Processes a request at a time in Unix seconds.
    fn process(&self, request: Request<Vec<u8>>, agent: &Agent, now: i64) -> Result<HttpResponse, Refusal> {
        let peer = peer(&self.handler, agent);
        let (parts, body) = request.into_parts();
        let sender = self.handler.authenticate(&parts, &peer, at(now))?;
        let admitted = self.handler.admit(&parts, &sender.certificate, at(now))?;
        match self.handler.process_body(&admitted, &body, at(now))? {
            Processed::Response(response) => Ok(response),
            Processed::Renewal(..) => panic!("no request here is a renewal"),
        }
    }

    fn send(&self, spec: &RequestSpec<'_>) -> Result<HttpResponse, Refusal> {
        self.process(self.agent.sign(spec), &self.agent, NOW)
    }

    fn edited(&self, edit: Edit) -> Refusal {
        let body = self.agent.batch().to_string();
        let (mut parts, body) = self.agent.sign(&RequestSpec::events(body.as_bytes(), 1)).into_parts();
        edit.apply(&mut parts);
        self.process(Request::from_parts(parts, body), &self.agent, NOW).err().unwrap()
    }
}

async fn read(response: HttpResponse) -> (u16, Value) {
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap())
}

#[tokio::test]
async fn valid_signed_requests_reach_the_intake() {
    let fixture = Fixture::new();
    let batch = fixture.agent.batch().to_string();
    let heartbeat = heartbeat().to_string();
    let (status, response) = read(fixture.send(&RequestSpec::events(batch.as_bytes(), 1)).unwrap()).await;
    assert_eq!((status, &response["accepted"]), (202, &json!(1)));
    let (status, response) = read(fixture.send(&RequestSpec::heartbeat(heartbeat.as_bytes(), 2)).unwrap()).await;
    assert_eq!((status, &response["heartbeatSeconds"]), (200, &json!(30)));
    assert_eq!(*fixture.intake.received.lock(), [("r-1".to_owned(), 1), ("r-1".to_owned(), 0)]);
}

/// Over HTTP/2 a client can reset the stream of a request, or get a 413, and continue with the next request.
#[tokio::test(start_paused = true)]
async fn received_body_bytes_are_charged_however_the_body_ends() {
    use futures::{StreamExt, TryStreamExt, stream};
    use http_body::Frame;
    use http_body_util::StreamBody;

    const HALF: Bytes = Bytes::from_static(&[b' '; 1 << 19]);
    let never = || stream::iter([HALF]).chain(stream::pending()).map(Ok::<_, Infallible>).boxed();
    let broken = || stream::iter([Ok(HALF), Err(std::io::ErrorKind::ConnectionReset)]).boxed();
    let endless = || stream::repeat(HALF).map(Ok::<_, Infallible>).boxed();

    async fn costs<E: Send + 'static>(
        body: impl Fn() -> stream::BoxStream<'static, Result<Bytes, E>>,
        expected: Option<Refusal>,
    ) {
        let limits = Limits { per_second: 1, burst: 1_000, bytes_per_request: (1 << 19) / 600, ..Limits::default() };
        let fixture = Fixture::with(RecordingIntake::default(), Settings { limits, ..settings() });
        let sender = fixture.handler.authenticate(&parts(&fixture, 1), &fixture.peer(), at(NOW)).unwrap();
        // One or two of these bodies exhaust the burst.
        for counter in 1..=3 {
            let parts = parts(&fixture, counter);
            let body = pin!(StreamBody::new(body().map_ok(Frame::data)));
            let processing = fixture.handler.process(&parts, body, &sender, at(NOW));
            // The timeout drops the request before its deadline, like a reset of the stream.
            match timeout(Duration::from_millis(10), processing).await.ok().and_then(Result::err) {
                Some(Refusal::Rate(_)) => {
                    assert!(counter > 1);
                    return;
                }
                other => assert_eq!(other, expected),
            }
        }
        panic!("{expected:?} costs nothing");
    }
    fn parts(fixture: &Fixture, counter: u64) -> Parts {
        fixture.agent.sign(&RequestSpec::events(b"[]", counter)).into_parts().0
    }
    costs(never, None).await;
    costs(broken, Some(Refusal::BodyAborted)).await;
    costs(endless, Some(Refusal::TooLarge(1 << 20))).await;
}

/// Thirty-two runtimes fill every byte that they may hold; the requests of all others are served.
#[tokio::test(start_paused = true)]
async fn bodies_held_back_leave_room_for_other_runtimes() {
    use futures::{FutureExt, StreamExt, stream};
    use http_body::Frame;
    use http_body_util::StreamBody;

    const MIB: Bytes = Bytes::from_static(&[b' '; 1 << 20]);
    let fixture = Fixture::new();
    let hostile: Vec<_> = (0..32).map(|n| Agent::new(&fixture.ca, &format!("hostile-{n}"), NOW)).collect();
    let requests: Vec<_> = (0..32 * 4)
        .map(|n| {
            let agent = &hostile[n / 4];
            let parts = agent.sign(&RequestSpec::events(b"[]", n as u64)).into_parts().0;
            let peer = peer(&fixture.handler, agent);
            let sender = fixture.handler.authenticate(&parts, &peer, at(NOW)).unwrap();
            (parts, sender)
        })
        .collect();
    let mut held = Vec::new();
    for (parts, sender) in &requests {
        let frames = stream::iter([MIB]).chain(stream::pending()).map(|data| Ok::<_, Infallible>(Frame::data(data)));
        let mut body = Box::pin(StreamBody::new(frames));
        let handler = &fixture.handler;
        let mut processing = Box::pin(async move { handler.process(parts, body.as_mut(), sender, at(NOW)).await });
        match (&mut processing).now_or_never() {
            Some(refused) => assert_eq!(refused.err(), Some(Refusal::Concurrency)),
            None => held.push(processing),
        }
    }
    assert_eq!(held.len(), 32, "one large body of each runtime");
    let batch = fixture.agent.batch().to_string().into_bytes();
    let (parts, body) = fixture.agent.sign(&RequestSpec::events(&batch, 1)).into_parts();
    let body = pin!(http_body_util::Full::from(body));
    let sender = fixture.handler.authenticate(&parts, &fixture.peer(), at(NOW)).unwrap();
    let served = fixture.handler.process(&parts, body, &sender, at(NOW)).await;
    // Its signature is of another time than the wall clock's.
    assert!(!matches!(served.err(), Some(Refusal::Busy | Refusal::Concurrency)));
}

#[test]
fn invalid_heads_are_refused() {
    let fixture = Fixture::new();
    let profile = Refusal::Signature(signature::VerifyError::Profile);
    let named = HeaderName::from_static;
    for (edit, refusal) in [
        (Edit::Path("/v3/other"), Refusal::Route),
        (Edit::Path("/v3/events/"), Refusal::Route),
        (Edit::Path("/v3//events"), Refusal::Route),
        (Edit::Method(Method::GET), Refusal::Method),
        (Edit::Method(Method::PUT), Refusal::Method),
        (Edit::Path("/v3/events?x=1"), Refusal::Query),
        (Edit::Path("/v3/events?"), Refusal::Query),
        (Edit::Set(header::CONTENT_ENCODING, "identity"), Refusal::Encoding),
        (Edit::Set(header::TRANSFER_ENCODING, "chunked"), Refusal::TransferEncoding),
        (Edit::Remove(header::HOST), Refusal::Host),
        (Edit::Add(header::HOST, AUTHORITY), Refusal::Host),
        (Edit::Path("https://other.test:8443/v3/events"), Refusal::Host),
        (Edit::Set(header::HOST, "other.test:8443"), Refusal::Authority),
        (Edit::Remove(header::CONTENT_TYPE), Refusal::ContentType),
        (Edit::Set(header::CONTENT_TYPE, "application/json"), Refusal::ContentType),
        (Edit::Add(header::CONTENT_TYPE, "text/plain"), Refusal::ContentType),
        (Edit::Path("/v3/heartbeat"), Refusal::ContentType),
        (Edit::Set(header::CONTENT_LENGTH, "1048577"), Refusal::TooLarge(1 << 20)),
        (Edit::Remove(named(CONTENT_DIGEST)), profile),
        (Edit::Remove(named(SIGNATURE)), profile),
        (Edit::Remove(named(SIGNATURE_INPUT)), profile),
        (Edit::Add(named(SIGNATURE), "tidewatch=:AA==:"), profile),
        (Edit::Add(named(SIGNATURE_INPUT), "x=()"), profile),
        (Edit::Add(named(CONTENT_DIGEST), "sha-256=:AA==:"), profile),
    ] {
        assert_eq!(fixture.edited(edit), refusal);
    }
    assert_eq!(fixture.intake.count(), 0);
}

#[test]
fn request_that_differs_from_its_signature_is_refused() {
    let fixture = Fixture::new();
    let body = fixture.agent.batch().to_string();
    let spec = RequestSpec::events(body.as_bytes(), 1);
    let (parts, mut tampered) = fixture.agent.sign(&spec).into_parts();
    tampered[0] = b' ';
    let refused = |request, agent| fixture.process(request, agent, NOW).err().unwrap();
    use signature::VerifyError as S;
    assert_eq!(refused(Request::from_parts(parts, tampered), &fixture.agent), Refusal::Signature(S::Digest));

    let (mut parts, body_of_heartbeat) =
        fixture.agent.sign(&RequestSpec { path: "/v3/heartbeat", ..spec }).into_parts();
    parts.uri = "/v3/events".parse().unwrap();
    let moved = Request::from_parts(parts, body_of_heartbeat);
    assert_eq!(refused(moved, &fixture.agent), Refusal::Signature(S::Signature));

    let other = Agent::new(&fixture.ca, "r-2", NOW);
    assert_eq!(refused(fixture.agent.sign(&spec), &other), Refusal::Signature(S::KeyId));
    for created in [NOW - 61, NOW + 61] {
        assert_eq!(
            refused(fixture.agent.sign(&RequestSpec { created, ..spec }), &fixture.agent),
            Refusal::Signature(S::Clock)
        );
    }
    assert_eq!(fixture.intake.count(), 0);
}

#[test]
fn replayed_request_is_refused() {
    let fixture = Fixture::new();
    let body = fixture.agent.batch().to_string();
    assert!(fixture.send(&RequestSpec::events(body.as_bytes(), 1)).is_ok());
    assert_eq!(fixture.send(&RequestSpec::events(body.as_bytes(), 1)).err(), Some(Refusal::Replay));
    assert!(fixture.send(&RequestSpec::events(body.as_bytes(), 2)).is_ok());
    assert_eq!(fixture.intake.count(), 2);
}

#[test]
fn events_of_another_runtime_or_epoch_are_refused() {
    let fixture = Fixture::new();
    let other = Agent::new(&fixture.ca, "r-2", NOW);
    let foreign = other.batch().to_string();
    assert_eq!(fixture.send(&RequestSpec::events(foreign.as_bytes(), 1)).err(), Some(Refusal::Source));
    let mut mixed = fixture.agent.batch();
    mixed.as_array_mut().unwrap().push(other.batch()[0].clone());
    assert_eq!(fixture.send(&RequestSpec::events(mixed.to_string().as_bytes(), 2)).err(), Some(Refusal::Source));
    let mut epoch = fixture.agent.batch();
    epoch[0]["id"] = json!("00000000000000ff-1");
    assert_eq!(fixture.send(&RequestSpec::events(epoch.to_string().as_bytes(), 3)).err(), Some(Refusal::Source));
    let mut heartbeat_body = heartbeat();
    heartbeat_body["epoch"] = json!("00000000000000ff");
    assert_eq!(
        fixture.send(&RequestSpec::heartbeat(heartbeat_body.to_string().as_bytes(), 4)).err(),
        Some(Refusal::Source)
    );
    assert_eq!(fixture.intake.count(), 0);
}

#[test]
fn invalid_bodies_are_refused_as_a_whole() {
    let fixture = Fixture::new();
    let mut many = fixture.agent.batch();
    let one = json!({"id": format!("{EPOCH}-1")});
    many.as_array_mut().unwrap().extend(std::iter::repeat_n(one, MAX_EVENTS));
    let cases = [
        ("[]".to_owned(), Refusal::Malformed),
        ("{".to_owned(), Refusal::Malformed),
        ("[{}]".to_owned(), Refusal::Malformed),
        (many.to_string(), Refusal::TooManyEvents(MAX_EVENTS)),
    ];
    for (counter, (body, refusal)) in (1..).zip(cases) {
        assert_eq!(fixture.send(&RequestSpec::events(body.as_bytes(), counter)).err(), Some(refusal));
    }
    let mut heartbeat_body = heartbeat();
    let watch = json!({"name": "kyma", "objects": 1});
    heartbeat_body["watches"] = Value::Array(vec![watch; tidewatch_contract::heartbeat::MAX_WATCHES + 1]);
    for (counter, body) in (10..).zip(["{}".to_owned(), heartbeat_body.to_string()]) {
        assert_eq!(fixture.send(&RequestSpec::heartbeat(body.as_bytes(), counter)).err(), Some(Refusal::Malformed));
    }
    assert_eq!(fixture.intake.count(), 0);
}

#[test]
fn certificate_is_checked_at_every_request() {
    let fixture = Fixture::new();
    let body = fixture.agent.batch().to_string();
    for (now, refusal) in [(NOW + 86_401, Refusal::Certificate), (NOW - 601, Refusal::Certificate)] {
        let request = fixture.agent.sign(&RequestSpec { created: now, ..RequestSpec::events(body.as_bytes(), 1) });
        let refused = fixture.process(request, &fixture.agent, now).err().unwrap();
        assert_eq!((refused, refused.problem().closes), (refusal, true));
    }
    let stranger =
        fixture.ca.make_runtime(&fixture.agent.runtime, &"other".parse().unwrap(), NOW, Duration::from_secs(60));
    let stranger = Agent::with(stranger.unwrap().identity().unwrap(), fixture.agent.runtime.clone());
    let request = stranger.sign(&RequestSpec::events(body.as_bytes(), 1));
    assert_eq!(fixture.process(request, &stranger, NOW).err(), Some(Refusal::Identity));
}

#[test]
fn rate_limit_applies_before_the_signature_is_verified() {
    let limits = Limits { per_second: 1, burst: 2, ..Limits::default() };
    let fixture = Fixture::with(RecordingIntake::default(), Settings { limits, ..settings() });
    let body = fixture.agent.batch().to_string();
    assert_eq!(
        fixture.edited(Edit::Set(HeaderName::from_static(SIGNATURE), "x")),
        Refusal::Signature(signature::VerifyError::Profile)
    );
    assert!(fixture.send(&RequestSpec::events(body.as_bytes(), 1)).is_ok());
    let limited = fixture.edited(Edit::Set(HeaderName::from_static(SIGNATURE), "x"));
    assert!(matches!(limited, Refusal::Rate(_)), "{limited:?}");
    let other = Agent::new(&fixture.ca, "r-2", NOW);
    let body = other.batch().to_string();
    let now = NOW;
    assert!(fixture.process(other.sign(&RequestSpec::events(body.as_bytes(), 1)), &other, now).is_ok());
}

proptest! {
    /// Arbitrary signature fields and bodies are refused, without a panic.
    #[test]
    fn request_with_an_invalid_signature_is_never_accepted(field in 0..3usize, value in "[ -~]{0,80}", cut in 0..400usize, body in any::<Vec<u8>>()) {
        static FIXTURE: LazyLock<Fixture> = LazyLock::new(|| {
            let limits = Limits { per_second: 1_000_000, burst: 1_000_000, ..Limits::default() };
            Fixture::with(RecordingIntake::default(), Settings { limits, ..settings() })
        });
        let good = FIXTURE.agent.batch().to_string();
        let (mut parts, good) = FIXTURE.agent.sign(&RequestSpec::events(good.as_bytes(), 1)).into_parts();
        prop_assume!(body != good);
        let name = [CONTENT_DIGEST, SIGNATURE, SIGNATURE_INPUT][field];
        let mut text = parts.headers[name].to_str().unwrap().to_owned();
        text.truncate(cut);
        parts.headers.insert(name, (text + &value).parse().unwrap());
        let refusal = FIXTURE.process(Request::from_parts(parts, body), &FIXTURE.agent, NOW).err().unwrap();
        prop_assert!(matches!(refusal, Refusal::Signature(_)), "{refusal:?}");
        prop_assert_eq!(FIXTURE.intake.count(), 0);
    }
}

#[tokio::test]
async fn unplaced_runtime_gets_a_status_and_retry_after() {
    for (unplaced, status) in
        [(PlacementError::NotSynced, 503), (PlacementError::Unknown, 404), (PlacementError::Ambiguous, 409)]
    {
        let fixture =
            Fixture::with(RecordingIntake { unplaced: Some(unplaced), ..RecordingIntake::default() }, settings());
        let body = fixture.agent.batch().to_string();
        let refusal = fixture.send(&RequestSpec::events(body.as_bytes(), 1)).err().unwrap();
        let response = refusal.response(NOW);
        assert!(response.headers().contains_key(header::RETRY_AFTER));
        assert_eq!(read(response).await.0, status);
    }
}

#[tokio::test]
async fn refusals_are_problems_with_limits_and_without_input() {
    let fixture = Fixture::new();
    let response = fixture.edited(Edit::Set(header::CONTENT_LENGTH, "9999999")).response(NOW);
    assert_eq!(response.headers()[header::CONTENT_TYPE], "application/problem+json");
    let (status, problem) = read(response).await;
    assert_eq!((status, &problem["maxBytes"], &problem["status"]), (413, &json!(1 << 20), &json!(413)));
    assert_eq!(fixture.edited(Edit::Method(Method::GET)).response(NOW).headers()[header::ALLOW], "POST");
    let (status, problem) = read(fixture.edited(Edit::Set(header::HOST, "evil.test")).response(NOW)).await;
    assert_eq!(status, 421);
    assert!(!problem.to_string().contains("evil"));
    let body = fixture.agent.batch().to_string();
    fixture.send(&RequestSpec::events(body.as_bytes(), 1)).unwrap();
    let (status, problem) =
        read(fixture.send(&RequestSpec::events(body.as_bytes(), 1)).err().unwrap().response(NOW)).await;
    assert_eq!((status, problem["type"].as_str().unwrap().ends_with("/replay")), (401, true));
}
