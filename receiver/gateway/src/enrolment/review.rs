//! TokenReview at the runtime's own API server.

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::{Api, Client, api::PostParams};
use tidewatch_api::{
    key::KymaKey,
    names::{AGENT_OBJECT, SKR_NAMESPACE},
};
use tidewatch_cluster::runtime_access::describe;

use super::{CALL_DEADLINE, EnrolmentError, RuntimeCalls, token::TokenError};

/// Key of the token's pod in `status.user.extra`.
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// Checks that the runtime authenticates the token as that of its agent, in that pod.
pub(super) async fn review(
    kyma: &KymaKey,
    client: Client,
    token: &str,
    audience: &str,
    pod: &str,
    calls: &RuntimeCalls,
) -> Result<(), EnrolmentError> {
    let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences: Some(vec![audience.to_owned()]) };
    let review = TokenReview { spec, ..TokenReview::default() };
    let reviews = Api::<TokenReview>::all(client);
    let params = PostParams::default();
    let error = match calls.make("review", reviews.create(&params, &review)).await {
        Some(Ok(review)) => return Ok(evaluate(review.status.unwrap_or_default(), audience, pod)?),
        Some(Err(error)) => describe(&error),
        None => format!("the runtime did not respond within {CALL_DEADLINE:?}"),
    };
    tracing::warn!(%kyma, error, "Token review failed");
    Err(EnrolmentError::Unreachable)
}

fn evaluate(status: TokenReviewStatus, audience: &str, pod: &str) -> Result<(), TokenError> {
    let is_for_us = status.audiences.unwrap_or_default().iter().any(|named| named == audience);
    let Some(user) = status.user.filter(|_| status.authenticated == Some(true) && is_for_us) else {
        return Err(TokenError::Unauthenticated);
    };
    let name = format!("system:serviceaccount:{SKR_NAMESPACE}:{AGENT_OBJECT}");
    let pods = user.extra.unwrap_or_default().remove(POD_UID).unwrap_or_default();
    let is_agent = user.username == Some(name) && pods == [pod];
    if is_agent { Ok(()) } else { Err(TokenError::Other) }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::enrolment::tests::testing::AUDIENCE;

    fn evaluated(change: impl FnOnce(&mut Value)) -> Result<(), TokenError> {
        let mut status = json!({"authenticated": true, "audiences": [AUDIENCE], "user": {
            "username": "system:serviceaccount:kyma-system:tidewatch-agent", "extra": {POD_UID: ["u"]}}});
        change(&mut status);
        evaluate(serde_json::from_value(status).unwrap(), AUDIENCE, "u")
    }

    #[test]
    fn review_status_must_match_in_every_field() {
        use TokenError::{Other, Unauthenticated};
        assert_eq!(evaluated(|_| {}), Ok(()));
        for (path, value, expected) in [
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
            let evaluated = evaluated(|status| *status.pointer_mut(path).unwrap() = value.clone());
            assert_eq!(evaluated, Err(expected), "{path}: {value}");
        }
        assert_eq!(evaluate(TokenReviewStatus::default(), AUDIENCE, "u"), Err(Unauthenticated));
    }
}
