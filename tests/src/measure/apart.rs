//! A [`Plain`] in a process of its own: whoever shares one with it would keep the caches warm that both use.

use std::{
    env,
    io::{self, Write as _},
    net::SocketAddr,
    process::Stdio,
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tidewatch_receiver::pki::{PemIdentity, SERVER_VALIDITY, TrustBundle};
use tidewatch_shared::tls;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, Command},
};

use crate::{
    landscape::{Landscape, now},
    load::{Plain, Work},
};

/// The command that the process is started with.
pub(super) const COMMAND: &str = "plain-server";

/// What the process is told on its input, in one line of JSON.
#[derive(Serialize, Deserialize)]
struct Papers {
    chain: String,
    key: String,
    roots: String,
}

/// See the module. Dropping it ends the process.
pub(super) struct Apart {
    child: Child,
    address: SocketAddr,
    /// The process ends with its input.
    _input: ChildStdin,
}

impl Apart {
    /// Starts one that verifies, under a certificate that a landscape's agents trust.
    pub(super) async fn start(landscape: &Landscape) -> Result<Self> {
        let names = ["127.0.0.1".parse()?];
        let PemIdentity { chain, key } = landscape.ca().make_server(&names, now(), SERVER_VALIDITY)?;
        let roots = landscape.ca().trust_bundle().to_pem();
        let papers = serde_json::to_string(&Papers { chain, key, roots })? + "\n";
        let mut command = Command::new(env::current_exe()?);
        command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("start a plain server")?;
        let mut input = child.stdin.take().context("its input")?;
        input.write_all(papers.as_bytes()).await?;
        input.flush().await?;
        let output = child.stdout.take().context("its output")?;
        let said = BufReader::new(output).lines().next_line().await?.context("a plain server ended at once")?;
        Ok(Self { child, address: said.parse()?, _input: input })
    }

    /// Where it listens.
    pub(super) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its process.
    pub(super) fn process(&self) -> Result<u32> {
        self.child.id().context("the plain server has ended")
    }
}

/// What the process does: it reads its papers, says where it listens, and serves until its input ends.
///
/// Nothing else is on the thread that waits for that: the server has its own.
pub(super) fn serve() -> Result<()> {
    let mut lines = io::stdin().lines();
    let papers: Papers = serde_json::from_str(&lines.next().context("no papers")??)?;
    let identity = tls::Identity::from_pem(papers.chain.as_bytes(), papers.key.as_bytes())?;
    let roots = TrustBundle::from_pem(papers.roots.as_bytes())?.store()?;
    let plain = Plain::with(tls::server(&identity, roots)?, ([127, 0, 0, 1], 0).into(), Work::Verify)?;
    writeln!(io::stdout(), "{}", plain.address())?;
    lines.try_for_each(|line| line.map(drop))?;
    Ok(())
}
