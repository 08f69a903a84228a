//! Metrics of the certificates that this receiver holds, issues and rotates.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

use super::{
    ServerIdentity,
    ca_state::{CaStateError, PhaseName},
};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: &'static str,
}

/// Metrics of certificates. Clones share them: they are created before this receiver is active, and registered again
/// when it is.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    refused: Family<ReasonLabel, Counter>,
    secret_good: Gauge,
    files: Family<OutcomeLabel, Counter>,
    leaves: Family<OutcomeLabel, Counter>,
    certificate_ends: Gauge,
    /// Unix time from which the certificate counts as close to expiry; not exported.
    close_from: Gauge,
    close: Gauge,
    root_ends: Gauge,
    phase: Family<PhaseLabel, Gauge>,
    stragglers: Family<PhaseLabel, Gauge>,
    writes: Family<OutcomeLabel, Counter>,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Expiry of the event port's certificate, Unix time; 0 if it cannot be read";
        registry.register("gateway_certificate_end_timestamp_seconds", help, self.certificate_ends.clone());
        let help = "Expiry of the newest root of the built-in CA, Unix time; 0 without one";
        registry.register("pki_root_end_timestamp_seconds", help, self.root_ends.clone());
        let help = "Contents of the CA's Secret that were rejected: missing (a key), state, or root";
        registry.register("pki_ca_secret_refused", help, self.refused.clone());
        let help = "1 if the content of the CA's Secret is in use, else 0; 0 without a built-in CA";
        registry.register("pki_ca_secret_good", help, self.secret_good.clone());
        let help = "Changed certificate files: taken, or refused (the last good ones stay)";
        registry.register("pki_file_reloads", help, self.files.clone());
        let help = "Certificates that the built-in CA issued to this receiver: issued or failed";
        registry.register("pki_server_certificates", help, self.leaves.clone());
        let help = "1 for the current phase of the built-in CA's rotation, 0 for the others";
        registry.register("pki_rotation_phase", help, self.phase.clone());
        let help = "Runtimes that the phase of the rotation waits for";
        registry.register("pki_rotation_stragglers", help, self.stragglers.clone());
        let help = "Writes of the CA's Secret: written, conflict (it was changed meanwhile), or failed";
        registry.register("pki_ca_secret_writes", help, self.writes.clone());
    }

    /// Registers the metrics that keep the incumbent's names, in a registry without prefix.
    pub fn register_incumbent(&self, registry: &mut Registry) {
        let help = "1 if the certificate of the event port ends within 14 days, or within a sixth of its life if that is less; else 0, also if that \
                    cannot be read";
        registry.register("lifecycle_mgr_gateway_secret_server_cert_close_to_expiry", help, self.close.clone());
    }

    pub(crate) fn refused(&self, why: &CaStateError) {
        self.refused.get_or_create(&ReasonLabel { reason: why.as_str() }).inc();
    }

    pub(crate) fn set_secret_good(&self, is_good: bool) {
        self.secret_good.set(is_good.into());
    }

    pub(crate) fn reloaded(&self, well: bool) {
        self.files.get_or_create(&OutcomeLabel { outcome: if well { "taken" } else { "refused" } }).inc();
    }

    pub(crate) fn issued(&self, well: bool) {
        self.leaves.get_or_create(&OutcomeLabel { outcome: if well { "issued" } else { "failed" } }).inc();
    }

    pub(crate) fn set_server_certificate(&self, identity: &ServerIdentity) {
        self.certificate_ends.set(identity.not_after().unwrap_or(0));
        self.close_from.set(identity.close_from().unwrap_or(i64::MAX));
    }

    /// Updates the gauge for the current Unix time.
    pub(crate) fn update_close_to_expiry(&self, now: i64) {
        self.close.set((self.close_from.get() <= now).into());
    }

    pub(crate) fn set_root_end(&self, end: i64) {
        self.root_ends.set(end);
    }

    pub(crate) fn rotation(&self, phase: PhaseName, stragglers: usize) {
        for name in PhaseName::ALL {
            let is_now = name == phase;
            let label = PhaseLabel { phase: name.as_str() };
            self.phase.get_or_create(&label).set(is_now.into());
            let waiting = if is_now { i64::try_from(stragglers).unwrap_or(i64::MAX) } else { 0 };
            self.stragglers.get_or_create(&label).set(waiting);
        }
    }

    pub(crate) fn wrote(&self, outcome: &'static str) {
        self.writes.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}
