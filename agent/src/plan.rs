//! Watches the ConfigMap `tidewatch-agent`, which contains the plan and the settings. Each is accepted or refused as a
//! whole; the last valid one stays in force, and the heartbeat reports the error.

use std::sync::Arc;

use tidewatch_api::{
    names::{AGENT_OBJECT, PLAN_KEY},
    plan::Plan,
};
use tokio::sync::watch;

use crate::{
    kubernetes::ApiError,
    settings::{ConfigData, Settings},
    telemetry::{Metrics, Pending, error_chain},
    watch::{Named, PlanState, Single, SingleObject, Target},
};

/// Parses plan and settings, and publishes the valid ones.
pub(crate) struct PlanSource {
    namespace: String,
    publish: watch::Sender<PlanState>,
    /// Publishes the settings; `None` if flags and files take their place.
    settings: Option<watch::Sender<Option<Arc<Settings>>>>,
    /// Readiness guard until the first valid plan.
    pending: Option<Pending>,
    /// Error of the content read last.
    content_error: Option<String>,
    /// Error of reading, until the watch is open or listed again.
    read_error: Option<String>,
    metrics: Metrics,
}

impl PlanSource {
    /// A source that publishes nothing before the first valid plan.
    pub(crate) const fn new(
        namespace: String,
        publish: watch::Sender<PlanState>,
        settings: Option<watch::Sender<Option<Arc<Settings>>>>,
        pending: Pending,
        metrics: Metrics,
    ) -> Single<Self> {
        let content_error = None;
        let read_error = None;
        Single::new(Self { namespace, publish, settings, pending: Some(pending), content_error, read_error, metrics })
    }

    fn read_settings(&self, data: &ConfigData) -> Result<(), String> {
        let Some(publish) = &self.settings else { return Ok(()) };
        match Settings::parse(data) {
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
                let error = error_chain(&error);
                tracing::error!(error, "Settings refused, keeping the last valid ones");
                self.metrics.settings_refused.inc();
                Err(error)
            }
        }
    }

    /// Publishes a valid plan, and the reasons for which the newest one may not be in force. Without a plan the last one
    /// stays; without a change nothing is published.
    fn follow(&self, plan: Option<Plan>) {
        let errors: Vec<_> =
            [&self.read_error, &self.content_error].into_iter().flatten().map(|error| &**error).collect();
        let error = (!errors.is_empty()).then(|| errors.join("; "));
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
}

impl SingleObject for PlanSource {
    type Data = ConfigData;
    const NAME: &str = AGENT_OBJECT;

    fn collection(&self) -> Target {
        Target::collection("", "v1", Some(&self.namespace), "configmaps")
    }

    fn present(&mut self, map: Named<ConfigData>) {
        let data = map.data.unwrap_or_default();
        let settings = self.read_settings(&data);
        let text = data.plan.as_deref().ok_or_else(|| format!("the ConfigMap has no {PLAN_KEY}"));
        // Without its source, which may contain parts of the JSON: heartbeats do not echo the ConfigMap.
        let plan = text.and_then(|text| Plan::parse(text).map_err(|error| error.to_string()));
        let mut refused = Vec::new();
        match &plan {
            Ok(_) => self.pending = None,
            Err(error) => {
                tracing::error!(error = %error, "Plan refused, keeping the last valid one");
                self.metrics.plans_refused.inc();
                refused.push(error.clone());
            }
        }
        refused.extend(settings.err());
        self.read_error = None;
        self.content_error = (!refused.is_empty()).then(|| refused.join("; "));
        self.follow(plan.ok());
    }

    /// Not counted as a refusal: at the first start of an agent the plan may not be written yet.
    fn missing(&mut self) {
        tracing::warn!("ConfigMap with the plan is missing, keeping the last valid plan");
        self.read_error = None;
        self.content_error = Some("there is no ConfigMap".to_owned());
        self.follow(None);
    }

    fn failed(&mut self, error: &ApiError) {
        let text = format!("the ConfigMap cannot be read: {error}");
        // A permanent failure, such as a missing right, is logged once and not at each retry.
        if self.read_error.replace(text.clone()) != Some(text) {
            tracing::warn!(error = error_chain(error), "Failed to read the ConfigMap with the plan");
            self.follow(None);
        }
    }

