//! Tests of fetches, with a registry in the process and paused time.

use serde_json::json;
use tokio::time::Instant;

use super::*;
use crate::{
    credentials::RegistryAddress,
    testing::{FakeRegistry, Protection, Reply, digest_of, of_result},
};

const REPOSITORY: &str = "component-descriptors/example.org/m";
const TAG: Reference<'static> = Reference::Tag("1.0.0");
const BEARER: &str = r#"Bearer realm="https://registry.example.com/token?x=1",service="the registry""#;

fn fetcher(registry: &FakeRegistry) -> Fetcher {
    let allowed = ["storage.example.com", "auth.example.com"].map(|host| host.parse().unwrap());
    Fetcher::new(registry.transport().into(), allowed.into(), Metrics::default())
}

fn target(address: &str, user: Option<(&str, &str)>) -> RegistryTarget {
    let address: RegistryAddress = address.parse().unwrap();
    let basic = |(user, password): (&str, &str)| super::super::credentials::Credentials::Basic {
        username: user.into(),
        password: password.into(),
    };
    RegistryTarget::new(address, user.map(basic))
}

fn anonymous() -> RegistryTarget {
    target("registry.example.com", None)
}

async fn blob(registry: &FakeRegistry, content: &[u8], size: Size) -> Result<Bytes, FetchError> {
    fetcher(registry).blob(&anonymous(), REPOSITORY, Digest::of(content), size).await
}

/// Fetches a blob of four bytes for which the registry gives a reply of its own.
async fn scripted(reply: Reply) -> Result<Bytes, FetchError> {
    let registry = FakeRegistry::default();
    registry.script("/blobs/", [reply]);
    blob(&registry, b"blob", Size::Exactly(4)).await
}

#[tokio::test]
async fn manifest_and_blob_are_fetched_below_the_sub_path() {
    let registry = FakeRegistry::default();
    let repository = format!("prod/{REPOSITORY}");
    let digest = registry.component(&repository, "1.0.0", "descriptor");
    let fetcher = fetcher(&registry);
    let target = target("registry.example.com/prod", None);
    let (manifest, by_tag, _) = fetcher.manifest(&target, REPOSITORY, TAG).await.unwrap();
    assert_eq!(by_tag.to_string(), digest);
    let (same, ..) = fetcher.manifest(&target, REPOSITORY, Reference::Digest(by_tag)).await.unwrap();
    assert_eq!(same, manifest);
    let layer = &manifest.layers[0];
    let content = fetcher.blob(&target, REPOSITORY, layer.digest, Size::Exactly(layer.size)).await.unwrap();
    assert_eq!(&content[..], b"descriptor");
    assert!(registry.received().iter().all(|received| received.authorization.is_none()));
    assert_eq!(of_result(&fetcher.metrics.fetches, "ok"), 3);
    assert_eq!(
        registry.received()[0].uri,
        format!("https://registry.example.com/v2/prod/{REPOSITORY}/manifests/1.0.0")
    );
}

#[tokio::test(start_paused = true)]
async fn each_bad_response_has_its_error() {
    let wrong = digest_of(b"other");
    let server = |status, after| FetchError::Server { status, after };
    let artefact = format!("registry.example.com/{REPOSITORY}@{}", Digest::of(b"blob"));
    for (reply, error) in [
        (Reply::status(404), FetchError::NotFound { artefact: artefact.clone(), with_credentials: false }),
        (Reply::status(403), FetchError::Denied { artefact, with_credentials: false }),
        (Reply::status(401), FetchError::Unauthorized { with_credentials: false }),
        (Reply::with(429, "retry-after", "9"), FetchError::RateLimited { after: Some(Duration::from_secs(9)) }),
        (Reply::status(503), server(503, None)),
        (Reply::with(500, "retry-after", "9999"), server(500, Some(Duration::from_secs(300)))),
        (Reply::status(206), FetchError::UnexpectedStatus(206)),
        (Reply::status(400), FetchError::UnexpectedStatus(400)),
        (Reply::Down, FetchError::Transport("connection refused".into())),
        (Reply::Broken("bl".into()), FetchError::Transport("connection reset".into())),
        (Reply::content("blo"), FetchError::SizeMismatch { expected: 4, actual: 3 }),
        (Reply::content("blobb"), FetchError::SizeMismatch { expected: 4, actual: 5 }),
        (
            Reply::content("evil"),
            FetchError::DigestMismatch { expected: Digest::of(b"blob"), actual: Digest::of(b"evil") },
        ),
    ] {
        assert_eq!(scripted(reply).await, Err(error));
    }
    let registry = FakeRegistry::default();
    registry.put(format!("/v2/{REPOSITORY}/manifests/1.0.0"), Reply::with(200, "docker-content-digest", wrong));
    let mismatch = fetcher(&registry).manifest(&anonymous(), REPOSITORY, TAG).await;
    assert!(matches!(mismatch, Err(FetchError::DigestMismatch { .. })), "{mismatch:?}");
}

