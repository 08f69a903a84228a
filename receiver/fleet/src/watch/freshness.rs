//! Age of the caches: the time since the API server last confirmed that a cache is current.
//!
//! A complete list confirms it, each event or bookmark of its watch, and the orderly end of a watch, which the server
//! ends within five minutes. A list that stands still or breaks, or a watch that the server accepts and never answers, confirms
//! nothing.

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use bytes::Bytes;
use http::Request;
use http_body::Body;
use http_body_util::BodyExt as _;
use kube::{Client, client};
use parking_lot::Mutex;
use tidewatch_cluster::{
    Metrics,
    body_deadline::{DeadlinePerPart, is_watch},
};
use tidewatch_kit::{
    metrics::KindLabel,
    readiness::{Pending, Readiness},
};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tower::{BoxError, service_fn};

use super::initial_list;
use crate::recorder::{EventRecorder, PendingEvent, Regarding};

/// Age beyond which a cache is stale: a watch ends after 290 s, and a new one is open within a minute.
pub(crate) const STALE_AFTER: Duration = Duration::from_secs(360);
/// Interval of the checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Time of the last confirmation of one cache. Clones share it.
#[derive(Clone, Debug)]
pub struct Freshness(Arc<Mutex<Instant>>);

impl Freshness {
    /// The cache counts as confirmed now, so that its first list has time.
    #[expect(clippy::new_without_default, reason = "it begins now")]
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    pub(super) fn confirm(&self) {
        *self.0.lock() = Instant::now();
    }

    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.0.lock())
    }

    /// Returns a client of one cache, whose watches confirm it, and which requests a plain list for a streamed one.
    pub fn observe(&self, client: Client) -> Client {
        let namespace = client.default_namespace().to_owned();
        let freshness = self.clone();
        let service = service_fn(move |mut request: Request<client::Body>| {
            let client = client.clone();
            let freshness = freshness.clone();
            async move {
                let watches = is_watch(request.uri());
                let lists = initial_list::request_list(request.uri_mut());
                if lists {
                    request.extensions_mut().insert(DeadlinePerPart);
                }
                let response = client.send(request).await?;
                let is_success = response.status().is_success();
                Ok::<_, kube::Error>(response.map(|body| match (is_success, lists, watches) {
                    (true, true, _) => initial_list::events(body).boxed_unsync(),
                    (true, false, true) => freshness.confirmed_by(body).boxed_unsync(),
                    (false, ..) | (true, false, false) => body.map_err(Into::into).boxed_unsync(),
                }))
            }
        });
        Client::new(service, namespace)
    }

    /// Lets each frame of a watch confirm the cache, and its orderly end.
    fn confirmed_by(self, watch: client::Body) -> impl Body<Data = Bytes, Error = BoxError> {
        let freshness = self.clone();
        // Trailers are polled once the body has ended in order.
        let end = poll_fn(move |_| {
            freshness.confirm();
            Poll::Ready(None)
        });
        watch.map_err(Into::into).inspect_frame(move |_| self.confirm()).with_trailers(end)
    }
}

/// Monitor of all caches: shows their ages, and reports a stale one in the readiness, the log and an Event.
pub struct CacheMonitor {
    caches: Vec<MonitoredCache>,
    readiness: Readiness,
    metrics: Metrics,
    recorder: EventRecorder,
    /// Lease of the receiver, which the Events regard.
    lease: Regarding,
}

struct MonitoredCache {
    kind: &'static str,
    freshness: Freshness,
    /// Held while the cache is stale.
    stale: Option<Pending>,
}

impl CacheMonitor {
    /// A monitor without caches; its Events regard this Lease.
    pub fn new(readiness: &Readiness, metrics: Metrics, recorder: EventRecorder, lease: Regarding) -> Self {
        Self { caches: Vec::new(), readiness: readiness.clone(), metrics, recorder, lease }
    }

    /// Adds the cache of a kind.
    pub fn add(&mut self, kind: &'static str, freshness: Freshness) {
        self.caches.push(MonitoredCache { kind, freshness, stale: None });
    }

