//! The plan and the settings: the ConfigMap `tidewatch-agent`, watched by name. Each is taken whole or refused whole; the last good
//! one stays, and the heartbeat says so.

use std::{collections::BTreeMap, sync::Arc};

use serde::Deserialize;
use tidewatch_shared::{
    names::{AGENT_OBJECT, PLAN_KEY},
    plan::Plan,
};
use tokio::sync::watch;

use crate::{
    kubernetes::{Call, Lane},
    settings::Settings,
    telemetry::{Guard, Metrics, chain},
    watch::{NamedMetadata, Sink, Target, Versioned},
};

/// The ConfigMap, as far as it is read.
#[derive(Debug, Deserialize)]
pub(crate) struct ConfigMap {
    metadata: NamedMetadata,
    #[serde(default)]
    data: Option<BTreeMap<String, String>>,
}

impl Versioned for ConfigMap {
    fn version(&self) -> &str {
        &self.metadata.version
    }
}

/// What is to be followed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Followed {
    /// The last good plan.
    pub(crate) plan: Option<Arc<Plan>>,
    /// What is wrong with the newest ConfigMap, in words.
    pub(crate) error: Option<String>,
}

/// How settings reach whoever follows them; `None` before the first good ones.
pub(crate) type CurrentSettings = watch::Receiver<Option<Arc<Settings>>>;

