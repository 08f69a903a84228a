//! A relayed request has the answer of a direct one.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Uri, header};
use http_body_util::Full;
use serde_json::{Value, json};
use tidewatch_contract::enrolment::{
    CERTIFICATES_PATH, CertificateRequest, CertificateResponse, RenewalRequest, TRUST_PATH,
};
use tidewatch_kit::tls;

use super::testing::*;
use crate::{
    enrolment::tests::testing::{honest_request, unix_now},
    ports::tests::testing::{Agent, RequestSpec, heartbeat},
};

/// A change of a valid request.
type Change = fn(&mut Request<Full<Bytes>>);

fn set(request: &mut Request<Full<Bytes>>, name: &'static str, value: &'static str) {
    request.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from_static(value));
}

#[tokio::test]
async fn direct_and_relayed_requests_have_the_same_answers() {
    let (fleet, one, two) = Fleet::two().await;
    let unchanged: Change = |_| {};
    let changes: [(&str, Change, u16); 11] = [
        ("valid", unchanged, 202),
        ("tampered", |request| *request.body_mut() = Full::from("[]"), 401),
        ("without signature", |request| drop(request.headers_mut().remove("signature")), 401),
        (
            "with a second signature",
            |request| {
                let value = request.headers()["signature"].clone();
                request.headers_mut().append("signature", value);
            },
            401,
        ),
        ("content type", |request| set(request, "content-type", "text/plain"), 415),
        ("encoded", |request| set(request, "content-encoding", "gzip"), 400),
        ("query", |request| *request.uri_mut() = Uri::from_static("https://kcp.test:8443/v3/events?a=b"), 400),
        ("route", |request| *request.uri_mut() = Uri::from_static("https://kcp.test:8443/v3/event"), 404),
        ("authority", |request| *request.uri_mut() = Uri::from_static("https://other:8443/v3/events"), 421),
        ("method", |request| *request.method_mut() = Method::PUT, 405),
        ("too large", |request| *request.body_mut() = Full::from(vec![b' '; (1 << 20) + 1]), 413),
    ];
    let mut relayed = 0;
    for (at, (case, change, status)) in changes.into_iter().enumerate() {
        let mut answers = Vec::new();
        for (replica, runtime) in [(&two, format!("direct-{at}")), (&one, format!("relayed-{at}"))] {
            let agent = fleet.agent(&runtime, "two");
            let mut request = events(&agent, 1);
            change(&mut request);
            answers.push(answer(&replica.send(&fleet, &agent, request).await));
        }
        assert_eq!(answers[0].0, status, "{case}");
        assert_eq!(answers[0], answers[1], "{case}");
        relayed += u64::from([202, 401].contains(&status) && case != "without signature" && !case.contains("second"));
    }
    assert_eq!(one.metric("relay_requests_total{port=\"event\"}"), relayed, "what the head refuses is not relayed");
    assert_eq!((one.intake.count(), two.intake.count()), (0, 2));
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn answers_that_depend_on_the_body_are_those_of_the_holder() {
    let (fleet, one, two) = Fleet::two().await;
    let event = |agent: &Agent, counter: u64, created: i64, body: String| {
        signed(agent, &RequestSpec { created, ..RequestSpec::events(body.as_bytes(), counter) })
    };
    let mut answers = Vec::new();
    for (replica, runtime) in [(&two, "r-1"), (&one, "r-2")] {
        let agent = fleet.agent(runtime, "two");
        let stranger = fleet.agent("r-9", "two");
        let mut sender = replica.connect(&fleet, &agent).await;
        let heartbeat = heartbeat().to_string();
        let beat =
            signed(&agent, &RequestSpec { created: unix_now(), ..RequestSpec::heartbeat(heartbeat.as_bytes(), 1) });
        let mut statuses = Vec::new();
        for request in [
            beat.clone(),
            beat,
            event(&agent, 2, unix_now() - 120, agent.batch().to_string()),
            event(&agent, 3, unix_now(), "[{".to_owned()),
            event(&agent, 4, unix_now(), "[]".to_owned()),
            event(&agent, 5, unix_now(), stranger.batch().to_string()),
            event(&agent, 6, unix_now(), format!("[{}]", vec!["{}"; 1_001].join(","))),
            event(&agent, 7, unix_now(), agent.batch().to_string()),
        ] {
            let response = sender.send(request).await.unwrap();
            assert!(response.headers().contains_key(header::DATE));
            statuses.push(answer(&response));
        }
        answers.push(statuses);
    }
    let statuses: Vec<_> = answers[0].iter().map(|(status, ..)| status.as_u16()).collect();
    assert_eq!(statuses, [200, 401, 401, 400, 400, 403, 413, 202]);
    assert_eq!(answers[0], answers[1]);
    one.stop().await;
    two.stop().await;
}

fn certificate(body: &[u8]) -> Vec<u8> {
    let response = CertificateResponse::parse(body).unwrap();
    tls::certificates(response.chain.as_bytes()).unwrap().remove(0).to_vec()
}

#[tokio::test]
async fn certificates_are_renewed_through_another_replica() {
    let (fleet, one, two) = Fleet::two().await;
    let agent = fleet.agent("r-1", "two");
    let renew = |token: Option<String>, runtime: &str, counter: u64| {
        let body = RenewalRequest { certificate: honest_request(runtime), token }.to_json().unwrap();
        let spec =
            RequestSpec { path: CERTIFICATES_PATH, created: unix_now(), ..RequestSpec::heartbeat(&body, counter) };
        signed(&agent, &spec)
    };
    let token = || Some(fleet.enrolment.first.token());
    let mut sender = one.connect(&fleet, &agent).await;
    let response = sender.send(renew(token(), "r-1", 1)).await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(!certificate(response.body()).is_empty());
    for (counter, token, runtime, status) in [(2, None, "r-1", 401), (3, token(), "r-2", 403)] {
        assert_eq!(sender.send(renew(token, runtime, counter)).await.unwrap().status(), status);
    }
    assert_eq!(one.metric("relay_requests_total{port=\"renewal\"}"), 3);
    one.stop().await;
    two.stop().await;
}

fn enrolment(token: &str, request: &CertificateRequest) -> Request<Full<Bytes>> {
    Request::post(format!("https://kcp.test:8444{CERTIFICATES_PATH}"))
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::AUTHORIZATION, format!("Bearer {token}"))
        .header("x-forwarded-for", "192.0.2.7")
        .header("tidewatch-relay", "enrolment")
        .body(Full::from(request.to_json().unwrap()))
        .unwrap()
}

