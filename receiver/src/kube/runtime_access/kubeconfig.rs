//! From the bytes of an access Secret to what a connection needs, or to the one reason why not.
//!
//! A kubeconfig can make a client run commands, read files, trust anybody and go through anybody. Here it is data: one
//! https server, its CA, and a token or a client certificate, all in the text itself. Everything else is refused by name.

mod wire;

use std::{fmt, net::IpAddr, sync::Arc};

use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderValue, Uri, uri::Scheme};
use rustls::RootCertStore;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use thiserror::Error;
use tidewatch_shared::tls;

use super::addresses::Forbidden;

/// The key of an access Secret that holds the kubeconfig.
pub const SECRET_KEY: &str = "config";

/// No kubeconfig is larger, in bytes. A usual one has about 5 KiB; large CA bundles are what needs more.
pub const MAX_BYTES: usize = 256 * 1024;

/// Why a kubeconfig is refused. The text is one sentence for the condition `RuntimeAccess`; it never quotes the kubeconfig.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The Secret lacks the key, or it is empty.
    #[error("the access Secret has no kubeconfig under the key `config`")]
    NoKey,
    /// More than [`MAX_BYTES`].
    #[error("the kubeconfig is larger than {MAX_BYTES} bytes")]
    TooLarge,
    /// Not YAML, or not a kubeconfig.
    #[error("the kubeconfig is malformed (near line {line})")]
    Malformed {
        /// Counted from 1; 0 if unknown.
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
    /// No context, or one that names a cluster or user which is not there, or is not the current one.
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
    /// `as` and its kin.
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
    /// Both: the API server would decide who we are.
    #[error("the kubeconfig has both a token and a client certificate, only one is allowed")]
    SeveralCredentials,
    /// Characters that no header can carry.
    #[error("the kubeconfig's token is not usable")]
    Token,
    /// Not base64, not PEM, or key and certificate do not belong together.
    #[error("the kubeconfig's client certificate and key are not usable together")]
    ClientCertificate,
    /// The server is given as an address that no runtime may have.
    #[error("{0}")]
    ForbiddenAddress(Forbidden),
}

impl Refusal {
    /// A label of a closed set.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::NoKey => "no_key",
            Self::TooLarge => "too_large",
            Self::Malformed { .. } => "malformed",
            Self::SeveralServers(_) => "several_servers",
            Self::NoServer => "no_server",
            Self::SeveralUsers(_) => "several_users",
            Self::SeveralContexts(_) => "several_contexts",
            Self::Context => "context",
            Self::Exec => "exec",
            Self::AuthProvider => "auth_provider",
            Self::FilePath(_) => "file_path",
            Self::BasicAuth => "basic_auth",
            Self::Impersonation => "impersonation",
            Self::Proxy => "proxy",
            Self::Insecure => "insecure",
            Self::NotHttps => "not_https",
            Self::ServerUrl => "server_url",
            Self::TlsServerName => "tls_server_name",
            Self::NoCa => "no_ca",
            Self::Ca => "ca",
            Self::NoCredentials => "no_credentials",
            Self::SeveralCredentials => "several_credentials",
            Self::Token => "token",
            Self::ClientCertificate => "client_certificate",
            Self::ForbiddenAddress(_) => "forbidden_address",
        }
    }
}

/// A kubeconfig that is only data. Its `Debug` shows where it leads and by which kind of credentials, never the credentials.
pub struct RuntimeKubeconfig {
    /// `https`, with host, optional port and path prefix.
    pub server: Uri,
    /// The name or address that the server's certificate must bear: `tls-server-name`, or the host.
    pub server_name: ServerName<'static>,
    /// Whom to trust: these roots and no others.
    pub ca: Arc<RootCertStore>,
    /// Who we are.
    pub credentials: Credentials,
}

/// Who we are in the runtime.
pub enum Credentials {
    /// The value of the header `Authorization`, marked as sensitive.
    Token(HeaderValue),
    /// Chain, leaf first, with the leaf's key.
    Certificate(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>),
}

impl fmt::Debug for RuntimeKubeconfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuntimeKubeconfig")
            .field("server", &self.server)
            .field("credentials", &self.credentials)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Token(_) => "Token(hidden)",
            Self::Certificate(..) => "Certificate(hidden)",
        })
    }
}

