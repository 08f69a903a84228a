//! lifecycle-manager's gauges of states, with the names, labels and meanings that existing dashboards use. They are
//! computed from the cache at each scrape, so they need no memory, and deleted objects have no samples.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use kube::ResourceExt;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder},
    metrics::{MetricType, gauge::ConstGauge},
};
use tidewatch_api::{
    Kyma, State,
    key::KymaKey,
    names::{annotation, label},
};
use tidewatch_kit::{
    metrics::{MetricDescription, Registry},
    variant::VariantName as _,
};

use crate::stores::Stores;

const KYMAS: &str = "lifecycle_mgr_kyma_state";
const KYMAS_HELP: &str = "State of each Kyma with the annotation `skr-domain` and the label \
                          `kyma-project.io/instance-id`: 1 for its current state, 0 for the others";
const MODULES: &str = "lifecycle_mgr_module_state";
const MODULES_HELP: &str = "State of each module of each Kyma with the annotation `skr-domain` and the label \
                            `kyma-project.io/instance-id`: 1 for its current state, 0 for the others";
const MANDATORY: &str = "lifecycle_mgr_mandatory_modules";
const MANDATORY_HELP: &str = "Number of mandatory modules, without those whose release meta is being deleted";
const MANDATORY_STATE: &str = "lifecycle_mgr_mandatory_module_state";
const MANDATORY_STATE_HELP: &str =
    "State of each mandatory module in each runtime: 1 for its current state, 0 for the others";

/// States of modules. Kymas and mandatory modules have all but the last, `Unmanaged`.
const STATES: [State; 6] =
    [State::Ready, State::Processing, State::Error, State::Deleting, State::Warning, State::Unmanaged];

/// Returns true for a Kyma that this process serves.
type Serves = Box<dyn Fn(&KymaKey) -> bool + Send + Sync>;

/// Kymas that this process serves; all of them before [`ServedKymas::limit_to`]. Others have no samples here: the replica that
/// serves them has them. Clones share the limit.
#[derive(Clone, Default)]
pub struct ServedKymas(Arc<OnceLock<Serves>>);

impl ServedKymas {
    /// Limits the Kymas to those for which the function returns true. Only the first call has an effect.
    pub fn limit_to(&self, serves: impl Fn(&KymaKey) -> bool + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(serves));
    }

    fn contains(&self, key: &KymaKey) -> bool {
        self.0.get().is_none_or(|serves| serves(key))
    }
}

/// Registers the gauges in a registry without a prefix.
pub fn register(registry: &mut Registry, stores: Stores, served: ServedKymas) {
    let gauge = |name: &str, labels: &[&str], help: &str| MetricDescription {
        name: name.to_owned(),
        kind: "gauge",
        labels: labels.iter().map(|label| (*label).to_owned()).collect(),
        help: help.to_owned(),
    };
    let described = vec![
        gauge(KYMAS, &["instance_id", "kyma_name", "shoot", "state"], KYMAS_HELP),
        gauge(MODULES, &["instance_id", "kyma_name", "module_name", "shoot", "state"], MODULES_HELP),
        gauge(MANDATORY, &[], MANDATORY_HELP),
        gauge(MANDATORY_STATE, &["kyma_name", "module_name", "state"], MANDATORY_STATE_HELP),
    ];
    registry.collect(described, Box::new(StateCollector(stores, served)));
}

/// Shoot and instance of a Kyma; `None` if it lacks either, as in lifecycle-manager, which has no metrics of such a Kyma.
pub(super) fn labels(kyma: &Kyma) -> Option<(&str, &str)> {
    let (shoot, domain) = kyma.annotations().get(annotation::SKR_DOMAIN)?.split_once('.')?;
    // A runtime's domain has more than two DNS labels.
    let instance = kyma.labels().get(label::INSTANCE_ID)?;
    (domain.contains('.') && !shoot.is_empty()).then_some((shoot, instance))
}

struct StateCollector(Stores, ServedKymas);

impl fmt::Debug for StateCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StateCollector").finish_non_exhaustive()
    }
}

impl Collector for StateCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let kymas = self.0.kymas.state();
        let served = kymas.iter().filter_map(|kyma| kyma.whole());
        let kymas: Vec<_> = served.filter(|kyma| self.1.contains(&KymaKey::of(kyma.as_ref()))).collect();
        let labelled = || kymas.iter().filter_map(|kyma| Some((kyma.name_any(), labels(kyma)?, kyma.status.as_ref()?)));
        let mut gauge = encoder.encode_descriptor(KYMAS, KYMAS_HELP, None, MetricType::Gauge)?;
        for (name, (shoot, instance), status) in labelled() {
            let of = |state| [("instance_id", instance), ("kyma_name", &*name), ("shoot", shoot), ("state", state)];
            encode_states(&mut gauge, &STATES[..5], status.state(), of)?;
        }
        let mut gauge = encoder.encode_descriptor(MODULES, MODULES_HELP, None, MetricType::Gauge)?;
        for (name, (shoot, instance), status) in labelled() {
            for module in status.modules() {
                let of = |state| {
                    let module = ("module_name", &*module.name);
                    [("instance_id", instance), ("kyma_name", &*name), module, ("shoot", shoot), ("state", state)]
                };
                encode_states(&mut gauge, &STATES, module.state, of)?;
            }
        }
        self.encode_mandatory(&mut encoder)
    }
}

impl StateCollector {
    fn encode_mandatory(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let metas = self.0.release_metas.state();
        let mandatory =
            metas.iter().filter(|meta| meta.spec.mandatory.is_some() && meta.metadata.deletion_timestamp.is_none());
        let count = i64::try_from(mandatory.count()).unwrap_or(i64::MAX);
        let gauge = encoder.encode_descriptor(MANDATORY, MANDATORY_HELP, None, MetricType::Gauge)?;
        ConstGauge::new(count).encode(gauge)?;
        let mut gauge = encoder.encode_descriptor(MANDATORY_STATE, MANDATORY_STATE_HELP, None, MetricType::Gauge)?;
        for manifest in self.0.manifests.mandatory() {
            let facts = manifest.facts();
            let (Some(kyma), Some(module)) = (facts.kyma, facts.module) else { continue };
            if !self.1.contains(&KymaKey::new(&manifest.key().namespace, kyma)) {
                continue;
            }
            let labels = |state| [("kyma_name", kyma), ("module_name", module), ("state", state)];
            encode_states(&mut gauge, &STATES[..5], facts.flags.state.unwrap_or_default(), labels)?;
        }
        Ok(())
    }
}

/// Encodes one sample per state, and none for an object without a state.
fn encode_states<'a, const N: usize>(
    gauge: &mut MetricEncoder<'_>,
    states: &[State],
    current: State,
    labels: impl Fn(&'static str) -> [(&'static str, &'a str); N],
) -> fmt::Result {
    for state in states.iter().filter(|_| current != State::Unset) {
        ConstGauge::new(i64::from(*state == current)).encode(gauge.encode_family(&labels(state.as_str()))?)?;
    }
    Ok(())
}
