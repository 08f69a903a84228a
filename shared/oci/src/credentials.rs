//! Address of the registry with the credentials for it: from a flag, or from a dockerconfigjson Secret.

mod address;

use std::{
    collections::BTreeMap,
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::HeaderValue;
use serde::Deserialize;
use thiserror::Error;

pub(super) use address::is_repository;
pub use address::{AddressError, AllowedHost, Origin, RegistryAddress, Scheme};

/// Largest accepted dockerconfigjson, in bytes.
const MAX_BYTES: usize = 64 << 10;

/// A registry's credentials. `Debug` prints no secret.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// User and password (RFC 7617).
    Basic {
        /// User.
        username: String,
        /// Password, or an access token in its place.
        password: String,
    },
    /// OAuth2 refresh token, exchanged at the token realm.
    IdentityToken(String),
    /// Token that is sent as it is (RFC 6750).
    RegistryToken(String),
    /// Access token of the service account for which the metadata server of Google Cloud issues one.
    GoogleMetadata,
}

impl Credentials {
    /// Value of the header `Authorization` with user and password. Base64 carries any text, so a password may have several
    /// lines. `None` for other credentials.
    pub fn basic(&self) -> Option<HeaderValue> {
        let Self::Basic { username, password } = self else { return None };
        let encoded = STANDARD.encode(format!("{username}:{password}"));
        let mut value = HeaderValue::try_from(format!("Basic {encoded}")).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Basic { .. } => "Basic(..)",
            Self::IdentityToken(_) => "IdentityToken(..)",
            Self::RegistryToken(_) => "RegistryToken(..)",
            Self::GoogleMetadata => "GoogleMetadata",
        })
    }
}

/// Registry with its credentials, as one value: they are replaced together.
#[derive(Clone, Debug)]
pub struct RegistryTarget {
    /// Server and prefix of the repositories.
    pub address: RegistryAddress,
    /// `None` for anonymous requests.
    pub credentials: Option<Credentials>,
    /// Distinguishes targets, so that a token is sent to no other target than that it was issued for.
    generation: u64,
}

