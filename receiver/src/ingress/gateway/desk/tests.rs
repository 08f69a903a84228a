//! Every refusal, in memory.

mod refusals;
mod renewals;

use std::{convert::Infallible, sync::LazyLock};

use http::{HeaderName, Method, header};
use http_body_util::BodyExt;
use proptest::prelude::*;
use serde_json::{Value, json};
use tidewatch_shared::{
    event::MAX_EVENTS,
    signature::{CONTENT_DIGEST, SIGNATURE, SIGNATURE_INPUT},
};
use tokio::time::timeout;

use super::*;
use crate::{
    fleet::hub::Unplaced,
    ingress::gateway::{
        Limits,
        tests::testing::{
            AUTHORITY, Agent, EPOCH, Edit, NOW, Recorder, Say, at, ca, domain, heartbeat, metrics, settings,
        },
    },
    pki::Ca,
};

struct Room {
    desk: Desk<Recorder>,
    intake: Recorder,
    ca: Ca,
    agent: Agent,
}

impl Room {
    fn new() -> Self {
        Self::with(Recorder::default(), settings())
    }

    fn with(intake: Recorder, settings: Settings) -> Self {
        let ca = ca(NOW);
        let agent = Agent::new(&ca, "r-1", NOW);
        Self { desk: Desk::new(&settings, intake.clone(), metrics()), intake, ca, agent }
    }

    fn peer(&self) -> Peer {
        Peer::read(&self.agent.identity.chain[0], &domain())
    }

    /// What the desk makes of a request at a time.
    fn judge(&self, request: Request<Vec<u8>>, agent: &Agent, now: i64) -> Result<Answer, Refusal> {
        let peer = Peer::read(&agent.identity.chain[0], &domain());
        let (parts, body) = request.into_parts();
        let certificate = self.desk.speaker(&parts, &peer, at(now))?;
        let admitted = self.desk.admit(&parts, &certificate, at(now))?;
        match self.desk.conclude(&admitted, &body, at(now))? {
            Concluded::Answered(answer) => Ok(answer),
            Concluded::Renewal(..) => panic!("no room renews here"),
        }
    }

    fn say(&self, say: &Say<'_>) -> Result<Answer, Refusal> {
        self.judge(self.agent.sign(say), &self.agent, NOW)
    }

    fn edited(&self, edit: Edit) -> Refusal {
        let body = self.agent.batch().to_string();
        let (mut parts, body) = self.agent.sign(&Say::events(body.as_bytes(), 1)).into_parts();
        edit.apply(&mut parts);
        self.judge(Request::from_parts(parts, body), &self.agent, NOW).err().unwrap()
    }
}

async fn read(answer: Answer) -> (u16, Value) {
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap())
}

#[tokio::test]
async fn what_is_signed_and_well_formed_reaches_the_intake() {
    let room = Room::new();
    let (batch, heartbeat) = (room.agent.batch().to_string(), heartbeat().to_string());
    let (status, answer) = read(room.say(&Say::events(batch.as_bytes(), 1)).unwrap()).await;
    assert_eq!((status, &answer["accepted"]), (202, &json!(1)));
    let (status, answer) = read(room.say(&Say::heartbeat(heartbeat.as_bytes(), 2)).unwrap()).await;
    assert_eq!((status, &answer["heartbeatSeconds"]), (200, &json!(30)));
    assert_eq!(*room.intake.said.lock().unwrap(), [("r-1".to_owned(), 1), ("r-1".to_owned(), 0)]);
}

/// Over HTTP/2 a sender may take a request back, or be told that it is too long, and go on with the next one.
#[tokio::test(start_paused = true)]
async fn a_body_costs_its_runtime_for_all_that_came_of_it_however_it_ends() {
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
        let room = Room::with(Recorder::default(), Settings { limits, ..settings() });
        let certificate = room.desk.speaker(&parts(&room, 1), &room.peer(), at(NOW)).unwrap();
        // One or two of them are as much as it may send at once.
        for counter in 1..=3 {
            let parts = parts(&room, counter);
            let body = pin!(StreamBody::new(body().map_ok(Frame::data)));
            let judged = room.desk.judge(&parts, body, &certificate, at(NOW));
            // It is taken back before its deadline.
            match timeout(Duration::from_millis(10), judged).await.ok().and_then(Result::err) {
                Some(Refusal::Rate(_)) => {
                    assert!(counter > 1);
                    return;
                }
                other => assert_eq!(other, expected),
            }
        }
        panic!("{expected:?} costs nothing");
    }
    fn parts(room: &Room, counter: u64) -> Parts {
        room.agent.sign(&Say::events(b"[]", counter)).into_parts().0
    }
    costs(never, None).await;
    costs(broken, Some(Refusal::Broken)).await;
    costs(endless, Some(Refusal::TooLarge(1 << 20))).await;
}

