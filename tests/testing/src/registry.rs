//! A real OCI registry: the CNCF distribution registry as a process on loopback, with its data in the test bed's folder.
//!
//! * `config`: its configuration and the files that this names.
//! * `token_server`: the authorization service of [`Access::Token`].

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::json;
use tidewatch_kit::tls::{Identity, TlsConfigError};
use tokio::net::TcpStream;

use crate::{
    bed::TestBed,
    control_plane::{Tool, binaries::BinariesError, credentials, etcd::port_taken},
    ports,
    process::{Process, ProcessError, Program},
};

mod config;
mod token_server;

use config::Config;
use token_server::{TokenServer, TokenServerError};

/// Start of the process on a loaded machine.
const READY: Duration = Duration::from_secs(60);
/// Attempts with another port when a process took the one that was free a moment ago.
const PORT_TRIES: usize = 5;

/// Protocol of a registry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// HTTPS with a certificate of a CA of its own, see [`Registry::ca_file`].
    #[default]
    Tls,
    /// HTTP.
    Plain,
}

/// Authentication that a registry requires, for reads and writes alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// None.
    Anonymous,
    /// User and password (RFC 7617), see [`Login::TEST`].
    #[default]
    Basic,
    /// A token that a server on the same host issues for user and password (distribution token specification).
    Token,
}

/// Deviations from the default registry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Protocol.
    pub transport: Transport,
    /// Authentication.
    pub access: Access,
}

/// User and password.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Login<'a> {
    /// User.
    pub user: &'a str,
    /// Password.
    pub password: &'a str,
}

impl Login<'_> {
    /// The only user of a registry with authentication.
    pub const TEST: Login<'static> = Login { user: "test", password: "pull-and-push" };

    /// Credentials of the scheme Basic (RFC 7617, section 2).
    fn basic(&self) -> String {
        BASE64_STANDARD.encode(format!("{}:{}", self.user, self.password))
    }
}

/// Failure to start a registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The binary is missing.
    #[error("find the registry's binary")]
    Binaries(#[from] BinariesError),
    /// Its key or certificate cannot be made.
    #[error("make the registry's certificate")]
    Certificate(#[source] rcgen::Error),
    /// Its own certificate is not usable.
    #[error("use the registry's certificate")]
    Tls(#[from] TlsConfigError),
    /// Its token server did not start.
    #[error("start the registry's token server")]
    TokenServer(#[from] TokenServerError),
    /// No free port.
    #[error("find a free port")]
    Port(#[source] io::Error),
    /// Its folder or configuration cannot be written.
    #[error("write the registry's folder {0}")]
    Files(PathBuf, #[source] io::Error),
    /// It did not start, or ended.
    #[error("start the registry")]
    Start(#[source] ProcessError),
}

/// A running registry that stores what is pushed and permits to delete it. Ends with its owner.
#[derive(Debug)]
pub struct Registry {
    options: Options,
    dir: PathBuf,
    address: SocketAddr,
    tls: Option<Tls>,
    program: Program,
    process: Process,
    _token_server: Option<TokenServer>,
}

/// CA, and the identity that it issued for loopback, PEM.
#[derive(Debug)]
struct Tls {
    ca: String,
    certificate: String,
    key: String,
}

impl Tls {
    fn create(name: &str) -> Result<Self, RegistryError> {
        let (ca, certificate, key) = credentials::certificates(name).map_err(RegistryError::Certificate)?;
        Ok(Self { ca, certificate, key })
    }

    fn identity(&self) -> Result<Identity, TlsConfigError> {
        Identity::from_pem(self.certificate.as_bytes(), self.key.as_bytes())
    }
}

impl Registry {
    /// Starts an empty registry and waits until it serves. The name distinguishes the registries of a test bed.
    ///
    /// # Errors
    /// See [`RegistryError`].
    pub async fn start(bed: &TestBed, name: &str, options: Options) -> Result<Self, RegistryError> {
        let binary = bed.binaries().get(Tool::Registry).await?;
        let dir = bed.dir().join("registries").join(name);
        fs::create_dir_all(&dir).map_err(|error| RegistryError::Files(dir.clone(), error))?;
        let tls = match options.transport {
            Transport::Tls => Some(Tls::create(name)?),
            Transport::Plain => None,
        };
        let token_server = match options.access {
            Access::Token => Some(TokenServer::start(tls.as_ref().map(Tls::identity).transpose()?).await?),
            Access::Anonymous | Access::Basic => None,
        };
        let config =
            Config { dir: &dir, access: options.access, tls: tls.as_ref(), token_server: token_server.as_ref() };
        let mut tries = 1;
        let (address, program, process) = loop {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free().map_err(RegistryError::Port)?));
            let path = config.write(address).map_err(|error| RegistryError::Files(dir.clone(), error))?;
            let program = program(name, &binary, &path);
            match run(program.clone(), address).await {
                Ok(process) => break (address, program, process),
                Err(error) if tries < PORT_TRIES && port_taken(&error) => tries += 1,
                Err(error) => return Err(RegistryError::Start(error)),
            }
        };
        Ok(Self { options, dir, address, tls, program, process, _token_server: token_server })
    }

    /// Its address as flags and dockerconfigjson name it: `host:port`, with `http://` in front if it has no TLS.
    pub fn host(&self) -> String {
        match self.options.transport {
            Transport::Tls => self.address.to_string(),
            Transport::Plain => format!("http://{}", self.address),
        }
    }

    /// File with the certificate of the CA of its TLS certificate; `None` without TLS.
    pub fn ca_file(&self) -> Option<PathBuf> {
        self.tls.as_ref().map(|_| self.dir.join(config::CA))
    }

    /// The login that it accepts; `None` if it requires none.
    pub fn login(&self) -> Option<Login<'static>> {
        (self.options.access != Access::Anonymous).then_some(Login::TEST)
    }

    /// Content of a Secret of type `kubernetes.io/dockerconfigjson`: its host, with a login, or without one.
    pub fn dockerconfigjson(&self, login: Option<Login<'_>>) -> String {
        let entry = login.map_or_else(|| json!({}), |login| json!({"auth": login.basic()}));
        json!({"auths": {self.host(): entry}}).to_string()
    }

    /// Kills it if it runs, and starts it with the same address and content.
    ///
    /// # Errors
    /// See [`RegistryError`].
    pub async fn restart(&mut self) -> Result<(), RegistryError> {
        self.process.kill();
        self.process = run(self.program.clone(), self.address).await.map_err(RegistryError::Start)?;
        Ok(())
    }

    /// Its process; the log has one line for each request.
    pub const fn process(&self) -> &Process {
        &self.process
    }
}

fn program(name: &str, binary: &Path, config: &Path) -> Program {
    Program::new(format!("registry {name}"), binary, config.with_file_name("registry.log"))
        .arg("serve")
        .arg(config)
        .env("OTEL_TRACES_EXPORTER", "none")
}

/// Starts the process and waits until it accepts connections.
async fn run(program: Program, address: SocketAddr) -> Result<Process, ProcessError> {
    let process = Process::start(program)?;
    let accepts = || async { TcpStream::connect(address).await.map(drop).map_err(|error| error.to_string()) };
    process.until(READY, accepts).await?;
    Ok(process)
}
