//! An identity of the agent's own: asked for with a token, renewed with itself, kept in the agent's Secret.
//!
//! A certificate is written to the Secret before it is used, so that whoever starts next finds what the receiver has seen last. It is
//! used also when that fails: what is in the Secret then is an older identity that still works, or none, and whoever starts next
//! enrols. Neither order could lose anything, since a new certificate ends no older one.

mod ask;

use std::{path::PathBuf, sync::Arc, time::Duration};

use tidewatch_shared::identity::{RuntimeId, TrustDomain};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};

use super::{
    Credentials, Current, Load, Material, Provenance, Standing, Stored, Vault,
    agenda::{Agenda, Step},
    errands::{Demand, Errands},
    life::Life,
    secret::Content,
};
use crate::{
    clock,
    link::Dial,
    plan::CurrentSettings,
    random,
    settings::Settings,
    telemetry::{self, Guard, Metrics, chain},
};
use ask::{Ask, Fresh};

/// The Secret is waited for so long before the agent enrols without it.
const SECRET: Duration = Duration::from_secs(10);
/// A write of the Secret holds up a new certificate for so long.
const WRITE: Duration = Duration::from_secs(5);
/// Renewals that the receiver asks for are spread over this time.
const WANTED: Duration = Duration::from_secs(5);

/// What an enroller works with.
pub(crate) struct Tools {
    /// Trust domain of the certificates.
    pub(crate) domain: TrustDomain,
    /// The file with the token.
    pub(crate) token: PathBuf,
    /// How the receiver is reached.
    pub(crate) dial: Dial,
    /// What the ConfigMap says.
    pub(crate) settings: CurrentSettings,
    /// What the Secret has.
    pub(crate) stored: watch::Receiver<Stored>,
    /// Writes the Secret.
    pub(crate) vault: Vault,
    /// What the link carries, and what it tells.
    pub(crate) errands: Errands,
    /// What is told of the identity.
    pub(crate) standing: Standing,
    /// Readiness waits for the first identity.
    pub(crate) pending: Option<Guard>,
    /// Counters.
    pub(crate) metrics: Metrics,
}

/// Why an enroller ends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The ConfigMap names another runtime. Digests, sequences and the core's index are those of one runtime.
    OtherRuntime {
        /// The one that the agent speaks for.
        known: RuntimeId,
        /// The one that the ConfigMap names.
        new: RuntimeId,
    },
    /// Nobody reads the ConfigMap or the Secret any more.
    Alone,
}

/// The identity in use.
struct Held {
    chain: Vec<u8>,
    key: Vec<u8>,
    fingerprint: String,
    /// With which it was made: its bundle and its receiver.
    settings: Arc<Settings>,
    /// The Secret has, or has had it.
    kept: bool,
}

/// See the module.
pub(crate) struct Enroller {
    tools: Tools,
    publish: watch::Sender<Option<Arc<Credentials>>>,
    agenda: Agenda,
    held: Option<Held>,
    /// The version of the Secret that was overwritten with it.
    overwritten: Option<String>,
    /// What the Secret had when it was last of no use.
    useless: Option<Arc<Content>>,
}

impl Enroller {
    /// Nothing is published before there is a certificate.
    pub(crate) fn new(tools: Tools) -> (Self, Current) {
        let (publish, current) = watch::channel(None);
        (Self { tools, publish, agenda: Agenda::new(), held: None, overwritten: None, useless: None }, current)
    }

    /// Runs until the agent must start anew.
    pub(crate) async fn run(mut self) -> Stop {
        let Ok(first) = self.tools.settings.wait_for(Option::is_some).await.map(|settings| settings.clone()) else {
            return Stop::Alone;
        };
        let Some(mut settings) = first else { return Stop::Alone };
        // Who cannot be told whether there is an identity does without it.
        let read = |stored: &Stored| matches!(stored, Stored::There(_) | Stored::Missing);
        let _ = timeout(SECRET, self.tools.stored.wait_for(read)).await;
        loop {
            if let Some(newest) = self.tools.settings.borrow_and_update().clone() {
                if newest.runtime != settings.runtime {
                    return Stop::OtherRuntime { known: settings.runtime.clone(), new: newest.runtime.clone() };
                }
                if !Arc::ptr_eq(&newest, &settings) {
                    let elsewhere = newest.receiver != settings.receiver || newest.enrolment != settings.enrolment;
                    self.agenda.moved(elsewhere);
                }
                settings = newest;
            }
            self.follow(&settings);
            self.look(&settings);
            match self.agenda.next(Instant::now()) {
                Step::Enrol => self.enrol(&settings).await,
                Step::Renew => self.renew(&settings).await,
                Step::Keep => self.keep().await,
                Step::Rest(until) => {
                    if self.rest(until).await.is_err() {
                        return Stop::Alone;
                    }
                }
            }
        }
    }