#[test]
fn heads_are_judged_by_themselves() {
    let room = Room::new();
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
        (Edit::Set(header::TRANSFER_ENCODING, "chunked"), Refusal::Length),
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
        assert_eq!(room.edited(edit), refusal);
    }
    assert_eq!(room.intake.count(), 0);
}

#[test]
fn only_the_bytes_that_were_signed_are_taken() {
    let room = Room::new();
    let body = room.agent.batch().to_string();
    let say = Say::events(body.as_bytes(), 1);
    let (parts, mut tampered) = room.agent.sign(&say).into_parts();
    tampered[0] = b' ';
    let refused = |request, agent| room.judge(request, agent, NOW).err().unwrap();
    use signature::VerifyError as S;
    assert_eq!(refused(Request::from_parts(parts, tampered), &room.agent), Refusal::Signature(S::Digest));

    let (mut parts, body_of_heartbeat) = room.agent.sign(&Say { path: "/v3/heartbeat", ..say }).into_parts();
    parts.uri = "/v3/events".parse().unwrap();
    let moved = Request::from_parts(parts, body_of_heartbeat);
    assert_eq!(refused(moved, &room.agent), Refusal::Signature(S::Signature));

    let other = Agent::new(&room.ca, "r-2", NOW);
    assert_eq!(refused(room.agent.sign(&say), &other), Refusal::Signature(S::KeyId));
    for created in [NOW - 61, NOW + 61] {
        assert_eq!(refused(room.agent.sign(&Say { created, ..say }), &room.agent), Refusal::Signature(S::Clock));
    }
    assert_eq!(room.intake.count(), 0);
}

#[test]
fn a_request_is_taken_once() {
    let room = Room::new();
    let body = room.agent.batch().to_string();
    assert!(room.say(&Say::events(body.as_bytes(), 1)).is_ok());
    assert_eq!(room.say(&Say::events(body.as_bytes(), 1)).err(), Some(Refusal::Replay));
    assert!(room.say(&Say::events(body.as_bytes(), 2)).is_ok());
    assert_eq!(room.intake.count(), 2);
}

#[test]
fn nobody_speaks_for_another() {
    let room = Room::new();
    let other = Agent::new(&room.ca, "r-2", NOW);
    let foreign = other.batch().to_string();
    assert_eq!(room.say(&Say::events(foreign.as_bytes(), 1)).err(), Some(Refusal::Source));
    let mut mixed = room.agent.batch();
    mixed.as_array_mut().unwrap().push(other.batch()[0].clone());
    assert_eq!(room.say(&Say::events(mixed.to_string().as_bytes(), 2)).err(), Some(Refusal::Source));
    let mut epoch = room.agent.batch();
    epoch[0]["id"] = json!("00000000000000ff-1");
    assert_eq!(room.say(&Say::events(epoch.to_string().as_bytes(), 3)).err(), Some(Refusal::Source));
    let mut beat = heartbeat();
    beat["epoch"] = json!("00000000000000ff");
    assert_eq!(room.say(&Say::heartbeat(beat.to_string().as_bytes(), 4)).err(), Some(Refusal::Source));
    assert_eq!(room.intake.count(), 0);
}

#[test]
fn bodies_that_are_none_are_refused_whole() {
    let room = Room::new();
    let mut many = room.agent.batch();
    let one = json!({"id": format!("{EPOCH}-1")});
    many.as_array_mut().unwrap().extend(std::iter::repeat_n(one, MAX_EVENTS));
    let cases = [
        ("[]".to_owned(), Refusal::Malformed),
        ("{".to_owned(), Refusal::Malformed),
        ("[{}]".to_owned(), Refusal::Malformed),
        (many.to_string(), Refusal::TooManyEvents(MAX_EVENTS)),
    ];
    for (counter, (body, refusal)) in (1..).zip(cases) {
        assert_eq!(room.say(&Say::events(body.as_bytes(), counter)).err(), Some(refusal));
    }
    let mut beat = heartbeat();
    let watch = json!({"name": "kyma", "objects": 1});
    beat["watches"] = Value::Array(vec![watch; tidewatch_shared::heartbeat::MAX_WATCHES + 1]);
    for (counter, body) in (10..).zip(["{}".to_owned(), beat.to_string()]) {
        assert_eq!(room.say(&Say::heartbeat(body.as_bytes(), counter)).err(), Some(Refusal::Malformed));
    }
    assert_eq!(room.intake.count(), 0);
}

