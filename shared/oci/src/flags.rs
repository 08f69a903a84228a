//! Flags of the registry and the content store.

use std::{env, path::PathBuf, sync::Arc};

use clap::Args;
use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;
use secrecy::{ExposeSecret as _, SecretString};
use thiserror::Error;
use tidewatch_kit::{addresses::Cidr, foreign_text::is_dns_subdomain};

use super::{
    credentials::{AddressError, AllowedHost, RegistryAddress},
    fetch,
};

/// Name of the default content folder in the system's folder for temporary files.
const CONTENT_DIR: &str = "tidewatch";

/// Flags of the registry with the modules' artefacts.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Registry")]
pub struct Flags {
    /// Registry of the modules' artefacts, as host with optional port; `http://` before it means plain HTTP. It is read
    /// without credentials; for one that demands them, use --oci-registry-cred-secret or --oci-registry-google-credentials
    #[arg(
        long,
        env = "TIDEWATCH_OCI_REGISTRY_HOST",
        value_name = "HOST",
        required_unless_present = "oci_registry_cred_secret",
        conflicts_with = "oci_registry_cred_secret"
    )]
    pub oci_registry_host: Option<RegistryAddress>,

    /// Secret of type kubernetes.io/dockerconfigjson in the receiver's namespace with the registry of the modules'
    /// artefacts as its only entry
    #[arg(long, env = "TIDEWATCH_OCI_REGISTRY_CRED_SECRET", value_name = "NAME", value_parser = secret_name)]
    pub oci_registry_cred_secret: Option<String>,

    /// Get the credentials for --oci-registry-host from the metadata server of Google Cloud, for the service account of
    /// the receiver; the host must be gcr.io, or one below gcr.io or pkg.dev
    #[arg(long, env = "TIDEWATCH_OCI_REGISTRY_GOOGLE_CREDENTIALS")]
    pub oci_registry_google_credentials: bool,

    /// Path of the modules' repositories in the registry
    #[arg(long, env = "TIDEWATCH_MODULES_REPOSITORY_SUBPATH", value_name = "PATH", default_value = "")]
    pub modules_repository_subpath: String,

    /// Further trusted roots of the registry's certificate, in PEM
    #[arg(long, env = "TIDEWATCH_OCI_REGISTRY_CA_FILE", value_name = "FILE")]
    pub oci_registry_ca_file: Option<PathBuf>,

    /// Hosts beside the registry's own at which it may have tokens issued, and to which it may redirect manifests, and
    /// blobs without TLS or at a private address: host, or host:port. Blobs are followed to other public hosts with TLS
    #[arg(long, env = "TIDEWATCH_OCI_REGISTRY_ALLOWED_HOSTS", value_name = "HOST", value_delimiter = ',')]
    pub oci_registry_allowed_hosts: Vec<AllowedHost>,

    /// HTTP proxy to the registry, if that uses TLS; defaults to HTTPS_PROXY, and NO_PROXY lists exceptions
    #[arg(long, env = "TIDEWATCH_OCI_REGISTRY_PROXY", value_name = "URL", hide_env_values = true)]
    pub oci_registry_proxy: Option<SecretString>,

    /// Folder with public keys in PEM, one of which must have signed a module's component descriptor; a signature has the
    /// name of its key's file. Read again when it changes. Without it, signatures are not verified
    #[arg(long, env = "TIDEWATCH_COMPONENT_KEYS", value_name = "FOLDER")]
    pub component_keys: Option<PathBuf>,

    /// Folder for fetched content, which may be lost at any time; defaults to one in the system's folder for temporary
    /// files
    #[arg(long, env = "TIDEWATCH_OCI_CONTENT_DIR", value_name = "FOLDER")]
    pub oci_content_dir: Option<PathBuf>,

    /// Limit of the folder for fetched content, in MiB
    #[arg(long, env = "TIDEWATCH_OCI_CONTENT_MAX_MIB", value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u32).range(16..=1_048_576))]
    pub oci_content_max_mib: u32,
}

/// Proxy for connections with TLS, and the hosts that are reached without it.
#[derive(Clone, Debug, Default)]
pub struct Proxy {
    /// It may contain a password.
    url: Option<SecretString>,
    except: String,
}

impl Proxy {
    /// Rules for the connector.
    pub fn matcher(&self) -> Matcher {
        let url = self.url.as_ref().map_or("", SecretString::expose_secret);
        Matcher::builder().https(url.to_owned()).no(self.except.clone()).build()
    }
}

