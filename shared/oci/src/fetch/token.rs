//! Authorization of requests: Basic, and tokens of the registry's token server (distribution token specification).

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use http::{
    HeaderValue, Request, StatusCode, Uri,
    header::{AUTHORIZATION, CONTENT_TYPE},
};
use parking_lot::Mutex;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};
use serde::Deserialize;
use tokio::time::Instant;

use super::{
    Access, Fetcher, Trust, body,
    body::Size,
    challenge::Challenge,
    error::{FetchError, RedirectError, clean},
    redirect,
};
use crate::credentials::{Credentials, Origin, RegistryTarget, Scheme};

/// Limit of a token server's response, in bytes.
const MAX_BYTES: u64 = 64 << 10;
/// Lifetime of a token without `expires_in`.
const DEFAULT_LIFETIME: Duration = Duration::from_secs(60);
/// Longest time that an authorization is reused.
const MAX_LIFETIME: Duration = Duration::from_secs(3_600);
/// A token is not used in the last seconds of its lifetime.
const MARGIN: Duration = Duration::from_secs(10);
/// All but the unreserved characters (RFC 3986, section 2.3).
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// Authorizations kept; one per repository and access.
const MAX_CACHED: usize = 256;

/// Value of the header `Authorization` with the time from which it is not reused.
#[derive(Clone)]
pub(super) struct Authorization {
    pub(super) header: HeaderValue,
    until: Instant,
}

/// What an authorization permits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scope<'a> {
    /// Full name of the repository.
    pub(super) repository: &'a str,
    pub(super) access: Access,
}

impl Scope<'_> {
    fn key(self, target: &RegistryTarget) -> (u64, String, Access) {
        (target.generation(), self.repository.to_owned(), self.access)
    }
}

/// Authorizations by target, repository and access.
#[derive(Default)]
pub(super) struct Authorizations(Mutex<HashMap<(u64, String, Access), Authorization>>);

impl Authorizations {
    pub(super) fn get(&self, target: &RegistryTarget, scope: Scope<'_>) -> Option<HeaderValue> {
        let cached = self.0.lock();
        let authorization = cached.get(&scope.key(target))?;
        (authorization.until > Instant::now()).then(|| authorization.header.clone())
    }

    pub(super) fn put(&self, target: &RegistryTarget, scope: Scope<'_>, authorization: Authorization) {
        let now = Instant::now();
        let mut cached = self.0.lock();
        // Those of a replaced target are of no use.
        cached.retain(|(generation, ..), kept| *generation >= target.generation() && kept.until > now);
        if cached.len() >= MAX_CACHED {
            cached.clear();
        }
        cached.insert(scope.key(target), authorization);
    }

    pub(super) fn remove(&self, target: &RegistryTarget, scope: Scope<'_>) {
        let mut cached = self.0.lock();
        cached.remove(&scope.key(target));
    }
}

impl Fetcher {
    /// Meets a challenge: with the credentials of the target, or anonymously where a token server permits it.
    pub(super) async fn authorize(
        &self,
        target: &RegistryTarget,
        scope: Scope<'_>,
        challenge: Challenge,
    ) -> Result<Authorization, FetchError> {
        let until = Instant::now() + MAX_LIFETIME;
        let issued = match &target.credentials {
            Some(Credentials::GoogleMetadata) => Some(self.google_token(&target.address.server()).await?),
            _ => None,
        };
        let credentials = issued.as_ref().or(target.credentials.as_ref());
        match (challenge, credentials) {
            (_, Some(Credentials::RegistryToken(token))) => Ok(Authorization { header: bearer(token)?, until }),
            (Challenge::Basic, credentials) => {
                let header = credentials.and_then(Credentials::basic);
                let header = header.ok_or(FetchError::Unauthorized { with_credentials: credentials.is_some() })?;
                // A token of a metadata server expires; a refused one is replaced.
                Ok(Authorization { header, until })
            }
            (Challenge::Bearer { realm, service }, credentials) => {
                let realm = self.realm(target, &realm)?;
                let request = token_request(&realm, &service.unwrap_or_default(), credentials, scope)?;
                self.token(request, credentials.is_some()).await
            }
        }
    }

