//! Canary: a Lease of the agent, renewed once per heartbeat interval and observed again through a watch of the agent.
//! This proves that writing and watching work; its age is part of the heartbeat, which proves sending.
//!
//! A renewal with a resourceVersion below the highest observed one, or a Lease that no longer has the resourceVersion
//! of the last renewal, indicates a restored etcd; a renewal that the watch does not deliver indicates a dead watch.
//! Either way, every watch relists.

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use parking_lot::Mutex;
use serde_json::json;
use tidewatch_api::names::AGENT_OBJECT;
use tidewatch_contract::heartbeat::Canary;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{
    backoff::Backoff,
    clock,
    kubernetes::{ApiClient, ApiError},
    telemetry::{Metrics, error_chain},
    watch::{Named, Sink, Target, Watermarks},
};

/// Longest time between a renewal and its delivery by the watch.
const ECHO_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest distance between relists, in consecutive faults: the relists follow 1, 2, 4 … 64 faults and then every 64th.
const MAX_REBUILD_INTERVAL: u32 = 64;
/// Renewals at once after one that a list returned; then the next one waits for its interval.
const MAX_REPEATED: u32 = 3;
/// First ceiling of the backoff (full jitter) after a failed renewal.
const RETRY: Duration = Duration::from_secs(1);
/// Highest ceiling of that backoff; a shorter interval is the ceiling instead.
const RETRY_CAP: Duration = Duration::from_secs(60);
/// Shortest delay after a failed renewal.
const MIN_RETRY: Duration = Duration::from_millis(100);

/// State shared by the watch of the Lease and its renewals; clones share it.
#[derive(Clone, Default)]
pub struct CanaryState(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    seen: Notify,
    back: Notify,
    watermarks: Watermarks,
}

#[derive(Default)]
struct State {
    /// The last renewal found no Lease.
    missing: bool,
    /// A precondition has failed since the last renewal that was answered.
    conflict: bool,
    /// Highest resourceVersion in an response to a renewal or from the watch of the Lease.
    highest: u64,
    /// Newest resourceVersion that the watch of the Lease has delivered.
    watched: u64,
    /// resourceVersion of the last list of the Lease.
    listed: u64,
    /// resourceVersion of the last renewal that was answered; the precondition of the next one.
    renewed: Option<u64>,
    /// The same until the watch has delivered it. Each renewal counts once: bookmarks, which also come while no renewal
    /// succeeds, must not keep the canary fresh.
    pending: Option<u64>,
    /// Last time at which the watch was found to have delivered the renewal.
    back: Option<Instant>,
}

impl State {
    /// Records that the pending renewal came back, if the watch has delivered it. True if so.
    fn count_delivered(&mut self, now: Instant) -> bool {
        let is_delivered = self.pending.is_some_and(|version| version <= self.watched);
        if is_delivered {
            (self.pending, self.back) = (None, Some(now));
        }
        is_delivered
    }
}

