//! Waits for a condition with a deadline, and an error that names the condition.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Longer than any condition of the test bed takes on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(90);
const PAUSE: Duration = Duration::from_millis(20);

/// Polls until the result is `Some`. Errors count as not yet; the last one is reported when the deadline passes.
///
/// # Errors
/// When the deadline passes; the text names the condition and the last error.
pub async fn until<T>(condition: &str, mut poll: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    let started = Instant::now();
    loop {
        let result = poll().await;
        if let Ok(Some(result)) = result {
            return Ok(result);
        }
        if started.elapsed() > DEADLINE {
            match result {
                Err(error) => {
                    return Err(error.context(format!("timed out after {DEADLINE:?} waiting for {condition}")));
                }
                Ok(_) => bail!("timed out after {DEADLINE:?} waiting for {condition}"),
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}
