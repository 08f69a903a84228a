//! The incumbent's gauges of states, with the names, labels and meanings that existing dashboards use. They are
//! computed from the cache at each scrape, so they need no memory, and deleted objects have no samples.

use std::fmt;

use kube::{ResourceExt, runtime::reflector::Store};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder},
    metrics::{MetricType, gauge::ConstGauge},
};
use tidewatch_shared::{
    api::{Kyma, State},
    metrics::{MetricDescription, Registry},
    names::{annotation, label},
    variant::VariantName as _,
};

const KYMAS: &str = "lifecycle_mgr_kyma_state";
const KYMAS_HELP: &str = "State of each Kyma: 1 for its current state, 0 for the others";
const MODULES: &str = "lifecycle_mgr_module_state";
const MODULES_HELP: &str = "State of each module of each Kyma: 1 for its current state, 0 for the others";

/// States of modules. Kymas have all but the last, `Unmanaged`.
const STATES: [State; 6] =
    [State::Ready, State::Processing, State::Error, State::Deleting, State::Warning, State::Unmanaged];

/// Registers the gauges in a registry without a prefix.
pub fn register(registry: &mut Registry, kymas: Store<Kyma>) {
    let gauge = |name: &str, labels: &[&str], help: &str| MetricDescription {
        name: name.to_owned(),
        kind: "gauge",
        labels: labels.iter().map(|label| (*label).to_owned()).collect(),
        help: help.to_owned(),
    };
    let described = vec![
        gauge(KYMAS, &["kyma_name", "state", "shoot", "instance_id"], KYMAS_HELP),
        gauge(MODULES, &["module_name", "kyma_name", "state", "shoot", "instance_id"], MODULES_HELP),
    ];
    registry.collect(described, Box::new(StateCollector(kymas)));
}

/// Shoot and instance of a Kyma; `None` if it lacks either, as in the incumbent, which has no metrics of such a Kyma.
pub(super) fn labels(kyma: &Kyma) -> Option<(&str, &str)> {
    let (shoot, domain) = kyma.annotations().get(annotation::SKR_DOMAIN)?.split_once('.')?;
    // A runtime's domain has more than two DNS labels.
    let instance = kyma.labels().get(label::INSTANCE_ID)?;
    (domain.contains('.') && !shoot.is_empty()).then_some((shoot, instance))
}

#[derive(Debug)]
struct StateCollector(Store<Kyma>);

impl Collector for StateCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let kymas = self.0.state();
        let labelled = || kymas.iter().filter_map(|kyma| Some((kyma.name_any(), labels(kyma)?, kyma.status.as_ref()?)));
        let mut gauge = encoder.encode_descriptor(KYMAS, KYMAS_HELP, None, MetricType::Gauge)?;
        for (name, (shoot, instance), status) in labelled() {
            let of = |state| [("kyma_name", &*name), ("state", state), ("shoot", shoot), ("instance_id", instance)];
            encode_states(&mut gauge, &STATES[..5], status.state(), of)?;
        }
        let mut gauge = encoder.encode_descriptor(MODULES, MODULES_HELP, None, MetricType::Gauge)?;
        for (name, (shoot, instance), status) in labelled() {
            for module in status.modules() {
                let of = |state| {
                    let (module, kyma) = (("module_name", &*module.name), ("kyma_name", &*name));
                    [module, kyma, ("state", state), ("shoot", shoot), ("instance_id", instance)]
                };
                encode_states(&mut gauge, &STATES, module.state, of)?;
            }
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
