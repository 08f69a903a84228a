//! Metrics of the certificates that this receiver has, issues and replaces.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

use super::{
    ServerIdentity,
    stored::{PhaseName, ReadStored},
};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Why {
    reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InPhase {
    phase: &'static str,
}

/// What happens to certificates. Clones are the same; they are made before this receiver is active, and registered again then.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    refused: Family<Why, Counter>,
    good: Gauge,
    files: Family<Outcome, Counter>,
    leaves: Family<Outcome, Counter>,
    certificate_ends: Gauge,
    /// From when on that is close; never shown.
    close_from: Gauge,
    close: Gauge,
    root_ends: Gauge,
    phase: Family<InPhase, Gauge>,
    stragglers: Family<InPhase, Gauge>,
    writes: Family<Outcome, Counter>,
}

impl Metrics {
    /// Registers them.
    pub fn register(&self, registry: &mut Registry) {
        let help = "When the certificate of the event port ends, Unix time; 0 if it cannot be read";
        registry.register("gateway_certificate_end_timestamp_seconds", help, self.certificate_ends.clone());
        let help = "When the newest root of the built-in CA ends, Unix time; 0 without one";
        registry.register("pki_root_end_timestamp_seconds", help, self.root_ends.clone());
        let help = "Contents of the CA's Secret that were refused: missing (a key), state, or root";
        registry.register("pki_ca_secret_refused", help, self.refused.clone());
        let help = "Whether the CA's Secret is there and holds what is used: 1 or 0; 0 without a built-in CA";
        registry.register("pki_ca_secret_good", help, self.good.clone());
        let help = "Changed certificate files: taken, or refused (the last good ones stay)";
        registry.register("pki_file_reloads", help, self.files.clone());
        let help = "Certificates that the built-in CA made for this receiver: issued or failed";
        registry.register("pki_server_certificates", help, self.leaves.clone());
        let help = "1 for the phase in which the rotation of the built-in CA is, 0 for the others";
        registry.register("pki_rotation_phase", help, self.phase.clone());
        let help = "Runtimes that the phase of the rotation waits for";
        registry.register("pki_rotation_stragglers", help, self.stragglers.clone());
        let help = "Writes of the CA's Secret: written, conflict (it was changed meanwhile), or failed";
        registry.register("pki_ca_secret_writes", help, self.writes.clone());
    }

    /// Registers those that have the incumbent's names, where no prefix is given.
    pub fn register_incumbent(&self, registry: &mut Registry) {
        let help = "1 if the certificate of the event port ends within 14 days, or within a sixth of its life if that is less; else 0, also if that \
                    cannot be read";
        registry.register("lifecycle_mgr_gateway_secret_server_cert_close_to_expiry", help, self.close.clone());
    }

    pub(crate) fn refused(&self, why: &ReadStored) {
        self.refused.get_or_create(&Why { reason: why.as_str() }).inc();
    }

    pub(crate) fn good(&self, is_good: bool) {
        self.good.set(is_good.into());
    }

    pub(crate) fn reloaded(&self, well: bool) {
        self.files.get_or_create(&Outcome { outcome: if well { "taken" } else { "refused" } }).inc();
    }

    pub(crate) fn issued(&self, well: bool) {
        self.leaves.get_or_create(&Outcome { outcome: if well { "issued" } else { "failed" } }).inc();
    }

    pub(crate) fn serves(&self, identity: &ServerIdentity) {
        self.certificate_ends.set(identity.not_after().unwrap_or(0));
        self.close_from.set(identity.close_from().unwrap_or(i64::MAX));
    }

    /// It is so late, in Unix seconds.
    pub(crate) fn time_is(&self, now: i64) {
        self.close.set((self.close_from.get() <= now).into());
    }

    pub(crate) fn root_until(&self, end: i64) {
        self.root_ends.set(end);
    }

    pub(crate) fn rotation(&self, phase: PhaseName, stragglers: usize) {
        for name in PhaseName::ALL {
            let is_now = name == phase;
            let label = InPhase { phase: name.as_str() };
            self.phase.get_or_create(&label).set(is_now.into());
            let waiting = if is_now { i64::try_from(stragglers).unwrap_or(i64::MAX) } else { 0 };
            self.stragglers.get_or_create(&label).set(waiting);
        }
    }

    pub(crate) fn wrote(&self, outcome: &'static str) {
        self.writes.get_or_create(&Outcome { outcome }).inc();
    }
}