impl RegistryTarget {
    /// Creates a target. No other has its generation.
    pub fn new(address: RegistryAddress, credentials: Option<Credentials>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { address, credentials, generation: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// Parses a dockerconfigjson with exactly one registry; repositories are below the sub-path.
    ///
    /// # Errors
    /// [`CredentialsError`], without any part of the document.
    pub fn from_docker_config(json: &[u8], subpath: &str) -> Result<Self, CredentialsError> {
        if json.len() > MAX_BYTES {
            return Err(CredentialsError::TooLarge);
        }
        // The parser's text may quote the document.
        let config: DockerConfig = serde_json::from_slice(json)
            .map_err(|error| CredentialsError::Json { line: error.line(), column: error.column() })?;
        let count = config.auths.len();
        let (key, entry) =
            config.auths.into_iter().next().filter(|_| count == 1).ok_or(CredentialsError::Count(count))?;
        let address = key.parse().and_then(|address: RegistryAddress| address.below(subpath));
        Ok(Self::new(address.map_err(CredentialsError::Address)?, entry.credentials()?))
    }

    /// Number that no other target has.
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// Compares address and credentials.
    pub fn equals(&self, other: &Self) -> bool {
        self.address == other.address && self.credentials == other.credentials
    }
}

/// Failure to read a dockerconfigjson. Texts contain no part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CredentialsError {
    /// It is larger than 64 KiB.
    #[error("the registry credentials are larger than 65536 bytes")]
    TooLarge,
    /// It is not JSON of the documented form.
    #[error("the registry credentials are not a dockerconfigjson document: line {line}, column {column}")]
    Json {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
    /// It names no registry, or several.
    #[error("the registry credentials name {0} registries under auths, and must name exactly one")]
    Count(usize),
    /// The name of its registry is not an address.
    #[error("the registry credentials name a malformed registry: {0}")]
    Address(AddressError),
    /// The member `auth` is not the base64 form of `user:password`.
    #[error("the registry credentials are malformed: auth is not the base64 form of user:password")]
    Auth,
    /// Only one of user and password is present, or the user has a colon.
    #[error("the registry credentials are malformed: username and password are incomplete, or username has a colon")]
    UserPassword,
    /// The registry token is no header value.
    #[error("the registry credentials are malformed: registrytoken has characters that a header cannot carry")]
    RegistryToken,
    /// The registry is given by host, so that no Secret is expected.
    #[error("the registry is given by its host and takes no credentials")]
    Unexpected,
}

#[derive(Deserialize)]
struct DockerConfig {
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

impl Entry {
    fn credentials(self) -> Result<Option<Credentials>, CredentialsError> {
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        // The order is that of docker.
        if let Some(token) = given(self.registrytoken) {
            let token = Some(token).filter(|token| token.bytes().all(|byte| byte.is_ascii_graphic()));
            return token.map(Credentials::RegistryToken).map(Some).ok_or(CredentialsError::RegistryToken);
        }
        if let Some(token) = given(self.identitytoken) {
            return Ok(Some(Credentials::IdentityToken(token)));
        }
        let (username, password) = match (given(self.username), given(self.password), given(self.auth)) {
            (Some(username), Some(password), _) => (username, password),
            (None, None, Some(auth)) => decode(&auth).ok_or(CredentialsError::Auth)?,
            (None, None, None) => return Ok(None),
            _ => return Err(CredentialsError::UserPassword),
        };
        // A colon in the user would move the border to the password (RFC 7617, section 2).
        if username.contains(':') {
            return Err(CredentialsError::UserPassword);
        }
        Ok(Some(Credentials::Basic { username, password }))
    }
}

fn decode(auth: &str) -> Option<(String, String)> {
    let text = String::from_utf8(STANDARD.decode(auth.trim()).ok()?).ok()?;
    let (username, password) = text.split_once(':')?;
    // Older clients pad the text with zeros.
    Some((username.to_owned(), password.trim_end_matches('\0').to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A key of a service account in the form that Google issues.
    const KEY: &str = "{\n  \"type\": \"service_account\",\n\t\"private_key\": \"a\\nb\"\n}\n";

    fn parse(config: &Value) -> Result<RegistryTarget, CredentialsError> {
        RegistryTarget::from_docker_config(config.to_string().as_bytes(), "sub")
    }

    fn basic(username: &str, password: &str) -> Option<Credentials> {
        Some(Credentials::Basic { username: username.into(), password: password.into() })
    }

    #[test]
    fn credentials_are_read_in_each_form() {
        let auth = STANDARD.encode("user:pass:word");
        for (entry, credentials) in [
            (json!({"auth": auth}), basic("user", "pass:word")),
            (json!({"username": "u", "password": "p", "email": "x"}), basic("u", "p")),
            (json!({"username": "u", "password": "p", "auth": auth}), basic("u", "p")),
            (json!({"auth": auth, "identitytoken": "t"}), Some(Credentials::IdentityToken("t".into()))),
            (json!({"auth": auth, "registrytoken": "a.b"}), Some(Credentials::RegistryToken("a.b".into()))),
            (json!({"username": "_json_key", "password": KEY}), basic("_json_key", KEY)),
            (json!({"auth": STANDARD.encode(format!("_json_key:{KEY}"))}), basic("_json_key", KEY)),
            (json!({}), None),
            (json!({"auth": ""}), None),
        ] {
            let target = parse(&json!({"auths": {"https://registry.example.com/v2/": entry}})).unwrap();
            assert_eq!(target.credentials, credentials, "{entry}");
            assert_eq!(target.address.origin.to_string(), "registry.example.com");
            assert_eq!(target.address.repository("a"), "sub/a");
        }
    }

    #[test]
    fn malformed_document_is_refused_without_quoting_it() {
        let no_colon = STANDARD.encode("secret");
        for (config, error) in [
            (json!({"auths": {}}), CredentialsError::Count(0)),
            (json!({"auths": {"a": {}, "b": {}}}), CredentialsError::Count(2)),
            (json!({"auths": {"a": {"auth": "%secret"}}}), CredentialsError::Auth),
            (json!({"auths": {"a": {"auth": no_colon}}}), CredentialsError::Auth),
            (json!({"auths": {"a": {"username": "secret"}}}), CredentialsError::UserPassword),
            (json!({"auths": {"a": {"username": "u:v", "password": "secret"}}}), CredentialsError::UserPassword),
            (json!({"auths": {"a": {"registrytoken": "secret\n"}}}), CredentialsError::RegistryToken),
            (json!({"auths": {"secret@a": {}}}), CredentialsError::Address(AddressError::Host)),
        ] {
            let refused = parse(&config).err().unwrap();
            assert_eq!(refused, error, "{config}");
            assert!(!format!("{refused} {refused:?}").contains("secret"), "{refused}");
        }
        for text in ["", "{", r#"{"auths":"secret"}"#, r#"{"auths":{"a":"secret"}}"#] {
            let refused = RegistryTarget::from_docker_config(text.as_bytes(), "").err().unwrap();
            assert!(matches!(refused, CredentialsError::Json { .. }), "{refused}");
            assert!(!format!("{refused} {refused:?}").contains("secret"), "{refused}");
        }
        let large = vec![b' '; MAX_BYTES + 1];
        assert_eq!(RegistryTarget::from_docker_config(&large, "").err(), Some(CredentialsError::TooLarge));
    }

    #[test]
    fn debug_prints_no_secret() {
        for entry in [json!({"username": "u", "password": "secret"}), json!({"identitytoken": "secret"})] {
            let target = parse(&json!({"auths": {"a": entry}})).unwrap();
            let header = target.credentials.as_ref().and_then(Credentials::basic);
            let shown = format!("{target:?} {header:?}");
            assert!(!shown.contains("secret") && !shown.contains("dTpzZWNyZXQ"), "{shown}");
        }
    }
}