#[test]
fn the_certificate_is_judged_at_every_request() {
    let room = Room::new();
    let body = room.agent.batch().to_string();
    for (now, refusal) in [(NOW + 86_401, Refusal::Certificate), (NOW - 601, Refusal::Certificate)] {
        let request = room.agent.sign(&Say { created: now, ..Say::events(body.as_bytes(), 1) });
        let refused = room.judge(request, &room.agent, now).err().unwrap();
        assert_eq!((refused, refused.ends_connection()), (refusal, true));
    }
    let stranger = room.ca.make_runtime(&room.agent.runtime, &"other".parse().unwrap(), NOW, Duration::from_secs(60));
    let stranger = Agent::with(stranger.unwrap().identity().unwrap(), room.agent.runtime.clone());
    let request = stranger.sign(&Say::events(body.as_bytes(), 1));
    assert_eq!(room.judge(request, &stranger, NOW).err(), Some(Refusal::Identity));
}

#[test]
fn a_runtime_that_floods_is_limited_before_its_signature_is_looked_at() {
    let limits = Limits { per_second: 1, burst: 2, ..Limits::default() };
    let room = Room::with(Recorder::default(), Settings { limits, ..settings() });
    let body = room.agent.batch().to_string();
    assert_eq!(
        room.edited(Edit::Set(HeaderName::from_static(SIGNATURE), "x")),
        Refusal::Signature(signature::VerifyError::Profile)
    );
    assert!(room.say(&Say::events(body.as_bytes(), 1)).is_ok());
    let limited = room.edited(Edit::Set(HeaderName::from_static(SIGNATURE), "x"));
    assert!(matches!(limited, Refusal::Rate(_)), "{limited:?}");
    let other = Agent::new(&room.ca, "r-2", NOW);
    let (body, now) = (other.batch().to_string(), NOW);
    assert!(room.judge(other.sign(&Say::events(body.as_bytes(), 1)), &other, now).is_ok());
}

proptest! {
    /// Whatever stands in the signature's fields and the body, it is refused, in order and without a panic.
    #[test]
    fn nothing_unsigned_is_ever_taken(field in 0..3usize, value in "[ -~]{0,80}", cut in 0..400usize, body in any::<Vec<u8>>()) {
        static ROOM: LazyLock<Room> = LazyLock::new(|| {
            let limits = Limits { per_second: 1_000_000, burst: 1_000_000, ..Limits::default() };
            Room::with(Recorder::default(), Settings { limits, ..settings() })
        });
        let good = ROOM.agent.batch().to_string();
        let (mut parts, good) = ROOM.agent.sign(&Say::events(good.as_bytes(), 1)).into_parts();
        prop_assume!(body != good);
        let name = [CONTENT_DIGEST, SIGNATURE, SIGNATURE_INPUT][field];
        let mut text = parts.headers[name].to_str().unwrap().to_owned();
        text.truncate(cut);
        parts.headers.insert(name, (text + &value).parse().unwrap());
        let refusal = ROOM.judge(Request::from_parts(parts, body), &ROOM.agent, NOW).err().unwrap();
        prop_assert!(matches!(refusal, Refusal::Signature(_)), "{refusal:?}");
        prop_assert_eq!(ROOM.intake.count(), 0);
    }
}

#[tokio::test]
async fn what_cannot_be_placed_is_told_so() {
    for (unplaced, status) in [(Unplaced::NotSynced, 503), (Unplaced::Unknown, 404), (Unplaced::Ambiguous, 409)] {
        let room = Room::with(Recorder { unplaced: Some(unplaced), ..Recorder::default() }, settings());
        let body = room.agent.batch().to_string();
        let refusal = room.say(&Say::events(body.as_bytes(), 1)).err().unwrap();
        let answer = refusal.answer(NOW);
        assert!(answer.headers().contains_key(header::RETRY_AFTER));
        assert_eq!(read(answer).await.0, status);
    }
}

#[tokio::test]
async fn answers_are_problems_and_tell_limits_and_no_input() {
    let room = Room::new();
    let answer = room.edited(Edit::Set(header::CONTENT_LENGTH, "9999999")).answer(NOW);
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/problem+json");
    let (status, problem) = read(answer).await;
    assert_eq!((status, &problem["maxBytes"], &problem["status"]), (413, &json!(1 << 20), &json!(413)));
    assert_eq!(room.edited(Edit::Method(Method::GET)).answer(NOW).headers()[header::ALLOW], "POST");
    let (status, problem) = read(room.edited(Edit::Set(header::HOST, "evil.test")).answer(NOW)).await;
    assert_eq!(status, 421);
    assert!(!problem.to_string().contains("evil"));
    let body = room.agent.batch().to_string();
    room.say(&Say::events(body.as_bytes(), 1)).unwrap();
    let (status, problem) = read(room.say(&Say::events(body.as_bytes(), 1)).err().unwrap().answer(NOW)).await;
    assert_eq!((status, problem["type"].as_str().unwrap().ends_with("/replay")), (401, true));
}
