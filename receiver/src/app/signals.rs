//! Signals that request an orderly shutdown.

use anyhow::{Context as _, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT.
pub(super) struct Signals {
    term: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(super) fn listen() -> Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate()).context("listen for SIGTERM")?,
            interrupt: signal(SignalKind::interrupt()).context("listen for SIGINT")?,
        })
    }

    /// Waits for the first of them.
    pub(super) async fn shutdown(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
