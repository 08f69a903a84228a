//! Fixtures of the gateway's tests: a PKI, a signing agent, a recording intake.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::{HeaderMap, HeaderName, Method, Request, Uri, header, request::Parts};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tidewatch_api::identity::{Epoch, Instance, RuntimeId, TrustDomain};
use tidewatch_contract::{
    certificate::fingerprint,
    event::{BATCH_CONTENT_TYPE, OBJECT_CHANGED},
    exchange::{EVENTS_PATH, EventsResponse, HEARTBEAT_PATH, HeartbeatResponse},
    heartbeat::Heartbeat,
    signature::{CONTENT_DIGEST, Headers, Message, Nonce, SIGNATURE, SIGNATURE_INPUT, Signer},
};
use tidewatch_fleet::{EventBatch, Verified, table::PlacementError};
use tidewatch_kit::{metrics::Registry, tls::Identity};
use tidewatch_trust::{CA_VALIDITY, Ca, RUNTIME_VALIDITY};
use tokio::{sync::broadcast, time::Instant};

use crate::ports::{Departures, Intake, Metrics, Now, Peer, Settings, V3Handler, service::Service as _};

pub(in crate::ports) const NOW: i64 = 1_800_000_000;
pub(in crate::ports) const AUTHORITY: &str = "kcp.test:8443";
pub(in crate::ports) const EPOCH: Epoch = Epoch::new(0xab);

pub(in crate::ports) fn domain() -> TrustDomain {
    "kyma.local".parse().unwrap()
}

pub(in crate::ports) fn at(unix: i64) -> Now {
    Now { unix, instant: Instant::now() }
}

pub(in crate::ports) fn settings() -> Settings {
    let settings = Settings::new("127.0.0.1:0".parse().unwrap(), vec![AUTHORITY.parse().unwrap()], domain());
    // A machine busy with other tests lags, which must not shed requests here.
    Settings { lag_limit: Duration::from_secs(3_600), ..settings }
}

pub(in crate::ports) fn metrics() -> Metrics {
    Metrics::register(&mut Registry::default())
}

pub(in crate::ports) fn ca(now: i64) -> Ca {
    Ca::generate("test root", now, CA_VALIDITY).unwrap()
}

/// An agent that signs requests.
pub(in crate::ports) struct Agent {
    pub(in crate::ports) identity: Identity,
    pub(in crate::ports) runtime: RuntimeId,
    signer: Signer,
}

impl Agent {
    pub(in crate::ports) fn new(ca: &Ca, runtime: &str, now: i64) -> Self {
        let runtime: RuntimeId = runtime.parse().unwrap();
        let identity = ca.make_runtime(&runtime, &domain(), now, RUNTIME_VALIDITY).unwrap().identity().unwrap();
        Self::with(identity, runtime)
    }

    pub(in crate::ports) fn with(identity: Identity, runtime: RuntimeId) -> Self {
        let signer = Signer::new(&identity.key, fingerprint(&identity.chain[0])).unwrap();
        Self { identity, runtime, signer }
    }

    /// A signed request in origin form, as over HTTP/1.1.
    pub(in crate::ports) fn sign(&self, spec: &RequestSpec<'_>) -> Request<Vec<u8>> {
        let RequestSpec { path, content_type, authority, body, epoch, counter, created } = *spec;
        let message = Message { method: "POST", authority, path, content_type };
        let nonce = Nonce { epoch, counter };
        let Headers { content_digest, signature_input, signature } =
            self.signer.sign(&message, body, nonce, created).unwrap();
        Request::post(path)
            .header(header::HOST, authority)
            .header(header::CONTENT_TYPE, content_type)
            .header(CONTENT_DIGEST, content_digest)
            .header(SIGNATURE_INPUT, signature_input)
            .header(SIGNATURE, signature)
            .body(body.to_vec())
            .unwrap()
    }

    /// A batch of one event.
    pub(in crate::ports) fn batch(&self) -> Value {
        json!([{
            "specversion": "1.0", "type": OBJECT_CHANGED, "source": format!("/runtimes/{}", self.runtime),
            "subject": "operator.kyma-project.io/v1beta2/kymas/kyma-system/default", "id": format!("{EPOCH}-1"),
            "sequence": "1", "data": {"watch": "kyma", "manager": "lifecycle-manager", "kind": "Kyma", "uid": "u",
            "resourceVersion": "42", "generation": 3, "change": "spec", "delta": "0000000000000000000000000000000a"}
        }])
    }
}

/// Client of a connection of the event port with this certificate.
pub(in crate::ports) fn peer(handler: &V3Handler<RecordingIntake>, agent: &Agent) -> Peer {
    handler.identify(&agent.identity.chain, None)
}

/// Content of a request to sign.
#[derive(Clone, Copy)]
pub(in crate::ports) struct RequestSpec<'a> {
    pub(in crate::ports) path: &'a str,
    pub(in crate::ports) content_type: &'a str,
    pub(in crate::ports) authority: &'a str,
    pub(in crate::ports) body: &'a [u8],
    pub(in crate::ports) epoch: Epoch,
    pub(in crate::ports) counter: u64,
    pub(in crate::ports) created: i64,
}

