//! Parses the kubeconfig of an access Secret into the parameters of a connection, or rejects it with one reason.
//!
//! The current context selects one cluster and one user, as in client-go; other entries are ignored, because Gardener lists
//! one cluster and one context for each address of a cluster. A kubeconfig can make a client run commands, read files,
//! trust any server and use any proxy. Here it is plain data: one https server, its roots, and a token, a client
//! certificate or both, all inline. Everything else in the selected pair is rejected with a specific error.

mod wire;

use std::{net::IpAddr, sync::Arc};

use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderValue, Uri, uri::Scheme};
use rustls::RootCertStore;
use rustls_pki_types::ServerName;
use strum::IntoStaticStr;
use thiserror::Error;
use tidewatch_kit::tls::{self, Identity};

use super::addresses::ForbiddenAddressError;

/// Largest kubeconfig, in bytes. A typical one has about 5 KiB; large CA bundles need more.
pub const MAX_BYTES: usize = 256 * 1024;

/// Reason for which a kubeconfig is rejected. The text is one sentence for the condition `RuntimeAccess`; it never
/// quotes the kubeconfig. The name is a metric label.
#[derive(Clone, Debug, PartialEq, Eq, Error, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum KubeconfigError {
    /// The Secret lacks the key, or it is empty.
    #[error("the access Secret has no kubeconfig under the key `config`")]
    NoKey,
    /// More than [`MAX_BYTES`].
    #[error("the kubeconfig is larger than {MAX_BYTES} bytes")]
    TooLarge,
    /// Not YAML, or not a kubeconfig.
    #[error("the kubeconfig is malformed (near line {line})")]
    Malformed {
        /// Line of the error, from 1; 0 if unknown.
        line: u64,
    },
    /// None in `contexts`.
    #[error("the kubeconfig has no context")]
    NoContext,
    /// No `current-context`, and more than one entry in `contexts`.
    #[error("the kubeconfig has {0} contexts, and no current-context that selects one")]
    SeveralContexts(usize),
    /// `current-context` is not in `contexts`.
    #[error("the kubeconfig's current-context is not among its contexts")]
    UnknownContext,
    /// The context refers to no cluster, or to one that is not in `clusters`.
    #[error("the kubeconfig's current context names no cluster that the kubeconfig has")]
    UnknownCluster,
    /// The context refers to no user, or to one that is not in `users`.
    #[error("the kubeconfig's current context names no user that the kubeconfig has")]
    UnknownUser,
    /// The selected context, cluster or user is defined more than once.
    #[error("the kubeconfig defines the {0} of its current context more than once")]
    Ambiguous(&'static str),
    /// The cluster has no `server`.
    #[error("the kubeconfig names no server")]
    NoServer,
    /// `exec`.
    #[error("the kubeconfig wants to run a command (exec), which is not allowed")]
    Exec,
    /// `auth-provider`.
    #[error("the kubeconfig uses an auth-provider, which is not allowed")]
    AuthProvider,
    /// A field that holds a path.
    #[error("the kubeconfig names a file ({0}), only inline data is allowed")]
    FilePath(&'static str),
    /// `username` or `password`.
    #[error("the kubeconfig uses a user name and password, which is not allowed")]
    BasicAuth,
    /// `as` and related fields.
    #[error("the kubeconfig impersonates another user, which is not allowed")]
    Impersonation,
    /// `proxy-url`.
    #[error("the kubeconfig uses a proxy, which is not allowed")]
    Proxy,
    /// `insecure-skip-tls-verify`.
    #[error(
        "the kubeconfig switches off the verification of the server (insecure-skip-tls-verify), which is not allowed"
    )]
    Insecure,
    /// Another scheme than https.
    #[error("the kubeconfig's server is not an https address")]
    NotHttps,
    /// Not a URL, or one with user info, query or without host.
    #[error("the kubeconfig's server is not a usable URL")]
    ServerUrl,
    /// `tls-server-name`.
    #[error("the kubeconfig's tls-server-name is not a host name")]
    TlsServerName,
    /// Not base64, not PEM, or without a usable certificate.
    #[error("the kubeconfig's certificate-authority-data is not readable")]
    Ca,
    /// No `certificate-authority-data`, and no public roots.
    #[error("the kubeconfig has no certificate-authority-data, and the receiver's system has no root certificates")]
    NoPublicRoots,
    /// Neither token nor client certificate.
    #[error("the kubeconfig has neither a token nor a client certificate with key")]
    NoCredentials,
    /// Characters that no header can carry.
    #[error("the kubeconfig's token is not usable")]
    Token,
    /// Not base64, not PEM, one without the other, or key and certificate do not belong together.
    #[error("the kubeconfig's client certificate and key are not usable together")]
    ClientCertificate,
    /// The server is a forbidden IP address.
    #[error("{0}")]
    ForbiddenAddress(ForbiddenAddressError),
}