#[tokio::test(start_paused = true)]
async fn every_wait_has_a_deadline() {
    let start = Instant::now();
    for (reply, stage, after) in [
        (Reply::Silent, Stage::Head, 20),
        (Reply::Stalled("b".into()), Stage::Progress, 10),
        // 1 KiB each second is too slow.
        (Reply::Endless(1 << 10, Duration::from_secs(1)), Stage::Progress, 10),
        // 3 KiB each second are progress, but the end does not come.
        (Reply::Endless(3 << 10, Duration::from_secs(1)), Stage::Whole, 120),
    ] {
        let registry = FakeRegistry::default();
        let begin = Instant::now();
        registry.script("/blobs/", [reply]);
        let after = Duration::from_secs(after);
        let error = blob(&registry, b"blob", Size::AtMost(1 << 30)).await;
        assert_eq!(error, Err(FetchError::Timeout { stage, after }));
        assert!(begin.elapsed() >= after && begin.elapsed() < after + Duration::from_secs(2), "{stage:?}");
    }
    assert!(start.elapsed() < Duration::from_secs(200));
}

#[tokio::test(start_paused = true)]
async fn endless_body_ends_at_its_limit_of_bytes() {
    for size in [Size::AtMost(1 << 20), Size::Exactly(1 << 20)] {
        let registry = FakeRegistry::default();
        registry.script("/blobs/", [Reply::Endless(64 << 10, Duration::from_millis(1))]);
        let fetcher = fetcher(&registry);
        let error = fetcher.blob(&anonymous(), REPOSITORY, Digest::of(b""), size).await.err().unwrap();
        assert!(matches!(error.reason(), "too_large" | "size_mismatch"), "{error}");
        assert_eq!(fetcher.metrics.received.get(), (1 << 20) + (64 << 10));
    }
    let registry = FakeRegistry::default();
    registry.script("/manifests/", [Reply::content(vec![b' '; (4 << 20) + 1])]);
    let error = fetcher(&registry).manifest(&anonymous(), REPOSITORY, TAG).await;
    assert_eq!(error.err(), Some(FetchError::TooLarge { limit: 4 << 20 }));
}

