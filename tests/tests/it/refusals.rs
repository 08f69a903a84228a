//! What is refused at a running receiver, with the status of the contract and a count, while everybody else is served
//! (style H24; the gateway's own tests have the whole table).

use anyhow::Context as _;
use tidewatch_receiver::pki::{CA_VALIDITY, Ca};
use tidewatch_shared::identity::RuntimeId;
use tidewatch_tests::{
    landscape::now,
    speaker::{Said, Speaker},
};

use crate::{
    support::{One, Tested, module},
    sync::sum,
};

const REFUSED: &str = "tidewatch_gateway_requests_refused_total";

#[tokio::test]
async fn forgeries_are_refused_and_disturb_nobody() -> Tested {
    let one = One::start("refusals", &[("keda", "1.0.0", "1.1.0")]).await?;
    let (ca, domain, address) = (one.landscape.ca(), one.landscape.trust_domain(), one.landscape.authority());
    let stranger: RuntimeId = "stranger".parse()?;
    let before = one.receiver_page().await?;
    let speaker = Speaker::new(ca, ca, domain, &stranger, &address)?;

    let unknown = speaker.say(&speaker.event(1, 1)?).await?;
    assert_eq!(unknown.status(), 404);
    let wait: u64 = unknown.headers()["retry-after"].to_str()?.parse()?;
    assert!((1..=300).contains(&wait), "{wait}");

    let replayed = speaker.event(2, 2)?;
    assert_eq!(speaker.say(&replayed).await?.status(), 404);
    let refused = speaker.say(&replayed).await?;
    assert_eq!((refused.status().as_u16(), problem(&refused)), (401, Some("replay")));

    let said = speaker.event(3, 3)?;
    let unsigned = Said { signature: None, ..speaker.event(3, 4)? };
    let tampered =
        Said { body: said.body.iter().map(|byte| if *byte == b'u' { b'v' } else { *byte }).collect(), ..said };
    for forged in [unsigned, tampered] {
        let refused = speaker.say(&forged).await?;
        assert_eq!((refused.status().as_u16(), problem(&refused)), (401, Some("signature")));
        assert!(!refused.body().to_string().contains("kyma-system"), "the input is never echoed");
    }
    let batch = speaker.batch(one.runtime.id(), 4);
    let impostor = speaker.signed("/v3/events", "application/cloudevents-batch+json", &batch, 5)?;
    assert_eq!(speaker.say(&impostor).await?.status(), 403);
    let mut large = speaker.event(5, 6)?;
    large.body = vec![b' '; (1 << 20) + 1];
    assert_eq!(speaker.say(&large).await?.status(), 413);
    let query = Said { path: "/v3/events?a=b".to_owned(), ..speaker.event(6, 7)? };
    assert_eq!(speaker.say(&query).await?.status(), 400);

    let foreign = Ca::generate("foreign", now(), CA_VALIDITY)?;
    let outsider = Speaker::new(&foreign, ca, domain, one.runtime.id(), &address)?;
    outsider.say(&outsider.event(1, 1)?).await.err().context("a foreign certificate must not get an answer")?;
    let elsewhere = Speaker::new(ca, ca, &"other.domain".parse()?, one.runtime.id(), &address)?;
    assert_eq!(elsewhere.say(&elsewhere.event(1, 1)?).await?.status(), 403);

    // Each reason has a count of its own.
    for (name, reason, times) in [
        (REFUSED, "unknown-runtime", 2),
        (REFUSED, "replay", 1),
        (REFUSED, "signature-profile", 1),
        (REFUSED, "digest", 1),
        (REFUSED, "source", 1),
        (REFUSED, "too-large", 1),
        (REFUSED, "query", 1),
        (REFUSED, "identity", 1),
        ("tidewatch_gateway_handshakes_failed_total", "unknown-issuer", 1),
    ] {
        let label = format!("reason=\"{reason}\"");
        let before = sum(&before, name, &[&label]);
        one.receiver_counts(name, &[&label], before + times).await?;
        let counted = sum(&one.receiver_page().await?, name, &[&label]) - before;
        assert_eq!(counted, times, "{reason}");
    }

    one.runtime.select(&["keda"]).await?;
    one.skr_status("the change of the one who is served", |status| module(status, "keda").is_some()).await?;
    Ok(())
}

fn problem(response: &http::Response<serde_json::Value>) -> Option<&str> {
    response.body()["type"].as_str()?.rsplit('/').next()
}
