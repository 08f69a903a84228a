//! Large and slow bodies have the same answers directly and through another replica.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::stream;
use http::{Request, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tidewatch_contract::{
    enrolment::{CERTIFICATES_PATH, MAX_REQUEST_BYTES},
    event::MAX_BODY_BYTES,
    v2::MAX_BODY_BYTES as V2_BODY_BYTES,
};
use tidewatch_kit::tls;
use tokio::{
    net::TcpStream,
    sync::mpsc::{self, UnboundedSender},
};
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use super::testing::*;
use crate::{
    enrolment::tests::testing::{honest_request, unix_now},
    ports::tests::testing::{Agent, RequestSpec, heartbeat},
};

/// JSON of exactly this length.
fn padded(json: &str, length: usize) -> Vec<u8> {
    let mut bytes = vec![b' '; length - json.len()];
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

#[tokio::test]
async fn bodies_up_to_the_limit_of_their_port_are_accepted() {
    const EVENT: &str = r#"{"watched":{"Namespace":"kyma-system","Name":"default"},"watchedGvk":{"kind":"Kyma"}}"#;
    let (fleet, one, two) = Fleet::two().await;
    fleet.place("r-1", "two");
    let mut enrolment_tls = tls::client(None, fleet.ca.trust_bundle().store().unwrap()).unwrap();
    enrolment_tls.alpn_protocols = vec![b"h2".to_vec()];
    let mut answers = Vec::new();
    for (replica, runtime) in [(&two, "r-2"), (&one, "r-3")] {
        let agent = fleet.agent(runtime, "two");
        let mut own = Vec::new();
        for (counter, excess) in [(1, 0), (3, 1)] {
            let body = padded(&agent.batch().to_string(), MAX_BODY_BYTES + excess);
            let events = RequestSpec { created: unix_now(), ..RequestSpec::events(&body, counter) };
            own.push(answer(&replica.send(&fleet, &agent, signed(&agent, &events)).await));
            let body = padded(&heartbeat().to_string(), MAX_BODY_BYTES + excess);
            let beat = RequestSpec { created: unix_now(), ..RequestSpec::heartbeat(&body, counter + 1) };
            own.push(answer(&replica.send(&fleet, &agent, signed(&agent, &beat)).await));
            let event = Request::post("https://kcp.test/v2/lifecycle-manager/event")
                .header(header::CONTENT_TYPE, "application/json")
                .body(Full::from(padded(EVENT, V2_BODY_BYTES + excess)))
                .unwrap();
            let mut sender = Sender::open(replica.v2_address, client(&fleet, &agent.identity)).await.unwrap();
            own.push(answer(&sender.send(event).await.unwrap()));
            let json = String::from_utf8(honest_request("r-1").to_json().unwrap()).unwrap();
            let enrolment = Request::post(format!("https://kcp.test:8444{CERTIFICATES_PATH}"))
                .header(header::CONTENT_TYPE, "application/json")
                .header(header::AUTHORIZATION, format!("Bearer {}", fleet.enrolment.first.token()))
                .body(Full::from(padded(&json, MAX_REQUEST_BYTES + excess)))
                .unwrap();
            let mut sender = Sender::open(replica.enrolment_address, enrolment_tls.clone()).await.unwrap();
            let response = sender.send(enrolment).await.unwrap();
            // Each certificate differs.
            let body = if response.status() == 200 { Bytes::new() } else { response.body().clone() };
            own.push(answer(&response.map(|_| body)));
        }
        answers.push(own);
    }
    let statuses: Vec<_> = answers[0].iter().map(|(status, ..)| status.as_u16()).collect();
    assert_eq!(statuses, [202, 200, 200, 200, 413, 413, 413, 413]);
    assert_eq!(answers[0], answers[1]);
    for port in ["event", "v2", "enrolment"] {
        let relayed = one.metric(&format!("relay_requests_total{{port=\"{port}\"}}"));
        assert_eq!(relayed, if port == "event" { 2 } else { 1 }, "{port}");
    }
    one.stop().await;
    two.stop().await;
}

type Piece = Result<Frame<Bytes>, Infallible>;

/// A request whose body is sent piece by piece, and ends when the sender is dropped.
struct Slow {
    pieces: UnboundedSender<Piece>,
    response: AbortOnDropHandle<Response<Bytes>>,
}

impl Slow {
    async fn begin(replica: &Running, fleet: &Fleet, agent: &Agent, request: &Request<Full<Bytes>>) -> Self {
        let tcp = TcpStream::connect(replica.event_address).await.unwrap();
        let connector = TlsConnector::from(Arc::new(client(fleet, &agent.identity)));
        let stream = connector.connect("kcp.test".try_into().unwrap(), tcp).await.unwrap();
        let (mut sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let (pieces, receiver) = mpsc::unbounded_channel::<Piece>();
        let body = stream::unfold(receiver, |mut receiver| async { Some((receiver.recv().await?, receiver)) });
        let (mut parts, _) = request.clone().into_parts();
        parts.headers.remove(header::CONTENT_LENGTH);
        let request = Request::from_parts(parts, StreamBody::new(Box::pin(body)));
        let response = tokio::spawn(async move {
            let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
            Response::from_parts(parts, body.collect().await.unwrap().to_bytes())
        });
        Self { pieces, response: AbortOnDropHandle::new(response) }
    }

    fn send(&self, piece: &[u8]) {
        self.pieces.send(Ok(Frame::data(Bytes::copy_from_slice(piece)))).unwrap();
    }
}

async fn body(request: &Request<Full<Bytes>>) -> Bytes {
    request.body().clone().collect().await.unwrap().to_bytes()
}

/// The accepting replica reads it, so it takes no place at the holder meanwhile.
#[tokio::test]
async fn slow_body_is_relayed_once_it_is_complete() {
    let (fleet, one, two) = Fleet::two().await;
    let mut answers = Vec::new();
    for (replica, runtime) in [(&two, "r-1"), (&one, "r-2")] {
        let agent = fleet.agent(runtime, "two");
        let before = two.intake.count();
        let request = events(&agent, 1);
        let body = body(&request).await;
        let slow = Slow::begin(replica, &fleet, &agent, &request).await;
        let (first, last) = body.split_at(body.len() / 2);
        slow.send(first);
        // Another request of the runtime overtakes it.
        assert_eq!(replica.send(&fleet, &agent, events(&agent, 2)).await.status(), 202);
        assert_eq!(two.intake.count(), before + 1);
        assert_eq!(one.metric("relay_requests_in_flight"), 0);
        slow.send(last);
        drop(slow.pieces);
        answers.push(answer(&slow.response.await.unwrap()));
        assert_eq!(two.intake.count(), before + 2);
    }
    assert_eq!(answers[0].0, 202);
    assert_eq!(answers[0], answers[1]);
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn body_that_does_not_end_in_time_has_the_answer_of_a_direct_one() {
    const SHORT: Duration = Duration::from_millis(300);
    let fleet = Fleet::new();
    let one = fleet.start("one", |settings| settings.body_deadline = SHORT).await;
    let two = fleet.start("two", |settings| settings.body_deadline = SHORT).await;
    let mut answers = Vec::new();
    for (replica, runtime) in [(&two, "r-1"), (&one, "r-2")] {
        let agent = fleet.agent(runtime, "two");
        let request = events(&agent, 1);
        let slow = Slow::begin(replica, &fleet, &agent, &request).await;
        slow.send(&body(&request).await);
        answers.push(answer(&slow.response.await.unwrap()));
        assert_eq!(replica.refused("slow"), 1);
    }
    assert_eq!(answers[0].0, 408);
    assert_eq!(answers[0], answers[1]);
    assert_eq!((one.metric("relay_requests_total{port=\"event\"}"), two.intake.count()), (0, 0));
    one.stop().await;
    two.stop().await;
}
