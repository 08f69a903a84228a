//! Kubeconfig of an agent outside its cluster. It is untrusted data: entries that would run a command or disable
//! verification are refused. Only JSON is accepted (`kubectl config view --raw --minify --flatten --output json`): a
//! YAML parser would cost an agent in its pod, which never reads a kubeconfig, a tenth of its memory.

use std::{fs, path::Path};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, de::IgnoredAny};

use super::access::{Access, ClientSetupError, Content, Credential, server};

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Kubeconfig {
    #[serde(default)]
    clusters: Vec<Named<Cluster>>,
    #[serde(default)]
    users: Vec<Named<User>>,
    #[serde(default)]
    contexts: Vec<Named<Context>>,
    #[serde(default)]
    current_context: String,
}

#[derive(Deserialize)]
struct Named<T> {
    name: String,
    #[serde(alias = "cluster", alias = "user", alias = "context")]
    value: T,
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    server: String,
    certificate_authority: Option<String>,
    certificate_authority_data: Option<String>,
    tls_server_name: Option<String>,
    #[serde(default)]
    insecure_skip_tls_verify: bool,
    proxy_url: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct User {
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<String>,
    client_certificate: Option<String>,
    client_certificate_data: Option<String>,
    client_key: Option<String>,
    client_key_data: Option<String>,
    exec: Option<IgnoredAny>,
    auth_provider: Option<IgnoredAny>,
}

/// Reads the current context. Paths are relative to the kubeconfig's directory.
pub(super) fn read(path: &Path) -> Result<Access, ClientSetupError> {
    let text = fs::read(path).map_err(|error| ClientSetupError::Read { path: path.to_owned(), error })?;
    parse(&text, path.parent().unwrap_or(Path::new("")))
}

pub(super) fn parse(text: &[u8], folder: &Path) -> Result<Access, ClientSetupError> {
    // The parser's error would echo secrets.
    let config: Kubeconfig =
        serde_json::from_slice(text).map_err(|_| ClientSetupError::Kubeconfig("it must be in JSON"))?;
    let Kubeconfig { clusters, users, contexts, current_context } = config;
    let context = find(contexts, &current_context, "no current context")?;
    let cluster = find(clusters, &context.cluster, "no cluster of the current context")?;
    let user = find(users, &context.user, "no user of the current context")?;
    if cluster.insecure_skip_tls_verify || cluster.proxy_url.is_some() {
        return Err(ClientSetupError::Kubeconfig("insecure-skip-tls-verify and proxy-url are not allowed"));
    }
    let bundle = content(cluster.certificate_authority_data, cluster.certificate_authority, folder)?;
    Ok(Access {
        server: server(&cluster.server)?,
        bundle: bundle.ok_or(ClientSetupError::Kubeconfig("no certificate authority"))?,
        server_name: cluster.tls_server_name,
        credential: credential(user, folder)?,
    })
}

fn find<T>(entries: Vec<Named<T>>, name: &str, missing: &'static str) -> Result<T, ClientSetupError> {
    let found = entries.into_iter().find(|entry| entry.name == name);
    found.map(|entry| entry.value).ok_or(ClientSetupError::Kubeconfig(missing))
}

fn credential(user: User, folder: &Path) -> Result<Credential, ClientSetupError> {
    if user.exec.is_some() || user.auth_provider.is_some() {
        return Err(ClientSetupError::Kubeconfig("exec and auth-provider are not allowed"));
    }
    if let Some(token) = user.token {
        return Ok(Credential::Token(Content::Fixed(token.into_bytes())));
    }
    if let Some(file) = user.token_file {
        return Ok(Credential::Token(Content::File(folder.join(file))));
    }
    let chain = content(user.client_certificate_data, user.client_certificate, folder)?;
    let key = content(user.client_key_data, user.client_key, folder)?;
    let (Some(chain), Some(key)) = (chain, key) else {
        return Err(ClientSetupError::Kubeconfig("neither token nor client certificate"));
    };
    Ok(Credential::Certificate { chain: chain.read()?, key: key.read()? })
}

/// Inline data takes precedence over a path, as in other clients.
fn content(data: Option<String>, path: Option<String>, folder: &Path) -> Result<Option<Content>, ClientSetupError> {
    match (data, path) {
        (Some(data), _) => {
            let bytes =
                STANDARD.decode(data.trim()).map_err(|_| ClientSetupError::Kubeconfig("data that is not base64"))?;
            Ok(Some(Content::Fixed(bytes)))
        }
        (None, Some(path)) => Ok(Some(Content::File(folder.join(path)))),
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn config(cluster: &Value, user: &Value) -> Vec<u8> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": user}],
        });
        config.to_string().into_bytes()
    }

    fn cluster() -> Value {
        json!({"server": "https://127.0.0.1:1", "certificate-authority-data": "YQ=="})
    }

    #[test]
    fn tokens_and_client_certificates_are_accepted() {
        let folder = Path::new("/folder");
        let parse = |user| parse(&config(&cluster(), &user), folder).unwrap();
        let token = parse(json!({"token": "t"}));
        assert_eq!(token.authorization().unwrap().unwrap(), "Bearer t");
        assert_eq!(
            (token.server.to_string().as_str(), token.bundle.read().unwrap()),
            ("https://127.0.0.1:1/", b"a".to_vec())
        );
        let file = parse(json!({"tokenFile": "token"}));
        assert!(matches!(file.credential, Credential::Token(Content::File(path)) if path == folder.join("token")));
        let pair = parse(json!({"client-certificate-data": "YQ==", "client-key-data": "Yg=="}));
        assert!(matches!(pair.credential, Credential::Certificate { chain, key } if (&*chain, &*key) == (b"a", b"b")));
    }

    #[test]
    fn executable_and_insecure_entries_are_refused() {
        let with = |member: &str, value: Value| {
            let mut cluster = cluster();
            cluster[member] = value;
            cluster
        };
        let token = || json!({"token": "t"});
        for (cluster, user) in [
            (cluster(), json!({"exec": {"command": "sh"}})),
            (cluster(), json!({"auth-provider": {"name": "gcp"}})),
            (cluster(), json!({})),
            (cluster(), json!({"client-certificate-data": "YQ=="})),
            (with("server", json!("http://127.0.0.1:1")), token()),
            (with("certificate-authority-data", json!(null)), token()),
            (with("insecure-skip-tls-verify", json!(true)), token()),
            (with("proxy-url", json!("http://b")), token()),
        ] {
            assert!(parse(&config(&cluster, &user), Path::new("")).is_err(), "{cluster} {user}");
        }
        assert!(parse(b"apiVersion: v1", Path::new("")).is_err());
    }
}
