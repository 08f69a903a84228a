//! Credentials of a registry in the configuration of docker and podman: entries of files, and credential helpers.

mod helper;

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tidewatch_oci::credentials::{Credentials, Origin, RegistryAddress, RegistryTarget};

/// Maximum size of a file in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// File with docker's credentials, in the folder of docker's configuration.
const DOCKER_FILE: &str = "config.json";
/// Folder of docker's configuration in the home directory.
const DOCKER_FOLDER: &str = ".docker";
/// File with podman's credentials in the folder for files of the session.
const PODMAN_FILE: &str = "containers/auth.json";
/// Name under which all tools store the credentials of Docker Hub.
const DOCKER_HUB: &str = "https://index.docker.io/v1/";
const DOCKER_HUB_HOSTS: [&str; 3] = ["docker.io", "index.docker.io", "registry-1.docker.io"];

/// Finds the credentials of a registry: in docker's configuration, else in podman's. `None` if neither has any.
///
/// # Errors
/// A file exists and is not usable, or a credential helper fails.
pub(super) async fn find(address: &RegistryAddress) -> Result<Option<Credentials>> {
    for file in files(|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)) {
        let Some(config) = read(&file)? else { continue };
        let found = config.credentials(address).await;
        if let Some(credentials) = found.with_context(|| format!("use {}", file.display()))? {
            return Ok(Some(credentials));
        }
    }
    Ok(None)
}

/// The files in the order in which they are searched.
fn files(variable: impl Fn(&str) -> Option<PathBuf>) -> impl Iterator<Item = PathBuf> {
    let docker = variable("DOCKER_CONFIG").or_else(|| Some(variable("HOME")?.join(DOCKER_FOLDER)));
    let podman = variable("REGISTRY_AUTH_FILE").or_else(|| Some(variable("XDG_RUNTIME_DIR")?.join(PODMAN_FILE)));
    docker.map(|folder| folder.join(DOCKER_FILE)).into_iter().chain(podman)
}

/// Reads a file; `None` if it does not exist.
fn read(file: &Path) -> Result<Option<Config>> {
    let content = match fs::read(file) {
        Err(absent) if absent.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.with_context(|| format!("read {}", file.display()))?,
    };
    if content.len() as u64 > MAX_BYTES {
        bail!("{} exceeds {MAX_BYTES} bytes", file.display());
    }
    // The parser's text may quote a secret.
    let Ok(config) = serde_json::from_slice(&content) else {
        bail!("{} is not JSON of docker's configuration", file.display());
    };
    Ok(Some(config))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default)]
    auths: Map<String, Value>,
    /// Names of helpers by server.
    #[serde(default)]
    cred_helpers: Map<String, Value>,
    /// Name of the helper of all other servers.
    creds_store: Option<String>,
}

impl Config {
    /// Asks the helper of the server, if there is one, and reads the entry of the server otherwise.
    async fn credentials(&self, address: &RegistryAddress) -> Result<Option<Credentials>> {
        let ranked = self.cred_helpers.iter().filter_map(|(key, name)| Some((rank(key, address)?, name.as_str()?)));
        let own = ranked.max_by_key(|(rank, _)| *rank).map(|(_, name)| name);
        let store = self.creds_store.as_deref();
        if let Some(name) = own.or(store).filter(|name| !name.is_empty())
            && let Some(credentials) = helper::get(name, &server(&address.origin)).await?
        {
            return Ok(Some(credentials));
        }
        let entries = self.auths.iter().filter_map(|(key, entry)| Some((rank(key, address)?, key, entry)));
        let Some((_, key, entry)) = entries.max_by_key(|(rank, ..)| *rank) else { return Ok(None) };
        // Only the server of the key matters, and a path in it would not be one of a repository in all cases.
        let server = key.parse::<RegistryAddress>().map(|address| address.origin.to_string())?;
        let single = json!({"auths": {server: entry}}).to_string();
        Ok(RegistryTarget::from_docker_config(single.as_bytes(), "")?.credentials)
    }
}

