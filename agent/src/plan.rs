//! The plan: the ConfigMap `tidewatch-agent`, watched by name. A plan that cannot be read is refused whole; the last good one
//! stays, and the heartbeat says so.

use std::{collections::BTreeMap, sync::Arc};

use serde::Deserialize;
use tidewatch_shared::{
    names::{AGENT_OBJECT, PLAN_KEY},
    plan::{ParsePlan, Plan},
};
use tokio::sync::watch;

use crate::{
    core::Core,
    kubernetes::{Call, Lane},
    telemetry::{Guard, Metrics, chain},
    watch::{Sink, Target, Versioned},
};

/// The ConfigMap, as far as it is read.
#[derive(Debug, Deserialize)]
pub(crate) struct ConfigMap {
    metadata: Name,
    #[serde(default)]
    data: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
struct Name {
    #[serde(default)]
    name: String,
    #[serde(rename = "resourceVersion", default)]
    version: String,
}

impl Versioned for ConfigMap {
    fn version(&self) -> &str {
        &self.metadata.version
    }
}

/// Reads the plan and publishes what is good.
pub(crate) struct PlanSource {
    namespace: String,
    core: Core,
    publish: watch::Sender<Option<Arc<Plan>>>,
    /// The list that is being read has the ConfigMap.
    listed: bool,
    /// Readiness waits for the first good plan.
    pending: Option<Guard>,
    metrics: Metrics,
}

impl PlanSource {
    /// Nothing is published before the first good plan.
    pub(crate) const fn new(
        namespace: String,
        core: Core,
        publish: watch::Sender<Option<Arc<Plan>>>,
        pending: Guard,
        metrics: Metrics,
    ) -> Self {
        Self { namespace, core, publish, listed: false, pending: Some(pending), metrics }
    }

    fn read(&mut self, map: &ConfigMap) {
        if map.metadata.name != AGENT_OBJECT {
            return;
        }
        match map.data.as_ref().and_then(|data| data.get(PLAN_KEY)).map(|text| Plan::parse(text)) {
            Some(Ok(plan)) => self.take(plan),
            Some(Err(error)) => self.refuse(&error),
            None => self.refuse_for(format!("the ConfigMap has no {PLAN_KEY}")),
        }
    }

    fn take(&mut self, plan: Plan) {
        self.core.plan_taken();
        self.pending = None;
        self.publish.send_if_modified(|current| {
            let changed = current.as_deref() != Some(&plan);
            if changed {
                *current = Some(Arc::new(plan));
            }
            changed
        });
    }

    fn refuse(&self, error: &ParsePlan) {
        // Where in the JSON, but not what: the heartbeat is no echo of a ConfigMap.
        self.refuse_for(error.to_string());
    }

    /// No refusal: at an agent's first start nobody may have written one yet.
    fn missing(&self) {
        tracing::warn!("There is no plan; the last good one stays");
        self.core.plan_refused("there is no ConfigMap".to_owned());
    }

    fn refuse_for(&self, why: String) {
        tracing::error!(error = %why, "The plan is refused; the last good one stays");
        self.metrics.plans_refused.inc();
        self.core.plan_refused(why);
    }
}

impl Sink for PlanSource {
    type Item = ConfigMap;

    async fn target(&mut self, _lane: &Lane) -> Result<Target, Call> {
        let target = Target::collection("", "v1", Some(&self.namespace), "configmaps");
        Ok(target.select("", &format!("metadata.name={AGENT_OBJECT}")).whole())
    }

    fn begin(&mut self) {
        self.listed = false;
    }

    fn page(&mut self, items: Vec<ConfigMap>) -> bool {
        self.listed |= items.iter().any(|map| map.metadata.name == AGENT_OBJECT);
        items.iter().for_each(|map| self.read(map));
        true
    }

    fn complete(&mut self, _version: &str) {
        if !self.listed {
            self.missing();
        }
    }

    fn present(&mut self, item: ConfigMap) {
        self.read(&item);
    }

    fn gone(&mut self, item: ConfigMap) {
        if item.metadata.name == AGENT_OBJECT {
            self.missing();
        }
    }

    fn bookmark(&mut self, _version: &str) {}

    fn failed(&mut self, why: &Call) {
        tracing::warn!(error = chain(why), "The plan cannot be read");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::telemetry::Readiness;

    fn map(plan: Option<&str>) -> ConfigMap {
        let data = plan.map(|plan| json!({ PLAN_KEY: plan }));
        serde_json::from_value(json!({"metadata": {"name": AGENT_OBJECT}, "data": data})).unwrap()
    }

    #[test]
    fn a_bad_plan_leaves_the_last_good_one_in_force() {
        let core = Core::new("r-1".parse().unwrap(), 10, Metrics::default());
        let (publish, mut plans) = watch::channel(None);
        let readiness = Readiness::default();
        let guard = readiness.guard("plan");
        let mut source = PlanSource::new("ns".to_owned(), core, publish, guard, Metrics::default());
        source.present(map(Some("{")));
        source.present(map(None));
        assert!(!plans.has_changed().unwrap());
        assert_eq!(readiness.pending(), ["plan"]);

        source.present(map(Some(r#"{"revision":"1","watches":[]}"#)));
        assert_eq!(plans.borrow_and_update().as_ref().unwrap().revision(), "1");
        assert!(readiness.pending().is_empty());
        source.present(map(Some(r#"{"revision":"","watches":[]}"#)));
        source.gone(map(None));
        source.present(map(Some(r#"{"revision":"1","watches":[]}"#)));
        assert!(!plans.has_changed().unwrap());
    }

    #[test]
    fn a_plan_that_went_while_nobody_looked_is_told_and_the_last_good_one_stays() {
        let core = Core::new("r-1".parse().unwrap(), 10, Metrics::default());
        let (publish, mut plans) = watch::channel(None);
        let guard = Readiness::default().guard("plan");
        let mut source = PlanSource::new("ns".to_owned(), core.clone(), publish, guard, Metrics::default());
        let good = || map(Some(r#"{"revision":"1","watches":[]}"#));
        for (items, error) in [(vec![good()], None), (vec![], Some("there is no ConfigMap")), (vec![good()], None)] {
            source.begin();
            source.page(items);
            source.complete("1");
            assert_eq!(core.plan_error().as_deref(), error);
        }
        assert!(plans.borrow_and_update().is_some());
    }
}
