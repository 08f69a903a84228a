//! The canary: a Lease of our own, renewed once per heartbeat interval and seen to come back through our own watch. That proves
//! that writing and watching work; its age stands in the heartbeat, which proves sending.
//!
//! A renewal whose answer has a lower resource version than the highest seen tells of an etcd that was restored; one that does
//! not come back tells of a watch that is dead. Either way every watch is rebuilt from a list.

mod heights;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::StatusCode;
use serde_json::json;
use tidewatch_shared::{heartbeat::Canary, names::AGENT_OBJECT};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep_until, timeout},
};

pub(crate) use heights::Height;

use crate::{
    clock,
    kubernetes::{Call, Lane},
    telemetry::{Metrics, chain},
    watch::{Named, Sink, Target},
};
use heights::Heights;

/// A renewal must come back within this time.
const COMES_BACK: Duration = Duration::from_secs(10);
/// While it fails for the same reason, rebuilds become rarer: after 1, 2, 4 … 64 intervals.
const RAREST: u32 = 64;

/// What the watch of the Lease and the renewals share; clones are the same.
#[derive(Clone, Default)]
pub struct Sightings(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    seen: Notify,
    heights: Heights,
}

#[derive(Default)]
struct State {
    /// The last renewal met no Lease.
    missing: bool,
    /// The highest resource version that the watch of the Lease or an answer has told.
    highest: u64,
    /// The highest that came through the watch.
    watched: u64,
    /// The newest renewal that was answered.
    renewed: u64,
    /// When a renewal was last seen to come back.
    back: Option<Instant>,
}

/// What a renewal's answer tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Renewed {
    Forwards,
    /// The resource version went back.
    Backwards,
}

impl Sightings {
    fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        work(&mut self.0.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// As the heartbeat tells it.
    pub(crate) fn canary(&self, now: Instant) -> Option<Canary> {
        let back = self.with(|state| state.back)?;
        Some(Canary { age_seconds: now.duration_since(back).as_secs() })
    }

    /// Whether the API server said that there is no Lease to renew.
    pub(crate) fn is_missing(&self) -> bool {
        self.with(|state| state.missing)
    }

    /// A place for another watch, whatever it watches.
    pub(crate) fn enter(&self) -> Height {
        self.0.heights.enter()
    }

    /// A renewal is about to be sent; gives what its answer must not be lower than.
    fn before(&self) -> u64 {
        self.0.heights.mark();
        self.with(|state| state.highest)
    }

    /// The watch has told a resource version.
    fn watched(&self, version: &str, now: Instant) {
        let Ok(version) = version.parse() else { return };
        self.with(|state| {
            state.watched = version;
            state.highest = state.highest.max(version);
            if state.renewed > 0 && state.renewed <= version {
                state.back = Some(now);
            }
        });
        self.0.seen.notify_waiters();
    }

    /// A renewal got this version; `before` is what was seen when it was sent, because what came since may be newer than it.
    fn renewed(&self, version: u64, before: u64, now: Instant) -> Renewed {
        let above = self.0.heights.are_above(version);
        self.with(|state| {
            let backwards = version < before;
            if backwards {
                // What was watched belongs to a history that is no more.
                (state.highest, state.watched) = (version, 0);
            }
            state.highest = state.highest.max(version);
            state.renewed = version;
            if state.watched >= version {
                state.back = Some(now);
            }
            if backwards || above { Renewed::Backwards } else { Renewed::Forwards }
        })
    }

    async fn comes_back(&self, version: u64) {
        loop {
            let seen = self.0.seen.notified();
            tokio::pin!(seen);
            seen.as_mut().enable();
            if self.with(|state| state.watched >= version) {
                return;
            }
            seen.await;
        }
    }
}

#[cfg(test)]
impl Sightings {
    /// Whether a renewal that got this version now would be below what a watch has seen.
    pub(crate) fn is_above(&self, version: u64) -> bool {
        self.before();
        self.0.heights.are_above(version)
    }
}

/// The watch of the Lease.
pub(crate) struct LeaseWatch {
    /// Namespace of the Lease.
    pub(crate) namespace: String,
    /// Where sightings go.
    pub(crate) sightings: Sightings,
}

impl LeaseWatch {
    fn collection(namespace: &str) -> Target {
        Target::collection("coordination.k8s.io", "v1", Some(namespace), "leases")
    }
}

impl Sink for LeaseWatch {
    type Item = Named;

