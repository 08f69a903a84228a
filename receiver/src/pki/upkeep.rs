//! Keeps what stands up to date: the CA's Secret as it changes, certificate files as they change, the receiver's own leaf as it ages.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use futures::{StreamExt as _, stream::BoxStream};
use k8s_openapi::api::core::v1::Secret;
use kube::runtime::{WatchStreamExt as _, watcher};
use tidewatch_shared::certificate::KeyId;
use tokio::time::{self, MissedTickBehavior};

use super::{
    Latest, Metrics, POLL, PemIdentity, Pki, ServerName, Standing,
    sources::{self, Contents, Sources},
    standing::Held,
    store::{CA_SECRET, Kept, Store},
    stored::Stored,
};

/// How often the leaf's age is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// After a leaf could not be made, the next try comes after so many seconds.
const RETRY: i64 = 5;

/// The leaf that the built-in CA made for this receiver.
pub(super) struct Own {
    pub(super) pem: PemIdentity,
    by: KeyId,
    /// After two thirds of its life, in Unix seconds.
    renew_at: i64,
}

impl Own {
    pub(super) fn make(stored: &Stored, names: &[ServerName], validity: Duration, now: i64) -> Result<Self, Pki> {
        let root = stored.serving();
        let pem = root.ca.make_server(names, now, validity)?;
        let end = sources::end_of(&pem.chain).unwrap_or(now);
        Ok(Self { pem, by: root.id.clone(), renew_at: now + (end - now) * 2 / 3 })
    }
}

/// Keeps a [`Standing`] up to date for as long as it runs.
pub struct Upkeep {
    pub(super) standing: Standing,
    pub(super) sources: Sources,
    pub(super) files: Latest<Contents>,
    pub(super) own: Option<Own>,
    /// What is used.
    pub(super) kept: Option<Arc<Kept>>,
    pub(super) store: Option<Store>,
    pub(super) server_validity: Duration,
    /// The version of the Secret that was refused and said.
    pub(super) refused: Option<String>,
    pub(super) metrics: Metrics,
}

impl Upkeep {
    /// Runs for ever; returns only if the watch ends, which it never should.
    pub async fn run(mut self) -> &'static str {
        let mut secrets: BoxStream<'static, watcher::Result<Option<Secret>>> = match &self.store {
            Some(store) => watcher::watch_object(store.api().clone(), CA_SECRET).default_backoff().boxed(),
            None => futures::stream::pending().boxed(),
        };
        let (mut look, mut poll) = (time::interval(LOOK), time::interval(POLL));
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let now = || jiff::Timestamp::now().as_second();
            tokio::select! {
                secret = secrets.next() => match secret {
                    Some(Ok(secret)) => self.take(secret.as_ref(), now()),
                    Some(Err(error)) => {
                        tracing::warn!(error = &error as &dyn std::error::Error, "Watch of the CA's Secret failed");
                    }
                    None => return "watch of the CA's Secret",
                },
                _ = look.tick() => self.age(now()),
                _ = poll.tick() => self.read_files(now()),
            }
        }
    }

    /// The Secret as the watch saw it.
    pub(crate) fn take(&mut self, secret: Option<&Secret>, now: i64) {
        let Some(secret) = secret else {
            tracing::error!("The Secret {CA_SECRET} is gone; its last content stays in use until there is another");
            return self.standing.hold(Held::Lost);
        };
        match Kept::of(secret) {
            Ok(kept) => self.adopt(Arc::new(kept), now),
            Err(error) => {
                let version = secret.metadata.resource_version.clone();
                if self.refused != version || version.is_none() {
                    self.metrics.refused(&error);
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(error, "The Secret {CA_SECRET} is refused; its last good content stays in use");
                    self.refused = version;
                }
                self.standing.hold(Held::Refused);
            }
        }
    }

    /// Takes a good content into use.
    fn adopt(&mut self, kept: Arc<Kept>, now: i64) {
        let is_known = self.kept.as_ref().is_some_and(|known| known.version() == kept.version());
        if !is_known {
            if let Err(error) = self.use_secret(&kept, now) {
                tracing::error!(error = format!("{error:#}"), "The Secret {CA_SECRET} could not be taken into use");
                self.metrics.issued(false);
                return self.standing.hold(Held::Refused);
            }
            self.kept = Some(kept.clone());
        }
        self.refused = None;
        self.standing.hold(Held::Good(kept));
    }

    fn use_secret(&mut self, kept: &Kept, now: i64) -> anyhow::Result<()> {
        let stored = &kept.stored;
        let is_ours = |own: &Own| own.by == stored.serving().id;
        if self.own.is_some() && !self.own.as_ref().is_some_and(is_ours) {
            self.own = Some(self.make_own(stored, now)?);
        }
        self.publish(self.files.used(), Some(stored), now)
    }

    fn make_own(&self, stored: &Stored, now: i64) -> Result<Own, Pki> {
        let own = Own::make(stored, &self.sources.names, self.server_validity, now)?;
        self.metrics.issued(true);
        Ok(own)
    }

    fn publish(&self, contents: &Contents, stored: Option<&Stored>, now: i64) -> anyhow::Result<()> {
        let own = self.own.as_ref().map(|own| &own.pem);
        let whole = self.sources.combine(contents, stored, own, now)?;
        self.standing.publish(&whole, stored).context("publish")
    }

    /// Renews the leaf when it is time, and tells when that was missed.
    fn age(&mut self, now: i64) {
        self.renew(now);
        self.metrics.time_is(now);
    }

    fn renew(&mut self, now: i64) {
        let (Some(own), Some(kept)) = (&self.own, self.kept.clone()) else { return };
        if now < own.renew_at {
            return;
        }
        let renewed = self.make_own(&kept.stored, now).map_err(anyhow::Error::new).and_then(|own| {
            let before = self.own.replace(own);
            self.publish(self.files.used(), Some(&kept.stored), now).inspect_err(|_| self.own = before)
        });
        if let Err(error) = renewed {
            self.metrics.issued(false);
            tracing::error!(
                error = format!("{error:#}"),
                "The receiver's certificate could not be renewed; the last one stays"
            );
            if let Some(own) = &mut self.own {
                own.renew_at = now + RETRY;
            }
        }
    }

    /// Takes files into use that have changed and are good.
    fn read_files(&mut self, now: i64) {
        let Some(contents) = self.files.news(self.sources.read()) else { return };
        let stored = self.kept.as_ref().map(|kept| &kept.stored);
        let own = self.own.as_ref().map(|own| &own.pem);
        let taken =
            self.sources.combine(&contents, stored, own, now).and_then(|whole| whole.check_end(now).map(|()| whole));
        let taken = taken.map_err(anyhow::Error::new).and_then(|whole| Ok(self.standing.publish(&whole, stored)?));
        self.files.tried(contents, taken, &self.metrics);
    }
}

#[cfg(test)]
mod tests;
