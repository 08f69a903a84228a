//! Live connections of those who may speak no longer.

use serde_json::json;

use super::*;
use crate::ingress::enrolment::Revocations;

#[tokio::test]
async fn a_revoked_certificate_loses_its_connection_and_gets_no_other() {
    for is_http2 in [true, false] {
        let revocations = Revocations::default();
        let bed = Bed::start(|settings| settings.revocations = revocations.clone()).await;
        let (old, new, other) = (bed.agent("r-1"), bed.agent("r-1"), bed.agent("r-2"));
        let open = async |agent: &Agent| bed.open(agent, is_http2).await;
        let [mut first, mut second, mut third] = [open(&old).await, open(&new).await, open(&other).await];
        for (counter, (sender, agent)) in (1..).zip([(&mut first, &old), (&mut second, &new), (&mut third, &other)]) {
            bed.says(sender, agent, counter).await;
        }
        let revoke = |keys: &[&str]| {
            let data: serde_json::Map<_, _> = keys.iter().map(|key| ((*key).to_owned(), json!("lost"))).collect();
            revocations.set(Some(&serde_json::from_value(json!({"data": data})).unwrap()));
        };
        let leaf = tidewatch_shared::certificate::fingerprint(&old.identity.chain[0]);
        revoke(&[&leaf]);
        first.ends().await;
        // A new certificate of the same runtime is as good as ever.
        bed.says(&mut second, &new, 11).await;

        let mut again = open(&old).await;
        let answer = again.send(bed.request(&old, 12, is_http2)).await.unwrap();
        let told: Value = serde_json::from_slice(answer.body()).unwrap();
        assert_eq!((answer.status().as_u16(), told["type"].as_str().unwrap().ends_with("/certificate")), (401, true));
        again.ends().await;

        revoke(&[&leaf, "r-1"]);
        second.ends().await;
        // Nobody else is disturbed.
        bed.says(&mut third, &other, 13).await;
        bed.until_ended(&["out"], 2).await;
        assert_eq!((bed.ended("refused"), bed.intake.closed()), (1, 0), "we have ended them");
        drop(third);
        bed.stop().await;
    }
}

#[tokio::test]
async fn who_is_held_at_the_door_loses_its_place_when_it_is_revoked() {
    for is_http2 in [true, false] {
        let revocations = Revocations::default();
        let bed = Bed::start(|settings| {
            settings.revocations = revocations.clone();
            (settings.limits.per_second, settings.limits.burst) = (1, 10);
        })
        .await;
        let agent = bed.agent("r-1");
        bed.flood(&agent, is_http2).await;
        let held =
            if is_http2 { bed.connect(bed.client(&agent.identity)).await.unwrap() } else { bed.http1(&agent).await };
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
        assert_eq!((bed.ended("out"), bed.ended("flood")), (1, 0));
        bed.stop().await;
    }
}

#[tokio::test]
async fn the_connections_of_a_kyma_that_is_gone_end() {
    for is_http2 in [true, false] {
        let revocations = Revocations::default();
        let bed = Bed::start(|settings| settings.revocations = revocations.clone()).await;
        let (agent, other) = (bed.agent("r-1"), bed.agent("r-2"));
        let [mut first, mut second] = [bed.open(&agent, is_http2).await, bed.open(&other, is_http2).await];
        bed.says(&mut first, &agent, 1).await;
        bed.says(&mut second, &other, 1).await;
        bed.intake.gone.lock().unwrap().push(agent.runtime.clone());
        revocations.moved();
        first.ends().await;
        bed.says(&mut second, &other, 2).await;
        drop(second);
        bed.stop().await;
    }
}
