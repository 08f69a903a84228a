//! Token authentication and authorization in KCP, as the API server's delegated authentication does it: a TokenReview,
//! then a SubjectAccessReview of a `nonResourceURL`. Results are cached for a short time.

use std::{collections::HashMap, sync::Arc, time::Duration};

use aws_lc_rs::digest::{SHA256, digest};
use http::HeaderMap;
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, UserInfo},
    authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
};
use kube::{Api, Client, api::PostParams};
use parking_lot::Mutex;
use tidewatch_kit::log_error;
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};

use crate::bearer::bearer;

/// Permission that a request needs: a verb on a `nonResourceURL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Permission {
    pub(super) path: &'static str,
    pub(super) verb: &'static str,
}

/// Time to live of an allowed request; a revoked permission stays effective for at most this long.
const ALLOWED_TTL: Duration = Duration::from_secs(30);
/// Time to live of a refusal, shorter so that a new permission takes effect soon.
const REFUSED_TTL: Duration = Duration::from_secs(5);
/// Maximum number of cached results.
const MAX_CACHED: usize = 256;
/// Deadline of both reviews together.
const DEADLINE: Duration = Duration::from_secs(5);
/// Concurrent reviews.
const MAX_CONCURRENT: usize = 4;

/// Result of an authorization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Authorization {
    /// The token's user has the permission.
    Allowed,
    /// No token, or one that KCP does not authenticate; 401.
    Unauthenticated,
    /// KCP authenticates the token, and its user lacks the permission; 403.
    Forbidden,
    /// The reviews in KCP failed or exceeded their deadline; 503.
    Unavailable,
}

/// Authorizes requests by reviews in KCP. Clones share one cache.
#[derive(Clone)]
pub(super) struct TokenReviewer(Arc<Inner>);

struct Inner {
    kcp: Client,
    slots: Semaphore,
    cache: Mutex<Cache>,
}

/// Results with their expiry, by the SHA-256 of verb, path and token: tokens themselves are not kept.
type Cache = HashMap<Vec<u8>, (Authorization, Instant)>;

impl TokenReviewer {
    pub(super) fn new(kcp: Client) -> Self {
        Self(Arc::new(Inner { kcp, slots: Semaphore::new(MAX_CONCURRENT), cache: Mutex::default() }))
    }

    /// Checks that the user of the request's bearer token has a permission.
    pub(super) async fn authorize(&self, headers: &HeaderMap, permission: Permission) -> Authorization {
        let Some(token) = bearer(headers) else { return Authorization::Unauthenticated };
        // Unambiguous, since neither paths nor verbs contain spaces.
        let key = format!("{} {} {token}", permission.verb, permission.path);
        let key = digest(&SHA256, key.as_bytes()).as_ref().to_vec();
        if let Some(cached) = self.cached(&key, Instant::now()) {
            return cached;
        }
        match timeout(DEADLINE, self.review(token, permission)).await {
            Ok(Ok(authorization)) => {
                self.cache(key, authorization, Instant::now());
                authorization
            }
            Ok(Err(error)) => {
                log_error!(warn, &error, "Token review failed");
                Authorization::Unavailable
            }
            Err(_) => {
                tracing::warn!("Token review timed out");
                Authorization::Unavailable
            }
        }
    }

    fn cached(&self, key: &[u8], now: Instant) -> Option<Authorization> {
        self.0.cache.lock().get(key).filter(|(_, expiry)| now < *expiry).map(|(authorization, _)| *authorization)
    }

    fn cache(&self, key: Vec<u8>, authorization: Authorization, now: Instant) {
        let mut cache = self.0.cache.lock();
        cache.retain(|_, (_, expiry)| now < *expiry);
        // A full cache takes no further results, so that a client that tries many tokens evicts nothing.
        if cache.len() < MAX_CACHED {
            let ttl = if authorization == Authorization::Allowed { ALLOWED_TTL } else { REFUSED_TTL };
            cache.insert(key, (authorization, now + ttl));
        }
    }

