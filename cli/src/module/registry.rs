//! Access to an OCI registry: flags, credentials, and the client.

use std::{
    env, fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use hyper_util::client::proxy::matcher::Matcher;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tidewatch_receiver::{
    base::addresses::AddressRules,
    oci::{
        credentials::{AllowedHost, Credentials, RegistryAddress, RegistryTarget},
        fetch::{Fetcher, Limits, Transport},
        metrics::Metrics,
        tls,
    },
};

/// Maximum size of a password and of docker's configuration, in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// Folder of docker's configuration in the home directory.
const DOCKER_FOLDER: &str = ".docker";
/// File with docker's credentials.
const DOCKER_FILE: &str = "config.json";

/// Flags of the access to a registry. Without --username, credentials are those of docker's configuration: config.json
/// in the folder of the environment variable DOCKER_CONFIG, or in ~/.docker.
#[derive(Clone, Debug, Default, Args)]
#[group(skip)]
pub struct RegistryFlags {
    /// User at the registry; by default the credentials of docker's config.json, in the folder of DOCKER_CONFIG or in
    /// ~/.docker
    #[arg(long, requires = "password_stdin", value_name = "USER")]
    pub username: Option<String>,

    /// Read the password from standard input
    #[arg(long, requires = "username")]
    pub password_stdin: bool,

    /// File with roots of the registry's certificate in PEM, beside those of the system
    #[arg(long, env = "TIDEWATCH_OCI_REGISTRY_CA_FILE", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,

    /// Hosts beside the registry's own to which it may redirect downloads, and that may issue its tokens, as for the
    /// receiver
    #[arg(long, env = "TIDEWATCH_OCI_REGISTRY_ALLOWED_HOSTS", value_delimiter = ',', value_name = "HOST")]
    pub oci_registry_allowed_hosts: Vec<AllowedHost>,
}

/// Client of one registry.
pub(super) struct Registry {
    pub(super) target: RegistryTarget,
    /// Sends requests other than downloads.
    pub(super) transport: Transport,
    pub(super) fetcher: Fetcher,
    pub(super) limits: Limits,
}

impl RegistryFlags {
    /// Reads credentials and roots; connects only when used.
    pub(super) fn connect(&self, address: RegistryAddress) -> Result<Registry> {
        let limits = Limits::default();
        let roots = tls::roots(self.ca_file.as_ref())?;
        let transports = tls::transports(roots, Matcher::from_env(), limits.connect, AddressRules::default())?;
        let transport = transports.known.clone();
        let allowed = Arc::from(&*self.oci_registry_allowed_hosts);
        let fetcher = Fetcher::new(transports, allowed, limits, Metrics::default());
        let credentials = match &self.username {
            Some(username) => Some(Credentials::Basic { username: username.clone(), password: password(io::stdin())? }),
            None => {
                docker_folder().map_or(Ok(None), |folder| docker_credentials(&folder.join(DOCKER_FILE), &address))?
            }
        };
        Ok(Registry { target: RegistryTarget::new(address, credentials), transport, fetcher, limits })
    }
}

fn password(input: impl io::Read) -> Result<String> {
    let mut password = String::new();
    input.take(MAX_BYTES).read_to_string(&mut password).context("read the password from standard input")?;
    let password = password.trim_end_matches(['\r', '\n']);
    ensure!(!password.is_empty(), "the password on standard input is empty");
    ensure!(!password.chars().any(char::is_control), "the password on standard input has control characters");
    Ok(password.to_owned())
}

fn docker_folder() -> Option<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("DOCKER_CONFIG").or_else(|| Some(set("HOME")?.join(DOCKER_FOLDER)))
}

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: Map<String, Value>,
}

/// Credentials of the registry in docker's configuration; `None` if it has none, or does not exist.
fn docker_credentials(file: &Path, address: &RegistryAddress) -> Result<Option<Credentials>> {
    let content = match fs::read(file) {
        Err(absent) if absent.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.with_context(|| format!("read {}", file.display()))?,
    };
    if content.len() as u64 > MAX_BYTES {
        bail!("{} exceeds {MAX_BYTES} bytes", file.display());
    }
    // The parser's text may quote a secret.
    let Ok(config) = serde_json::from_slice::<DockerConfig>(&content) else {
        bail!("{} is not JSON of docker's configuration", file.display());
    };
    let is_same_server = |key: &str| {
        let entry: Option<RegistryAddress> = key.parse().ok();
        let host = |address: &RegistryAddress| address.origin.authority();
        entry.is_some_and(|entry| host(&entry) == host(address))
    };
    let Some((key, entry)) = config.auths.into_iter().find(|(key, _)| is_same_server(key)) else { return Ok(None) };
    let single = json!({"auths": {key: entry}}).to_string();
    let target = RegistryTarget::from_docker_config(single.as_bytes(), "");
    Ok(target.with_context(|| format!("read {}", file.display()))?.credentials)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn docker_credentials_are_those_of_the_registry() {
        let folder = TempDir::new().unwrap();
        let file = folder.path().join(DOCKER_FILE);
        let of = |registry: &str| docker_credentials(&file, &registry.parse().unwrap());
        assert_eq!(of("a.example.org").unwrap(), None, "there is no file");
        let auths = json!({"auths": {
            "a.example.org": {"username": "u", "password": "a"},
            "https://b.example.org:5000/v2/": {"auth": "dTpi"},
            "c.example.org": {},
        }});
        fs::write(&file, auths.to_string()).unwrap();
        let basic = |password: &str| Some(Credentials::Basic { username: "u".into(), password: password.into() });
        assert_eq!(of("a.example.org/modules").unwrap(), basic("a"));
        assert_eq!(of("b.example.org:5000").unwrap(), basic("b"));
        assert_eq!(of("c.example.org").unwrap(), None, "its entry is empty");
        assert_eq!(of("b.example.org").unwrap(), None, "another port is another server");
        fs::write(&file, r#"{"auths": "secret"}"#).unwrap();
        assert!(!format!("{:?}", of("a.example.org").unwrap_err()).contains("secret"));
    }

    #[test]
    fn password_is_one_line() {
        assert_eq!(password(&b"sesame\r\n"[..]).unwrap(), "sesame");
        for bad in ["", "\n", "a\nb\n"] {
            assert!(password(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }
}