/// A validated kubeconfig. Its `Debug` contains no secret: a sensitive header and a private key hide theirs.
#[derive(Debug)]
pub struct RuntimeKubeconfig {
    /// `https`, with host, optional port and path prefix.
    pub server: Uri,
    /// The name or address that the server's certificate must carry: `tls-server-name`, or the host.
    pub server_name: ServerName<'static>,
    /// The only trusted roots.
    pub roots: Roots,
    /// Credentials of the receiver in the runtime.
    pub credentials: Credentials,
}

/// Roots that the server's certificate must chain to.
#[derive(Debug)]
pub enum Roots {
    /// Those in `certificate-authority-data`.
    Own(Arc<RootCertStore>),
    /// Those of the receiver's system, because the kubeconfig has none.
    Public,
}

/// Credentials of the receiver in the runtime: a token, a client certificate, or both. With both, the API server decides
/// which one counts.
#[derive(Debug)]
pub struct Credentials {
    /// The value of the header `Authorization`, marked as sensitive, if there is a token.
    pub authorization: Option<HeaderValue>,
    /// The client certificate for the TLS handshake.
    pub certificate: Option<Identity>,
}

impl RuntimeKubeconfig {
    /// Parses and validates a kubeconfig, in YAML or JSON.
    ///
    /// # Errors
    /// The first [`KubeconfigError`]; dangerous fields are checked before missing ones.
    pub fn parse(bytes: &[u8]) -> Result<Self, KubeconfigError> {
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Err(KubeconfigError::NoKey);
        }
        if bytes.len() > MAX_BYTES {
            return Err(KubeconfigError::TooLarge);
        }
        // The parser's message may quote the text, including tokens, so only the line is kept.
        let raw: wire::Kubeconfig = serde_saphyr::from_slice(bytes).map_err(|error| KubeconfigError::Malformed {
            line: error.location().map_or(0, |location| location.line()),
        })?;
        let Selected { cluster, user } = select(raw)?;
        reject_dangers(&cluster, &user)?;
        let server = server(cluster.server.as_deref())?;
        let server_name = match non_empty(cluster.tls_server_name) {
            Some(name) => ServerName::try_from(name).map_err(|_| KubeconfigError::TlsServerName)?,
            None => ServerName::try_from(bare(server.host().unwrap_or_default()).to_owned())
                .map_err(|_| KubeconfigError::ServerUrl)?,
        };
        let roots = match non_empty(cluster.certificate_authority_data) {
            Some(data) => Roots::Own(own_roots(&data).ok_or(KubeconfigError::Ca)?.into()),
            None => Roots::Public,
        };
        Ok(Self { server, server_name, roots, credentials: credentials(user)? })
    }
}

/// IP address of a URL's host. Other spellings of addresses (`127.1`) are names; their resolved address is checked.
pub(super) fn literal(uri: &Uri) -> Option<IpAddr> {
    bare(uri.host()?).parse().ok()
}

/// Strips the brackets of an IPv6 address in a URL.
fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// The cluster and the user of one context.
struct Selected {
    cluster: wire::Cluster,
    user: wire::User,
}

