//! Requests that a running receiver refuses with the status of the contract and a metric, while other runtimes are
//! served (style H24; the gateway's unit tests cover all refusals).

use anyhow::Context as _;
use tidewatch_api::identity::RuntimeId;
use tidewatch_testing::{
    contract_client::{ContractClient, TestRequest},
    landscape::now,
};
use tidewatch_trust::{CA_VALIDITY, Ca};

use crate::{
    support::{SingleRuntime, TestResult, module},
    sync::sum,
};

const REFUSED: &str = "tidewatch_gateway_requests_refused_total";

#[tokio::test]
async fn forged_requests_are_refused_and_affect_no_other_runtime() -> TestResult {
    let setup = SingleRuntime::start("refusals", &[("keda", "1.0.0", "1.1.0")]).await?;
    let ca = setup.landscape.ca();
    let domain = setup.landscape.trust_domain();
    let address = setup.landscape.authority();
    let stranger: RuntimeId = "stranger".parse()?;
    let before = setup.receiver_page().await?;
    let contract_client = ContractClient::new(ca, ca, domain, &stranger, &address)?;

    let unknown = contract_client.send(&contract_client.event(1, 1)?).await?;
    assert_eq!(unknown.status(), 404);
    let wait: u64 = unknown.headers()["retry-after"].to_str()?.parse()?;
    assert!((1..=300).contains(&wait), "{wait}");

    let replayed = contract_client.event(2, 2)?;
    assert_eq!(contract_client.send(&replayed).await?.status(), 404);
    let refused = contract_client.send(&replayed).await?;
    assert_eq!((refused.status().as_u16(), problem(&refused)), (401, Some("replay")));

    let request = contract_client.event(3, 3)?;
    let unsigned = TestRequest { signature: None, ..contract_client.event(3, 4)? };
    let tampered = TestRequest {
        body: request.body.iter().map(|byte| if *byte == b'u' { b'v' } else { *byte }).collect(),
        ..request
    };
    for forged in [unsigned, tampered] {
        let refused = contract_client.send(&forged).await?;
        assert_eq!((refused.status().as_u16(), problem(&refused)), (401, Some("signature")));
        assert!(!refused.body().to_string().contains("kyma-system"), "a response must not echo the input");
    }
    let batch = contract_client.batch(setup.runtime.id(), 4);
    let impostor = contract_client.sign("/v3/events", "application/cloudevents-batch+json", &batch, 5)?;
    assert_eq!(contract_client.send(&impostor).await?.status(), 403);
    let mut large = contract_client.event(5, 6)?;
    large.body = vec![b' '; (1 << 20) + 1];
    assert_eq!(contract_client.send(&large).await?.status(), 413);
    let query = TestRequest { path: "/v3/events?a=b".to_owned(), ..contract_client.event(6, 7)? };
    assert_eq!(contract_client.send(&query).await?.status(), 400);

    let foreign = Ca::generate("foreign", now(), CA_VALIDITY)?;
    let outsider = ContractClient::new(&foreign, ca, domain, setup.runtime.id(), &address)?;
    outsider.send(&outsider.event(1, 1)?).await.err().context("a foreign certificate must not get an answer")?;
    let elsewhere = ContractClient::new(ca, ca, &"other.domain".parse()?, setup.runtime.id(), &address)?;
    assert_eq!(elsewhere.send(&elsewhere.event(1, 1)?).await?.status(), 403);

    // Each reason has its own count.
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
        setup.receiver_metric_reaches(name, &[&label], before + times).await?;
        let counted = sum(&setup.receiver_page().await?, name, &[&label]) - before;
        assert_eq!(counted, times, "{reason}");
    }

    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the change of the served runtime", |status| module(status, "keda").is_some()).await?;
    Ok(())
}

fn problem(response: &http::Response<serde_json::Value>) -> Option<&str> {
    response.body()["type"].as_str()?.rsplit('/').next()
}