/// The trust bundle is the same everywhere.
#[tokio::test]
async fn runtimes_enrol_through_another_replica_and_any_replica_answers_with_the_trust() {
    let (fleet, one, two) = Fleet::two().await;
    fleet.place("r-1", "two");
    fleet.place("r-2", "two");
    let mut tls = tls::client(None, fleet.ca.trust_bundle().store().unwrap()).unwrap();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let mut answers = Vec::new();
    for replica in [&two, &one] {
        let mut answer = Vec::new();
        let mut trust = Sender::open(replica.enrolment_address, tls.clone()).await.unwrap();
        let request = Request::get(format!("https://kcp.test:8444{TRUST_PATH}")).body(Full::default()).unwrap();
        let response = trust.send(request).await.unwrap();
        answer.push((response.status(), response.body().clone()));
        let token = fleet.enrolment.first.token();
        let response = trust.send(enrolment(&token, &honest_request("r-1"))).await.unwrap();
        answer.push((response.status(), Bytes::new()));
        assert!(!certificate(response.body()).is_empty());
        for (token, runtime) in [("garbage", "r-1"), (&*token, "r-2")] {
            // A refusal ends the connection of an unidentified client, whichever replica decided on it.
            let mut sender = Sender::open(replica.enrolment_address, tls.clone()).await.unwrap();
            let response = sender.send(enrolment(token, &honest_request(runtime))).await.unwrap();
            answer.push((response.status(), response.body().clone()));
            sender.ends().await;
        }
        answers.push(answer);
    }
    let statuses: Vec<_> = answers[0].iter().map(|(status, _)| status.as_u16()).collect();
    assert_eq!(statuses, [200, 200, 401, 401]);
    assert_eq!(answers[0], answers[1]);
    assert_eq!(one.metric("relay_requests_total{port=\"enrolment\"}"), 3);
    one.stop().await;
    two.stop().await;
}

/// The address limit is that of the client's own address: the field that a client sends itself has no effect. Both
/// replicas share the limit here, so each relayed enrolment counts twice.
#[tokio::test]
async fn enrolments_are_limited_by_the_address_of_the_client() {
    let (fleet, one, two) = Fleet::two().await;
    fleet.place("r-1", "two");
    let mut tls = tls::client(None, fleet.ca.trust_bundle().store().unwrap()).unwrap();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let mut limited = 0;
    for turn in 0..15 {
        let mut sender = Sender::open(one.enrolment_address, tls.clone()).await.unwrap();
        let mut request = enrolment("garbage", &honest_request("r-1"));
        set_source(&mut request, turn);
        let response = sender.send(request).await.unwrap();
        let problem: Value = serde_json::from_slice(response.body()).unwrap();
        limited += usize::from(problem["status"] == json!(429));
    }
    assert_eq!(limited, 5, "a burst of twenty, two for each");
    one.stop().await;
    two.stop().await;
}

fn set_source(request: &mut Request<Full<Bytes>>, turn: u8) {
    let value = format!("192.0.2.{turn}").parse().unwrap();
    request.headers_mut().insert("x-forwarded-for", value);
}

fn v2_event(manager: &str, body: &'static str) -> Request<Full<Bytes>> {
    Request::post(format!("https://kcp.test/v2/{manager}/event"))
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::from(body))
        .unwrap()
}

#[tokio::test]
async fn events_of_contract_v2_arrive_through_another_replica() {
    const EVENT: &str = r#"{"watched":{"Namespace":"kyma-system","Name":"default"},"watchedGvk":{"kind":"Kyma"}}"#;
    let (fleet, one, two) = Fleet::two().await;
    let mut answers = Vec::new();
    for (replica, runtime) in [(&two, "r-1"), (&one, "r-2")] {
        let agent = fleet.agent(runtime, "two");
        let mut sender = Sender::open(replica.v2_address, client(&fleet, &agent.identity)).await.unwrap();
        let mut statuses = Vec::new();
        for request in
            [v2_event("lifecycle-manager", EVENT), v2_event("lifecycle-manager", "{"), v2_event("unknown", EVENT)]
        {
            statuses.push(answer(&sender.send(request).await.unwrap()));
        }
        answers.push(statuses);
    }
    let statuses: Vec<_> = answers[0].iter().map(|(status, ..)| status.as_u16()).collect();
    assert_eq!(statuses, [200, 400, 404]);
    assert_eq!(answers[0], answers[1]);
    assert_eq!(one.metric("relay_requests_total{port=\"v2\"}"), 2, "managers are known everywhere");
    assert_eq!(*two.v2_intake.0.lock(), ["r-1 default", "r-2 default"]);
    assert!(one.v2_intake.0.lock().is_empty());
    one.stop().await;
    two.stop().await;
}