    /// Checks all caches, forever.
    pub async fn run(mut self) -> &'static str {
        let mut ticks = interval(CHECK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.check(ticks.tick().await);
        }
    }

    fn check(&mut self, now: Instant) {
        for MonitoredCache { kind, freshness, stale } in &mut self.caches {
            let age = freshness.age(now);
            self.metrics.age.get_or_create(&KindLabel { kind }).set(age.as_secs_f64());
            let (reason, note) = match (stale.is_some(), age > STALE_AFTER) {
                (false, true) => {
                    *stale = Some(self.readiness.pending(kind));
                    tracing::error!(kind, seconds = age.as_secs(), "Cache is stale");
                    ("CacheStale", format!("the API server has confirmed no {kind} for {} s", STALE_AFTER.as_secs()))
                }
                (true, false) => {
                    *stale = None;
                    tracing::info!(kind, "Cache is current again");
                    ("CacheCurrent", format!("the cache of {kind} is current again"))
                }
                (false, false) | (true, true) => continue,
            };
            let regarding = self.lease.clone();
            let warning = stale.is_some();
            self.recorder.publish(vec![PendingEvent { regarding, warning, reason, note }]);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use http::Response;
    use http_body::Frame;
    use http_body_util::StreamBody;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::{
        Api,
        api::{WatchEvent, WatchParams},
    };
    use tidewatch_kit::metrics::Registry;

    use super::*;
    use crate::recorder;

    const S: Duration = Duration::from_secs(1);

    struct Fixture {
        registry: Registry,
        readiness: Readiness,
        kymas: Freshness,
        monitor: CacheMonitor,
    }

    impl Fixture {
        fn new() -> Self {
            let mut registry = Registry::default();
            let metrics = Metrics::register(&mut registry);
            let events = recorder::Metrics::register(&mut registry);
            let readiness = Readiness::default();
            let kymas = Freshness::new();
            let lease = Regarding::lease("kcp-system");
            let mut monitor = CacheMonitor::new(&readiness, metrics, EventRecorder::new(events), lease);
            monitor.add("kymas", kymas.clone());
            monitor.add("secrets", Freshness::new());
            Self { registry, readiness, kymas, monitor }
        }

        fn assert_metrics(&self, lines: &[&str]) {
            let page = self.registry.encode().unwrap();
            assert!(lines.iter().all(|line| page.contains(line)), "{page}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn stale_cache_shows_in_readiness_metric_and_one_event() {
        let mut fixture = Fixture::new();
        let start = Instant::now();
        fixture.monitor.check(start + STALE_AFTER);
        assert!(fixture.readiness.missing().is_empty());
        tokio::time::advance(300 * S).await;
        fixture.kymas.confirm();
        for second in 361..380 {
            fixture.monitor.check(start + second * S);
        }
        assert_eq!(fixture.readiness.missing(), ["secrets"]);
        fixture.assert_metrics(&[
            r#"kcp_cache_age_seconds{kind="secrets"} 379"#,
            r#"kcp_cache_age_seconds{kind="kymas"} 79"#,
            "kubernetes_events_waiting 1",
        ]);
        tokio::time::advance(100 * S).await;
        fixture.monitor.caches[1].freshness.confirm();
        fixture.monitor.check(Instant::now());
        assert!(fixture.readiness.missing().is_empty());
        fixture.assert_metrics(&["kubernetes_events_waiting 2"]);
    }

    #[tokio::test(start_paused = true)]
    async fn list_that_breaks_confirms_nothing() {
        let server = service_fn(|_: Request<client::Body>| {
            let head = r#"{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"6"},"items":["#;
            let object = r#"{"metadata":{"name":"a","namespace":"n","resourceVersion":"5"}},"#;
            let frames = [head, object].map(|text| Ok::<_, std::io::Error>(Frame::data(Bytes::from(text))));
            let body = StreamBody::new(futures::stream::iter(frames));
            std::future::ready(Ok::<_, BoxError>(Response::new(body)))
        });
        let freshness = Freshness::new();
        let maps: Api<ConfigMap> = Api::namespaced(freshness.observe(Client::new(server, "n")), "n");
        tokio::time::advance(S).await;
        let params = WatchParams::default().initial_events();
        let events: Vec<_> = maps.watch(&params, "0").await.unwrap().collect().await;
        let is_error = |event: &kube::Result<WatchEvent<ConfigMap>>| matches!(event, Ok(WatchEvent::Error(_)) | Err(_));
        assert!(events.len() == 2 && is_error(&events[1]), "{events:?}");
        assert_eq!(freshness.age(Instant::now()), S);
    }

    #[tokio::test(start_paused = true)]
    async fn watch_confirms_by_events_and_its_orderly_end_and_a_list_or_silence_does_not() {
        let (body, frames) = futures::channel::mpsc::unbounded::<std::io::Result<Frame<Bytes>>>();
        let frames = Mutex::new(Some(frames));
        let server = service_fn(move |request: Request<client::Body>| {
            let body = match frames.lock().take_if(|_| is_watch(request.uri())) {
                Some(frames) => frames.boxed(),
                None => futures::stream::pending().boxed(),
            };
            std::future::ready(Ok::<_, BoxError>(Response::new(StreamBody::new(body))))
        });
        let freshness = Freshness::new();
        let maps: Api<ConfigMap> = Api::namespaced(freshness.observe(Client::new(server, "n")), "n");
        let mut events = maps.watch(&WatchParams::default(), "1").await.unwrap().boxed();
        let age = || freshness.age(Instant::now());
        assert!(futures::poll!(events.next()).is_pending());
        tokio::time::advance(S).await;
        assert_eq!(age(), S, "the head of the response confirms nothing");
        let bookmark =
            r#"{"type":"BOOKMARK","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"resourceVersion":"2"}}}"#;
        body.unbounded_send(Ok(Frame::data(Bytes::from(format!("{bookmark}\n"))))).unwrap();
        events.next().await.unwrap().unwrap();
        assert_eq!(age(), Duration::ZERO);
        tokio::time::advance(S).await;
        drop(body);
        assert!(events.next().await.is_none());
        assert_eq!(age(), Duration::ZERO);
        tokio::time::advance(S).await;
        assert!(tokio::time::timeout(S, maps.list(&Default::default())).await.is_err(), "the list stands still");
        assert_eq!(age(), 2 * S);
    }
}