/// Reads plan and settings and publishes what is good.
pub(crate) struct PlanSource {
    namespace: String,
    publish: watch::Sender<Followed>,
    /// Where settings go; `None` when flags and files say what they would.
    settings: Option<watch::Sender<Option<Arc<Settings>>>>,
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
        publish: watch::Sender<Followed>,
        settings: Option<watch::Sender<Option<Arc<Settings>>>>,
        pending: Guard,
        metrics: Metrics,
    ) -> Self {
        Self { namespace, publish, settings, listed: false, pending: Some(pending), metrics }
    }

    fn read(&mut self, map: &ConfigMap) {
        if map.metadata.name != AGENT_OBJECT {
            return;
        }
        let settings = self.read_settings(map);
        let plan = match map.data.as_ref().and_then(|data| data.get(PLAN_KEY)).map(|text| Plan::parse(text)) {
            Some(Ok(plan)) => Ok(plan),
            // Where in the JSON, but not what: the heartbeat is no echo of a ConfigMap.
            Some(Err(error)) => Err(error.to_string()),
            None => Err(format!("the ConfigMap has no {PLAN_KEY}")),
        };
        if let Err(why) = &plan {
            tracing::error!(error = %why, "The plan is refused; the last good one stays");
            self.metrics.plans_refused.inc();
        } else {
            self.pending = None;
        }
        let (plan, refused) = match plan {
            Ok(plan) => (Some(plan), None),
            Err(why) => (None, Some(why)),
        };
        let words: Vec<String> = refused.into_iter().chain(settings.err()).collect();
        self.follow(plan, (!words.is_empty()).then(|| words.join("; ")));
    }

    fn read_settings(&self, map: &ConfigMap) -> Result<(), String> {
        let Some(publish) = &self.settings else { return Ok(()) };
        match Settings::parse(map.data.as_ref()) {
            Ok(settings) => {
                publish.send_if_modified(|current| {
                    let changed = current.as_deref() != Some(&settings);
                    if changed {
                        *current = Some(Arc::new(settings));
                    }
                    changed
                });
                Ok(())
            }
            Err(error) => {
                tracing::error!(error = %error, "The settings are refused; the last good ones stay");
                self.metrics.settings_refused.inc();
                Err(error.to_string())
            }
        }
    }

    /// Publishes what has changed, and nothing else.
    fn follow(&self, plan: Option<Plan>, error: Option<String>) {
        self.publish.send_if_modified(|current| {
            let other = plan.filter(|plan| current.plan.as_deref() != Some(plan));
            let changed = other.is_some() || current.error != error;
            if let Some(other) = other {
                current.plan = Some(Arc::new(other));
            }
            current.error = error;
            changed
        });
    }

    /// No refusal: at an agent's first start nobody may have written one yet.
    fn missing(&self) {
        tracing::warn!("There is no plan; the last good one stays");
        self.follow(None, Some("there is no ConfigMap".to_owned()));
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
    use crate::{identity::tests::TestCa, settings, telemetry::Readiness};

    const GOOD: &str = r#"{"revision":"1","watches":[]}"#;

    fn map(plan: Option<&str>) -> ConfigMap {
        let data = plan.map(|plan| json!({ PLAN_KEY: plan }));
        serde_json::from_value(json!({"metadata": {"name": AGENT_OBJECT}, "data": data})).unwrap()
    }

    fn source(
        settings: Option<watch::Sender<Option<Arc<Settings>>>>,
    ) -> (PlanSource, watch::Receiver<Followed>, Readiness) {
        let (publish, followed) = watch::channel(Followed::default());
        let readiness = Readiness::default();
        let guard = readiness.guard("plan");
        (PlanSource::new("ns".to_owned(), publish, settings, guard, Metrics::default()), followed, readiness)
    }

    #[test]
    fn a_bad_plan_leaves_the_last_good_one_in_force() {
        let (mut source, mut followed, readiness) = source(None);
        source.present(map(Some("{")));
        source.present(map(None));
        let Followed { plan, error } = followed.borrow_and_update().clone();
        assert_eq!((plan, error.as_deref()), (None, Some("the ConfigMap has no plan.json")));
        assert_eq!(readiness.pending(), ["plan"]);

        source.present(map(Some(GOOD)));
        let first = followed.borrow_and_update().plan.clone().unwrap();
        assert_eq!((first.revision(), &followed.borrow().error), ("1", &None));
        assert!(readiness.pending().is_empty());
        source.present(map(Some(GOOD)));
        assert!(!followed.has_changed().unwrap());
        source.present(map(Some(r#"{"revision":"","watches":[]}"#)));
        source.gone(map(None));
        source.present(map(Some(GOOD)));
        let Followed { plan, error } = followed.borrow().clone();
        assert!(Arc::ptr_eq(&plan.unwrap(), &first) && error.is_none());
    }

    #[test]
    fn a_plan_that_went_while_nobody_looked_is_told_and_the_last_good_one_stays() {
        let (mut source, followed, _readiness) = source(None);
        let good = || map(Some(GOOD));
        for (items, error) in [(vec![good()], None), (vec![], Some("there is no ConfigMap")), (vec![good()], None)] {
            source.begin();
            source.page(items);
            source.complete("1");
            assert_eq!(followed.borrow().error.as_deref(), error);
        }
        assert!(followed.borrow().plan.is_some());
    }

    #[test]
    fn bad_settings_leave_the_last_good_ones_in_force_and_no_plan_behind() {
        let publish = watch::Sender::new(None);
        let mut current = publish.subscribe();
        let (mut source, mut followed, _readiness) = source(Some(publish));
        let bundle = TestCa::new().pem();
        let with = |receiver: &str, revision: &str| {
            let mut data = settings::tests::data(receiver, "https://kcp:2", "r-1", &bundle);
            data.insert(PLAN_KEY.to_owned(), GOOD.replace("\"1\"", &format!("\"{revision}\"")));
            serde_json::from_value(json!({"metadata": {"name": AGENT_OBJECT}, "data": data})).unwrap()
        };
        source.present(with("https://kcp:1", "1"));
        assert_eq!(current.borrow_and_update().as_ref().unwrap().receiver.authority(), "kcp:1");
        source.present(with("ftp://kcp", "2"));
        assert!(!current.has_changed().unwrap());
        assert_eq!(source.metrics.settings_refused.get(), 1);
        let Followed { plan, error } = followed.borrow_and_update().clone();
        assert_eq!(plan.unwrap().revision(), "2", "each is judged by itself");
        assert!(error.unwrap().starts_with("receiver-url: "));
        source.present(with("https://kcp:1", "2"));
        assert!(!current.has_changed().unwrap() && followed.borrow().error.is_none());
        source.present(with("https://kcp:3", "2"));
        assert_eq!(current.borrow_and_update().as_ref().unwrap().receiver.authority(), "kcp:3");
    }
}
