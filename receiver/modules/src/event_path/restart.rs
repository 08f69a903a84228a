//! Orders the reconciles after a start, and after the acquisition of shards: Kymas with changed inputs first, all others
//! verified over minutes, so that neither causes a load peak.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::ResourceExt as _;
use tidewatch_api::{
    Kyma, ModuleStatus, State,
    facts::KymaFacts,
    key::{KymaKey, ManifestKey},
    plan::Work,
    selection::SelectedVersion,
};
use tidewatch_fleet::{
    plans::Plans,
    queue::{Priority, WorkSet},
    stores::{
        Stores,
        kymas::{self, CachedKyma},
    },
    table::RuntimeTable,
};
use tidewatch_select::{
    catalog::{ChannelTarget, RolloutSlot, VersionSource},
    kyma::mandatory,
};

use crate::{catalog::Catalog, kyma::Inputs, windows::MaintenanceWindows};

/// Enqueues Kymas that this process begins to serve.
#[derive(Clone)]
pub struct AcquiredKymas {
    pub(super) spread: Duration,
    pub(super) stores: Stores,
    pub(super) plans: Plans,
    pub(super) catalog: Catalog,
    pub(super) windows: MaintenanceWindows,
    pub(super) fleet: RuntimeTable,
}

impl AcquiredKymas {
    /// Enqueues these Kymas of the synced caches, immediately or within the spread of a start.
    pub fn enqueue(&self, kymas: &[KymaKey]) {
        enqueue(self, kymas.iter().filter_map(|key| kymas::find(&self.stores.kymas, key)));
    }

    /// Enqueues every Kyma of the synced caches.
    pub(super) fn enqueue_all(&self) {
        enqueue(self, self.stores.kymas.state().into_iter());
    }
}

fn enqueue(to: &AcquiredKymas, kymas: impl Iterator<Item = Arc<CachedKyma>>) {
    let AcquiredKymas { spread, stores, plans, catalog, windows, fleet } = to;
    let spread = *spread;
    let mut first = 0u32;
    let mut later = 0u32;
    let mut moved = Vec::new();
    let mut lacking = Vec::new();
    let snapshot = catalog.snapshot(stores);
    for cached in kymas {
        let key = cached.key();
        if fleet.is_elsewhere(&key) {
            continue;
        }
        let Some(kyma) = cached.whole() else {
            // Its body cannot be decoded, so its missing modules are not known.
            fleet.enqueue(&key, WorkSet::RUNTIME, Priority::User);
            first += 1;
            continue;
        };
        let now = Timestamp::now();
        let window = windows.resume(&key, kyma, now);
        if let Some(rest) = window.and_then(|window| window.delay(now)) {
            fleet.roll_out(&key, rest);
        }
        let inputs = Inputs::of(kyma, &plans.of(&key), &catalog.fingerprint(kyma.labels(), stores)).with_window(window);
        if let Some(rest) = rollout_delay(catalog, kyma) {
            fleet.roll_out(&key, rest);
        }
        let Ok(manifests) = stores.manifests.of_kyma(&key, kyma.metadata.uid.as_deref()) else {
            // What it lacks is not known before their bodies are.
            fleet.enqueue(&key, WorkSet::RUNTIME, Priority::User);
            first += 1;
            continue;
        };
        let uid = KymaFacts::from(kyma).uid();
        let slot = |module: &str, version: &str| catalog.rollout_slot(uid, module, VersionSource::Mandatory, version);
        match mandatory::due_after(&manifests, &snapshot, slot, |module| catalog.is_held(module)) {
            Some(Duration::ZERO) => lacking.push(key.clone()),
            Some(rest) => fleet.roll_out(&key, rest),
            None => {}
        }
        let state = |name: &str| {
            let manifest = stores.manifests.find(&ManifestKey::new(&key.namespace, name))?;
            Some(manifest.facts().flags.state.unwrap_or_default())
        };
        match urgency(kyma, &inputs, state) {
            Some((WorkSet::RUNTIME, priority)) => {
                fleet.enqueue(&key, WorkSet::RUNTIME, priority);
                first += 1;
            }
            catalog => {
                moved.extend(catalog.map(|_| key.clone()));
                fleet.verify_within(&key, spread);
                later += 1;
            }
        }
    }
    let moved_catalogs = moved.len();
    let mandatory_modules = lacking.len();
    fleet.enqueue_paced(moved, WorkSet::of(&[Work::Catalog]), catalog.flags().catalog_sync_rate);
    fleet.enqueue_paced(lacking, WorkSet::of(&[Work::Kyma]), catalog.flags().catalog_sync_rate);
    tracing::info!(
        first,
        later,
        moved_catalogs,
        mandatory_modules,
        spread_seconds = spread.as_secs(),
        "Kymas enqueued after a start or an acquisition"
    );
}

