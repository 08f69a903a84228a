//! Who bears a token, and whether they have the right for what they ask: KCP is asked both, and its answers are kept for a moment.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use aws_lc_rs::digest::{SHA256, digest};
use http::HeaderMap;
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, UserInfo},
    authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
};
use kube::{Api, Client, api::PostParams};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};

use crate::ingress::bearer::bearer;

/// What must be granted for a request, as a `nonResourceURL` and a verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Right {
    pub(super) path: &'static str,
    pub(super) verb: &'static str,
}

/// A good answer holds so long, at most: a right that is taken away works on until then.
const ALLOWED_FOR: Duration = Duration::from_secs(30);
/// A bad one: whoever was granted it meanwhile need not wait long.
const REFUSED_FOR: Duration = Duration::from_secs(5);
/// Answers that are kept.
const KEPT: usize = 256;
/// Both questions together.
const DEADLINE: Duration = Duration::from_secs(5);
/// Questions that are asked at the same time.
const AT_ONCE: usize = 4;

/// What may be done with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is answered.
    Allowed,
    /// No token, or one that KCP does not know; 401.
    Unknown,
    /// KCP knows who it is and does not allow it; 403.
    Forbidden,
    /// KCP could not be asked; 503.
    Unasked,
}

/// Asks KCP; clones share what they know.
#[derive(Clone)]
pub(super) struct Reviewer(Arc<Inner>);

struct Inner {
    kcp: Client,
    asking: Semaphore,
    known: Mutex<Known>,
}

/// By the hash of a token with what was asked: tokens themselves are not kept.
type Known = HashMap<Vec<u8>, (Verdict, Instant)>;

impl Reviewer {
    pub(super) fn new(kcp: Client) -> Self {
        Self(Arc::new(Inner { kcp, asking: Semaphore::new(AT_ONCE), known: Mutex::default() }))
    }