/// Selects cluster and user of the current context; without `current-context`, those of the only context.
fn select(raw: wire::Kubeconfig) -> Result<Selected, KubeconfigError> {
    let wire::Kubeconfig { clusters, users, contexts, current_context } = raw;
    let mut contexts = contexts.unwrap_or_default();
    let context = match non_empty(current_context) {
        Some(name) => {
            let has_name = |context: &wire::NamedContext| context.name.as_ref() == Some(&name);
            only(contexts, has_name, "context")?.ok_or(KubeconfigError::UnknownContext)?
        }
        None if contexts.len() > 1 => return Err(KubeconfigError::SeveralContexts(contexts.len())),
        None => contexts.pop().ok_or(KubeconfigError::NoContext)?,
    };
    let references = context.context.unwrap_or_default();
    let named = non_empty(references.cluster).ok_or(KubeconfigError::UnknownCluster)?;
    let cluster = only(clusters.unwrap_or_default(), |cluster| cluster.name.as_ref() == Some(&named), "cluster")?;
    let cluster = cluster.ok_or(KubeconfigError::UnknownCluster)?;
    let named = non_empty(references.user).ok_or(KubeconfigError::UnknownUser)?;
    let user = only(users.unwrap_or_default(), |user| user.name.as_ref() == Some(&named), "user")?;
    let user = user.ok_or(KubeconfigError::UnknownUser)?;
    Ok(Selected { cluster: cluster.cluster.unwrap_or_default(), user: user.user.unwrap_or_default() })
}

/// Returns the only matching entry, if there is one.
fn only<T>(list: Vec<T>, is_wanted: impl Fn(&T) -> bool, kind: &'static str) -> Result<Option<T>, KubeconfigError> {
    let mut wanted = list.into_iter().filter(is_wanted);
    match (wanted.next(), wanted.next()) {
        (_, Some(_)) => Err(KubeconfigError::Ambiguous(kind)),
        (found, None) => Ok(found),
    }
}

fn reject_dangers(cluster: &wire::Cluster, user: &wire::User) -> Result<(), KubeconfigError> {
    let is_set = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
    let path = |path: &Option<String>, field| if is_set(path) { Err(KubeconfigError::FilePath(field)) } else { Ok(()) };
    let reject = |is: bool, refusal| if is { Err(refusal) } else { Ok(()) };
    reject(user.exec.is_some(), KubeconfigError::Exec)?;
    reject(user.auth_provider.is_some(), KubeconfigError::AuthProvider)?;
    path(&user.token_file, "tokenFile")?;
    path(&user.client_certificate, "client-certificate")?;
    path(&user.client_key, "client-key")?;
    path(&cluster.certificate_authority, "certificate-authority")?;
    reject(is_set(&user.username) || is_set(&user.password), KubeconfigError::BasicAuth)?;
    let has_groups = user.as_groups.as_ref().is_some_and(|groups| !groups.is_empty());
    let has_extra = user.as_user_extra.as_ref().is_some_and(|extra| !extra.is_empty());
    let impersonates = is_set(&user.impersonate) || is_set(&user.as_uid) || has_groups || has_extra;
    reject(impersonates, KubeconfigError::Impersonation)?;
    reject(is_set(&cluster.proxy_url), KubeconfigError::Proxy)?;
    reject(cluster.insecure_skip_tls_verify == Some(true), KubeconfigError::Insecure)
}

/// Parses the URL of the server. One without a scheme is a host with an optional port, reached by https, as in client-go.
fn server(text: Option<&str>) -> Result<Uri, KubeconfigError> {
    let text = text.map(str::trim).filter(|text| !text.is_empty()).ok_or(KubeconfigError::NoServer)?;
    let uri: Uri = match text.contains("://") {
        true => text.parse(),
        false if text.trim_end_matches('/').contains('/') => return Err(KubeconfigError::ServerUrl),
        false => format!("https://{text}").parse(),
    }
    .map_err(|_| KubeconfigError::ServerUrl)?;
    if uri.scheme() != Some(&Scheme::HTTPS) {
        return Err(KubeconfigError::NotHttps);
    }
    // The connection pool and the `Host` header use the whole authority, including user info.
    let authority = uri.authority().ok_or(KubeconfigError::ServerUrl)?;
    let usable = !authority.host().is_empty() && !authority.as_str().contains('@') && uri.query().is_none();
    if usable { Ok(uri) } else { Err(KubeconfigError::ServerUrl) }
}