    /// Another bundle or receiver holds from now on, with the same certificate.
    fn follow(&mut self, settings: &Arc<Settings>) {
        let Some(held) = &self.held else { return };
        if held.settings.receiver == settings.receiver && held.settings.bundle == settings.bundle {
            return;
        }
        // Whether it has ended is the agenda's to say.
        match self.make(&held.chain, &held.key, settings, i64::MIN) {
            Ok(credentials) => {
                tracing::info!(
                    receiver = settings.receiver.authority(),
                    trust_revision = credentials.trust_revision,
                    "Following another receiver or trust bundle"
                );
                self.publish.send_replace(Some(Arc::new(credentials)));
            }
            Err(error) => {
                self.tools.metrics.identity_refused.inc();
                tracing::error!(
                    error = chain(&error),
                    "The identity cannot be used with another receiver or trust bundle"
                );
            }
        }
        // Also when it could not: it would not get better by trying again.
        if let Some(held) = &mut self.held {
            held.settings = settings.clone();
        }
    }

    /// Takes an identity out of the Secret when there is none, and sees whether the Secret has what it should.
    fn look(&mut self, settings: &Arc<Settings>) {
        let stored = self.tools.stored.borrow_and_update().clone();
        let Stored::There(content) = stored else {
            // What is not there cannot be written; whoever creates it is seen at once.
            self.tools.standing.kept(self.held.is_none());
            self.overwritten = None;
            return self.agenda.keep(false);
        };
        // What we have overwritten may still be what is known of the Secret, but only until something else is.
        if self.overwritten.as_ref() != Some(&content.version) {
            self.overwritten = None;
        }
        let unix = self.unix();
        if self.held.is_none() && !content.chain.is_empty() {
            self.find(&content, settings, unix);
        }
        let Some(held) = &self.held else { return };
        let same = self.overwritten.is_some() || held.chain == content.chain && held.key == content.key;
        // What another agent of this runtime has put there is as good: two that overlap do not fight.
        let good = same || held.kept && self.make(&content.chain, &content.key, settings, unix).is_ok();
        self.tools.standing.kept(good);
        self.agenda.keep(!good);
        if let Some(held) = &mut self.held {
            held.kept |= same;
        }
    }

    /// Takes what an earlier agent has left, if it is of use.
    fn find(&mut self, content: &Arc<Content>, settings: &Arc<Settings>, unix: i64) {
        match self.make(&content.chain, &content.key, settings, unix) {
            Ok(credentials) => {
                let validity = (credentials.not_before, credentials.not_after);
                let life = Life::found(Instant::now(), unix, validity, random::up_to);
                let material = (content.chain.clone(), content.key.clone());
                self.take(credentials, material, life, settings, Provenance::Secret);
            }
            Err(error) => {
                // Once for each content.
                if self.useless.replace(content.clone()).is_none_or(|last| last != *content) {
                    tracing::info!(reason = chain(&error), "What the agent's Secret has is of no use");
                }
            }
        }
    }

    async fn enrol(&mut self, settings: &Arc<Settings>) {
        let Tools { domain, token, dial, metrics, settings: newest, .. } = &self.tools;
        let mut newest = newest.clone();
        let asked = tokio::select! {
            asked = ask::with_token(settings, domain, token, dial, metrics) => asked,
            // Perhaps the receiver is somewhere else.
            Ok(()) = newest.changed() => return,
        };
        self.conclude(Step::Enrol, settings, asked).await;
    }

    async fn renew(&mut self, settings: &Arc<Settings>) {
        let Tools { domain, errands, settings: newest, .. } = &self.tools;
        let mut newest = newest.clone();
        let asked = tokio::select! {
            asked = ask::by_link(settings, domain, errands) => asked,
            Ok(()) = newest.changed() => return,
        };
        self.conclude(Step::Renew, settings, asked).await;
    }

    /// Uses what was issued, or plans what to do without it.
    async fn conclude(&mut self, step: Step, settings: &Arc<Settings>, asked: Result<Fresh, Ask>) {
        let made = asked.and_then(|Fresh { chain, key, unix }| {
            let unix = unix.unwrap_or_else(|| self.unix());
            let made = self.make(&chain, &key, settings, unix).map_err(Ask::Unusable)?;
            Ok((made, chain, key, unix))
        });
        match made {
            Ok((credentials, chain, key, unix)) => {
                let seconds = credentials.not_after.saturating_sub(unix);
                let life = Life::issued(Instant::now(), seconds, random::up_to);
                self.overwritten = self.write(&chain, &key).await;
                let from = if step == Step::Enrol { Provenance::Enrolment } else { Provenance::Renewal };
                self.take(credentials, (chain, key), life, settings, from);
            }
            Err(error) => self.fail(step, &error),
        }
    }