/// Origin of the registry's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// `--oci-registry-host`, with anonymous access.
    Host(RegistryAddress),
    /// `--oci-registry-host` with `--oci-registry-google-credentials`.
    Google(RegistryAddress),
    /// `--oci-registry-cred-secret`.
    Secret {
        /// Name of the Secret.
        name: String,
        /// `--modules-repository-subpath`.
        subpath: String,
    },
}

/// Settings, from [`Flags`].
#[derive(Clone, Debug)]
pub struct Settings {
    /// Registry.
    pub source: Source,
    /// Further trusted roots.
    pub ca_file: Option<PathBuf>,
    /// Hosts of redirects and token realms.
    pub allowed_hosts: Arc<[AllowedHost]>,
    /// Networks in which no redirect ends, beside those that are refused in any case.
    pub denied_addresses: Vec<Cidr>,
    /// Proxy.
    pub proxy: Proxy,
    /// Folder with the keys that sign component descriptors.
    pub component_keys: Option<PathBuf>,
    /// Content folder.
    pub content_dir: PathBuf,
    /// Limit of the content folder, in bytes.
    pub content_max_bytes: u64,
}

/// Flags that contradict each other, or a malformed value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FlagsError {
    /// Neither host nor Secret, or both.
    #[error("exactly one of --oci-registry-host and --oci-registry-cred-secret is required")]
    Source,
    /// The sub-path is not a path of repositories.
    #[error("--modules-repository-subpath: {0}")]
    Subpath(AddressError),
    /// Tokens of the metadata server are for Google's registries only.
    #[error(
        "--oci-registry-google-credentials needs --oci-registry-host, with TLS and without a port, and as its host gcr.io or one below gcr.io or pkg.dev"
    )]
    Google,
    /// The proxy is not `http://host:port`.
    #[error("--oci-registry-proxy, or else HTTPS_PROXY, is not a URL of the form http://[user:password@]host:port")]
    Proxy,
}

impl Flags {
    /// Validates the flags; the defaults of the proxy are from the environment.
    ///
    /// # Errors
    /// [`FlagsError`].
    pub fn settings(&self) -> Result<Settings, FlagsError> {
        self.settings_in(|name| env::var(name).ok())
    }

    fn settings_in(&self, environment: impl Fn(&str) -> Option<String>) -> Result<Settings, FlagsError> {
        let subpath = self.modules_repository_subpath.trim_matches('/');
        let source = match (self.oci_registry_host.clone(), self.oci_registry_cred_secret.clone()) {
            (Some(address), None) => Source::Host(address.below(subpath).map_err(FlagsError::Subpath)?),
            (None, Some(name)) => {
                RegistryAddress::check_path(subpath).map_err(FlagsError::Subpath)?;
                Source::Secret { name, subpath: subpath.to_owned() }
            }
            (None, None) | (Some(_), Some(_)) => return Err(FlagsError::Source),
        };
        let source = match (source, self.oci_registry_google_credentials) {
            (source, false) => source,
            (Source::Host(address), true) if is_google(&address) => Source::Google(address),
            (_, true) => return Err(FlagsError::Google),
        };
        let first = |names: [&str; 2]| names.into_iter().find_map(&environment).filter(|value| !value.is_empty());
        let usual = || first(["HTTPS_PROXY", "https_proxy"]).map(SecretString::from);
        let url = self.oci_registry_proxy.clone().or_else(usual);
        if url.as_ref().is_some_and(|url| !is_proxy(url.expose_secret())) {
            return Err(FlagsError::Proxy);
        }
        Ok(Settings {
            source,
            ca_file: self.oci_registry_ca_file.clone(),
            allowed_hosts: self.oci_registry_allowed_hosts.clone().into(),
            denied_addresses: Vec::new(),
            proxy: Proxy { url, except: first(["NO_PROXY", "no_proxy"]).unwrap_or_default() },
            component_keys: self.component_keys.clone(),
            content_dir: self.oci_content_dir.clone().unwrap_or_else(|| env::temp_dir().join(CONTENT_DIR)),
            content_max_bytes: u64::from(self.oci_content_max_mib) << 20,
        })
    }
}

fn is_google(address: &RegistryAddress) -> bool {
    let server = address.server();
    fetch::is_google(&server) && server.authority() == server.host()
}

/// A proxy is reached over plain HTTP, and tunnels TLS.
fn is_proxy(text: &str) -> bool {
    let uri: Option<Uri> = text.parse().ok();
    uri.is_some_and(|uri| {
        matches!(uri.scheme_str(), None | Some("http")) && uri.host().is_some_and(|host| !host.is_empty())
    })
}

