//! Metrics of the certificates that this receiver holds, issues and rotates.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use strum::VariantArray as _;
use tidewatch_contract::admin::rotation::PhaseName;
use tidewatch_kit::{
    label_sets, metric_set,
    metrics::{OutcomeLabel, ReasonLabel},
    variant::VariantName as _,
};

use super::{ServerIdentity, ca_state::CaStateError};

label_sets! {
    struct PhaseLabel { phase }
}

metric_set! {
    /// Metrics of certificates. Clones share them: they are created before this receiver is active, and registered
    /// again when it is.
    #[derive(Debug)]
    pub struct Metrics {
        /// Expiry of the event port's certificate, Unix time; 0 if it cannot be read.
        certificate_ends: Gauge = "gateway_certificate_end_timestamp_seconds",
        /// Expiry of the first root to expire, Unix time; 0 if it cannot be read. Roots are those that agents trust and, without
        /// the built-in CA, those of their certificates.
        pub(super) root_ends: Gauge = "pki_root_end_timestamp_seconds",
        /// Contents of the CA's Secret that were rejected, by reason: missing (a key), state, or root.
        refused: Family<ReasonLabel, Counter> = "pki_ca_secret_refused",
        /// Validity of the CA's Secret: 0 if it is missing or invalid, 1 if its content is in use, before it is read, and without a
        /// built-in CA.
        pub(super) secret_good: Gauge = "pki_ca_secret_good" with secret_good(),
        /// Changed files with certificates or component keys, by outcome: taken, or refused (the last good ones stay).
        files: Family<OutcomeLabel, Counter> = "pki_file_reloads",
        /// Certificates that the built-in CA issued to this receiver, by outcome: issued or failed.
        leaves: Family<OutcomeLabel, Counter> = "pki_server_certificates",
        /// Phase of the built-in CA's rotation: 1 for the current phase, 0 for the others.
        phase: Family<PhaseLabel, Gauge> = "pki_rotation_phase",
        /// Runtimes that the phase of the rotation waits for. Each replica counts those of its shards.
        stragglers: Family<PhaseLabel, Gauge> = "pki_rotation_stragglers",
        /// Writes of the CA's Secret, by outcome: written, conflict (changed since it was read), or failed.
        writes: Family<OutcomeLabel, Counter> = "pki_ca_secret_writes",
        /// Reconciles of the rotation that decided nothing because not every shard had a replica with the same roots that knew
        /// which of its runtimes follow.
        incomplete: Counter = "pki_rotation_incomplete",
        /// Those with lifecycle-manager's names.
        pub lifecycle_manager: LifecycleManager = _,
    }
}

metric_set! {
    /// Metrics with lifecycle-manager's names, for a registry without prefix.
    #[derive(Debug)]
    pub struct LifecycleManager {
        /// Imminent expiry of the event port's certificate: 1 within 14 days of its end, or within a sixth of its
        /// validity if that is less; else 0, also if the certificate cannot be read.
        close: Gauge = "lifecycle_mgr_gateway_secret_server_cert_close_to_expiry",
        /// Unix time from which the certificate counts as close to expiry.
        close_from: Gauge = _,
    }
}

fn secret_good() -> Gauge {
    let good = Gauge::default();
    good.set(1);
    good
}

impl Metrics {
    /// The content of the CA's Secret was rejected.
    pub fn refused(&self, why: &CaStateError) {
        self.refused.get_or_create(&ReasonLabel { reason: why.as_str() }).inc();
    }

    /// Changed files were taken, or refused.
    pub fn reloaded(&self, well: bool) {
        self.files.get_or_create(&OutcomeLabel { outcome: if well { "taken" } else { "refused" } }).inc();
    }

    /// The built-in CA issued a certificate to this receiver, or failed to.
    pub fn issued(&self, well: bool) {
        self.leaves.get_or_create(&OutcomeLabel { outcome: if well { "issued" } else { "failed" } }).inc();
    }

    /// The event port has another certificate.
    pub fn set_server_certificate(&self, identity: &ServerIdentity) {
        self.certificate_ends.set(identity.not_after().unwrap_or(0));
        self.lifecycle_manager.close_from.set(identity.close_from().unwrap_or(i64::MAX));
    }

    /// Updates the gauge for the current Unix time.
    pub fn update_close_to_expiry(&self, now: i64) {
        self.lifecycle_manager.close.set((self.lifecycle_manager.close_from.get() <= now).into());
    }

    /// The rotation is in a phase that waits for so many runtimes.
    pub fn rotation(&self, phase: PhaseName, stragglers: usize) {
        for name in PhaseName::VARIANTS {
            let is_now = *name == phase;
            let label = PhaseLabel { phase: name.as_str() };
            self.phase.get_or_create(&label).set(is_now.into());
            let waiting = if is_now { i64::try_from(stragglers).unwrap_or(i64::MAX) } else { 0 };
            self.stragglers.get_or_create(&label).set(waiting);
        }
    }

    /// A reconcile of the rotation decided nothing.
    pub fn incomplete(&self) {
        self.incomplete.inc();
    }

    /// A write of the CA's Secret ended with this outcome.
    pub fn wrote(&self, outcome: &'static str) {
        self.writes.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}
