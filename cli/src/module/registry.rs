//! Access to an OCI registry: flags, credentials, and the client.

use std::{
    io::{self, Read as _},
    path::PathBuf,
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use hyper_util::client::proxy::matcher::Matcher;
use tidewatch_kit::addresses::AddressRules;
use tidewatch_oci::{
    credentials::{AllowedHost, Credentials, RegistryAddress, RegistryTarget},
    fetch::{FetchError, Fetcher},
    metrics::Metrics,
    tls,
};

use super::credentials;

/// Maximum size of a password in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Flags of the access to a registry. Without --username, credentials are those of docker's or podman's configuration.
#[derive(Clone, Debug, Default, Args)]
#[group(skip)]
pub struct RegistryFlags {
    /// User at the registry; by default the credentials of docker's config.json, with its credential helpers, in the folder
    /// of DOCKER_CONFIG or in ~/.docker, else those of podman's auth.json
    #[arg(long, requires = "password_stdin", value_name = "USER")]
    pub username: Option<String>,

    /// Read the password from standard input; it may have several lines, as a JSON key of a service account
    #[arg(long, requires = "username")]
    pub password_stdin: bool,

    /// File with roots of the registry's certificate in PEM, beside those of the system
    #[arg(long, env = "TIDEWATCH_OCI_REGISTRY_CA_FILE", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,

    /// Hosts beside the registry's own that may issue its tokens, and to which it may redirect manifests, and blobs
    /// without TLS or at a private address, as for the receiver
    #[arg(long, env = "TIDEWATCH_OCI_REGISTRY_ALLOWED_HOSTS", value_delimiter = ',', value_name = "HOST")]
    pub oci_registry_allowed_hosts: Vec<AllowedHost>,
}

/// Client of one registry.
pub(super) struct Registry {
    pub(super) target: RegistryTarget,
    pub(super) fetcher: Fetcher,
}

impl RegistryFlags {
    /// Reads credentials and roots, and may run a credential helper; connects only when used.
    pub(super) async fn connect(&self, address: RegistryAddress) -> Result<Registry> {
        let roots = tls::roots(self.ca_file.as_ref())?;
        let transports = tls::transports(roots, Matcher::from_env(), AddressRules::default())?;
        let allowed = Arc::from(&*self.oci_registry_allowed_hosts);
        let fetcher = Fetcher::new(transports, allowed, Metrics::default());
        let credentials = match &self.username {
            Some(username) => {
                ensure!(!username.contains(':'), "the user has a colon, which cannot be sent to a registry");
                Some(Credentials::Basic { username: username.clone(), password: password(io::stdin())? })
            }
            None => credentials::find(&address).await?,
        };
        Ok(Registry { target: RegistryTarget::new(address, credentials), fetcher })
    }
}

/// Adds to a refusal how the program gets credentials.
pub(super) fn explained(error: FetchError) -> anyhow::Error {
    match error {
        FetchError::Unauthorized { with_credentials: false }
        | FetchError::Denied { with_credentials: false, .. }
        | FetchError::NotFound { with_credentials: false, .. } => anyhow::Error::new(error)
            .context("credentials come from `docker login`, or --username with --password-stdin"),
        error => error.into(),
    }
}

fn password(input: impl io::Read) -> Result<String> {
    let mut password = String::new();
    input.take(MAX_BYTES).read_to_string(&mut password).context("read the password from standard input")?;
    let password = password.trim_end_matches(['\r', '\n']);
    ensure!(!password.is_empty(), "the password on standard input is empty");
    Ok(password.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn password_ends_before_the_last_line_break() {
        for (input, expected) in [("sesame\r\n", "sesame"), ("{\n \"a\": 1\n}\n", "{\n \"a\": 1\n}")] {
            assert_eq!(password(input.as_bytes()).unwrap(), expected);
        }
        for empty in ["", "\n"] {
            assert!(password(empty.as_bytes()).is_err(), "{empty:?}");
        }
    }
}