    async fn target(&mut self, _lane: &Lane) -> Result<Target, Call> {
        Ok(Self::collection(&self.namespace).select("", &format!("metadata.name={AGENT_OBJECT}")))
    }

    fn begin(&mut self) {}

    fn page(&mut self, _items: Vec<Named>) -> bool {
        true
    }

    fn complete(&mut self, version: &str) {
        self.sightings.watched(version, Instant::now());
    }

    fn present(&mut self, item: Named) {
        if item.metadata.name == AGENT_OBJECT {
            self.sightings.watched(&item.metadata.version, Instant::now());
        }
    }

    fn gone(&mut self, _item: Named) {}

    fn bookmark(&mut self, version: &str) {
        self.sightings.watched(version, Instant::now());
    }

    fn failed(&mut self, why: &Call) {
        tracing::warn!(error = chain(why), "The canary's Lease cannot be watched");
    }
}

/// Renews the Lease for ever.
pub(crate) struct Renewer {
    /// To the API server.
    pub(crate) lane: Lane,
    /// Namespace of the Lease.
    pub(crate) namespace: String,
    /// Told as the Lease's holder.
    pub(crate) holder: String,
    /// The heartbeat interval; the receiver may change it.
    pub(crate) interval: watch::Receiver<Duration>,
    /// What the watch has seen.
    pub(crate) sightings: Sightings,
    /// Raised to order a rebuild of every watch.
    pub(crate) rebuild: watch::Sender<u64>,
    /// Counters.
    pub(crate) metrics: Metrics,
}

impl Renewer {
    /// See the type.
    pub(crate) async fn run(mut self) {
        let mut failures = 0;
        loop {
            let (begun, before) = (Instant::now(), self.sightings.before());
            let renewed = self.renew().await;
            let missing = renewed.as_ref().is_err_and(|error| error.status() == Some(StatusCode::NOT_FOUND));
            self.sightings.with(|state| state.missing = missing);
            match renewed {
                Ok(version) => failures = self.watch_for(version, before, failures).await,
                Err(error) => {
                    self.metrics.canary_failed.inc();
                    tracing::warn!(error = chain(&error), "The canary's Lease cannot be renewed");
                }
            }
            self.rest(begun).await;
        }
    }

    /// Waits for the rest of the interval, which may change meanwhile: that alone is no reason to write.
    async fn rest(&mut self, begun: Instant) {
        loop {
            let interval = *self.interval.borrow_and_update();
            tokio::select! {
                () = sleep_until(begun + interval) => return,
                Ok(()) = self.interval.changed() => {}
            }
        }
    }

    /// Says how many renewals in a row have not come back.
    async fn watch_for(&self, version: u64, before: u64, failures: u32) -> u32 {
        if self.sightings.renewed(version, before, Instant::now()) == Renewed::Backwards {
            tracing::warn!(version, "Resource versions went back; every watch is rebuilt");
            self.order();
        }
        if timeout(COMES_BACK, self.sightings.comes_back(version)).await.is_ok() {
            return 0;
        }
        let failures = failures.saturating_add(1);
        if failures.is_power_of_two() && failures < RAREST || failures.is_multiple_of(RAREST) {
            tracing::warn!(failures, "The canary did not come back; every watch is rebuilt");
            self.order();
        }
        failures
    }

    fn order(&self) {
        self.metrics.rebuilds.inc();
        self.rebuild.send_modify(|count| *count += 1);
    }

