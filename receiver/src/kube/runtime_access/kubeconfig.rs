//! Parses the kubeconfig of an access Secret into the parameters of a connection, or rejects it with one reason.
//!
//! A kubeconfig can make a client run commands, read files, trust any server and use any proxy. Here it is plain data:
//! one https server, its CA, and a token or a client certificate, all inline. Everything else is rejected with a
//! specific error.

mod wire;

use std::{net::IpAddr, sync::Arc};

use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderValue, Uri, uri::Scheme};
use rustls::RootCertStore;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use strum::IntoStaticStr;
use thiserror::Error;
use tidewatch_shared::tls;

use super::addresses::ForbiddenAddressError;

/// The key of an access Secret that holds the kubeconfig.
pub const SECRET_KEY: &str = "config";

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
    /// More than one entry in `clusters`.
    #[error("the kubeconfig names {0} servers, only one is allowed")]
    SeveralServers(usize),
    /// None in `clusters`, or one without `server`.
    #[error("the kubeconfig names no server")]
    NoServer,
    /// More than one entry in `users`.
    #[error("the kubeconfig names {0} users, only one is allowed")]
    SeveralUsers(usize),
    /// More than one entry in `contexts`.
    #[error("the kubeconfig has {0} contexts, only one is allowed")]
    SeveralContexts(usize),
    /// No context, one that refers to a missing cluster or user, or one that is not the current context.
    #[error("the kubeconfig's current context does not name its cluster and its user")]
    Context,
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
    /// No `certificate-authority-data`.
    #[error("the kubeconfig has no certificate-authority-data")]
    NoCa,
    /// Not base64, not PEM, or no usable certificate.
    #[error("the kubeconfig's certificate-authority-data is not readable")]
    Ca,
    /// Neither token nor client certificate.
    #[error("the kubeconfig has neither a token nor a client certificate with key")]
    NoCredentials,
    /// Both, of which the API server would choose the identity.
    #[error("the kubeconfig has both a token and a client certificate, only one is allowed")]
    SeveralCredentials,
    /// Characters that no header can carry.
    #[error("the kubeconfig's token is not usable")]
    Token,
    /// Not base64, not PEM, or key and certificate do not belong together.
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
    pub ca: Arc<RootCertStore>,
    /// Credentials of the receiver in the runtime.
    pub credentials: Credentials,
}

/// Credentials of the receiver in the runtime.
#[derive(Debug)]
pub enum Credentials {
    /// The value of the header `Authorization`, marked as sensitive.
    Token(HeaderValue),
    /// Chain, leaf first, and the leaf's key.
    Certificate(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>),
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
        let (cluster, user) = select(raw)?;
        reject_dangers(&cluster, &user)?;
        let server = server(cluster.server.as_deref())?;
        let server_name = match non_empty(cluster.tls_server_name) {
            Some(name) => ServerName::try_from(name).map_err(|_| KubeconfigError::TlsServerName)?,
            None => ServerName::try_from(bare(server.host().unwrap_or_default()).to_owned())
                .map_err(|_| KubeconfigError::ServerUrl)?,
        };
        let ca = non_empty(cluster.certificate_authority_data).ok_or(KubeconfigError::NoCa)?;
        let ca = roots(&ca).ok_or(KubeconfigError::Ca)?.into();
        Ok(Self { server, server_name, ca, credentials: credentials(user)? })
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

/// Selects the only cluster and the only user, which the only context must refer to.
fn select(raw: wire::Kubeconfig) -> Result<(wire::Cluster, wire::User), KubeconfigError> {
    let wire::Kubeconfig { clusters, users, contexts, current_context } = raw;
    let cluster = only(clusters, KubeconfigError::NoServer, KubeconfigError::SeveralServers)?;
    let user = only(users, KubeconfigError::NoCredentials, KubeconfigError::SeveralUsers)?;
    let context = only(contexts, KubeconfigError::Context, KubeconfigError::SeveralContexts)?;
    let references = context.context.unwrap_or_default();
    let is_named = |reference: Option<String>, name: Option<String>| reference == Some(name.unwrap_or_default());
    let is_complete = is_named(references.cluster, cluster.name) && is_named(references.user, user.name);
    let is_current = non_empty(current_context).is_none_or(|name| is_named(Some(name), context.name));
    if is_current && is_complete {
        Ok((cluster.cluster.unwrap_or_default(), user.user.unwrap_or_default()))
    } else {
        Err(KubeconfigError::Context)
    }
}

fn only<T>(
    list: Option<Vec<T>>,
    none: KubeconfigError,
    several: fn(usize) -> KubeconfigError,
) -> Result<T, KubeconfigError> {
    let mut list = list.unwrap_or_default();
    match list.len() {
        0 | 1 => list.pop().ok_or(none),
        many => Err(several(many)),
    }
}

fn reject_dangers(cluster: &wire::Cluster, user: &wire::User) -> Result<(), KubeconfigError> {
    let path = |path: &Option<String>, field| match path {
        Some(path) if !path.is_empty() => Err(KubeconfigError::FilePath(field)),
        _ => Ok(()),
    };
    let reject = |is: bool, refusal| if is { Err(refusal) } else { Ok(()) };
    reject(user.exec.is_some(), KubeconfigError::Exec)?;
    reject(user.auth_provider.is_some(), KubeconfigError::AuthProvider)?;
    path(&user.token_file, "tokenFile")?;
    path(&user.client_certificate, "client-certificate")?;
    path(&user.client_key, "client-key")?;
    path(&cluster.certificate_authority, "certificate-authority")?;
    reject(user.username.is_some() || user.password.is_some(), KubeconfigError::BasicAuth)?;
    let impersonation = [&user.impersonate, &user.as_uid, &user.as_groups, &user.as_user_extra];
    reject(impersonation.into_iter().any(Option::is_some), KubeconfigError::Impersonation)?;
    reject(cluster.proxy_url.as_deref().is_some_and(|url| !url.is_empty()), KubeconfigError::Proxy)?;
    reject(cluster.insecure_skip_tls_verify == Some(true), KubeconfigError::Insecure)
}

fn server(text: Option<&str>) -> Result<Uri, KubeconfigError> {
    let text = text.map(str::trim).filter(|text| !text.is_empty()).ok_or(KubeconfigError::NoServer)?;
    let uri: Uri = text.parse().map_err(|_| KubeconfigError::ServerUrl)?;
    if uri.scheme() != Some(&Scheme::HTTPS) {
        return Err(KubeconfigError::NotHttps);
    }
    // The connection pool and the `Host` header use the whole authority, including user info.
    let authority = uri.authority().ok_or(KubeconfigError::ServerUrl)?;
    let usable = !authority.host().is_empty() && !authority.as_str().contains('@') && uri.query().is_none();
    if usable { Ok(uri) } else { Err(KubeconfigError::ServerUrl) }
}

fn roots(data: &str) -> Option<RootCertStore> {
    tls::roots(&tls::certificates(&decode(data)?).ok()?).ok()
}

fn credentials(user: wire::User) -> Result<Credentials, KubeconfigError> {
    let token = non_empty(user.token.map(|token| token.trim().to_owned()));
    let certificate = non_empty(user.client_certificate_data);
    let key = non_empty(user.client_key_data);
    match (token, certificate, key) {
        (Some(token), None, None) => {
            let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| KubeconfigError::Token)?;
            value.set_sensitive(true);
            Ok(Credentials::Token(value))
        }
        (None, Some(certificate), Some(key)) => pair(&certificate, &key).ok_or(KubeconfigError::ClientCertificate),
        (Some(_), Some(_), _) | (Some(_), _, Some(_)) => Err(KubeconfigError::SeveralCredentials),
        (None, _, _) => Err(KubeconfigError::NoCredentials),
    }
}