/// Name of a server for helpers and in comparisons.
fn server(origin: &Origin) -> String {
    if DOCKER_HUB_HOSTS.contains(&origin.host()) { DOCKER_HUB.to_owned() } else { origin.authority() }
}

/// How well a key fits an address: `None` if it names another server. The longest path above the repositories fits best,
/// then a server without path; a path beside the repositories is the last resort.
fn rank(key: &str, address: &RegistryAddress) -> Option<usize> {
    let key: RegistryAddress = key.parse().ok()?;
    // The port counts, not the scheme: credentials of a server with TLS never go to its port for plain HTTP.
    if server(&key.origin) != server(&address.origin) || key.origin.port() != address.origin.port() {
        return None;
    }
    let below = address.path.strip_prefix(&key.path);
    let is_above = below.is_some_and(|rest| key.path.is_empty() || rest.is_empty() || rest.starts_with('/'));
    Some(if is_above { key.path.len() + 1 } else { 0 })
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn basic(password: &str) -> Option<Credentials> {
        Some(Credentials::Basic { username: "u".into(), password: password.into() })
    }

    #[tokio::test]
    async fn entry_is_that_of_the_server_with_the_longest_path() {
        let config: Config = serde_json::from_value(json!({"auths": {
            "a.example.org": {"username": "u", "password": "a"},
            "https://b.example.org:5000/v2/": {"auth": "dTpi"},
            "c.example.org": {},
            "d.example.org/one": {"username": "u", "password": "one"},
            "d.example.org/one/two": {"username": "u", "password": "two"},
            "https://index.docker.io/v1/": {"username": "u", "password": "hub"},
            "not an address": {"username": "u", "password": "x"},
        }}))
        .unwrap();
        for (registry, credentials) in [
            ("a.example.org/modules", basic("a")),
            ("b.example.org:5000", basic("b")),
            ("c.example.org", None),
            ("b.example.org", None),
            ("http://a.example.org", None),
            ("http://b.example.org:5000", basic("b")),
            ("d.example.org/one/two/three", basic("two")),
            ("d.example.org/one/twofold", basic("one")),
            // As docker does, which knows servers only.
            ("d.example.org/other", basic("two")),
            ("docker.io/example", basic("hub")),
            ("registry-1.docker.io", basic("hub")),
        ] {
            let found = config.credentials(&registry.parse().unwrap()).await.unwrap();
            assert_eq!(found, credentials, "{registry}");
        }
    }

    #[test]
    fn files_are_those_of_docker_and_then_of_podman() {
        let of = |set: &[(&str, &str)]| -> Vec<PathBuf> {
            files(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value))).collect()
        };
        let paths = |paths: &[&str]| -> Vec<PathBuf> { paths.iter().map(PathBuf::from).collect() };
        assert_eq!(of(&[]), paths(&[]));
        assert_eq!(
            of(&[("HOME", "/h"), ("XDG_RUNTIME_DIR", "/x")]),
            paths(&["/h/.docker/config.json", "/x/containers/auth.json"])
        );
        assert_eq!(
            of(&[("HOME", "/h"), ("DOCKER_CONFIG", "/d"), ("XDG_RUNTIME_DIR", "/x"), ("REGISTRY_AUTH_FILE", "/r")]),
            paths(&["/d/config.json", "/r"])
        );
    }

    #[test]
    fn malformed_file_is_refused_without_quoting_it() {
        let folder = TempDir::new().unwrap();
        let file = folder.path().join(DOCKER_FILE);
        assert!(read(&file).unwrap().is_none(), "there is no file");
        fs::write(&file, r#"{"auths": "secret"}"#).unwrap();
        let error = read(&file).err().unwrap();
        assert!(!format!("{error:?}").contains("secret"));
    }
}