#[tokio::test]
async fn index_is_refused() {
    let registry = FakeRegistry::default();
    let index = json!({"schemaVersion": 2, "manifests": []}).to_string();
    registry.manifest(REPOSITORY, "1.0.0", "application/vnd.oci.image.index.v1+json", index.as_bytes());
    let error = fetcher(&registry).manifest(&anonymous(), REPOSITORY, TAG).await.err().unwrap();
    assert_eq!(
        error,
        FetchError::Index { artefact: format!("registry.example.com/{REPOSITORY}:1.0.0"), kind: "OCI image index" }
    );
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn malformed_names_send_no_request() {
    let registry = FakeRegistry::default();
    let fetcher = fetcher(&registry);
    for tag in ["", ".x", "a/b", "a?b", "a b", &"a".repeat(129)] {
        let error = fetcher.manifest(&anonymous(), REPOSITORY, Reference::Tag(tag)).await.err();
        assert_eq!(error, Some(FetchError::Name("tag")), "{tag}");
    }
    for repository in ["", "../x", "a//b", "A", "a?b", "a/"] {
        let error = fetcher.blob(&anonymous(), repository, Digest::of(b""), Size::AtMost(1)).await.err();
        assert_eq!(error, Some(FetchError::Name("repository")), "{repository}");
    }
    assert_eq!(registry.received(), []);
}

#[tokio::test]
async fn authorization_is_not_sent_to_another_origin() {
    let registry = FakeRegistry::default();
    let digest = registry.blob(REPOSITORY, b"blob");
    registry.protect("Basic dTpw", "Basic realm=\"r\"");
    let location = "https://storage.example.com/signed?x=y";
    registry.script("storage.example.com", [Reply::content("blob")]);
    let fetcher = fetcher(&registry);
    let target = target("registry.example.com", Some(("u", "p")));
    registry.put(format!("/v2/{REPOSITORY}/blobs/{digest}"), Reply::with(307, "location", location));
    let blob = fetcher.blob(&target, REPOSITORY, Digest::of(b"blob"), Size::Exactly(4)).await;
    assert_eq!(blob, Ok("blob".into()));
    let sent: Vec<_> = registry.received().into_iter().map(|received| (received.uri, received.authorization)).collect();
    assert_eq!(sent[1].1.as_deref(), Some("Basic dTpw"));
    assert_eq!(sent[2], (location.to_owned(), None));
    // A challenge of the storage is not met.
    registry.script("storage.example.com", [Reply::with(401, "www-authenticate", "Basic")]);
    let refused = fetcher.blob(&target, REPOSITORY, Digest::of(b"blob"), Size::Exactly(4)).await;
    assert_eq!(refused, Err(FetchError::Redirected { host: "storage.example.com".into(), status: 401 }));
    assert_eq!(registry.count("storage.example.com"), 2);
}

#[tokio::test]
async fn blob_is_followed_to_any_host_with_tls_without_credentials() {
    for address in ["registry.example.com", "http://registry.example.com"] {
        let registry = FakeRegistry::default();
        let target = target(address, Some(("u", "p")));
        let digest = registry.blob(REPOSITORY, b"blob");
        registry.protect("Basic dTpw", "Basic realm=\"r\"");
        registry
            .put(format!("/v2/{REPOSITORY}/blobs/{digest}"), Reply::with(307, "location", "https://cdn.example.org/a"));
        // The way back to the registry is without credentials, too.
        registry.script("cdn.example.org/a", [Reply::with(302, "location", "https://registry.example.com/signed")]);
        registry.script("/signed", [Reply::content("blob")]);
        let fetched = fetcher(&registry).blob(&target, REPOSITORY, Digest::of(b"blob"), Size::Exactly(4)).await;
        assert_eq!(fetched, Ok("blob".into()), "{address}");
        let sent: Vec<_> = registry.received().into_iter().map(|received| received.authorization).collect();
        assert_eq!(sent, [None, Some("Basic dTpw".to_owned()), None, None], "{address}");
    }
}

#[tokio::test]
async fn manifest_is_followed_to_allowed_hosts_and_verified() {
    let registry = FakeRegistry::default();
    let digest = registry.component("moved", "1.0.0", "descriptor");
    let location = "https://storage.example.com/v2/moved/manifests/1.0.0";
    let place = format!("/v2/{REPOSITORY}/manifests/");
    for reference in ["1.0.0", &digest] {
        registry.put(format!("{place}{reference}"), Reply::with(307, "location", location));
    }
    let fetcher = fetcher(&registry);
    for reference in [TAG, Reference::Digest(digest.parse().unwrap())] {
        let (_, fetched, _) = fetcher.manifest(&anonymous(), REPOSITORY, reference).await.unwrap();
        assert_eq!(fetched.to_string(), digest);
    }
    // The registry's own header tells the content, wherever that comes from.
    let other = digest_of(b"other");
    let moved =
        Reply::Of(307, vec![("location", location.to_owned()), ("docker-content-digest", other.clone())], Bytes::new());
    for reference in ["1.0.0", &other] {
        registry.put(format!("{place}{reference}"), moved.clone());
    }
    for reference in [TAG, Reference::Digest(other.parse().unwrap())] {
        let refused = fetcher.manifest(&anonymous(), REPOSITORY, reference).await.err().unwrap();
        assert!(matches!(refused, FetchError::DigestMismatch { .. }), "{refused}");
    }
}

#[tokio::test]
async fn registry_that_sends_no_challenge_is_asked_for_it_once() {
    let basic = || Reply::with(401, "www-authenticate", "Basic realm=\"r\"");
    // A challenge may come with a 200, and a registry that demands nothing at `/v2/` may demand something elsewhere.
    let pings = [basic(), Reply::with(200, "www-authenticate", "Basic realm=\"r\""), Reply::status(200)];
    for status in [401, 403, 404] {
        for ping in &pings {
            let registry = FakeRegistry::default();
            let digest = registry.blob(REPOSITORY, b"blob").parse().unwrap();
            let authorization = "Basic dTpw".to_owned();
            registry.refuse(Protection { authorization, refusal: Reply::status(status), ping: ping.clone() });
            let fetcher = fetcher(&registry);
            let known = target("registry.example.com", Some(("u", "p")));
            for _ in 0..2 {
                let blob = fetcher.blob(&known, REPOSITORY, digest, Size::Exactly(4)).await;
                assert_eq!(blob, Ok("blob".into()), "{status}");
            }
            assert_eq!(registry.received().len(), 4, "{status}: the authorization is kept");
            // What does not exist is looked for once with the authorization.
            let absent = fetcher.manifest(&known, REPOSITORY, TAG).await.err().unwrap();
            assert_eq!((absent.reason(), registry.received().len()), ("not_found", 5));
        }
    }
    let registry = FakeRegistry::default();
    let absent = fetcher(&registry).manifest(&anonymous(), REPOSITORY, TAG).await.err().unwrap();
    assert_eq!((absent.reason(), registry.received().len()), ("not_found", 1), "nothing could be sent");
}

#[tokio::test]
async fn registry_whose_challenge_cannot_be_read_gets_no_password() {
    let registry = FakeRegistry::default();
    let digest = registry.blob(REPOSITORY, b"blob").parse().unwrap();
    let protected =
        |ping: Reply| Protection { authorization: "Basic dTpw".to_owned(), refusal: Reply::status(404), ping };
    let known = target("registry.example.com", Some(("u", "p")));
    let fetcher = fetcher(&registry);
    for (status, reason) in [(503, "server"), (429, "rate_limited")] {
        registry.refuse(protected(Reply::status(status)));
        let failed = fetcher.blob(&known, REPOSITORY, digest, Size::Exactly(4)).await.unwrap_err();
        assert_eq!((failed.reason(), failed.is_retryable()), (reason, true));
    }
    assert!(registry.received().iter().all(|request| request.authorization.is_none()));
    registry.refuse(protected(Reply::with(401, "www-authenticate", "Basic realm=\"r\"")));
    assert_eq!(fetcher.blob(&known, REPOSITORY, digest, Size::Exactly(4)).await, Ok("blob".into()));
}

/// A right that is granted later takes effect at once: an authorization that led to 404 is not kept.
#[tokio::test]
async fn authorization_that_led_to_nothing_is_not_kept() {
    let registry = FakeRegistry::default();
    let ping = || Reply::with(401, "www-authenticate", "Basic realm=\"r\"");
    let protect = |authorization: &str| Protection {
        authorization: authorization.to_owned(),
        refusal: Reply::status(404),
        ping: ping(),
    };
    let digest = registry.blob(REPOSITORY, b"blob").parse().unwrap();
    let known = target("registry.example.com", Some(("u", "p")));
    let fetcher = fetcher(&registry);
    registry.refuse(protect("Bearer granted later"));
    let hidden = fetcher.blob(&known, REPOSITORY, digest, Size::Exactly(4)).await.unwrap_err();
    assert_eq!(hidden.reason(), "not_found");
    let before = registry.count("/v2/");
    registry.refuse(protect("Basic dTpw"));
    assert_eq!(fetcher.blob(&known, REPOSITORY, digest, Size::Exactly(4)).await, Ok("blob".into()));
    assert_eq!(registry.count("/v2/") - before, 3, "the challenge is asked for again");
}

#[tokio::test]
async fn stale_authorization_is_renewed_once() {
    for status in [401, 403] {
        let registry = FakeRegistry::default();
        let digest = registry.blob(REPOSITORY, b"blob").parse().unwrap();
        registry.protect("Bearer a", BEARER);
        registry.script("/token", [Reply::content(r#"{"token":"a"}"#), Reply::content(r#"{"token":"b"}"#)]);
        let target = anonymous();
        let fetcher = fetcher(&registry);
        assert!(fetcher.blob(&target, REPOSITORY, digest, Size::Exactly(4)).await.is_ok());
        let challenge = Reply::with(401, "www-authenticate", BEARER);
        let authorization = "Bearer b".to_owned();
        registry.refuse(Protection { authorization, refusal: Reply::status(status), ping: challenge });
        assert!(fetcher.blob(&target, REPOSITORY, digest, Size::Exactly(4)).await.is_ok(), "{status}");
        assert_eq!(registry.received().len(), 3 + 4, "{status}");
    }
}

#[tokio::test]
async fn index_is_requested_so_that_it_can_be_named() {
    let registry = FakeRegistry::default();
    registry.component(REPOSITORY, "1.0.0", "descriptor");
    let fetcher = fetcher(&registry);
    assert!(fetcher.manifest(&anonymous(), REPOSITORY, TAG).await.is_ok());
    let accept = registry.received()[0].headers["accept"].to_str().unwrap().to_owned();
    for kind in [
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    ] {
        assert!(accept.contains(kind), "{kind}: {accept}");
    }
}

#[tokio::test]
async fn forbidden_redirects_are_not_followed() {
    for (location, error) in
        [("http://registry.example.com/", RedirectError::Downgrade), ("/v2/again/blobs/x", RedirectError::TooMany)]
    {
        let registry = FakeRegistry::default();
        registry.script("/blobs/", [Reply::with(302, "location", location)]);
        assert_eq!(blob(&registry, b"blob", Size::Exactly(4)).await, Err(FetchError::Redirect(error.clone())));
        let requests = if error == RedirectError::TooMany { 4 } else { 1 };
        assert_eq!(registry.received().len(), requests, "{location}");
    }
    let registry = FakeRegistry::default();
    registry.script("/manifests/", [Reply::with(302, "location", "https://evil.example.com/")]);
    let refused = fetcher(&registry).manifest(&anonymous(), REPOSITORY, TAG).await.err();
    assert_eq!(refused, Some(FetchError::Redirect(RedirectError::Host("evil.example.com".into()))));
}

#[tokio::test(start_paused = true)]
async fn token_is_requested_once_until_it_expires() {
    let registry = FakeRegistry::default();
    let digest = registry.blob(REPOSITORY, b"blob");
    registry.protect("Bearer t", BEARER);
    registry.script("/token", [Reply::content(r#"{"access_token":"t","expires_in":300}"#)]);
    let fetcher = fetcher(&registry);
    let target = target("registry.example.com", Some(("u", "p")));
    for _ in 0..3 {
        let blob = fetcher.blob(&target, REPOSITORY, digest.parse().unwrap(), Size::Exactly(4)).await;
        assert_eq!(blob, Ok("blob".into()));
    }
    assert_eq!(registry.received().len(), 1 + 1 + 3);
    let token = &registry.received()[1];
    let scope = REPOSITORY.replace('/', "%2F");
    let uri = "https://registry.example.com/token?x=1&service=the%20registry";
    assert_eq!(token.uri, format!("{uri}&scope=repository%3A{scope}%3Apull"));
    assert_eq!(token.authorization.as_deref(), Some("Basic dTpw"));
    tokio::time::advance(Duration::from_secs(291)).await;
    assert!(fetcher.blob(&target, REPOSITORY, digest.parse().unwrap(), Size::Exactly(4)).await.is_ok());
    assert_eq!(registry.count("/token"), 2);
}

#[tokio::test]
async fn identity_token_is_exchanged_by_post() {
    let registry = FakeRegistry::default();
    let digest = registry.blob(REPOSITORY, b"blob");
    registry.protect("Bearer t", BEARER);
    registry.script("/token", [Reply::content(r#"{"access_token":"t"}"#)]);
    let config = json!({"auths": {"registry.example.com": {"identitytoken": "a+b"}}}).to_string();
    let target = RegistryTarget::from_docker_config(config.as_bytes(), "").unwrap();
    let fetched = fetcher(&registry).blob(&target, REPOSITORY, digest.parse().unwrap(), Size::Exactly(4)).await;
    assert!(fetched.is_ok());
    let token = &registry.received()[1];
    assert_eq!((token.method.as_str(), token.authorization.as_ref()), ("POST", None));
    assert!(token.body.starts_with("grant_type=refresh_token&client_id=tidewatch&refresh_token=a%2Bb&service="));
}

#[tokio::test]
async fn credentials_are_not_sent_to_a_foreign_token_server() {
    for (address, realm, permitted) in [
        ("registry.example.com", "https://evil.example.com/token", false),
        ("registry.example.com", "http://registry.example.com/token", false),
        ("registry.example.com", "https://registry.example.com@evil/token", false),
        ("registry.example.com", "no url", false),
        ("registry.example.com", "https://auth.example.com/token", true),
        ("http://registry.example.com", "http://registry.example.com:1/token", true),
    ] {
        let registry = FakeRegistry::default();
        let digest = registry.blob(REPOSITORY, b"blob");
        registry.protect("Bearer t", &format!("Bearer realm=\"{realm}\""));
        registry.script("/token", [Reply::content(r#"{"token":"t"}"#)]);
        let target = target(address, Some(("u", "p")));
        let fetched = fetcher(&registry).blob(&target, REPOSITORY, digest.parse().unwrap(), Size::Exactly(4)).await;
        let expected = if permitted { Ok("blob".into()) } else { Err(FetchError::TokenRealm(realm.into())) };
        assert_eq!((fetched, registry.count("/token")), (expected, usize::from(permitted)), "{realm}");
    }
}

#[tokio::test]
async fn refused_credentials_are_final() {
    for (challenge, requests) in [(BEARER, 3), ("Basic", 2)] {
        let registry = FakeRegistry::default();
        registry.protect("never", challenge);
        registry.script("/token", [Reply::content(r#"{"token":"refused"}"#)]);
        let target = target("registry.example.com", Some(("u", "p")));
        let error = fetcher(&registry).manifest(&target, REPOSITORY, TAG).await.err().unwrap();
        assert_eq!(error, FetchError::Unauthorized { with_credentials: true });
        assert!(!error.is_retryable());
        assert_eq!(registry.received().len(), requests, "{challenge}");
    }
}

#[tokio::test(start_paused = true)]
async fn failures_of_the_token_server_are_bounded_and_classified() {
    let text = |text: &str| Reply::content(text.to_owned());
    for (reply, reason) in [
        (Reply::status(401), "unauthorized"),
        (Reply::status(500), "server"),
        (Reply::with(302, "location", "https://evil.example.com/"), "redirect"),
        (Reply::content(vec![b' '; (64 << 10) + 1]), "too_large"),
        (Reply::Silent, "timeout"),
        (text("{}"), "malformed"),
        (text(r#"{"token":""}"#), "malformed"),
        (text(r#"{"token":"a\nb"}"#), "malformed"),
    ] {
        let registry = FakeRegistry::default();
        registry.protect("Bearer t", BEARER);
        registry.script("/token", [reply]);
        let fetcher = fetcher(&registry);
        let error = fetcher.manifest(&anonymous(), REPOSITORY, TAG).await.err().unwrap();
        assert_eq!((error.reason(), registry.received().len()), (reason, 2), "{error}");
        assert_eq!(of_result(&fetcher.metrics.fetches, reason), 1);
    }
}

#[tokio::test]
async fn token_of_one_target_is_not_sent_for_another() {
    let registry = FakeRegistry::default();
    let digest = registry.blob(REPOSITORY, b"blob").parse().unwrap();
    registry.protect("Basic dTpw", "Basic");
    let fetcher = fetcher(&registry);
    let old = target("registry.example.com", Some(("u", "p")));
    let new = target("other.example.com", Some(("u", "q")));
    assert!(fetcher.blob(&old, REPOSITORY, digest, Size::Exactly(4)).await.is_ok());
    assert!(fetcher.blob(&new, REPOSITORY, digest, Size::Exactly(4)).await.is_err());
    let sent = registry.received().into_iter().filter(|received| received.uri.contains("other.example.com"));
    assert!(sent.into_iter().all(|received| received.authorization.as_deref() != Some("Basic dTpw")));
}