impl CanaryState {
    fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        work(&mut self.0.state.lock())
    }

    /// The canary's part of the heartbeat; `None` before the first delivered renewal.
    pub(crate) fn canary(&self, now: Instant) -> Option<Canary> {
        let back = self.with(|state| state.back)?;
        Some(Canary { age_seconds: now.duration_since(back).as_secs() })
    }

    /// Waits until a renewal comes back through the watch. One before the call counts; supports one caller.
    pub(crate) async fn came_back(&self) {
        self.0.back.notified().await;
    }

    /// True if the API server answered the last renewal with 404.
    pub(crate) fn is_missing(&self) -> bool {
        self.with(|state| state.missing)
    }

    /// Watermarks of all watches, which renewals are compared with.
    pub(crate) fn watermarks(&self) -> Watermarks {
        self.0.watermarks.clone()
    }

    /// Prepares a renewal; returns the lower bound for the resourceVersion of its response.
    fn begin_renewal(&self) -> u64 {
        self.0.watermarks.mark();
        self.with(|state| state.highest)
    }

    /// Records a resourceVersion delivered by the watch of the Lease.
    fn watched(&self, version: &str, now: Instant) {
        let Ok(version) = version.parse() else { return };
        self.with(|state| {
            state.watched = version;
            state.highest = state.highest.max(version);
            if state.count_delivered(now) {
                self.0.back.notify_one();
            }
        });
        self.0.seen.notify_waiters();
    }

    /// Records the resourceVersion of a list of the Lease. It proves nothing about the watch.
    fn listed(&self, version: &str) {
        let Ok(version) = version.parse() else { return };
        self.with(|state| {
            state.listed = version;
            state.highest = state.highest.max(version);
        });
        self.0.seen.notify_waiters();
    }

    /// Records an answered renewal. `before` is the bound from before its request: a resourceVersion observed since
    /// then may be newer than the renewal. True if etcd may have been restored: resourceVersions went back, or a
    /// precondition failed.
    fn renewed(&self, version: u64, before: u64, now: Instant) -> bool {
        let above = self.0.watermarks.any_above(version);
        self.with(|state| {
            let backwards = version < before;
            let conflict = std::mem::take(&mut state.conflict);
            if backwards {
                // Versions observed before belong to a discarded history.
                (state.highest, state.watched, state.listed) = (version, 0, 0);
            }
            state.highest = state.highest.max(version);
            (state.renewed, state.pending) = (Some(version), Some(version));
            if state.count_delivered(now) {
                self.0.back.notify_one();
            }
            backwards || above || conflict
        })
    }

    /// Waits until the watch has delivered a renewal, or a list has.
    async fn await_echo(&self, version: u64) -> Echo {
        loop {
            let seen = self.0.seen.notified();
            tokio::pin!(seen);
            seen.as_mut().enable();
            let (watched, listed) = self.with(|state| (state.watched, state.listed));
            if watched >= version {
                return Echo::Delivered;
            }
            if listed >= version {
                return Echo::Listed;
            }
            seen.await;
        }
    }
}

/// Result of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Echo {
    /// The watch delivered it, or a later version.
    Delivered,
    /// A list returned it, so that the watch, which continues behind the list, never will.
    Listed,
    /// The watch did not deliver it in time.
    Missing,
}

/// Consecutive renewals that indicate the same fault. The relists that they order are spaced.
#[derive(Debug, Default)]
struct Faults(u32);

impl Faults {
    /// Records a renewal. Returns true if every watch is to relist.
    fn record(&mut self, is_fault: bool) -> bool {
        self.0 = if is_fault { self.0.saturating_add(1) } else { 0 };
        self.orders_relist()
    }

    /// Like [`Self::record`], but also returns true for the first renewal without the fault if the last one with it
    /// ordered no relist: each of these faults may be another restore.
    fn record_each(&mut self, is_fault: bool) -> bool {
        let is_left_out = !is_fault && self.0 > 0 && !self.orders_relist();
        self.record(is_fault) || is_left_out
    }

    /// True if a relist follows the last fault.
    fn orders_relist(&self) -> bool {
        let Self(number) = *self;
        number.is_power_of_two() && number < MAX_REBUILD_INTERVAL
            || number > 0 && number.is_multiple_of(MAX_REBUILD_INTERVAL)
    }
}

/// Sink of the watch of the Lease.
pub(crate) struct LeaseWatch {
    /// Namespace of the Lease.
    pub(crate) namespace: String,
    /// Receives the delivered resourceVersions.
    pub(crate) canary_state: CanaryState,
}

impl LeaseWatch {
    fn collection(namespace: &str) -> Target {
        Target::collection("coordination.k8s.io", "v1", Some(namespace), "leases")
    }
}

impl Sink for LeaseWatch {
    type Item = Named;

    async fn target(&mut self, _client: &ApiClient) -> Result<Target, ApiError> {
        Ok(Self::collection(&self.namespace).select("", &format!("metadata.name={AGENT_OBJECT}")))
    }

    fn page(&mut self, _items: Vec<Named>) -> bool {
        true
    }

    fn complete(&mut self, version: &str) {
        self.canary_state.listed(version);
    }

    fn present(&mut self, item: Named) {
        if item.metadata.name == AGENT_OBJECT {
            self.canary_state.watched(&item.metadata.version, Instant::now());
        }
    }

    fn gone(&mut self, _item: Named) {}