/// Returns the usable certificates of a bundle, if there is one; the others are skipped, as Go does.
fn own_roots(data: &str) -> Option<RootCertStore> {
    let mut store = tls::usable_roots(&decode(data)?).ok()?.store;
    // It is kept for each runtime.
    store.roots.shrink_to_fit();
    Some(store)
}

/// A key without a certificate is ignored beside a token, as in client-go.
fn credentials(user: wire::User) -> Result<Credentials, KubeconfigError> {
    let authorization = match non_empty(user.token.map(|token| token.trim().to_owned())) {
        Some(token) => {
            let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| KubeconfigError::Token)?;
            value.set_sensitive(true);
            Some(value)
        }
        None => None,
    };
    let certificate = match (non_empty(user.client_certificate_data), non_empty(user.client_key_data)) {
        (Some(certificate), Some(key)) => Some(pair(&certificate, &key).ok_or(KubeconfigError::ClientCertificate)?),
        (Some(_), None) => return Err(KubeconfigError::ClientCertificate),
        (None, _) => None,
    };
    if authorization.is_none() && certificate.is_none() {
        return Err(KubeconfigError::NoCredentials);
    }
    Ok(Credentials { authorization, certificate })
}

fn pair(certificate: &str, key: &str) -> Option<Identity> {
    Identity::from_pem(&decode(certificate)?, &decode(key)?).ok()
}

/// Ignores line breaks like Go's decoder; YAML block scalars contain them.
fn decode(data: &str) -> Option<Vec<u8>> {
    let packed: String = data.split_ascii_whitespace().collect();
    STANDARD.decode(packed).ok()
}

