//! Keeps certificates up to date: follows the CA's Secret and certificate files, and renews the receiver's own leaf as it ages.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, ensure};
use futures::{StreamExt as _, stream::BoxStream};
use k8s_openapi::api::core::v1::Secret;
use rustls_pki_types::ServerName;
use tidewatch_cluster::object;
use tidewatch_contract::certificate::KeyId;
use tidewatch_kit::{
    last_good::{FILE_POLL_INTERVAL, LastGood},
    log_error,
};
use tokio::time::{self, Interval, MissedTickBehavior};

use super::{
    PemIdentity, PkiError, TlsState,
    ca_state::CaState,
    sources::{self, FileContents, SourceError, Sources},
    store::{CA_SECRET, CaSecret, Store, is_empty},
    tls_state::CaSecretStatus,
};

/// Interval between two checks of the leaf's age.
const AGE_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after a failed renewal of the leaf, in seconds.
const RETRY_SECONDS: i64 = 5;

/// The leaf that the built-in CA issued to this receiver.
pub(super) struct ServerLeaf {
    pub(super) pem: PemIdentity,
    issuer: KeyId,
    /// After two thirds of its life, in Unix seconds.
    renew_at: i64,
}

impl ServerLeaf {
    pub(super) fn issue(
        state: &CaState,
        names: &[ServerName<'_>],
        validity: Duration,
        now: i64,
    ) -> Result<Self, PkiError> {
        let root = &state.root;
        let pem = root.ca.make_server(names, now, validity)?;
        let end = sources::end_of(&pem.chain).unwrap_or(now);
        Ok(Self { pem, issuer: root.id.clone(), renew_at: now + (end - now) * 2 / 3 })
    }
}

/// Keeps a [`TlsState`] up to date for as long as it runs.
pub struct CertificateReloader {
    pub(super) tls_state: TlsState,
    pub(super) sources: Sources,
    pub(super) files: LastGood<FileContents>,
    pub(super) server_leaf: Option<ServerLeaf>,
    /// The Secret in use.
    pub(super) secret: Option<Arc<CaSecret>>,
    pub(super) store: Option<Store>,
    pub(super) server_validity: Duration,
    /// resourceVersion of the Secret that was rejected and logged.
    pub(super) rejected: Option<String>,
    /// Valid Secret that could not be taken into use, with the time of the next attempt in Unix seconds.
    pub(super) unused: Option<(Arc<CaSecret>, i64)>,
}

/// Ticks at which the age of certificates is checked, and at which their files are polled.
pub(super) fn check_ticks() -> [Interval; 2] {
    [AGE_CHECK_INTERVAL, FILE_POLL_INTERVAL].map(|every| {
        let mut ticks = time::interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    })
}

impl CertificateReloader {
    /// Runs for ever; returns only if the watch ends, which is a fault.
    pub async fn run(mut self) -> &'static str {
        let mut secrets: BoxStream<'static, Option<Secret>> = match &self.store {
            Some(store) => object::watch(store.api.clone(), CA_SECRET, "CA's Secret"),
            None => futures::stream::pending().boxed(),
        };
        let [mut age, mut poll] = check_ticks();
        loop {
            let now = || jiff::Timestamp::now().as_second();
            tokio::select! {
                secret = secrets.next() => match secret {
                    Some(secret) => self.apply_secret(secret.as_ref(), now()),
                    None => return "watch of the CA's Secret",
                },
                _ = age.tick() => self.check_age(now()),
                _ = poll.tick() => self.reload_files(now()),
            }
        }
    }

    /// Applies the Secret as the watch returned it.
    pub fn apply_secret(&mut self, secret: Option<&Secret>, now: i64) {
        self.unused = None;
        let Some(secret) = secret.filter(|secret| !is_empty(secret)) else {
            tracing::error!(
                "The Secret {CA_SECRET} is gone or empty; its last content stays in use until there is another"
            );
            return self.tls_state.set_secret_status(CaSecretStatus::Lost);
        };
        match CaSecret::of(secret) {
            Ok(secret) => self.adopt_secret(Arc::new(secret), now),
            Err(error) => {
                let version = secret.metadata.resource_version.clone();
                if self.rejected != version || version.is_none() {
                    self.tls_state.metrics.refused(&error);
                    log_error!(error, &error, "The Secret {CA_SECRET} is refused; its last good content stays in use");
                    self.rejected = version;
                }
                self.tls_state.set_secret_status(CaSecretStatus::Refused);
            }
        }
    }

    /// Takes valid content into use.
    fn adopt_secret(&mut self, secret: Arc<CaSecret>, now: i64) {
        let is_known = self.secret.as_ref().is_some_and(|known| known.version() == secret.version());
        if !is_known {
            if let Err(error) = self.use_state(&secret.state, now) {
                tracing::error!(error = format!("{error:#}"), "The Secret {CA_SECRET} could not be taken into use");
                self.tls_state.metrics.issued(false);
                // A clock may be behind that of the replica that wrote it.
                self.unused = Some((secret, now + RETRY_SECONDS));
                return self.tls_state.set_secret_status(CaSecretStatus::Refused);
            }
            self.secret = Some(secret.clone());
        }
        self.rejected = None;
        self.tls_state.set_secret_status(CaSecretStatus::Good(secret));
    }

    fn use_state(&mut self, state: &CaState, now: i64) -> anyhow::Result<()> {
        if self.server_leaf.as_ref().is_some_and(|leaf| leaf.issuer != state.root.id) {
            self.server_leaf = Some(self.issue_leaf(state, now)?);
        }
        self.publish(self.files.in_use(), Some(state), now)
    }

    fn issue_leaf(&self, state: &CaState, now: i64) -> Result<ServerLeaf, PkiError> {
        let leaf = ServerLeaf::issue(state, &self.sources.names, self.server_validity, now)?;
        self.tls_state.metrics.issued(true);
        Ok(leaf)
    }

    fn publish(&self, contents: &FileContents, state: Option<&CaState>, now: i64) -> anyhow::Result<()> {
        let leaf = self.server_leaf.as_ref().map(|leaf| &leaf.pem);
        let snapshot = self.sources.combine(contents, state, leaf, now)?;
        self.tls_state.publish(&snapshot, state).context("publish")
    }

    /// Renews the leaf when it is due, repeats the use of a Secret, and updates the metric of a certificate that is close to its end.
    fn check_age(&mut self, now: i64) {
        if let Some((secret, _)) = self.unused.take_if(|(_, at)| *at <= now) {
            self.adopt_secret(secret, now);
        }
        self.renew(now);
        self.tls_state.metrics.update_close_to_expiry(now);
    }

    fn renew(&mut self, now: i64) {
        let (Some(leaf), Some(secret)) = (&self.server_leaf, self.secret.clone()) else { return };
        if now < leaf.renew_at {
            return;
        }
        let renewed = self.issue_leaf(&secret.state, now).map_err(anyhow::Error::new).and_then(|leaf| {
            let before = self.server_leaf.replace(leaf);
            self.publish(self.files.in_use(), Some(&secret.state), now).inspect_err(|_| self.server_leaf = before)
        });
        if let Err(error) = renewed {
            self.tls_state.metrics.issued(false);
            tracing::error!(
                error = format!("{error:#}"),
                "The receiver's certificate could not be renewed; the last one stays"
            );
            if let Some(leaf) = &mut self.server_leaf {
                leaf.renew_at = now + RETRY_SECONDS;
            }
        }
    }

    /// Takes files into use that changed and are valid.
    fn reload_files(&mut self, now: i64) {
        let Some(contents) = self.files.changed(self.sources.read()) else { return };
        let state = self.secret.as_ref().map(|secret| &secret.state);
        let leaf = self.server_leaf.as_ref().map(|leaf| &leaf.pem);
        let published =
            self.sources.combine(&contents, state, leaf, now).map_err(anyhow::Error::new).and_then(|snapshot| {
                // One with an unreadable notAfter passes.
                ensure!(snapshot.identity.not_after().is_none_or(|end| end > now), SourceError::Expired);
                Ok(self.tls_state.publish(&snapshot, state)?)
            });
        self.tls_state.metrics.reloaded(published.is_ok());
        self.files.record(contents, published);
    }
}

#[cfg(test)]
mod tests;