    fn bookmark(&mut self, version: &str) {
        self.canary_state.watched(version, Instant::now());
    }

    fn failed(&mut self, error: &ApiError) {
        tracing::warn!(error = error_chain(error), "Failed to watch the canary Lease");
    }
}

/// Renews the Lease periodically.
pub(crate) struct LeaseRenewer {
    /// Connection to the API server.
    pub(crate) client: ApiClient,
    /// Namespace of the Lease.
    pub(crate) namespace: String,
    /// `spec.holderIdentity` of the Lease.
    pub(crate) holder: String,
    /// Heartbeat interval, which the receiver may change.
    pub(crate) interval: watch::Receiver<Duration>,
    /// State shared with the watch of the Lease.
    pub(crate) canary_state: CanaryState,
    /// Counter that is incremented to make every watch relist.
    pub(crate) rebuild: watch::Sender<u64>,
    /// Counters.
    pub(crate) metrics: Metrics,
}

impl LeaseRenewer {
    /// Renews the Lease until cancelled.
    pub(crate) async fn run(mut self) {
        let mut undelivered = Faults::default();
        let mut backwards = Faults::default();
        let mut repeated = 0;
        let mut retries = Backoff::default();
        loop {
            let begun = Instant::now();
            let before = self.canary_state.begin_renewal();
            let renewed = self.renew().await;
            let missing = renewed.as_ref().is_err_and(|error| error.status() == Some(StatusCode::NOT_FOUND));
            self.canary_state.with(|state| state.missing = missing);
            match renewed {
                Ok(version) => {
                    retries.reset();
                    let echo = self.await_renewal(version, before, &mut undelivered, &mut backwards).await;
                    // Another renewal shows at once whether the watch works.
                    if echo == Echo::Listed && repeated < MAX_REPEATED {
                        repeated += 1;
                        continue;
                    }
                    self.wait_for_interval(begun).await;
                }
                Err(error) => {
                    self.metrics.canary_failed.inc();
                    tracing::warn!(error = error_chain(&error), "Failed to renew the canary Lease");
                    // A whole interval may be an hour, in which a restored etcd would remain undetected.
                    let delay =
                        retries.fail(RETRY, RETRY_CAP).max(error.retry_after().unwrap_or(MIN_RETRY)).max(MIN_RETRY);
                    let interval = *self.interval.borrow();
                    sleep(delay.min(interval)).await;
                }
            }
            repeated = 0;
        }
    }

    /// Waits for the rest of the interval. A change of the interval only moves the end; it does not cause a renewal by
    /// itself.
    async fn wait_for_interval(&mut self, begun: Instant) {
        loop {
            let interval = *self.interval.borrow_and_update();
            tokio::select! {
                () = sleep_until(begun + interval) => return,
                Ok(()) = self.interval.changed() => {}
            }
        }
    }

    /// Waits for the delivery of a renewal, and orders relists where needed.
    async fn await_renewal(&self, version: u64, before: u64, undelivered: &mut Faults, backwards: &mut Faults) -> Echo {
        if backwards.record_each(self.canary_state.renewed(version, before, Instant::now())) {
            tracing::warn!(version, "Resource versions went back, or the Lease was changed; relisting every watch");
            self.order_rebuild();
        }
        let echo = timeout(ECHO_TIMEOUT, self.canary_state.await_echo(version)).await.unwrap_or(Echo::Missing);
        if echo != Echo::Listed && undelivered.record(echo == Echo::Missing) {
            tracing::warn!(version, "Canary renewal was not delivered; relisting every watch");
            self.order_rebuild();
        }
        echo
    }

    fn order_rebuild(&self) {
        self.metrics.rebuilds.inc();
        self.rebuild.send_modify(|count| *count += 1);
    }

    /// Renews the Lease; returns its new resourceVersion.
    ///
    /// The resourceVersion of the last renewal is a precondition. After a restore of etcd it fails with 409, even if
    /// the resourceVersions have overtaken the observed ones by then; the Lease is renewed without it, and every watch
    /// relists. It also fails after a renewal whose response was lost, and after a write of another client, e.g. of
    /// labels by the installer: both are rare, and cost one needless relist.
    async fn renew(&self) -> Result<u64, ApiError> {
        let last = self.canary_state.with(|state| state.renewed);
        match self.patch(last).await {
            Err(error) if last.is_some() && error.status() == Some(StatusCode::CONFLICT) => {
                self.canary_state.with(|state| state.conflict = true);
                self.patch(None).await
            }
            result => result,
        }
    }

