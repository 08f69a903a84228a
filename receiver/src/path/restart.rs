//! Who goes first when this process begins: those of whom something changed while nobody looked. The others are verified later, spread
//! over minutes, so that a start is no storm.

use std::time::Duration;

use jiff::Timestamp;
use kube::{ResourceExt, runtime::reflector::ObjectRef};
use tidewatch_shared::{
    api::{Kyma, Manifest, State},
    plan::Work,
};

use super::Paths;
use crate::{
    key::KymaKey,
    kyma::Inputs,
    queue::{Priority, Works},
};

/// Wants every Kyma of the caches, now or within the spread. The caches must be whole, and the plan must be made.
pub(super) fn order(paths: &Paths) {
    let Paths { flags, stores, hub, catalog, plan, .. } = paths;
    let (plan, spread) = (plan.load_full(), Duration::from_secs(flags.restart_spread_seconds.into()));
    let (mut first, mut later, mut moved) = (0u32, 0u32, Vec::new());
    for kyma in stores.kymas.state() {
        let namespace = kyma.namespace().unwrap_or_default();
        let key = KymaKey::new(&namespace, kyma.name_any());
        let inputs = Inputs::of(&kyma, &plan, &catalog.content(kyma.labels(), stores));
        roll_out(paths, &key, &kyma);
        let manifest = |name: &str| stores.manifests.get(&ObjectRef::new(name).within(&namespace));
        let state = |name: &str| manifest(name).map(|manifest| state_of(&manifest));
        match urgency(&kyma, &inputs, state) {
            Some((Works::RUNTIME, priority)) => {
                hub.want(&key, Works::RUNTIME, priority);
                first += 1;
            }
            catalog => {
                moved.extend(catalog.map(|_| key.clone()));
                hub.verify_within(&key, spread);
                later += 1;
            }
        }
    }
    let moved_catalogs = moved.len();
    hub.want_paced(moved, Works::of(&[Work::Catalog]), catalog.flags().catalog_sync_rate);
    tracing::info!(first, later, moved_catalogs, spread_seconds = spread.as_secs(), "Kymas are ordered");
}

fn state_of(manifest: &Manifest) -> State {
    manifest.status.as_ref().map(|status| status.state).unwrap_or_default()
}

/// Goes on with the roll-outs that have not reached this Kyma: at the time that it has in each, or at once if that has passed.
fn roll_out(paths: &Paths, key: &KymaKey, kyma: &Kyma) {
    let uid = kyma.uid().unwrap_or_default();
    for module in kyma.status.iter().flat_map(|status| status.modules()) {
        let Some(channel) = module.channel.as_deref() else { continue };
        let target = paths.catalog.pointer(&module.name, channel).map(|pointer| pointer.version);
        if target == module.version {
            continue;
        }
        if let Some((since, delay)) = paths.catalog.roll_out(&uid, &module.name, channel) {
            let passed = Timestamp::now().as_second().saturating_sub(since);
            let passed = Duration::from_secs(u64::try_from(passed).unwrap_or(0));
            paths.hub.roll_out(key, delay.saturating_sub(passed));
        }
    }
}

/// What is wanted of a Kyma at once, and how urgently; `None` if nothing of it has changed since its last pass.
fn urgency(kyma: &Kyma, inputs: &Inputs, manifest: impl Fn(&str) -> Option<State>) -> Option<(Works, Priority)> {
    let status = kyma.status.as_ref().filter(|status| status.state.is_some());
    let Some(status) = status.filter(|_| kyma.metadata.deletion_timestamp.is_none()) else {
        return Some((Works::RUNTIME, Priority::User));
    };
    let moved = status.modules().iter().any(|module| {
        let name = module.manifest.as_ref().and_then(|manifest| manifest.metadata.as_ref()?.name.as_deref());
        name.is_some_and(|name| match (manifest(name), module.state) {
            (None, _) => true,
            (Some(State::Unset), state) => state == State::Ready,
            // A version that is deprecated, or that could not follow, is shown so although it is well.
            (Some(State::Ready), State::Warning) => module.message.is_none(),
            (Some(state), shown) => state != shown,
        })
    });
    let works = if moved { Works::RUNTIME } else { inputs.unnoted_at(kyma) };
    (!works.is_empty()).then_some((works, Priority::Catalog))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidewatch_shared::{names::annotation, plan::Plan};

    use super::*;

    fn plan() -> Plan {
        Plan::new("r".into(), Vec::new()).unwrap()
    }

    fn inputs(kyma: &Kyma) -> Inputs {
        Inputs::of(kyma, &plan(), "catalog")
    }

    fn kyma(change: impl FnOnce(&mut Value)) -> Kyma {
        let mut value = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k", "generation": 1, "annotations": {}}, "spec": {"channel": "regular"},
            "status": {"state": "Ready", "modules": [
                {"name": "keda", "state": "Ready", "manifest": {"metadata": {"name": "m"}}}]}});
        let plain: Kyma = serde_json::from_value(value.clone()).unwrap();
        value["metadata"]["annotations"][annotation::INPUTS] =
            inputs(&plain).after(&plain, Works::RUNTIME).unwrap().into();
        change(&mut value);
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn changed_ones_go_first_and_the_others_wait() {
        let ready = |_: &str| Some(State::Ready);
        let (changed, urgent) = (Some((Works::RUNTIME, Priority::Catalog)), Some((Works::RUNTIME, Priority::User)));
        let at = |kyma: &Kyma| urgency(kyma, &inputs(kyma), ready);
        assert_eq!(at(&kyma(|_| ())), None);
        assert_eq!(at(&kyma(|kyma| kyma["metadata"]["generation"] = json!(2))), changed);
        assert_eq!(at(&kyma(|kyma| kyma["metadata"]["labels"] = json!({"a": "b"}))), changed);
        assert_eq!(at(&kyma(|kyma| kyma["metadata"]["annotations"] = json!({}))), changed);
        assert_eq!(at(&kyma(|kyma| kyma["status"] = json!({}))), urgent, "never worked on");
        let deleting = json!("2026-01-01T00:00:00Z");
        assert_eq!(at(&kyma(|kyma| kyma["metadata"]["deletionTimestamp"] = deleting)), urgent);

        let same = kyma(|_| ());
        let other_plan = Inputs::of(&same, &Plan::new("s".into(), Vec::new()).unwrap(), "catalog");
        assert_eq!(urgency(&same, &other_plan, ready), changed);
        let other_catalog = Inputs::of(&same, &plan(), "other");
        let catalog_alone = Some((Works::of(&[Work::Catalog]), Priority::Catalog));
        assert_eq!(urgency(&same, &other_catalog, ready), catalog_alone, "its modules have time");
        for state in [None, Some(State::Error), Some(State::Unset)] {
            assert_eq!(urgency(&same, &inputs(&same), |_| state), changed, "{state:?}");
        }
        let warned = |message: Value| {
            kyma(|kyma| {
                kyma["status"]["modules"][0]["state"] = json!("Warning");
                kyma["status"]["modules"][0]["message"] = message;
            })
        };
        assert_eq!(at(&warned(json!("version 1.0.0 is deprecated"))), None, "that is how it is shown");
        assert_eq!(at(&warned(Value::Null)), changed, "it was its Manifest's");
    }
}