/// Delay until the first pending roll-out reaches this Kyma, zero if it is overdue. Earlier reconciles keep the
/// installed version. No roll-out reaches a pinned module.
fn rollout_delay(catalog: &Catalog, kyma: &Kyma) -> Option<Duration> {
    let uid = kyma.uid().unwrap_or_default();
    let rest = |module: &ModuleStatus| {
        let channel = module.channel.as_deref()?;
        let installed = module.version.as_ref()?;
        let source = VersionSource::Channel(channel);
        let ChannelTarget { version, since, .. } = catalog.target(&module.name, source)?;
        if *installed == version || since.is_none() {
            return None;
        }
        if let Some(SelectedVersion::Version(_)) = KymaFacts::from(kyma).selected(&module.name) {
            return None;
        }
        match catalog.rollout_slot(&uid, &module.name, source, &version) {
            // Waits for its maintenance window.
            RolloutSlot::Now if module.maintenance == Some(true) => None,
            RolloutSlot::Now => Some(Duration::ZERO),
            RolloutSlot::After(rest) => Some(rest),
            RolloutSlot::Ring | RolloutSlot::Undecided => None,
        }
    };
    kyma.status.iter().flat_map(|status| status.modules()).filter_map(rest).min()
}

/// Returns the work that is enqueued immediately, and its priority; `None` if no input has changed since the last
/// reconcile.
fn urgency(kyma: &Kyma, inputs: &Inputs, manifest: impl Fn(&str) -> Option<State>) -> Option<(WorkSet, Priority)> {
    let status = kyma.status.as_ref().filter(|status| status.state.is_some());
    let Some(status) = status.filter(|_| kyma.metadata.deletion_timestamp.is_none()) else {
        return Some((WorkSet::RUNTIME, Priority::User));
    };
    let moved = status.modules().iter().any(|module| {
        let name = module.manifest.as_ref().and_then(|manifest| manifest.metadata.as_ref()?.name.as_deref());
        name.is_some_and(|name| match (manifest(name), module.state) {
            (None, _) => true,
            (Some(State::Unset), state) => state == State::Ready,
            // A deprecated version, or one that could not follow its channel, has a warning although its Manifest is
            // ready.
            (Some(State::Ready), State::Warning) => module.message.is_none(),
            (Some(state), shown) => state != shown,
        })
    });
    let works = if moved { WorkSet::RUNTIME } else { inputs.unnoted_at(kyma) };
    (!works.is_empty()).then_some((works, Priority::Catalog))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use jiff::SignedDuration;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::runtime::{
        reflector::{self, store::Writer},
        watcher::Event,
    };
    use serde_json::{Value, json};
    use tidewatch_api::{
        ModuleReleaseMeta, ModuleTemplate,
        names::{annotation, finalizer, label},
        plan::Plan,
    };
    use tidewatch_kit::metrics::Registry;
    use tidewatch_select::windows::WindowState;
    use tokio::time::Instant;

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
            inputs(&plain).after("-.-", WorkSet::RUNTIME, false).unwrap().into();
        change(&mut value);
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn changed_kymas_are_enqueued_first() {
        let ready = |_: &str| Some(State::Ready);
        let changed = Some((WorkSet::RUNTIME, Priority::Catalog));
        let urgent = Some((WorkSet::RUNTIME, Priority::User));
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
        let catalog_alone = Some((WorkSet::of(&[Work::Catalog]), Priority::Catalog));
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

    const WINDOW: Duration = Duration::from_secs(3_600);

    /// KCP with the unchanged Kyma of [`kyma`], and a channel of its module that moved to 1.1.0 the given number of
    /// seconds ago.
    struct Fixture {
        stores: Stores,
        catalog: Catalog,
        windows: MaintenanceWindows,
        fleet: RuntimeTable,
        key: KymaKey,
    }

    fn filled<K>(objects: &[Value]) -> reflector::Store<K>
    where
        K: reflector::Lookup + Clone + serde::de::DeserializeOwned + 'static,
        K::DynamicType: Default + Clone + Eq + std::hash::Hash,
    {
        let mut writer = Writer::default();
        for object in objects {
            writer.apply_watcher_event(&Event::Apply(serde_json::from_value(object.clone()).unwrap()));
        }
        writer.as_reader()
    }

    fn object(kind: &str, name: &str, spec: Value) -> Value {
        json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind,
               "metadata": {"name": name, "namespace": "kcp-system"}, "spec": spec})
    }

    fn fixture(moved: i64) -> Fixture {
        let pointer = json!({"version": "1.1.0", "since": Timestamp::now().as_second() - moved});
        let meta = json!({"moduleName": "keda", "channels": [{"channel": "regular", "version": "1.1.0"}]});
        let meta = object("ModuleReleaseMeta", "keda", meta);
        bed_with(meta, &json!({"whom": "everyone", "channels": {"regular": pointer}}))
    }

    /// KCP with a release meta and its accepted state.
    fn bed_with(meta: Value, accepted: &Value) -> Fixture {
        let of_version = |version: &str| {
            let spec = json!({"moduleName": "keda", "version": version, "descriptor": {}});
            object("ModuleTemplate", &format!("keda-{version}"), spec)
        };
        let install = json!({"remote": true, "version": "1.0.0", "install": {"name": "raw-manifest", "source": {}}});
        let mut manifest = object("Manifest", "m", install);
        manifest["status"] = json!({"state": "Ready"});
        let mut stores = Stores {
            kymas: filled(&[]),
            templates: filled::<ModuleTemplate>(&[of_version("1.0.0"), of_version("1.1.0")]),
            release_metas: filled::<ModuleReleaseMeta>(&[meta]),
            manifests: filled(&[manifest]).into(),
            watchers: filled(&[]),
        };
        let flags = crate::catalog::Flags { module_upgrade_rollout_max_delay: WINDOW, ..Default::default() };
        let settings = crate::catalog::Settings { flags, ..Default::default() };
        let catalog =
            Catalog::deciding(settings, crate::catalog::Metrics::default(), tidewatch_cluster::WriteBudgets::default());
        let accepted = json!({"keda": accepted}).to_string();
        let map: ConfigMap = serde_json::from_value(json!({"data": {"accepted": accepted}})).unwrap();
        catalog.observe_releases(Some(&map));

        let mut value = serde_json::to_value(kyma(|kyma| {
            let metadata = &mut kyma["metadata"];
            (metadata["namespace"], metadata["uid"]) = (json!("kcp-system"), json!("uid"));
            let module = &mut kyma["status"]["modules"][0];
            (module["channel"], module["version"]) = (json!("regular"), json!("1.0.0"));
        }))
        .unwrap();
        let is: Kyma = serde_json::from_value(value.clone()).unwrap();
        let inputs = Inputs::of(&is, &plan(), &catalog.fingerprint(is.labels(), &stores));
        value["metadata"]["annotations"][annotation::INPUTS] =
            inputs.after("-.-", WorkSet::RUNTIME, false).unwrap().into();
        stores.kymas = filled(&[value]);

        let metrics = tidewatch_fleet::table::Metrics::register(&mut Registry::default());
        let settings = tidewatch_fleet::table::Settings { seed: 1, ..Default::default() };
        let fleet = RuntimeTable::alone(1, settings, metrics);
        let key = KymaKey::new("kcp-system", "k");
        fleet.place(key.clone(), "", Some("r-1".parse().unwrap()), Arc::new(plan()));
        fleet.set_synced();
        Fixture { stores, catalog, windows: MaintenanceWindows::with_policy(&json!({})), fleet, key }
    }

    impl Fixture {
        /// First job after a start, and its delay; other Kymas are verified within a year.
        async fn first(&self) -> (WorkSet, Priority, Duration) {
            let spread = Duration::from_secs(365 * 86_400);
            let plan = plan();
            let started = Instant::now();
            let Self { stores, catalog, windows, fleet, .. } = self;
            let stores = stores.clone();
            let catalog = catalog.clone();
            let windows = windows.clone();
            let plans = Plans::fixed(plan);
            AcquiredKymas { spread, stores, plans, catalog, windows, fleet: fleet.clone() }.enqueue_all();
            let job = fleet.next().await;
            assert_eq!(job.key, self.key);
            (job.queued.work, job.queued.priority, started.elapsed())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn roll_out_resumes_after_a_restart() {
        let reconcile = WorkSet::of(&[Work::Kyma]);
        let delay = tidewatch_select::catalog::rollout::delay("uid", "keda", "1.1.0", WINDOW);
        assert!(delay > Duration::from_secs(60), "the delay must be observable");
        let (works, priority, after) = fixture(40).first().await;
        assert_eq!((works, priority), (reconcile, Priority::Catalog));
        let rest = delay - Duration::from_secs(40);
        // Tolerates the passage of real time.
        assert!(
            after <= rest + Duration::from_millis(2) && after + Duration::from_secs(5) > rest,
            "{after:?} {rest:?}"
        );
        let (works, _, after) = fixture(WINDOW.as_secs().try_into().unwrap()).first().await;
        assert!(works == reconcile && after < Duration::from_millis(2), "its time has passed: {after:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn roll_out_of_a_mandatory_version_resumes_after_a_restart() {
        let delay = tidewatch_select::catalog::rollout::delay("uid", "keda", "1.1.0", WINDOW);
        let target = json!({"version": "1.1.0", "since": Timestamp::now().as_second() - 40});
        let spec = json!({"moduleName": "keda", "mandatory": {"version": "1.1.0"}});
        let mut meta = object("ModuleReleaseMeta", "keda", spec);
        meta["metadata"]["finalizers"] = json!([finalizer::MANDATORY_MODULE]);
        let mut fixture = bed_with(meta, &json!({"whom": "nobody", "channels": {}, "mandatory": target}));
        let install = json!({"remote": true, "version": "1.0.0", "install": {"name": "raw-manifest", "source": {}}});
        let mut selected = object("Manifest", "m", install.clone());
        selected["status"] = json!({"state": "Ready"});
        let mut manifest = object("Manifest", "mandatory", install);
        manifest["metadata"]["labels"] = json!({label::KYMA_NAME: "k", label::MODULE_NAME: "keda",
            label::MANDATORY_MODULE: "true"});
        fixture.stores.manifests = filled(&[selected, manifest.clone()]).into();
        fixture.stores.manifests.apply(&serde_json::from_value(manifest).unwrap());
        let (_, priority, after) = fixture.first().await;
        let rest = delay - Duration::from_secs(40);
        assert_eq!(priority, Priority::Catalog);
        // Tolerates the passage of real time.
        assert!(
            after <= rest + Duration::from_millis(2) && after + Duration::from_secs(5) > rest,
            "{after:?} {rest:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn kyma_with_the_version_is_in_no_roll_out() {
        let mut fixture = fixture(0);
        let mut kyma = serde_json::to_value(fixture.stores.kymas.state()[0].whole().unwrap().as_ref()).unwrap();
        kyma["status"]["modules"][0]["version"] = json!("1.1.0");
        fixture.stores.kymas = filled(&[kyma]);
        let (works, priority, _) = fixture.first().await;
        assert_eq!((works, priority), (WorkSet::RUNTIME, Priority::Verification));
    }

    #[tokio::test(start_paused = true)]
    async fn pinned_module_is_in_no_roll_out() {
        for (pinned, priority) in [(false, Priority::Catalog), (true, Priority::Verification)] {
            let mut fixture = fixture(WINDOW.as_secs().try_into().unwrap());
            let mut kyma = serde_json::to_value(fixture.stores.kymas.state()[0].whole().unwrap().as_ref()).unwrap();
            kyma["spec"]["modules"] = json!([{"name": "keda"}]);
            if pinned {
                kyma["metadata"]["annotations"]["version.operator.kyma-project.io/keda"] = json!("1.0.0");
            }
            let is: Kyma = serde_json::from_value(kyma.clone()).unwrap();
            let inputs = Inputs::of(&is, &plan(), &fixture.catalog.fingerprint(is.labels(), &fixture.stores));
            kyma["metadata"]["annotations"][annotation::INPUTS] =
                inputs.after("-.-", WorkSet::RUNTIME, false).unwrap().into();
            fixture.stores.kymas = filled(&[kyma.clone()]);
            assert_eq!(fixture.first().await.1, priority, "pinned: {pinned}");
        }
    }

    /// The body of a Kyma that cannot be decoded is not in the cache.
    #[tokio::test(start_paused = true)]
    async fn kyma_without_a_body_is_reconciled_at_once() {
        let mut fixture = fixture(0);
        let whole = fixture.stores.kymas.state()[0].whole().unwrap().clone();
        let mut writer = Writer::default();
        writer.apply_watcher_event(&Event::Apply(CachedKyma::reduced(&whole)));
        fixture.stores.kymas = writer.as_reader();
        let (works, priority, after) = fixture.first().await;
        assert_eq!((works, priority), (WorkSet::RUNTIME, Priority::User));
        assert!(after < Duration::from_millis(2), "{after:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn kyma_that_waits_is_reconciled_at_the_start_of_its_window() {
        let once = |begin: Timestamp| {
            let end = begin + SignedDuration::from_hours(4);
            json!({"default": {"begin": begin.to_string(), "end": end.to_string()}})
        };
        let day = SignedDuration::from_hours(24);
        let now = Timestamp::now();
        let opens = Timestamp::from_second((now + day).as_second()).unwrap();
        let waiting = |policy: &Value| {
            let mut fixture = fixture(WINDOW.as_secs().try_into().unwrap());
            fixture.windows = MaintenanceWindows::with_policy(policy);
            let mut kyma = serde_json::to_value(fixture.stores.kymas.state()[0].whole().unwrap().as_ref()).unwrap();
            kyma["status"]["modules"][0]["maintenance"] = json!(true);
            let is: Kyma = serde_json::from_value(kyma.clone()).unwrap();
            let inputs = Inputs::of(&is, &plan(), &fixture.catalog.fingerprint(is.labels(), &fixture.stores));
            let inputs = inputs.with_window(Some(WindowState::Opens(opens)));
            kyma["metadata"]["annotations"][annotation::INPUTS] =
                inputs.after("-.-", WorkSet::RUNTIME, false).unwrap().into();
            fixture.stores.kymas = filled(&[kyma]);
            fixture
        };
        let (works, priority, after) = waiting(&once(opens)).first().await;
        assert_eq!((works, priority), (WorkSet::of(&[Work::Kyma]), Priority::Catalog));
        let rest = Duration::from_secs(86_400);
        assert!(after <= rest + Duration::from_millis(2) && after + Duration::from_secs(60) > rest, "{after:?}");
        for (policy, change) in [(once(now - SignedDuration::from_hours(1)), "open"), (once(opens + day), "later")] {
            let (works, _, after) = waiting(&policy).first().await;
            assert!(works == WorkSet::RUNTIME && after < Duration::from_millis(2), "{change}: {works:?} {after:?}");
        }
    }
}
