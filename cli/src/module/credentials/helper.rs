//! Credential helpers of docker: programs that answer on standard output (protocol of docker-credential-helpers).

use std::{io, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use tidewatch_kit::table;
use tidewatch_oci::credentials::Credentials;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, Command},
    time::timeout,
};

/// Timeout of a helper; some refresh a token, or wait for the user.
const DEADLINE: Duration = Duration::from_secs(60);
/// Maximum size of an answer in bytes.
const MAX_BYTES: u64 = 64 << 10;
/// Characters of a failure that are shown.
const MAX_MESSAGE_CHARS: usize = 200;
/// Answer of a helper that has no credentials of a server.
const NOT_FOUND: &str = "credentials not found in native keychain";
/// User name beside an identity token.
const TOKEN_USER: &str = "<token>";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// Asks a helper for the credentials of a server; `None` if it has none.
///
/// # Errors
/// The helper is not installed, fails, takes more than 60 s, or gives a malformed answer.
pub(super) async fn get(name: &str, server: &str) -> Result<Option<Credentials>> {
    let is_name = !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'));
    ensure!(is_name, "the name of a credential helper has other characters than letters, digits, '.', '_' and '-'");
    let program = format!("docker-credential-{name}");
    let mut command = Command::new(&program);
    command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let child = match command.spawn() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!("the credential helper {program} is not installed: PATH has no such program")
        }
        spawned => spawned.with_context(|| format!("run the credential helper {program}"))?,
    };
    let answered = timeout(DEADLINE, ask(child, server)).await;
    let answered = answered.with_context(|| format!("no answer of {program} within {} s", DEADLINE.as_secs()))?;
    answered.with_context(|| format!("ask the credential helper {program}"))
}

async fn ask(mut child: Child, server: &str) -> Result<Option<Credentials>> {
    if let Some(mut input) = child.stdin.take() {
        // A helper that does not read the name has failed, and says why.
        let _ = input.write_all(format!("{server}\n").as_bytes()).await;
    }
    let (output, errors) = tokio::try_join!(read(child.stdout.take()), read(child.stderr.take()))?;
    let status = child.wait().await.context("wait for its end")?;
    if status.success() {
        // The parser's text may quote a secret.
        let Ok(Answer { username, secret }) = serde_json::from_slice(&output) else {
            bail!("its answer is not JSON of a user and a secret")
        };
        return credentials(username, secret);
    }
    let said = if output.trim_ascii().is_empty() { errors } else { output };
    let message: String = String::from_utf8_lossy(&said).trim().chars().take(MAX_MESSAGE_CHARS).collect();
    if message == NOT_FOUND {
        return Ok(None);
    }
    bail!("it failed with {status}: {}", table::sanitize(&message))
}

fn credentials(username: String, secret: String) -> Result<Option<Credentials>> {
    ensure!(!username.contains(':'), "the user in its answer has a colon");
    Ok(match (username.as_str(), secret.is_empty()) {
        (_, true) => None,
        (TOKEN_USER, false) => Some(Credentials::IdentityToken(secret)),
        (_, false) => Some(Credentials::Basic { username, password: secret }),
    })
}

/// Reads a whole stream.
async fn read(stream: Option<impl AsyncRead + Unpin>) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    if let Some(stream) = stream {
        stream.take(MAX_BYTES + 1).read_to_end(&mut content).await.context("read its output")?;
    }
    ensure!(content.len() as u64 <= MAX_BYTES, "its answer has more than {MAX_BYTES} bytes");
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn name_of_a_helper_leads_to_no_other_program() {
        for name in ["../vault", "a b", ".", "a/b", "a\0b"] {
            let refused = get(name, "registry.example.com").await.unwrap_err().to_string();
            assert!(refused.contains("other characters"), "{refused}");
        }
    }

    #[test]
    fn answer_is_a_password_or_a_token() {
        let of = |user: &str, secret: &str| credentials(user.to_owned(), secret.to_owned()).unwrap();
        assert_eq!(of("u", "p"), Some(Credentials::Basic { username: "u".into(), password: "p".into() }));
        assert_eq!(of("<token>", "t"), Some(Credentials::IdentityToken("t".into())));
        assert_eq!(of("u", ""), None);
        assert!(credentials("u:v".to_owned(), "p".to_owned()).is_err());
    }
}
