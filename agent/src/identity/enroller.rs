//! Identity of the agent's own: requested with a token, renewed with the current certificate and a token, stored in the
//! agent's Secret.
//!
//! A certificate is written to the Secret before it is used, so that the next agent process starts with the one that
//! the receiver saw last. It is used even if the write fails: the Secret then holds an older identity that is still
//! valid, or none, in which case the next process enrols. Neither order loses anything, since a new certificate does
//! not invalidate older ones.

mod issue;

use std::{path::PathBuf, sync::Arc, time::Duration};

use tidewatch_api::identity::TrustDomain;
use tidewatch_contract::admin::agent::IdentitySource;
use tidewatch_kit::variant::VariantName as _;
use tokio::{
    sync::{SetOnce, mpsc, watch},
    time::{Instant, sleep_until, timeout},
};

use super::{
    Credentials, CredentialsError, CurrentCredentials, IdentityStatus, IdentityStop, KeyMaterial, SecretWriter, Stored,
    channel::{CertificateNotice, Demand},
    client::Client,
    schedule::{Schedule, Step},
    secret::Content,
    validity::Validity,
};
use crate::{
    clock,
    core::Core,
    random,
    receiver::Dialer,
    settings::{CurrentSettings, Settings},
    telemetry::{self, Metrics, Pending, error_chain},
};
use issue::{CertificateError, IssuedCertificate};

/// Longest wait for the content of the Secret before the agent enrols without it.
const SECRET_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time by which a write of the Secret delays the use of a new certificate.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Jitter of renewals that the receiver demands.
const RENEWAL_SPREAD: Duration = Duration::from_secs(5);

/// Dependencies of an enroller.
pub(crate) struct EnrollerParts {
    /// Trust domain of the certificates.
    pub(crate) domain: TrustDomain,
    /// Path of the file with the token.
    pub(crate) token: PathBuf,
    /// Dialer for connections to the receiver.
    pub(crate) dial: Dialer,
    /// Settings from the ConfigMap.
    pub(crate) settings: CurrentSettings,
    /// Content of the Secret.
    pub(crate) stored: watch::Receiver<Stored>,
    /// Writes the Secret.
    pub(crate) secret_writer: SecretWriter,
    /// Demands that the link forwards.
    pub(crate) demands: mpsc::Receiver<Demand>,
    /// Source of the nonces of renewals, which count with those of the link.
    pub(crate) core: Arc<SetOnce<Core>>,
    /// Status of the identity, for reporting.
    pub(crate) identity_status: IdentityStatus,
    /// Holds back readiness until the first identity.
    pub(crate) pending: Option<Pending>,
    /// Counters.
    pub(crate) metrics: Metrics,
}

/// Identity in use.
struct ActiveIdentity {
    chain: Vec<u8>,
    key: Vec<u8>,
    fingerprint: String,
    /// Settings that its credentials were created with: trust bundle and receiver.
    settings: Arc<Settings>,
    /// The Secret contains it, or did so before.
    stored_once: bool,
}

/// Obtains, renews and stores the agent's identity; see the module.
pub(crate) struct Enroller {
    tools: EnrollerParts,
    publish: watch::Sender<Option<Arc<Credentials>>>,
    schedule: Schedule,
    active: Option<ActiveIdentity>,
    /// resourceVersion of the Secret that the identity in use has overwritten.
    overwritten: Option<String>,
    /// Last content of the Secret that was unusable.
    unusable: Option<Arc<Content>>,
}

impl Enroller {
    /// Creates an enroller that publishes nothing before there is a certificate.
    pub(crate) fn new(tools: EnrollerParts) -> (Self, CurrentCredentials) {
        let (publish, current) = watch::channel(None);
        (
            Self { tools, publish, schedule: Schedule::default(), active: None, overwritten: None, unusable: None },
            current,
        )
    }

    /// Runs until the agent has to restart.
    pub(crate) async fn run(mut self) -> IdentityStop {
        let first = self.tools.settings.wait_for(Option::is_some).await.ok().and_then(|settings| settings.clone());
        let Some(mut settings) = first else { return IdentityStop::ChannelClosed };
        // If the Secret cannot be read in time, the agent proceeds without a stored identity.
        let read = |stored: &Stored| matches!(stored, Stored::Present(_) | Stored::Missing);
        let _ = timeout(SECRET_TIMEOUT, self.tools.stored.wait_for(read)).await;
        loop {
            if let Some(newest) = self.tools.settings.borrow_and_update().clone() {
                if newest.runtime != settings.runtime {
                    return IdentityStop::OtherRuntime {
                        current: settings.runtime.clone(),
                        new: newest.runtime.clone(),
                        named_by: "ConfigMap",
                    };
                }
                if !Arc::ptr_eq(&newest, &settings) {
                    let elsewhere = newest.receiver != settings.receiver || newest.enrolment != settings.enrolment;
                    self.schedule.target_changed(elsewhere);
                }
                settings = newest;
            }
            self.apply_settings(&settings);
            self.sync_secret(&settings);
            match self.schedule.next(Instant::now()) {
                step @ (Step::Enrol | Step::Renew) => self.request(step, &settings).await,
                Step::Store => self.store().await,
                Step::Wait(until) => {
                    if self.wait(until).await.is_err() {
                        return IdentityStop::ChannelClosed;
                    }
                }
            }
        }
    }