    async fn review(&self, token: &str, permission: Permission) -> kube::Result<Authorization> {
        // The semaphore is never closed.
        let Ok(_permit) = self.0.slots.acquire().await else { return Ok(Authorization::Unavailable) };
        let spec = TokenReviewSpec { token: Some(token.to_owned()), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let review = Api::<TokenReview>::all(self.0.kcp.clone()).create(&PostParams::default(), &review).await?;
        let user = review.status.filter(|status| status.authenticated == Some(true)).and_then(|status| status.user);
        let Some(user) = user else { return Ok(Authorization::Unauthenticated) };
        let review = Api::<SubjectAccessReview>::all(self.0.kcp.clone());
        let review = review.create(&PostParams::default(), &access_review(user, permission)).await?;
        // `denied` overrides `allowed`; with neither, the request is refused.
        let allowed = review.status.is_some_and(|status| status.allowed && status.denied != Some(true));
        Ok(if allowed { Authorization::Allowed } else { Authorization::Forbidden })
    }
}

fn access_review(user: UserInfo, permission: Permission) -> SubjectAccessReview {
    let path = NonResourceAttributes { path: Some(permission.path.to_owned()), verb: Some(permission.verb.to_owned()) };
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: user.username,
            uid: user.uid,
            groups: user.groups,
            extra: user.extra,
            non_resource_attributes: Some(path),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{HeaderValue, StatusCode, header::AUTHORIZATION};
    use serde_json::{Value, json};
    use tidewatch_cluster::testing;

    use super::*;

    const READ: Permission = Permission { path: "/fleet", verb: "get" };

    /// A KCP that authenticates `good` and `poor` and allows `good` alone; counts the reviews.
    fn reviewer(reviews: &Arc<AtomicUsize>) -> TokenReviewer {
        let reviews = reviews.clone();
        TokenReviewer::new(testing::client("default", move |parts, body| {
            reviews.fetch_add(1, Ordering::Relaxed);
            let body: Value = serde_json::from_slice(body).unwrap();
            let (status, response) = match parts.uri.path() {
                "/apis/authentication.k8s.io/v1/tokenreviews" => {
                    let token = body["spec"]["token"].as_str().unwrap();
                    let user = json!({"username": token, "groups": ["g"], "extra": {"a": ["b"]}});
                    let authenticated = ["good", "poor"].contains(&token);
                    (StatusCode::CREATED, json!({"spec": {}, "status": {"authenticated": authenticated, "user": user}}))
                }
                "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
                    let spec = &body["spec"];
                    let granted = spec["nonResourceAttributes"] == json!({"path": "/fleet", "verb": "get"});
                    let allowed = granted && spec["user"] == "good";
                    assert_eq!((&spec["groups"], &spec["extra"]), (&json!(["g"]), &json!({"a": ["b"]})));
                    (StatusCode::CREATED, json!({"spec": {}, "status": {"allowed": allowed}}))
                }
                other => panic!("{other}"),
            };
            Some((status, response.to_string()))
        }))
    }

    fn authorization(token: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_str(token).unwrap())])
    }

    #[tokio::test(start_paused = true)]
    async fn results_of_kcp_are_cached_until_they_expire() {
        let reviews = Arc::new(AtomicUsize::new(0));
        let reviewer = reviewer(&reviews);
        for _ in 0..3 {
            assert_eq!(reviewer.authorize(&authorization("Bearer good"), READ).await, Authorization::Allowed);
        }
        assert_eq!(reviews.load(Ordering::Relaxed), 2);
        assert_eq!(reviewer.authorize(&authorization("bearer poor"), READ).await, Authorization::Forbidden);
        assert_eq!(reviewer.authorize(&authorization("Bearer bad"), READ).await, Authorization::Unauthenticated);
        assert_eq!(reviews.load(Ordering::Relaxed), 5);
        tokio::time::advance(ALLOWED_TTL).await;
        assert_eq!(reviewer.authorize(&authorization("Bearer good"), READ).await, Authorization::Allowed);
        assert_eq!(reviews.load(Ordering::Relaxed), 7);
        let other = Permission { path: "/rotate-ca", verb: "post" };
        assert_eq!(
            reviewer.authorize(&authorization("Bearer good"), other).await,
            Authorization::Forbidden,
            "each permission is reviewed"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn requests_without_one_bearer_token_cause_no_review() {
        let reviews = Arc::new(AtomicUsize::new(0));
        let reviewer = reviewer(&reviews);
        let mut twice = authorization("Bearer good");
        twice.append(AUTHORIZATION, HeaderValue::from_static("Bearer good"));
        for headers in
            [HeaderMap::new(), authorization("Basic good"), authorization("Bearer "), authorization("good"), twice]
        {
            assert_eq!(reviewer.authorize(&headers, READ).await, Authorization::Unauthenticated);
        }
        assert_eq!(reviews.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn cache_is_bounded_and_expires() {
        let reviewer = reviewer(&Arc::default());
        for token in 0..MAX_CACHED * 2 {
            reviewer.authorize(&authorization(&format!("Bearer {token}")), READ).await;
        }
        assert_eq!(reviewer.0.cache.lock().len(), MAX_CACHED);
        tokio::time::advance(REFUSED_TTL).await;
        assert_eq!(reviewer.authorize(&authorization("Bearer good"), READ).await, Authorization::Allowed);
        assert_eq!(reviewer.0.cache.lock().len(), 1);
    }

    #[tokio::test]
    async fn failing_review_refuses_the_request() {
        let reviewer = TokenReviewer::new(testing::client("default", |_, _| Some((StatusCode::FORBIDDEN, "{}"))));
        assert_eq!(reviewer.authorize(&authorization("Bearer good"), READ).await, Authorization::Unavailable);
    }
}
