//! Limits of heads: bytes by the port's setting, and over HTTP/1.1 the number of fields that one runtime needs.

use http::{HeaderName, HeaderValue};

use super::{abuse::LONGEST_FRAME, *};

const KIB: usize = 1 << 10;
/// Limits of the event port, and of the port of contract v2, where a head may contain a certificate.
const LIMITS: [usize; 2] = [16 * KIB, 48 * KIB];
/// Maximum number of fields over HTTP/1.1 on a runtime's connection.
const FIELDS: usize = 32;

async fn gateway_with_max_head(max_head: usize) -> TestGateway {
    TestGateway::start(|settings| {
        assert_eq!(settings.max_head as usize, LIMITS[0]);
        settings.max_head = u32::try_from(max_head).unwrap();
    })
    .await
}

/// Incompressible text: the Huffman code of each byte has eight bits (RFC 7541, appendix B).
fn text(length: usize) -> String {
    "X".repeat(length)
}

/// A valid request with a further field of this length.
fn with_text(
    gateway: &TestGateway,
    agent: &Agent,
    counter: u64,
    is_http2: bool,
    length: usize,
) -> Request<Full<Bytes>> {
    let mut request = gateway.request(agent, counter, is_http2);
    request.headers_mut().insert("x-text", text(length).parse().unwrap());
    request
}

/// A valid request with further short fields, up to this number including the length of the body.
fn with_fields(gateway: &TestGateway, agent: &Agent, counter: u64, fields: usize) -> Request<Full<Bytes>> {
    let mut request = gateway.request(agent, counter, false);
    for number in request.headers().len() + 1..fields {
        let name = HeaderName::try_from(format!("x-{number}")).unwrap();
        request.headers_mut().insert(name, HeaderValue::from_static("x"));
    }
    assert_eq!(request.headers().len() + 1, fields);
    request
}

#[tokio::test]
async fn over_http1_a_too_large_head_gets_a_431_and_ends_its_connection() {
    for max_head in LIMITS {
        let gateway = gateway_with_max_head(max_head).await;
        let agent = gateway.agent("r-1");
        let other = gateway.agent("r-2");
        let mut open = gateway.open(&other, false).await;
        let mut sender = gateway.open(&agent, false).await;
        let fits = [with_text(&gateway, &agent, 1, false, max_head - KIB), with_fields(&gateway, &agent, 2, FIELDS)];
        for request in fits {
            assert_eq!(sender.send(request).await.unwrap().status(), StatusCode::ACCEPTED);
        }
        let beyond =
            [with_text(&gateway, &agent, 3, false, max_head + KIB), with_fields(&gateway, &agent, 3, FIELDS + 1)];
        for (number, request) in (1..).zip(beyond) {
            let mut stream = gateway.http1(&agent).await;
            stream.write_all(head(&request, "content-length: 0").as_bytes()).await.unwrap();
            let received = rest(stream).await;
            assert!(received.starts_with("HTTP/1.1 431 ") && received.matches("HTTP/1.1 ").count() == 1, "{received}");
            gateway.until_ended(&["head"], number).await;
            gateway.send_accepted(&mut open, &other, number).await;
        }
        // The refusal happened before the runtime was identified and does not count towards a block.
        gateway.send_accepted(&mut sender, &agent, 3).await;
        assert_eq!((gateway.intake.count(), gateway.ended("malformed"), gateway.ended("error")), (5, 0, 0));
        gateway.stop().await;
    }
}

/// Over HTTP/2 the HTTP library refuses the head alone: no request reaches the handler, and the connection stays
/// usable.
#[tokio::test]
async fn over_http2_a_too_large_head_is_refused_and_the_connection_stays() {
    for max_head in LIMITS {
        let gateway = gateway_with_max_head(max_head).await;
        let agent = gateway.agent("r-1");
        let other = gateway.agent("r-2");
        let mut open = gateway.open(&other, true).await;
        let mut sender = gateway.open(&agent, true).await;
        let fits = with_text(&gateway, &agent, 1, true, max_head - KIB);
        assert_eq!(sender.send(fits).await.unwrap().status(), StatusCode::ACCEPTED);
        let beyond = max_head + 4 * KIB;
        assert!(beyond > LONGEST_FRAME, "it goes on in a frame of its own");
        let refused = sender.send(with_text(&gateway, &agent, 2, true, beyond)).await.unwrap();
        assert_eq!(refused.status(), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
        gateway.send_accepted(&mut sender, &agent, 2).await;
        gateway.send_accepted(&mut open, &other, 1).await;
        let path = metrics::RouteLabel { route: "events" };
        assert_eq!((gateway.intake.count(), gateway.metrics.begun.get_or_create(&path).get()), (3, 3));

        // A far larger head is not even read to its end, and closes the connection.
        sender.send(with_text(&gateway, &agent, 3, true, 5 * max_head)).await.unwrap_err();
        sender.ends().await;
        gateway.until_ended(&["error"], 1).await;
        gateway.send_accepted(&mut open, &other, 2).await;
        gateway.stop().await;
    }
}