    fn opened(&mut self) {
        if self.read_error.take().is_some() {
            self.follow(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use serde_json::json;

    use super::*;
    use crate::{settings, telemetry::Readiness, watch::Sink as _};

    const GOOD: &str = r#"{"revision":"1","watches":[]}"#;

    fn map(plan: Option<&str>) -> Named<ConfigData> {
        let data = plan.map(|plan| json!({ PLAN_KEY: plan }));
        serde_json::from_value(json!({"metadata": {"name": AGENT_OBJECT}, "data": data})).unwrap()
    }

    fn source(
        settings: Option<watch::Sender<Option<Arc<Settings>>>>,
    ) -> (Single<PlanSource>, watch::Receiver<PlanState>, Readiness) {
        let (publish, followed) = watch::channel(PlanState::default());
        let readiness = Readiness::default();
        let guard = readiness.pending("plan");
        (PlanSource::new("ns".to_owned(), publish, settings, guard, Metrics::default()), followed, readiness)
    }

    #[test]
    fn invalid_plan_leaves_the_last_valid_one_in_force() {
        let (mut source, mut followed, readiness) = source(None);
        source.present(map(Some("{")));
        source.present(map(None));
        let PlanState { plan, error } = followed.borrow_and_update().clone();
        assert_eq!((plan, error.as_deref()), (None, Some("the ConfigMap has no plan.json")));
        assert_eq!(readiness.missing(), ["plan"]);

        source.present(map(Some(GOOD)));
        let first = followed.borrow_and_update().plan.clone().unwrap();
        assert_eq!((first.revision(), &followed.borrow().error), ("1", &None));
        assert!(readiness.missing().is_empty());
        source.present(map(Some(GOOD)));
        assert!(!followed.has_changed().unwrap());
        source.present(map(Some(r#"{"revision":"","watches":[]}"#)));
        source.gone(map(None));
        source.present(map(Some(GOOD)));
        let PlanState { plan, error } = followed.borrow().clone();
        assert!(Arc::ptr_eq(&plan.unwrap(), &first) && error.is_none());
    }

    #[test]
    fn plan_missing_from_a_list_is_reported_and_the_last_valid_one_stays() {
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
    fn failure_to_read_is_reported_until_the_watch_is_open_again() {
        let (mut source, mut followed, _readiness) = source(None);
        let forbidden = ApiError::Status { status: StatusCode::FORBIDDEN, retry_after: None };
        let mut error = || followed.borrow_and_update().error.clone();
        source.failed(&forbidden);
        let text = "the ConfigMap cannot be read: the API server responded with 403 Forbidden";
        assert_eq!(error().as_deref(), Some(text));
        source.opened();
        assert_eq!(error(), None);
        // An error of the content stays beside it.
        source.present(map(None));
        source.failed(&forbidden);
        assert_eq!(error().unwrap(), format!("{text}; the ConfigMap has no plan.json"));
        source.opened();
        assert_eq!(error().as_deref(), Some("the ConfigMap has no plan.json"));
        source.failed(&ApiError::Deadline);
        source.present(map(Some(GOOD)));
        assert_eq!(error(), None);
    }

    #[test]
    fn invalid_settings_leave_the_last_valid_ones_in_force_and_do_not_affect_the_plan() {
        let publish = watch::Sender::new(None);
        let mut current = publish.subscribe();
        let (mut source, mut followed, _readiness) = source(Some(publish));
        let bundle = settings::tests::bundle();
        let with = |receiver: &str, revision: &str| {
            let mut data = settings::tests::data(receiver, "https://kcp:2", "r-1", &bundle);
            data.insert(PLAN_KEY.to_owned(), GOOD.replace("\"1\"", &format!("\"{revision}\"")));
            serde_json::from_value(json!({"metadata": {"name": AGENT_OBJECT}, "data": data})).unwrap()
        };
        source.present(with("https://kcp:1", "1"));
        assert_eq!(current.borrow_and_update().as_ref().unwrap().receiver.authority(), "kcp:1");
        source.present(with("ftp://kcp", "2"));
        assert!(!current.has_changed().unwrap());
        assert_eq!(source.consumer.metrics.settings_refused.get(), 1);
        let PlanState { plan, error } = followed.borrow_and_update().clone();
        assert_eq!(plan.unwrap().revision(), "2", "each is judged by itself");
        let form = "the receiver's address does not have the form https://host:port";
        assert_eq!(error.unwrap(), format!("receiver-url is not valid: {form}"));
        source.present(with("https://kcp:1", "2"));
        assert!(!current.has_changed().unwrap() && followed.borrow().error.is_none());
        source.present(with("https://kcp:3", "2"));
        assert_eq!(current.borrow_and_update().as_ref().unwrap().receiver.authority(), "kcp:3");
    }
}