fn pair(certificate: &str, key: &str) -> Option<Credentials> {
    let chain = tls::certificates(&decode(certificate)?).ok().filter(|chain| !chain.is_empty())?;
    let key = PrivateKeyDer::from_pem_slice(&decode(key)?).ok()?;
    Some(Credentials::Certificate(chain, key))
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
    use crate::kube::runtime_access::tests::test_bed::Party;

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
        let (ca, cert, key) = (party.certificate_data(), party.certificate_data(), party.key_data());
        let cluster = format!("server: 'https://runtime:6443/prefix', certificate-authority-data: {ca}, extra: 1");
        let by_token = parse(&kubeconfig(&cluster, "token: sesame")).unwrap();
        assert!(matches!(&by_token.credentials, Credentials::Token(value) if value == "Bearer sesame"));
        assert_eq!(by_token.server, "https://runtime:6443/prefix");
        let user = format!("client-certificate-data: {cert}, client-key-data: {key}");
        let by_certificate = parse(&kubeconfig(&cluster, &user)).unwrap();
        assert!(matches!(&by_certificate.credentials, Credentials::Certificate(chain, _) if chain.len() == 1));
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
        let (ca, key) = (party.certificate_data(), party.key_data());
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
            (&format!("token: t, {certificate}"), "both a token and a client certificate"),
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
            (format!("server: 'runtime:6443', {data}"), "not an https address"),
            (format!("server: 'https://user@runtime', {data}"), "not a usable URL"),
            (format!("server: 'https://runtime/?a=b', {data}"), "not a usable URL"),
            (format!("server: 'https://run time', {data}"), "not a usable URL"),
            (format!("server: 'https://127.1', {data}"), "not a usable URL"),
            (data.clone(), "names no server"),
            ("server: 'https://runtime'".to_owned(), "no certificate-authority-data"),
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

    #[test]
    fn only_one_cluster_user_and_context_are_allowed() {
        let whole =
            "clusters: [{name: a}]\nusers: [{name: b}]\ncontexts: [{name: c, context: {cluster: a, user: b}}]\n";
        let long = format!("# {}", "x".repeat(MAX_BYTES));
        for (text, refusal) in [
            ("", KubeconfigError::NoKey),
            (" \n", KubeconfigError::NoKey),
            (long.as_str(), KubeconfigError::TooLarge),
            ("{}", KubeconfigError::NoServer),
            ("clusters: null", KubeconfigError::NoServer),
            ("clusters: [{name: a}, {name: b}]", KubeconfigError::SeveralServers(2)),
            ("clusters: [{name: a}]", KubeconfigError::NoCredentials),
            ("clusters: [{name: a}]\nusers: [{name: a}, {name: b}, {name: c}]", KubeconfigError::SeveralUsers(3)),
            ("clusters: [{name: a}]\nusers: [{name: a}]", KubeconfigError::Context),
            (
                "clusters: [{name: a}]\nusers: [{name: a}]\ncontexts: [{name: a}, {name: b}]",
                KubeconfigError::SeveralContexts(2),
            ),
            (
                "clusters: [{name: a}]\nusers: [{name: b}]\ncontexts: [{name: c, context: {cluster: a, user: x}}]",
                KubeconfigError::Context,
            ),
            (&format!("{whole}current-context: other"), KubeconfigError::Context),
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