impl RuntimeKubeconfig {
    /// Reads and judges a kubeconfig, in YAML or JSON.
    ///
    /// # Errors
    /// The first [`Refusal`]; what would be dangerous is looked for before what is merely missing.
    pub fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Err(Refusal::NoKey);
        }
        if bytes.len() > MAX_BYTES {
            return Err(Refusal::TooLarge);
        }
        // The parser's own message can quote the text, tokens included: only the line leaves this function.
        let raw: wire::Kubeconfig = serde_saphyr::from_slice(bytes)
            .map_err(|error| Refusal::Malformed { line: error.location().map_or(0, |location| location.line()) })?;
        let (cluster, user) = select(raw)?;
        refuse_dangers(&cluster, &user)?;
        let server = server(cluster.server.as_deref())?;
        let server_name = match filled(cluster.tls_server_name) {
            Some(name) => ServerName::try_from(name).map_err(|_| Refusal::TlsServerName)?,
            None => ServerName::try_from(bare(server.host().unwrap_or_default()).to_owned())
                .map_err(|_| Refusal::ServerUrl)?,
        };
        let ca = filled(cluster.certificate_authority_data).ok_or(Refusal::NoCa)?;
        Ok(Self { server, server_name, ca: roots(&ca)?.into(), credentials: credentials(user)? })
    }

    /// The server's address, if the URL holds one instead of a name.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        literal(&self.server)
    }
}

/// The address in a URL whose host is one. Other spellings of addresses (`127.1`) are names, which the resolver judges.
pub(super) fn literal(uri: &Uri) -> Option<IpAddr> {
    bare(uri.host()?).parse().ok()
}

/// An IPv6 address stands in brackets in a URL.
fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// The only cluster and the only user, if the only context names them.
fn select(raw: wire::Kubeconfig) -> Result<(wire::Cluster, wire::User), Refusal> {
    let wire::Kubeconfig { clusters, users, contexts, current_context } = raw;
    let cluster = only(clusters, Refusal::NoServer, Refusal::SeveralServers)?;
    let user = only(users, Refusal::NoCredentials, Refusal::SeveralUsers)?;
    let context = only(contexts, Refusal::Context, Refusal::SeveralContexts)?;
    let current = filled(current_context).is_none_or(|name| name == context.name);
    let names = context.context.cluster.as_deref() == Some(&*cluster.name)
        && context.context.user.as_deref() == Some(&*user.name);
    if current && names { Ok((cluster.cluster, user.user)) } else { Err(Refusal::Context) }
}

fn only<T>(mut list: Vec<T>, none: Refusal, several: fn(usize) -> Refusal) -> Result<T, Refusal> {
    match list.len() {
        0 | 1 => list.pop().ok_or(none),
        many => Err(several(many)),
    }
}

fn refuse_dangers(cluster: &wire::Cluster, user: &wire::User) -> Result<(), Refusal> {
    let path = |path: &Option<String>, field| match path {
        Some(path) if !path.is_empty() => Err(Refusal::FilePath(field)),
        _ => Ok(()),
    };
    let refuse = |is: bool, refusal| if is { Err(refusal) } else { Ok(()) };
    refuse(user.exec.is_some(), Refusal::Exec)?;
    refuse(user.auth_provider.is_some(), Refusal::AuthProvider)?;
    path(&user.token_file, "tokenFile")?;
    path(&user.client_certificate, "client-certificate")?;
    path(&user.client_key, "client-key")?;
    path(&cluster.certificate_authority, "certificate-authority")?;
    refuse(user.username.is_some() || user.password.is_some(), Refusal::BasicAuth)?;
    let impersonation = [&user.impersonate, &user.as_uid, &user.as_groups, &user.as_user_extra];
    refuse(impersonation.into_iter().any(Option::is_some), Refusal::Impersonation)?;
    refuse(cluster.proxy_url.as_deref().is_some_and(|url| !url.is_empty()), Refusal::Proxy)?;
    refuse(cluster.insecure_skip_tls_verify == Some(true), Refusal::Insecure)
}

fn server(text: Option<&str>) -> Result<Uri, Refusal> {
    let text = text.map(str::trim).filter(|text| !text.is_empty()).ok_or(Refusal::NoServer)?;
    let uri: Uri = text.parse().map_err(|_| Refusal::ServerUrl)?;
    if uri.scheme() != Some(&Scheme::HTTPS) {
        return Err(Refusal::NotHttps);
    }
    // The pool and the `Host` header take the authority as it is: user info would travel along.
    let authority = uri.authority().ok_or(Refusal::ServerUrl)?;
    let usable = !authority.host().is_empty() && !authority.as_str().contains('@') && uri.query().is_none();
    if usable { Ok(uri) } else { Err(Refusal::ServerUrl) }
}

fn roots(data: &str) -> Result<RootCertStore, Refusal> {
    let certificates = tls::certificates(&decode(data).ok_or(Refusal::Ca)?).map_err(|_| Refusal::Ca)?;
    tls::roots(&certificates).map_err(|_| Refusal::Ca)
}

fn credentials(user: wire::User) -> Result<Credentials, Refusal> {
    let token = user.token.map(|token| token.0.trim().to_owned()).filter(|token| !token.is_empty());
    let certificate = filled(user.client_certificate_data);
    let key = user.client_key_data.map(|key| key.0).filter(|key| !key.is_empty());
    match (token, certificate, key) {
        (Some(token), None, None) => {
            let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| Refusal::Token)?;
            value.set_sensitive(true);
            Ok(Credentials::Token(value))
        }
        (None, Some(certificate), Some(key)) => pair(&certificate, &key).ok_or(Refusal::ClientCertificate),
        (Some(_), Some(_), _) | (Some(_), _, Some(_)) => Err(Refusal::SeveralCredentials),
        (None, _, _) => Err(Refusal::NoCredentials),
    }
}