    /// Applies another trust bundle or receiver, with the same certificate.
    fn apply_settings(&mut self, settings: &Arc<Settings>) {
        let Some(active) = &self.active else { return };
        if active.settings.receiver == settings.receiver && active.settings.bundle == settings.bundle {
            return;
        }
        // Expiry is not judged here: the schedule handles it.
        match self.credentials(&active.chain, &active.key, settings, i64::MIN) {
            Ok(credentials) => {
                tracing::info!(
                    receiver = settings.receiver.authority(),
                    trust_revision = credentials.trust_revision,
                    "Switched to another receiver or trust bundle"
                );
                self.publish.send_replace(Some(Arc::new(credentials)));
            }
            Err(error) => {
                self.tools.metrics.identity_refused.inc();
                tracing::error!(
                    error = error_chain(&error),
                    "The identity cannot be used with another receiver or trust bundle"
                );
            }
        }
        // The settings count as applied after a failure too, because a retry would fail in the same way.
        if let Some(active) = &mut self.active {
            active.settings = settings.clone();
        }
    }

    /// Reads the identity from the Secret if none is in use, and checks that the Secret contains the one in use.
    fn sync_secret(&mut self, settings: &Arc<Settings>) {
        let stored = self.tools.stored.borrow_and_update().clone();
        let Stored::Present(content) = stored else {
            // A missing Secret cannot be written; its creation is observed at once.
            self.tools.identity_status.set_stored(self.active.is_none());
            self.overwritten = None;
            return self.schedule.set_store_due(false);
        };
        // The known content may still be the version that was overwritten; any other version ends that state.
        if self.overwritten.as_ref() != Some(&content.version) {
            self.overwritten = None;
        }
        let unix = self.unix_now();
        if self.active.is_none() && !content.chain.is_empty() {
            self.adopt_stored(&content, settings, unix);
        }
        let Some(active) = &self.active else { return };
        let same = self.overwritten.is_some() || active.chain == content.chain && active.key == content.key;
        // A valid identity that another agent of this runtime has stored is accepted, so that two overlapping agents do
        // not overwrite each other's.
        let good = same || active.stored_once && self.credentials(&content.chain, &content.key, settings, unix).is_ok();
        self.tools.identity_status.set_stored(good);
        self.schedule.set_store_due(!good);
        if let Some(active) = &mut self.active {
            active.stored_once |= same;
        }
    }

    /// Uses the identity that an earlier agent process has stored, if it is valid.
    fn adopt_stored(&mut self, content: &Arc<Content>, settings: &Arc<Settings>, unix: i64) {
        match self.credentials(&content.chain, &content.key, settings, unix) {
            Ok(credentials) => {
                let Credentials { not_before, not_after, .. } = credentials;
                let validity = Validity::found(Instant::now(), unix, not_before, not_after, random::up_to);
                let chain = content.chain.clone();
                let key = content.key.clone();
                self.activate(credentials, chain, key, validity, settings, IdentitySource::Secret);
            }
            Err(error) => {
                // Logged once for each content.
                if self.unusable.replace(content.clone()).is_none_or(|last| last != *content) {
                    tracing::info!(reason = error_chain(&error), "Ignoring an unusable identity in the agent's Secret");
                }
            }
        }
    }

    /// Requests a certificate, with a token or with the current identity, and uses it, or schedules a retry.
    async fn request(&mut self, step: Step, settings: &Arc<Settings>) {
        let EnrollerParts { domain, token, dial, core, metrics, settings: newest, .. } = &self.tools;
        let mut newest = newest.clone();
        let current = self.publish.borrow().clone();
        let request = async {
            match current {
                Some(current) if step == Step::Renew => {
                    let client = Client::new(dial, current);
                    issue::renew(settings, domain, token, &client, core.wait().await, metrics).await
                }
                _ => issue::enrol(settings, domain, token, dial, metrics).await,
            }
        };
        let outcome = tokio::select! {
            outcome = request => outcome,
            // The new settings may name another receiver.
            Ok(()) = newest.changed() => return,
        };
        let made = outcome.and_then(|IssuedCertificate { chain, key, unix }| {
            let unix = unix.unwrap_or_else(|| self.unix_now());
            let made = self.credentials(&chain, &key, settings, unix).map_err(CertificateError::Unusable)?;
            Ok((made, chain, key, unix))
        });
        match made {
            Ok((credentials, chain, key, unix)) => {
                let seconds = credentials.not_after.saturating_sub(unix);
                let validity = Validity::issued(Instant::now(), seconds, random::up_to);
                self.overwritten = self.write(&chain, &key).await;
                let from = if step == Step::Enrol { IdentitySource::Enrolment } else { IdentitySource::Renewal };
                self.activate(credentials, chain, key, validity, settings, from);
            }
            Err(error) => self.record_failure(step, &error),
        }
    }

