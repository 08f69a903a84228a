//! The signals that ask for an orderly end.

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

    /// Waits for one of them.
    pub(super) async fn ending(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
