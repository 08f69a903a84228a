//! Asks a runtime's own API server whose token it is.

use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::{Api, Client, api::PostParams};
use tidewatch_shared::names::{AGENT_OBJECT, SKR_NAMESPACE, TOKEN_AUDIENCE};
use tokio::{sync::Semaphore, time::timeout};

use super::{Refused, metrics::Metrics, token::InvalidToken};
use crate::{base::key::KymaKey, kube::runtime_access::describe};

/// From the call to the last byte of the answer.
const DEADLINE: Duration = Duration::from_secs(5);
/// Where an API server tells the pod of a token.
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// Whether the runtime says that this is the token of its agent, in that pod.
pub(super) async fn review(
    kyma: &KymaKey,
    client: Client,
    token: &str,
    pod: &str,
    calls: &Semaphore,
    metrics: &Metrics,
) -> Result<(), Refused> {
    let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences: Some(vec![TOKEN_AUDIENCE.to_owned()]) };
    let review = TokenReview { spec, ..TokenReview::default() };
    let answered = timeout(DEADLINE, async {
        // Nobody closes the semaphore.
        let _call = calls.acquire().await;
        Api::<TokenReview>::all(client).create(&PostParams::default(), &review).await
    });
    let why = match answered.await {
        Ok(Ok(review)) => {
            metrics.called("review", "answered");
            return judge(review.status.unwrap_or_default(), pod).map_err(Refused::Token);
        }
        Ok(Err(error)) => describe(&error),
        Err(_) => format!("the runtime did not answer within {DEADLINE:?}"),
    };
    metrics.called("review", "failed");
    tracing::warn!(%kyma, why, "A runtime could not be asked about a token");
    Err(Refused::Unreachable)
}

fn judge(status: TokenReviewStatus, pod: &str) -> Result<(), InvalidToken> {
    let is_meant = status.audiences.unwrap_or_default().iter().any(|audience| audience == TOKEN_AUDIENCE);
    let Some(user) = status.user.filter(|_| status.authenticated == Some(true) && is_meant) else {
        return Err(InvalidToken::Unauthenticated);
    };
    let name = format!("system:serviceaccount:{SKR_NAMESPACE}:{AGENT_OBJECT}");
    let pods = user.extra.unwrap_or_default().remove(POD_UID).unwrap_or_default();
    let is_agent = user.username == Some(name) && pods == [pod];
    if is_agent { Ok(()) } else { Err(InvalidToken::Other) }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn judged(change: impl FnOnce(&mut Value)) -> Result<(), InvalidToken> {
        let mut status = json!({"authenticated": true, "audiences": ["tidewatch"], "user": {
            "username": "system:serviceaccount:kyma-system:tidewatch-agent", "extra": {POD_UID: ["u"]}}});
        change(&mut status);
        judge(serde_json::from_value(status).unwrap(), "u")
    }

    #[test]
    fn all_of_it_must_be_said() {
        use InvalidToken::{Other, Unauthenticated};
        assert_eq!(judged(|_| {}), Ok(()));
        for (path, value, why) in [
            ("/authenticated", json!(false), Unauthenticated),
            ("/authenticated", Value::Null, Unauthenticated),
            ("/audiences", json!(["other"]), Unauthenticated),
            ("/audiences", Value::Null, Unauthenticated),
            ("/user", Value::Null, Unauthenticated),
            ("/user/username", json!("system:serviceaccount:kyma-system:default"), Other),
            ("/user/extra", Value::Null, Other),
            ("/user/extra", json!({POD_UID: ["v"]}), Other),
            ("/user/extra", json!({POD_UID: ["u", "v"]}), Other),
        ] {
            let judged = judged(|status| *status.pointer_mut(path).unwrap() = value.clone());
            assert_eq!(judged, Err(why), "{path}: {value}");
        }
        assert_eq!(judge(TokenReviewStatus::default(), "u"), Err(Unauthenticated));
    }
}
