//! Heads have limits: as many bytes as the port takes, and over HTTP/1.1 as many fields as one runtime needs.

use http::{HeaderName, HeaderValue};

use super::{abuse::LONGEST_FRAME, *};

const KIB: usize = 1 << 10;
/// Of the event port, and of that of contract v2, where a certificate may stand in the head.
const MOST: [usize; 2] = [16 * KIB, 48 * KIB];
/// Fields of a request over HTTP/1.1, unless a proxy sends it.
const FIELDS: usize = 32;

async fn bed(most: usize) -> Bed {
    let bed = Bed::start(|settings| {
        assert_eq!(settings.max_head as usize, MOST[0]);
        settings.max_head = u32::try_from(most).unwrap();
    });
    bed.await
}

/// Text that no compression makes shorter: each byte has a code of eight bits (RFC 7541, appendix B).
fn text(length: usize) -> String {
    "X".repeat(length)
}

/// A request as any other, with a field of that length besides.
fn with_text(bed: &Bed, agent: &Agent, counter: u64, is_http2: bool, length: usize) -> Request<Full<Bytes>> {
    let mut request = bed.request(agent, counter, is_http2);
    request.headers_mut().insert("x-text", text(length).parse().unwrap());
    request
}

/// A request as any other, with short fields besides, so that as many of them are sent as said, the length of the body included.
fn with_fields(bed: &Bed, agent: &Agent, counter: u64, fields: usize) -> Request<Full<Bytes>> {
    let mut request = bed.request(agent, counter, false);
    for number in request.headers().len() + 1..fields {
        let name = HeaderName::try_from(format!("x-{number}")).unwrap();
        request.headers_mut().insert(name, HeaderValue::from_static("x"));
    }
    assert_eq!(request.headers().len() + 1, fields);
    request
}

#[tokio::test]
async fn over_http1_a_head_that_is_too_large_is_told_so_and_ends_its_connection() {
    for most in MOST {
        let bed = bed(most).await;
        let (agent, other) = (bed.agent("r-1"), bed.agent("r-2"));
        let mut open = bed.open(&other, false).await;
        let mut sender = bed.open(&agent, false).await;
        let fits = [with_text(&bed, &agent, 1, false, most - KIB), with_fields(&bed, &agent, 2, FIELDS)];
        for request in fits {
            assert_eq!(sender.send(request).await.unwrap().status(), StatusCode::ACCEPTED);
        }
        let beyond = [with_text(&bed, &agent, 3, false, most + KIB), with_fields(&bed, &agent, 3, FIELDS + 1)];
        for (number, request) in (1..).zip(beyond) {
            let mut stream = bed.http1(&agent).await;
            stream.write_all(head(&request, "content-length: 0").as_bytes()).await.unwrap();
            let said = rest(stream).await;
            assert!(said.starts_with("HTTP/1.1 431 ") && said.matches("HTTP/1.1 ").count() == 1, "{said}");
            bed.until_ended(&["head"], number).await;
            bed.says(&mut open, &other, number).await;
        }
        // Nobody has looked at it, nor is it held against the runtime.
        bed.says(&mut sender, &agent, 3).await;
        assert_eq!((bed.intake.count(), bed.ended("malformed"), bed.ended("error")), (5, 0, 0));
        bed.stop().await;
    }
}

/// There a head is refused alone, by the HTTP library: no request comes of it, and the connection of many goes on for all of them.
#[tokio::test]
async fn over_http2_a_head_that_is_too_large_is_refused_alone() {
    for most in MOST {
        let bed = bed(most).await;
        let (agent, other) = (bed.agent("r-1"), bed.agent("r-2"));
        let mut open = bed.open(&other, true).await;
        let mut sender = bed.open(&agent, true).await;
        let fits = with_text(&bed, &agent, 1, true, most - KIB);
        assert_eq!(sender.send(fits).await.unwrap().status(), StatusCode::ACCEPTED);
        let beyond = most + 4 * KIB;
        assert!(beyond > LONGEST_FRAME, "it goes on in a frame of its own");
        let refused = sender.send(with_text(&bed, &agent, 2, true, beyond)).await.unwrap();
        assert_eq!(refused.status(), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
        bed.says(&mut sender, &agent, 2).await;
        bed.says(&mut open, &other, 1).await;
        let path = metrics::Path { route: "events" };
        assert_eq!((bed.intake.count(), bed.metrics.begun.get_or_create(&path).get()), (3, 3));

        // What is larger by far costs too much to be read to its end.
        sender.send(with_text(&bed, &agent, 3, true, 5 * most)).await.unwrap_err();
        sender.ends().await;
        bed.until_ended(&["error"], 1).await;
        bed.says(&mut open, &other, 2).await;
        bed.stop().await;
    }
}