    /// Judges whether the bearer of a request's token has a right.
    pub(super) async fn judge(&self, headers: &HeaderMap, right: Right) -> Verdict {
        let Some(token) = bearer(headers) else { return Verdict::Unknown };
        // Neither a path nor a verb has a space.
        let asked = format!("{} {} {token}", right.verb, right.path);
        let hash = digest(&SHA256, asked.as_bytes()).as_ref().to_vec();
        if let Some(verdict) = self.known(&hash, Instant::now()) {
            return verdict;
        }
        match timeout(DEADLINE, self.ask(token, right)).await {
            Ok(Ok(verdict)) => {
                self.keep(hash, verdict, Instant::now());
                verdict
            }
            Ok(Err(error)) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "The bearer of a token could not be reviewed");
                Verdict::Unasked
            }
            Err(_) => {
                tracing::warn!("The bearer of a token could not be reviewed in time");
                Verdict::Unasked
            }
        }
    }

    fn known(&self, hash: &[u8], now: Instant) -> Option<Verdict> {
        self.lock().get(hash).filter(|(_, until)| now < *until).map(|(verdict, _)| *verdict)
    }

    fn keep(&self, hash: Vec<u8>, verdict: Verdict, now: Instant) {
        let mut known = self.lock();
        known.retain(|_, (_, until)| now < *until);
        // Whoever tries many tokens makes room for none of them.
        if known.len() < KEPT {
            let lasts = if verdict == Verdict::Allowed { ALLOWED_FOR } else { REFUSED_FOR };
            known.insert(hash, (verdict, now + lasts));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ask(&self, token: &str, right: Right) -> kube::Result<Verdict> {
        // Nobody closes the semaphore.
        let Ok(_permit) = self.0.asking.acquire().await else { return Ok(Verdict::Unasked) };
        let spec = TokenReviewSpec { token: Some(token.to_owned()), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let review = Api::<TokenReview>::all(self.0.kcp.clone()).create(&PostParams::default(), &review).await?;
        let user = review.status.filter(|status| status.authenticated == Some(true)).and_then(|status| status.user);
        let Some(user) = user else { return Ok(Verdict::Unknown) };
        let review = Api::<SubjectAccessReview>::all(self.0.kcp.clone());
        let review = review.create(&PostParams::default(), &may(user, right)).await?;
        // A denial wins over a permission; what is neither is refused.
        let allowed = review.status.is_some_and(|status| status.allowed && status.denied != Some(true));
        Ok(if allowed { Verdict::Allowed } else { Verdict::Forbidden })
    }
}

fn may(user: UserInfo, right: Right) -> SubjectAccessReview {
    let path = NonResourceAttributes { path: Some(right.path.to_owned()), verb: Some(right.verb.to_owned()) };
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

    use super::*;
    use crate::testing;

    const SEE: Right = Right { path: "/fleet", verb: "get" };

    /// A KCP that knows `good` and `poor` and allows `good` alone; counts what it is asked.
    fn reviewer(asked: &Arc<AtomicUsize>) -> Reviewer {
        let asked = asked.clone();
        Reviewer::new(testing::client("default", move |parts, body| {
            asked.fetch_add(1, Ordering::Relaxed);
            let body: Value = serde_json::from_slice(body).unwrap();
            let (status, answer) = match parts.uri.path() {
                "/apis/authentication.k8s.io/v1/tokenreviews" => {
                    let token = body["spec"]["token"].as_str().unwrap();
                    let user = json!({"username": token, "groups": ["g"], "extra": {"a": ["b"]}});
                    let known = ["good", "poor"].contains(&token);
                    (StatusCode::CREATED, json!({"spec": {}, "status": {"authenticated": known, "user": user}}))
                }
                "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
                    let spec = &body["spec"];
                    let sees = spec["nonResourceAttributes"] == json!({"path": "/fleet", "verb": "get"});
                    let allowed = sees && spec["user"] == "good";
                    assert_eq!((&spec["groups"], &spec["extra"]), (&json!(["g"]), &json!({"a": ["b"]})));
                    (StatusCode::CREATED, json!({"spec": {}, "status": {"allowed": allowed}}))
                }
                other => panic!("{other}"),
            };
            Some((status, answer.to_string()))
        }))
    }

    fn with(token: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_str(token).unwrap())])
    }

    #[tokio::test(start_paused = true)]
    async fn kcp_decides_and_is_asked_once_in_a_while() {
        let asked = Arc::new(AtomicUsize::new(0));
        let reviewer = reviewer(&asked);
        for _ in 0..3 {
            assert_eq!(reviewer.judge(&with("Bearer good"), SEE).await, Verdict::Allowed);
        }
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        assert_eq!(reviewer.judge(&with("bearer poor"), SEE).await, Verdict::Forbidden);
        assert_eq!(reviewer.judge(&with("Bearer bad"), SEE).await, Verdict::Unknown);
        assert_eq!(asked.load(Ordering::Relaxed), 5);
        tokio::time::advance(ALLOWED_FOR).await;
        assert_eq!(reviewer.judge(&with("Bearer good"), SEE).await, Verdict::Allowed);
        assert_eq!(asked.load(Ordering::Relaxed), 7);
        let other = Right { path: "/rotate-ca", verb: "post" };
        assert_eq!(reviewer.judge(&with("Bearer good"), other).await, Verdict::Forbidden, "one right is not another");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_no_token_costs_kcp_nothing() {
        let asked = Arc::new(AtomicUsize::new(0));
        let reviewer = reviewer(&asked);
        let mut twice = with("Bearer good");
        twice.append(AUTHORIZATION, HeaderValue::from_static("Bearer good"));
        for headers in [HeaderMap::new(), with("Basic good"), with("Bearer "), with("good"), twice] {
            assert_eq!(reviewer.judge(&headers, SEE).await, Verdict::Unknown);
        }
        assert_eq!(asked.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded() {
        let reviewer = reviewer(&Arc::default());
        for token in 0..KEPT * 2 {
            reviewer.judge(&with(&format!("Bearer {token}")), SEE).await;
        }
        assert_eq!(reviewer.lock().len(), KEPT);
        tokio::time::advance(REFUSED_FOR).await;
        assert_eq!(reviewer.judge(&with("Bearer good"), SEE).await, Verdict::Allowed);
        assert_eq!(reviewer.lock().len(), 1);
    }

    #[tokio::test]
    async fn a_control_plane_that_cannot_be_asked_lets_nobody_in() {
        let reviewer = Reviewer::new(testing::client("default", |_, _| Some((StatusCode::FORBIDDEN, "{}"))));
        assert_eq!(reviewer.judge(&with("Bearer good"), SEE).await, Verdict::Unasked);
    }
}
