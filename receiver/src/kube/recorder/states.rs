//! The incumbent's gauges of states, by the names, labels and meanings that dashboards know. They are computed from the cache whenever
//! somebody asks: nothing is held for them, and what is deleted is shown no more.

use std::{fmt, sync::Arc};

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
};

const KYMAS: &str = "lifecycle_mgr_kyma_state";
const KYMAS_HELP: &str = "The state of each Kyma: 1 for the state that it is in, 0 for the others";
const MODULES: &str = "lifecycle_mgr_module_state";
const MODULES_HELP: &str = "The state of each module of each Kyma: 1 for the state that it is in, 0 for the others";

/// The states of a Kyma; a module can also be unmanaged.
const STATES: [State; 6] =
    [State::Ready, State::Processing, State::Error, State::Deleting, State::Warning, State::Unmanaged];

/// Registers the gauges; the caller gives no prefix.
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
    registry.collect(described, Box::new(States(kymas)));
}

/// Shoot and instance of a Kyma; without them the incumbent has no metrics of it.
pub(super) fn labels(kyma: &Kyma) -> Option<(&str, &str)> {
    let (shoot, domain) = kyma.annotations().get(annotation::SKR_DOMAIN)?.split_once('.')?;
    // A domain of a runtime has more than two labels.
    let instance = kyma.labels().get(label::INSTANCE_ID)?;
    (domain.contains('.') && !shoot.is_empty()).then_some((shoot, instance))
}

struct States(Store<Kyma>);

impl fmt::Debug for States {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("States")
    }
}

impl Collector for States {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let kymas = self.0.state();
        kymas_of(&kymas, encoder.encode_descriptor(KYMAS, KYMAS_HELP, None, MetricType::Gauge)?)?;
        modules_of(&kymas, encoder.encode_descriptor(MODULES, MODULES_HELP, None, MetricType::Gauge)?)
    }
}

fn kymas_of(kymas: &[Arc<Kyma>], mut gauge: MetricEncoder<'_>) -> fmt::Result {
    for kyma in kymas {
        let (Some((shoot, instance)), Some(status)) = (labels(kyma), &kyma.status) else { continue };
        let name = kyma.name_any();
        let of = |state| [("kyma_name", &*name), ("state", state), ("shoot", shoot), ("instance_id", instance)];
        each(&mut gauge, &STATES[..5], status.state(), of)?;
    }
    Ok(())
}

fn modules_of(kymas: &[Arc<Kyma>], mut gauge: MetricEncoder<'_>) -> fmt::Result {
    for kyma in kymas {
        let (Some((shoot, instance)), Some(status)) = (labels(kyma), &kyma.status) else { continue };
        let name = kyma.name_any();
        for module in status.modules() {
            let of = |state| {
                let (module, kyma) = (("module_name", &*module.name), ("kyma_name", &*name));
                [module, kyma, ("state", state), ("shoot", shoot), ("instance_id", instance)]
            };
            each(&mut gauge, &STATES, module.state, of)?;
        }
    }
    Ok(())
}

/// One sample for each state; none while there is no state yet.
fn each<'a, const N: usize>(
    gauge: &mut MetricEncoder<'_>,
    states: &[State],
    is: State,
    labels: impl Fn(&'static str) -> [(&'static str, &'a str); N],
) -> fmt::Result {
    for state in states.iter().filter(|_| is != State::Unset) {
        ConstGauge::new(i64::from(*state == is)).encode(gauge.encode_family(&labels(state.as_str()))?)?;
    }
    Ok(())
}