    async fn renew(&self) -> Result<u64, Call> {
        let path =
            format!("{}/{AGENT_OBJECT}?fieldManager=tidewatch-agent", LeaseWatch::collection(&self.namespace).path());
        let now = clock::now();
        // `MicroTime`: exactly six digits, which Timestamp's own form does not promise.
        let patch = json!({"spec": {"holderIdentity": self.holder, "renewTime": format!("{now:.6}")}});
        let answer = self.lane.merge_patch(&path, patch.to_string().into_bytes()).await?;
        let lease: Named = serde_json::from_slice(&answer).map_err(Call::Parse)?;
        let number = lease.metadata.version.parse();
        number.map_err(|_| Call::Parse(serde::de::Error::custom("a resource version that is no number")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_renewal_is_back_when_the_watch_has_told_it_whichever_is_first() {
        let (sightings, start) = (Sightings::default(), Instant::now());
        sightings.watched("5", start);
        assert_eq!(sightings.canary(start), None);
        assert_eq!(sightings.renewed(7, sightings.before(), start), Renewed::Forwards);
        assert_eq!(sightings.canary(start), None);
        assert!(timeout(COMES_BACK, sightings.comes_back(7)).await.is_err());
        sightings.watched("7", start);
        sightings.comes_back(7).await;
        assert_eq!(sightings.canary(start + COMES_BACK), Some(Canary { age_seconds: 10 }));
        sightings.watched("9", start);
        sightings.renewed(9, 9, start + COMES_BACK);
        assert_eq!(sightings.canary(start + COMES_BACK), Some(Canary { age_seconds: 0 }));
    }

    #[test]
    fn a_lower_version_is_a_restored_etcd() {
        let (sightings, now) = (Sightings::default(), Instant::now());
        sightings.watched("50", now);
        assert_eq!(sightings.renewed(40, sightings.before(), now), Renewed::Backwards);
        assert_eq!(sightings.canary(now), None);
        assert_eq!(sightings.renewed(41, sightings.before(), now), Renewed::Forwards);
        sightings.watched("41", now);
        assert!(sightings.canary(now).is_some());
    }

    #[test]
    fn any_watch_that_was_further_tells_of_a_restored_etcd_too() {
        let (sightings, now) = (Sightings::default(), Instant::now());
        let kymas = sightings.enter();
        sightings.watched("50", now);
        kymas.seen("55");
        assert_eq!(sightings.renewed(53, sightings.before(), now), Renewed::Backwards);
        kymas.listed("54");
        assert_eq!(sightings.renewed(56, sightings.before(), now), Renewed::Forwards);
    }

    #[test]
    fn a_bookmark_that_overtakes_a_renewals_answer_is_no_restored_etcd() {
        let (sightings, now) = (Sightings::default(), Instant::now());
        let before = sightings.before();
        sightings.watched("60", now);
        assert_eq!(sightings.renewed(58, before, now), Renewed::Forwards);
        assert!(sightings.canary(now).is_some(), "the watch is past it");
    }

    fn renewer(interval: &watch::Sender<Duration>) -> Renewer {
        Renewer {
            lane: Lane::new(Nobody),
            namespace: String::new(),
            holder: String::new(),
            interval: interval.subscribe(),
            sightings: Sightings::default(),
            rebuild: watch::Sender::new(0),
            metrics: Metrics::default(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_restored_etcd_orders_a_rebuild_and_so_does_a_canary_that_does_not_come_back() {
        let renewer = renewer(&watch::Sender::new(Duration::from_secs(30)));
        let (sightings, ordered) = (renewer.sightings.clone(), renewer.rebuild.subscribe());
        sightings.watched("50", Instant::now());
        let before = sightings.before();
        let comes_back = async { sightings.watched("41", Instant::now()) };
        let (failures, ()) = tokio::join!(renewer.watch_for(40, before, 0), comes_back);
        assert_eq!((failures, *ordered.borrow()), (0, 1), "an older state");
        let mut failures = 0;
        for orders in [2, 3, 3, 4, 4] {
            failures = renewer.watch_for(60, sightings.before(), failures).await;
            assert_eq!(*ordered.borrow(), orders, "nobody saw it come back, {failures} times");
        }
        sightings.watched("60", Instant::now());
        assert_eq!((renewer.watch_for(60, sightings.before(), failures).await, *ordered.borrow()), (0, 4));
    }

    #[tokio::test(start_paused = true)]
    async fn an_interval_that_changes_costs_no_renewal() {
        let interval = watch::Sender::new(Duration::from_secs(30));
        let mut renewer = renewer(&interval);
        let begun = Instant::now();
        let change = async {
            for seconds in [31, 60, 45] {
                tokio::time::sleep(Duration::from_secs(1)).await;
                interval.send_replace(Duration::from_secs(seconds));
            }
        };
        tokio::join!(renewer.rest(begun), change);
        assert_eq!(begun.elapsed(), Duration::from_secs(45));
    }

    struct Nobody;

    impl crate::kubernetes::Transport for Nobody {
        fn send(
            &self,
            _request: http::Request<http_body_util::Full<bytes::Bytes>>,
        ) -> futures::future::BoxFuture<
            'static,
            Result<http::Response<crate::kubernetes::Body>, Box<dyn std::error::Error + Send + Sync>>,
        > {
            Box::pin(async { Err("nobody is there".into()) })
        }
    }
}
