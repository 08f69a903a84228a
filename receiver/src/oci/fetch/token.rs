//! Authorization of requests: Basic, and tokens of the registry's token server (distribution token specification).

use std::{
    collections::HashMap,
    fmt::Write as _,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderValue, Request, StatusCode, Uri,
    header::{AUTHORIZATION, CONTENT_TYPE},
};
use serde::Deserialize;
use tokio::time::Instant;

use super::{
    Fetcher, body,
    body::Size,
    challenge::Challenge,
    error::{FetchError, RedirectError, clean},
    redirect,
};
use crate::oci::credentials::{Credentials, Origin, RegistryTarget, Scheme};

/// Limit of a token server's response, in bytes.
const MAX_BYTES: u64 = 64 << 10;
/// Lifetime of a token without `expires_in`.
const DEFAULT_LIFETIME: Duration = Duration::from_secs(60);
/// Longest time that an authorization is reused.
const MAX_LIFETIME: Duration = Duration::from_secs(3_600);
/// A token is not used in the last seconds of its lifetime.
const MARGIN: Duration = Duration::from_secs(10);
/// Authorizations kept; one per repository.
const MAX_CACHED: usize = 256;

/// Value of the header `Authorization` with the time from which it is not reused.
#[derive(Clone)]
pub(super) struct Authorization {
    pub(super) header: HeaderValue,
    until: Instant,
}

/// Authorizations by target and repository.
#[derive(Default)]
pub(super) struct Authorizations(Mutex<HashMap<(u64, String), Authorization>>);

impl Authorizations {
    pub(super) fn get(&self, target: &RegistryTarget, repository: &str) -> Option<HeaderValue> {
        let cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let authorization = cached.get(&(target.generation(), repository.to_owned()))?;
        (authorization.until > Instant::now()).then(|| authorization.header.clone())
    }

    pub(super) fn put(&self, target: &RegistryTarget, repository: &str, authorization: Authorization) {
        let now = Instant::now();
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Those of a replaced target are of no use.
        cached.retain(|(generation, _), kept| *generation >= target.generation() && kept.until > now);
        if cached.len() >= MAX_CACHED {
            cached.clear();
        }
        cached.insert((target.generation(), repository.to_owned()), authorization);
    }

    pub(super) fn remove(&self, target: &RegistryTarget, repository: &str) {
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cached.remove(&(target.generation(), repository.to_owned()));
    }
}

impl Fetcher {
    /// Meets a challenge: with the credentials of the target, or anonymously where a token server permits it.
    pub(super) async fn authorize(
        &self,
        target: &RegistryTarget,
        repository: &str,
        challenge: Option<Challenge>,
    ) -> Result<Authorization, FetchError> {
        let refused = || FetchError::Unauthorized { with_credentials: target.credentials.is_some() };
        match challenge.ok_or_else(refused)? {
            Challenge::Basic => {
                let header = target.credentials.as_ref().and_then(Credentials::basic).ok_or_else(refused)?;
                Ok(Authorization { header, until: Instant::now() + MAX_LIFETIME })
            }
            Challenge::Bearer { realm, service } => {
                self.token(target, repository, &realm, service.as_deref().unwrap_or_default()).await
            }
        }
    }

    async fn token(
        &self,
        target: &RegistryTarget,
        repository: &str,
        realm: &str,
        service: &str,
    ) -> Result<Authorization, FetchError> {
        let uri = self.realm(target, realm)?;
        let response = self.send(token_request(target, &uri, repository, service)?).await?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::BAD_REQUEST | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Err(FetchError::Unauthorized { with_credentials: target.credentials.is_some() });
            }
            status if status.is_redirection() => return Err(FetchError::Redirect(RedirectError::NotBlob)),
            status => {
                return Err(FetchError::of_status(
                    status,
                    response.headers(),
                    "the token server of the registry".into(),
                ));
            }
        }
        let content = body::read(response.into_body(), Size::AtMost(MAX_BYTES), &self.limits, |bytes| {
            self.metrics.received.inc_by(bytes as u64);
        });
        Token::parse(&content.await?)
    }

    /// Returns the URL of the token server, if it may get the credentials.
    fn realm(&self, target: &RegistryTarget, realm: &str) -> Result<Uri, FetchError> {
        let registry = &target.address.origin;
        let permitted = |origin: &Origin| {
            (origin.scheme() == Scheme::Https || registry.scheme() == Scheme::Http)
                && redirect::is_permitted(origin, registry, &self.allowed)
        };
        let uri: Option<Uri> = realm.parse().ok();
        let uri = uri.filter(|uri| Origin::of(uri).is_some_and(|origin| permitted(&origin)));
        uri.ok_or_else(|| FetchError::TokenRealm(clean(realm)))
    }
}

/// Builds the request: GET with Basic or anonymously, or POST with the refresh token.
fn token_request(
    target: &RegistryTarget,
    realm: &Uri,
    repository: &str,
    service: &str,
) -> Result<Request<Bytes>, FetchError> {
    let malformed = |_| FetchError::Malformed("the URL of its token server");
    let scope = format!("repository:{repository}:pull");
    let parameters = format!("service={}&scope={}", encoded(service), encoded(&scope));
    if let Some(Credentials::IdentityToken(token)) = &target.credentials {
        let form =
            format!("grant_type=refresh_token&client_id=tidewatch&refresh_token={}&{parameters}", encoded(token));
        let request = Request::post(realm).header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        return request.body(form.into()).map_err(malformed);
    }
    let separator = if realm.query().is_some() { '&' } else { '?' };
    let mut request = Request::get(format!("{realm}{separator}{parameters}"));
    if let Some(header) = target.credentials.as_ref().and_then(Credentials::basic) {
        request = request.header(AUTHORIZATION, header);
    }
    request.body(Bytes::new()).map_err(malformed)
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

impl Token {
    fn parse(content: &[u8]) -> Result<Authorization, FetchError> {
        let malformed = FetchError::Malformed("the token server's response has no usable token");
        let Ok(Self { token, access_token, expires_in }) = serde_json::from_slice(content) else {
            return Err(malformed);
        };
        let token = token.or(access_token).filter(|token| !token.is_empty()).ok_or_else(|| malformed.clone())?;
        let mut header = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| malformed)?;
        header.set_sensitive(true);
        let lifetime = expires_in.map_or(DEFAULT_LIFETIME, Duration::from_secs).min(MAX_LIFETIME);
        Ok(Authorization { header, until: Instant::now() + lifetime.saturating_sub(MARGIN) })
    }
}

/// Encodes all but the unreserved characters (RFC 3986, section 2.3).
fn encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
        encoded
    })
}