    fn record_failure(&mut self, step: Step, error: &CertificateError) {
        let unix = self.unix_now();
        let error_text = error_chain(error);
        tracing::warn!(error = error_text, renewal = step == Step::Renew, "Certificate request failed");
        let metrics = &self.tools.metrics;
        if error.is_unusable() {
            metrics.identity_refused.inc();
        }
        if self.active.is_some() && metrics.renewal_failed_since.get() == 0 {
            metrics.renewal_failed_since.set(unix);
        }
        self.tools.identity_status.record_failure(unix, error_text);
        let now = Instant::now();
        if step == Step::Renew && error.is_about_certificate() {
            self.schedule.certificate_refused(now);
        }
        self.schedule.failed(step, now, error.is_connect(), error.retry_after());
    }

    fn activate(
        &mut self,
        credentials: Credentials,
        chain: Vec<u8>,
        key: Vec<u8>,
        validity: Validity,
        settings: &Arc<Settings>,
        from: IdentitySource,
    ) {
        credentials.announce(from, &self.tools.identity_status, &self.tools.metrics);
        let fingerprint = credentials.certificate.fingerprint.clone();
        self.tools.metrics.renewal_failed_since.set(0);
        self.schedule.certificate_obtained(validity);
        let settings = settings.clone();
        let stored_once = self.overwritten.is_some();
        self.active = Some(ActiveIdentity { chain, key, fingerprint, settings, stored_once });
        self.tools.pending = None;
        self.publish.send_replace(Some(Arc::new(credentials)));
    }

    /// Writes the identity in use to the Secret again.
    async fn store(&mut self) {
        let Some(active) = &self.active else { return };
        match self.write(&active.chain, &active.key).await {
            Some(overwritten) => self.overwritten = Some(overwritten),
            None => self.schedule.store_failed(Instant::now()),
        }
    }

    /// Writes the Secret if it exists and has not changed since it was read. Returns the resourceVersion that was
    /// overwritten; `None` if nothing was written.
    async fn write(&self, chain: &[u8], key: &[u8]) -> Option<String> {
        let Stored::Present(content) = self.tools.stored.borrow().clone() else { return None };
        let write = self.tools.secret_writer.write(&content.version, chain, key);
        let error = match timeout(WRITE_TIMEOUT, write).await {
            Ok(Ok(())) => return Some(content.version.clone()),
            Ok(Err(error)) => telemetry::error_chain(&error),
            Err(_) => "the API server did not respond in time".to_owned(),
        };
        self.tools.metrics.identity_writes_failed.inc();
        tracing::warn!(error = error, "Failed to store the identity in the agent's Secret");
        None
    }

    /// Waits until a time, or until settings, Secret or demands change.
    async fn wait(&mut self, until: Instant) -> Result<(), watch::error::RecvError> {
        let EnrollerParts { settings, stored, demands, .. } = &mut self.tools;
        let Demand { notice, fingerprint } = tokio::select! {
            () = sleep_until(until) => return Ok(()),
            changed = settings.changed() => return changed,
            changed = stored.changed() => return changed,
            Some(demand) = demands.recv() => demand,
        };
        // A demand concerning a certificate that is no longer in use is already satisfied.
        if self.active.as_ref().is_some_and(|active| active.fingerprint == fingerprint) {
            tracing::info!(notice = notice.as_str(), "Receiver demands another certificate");
            let now = Instant::now();
            match notice {
                CertificateNotice::Renew => self.schedule.renewal_requested(now + random::up_to(RENEWAL_SPREAD)),
                CertificateNotice::Refused => self.schedule.certificate_refused(now),
            }
        }
        Ok(())
    }

    /// Creates credentials of this runtime, judged at a time in Unix seconds.
    fn credentials(
        &self,
        chain: &[u8],
        key: &[u8],
        settings: &Settings,
        unix: i64,
    ) -> Result<Credentials, CredentialsError> {
        let material = KeyMaterial { chain: chain.to_vec(), key: key.to_vec(), bundle: settings.bundle.clone() };
        let credentials = Credentials::new(&material, &self.tools.domain, settings.receiver.clone(), unix)?;
        if credentials.runtime == settings.runtime {
            return Ok(credentials);
        }
        Err(CredentialsError::OtherRuntime { current: settings.runtime.clone(), new: credentials.runtime })
    }

    /// Current time by the receiver's clock as far as its offset is known, in Unix seconds.
    fn unix_now(&self) -> i64 {
        clock::unix_seconds().saturating_add(self.tools.metrics.clock_offset.get())
    }
}

#[cfg(test)]
pub(crate) mod tests;
