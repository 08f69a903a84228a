//! Live connections of those who may speak no longer.

use serde_json::json;

use super::*;
use crate::enrolment::Revocations;

/// Waits until a connection has ended.
async fn ends(sender: &mut http2::SendRequest<Full<Bytes>>) {
    timeout(PATIENCE, async {
        while sender.ready().await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the connection ends");
}

#[tokio::test]
async fn a_revoked_certificate_loses_its_connection_and_gets_no_other() {
    let revocations = Revocations::default();
    let bed = Bed::start(|settings| settings.revocations = revocations.clone()).await;
    let (old, new, other) = (bed.agent("r-1"), bed.agent("r-1"), bed.agent("r-2"));
    let [mut first, mut second, mut third] = [bed.http2(&old).await, bed.http2(&new).await, bed.http2(&other).await];
    for (counter, (sender, agent)) in (1..).zip([(&mut first, &old), (&mut second, &new), (&mut third, &other)]) {
        let answer = sender.send_request(bed.request(agent, counter, true)).await.unwrap();
        assert_eq!(answer.status(), StatusCode::ACCEPTED);
    }
    let revoke = |keys: &[&str]| {
        let data: serde_json::Map<_, _> = keys.iter().map(|key| ((*key).to_owned(), json!("lost"))).collect();
        revocations.set(Some(&serde_json::from_value(json!({"data": data})).unwrap()));
    };
    let leaf = tidewatch_shared::certificate::fingerprint(&old.identity.chain[0]);
    revoke(&[&leaf]);
    ends(&mut first).await;
    let answer = second.send_request(bed.request(&new, 11, true)).await.unwrap();
    assert_eq!(answer.status(), StatusCode::ACCEPTED, "a new certificate of the same runtime is as good as ever");

    let mut again = bed.http2(&old).await;
    let (status, told) = problem(again.send_request(bed.request(&old, 12, true)).await.unwrap()).await;
    assert_eq!((status.as_u16(), told["type"].as_str().unwrap().ends_with("/certificate")), (401, true));
    ends(&mut again).await;

    revoke(&[&leaf, "r-1"]);
    ends(&mut second).await;
    let answer = third.send_request(bed.request(&other, 13, true)).await.unwrap();
    assert_eq!(answer.status(), StatusCode::ACCEPTED, "nobody else is disturbed");
    let ended = || bed.metrics.connections_ended.get_or_create(&metrics::Why { reason: "out" }).get();
    timeout(PATIENCE, async {
        while ended() < 2 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the ends are counted");
    drop(third);
    bed.stop().await;
}

#[tokio::test]
async fn who_is_held_at_the_door_loses_its_place_when_it_is_revoked() {
    let revocations = Revocations::default();
    let bed = Bed::start(|settings| {
        settings.revocations = revocations.clone();
        (settings.limits.per_second, settings.limits.burst) = (1, 10);
    })
    .await;
    let agent = bed.agent("r-1");
    let mut flooding = bed.http2(&agent).await;
    while flooding.ready().await.is_ok() {
        let _ = flooding.send_request(bed.request(&agent, 1, true)).await;
    }
    drop(flooding);
    let held = bed.connect(bed.client(&agent.identity)).await.unwrap();
    timeout(PATIENCE, async {
        while (bed.metrics.connections.get(), bed.metrics.handshakes.get()) != (1, 0) {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("it is held");
    let leaf = tidewatch_shared::certificate::fingerprint(&agent.identity.chain[0]);
    revocations.set(Some(&serde_json::from_value(json!({"data": {leaf: "lost"}})).unwrap()));
    rest(held).await;
    let ended = |reason| bed.metrics.connections_ended.get_or_create(&metrics::Why { reason }).get();
    assert_eq!((ended("out"), ended("flood")), (1, 0));
    bed.stop().await;
}

#[tokio::test]
async fn the_connections_of_a_kyma_that_is_gone_end() {
    let revocations = Revocations::default();
    let bed = Bed::start(|settings| settings.revocations = revocations.clone()).await;
    let (agent, other) = (bed.agent("r-1"), bed.agent("r-2"));
    let [mut first, mut second] = [bed.http2(&agent).await, bed.http2(&other).await];
    for (sender, agent) in [(&mut first, &agent), (&mut second, &other)] {
        assert_eq!(sender.send_request(bed.request(agent, 1, true)).await.unwrap().status(), StatusCode::ACCEPTED);
    }
    bed.intake.gone.lock().unwrap().push(agent.runtime.clone());
    revocations.moved();
    ends(&mut first).await;
    assert_eq!(second.send_request(bed.request(&other, 2, true)).await.unwrap().status(), StatusCode::ACCEPTED);
    drop(second);
    bed.stop().await;
}