    fn fail(&mut self, step: Step, error: &Ask) {
        let (unix, words) = (self.unix(), chain(error));
        tracing::warn!(error = words, renewal = step == Step::Renew, "No certificate was to be had");
        let metrics = &self.tools.metrics;
        if error.is_unusable() {
            metrics.identity_refused.inc();
        }
        if self.held.is_some() && metrics.renewal_failed_since.get() == 0 {
            metrics.renewal_failed_since.set(unix);
        }
        self.tools.standing.fails(unix, words);
        let now = Instant::now();
        if step == Step::Renew && error.is_about_certificate() {
            self.agenda.refused(now);
        }
        self.agenda.failed(step, now, error.is_connect(), error.told());
    }

    fn take(
        &mut self,
        credentials: Credentials,
        (chain, key): (Vec<u8>, Vec<u8>),
        life: Life,
        settings: &Arc<Settings>,
        from: Provenance,
    ) {
        credentials.used(from, &self.tools.standing, &self.tools.metrics);
        let fingerprint = credentials.certificate.fingerprint.clone();
        self.tools.metrics.renewal_failed_since.set(0);
        self.agenda.got(life);
        let (settings, kept) = (settings.clone(), self.overwritten.is_some());
        self.held = Some(Held { chain, key, fingerprint, settings, kept });
        self.tools.pending = None;
        self.publish.send_replace(Some(Arc::new(credentials)));
    }

    /// Writes the Secret once more.
    async fn keep(&mut self) {
        let Some(held) = &self.held else { return };
        match self.write(&held.chain, &held.key).await {
            Some(overwritten) => self.overwritten = Some(overwritten),
            None => self.agenda.not_kept(Instant::now()),
        }
    }

    /// Writes the Secret, if it is there, unless it has changed since it was read. Gives the version that was overwritten; `None` when
    /// nothing was.
    async fn write(&self, chain: &[u8], key: &[u8]) -> Option<String> {
        let Stored::There(content) = self.tools.stored.borrow().clone() else { return None };
        let write = self.tools.vault.keep(&content.version, chain, key);
        let why = match timeout(WRITE, write).await {
            Ok(Ok(())) => return Some(content.version.clone()),
            Ok(Err(error)) => telemetry::chain(&error),
            Err(_) => "the API server did not answer in time".to_owned(),
        };
        self.tools.metrics.identity_writes_failed.inc();
        tracing::warn!(error = why, "The identity could not be kept in the agent's Secret");
        None
    }

    /// Until a time, or until something has changed.
    async fn rest(&mut self, until: Instant) -> Result<(), watch::error::RecvError> {
        let Tools { settings, stored, errands, .. } = &mut self.tools;
        let (demand, fingerprint) = tokio::select! {
            () = sleep_until(until) => return Ok(()),
            changed = settings.changed() => return changed,
            changed = stored.changed() => return changed,
            demand = errands.demanded() => demand,
        };
        // What is said of an identity that is used no more has been done.
        if self.held.as_ref().is_some_and(|held| held.fingerprint == fingerprint) {
            tracing::info!(?demand, "The receiver speaks of the certificate");
            let now = Instant::now();
            match demand {
                Demand::Renew => self.agenda.wanted(now + random::up_to(WANTED)),
                Demand::Refused => self.agenda.refused(now),
            }
        }
        Ok(())
    }

    /// Credentials of this runtime, judged at a time in Unix seconds.
    fn make(&self, chain: &[u8], key: &[u8], settings: &Settings, unix: i64) -> Result<Credentials, Load> {
        let material = Material { chain: chain.to_vec(), key: key.to_vec(), bundle: settings.bundle.clone() };
        let credentials = Credentials::new(&material, &self.tools.domain, settings.receiver.clone(), unix)?;
        if credentials.runtime == settings.runtime {
            return Ok(credentials);
        }
        Err(Load::OtherRuntime { known: settings.runtime.clone(), new: credentials.runtime })
    }

    /// Now, by the receiver's clock as far as it is known, in Unix seconds.
    fn unix(&self) -> i64 {
        clock::unix_seconds().saturating_add(self.tools.metrics.clock_offset.get())
    }
}

#[cfg(test)]
mod tests;
