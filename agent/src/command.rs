//! Command line: without a subcommand the agent runs; `status` queries a running agent.

use std::{
    ffi::OsString,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    process::ExitCode,
    time::Duration,
};

use clap::{Args, CommandFactory as _, FromArgMatches as _};
use thiserror::Error;
use tidewatch_contract::admin::agent::{STATUS_PATH, Status};

use crate::{
    config::{Config, DEFAULT_ADMIN_ADDRESS, parse_loopback},
    telemetry::error_chain,
};

/// Timeout for connecting, and for each read and write.
const IO_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of a response in bytes, above the status of 500 watches with long names and errors.
const MAX_RESPONSE_BYTES: u64 = 4 << 20;
const STATUS: &str = "status";

/// Command to execute.
#[derive(Debug)]
pub enum Command {
    /// Run the agent.
    Run(Box<Config>),
    /// Show the status of a running agent.
    Status(StatusCommand),
}

/// Arguments of `status`.
#[derive(Clone, Debug, Args)]
pub struct StatusCommand {
    /// Print the agent's JSON unchanged
    #[arg(long)]
    pub json: bool,

    /// Address of the agent's admin listener
    #[arg(long, env = "TIDEWATCH_ADMIN_ADDRESS", default_value_t = DEFAULT_ADMIN_ADDRESS, value_name = "IP:PORT", value_parser = parse_loopback)]
    pub admin_address: SocketAddr,
}

/// Errors of `status`.
#[derive(Debug, Error)]
enum StatusError {
    #[error("failed to connect to an agent at {0}")]
    Connect(SocketAddr, #[source] io::Error),
    #[error("failed to read the agent's response")]
    Read(#[source] io::Error),
    #[error("the response is not from an agent")]
    Foreign,
    #[error("the agent responded with {0}")]
    Refused(String),
    #[error("failed to parse the agent's response")]
    Parse(#[source] serde_json::Error),
    #[error("failed to print the status")]
    Print(#[source] io::Error),
}

impl Command {
    /// Parses arguments and environment of the process. Exits with the errors on stderr if they are invalid.
    pub fn parse() -> Self {
        Self::from_arguments(std::env::args_os()).unwrap_or_else(|error| error.exit())
    }

    fn from_arguments(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Self, clap::Error> {
        let mut matches = clap_command().try_get_matches_from(arguments)?;
        let read = match matches.remove_subcommand() {
            Some((_, mut matches)) => StatusCommand::from_arg_matches_mut(&mut matches).map(Self::Status),
            None => Config::from_arg_matches_mut(&mut matches).map(|config| Self::Run(Box::new(config))),
        };
        read.map_err(|error| error.format(&mut clap_command()))
    }
}

/// The agent's flags are top-level; the subcommand requires none of them.
fn clap_command() -> clap::Command {
    let status =
        StatusCommand::augment_args(clap::Command::new(STATUS)).about("Shows the status of the agent in this pod");
    Config::command().args_conflicts_with_subcommands(true).subcommand_negates_reqs(true).subcommand(status)
}

impl StatusCommand {
    /// Queries the agent and prints the response. The exit code is 0, or 1 if there is no response.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        match self.show() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("tidewatch-agent {STATUS}: {}", error_chain(&error));
                ExitCode::FAILURE
            }
        }
    }

    fn show(&self) -> Result<(), StatusError> {
        let body = fetch(self.admin_address)?;
        let status: Status = serde_json::from_slice(&body).map_err(StatusError::Parse)?;
        let text = if self.json { body } else { status.page().into_bytes() };
        let mut out = io::stdout().lock();
        out.write_all(&text).and_then(|()| out.flush()).map_err(StatusError::Print)
    }
}

/// Sends one GET on a connection that closes with the response. Blocking, without an HTTP client: the process ends
/// right after.
fn fetch(address: SocketAddr) -> Result<Vec<u8>, StatusError> {
    let connected = || {
        let mut stream = TcpStream::connect_timeout(&address, IO_TIMEOUT)?;
        stream.set_read_timeout(Some(IO_TIMEOUT))?;
        stream.set_write_timeout(Some(IO_TIMEOUT))?;
        write!(stream, "GET {STATUS_PATH} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
        Ok(stream)
    };
    let stream = connected().map_err(|error| StatusError::Connect(address, error))?;
    let mut response = Vec::new();
    stream.take(MAX_RESPONSE_BYTES).read_to_end(&mut response).map_err(StatusError::Read)?;
    body(&response)
}

/// Body of a complete response that is delimited by the end of the connection.
fn body(response: &[u8]) -> Result<Vec<u8>, StatusError> {
    let end = response.windows(4).position(|window| window == b"\r\n\r\n").ok_or(StatusError::Foreign)?;
    let head = std::str::from_utf8(&response[..end]).map_err(|_| StatusError::Foreign)?;
    let status = head.lines().next().and_then(|line| line.strip_prefix("HTTP/1.1 ")).ok_or(StatusError::Foreign)?;
    if !status.starts_with("200") {
        return Err(StatusError::Refused(status.to_owned()));
    }
    Ok(response[end + 4..].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subcommand_status_is_separate_from_running_the_agent() {
        clap_command().debug_assert();
        let run = ["agent", "--receiver-url", "https://kcp:1", "--identity-dir", "/identity"];
        assert!(matches!(Command::from_arguments(run), Ok(Command::Run(_))));
        assert!(Command::from_arguments(["agent"]).is_err());
        let Ok(Command::Status(status)) = Command::from_arguments(["agent", "status", "--json"]) else { panic!() };
        assert!(status.json && status.admin_address.port() == 2113);
        assert!(Command::from_arguments(["agent", "status", "--admin-address", "10.0.0.1:1"]).is_err());
    }

    #[test]
    fn body_of_a_successful_response_is_extracted() {
        assert_eq!(body(b"HTTP/1.1 200 OK\r\na: b\r\n\r\n{}").unwrap(), b"{}");
        assert!(matches!(body(b"HTTP/1.1 503 Unavailable\r\n\r\n"), Err(StatusError::Refused(_))));
        assert!(matches!(body(b"SSH-2.0-x\r\n\r\n"), Err(StatusError::Foreign)));
        assert!(matches!(body(b"HTTP/1.1 200 OK\r\n"), Err(StatusError::Foreign)));
    }
}