fn secret_name(text: &str) -> Result<String, &'static str> {
    if is_dns_subdomain(text) { Ok(text.to_owned()) } else { Err("not the name of a Secret") }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        flags: Flags,
    }

    fn parse(flags: &[&str]) -> Result<Flags, clap::Error> {
        Program::try_parse_from([&["program"], flags].concat()).map(|program| program.flags)
    }

    fn settings(flags: &[&str], environment: &[(&str, &str)]) -> Result<Settings, FlagsError> {
        let value = |name: &str| environment.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        parse(flags).unwrap().settings_in(value)
    }

    #[test]
    fn exactly_one_source_is_accepted() {
        let host = settings(&["--oci-registry-host=http://r:5000", "--modules-repository-subpath=/a/b/"], &[]).unwrap();
        assert_eq!(host.source, Source::Host("http://r:5000/a/b".parse().unwrap()));
        assert_eq!((host.content_max_bytes, host.content_dir), (512 << 20, env::temp_dir().join("tidewatch")));
        let secret = settings(&["--oci-registry-cred-secret=s", "--modules-repository-subpath=a"], &[]).unwrap();
        assert_eq!(secret.source, Source::Secret { name: "s".into(), subpath: "a".into() });
        for bad in [
            &[][..],
            &["--oci-registry-host=r", "--oci-registry-cred-secret=s"],
            &["--oci-registry-host="],
            &["--oci-registry-host=ftp://r"],
            &["--oci-registry-cred-secret=S_"],
            &["--oci-registry-host=r", "--oci-content-max-mib=15"],
            &["--oci-registry-host=r", "--oci-registry-allowed-hosts=a,b/c"],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        for source in ["--oci-registry-host=r", "--oci-registry-cred-secret=s"] {
            let refused = settings(&[source, "--modules-repository-subpath=../x"], &[]).err();
            assert_eq!(refused, Some(FlagsError::Subpath(AddressError::Path)));
        }
    }

    #[test]
    fn google_credentials_are_for_registries_of_google_only() {
        let of =
            |host: &str| settings(&[&format!("--oci-registry-host={host}"), "--oci-registry-google-credentials"], &[]);
        for host in ["gcr.io", "eu.gcr.io/project", "europe-docker.pkg.dev/project/modules"] {
            assert_eq!(of(host).unwrap().source, Source::Google(host.parse().unwrap()), "{host}");
        }
        for host in [
            "registry.example.com",
            "evilgcr.io",
            "pkg.dev",
            "gcr.io.example.com",
            "http://gcr.io",
            "gcr.io:444",
            "docker.io",
        ] {
            assert_eq!(of(host).err(), Some(FlagsError::Google), "{host}");
        }
        let secret = ["--oci-registry-cred-secret=s", "--oci-registry-google-credentials"];
        assert_eq!(settings(&secret, &[]).err(), Some(FlagsError::Google));
    }

    #[test]
    fn proxy_is_that_of_the_flag_before_the_environment() {
        let https = Uri::from_static("https://r.example.com/");
        let plain = Uri::from_static("http://r.example.com/");
        let through = |flags: &[&str], environment: &[(&str, &str)], uri: &Uri| {
            let flags = [&["--oci-registry-host=r"], flags].concat();
            let settings = settings(&flags, environment).unwrap();
            settings.proxy.matcher().intercept(uri).map(|proxy| proxy.uri().to_string())
        };
        let environment = [("HTTPS_PROXY", "http://env:1"), ("NO_PROXY", "other.example.com")];
        assert_eq!(through(&[], &[], &https), None);
        assert_eq!(through(&[], &environment, &https).as_deref(), Some("http://env:1/"));
        assert_eq!(
            through(&["--oci-registry-proxy=http://flag:2"], &environment, &https).as_deref(),
            Some("http://flag:2/")
        );
        assert_eq!(through(&[], &[environment[0], ("no_proxy", ".example.com")], &https), None);
        assert_eq!(through(&[], &environment, &plain), None);
    }

    #[test]
    fn malformed_proxy_is_refused_without_showing_its_password() {
        for bad in ["https://u:hunter2@p:1", "socks5://u:hunter2@p", "http://u:hunter2@", "hunter2 hunter2"] {
            let flags = ["--oci-registry-host=r", "--oci-registry-proxy", bad];
            assert_eq!(settings(&flags, &[]).err(), Some(FlagsError::Proxy), "{bad}");
            assert_eq!(settings(&flags[..1], &[("https_proxy", bad)]).err(), Some(FlagsError::Proxy), "{bad}");
            assert!(!format!("{:?}", parse(&flags)).contains("hunter2"));
        }
    }
}
