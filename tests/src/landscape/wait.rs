//! Waiting for a condition, with a deadline and a name for what did not come true.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// No condition of the test bed takes longer, however busy the machine.
pub const DEADLINE: Duration = Duration::from_secs(90);
const PAUSE: Duration = Duration::from_millis(20);

/// Asks until the answer is `Some`. An error of the question is not an answer: it is told when the deadline passes.
///
/// # Errors
/// When the deadline passes; the text names what was waited for and the last error.
pub async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    let started = Instant::now();
    loop {
        let answer = ask().await;
        if let Ok(Some(answer)) = answer {
            return Ok(answer);
        }
        if started.elapsed() > DEADLINE {
            match answer {
                Err(error) => return Err(error.context(format!("waited {DEADLINE:?} for: {what}"))),
                Ok(_) => bail!("waited {DEADLINE:?} in vain for: {what}"),
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}
