//! The command line: without a subcommand the agent runs; `status` asks one that runs.

use std::{
    ffi::OsString,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    process::ExitCode,
    time::Duration,
};

use clap::{Args, CommandFactory as _, FromArgMatches as _};
use thiserror::Error;

use crate::{
    config::{Config, DEFAULT_ADMIN_ADDRESS, loopback},
    status::{STATUS_PATH, Status as Said},
    telemetry::chain,
};

/// For connecting, and for each read and write.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of an answer: 500 watches with long names and errors stay below.
const ANSWER_BYTES: u64 = 4 << 20;
const STATUS: &str = "status";

/// What the process is to do.
#[derive(Debug)]
pub enum Command {
    /// Run.
    Run(Box<Config>),
    /// Show an agent that runs.
    Status(Status),
}

/// Which agent is shown, and how.
#[derive(Clone, Debug, Args)]
pub struct Status {
    /// Prints JSON, as the agent says it
    #[arg(long)]
    pub json: bool,

    /// The agent's admin listener
    #[arg(long, env = "TIDEWATCH_ADMIN_ADDRESS", default_value = DEFAULT_ADMIN_ADDRESS, value_name = "IP:PORT", value_parser = loopback)]
    pub admin_address: SocketAddr,
}

/// Why there is no status.
#[derive(Debug, Error)]
enum Ask {
    #[error("no agent answers at {0}")]
    Connect(SocketAddr, #[source] io::Error),
    #[error("the agent's answer broke off")]
    Read(#[source] io::Error),
    #[error("what answers is no agent")]
    Foreign,
    #[error("the agent says {0}")]
    Refused(String),
    #[error("the agent's answer is not readable")]
    Parse(#[source] serde_json::Error),
    #[error("the status could not be printed")]
    Print(#[source] io::Error),
}

impl Command {
    /// Reads the process's arguments and environment. Ends the process with the reasons on stderr when they are not valid.
    #[must_use]
    pub fn parse() -> Self {
        Self::from_arguments(std::env::args_os()).unwrap_or_else(|error| error.exit())
    }

    fn from_arguments(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Self, clap::Error> {
        let mut matches = grammar().try_get_matches_from(arguments)?;
        let read = match matches.remove_subcommand() {
            Some((_, mut matches)) => Status::from_arg_matches_mut(&mut matches).map(Self::Status),
            None => Config::from_arg_matches_mut(&mut matches).map(|config| Self::Run(Box::new(config))),
        };
        read.map_err(|error| error.format(&mut grammar()))
    }
}

/// Flags of the agent stand at the top level; the subcommand needs none of them.
fn grammar() -> clap::Command {
    let status = Status::augment_args(clap::Command::new(STATUS)).about("Shows the agent that runs here");
    Config::command().args_conflicts_with_subcommands(true).subcommand_negates_reqs(true).subcommand(status)
}

impl Status {
    /// Asks, and prints the answer. The process ends with 0, or with 1 when there is no answer.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        match self.show() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("tidewatch-agent {STATUS}: {}", chain(&error));
                ExitCode::FAILURE
            }
        }
    }

    fn show(&self) -> Result<(), Ask> {
        let body = ask(self.admin_address)?;
        let said: Said = serde_json::from_slice(&body).map_err(Ask::Parse)?;
        let text = if self.json { body } else { said.page().into_bytes() };
        let mut out = io::stdout().lock();
        out.write_all(&text).and_then(|()| out.flush()).map_err(Ask::Print)
    }
}

/// One GET on a connection that ends with the answer. Without a runtime and a client: the process is gone in a moment.
fn ask(address: SocketAddr) -> Result<Vec<u8>, Ask> {
    let connected = || {
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        write!(stream, "GET {STATUS_PATH} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
        Ok(stream)
    };
    let stream = connected().map_err(|error| Ask::Connect(address, error))?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES).read_to_end(&mut answer).map_err(Ask::Read)?;
    body(&answer)
}

/// The body of a whole answer whose end is that of the connection.
fn body(answer: &[u8]) -> Result<Vec<u8>, Ask> {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n").ok_or(Ask::Foreign)?;
    let head = std::str::from_utf8(&answer[..end]).map_err(|_| Ask::Foreign)?;
    let status = head.lines().next().and_then(|line| line.strip_prefix("HTTP/1.1 ")).ok_or(Ask::Foreign)?;
    if !status.starts_with("200") {
        return Err(Ask::Refused(status.to_owned()));
    }
    Ok(answer[end + 4..].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_runs_unless_it_is_asked_for_its_status() {
        grammar().debug_assert();
        let run = ["agent", "--receiver-url", "https://kcp:1", "--identity-dir", "/identity"];
        assert!(matches!(Command::from_arguments(run), Ok(Command::Run(_))));
        assert!(Command::from_arguments(["agent"]).is_err());
        let Ok(Command::Status(status)) = Command::from_arguments(["agent", "status", "--json"]) else { panic!() };
        assert!(status.json && status.admin_address.port() == 2113);
        assert!(Command::from_arguments(["agent", "status", "--admin-address", "10.0.0.1:1"]).is_err());
    }

    #[test]
    fn an_answer_is_taken_apart() {
        assert_eq!(body(b"HTTP/1.1 200 OK\r\na: b\r\n\r\n{}").unwrap(), b"{}");
        assert!(matches!(body(b"HTTP/1.1 503 Unavailable\r\n\r\n"), Err(Ask::Refused(_))));
        assert!(matches!(body(b"SSH-2.0-x\r\n\r\n"), Err(Ask::Foreign)));
        assert!(matches!(body(b"HTTP/1.1 200 OK\r\n"), Err(Ask::Foreign)));
    }
}