    async fn token(&self, request: Request<Bytes>, with_credentials: bool) -> Result<Authorization, FetchError> {
        let response = self.send(request, Trust::Known).await?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::BAD_REQUEST | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Err(FetchError::Unauthorized { with_credentials });
            }
            status if status.is_redirection() => return Err(FetchError::Redirect(RedirectError::Token)),
            status => {
                let server = "the token server of the registry".to_owned();
                // Its absence does not depend on credentials.
                return Err(FetchError::of_status(status, response.headers(), server, true));
            }
        }
        let received = &self.metrics.received;
        Token::parse(&body::read(response.into_body(), Size::AtMost(MAX_BYTES), Some(received)).await?)
    }

    /// Returns the URL of the token server, if it may get the credentials.
    fn realm(&self, target: &RegistryTarget, realm: &str) -> Result<Uri, FetchError> {
        let registry = target.address.server();
        let is_known = |origin: &Origin| match target.credentials {
            // The token of a metadata server is for Google's services: no flag can send it elsewhere.
            Some(Credentials::GoogleMetadata) => *origin == registry,
            _ => redirect::is_permitted(origin, &registry, &self.allowed),
        };
        let permitted = |origin: &Origin| {
            (origin.scheme() == Scheme::Https || registry.scheme() == Scheme::Http) && is_known(origin)
        };
        let uri: Option<Uri> = realm.parse().ok();
        let uri = uri.filter(|uri| Origin::of(uri).is_some_and(|origin| permitted(&origin)));
        uri.ok_or_else(|| FetchError::TokenRealm(clean(realm)))
    }
}

/// Request for a token: GET with Basic or anonymously, or POST with the refresh token. `service` is the name of the
/// registry at the token server, and may be empty.
fn token_request(
    realm: &Uri,
    service: &str,
    credentials: Option<&Credentials>,
    Scope { repository, access }: Scope<'_>,
) -> Result<Request<Bytes>, FetchError> {
    let malformed = |_| FetchError::Malformed("the URL of its token server");
    let scope = format!("repository:{repository}:{}", access.actions());
    let parameters = format!("service={}&scope={}", encoded(service), encoded(&scope));
    if let Some(Credentials::IdentityToken(token)) = credentials {
        let form =
            format!("grant_type=refresh_token&client_id=tidewatch&refresh_token={}&{parameters}", encoded(token));
        let request = Request::post(realm).header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        return request.body(form.into()).map_err(malformed);
    }
    let separator = if realm.query().is_some() { '&' } else { '?' };
    let mut request = Request::get(format!("{realm}{separator}{parameters}"));
    if let Some(header) = credentials.and_then(Credentials::basic) {
        request = request.header(AUTHORIZATION, header);
    }
    request.body(Bytes::new()).map_err(malformed)
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<Seconds>,
}

/// A number, also as text, as some token servers write it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Seconds {
    Number(f64),
    Text(String),
}

impl Seconds {
    /// The duration; `None` if it is none.
    fn duration(&self) -> Option<Duration> {
        let seconds = match self {
            Self::Number(seconds) => *seconds,
            Self::Text(text) => text.trim().parse().ok()?,
        };
        Duration::try_from_secs_f64(seconds).ok()
    }
}

impl Token {
    fn parse(content: &[u8]) -> Result<Authorization, FetchError> {
        let malformed = FetchError::Malformed("the token server's response has no usable token");
        let Ok(Self { token, access_token, expires_in }) = serde_json::from_slice(content) else {
            return Err(malformed);
        };
        let given = |token: Option<String>| token.filter(|token| !token.is_empty());
        let token = given(token).or_else(|| given(access_token)).ok_or_else(|| malformed.clone())?;
        let header = bearer(&token).map_err(|_| malformed)?;
        let lifetime = expires_in.and_then(|seconds| seconds.duration()).unwrap_or(DEFAULT_LIFETIME).min(MAX_LIFETIME);
        Ok(Authorization { header, until: Instant::now() + lifetime.saturating_sub(MARGIN) })
    }
}

/// Value of the header `Authorization` with a token (RFC 6750).
fn bearer(token: &str) -> Result<HeaderValue, FetchError> {
    let header = HeaderValue::try_from(format!("Bearer {token}"));
    let mut header = header.map_err(|_| FetchError::Malformed("a token that a header cannot carry"))?;
    header.set_sensitive(true);
    Ok(header)
}

/// Encodes all but the unreserved characters.
fn encoded(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, RESERVED)
}
