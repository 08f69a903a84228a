//! Revocation closes open connections.

use serde_json::json;
use tidewatch_trust::Trust;

use super::*;
use crate::enrolment::Revocations;

#[tokio::test]
async fn connection_of_a_revoked_certificate_is_closed_and_a_new_one_refused() {
    for is_http2 in [true, false] {
        let revocations = Revocations::default();
        let gateway = TestGateway::start(|settings| settings.revocations = revocations.clone()).await;
        let old = gateway.agent("r-1");
        let new = gateway.agent("r-1");
        let other = gateway.agent("r-2");
        let open = async |agent: &Agent| gateway.open(agent, is_http2).await;
        let [mut first, mut second, mut third] = [open(&old).await, open(&new).await, open(&other).await];
        for (counter, (sender, agent)) in (1..).zip([(&mut first, &old), (&mut second, &new), (&mut third, &other)]) {
            gateway.send_accepted(sender, agent, counter).await;
        }
        let revoke = |keys: &[&str]| {
            let data: serde_json::Map<_, _> = keys.iter().map(|key| ((*key).to_owned(), json!("lost"))).collect();
            revocations.set(Some(&serde_json::from_value(json!({"data": data})).unwrap()));
        };
        let leaf = tidewatch_contract::certificate::fingerprint(&old.identity.chain[0]);
        revoke(&[&leaf]);
        first.ends().await;
        // Another certificate of the same runtime stays valid.
        gateway.send_accepted(&mut second, &new, 11).await;

        let mut again = open(&old).await;
        let response = again.send(gateway.request(&old, 12, is_http2)).await.unwrap();
        let problem: Value = serde_json::from_slice(response.body()).unwrap();
        assert_eq!(
            (response.status().as_u16(), problem["type"].as_str().unwrap().ends_with("/certificate")),
            (401, true)
        );
        again.ends().await;

        revoke(&[&leaf, "r-1"]);
        second.ends().await;
        // Other clients are unaffected.
        gateway.send_accepted(&mut third, &other, 13).await;
        gateway.until_ended(&["out"], 2).await;
        assert_eq!((gateway.ended("refused"), gateway.intake.lost_connections()), (1, 0), "the receiver closed them");
        drop(third);
        gateway.stop().await;
    }
}

/// An agent that stays connected must not outlive its root.
#[tokio::test]
async fn connection_of_a_removed_root_is_closed() {
    let next = ca(unix_now());
    let trust_of = |clients: TrustBundle, issuer: &Ca| {
        let issuer = issuer.key_id().cloned();
        Arc::new(Trust { agents: clients.clone(), clients, issuer })
    };
    let mut sender = None;
    let gateway = TestGateway::with(None, |settings, ca| {
        let (trust, receiver) = watch::channel(trust_of(ca.trust_bundle(), ca));
        settings.trust = Some(receiver);
        sender = Some(trust);
    })
    .await;
    let trust = sender.unwrap();
    let agent = gateway.agent("r-1");
    let mut connection = gateway.open(&agent, true).await;
    gateway.send_accepted(&mut connection, &agent, 1).await;
    trust.send_replace(trust_of(gateway.ca.trust_bundle().with(&next.trust_bundle()), &next));
    gateway.send_accepted(&mut connection, &agent, 2).await;
    trust.send_replace(trust_of(next.trust_bundle(), &next));
    connection.ends().await;
    // The handshake of this test still accepts the old root.
    let mut again = gateway.open(&agent, true).await;
    assert_eq!(again.send(gateway.request(&agent, 3, true)).await.unwrap().status().as_u16(), 401);
    gateway.stop().await;
}

#[tokio::test]
async fn tarpitted_connection_is_closed_when_its_certificate_is_revoked() {
    for is_http2 in [true, false] {
        let revocations = Revocations::default();
        let gateway = TestGateway::start(|settings| {
            settings.revocations = revocations.clone();
            (settings.limits.per_second, settings.limits.burst) = (1, 10);
        })
        .await;
        let agent = gateway.agent("r-1");
        gateway.flood(&agent, is_http2).await;
        let held = if is_http2 {
            gateway.connect(gateway.client(&agent.identity)).await.unwrap()
        } else {
            gateway.http1(&agent).await
        };
        timeout(PATIENCE, async {
            while (gateway.metrics.connections.get(), gateway.metrics.handshakes.get()) != (1, 0) {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("the connection is tarpitted");
        let leaf = tidewatch_contract::certificate::fingerprint(&agent.identity.chain[0]);
        revocations.set(Some(&serde_json::from_value(json!({"data": {leaf: "lost"}})).unwrap()));
        rest(held).await;
        assert_eq!((gateway.ended("out"), gateway.ended("flood")), (1, 0));
        gateway.stop().await;
    }
}

#[tokio::test]
async fn connections_of_a_deleted_kyma_are_closed() {
    for is_http2 in [true, false] {
        let gateway = TestGateway::start(|_| {}).await;
        let agent = gateway.agent("r-1");
        let other = gateway.agent("r-2");
        let [mut first, mut second] = [gateway.open(&agent, is_http2).await, gateway.open(&other, is_http2).await];
        gateway.send_accepted(&mut first, &agent, 1).await;
        gateway.send_accepted(&mut second, &other, 1).await;
        gateway.intake.depart(&agent.runtime);
        first.ends().await;
        gateway.send_accepted(&mut second, &other, 2).await;
        drop(second);
        gateway.stop().await;
    }
}