fn non_empty(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime_access::tests::test_bed::Party;

    /// A usable kubeconfig with a replaceable cluster and user.
    fn kubeconfig(cluster: &str, user: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: a, cluster: {{{cluster}}}}}]\n\
             users: [{{name: b, user: {{{user}}}}}]\ncontexts: [{{name: c, context: {{cluster: a, user: b}}}}]\n"
        )
    }

    fn parse(text: &str) -> Result<RuntimeKubeconfig, KubeconfigError> {
        RuntimeKubeconfig::parse(text.as_bytes())
    }

    #[test]
    fn token_or_certificate_is_sufficient() {
        let party = Party::new("runtime");
        let ca = party.certificate_data();
        let cert = party.certificate_data();
        let key = party.key_data();
        let cluster = format!("server: 'https://runtime:6443/prefix', certificate-authority-data: {ca}, extra: 1");
        let by_token = parse(&kubeconfig(&cluster, "token: sesame")).unwrap();
        assert_eq!(by_token.credentials.authorization.as_ref().unwrap(), "Bearer sesame");
        assert!(by_token.credentials.certificate.is_none());
        assert_eq!(by_token.server, "https://runtime:6443/prefix");
        let user = format!("client-certificate-data: {cert}, client-key-data: {key}");
        let by_certificate = parse(&kubeconfig(&cluster, &user)).unwrap();
        assert_eq!(by_certificate.credentials.certificate.as_ref().unwrap().chain.len(), 1);
        assert!(by_certificate.credentials.authorization.is_none());
        let named = parse(&kubeconfig(&format!("{cluster}, tls-server-name: other"), "token: sesame")).unwrap();
        assert_eq!(named.server_name.to_str(), "other");
        assert_eq!(by_token.server_name.to_str(), "runtime");
        let nulls =
            parse(&kubeconfig(&format!("{cluster}, proxy-url: ''"), "token: sesame, exec: null, as: null")).unwrap();
        assert_eq!(literal(&nulls.server), None);
    }

    #[test]
    fn debug_and_errors_contain_no_secret() {
        let party = Party::new("runtime");
        let cluster = format!("server: 'https://[::1]:6443', certificate-authority-data: {}", party.certificate_data());
        let parsed = parse(&kubeconfig(&cluster, "token: sesame")).unwrap();
        let debug = format!("{parsed:?}");
        assert!(debug.contains("[::1]") && !debug.contains("sesame"), "{debug}");
        assert_eq!(literal(&parsed.server), Some("::1".parse().unwrap()));
        let broken = parse("users: [{name: b, user: {token: sesame, exec: [}}]").unwrap_err();
        assert!(!format!("{broken} {broken:?}").contains("sesame"));
    }

    #[test]
    fn each_dangerous_or_missing_field_has_its_own_error() {
        let party = Party::new("runtime");
        let ca = party.certificate_data();
        let key = party.key_data();
        let good = format!("server: 'https://runtime', certificate-authority-data: {ca}");
        let certificate = format!("client-certificate-data: {ca}, client-key-data: {key}");
        let refused = |cluster: &str, user: &str| parse(&kubeconfig(cluster, user)).unwrap_err();
        for (user, expected) in [
            ("exec: {command: rm}", "run a command (exec)"),
            ("token: t, exec: {command: rm}", "run a command (exec)"),
            ("token: t, auth-provider: {name: gcp}", "auth-provider"),
            ("tokenFile: /var/run/token", "names a file (tokenFile)"),
            ("client-certificate: /a.crt", "names a file (client-certificate)"),
            ("client-key: /a.key", "names a file (client-key)"),
            ("username: u, password: p", "user name and password"),
            ("token: t, as: admin", "impersonates another user"),
            ("token: t, as-groups: ['system:masters']", "impersonates another user"),
            ("token: t, as-uid: '1'", "impersonates another user"),
            ("token: t, as-user-extra: {a: [b]}", "impersonates another user"),
            ("", "neither a token nor a client certificate"),
            ("token: ''", "neither a token nor a client certificate"),
            ("client-key-data: aGk=", "neither a token nor a client certificate"),
            ("client-certificate-data: aGk=", "not usable together"),
            ("token: t, client-certificate-data: aGk=", "not usable together"),
            (&format!("username: u, {certificate}"), "user name and password"),
            ("token: \"a\\nb\"", "token is not usable"),
            ("client-certificate-data: '*', client-key-data: '*'", "not usable together"),
            ("client-certificate-data: aGk=, client-key-data: aGk=", "not usable together"),
        ] {
            let refusal = refused(&good, user).to_string();
            assert!(refusal.contains(expected), "{user}: {refusal}");
        }
        let data = format!("certificate-authority-data: {ca}");
        for (cluster, expected) in [
            (format!("{good}, insecure-skip-tls-verify: true"), "insecure-skip-tls-verify"),
            (format!("{good}, proxy-url: 'http://proxy'"), "uses a proxy"),
            (format!("{good}, certificate-authority: /ca.crt"), "names a file (certificate-authority)"),
            (format!("{good}, tls-server-name: '-?'"), "tls-server-name is not a host name"),
            (format!("server: 'http://runtime', {data}"), "not an https address"),
            (format!("server: 'runtime:6443/prefix', {data}"), "not a usable URL"),
            (format!("server: 'ftp://runtime', {data}"), "not an https address"),
            (format!("server: 'https://user@runtime', {data}"), "not a usable URL"),
            (format!("server: 'https://runtime/?a=b', {data}"), "not a usable URL"),
            (format!("server: 'https://run time', {data}"), "not a usable URL"),
            (format!("server: 'https://127.1', {data}"), "not a usable URL"),
            (data.clone(), "names no server"),
            (
                "server: 'https://runtime', certificate-authority-data: '*'".to_owned(),
                "certificate-authority-data is not readable",
            ),
            (
                "server: 'https://runtime', certificate-authority-data: aGk=".to_owned(),
                "certificate-authority-data is not readable",
            ),
        ] {
            let refusal = refused(&cluster, "token: t").to_string();
            assert!(refusal.contains(expected), "{cluster}: {refusal}");
        }
    }

    /// A kubeconfig in the form of Gardener's `adminkubeconfig`: one cluster and one context for each advertised address.
    fn of_gardener(current: &str) -> String {
        let external = Party::new("external").certificate_data();
        let internal = Party::new("internal").certificate_data();
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: {current}\nclusters:\n\
             - name: s-external\n  cluster:\n    server: https://api.s.external.test\n    certificate-authority-data: {external}\n\
             - name: s-internal\n  cluster:\n    server: https://api.s.internal.test\n    certificate-authority-data: {internal}\n\
             - name: s-wildcard\n  cluster:\n    server: https://api-s.wildcard.test\n\
             contexts:\n\
             - name: s-external\n  context:\n    cluster: s-external\n    user: admin\n\
             - name: s-internal\n  context:\n    cluster: s-internal\n    user: admin\n\
             - name: s-wildcard\n  context:\n    cluster: s-wildcard\n    user: admin\n\
             users:\n- name: admin\n  user:\n    token: sesame\n"
        )
    }

    #[test]
    fn current_context_selects_among_the_addresses_of_a_cluster() {
        for (current, host, has_own_roots) in [
            ("s-external", "api.s.external.test", true),
            ("s-internal", "api.s.internal.test", true),
            ("s-wildcard", "api-s.wildcard.test", false),
        ] {
            let parsed = parse(&of_gardener(current)).unwrap();
            assert_eq!(parsed.server.host(), Some(host));
            assert_eq!(matches!(parsed.roots, Roots::Own(_)), has_own_roots, "{current}");
            assert_eq!(parsed.credentials.authorization.as_ref().unwrap(), "Bearer sesame");
        }
        assert_eq!(parse(&of_gardener("")).unwrap_err(), KubeconfigError::SeveralContexts(3));
        assert_eq!(parse(&of_gardener("other")).unwrap_err(), KubeconfigError::UnknownContext);
    }

    #[test]
    fn entries_that_the_current_context_does_not_use_are_not_judged() {
        let ca = Party::new("runtime").certificate_data();
        let text = format!(
            "current-context: mine\n\
             clusters: [{{name: other, cluster: {{server: 'http://plain', insecure-skip-tls-verify: true, proxy-url: 'http://p'}}}},\n\
             {{name: mine, cluster: {{server: 'https://runtime', certificate-authority-data: {ca}}}}}]\n\
             users: [{{name: other, user: {{exec: {{command: rm}}, client-key: /etc/key}}}}, {{name: mine, user: {{token: t}}}}]\n\
             contexts: [{{name: other, context: {{cluster: none, user: none}}}},\n\
             {{name: mine, context: {{cluster: mine, user: mine, namespace: n}}}}]\n"
        );
        assert_eq!(parse(&text).unwrap().server.host(), Some("runtime"));
        let dangerous = text
            .replace("current-context: mine", "current-context: dangerous")
            .replace("contexts: [", "contexts: [{name: dangerous, context: {cluster: mine, user: other}}, ");
        assert_eq!(parse(&dangerous).unwrap_err(), KubeconfigError::Exec);
    }

    #[test]
    fn token_and_client_certificate_are_used_together() {
        let party = Party::new("runtime");
        let ca = party.certificate_data();
        let key = party.key_data();
        let cluster = format!("server: 'https://runtime', certificate-authority-data: {ca}");
        let user = format!("token: t, client-certificate-data: {ca}, client-key-data: {key}");
        let both = parse(&kubeconfig(&cluster, &user)).unwrap().credentials;
        assert_eq!(both.authorization.as_ref().unwrap(), "Bearer t");
        assert_eq!(both.certificate.as_ref().unwrap().chain.len(), 1);
    }

    #[test]
    fn kubeconfig_without_roots_relies_on_public_ones() {
        for cluster in ["server: 'https://runtime'", "server: 'https://runtime', certificate-authority-data: ''"] {
            assert!(matches!(parse(&kubeconfig(cluster, "token: t")).unwrap().roots, Roots::Public), "{cluster}");
        }
    }

    #[test]
    fn one_usable_root_suffices() {
        let party = Party::new("runtime");
        let good = String::from_utf8(STANDARD.decode(party.certificate_data()).unwrap()).unwrap();
        let broken = "-----BEGIN CERTIFICATE-----\naGk=\n-----END CERTIFICATE-----\n";
        let data = |pem: String| STANDARD.encode(pem);
        let parse_ca = |data: String| {
            parse(&kubeconfig(&format!("server: 'https://runtime', certificate-authority-data: {data}"), "token: t"))
        };
        for pem in [format!("{broken}{good}"), format!("{good}{broken}"), format!("words\n{good}")] {
            assert!(matches!(parse_ca(data(pem)).unwrap().roots, Roots::Own(roots) if roots.len() == 1));
        }
        assert_eq!(parse_ca(data(broken.to_owned())).unwrap_err(), KubeconfigError::Ca);
    }

    #[test]
    fn server_without_a_scheme_is_https_and_empty_fields_are_absent() {
        let ca = Party::new("runtime").certificate_data();
        let data = format!("certificate-authority-data: {ca}");
        for (server, expected) in [
            ("runtime", "https://runtime/"),
            ("runtime:6443", "https://runtime:6443/"),
            ("'[::1]:6443'", "https://[::1]:6443/"),
            ("HTTPS://runtime", "https://runtime/"),
        ] {
            let parsed = parse(&kubeconfig(&format!("server: {server}, {data}"), "token: t")).unwrap();
            assert_eq!(parsed.server.to_string(), expected, "{server}");
        }
        let user = "token: t, username: '', password: '', as: '', as-uid: '', as-groups: [], as-user-extra: {}, \
                    tokenFile: '', exec: null, client-key-data: aGk=";
        parse(&kubeconfig(&format!("server: 'https://runtime', {data}"), user)).unwrap();
    }

    #[test]
    fn context_must_lead_to_one_cluster_and_one_user() {
        let whole =
            "clusters: [{name: a}]\nusers: [{name: b}]\ncontexts: [{name: c, context: {cluster: a, user: b}}]\n";
        let long = format!("# {}", "x".repeat(MAX_BYTES));
        for (text, refusal) in [
            ("", KubeconfigError::NoKey),
            (" \n", KubeconfigError::NoKey),
            (long.as_str(), KubeconfigError::TooLarge),
            ("{}", KubeconfigError::NoContext),
            ("contexts: null", KubeconfigError::NoContext),
            ("contexts: [{name: a}, {name: b}]", KubeconfigError::SeveralContexts(2)),
            ("contexts: [{name: a}, {name: a}]\ncurrent-context: a", KubeconfigError::Ambiguous("context")),
            ("contexts: [{name: a}]\ncurrent-context: b", KubeconfigError::UnknownContext),
            ("contexts: [{name: a}]", KubeconfigError::UnknownCluster),
            ("contexts: [{name: c, context: {cluster: x}}]\nclusters: [{name: a}]", KubeconfigError::UnknownCluster),
            (&whole.replace("user: b", "user: x"), KubeconfigError::UnknownUser),
            (&whole.replace("clusters: [", "clusters: [{name: a}, "), KubeconfigError::Ambiguous("cluster")),
            (&whole.replace("users: [", "users: [{name: b}, "), KubeconfigError::Ambiguous("user")),
            (&format!("{whole}current-context: other"), KubeconfigError::UnknownContext),
            (whole, KubeconfigError::NoServer),
        ] {
            assert_eq!(parse(text).unwrap_err(), refusal, "{text:.200}");
        }
        for text in
            ["[", "plain words", "clusters: 1", "clusters: []\nclusters: []", "- a", "clusters: [{name: a}]\n---\n{}"]
        {
            assert!(matches!(parse(text), Err(KubeconfigError::Malformed { .. })), "{text}");
        }
        assert!(matches!(RuntimeKubeconfig::parse(&[0xff, 0xfe, 0x00]), Err(KubeconfigError::Malformed { .. })));
    }
}
