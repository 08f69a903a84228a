//! A [`PlainServer`] in a process of its own: in the measuring process it would share warm caches with the user's
//! client.

use std::{
    env,
    io::{self, Write as _},
    net::SocketAddr,
    process::Stdio,
};

use anyhow::{Context as _, Result};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tidewatch_kit::tls;
use tidewatch_testing::{
    landscape::{Landscape, now},
    load::{PlainServer, ServerMode},
};
use tidewatch_trust::{PemIdentity, SERVER_VALIDITY, TrustBundle};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, Command},
};

/// The hidden command that starts the process.
pub(super) const COMMAND: &str = "plain-server";

/// The server's TLS credentials and work, one line of JSON on the process's input.
#[derive(Serialize, Deserialize)]
struct Setup {
    chain: String,
    key: String,
    roots: String,
    verifies: bool,
}

/// See the module. Dropping it ends the process.
pub(super) struct PlainServerProcess {
    child: Child,
    address: SocketAddr,
    /// The process ends when its input closes.
    _input: ChildStdin,
}

impl PlainServerProcess {
    /// Starts a server under a certificate that a landscape's agents trust. It verifies a signature for each request, or only
    /// reads and answers it.
    pub(super) async fn start(landscape: &Landscape, verifies: bool) -> Result<Self> {
        let names = ["127.0.0.1".try_into()?];
        let PemIdentity { chain, key } = landscape.ca().make_server(&names, now(), SERVER_VALIDITY)?;
        let roots = landscape.ca().trust_bundle().to_pem();
        let setup = serde_json::to_string(&Setup { chain, key, roots, verifies })? + "\n";
        let mut command = Command::new(env::current_exe()?);
        command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("start a plain server")?;
        let mut input = child.stdin.take().context("open the input of the plain server")?;
        input.write_all(setup.as_bytes()).await?;
        input.flush().await?;
        let output = child.stdout.take().context("open the output of the plain server")?;
        let line = BufReader::new(output).lines().next_line().await?.context("the plain server ended at its start")?;
        Ok(Self { child, address: line.parse()?, _input: input })
    }

    /// Address on which it listens.
    pub(super) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Process id.
    pub(super) fn process(&self) -> Result<u32> {
        self.child.id().context("the plain server has ended")
    }
}

/// Body of the process: reads its setup, prints the address, and serves until its input closes.
///
/// Blocking on the input is safe: the server has threads of its own.
pub(super) fn serve() -> Result<()> {
    let mut lines = io::stdin().lines();
    let setup: Setup = serde_json::from_str(&lines.next().context("read the setup from the input")??)?;
    let identity = tls::Identity::from_pem(setup.chain.as_bytes(), setup.key.as_bytes())?;
    let roots = TrustBundle::from_pem(setup.roots.as_bytes())?.store()?;
    let mode = if setup.verifies { ServerMode::Verify } else { ServerMode::Answer(StatusCode::ACCEPTED) };
    let plain = PlainServer::with(tls::server(&identity, roots)?, ([127, 0, 0, 1], 0).into(), mode)?;
    writeln!(io::stdout(), "{}", plain.address())?;
    lines.try_for_each(|line| line.map(drop))?;
    Ok(())
}