fn pair(certificate: &str, key: &str) -> Option<Credentials> {
    let chain = tls::certificates(&decode(certificate)?).ok().filter(|chain| !chain.is_empty())?;
    let key = PrivateKeyDer::from_pem_slice(&decode(key)?).ok()?;
    Some(Credentials::Certificate(chain, key))
}

/// Go's decoder skips line breaks, and YAML block texts have them.
fn decode(data: &str) -> Option<Vec<u8>> {
    let packed: String = data.split_ascii_whitespace().collect();
    STANDARD.decode(packed).ok()
}

fn filled(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::runtime_access::tests::test_bed::Party;

    /// A usable kubeconfig with each part replaceable.
    fn kubeconfig(cluster: &str, user: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: a, cluster: {{{cluster}}}}}]\n\
             users: [{{name: b, user: {{{user}}}}}]\ncontexts: [{{name: c, context: {{cluster: a, user: b}}}}]\n"
        )
    }

    fn parse(text: &str) -> Result<RuntimeKubeconfig, Refusal> {
        RuntimeKubeconfig::parse(text.as_bytes())
    }

    #[test]
    fn a_token_or_a_certificate_is_enough() {
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
        assert_eq!(nulls.address(), None);
    }

    #[test]
    fn what_is_shown_holds_no_secret() {
        let party = Party::new("runtime");
        let cluster = format!("server: 'https://[::1]:6443', certificate-authority-data: {}", party.certificate_data());
        let parsed = parse(&kubeconfig(&cluster, "token: sesame")).unwrap();
        let shown = format!("{parsed:?}");
        assert!(shown.contains("[::1]") && !shown.contains("sesame"), "{shown}");
        assert_eq!(parsed.address(), Some("::1".parse().unwrap()));
        let broken = parse("users: [{name: b, user: {token: sesame, exec: [}}]").unwrap_err();
        assert!(!format!("{broken} {broken:?}").contains("sesame"));
    }

    #[test]
    fn each_danger_and_each_gap_is_refused_by_name() {
        let party = Party::new("runtime");
        let (ca, key) = (party.certificate_data(), party.key_data());
        let good = format!("server: 'https://runtime', certificate-authority-data: {ca}");
        let certificate = format!("client-certificate-data: {ca}, client-key-data: {key}");
        let refused = |cluster: &str, user: &str| parse(&kubeconfig(cluster, user)).unwrap_err();
        for (user, says) in [
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
            assert!(refusal.contains(says), "{user}: {refusal}");
        }
        let data = format!("certificate-authority-data: {ca}");
        for (cluster, says) in [
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
            assert!(refusal.contains(says), "{cluster}: {refusal}");
        }
    }

    #[test]
    fn only_one_of_each_may_be_named() {
        let whole =
            "clusters: [{name: a}]\nusers: [{name: b}]\ncontexts: [{name: c, context: {cluster: a, user: b}}]\n";
        let long = format!("# {}", "x".repeat(MAX_BYTES));
        for (text, refusal) in [
            ("", Refusal::NoKey),
            (" \n", Refusal::NoKey),
            (long.as_str(), Refusal::TooLarge),
            ("{}", Refusal::NoServer),
            ("clusters: null", Refusal::NoServer),
            ("clusters: [{name: a}, {name: b}]", Refusal::SeveralServers(2)),
            ("clusters: [{name: a}]", Refusal::NoCredentials),
            ("clusters: [{name: a}]\nusers: [{name: a}, {name: b}, {name: c}]", Refusal::SeveralUsers(3)),
            ("clusters: [{name: a}]\nusers: [{name: a}]", Refusal::Context),
            (
                "clusters: [{name: a}]\nusers: [{name: a}]\ncontexts: [{name: a}, {name: b}]",
                Refusal::SeveralContexts(2),
            ),
            (
                "clusters: [{name: a}]\nusers: [{name: b}]\ncontexts: [{name: c, context: {cluster: a, user: x}}]",
                Refusal::Context,
            ),
            (&format!("{whole}current-context: other"), Refusal::Context),
            (whole, Refusal::NoServer),
        ] {
            assert_eq!(parse(text).unwrap_err(), refusal, "{text:.200}");
        }
        for text in
            ["[", "plain words", "clusters: 1", "clusters: []\nclusters: []", "- a", "clusters: [{name: a}]\n---\n{}"]
        {
            assert!(matches!(parse(text), Err(Refusal::Malformed { .. })), "{text}");
        }
        assert!(matches!(RuntimeKubeconfig::parse(&[0xff, 0xfe, 0x00]), Err(Refusal::Malformed { .. })));
    }
}