impl<'a> RequestSpec<'a> {
    pub(in crate::ports) fn events(body: &'a [u8], counter: u64) -> Self {
        let path = EVENTS_PATH;
        let content_type = BATCH_CONTENT_TYPE;
        Self { path, content_type, authority: AUTHORITY, body, epoch: EPOCH, counter, created: NOW }
    }

    pub(in crate::ports) fn heartbeat(body: &'a [u8], counter: u64) -> Self {
        Self { path: HEARTBEAT_PATH, content_type: "application/json", ..Self::events(body, counter) }
    }
}

pub(in crate::ports) fn heartbeat() -> Value {
    json!({
        "epoch": EPOCH, "sequence": 1, "counter": 1, "waiting": 0, "parked": 0, "agentVersion": "0.1.0",
        "certificate": {"notAfter": "2027-01-01T00:00:00Z", "fingerprint": "00"}, "watches": []
    })
}

/// A single change of a head.
pub(in crate::ports) enum Edit {
    Method(Method),
    Path(&'static str),
    Set(HeaderName, &'static str),
    Add(HeaderName, &'static str),
    Remove(HeaderName),
}

impl Edit {
    pub(in crate::ports) fn apply(self, parts: &mut Parts) {
        let headers: &mut HeaderMap = &mut parts.headers;
        match self {
            Self::Method(method) => parts.method = method,
            Self::Path(path) => parts.uri = Uri::from_static(path),
            Self::Set(name, value) => drop(headers.insert(name, value.parse().unwrap())),
            Self::Add(name, value) => drop(headers.append(name, value.parse().unwrap())),
            Self::Remove(name) => drop(headers.remove(name)),
        }
    }
}

/// Records verified input, or fails with a placement error.
#[derive(Clone, Default)]
pub(in crate::ports) struct RecordingIntake {
    pub(in crate::ports) received: Arc<Mutex<Vec<(String, usize)>>>,
    pub(in crate::ports) unplaced: Option<PlacementError>,
    pub(in crate::ports) unknown: Arc<Mutex<Vec<RuntimeId>>>,
    pub(in crate::ports) lost_connections: Arc<AtomicUsize>,
    pub(in crate::ports) asked: Arc<AtomicUsize>,
    pub(in crate::ports) departures: DepartureSender,
}

/// Sender of departed runtimes.
#[derive(Clone)]
pub(in crate::ports) struct DepartureSender(broadcast::Sender<RuntimeId>);

impl Default for DepartureSender {
    fn default() -> Self {
        Self(broadcast::Sender::new(16))
    }
}

impl RecordingIntake {
    fn record(&self, runtime: &RuntimeId, count: usize) -> Result<(), PlacementError> {
        self.received.lock().push((runtime.to_string(), count));
        self.unplaced.map_or(Ok(()), Err)
    }

    pub(in crate::ports) fn count(&self) -> usize {
        self.received.lock().len()
    }

    /// Number of times that the gateway asked whether a runtime is unknown.
    pub(in crate::ports) fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    /// Reports that a runtime has no Kyma any more.
    pub(in crate::ports) fn depart(&self, runtime: &RuntimeId) {
        self.unknown.lock().push(runtime.clone());
        self.departures.0.send(runtime.clone()).unwrap();
    }

    /// Number of lost connections reported.
    pub(in crate::ports) fn lost_connections(&self) -> usize {
        self.lost_connections.load(Ordering::Relaxed)
    }
}

impl Departures for RecordingIntake {
    fn departures(&self) -> broadcast::Receiver<RuntimeId> {
        self.departures.0.subscribe()
    }

    fn is_unknown(&self, runtime: &RuntimeId) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.unknown.lock().contains(runtime)
    }
}

impl Intake for RecordingIntake {
    fn connection_lost(&self, _: &RuntimeId, since: Instant) {
        assert!(since <= Instant::now());
        self.lost_connections.fetch_add(1, Ordering::Relaxed);
    }

    fn events(&self, batch: Verified<EventBatch>, _: i64) -> Result<EventsResponse, PlacementError> {
        self.record(batch.runtime(), batch.payload().events.len())?;
        Ok(EventsResponse {
            instance: Instance::new(1),
            accepted: 1,
            since: 1,
            settled: BTreeMap::new(),
            refused: Vec::new(),
            heartbeat_seconds: 30,
        })
    }

    fn heartbeat(&self, heartbeat: Verified<Heartbeat>, _: i64) -> Result<HeartbeatResponse, PlacementError> {
        self.record(heartbeat.runtime(), heartbeat.payload().watches.len())?;
        Ok(HeartbeatResponse {
            instance: Instance::new(1),
            settled: BTreeMap::new(),
            since: Some(1),
            heartbeat_seconds: 30,
            plan_revision: None,
            trust_revision: None,
            server_time: "2027-01-01T00:00:00Z".to_owned(),
            resend: Vec::new(),
            renew: false,
        })
    }
}