    /// Sends one renewal, with a resourceVersion that the Lease must have.
    async fn patch(&self, expected: Option<u64>) -> Result<u64, ApiError> {
        let path = LeaseWatch::collection(&self.namespace).patch(AGENT_OBJECT);
        let now = clock::now();
        // `MicroTime` has exactly six fractional digits; the `Display` of `Timestamp` does not guarantee them.
        let mut patch = json!({"spec": {"holderIdentity": self.holder, "renewTime": format!("{now:.6}")}});
        if let Some(version) = expected {
            patch["metadata"] = json!({"resourceVersion": version.to_string()});
        }
        let response = self.client.merge_patch(&path, patch.to_string().into_bytes()).await?;
        let lease: Named = serde_json::from_slice(&response).map_err(ApiError::Parse)?;
        let number = lease.metadata.version.parse();
        number.map_err(|_| ApiError::Parse(serde::de::Error::custom("resourceVersion is not a number")))
    }
}

#[cfg(test)]
impl CanaryState {
    /// The watch delivers a renewal.
    pub(crate) fn come_back(&self, now: Instant) {
        self.renewed(1, 0, now);
        self.watched("1", now);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use bytes::Bytes;
    use futures::future::BoxFuture;
    use http::{Request, Response};
    use http_body_util::{BodyExt, Full};
    use serde_json::Value;

    use super::*;
    use crate::{
        connection::BoxError,
        kubernetes::{Body, Transport},
    };

    #[tokio::test(start_paused = true)]
    async fn renewal_is_delivered_regardless_of_the_order_of_answer_and_watch() {
        let canary_state = CanaryState::default();
        let start = Instant::now();
        canary_state.watched("5", start);
        assert_eq!(canary_state.canary(start), None);
        assert!(!canary_state.renewed(7, canary_state.begin_renewal(), start));
        assert_eq!(canary_state.canary(start), None);
        assert!(timeout(ECHO_TIMEOUT, canary_state.await_echo(7)).await.is_err());
        canary_state.watched("7", start);
        assert_eq!(canary_state.await_echo(7).await, Echo::Delivered);
        assert_eq!(canary_state.canary(start + ECHO_TIMEOUT), Some(Canary { age_seconds: 10 }));
        canary_state.watched("9", start);
        canary_state.renewed(9, 9, start + ECHO_TIMEOUT);
        assert_eq!(canary_state.canary(start + ECHO_TIMEOUT), Some(Canary { age_seconds: 0 }));
    }

    #[test]
    fn lower_version_indicates_a_restored_etcd() {
        let canary_state = CanaryState::default();
        let now = Instant::now();
        canary_state.watched("50", now);
        assert!(canary_state.renewed(40, canary_state.begin_renewal(), now));
        assert_eq!(canary_state.canary(now), None);
        assert!(!canary_state.renewed(41, canary_state.begin_renewal(), now));
        canary_state.watched("41", now);
        assert!(canary_state.canary(now).is_some());
    }

    #[test]
    fn watermark_of_any_watch_indicates_a_restored_etcd() {
        let canary_state = CanaryState::default();
        let now = Instant::now();
        let kymas = canary_state.watermarks().register();
        canary_state.watched("50", now);
        kymas.seen("55");
        assert!(canary_state.renewed(53, canary_state.begin_renewal(), now));
        kymas.listed("54");
        assert!(!canary_state.renewed(56, canary_state.begin_renewal(), now));
    }

    #[test]
    fn bookmark_ahead_of_the_answer_does_not_indicate_a_restored_etcd() {
        let canary_state = CanaryState::default();
        let now = Instant::now();
        let before = canary_state.begin_renewal();
        canary_state.watched("60", now);
        assert!(!canary_state.renewed(58, before, now));
        assert!(canary_state.canary(now).is_some(), "the watch has delivered a newer version");
    }

    #[test]
    fn each_renewal_counts_once() {
        let canary_state = CanaryState::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let age = |seconds| canary_state.canary(at(seconds)).map(|canary| canary.age_seconds);
        canary_state.renewed(7, 0, start);
        for (version, seconds) in [("7", 0), ("9", 60), ("11", 120)] {
            canary_state.watched(version, at(seconds));
        }
        assert_eq!(age(120), Some(120), "a bookmark is no renewal");
        canary_state.renewed(12, 11, at(120));
        canary_state.watched("12", at(120));
        assert_eq!(age(120), Some(0));
    }

    #[test]
    fn last_of_several_faults_is_followed_by_a_relist() {
        let mut faults = Faults::default();
        let ordered = [true, true, true, false, false, true, false].map(|is_fault| faults.record_each(is_fault));
        assert_eq!(ordered, [true, true, false, true, false, true, false]);
    }

    /// API server that answers renewals with these statuses and resourceVersions, and delivers the successful ones
    /// through the watch. Later renewals remain unanswered.
    struct Script {
        answers: Mutex<VecDeque<(u16, &'static str)>>,
        patches: Arc<Mutex<Vec<Value>>>,
        canary_state: CanaryState,
    }

    impl Transport for Script {
        fn send(&self, request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, BoxError>> {
            let patch = request.into_body().into_inner().unwrap_or_default();
            self.patches.lock().push(serde_json::from_slice(&patch).unwrap());
            let Some((status, version)) = self.answers.lock().pop_front() else {
                return Box::pin(std::future::pending());
            };
            if status == 200 {
                self.canary_state.watched(version, Instant::now());
            }
            let lease = json!({"metadata": {"name": AGENT_OBJECT, "resourceVersion": version}}).to_string();
            let body: Body = Full::new(Bytes::from(lease)).map_err(Into::into).boxed_unsync();
            let response: Result<_, BoxError> = Ok(Response::builder().status(status).body(body).unwrap());
            Box::pin(std::future::ready(response))
        }
    }

    /// A renewer over a script, and the renewals that it sends.
    fn scripted<const N: usize>(
        interval: &watch::Sender<Duration>,
        answers: [(u16, &'static str); N],
    ) -> (LeaseRenewer, Arc<Mutex<Vec<Value>>>) {
        let renewer = renewer(interval);
        let patches = Arc::<Mutex<Vec<Value>>>::default();
        let answers = Mutex::new(VecDeque::from(answers));
        let canary_state = renewer.canary_state.clone();
        let client = ApiClient::new(Script { answers, patches: patches.clone(), canary_state });
        (LeaseRenewer { client, ..renewer }, patches)
    }

    #[tokio::test(start_paused = true)]
    async fn restored_etcd_that_overtook_the_observed_versions_orders_one_rebuild() {
        let interval = watch::Sender::new(Duration::from_secs(30));
        let (renewer, patches) = scripted(&interval, [(200, "1000"), (409, ""), (200, "1100"), (200, "1101")]);
        let ordered = renewer.rebuild.subscribe();
        let metrics = renewer.metrics.clone();
        assert!(timeout(Duration::from_secs(75), renewer.run()).await.is_err());
        let patches = patches.lock();
        let preconditions: Vec<_> = patches.iter().map(|patch| &patch["metadata"]["resourceVersion"]).collect();
        assert_eq!(preconditions, [&Value::Null, &json!("1000"), &Value::Null, &json!("1100")]);
        assert_eq!((*ordered.borrow(), metrics.canary_failed.get()), (1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn failed_renewal_is_retried_long_before_the_interval_ends() {
        let interval = watch::Sender::new(Duration::from_secs(3_600));
        let (renewer, patches) = scripted(&interval, [(503, ""), (503, ""), (200, "7")]);
        let canary_state = renewer.canary_state.clone();
        let metrics = renewer.metrics.clone();
        assert!(timeout(Duration::from_secs(60), renewer.run()).await.is_err());
        let age = canary_state.canary(Instant::now()).map(|canary| canary.age_seconds);
        // After delays of at most one and two seconds.
        assert!(age.is_some_and(|age| age >= 56), "{age:?}");
        assert_eq!((patches.lock().len(), metrics.canary_failed.get()), (3, 2));
    }

    fn renewer(interval: &watch::Sender<Duration>) -> LeaseRenewer {
        LeaseRenewer {
            client: ApiClient::new(Unreachable),
            namespace: String::new(),
            holder: String::new(),
            interval: interval.subscribe(),
            canary_state: CanaryState::default(),
            rebuild: watch::Sender::new(0),
            metrics: Metrics::default(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn restored_etcd_and_undelivered_renewals_order_spaced_rebuilds() {
        let renewer = renewer(&watch::Sender::new(Duration::from_secs(30)));
        let canary_state = renewer.canary_state.clone();
        let ordered = renewer.rebuild.subscribe();
        let mut undelivered = Faults::default();
        let mut backwards = Faults::default();
        canary_state.watched("50", Instant::now());
        let before = canary_state.begin_renewal();
        let await_echo = async { canary_state.watched("41", Instant::now()) };
        let (echo, ()) = tokio::join!(renewer.await_renewal(40, before, &mut undelivered, &mut backwards), await_echo);
        assert_eq!((echo, *ordered.borrow()), (Echo::Delivered, 1), "the resourceVersion decreased");
        for orders in [2, 3, 3, 4, 4] {
            let before = canary_state.begin_renewal();
            let echo = renewer.await_renewal(60, before, &mut undelivered, &mut backwards).await;
            assert_eq!((echo, *ordered.borrow()), (Echo::Missing, orders), "{undelivered:?}");
        }
        canary_state.watched("60", Instant::now());
        let before = canary_state.begin_renewal();
        let echo = renewer.await_renewal(60, before, &mut undelivered, &mut backwards).await;
        assert_eq!((echo, *ordered.borrow()), (Echo::Delivered, 4));
        // A watch that cannot be listed keeps its watermark of the discarded history.
        let watermark = canary_state.watermarks().register();
        watermark.seen("90");
        for orders in [5, 6, 6, 7, 7, 7, 7, 8] {
            let before = canary_state.begin_renewal();
            renewer.await_renewal(60, before, &mut undelivered, &mut backwards).await;
            assert_eq!(*ordered.borrow(), orders, "{backwards:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lists_prove_nothing_about_a_mute_watch() {
        let renewer = renewer(&watch::Sender::new(Duration::from_secs(30)));
        let canary_state = renewer.canary_state.clone();
        let ordered = renewer.rebuild.subscribe();
        let mut lease = LeaseWatch { namespace: String::new(), canary_state: canary_state.clone() };
        let mut undelivered = Faults::default();
        let mut backwards = Faults::default();
        let mut renew = async |before: u64, version: u64| {
            renewer.await_renewal(version, before, &mut undelivered, &mut backwards).await
        };
        let before = canary_state.begin_renewal();
        lease.complete("7");
        assert_eq!(renew(before, 6).await, Echo::Listed);
        assert_eq!((renew(7, 8).await, *ordered.borrow()), (Echo::Missing, 1));
        // The relist that it ordered.
        lease.complete("9");
        assert_eq!((renew(9, 10).await, *ordered.borrow()), (Echo::Missing, 2));
        assert_eq!(canary_state.canary(Instant::now()), None);
        lease.bookmark("10");
        assert_eq!(renew(10, 10).await, Echo::Delivered);
        assert!(canary_state.canary(Instant::now()).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn changed_interval_causes_no_renewal() {
        let interval = watch::Sender::new(Duration::from_secs(30));
        let mut renewer = renewer(&interval);
        let begun = Instant::now();
        let change = async {
            for seconds in [31, 60, 45] {
                tokio::time::sleep(Duration::from_secs(1)).await;
                interval.send_replace(Duration::from_secs(seconds));
            }
        };
        tokio::join!(renewer.wait_for_interval(begun), change);
        assert_eq!(begun.elapsed(), Duration::from_secs(45));
    }

    struct Unreachable;

    impl Transport for Unreachable {
        fn send(&self, _request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, BoxError>> {
            Box::pin(async { Err("connection refused".into()) })
        }
    }
}
