//! The control plane: an API server with the Leases, and a network between it and each replica that delays, cuts and loses
//! messages. A request that has left its replica arrives even if that one stops or dies.

use std::{sync::Arc, time::Duration};

use futures::StreamExt as _;
use http::{Method, Request};
use http_body_util::{BodyExt as _, BodyStream, StreamBody};
use jiff::SignedDuration;
use k8s_openapi::api::coordination::v1::Lease;
use kube::client::Body;
use parking_lot::{Mutex, MutexGuard};
use tidewatch_api::leases;
use tidewatch_testing::fake::{Answer, FakeCluster};
use tokio::{
    sync::{mpsc, oneshot},
    time::sleep,
};

use super::{NAMESPACE, Rng, TICK, shards};

/// State of the network between a replica and the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KcpNetwork {
    Healthy,
    /// Nothing passes.
    Cut,
    /// Requests pass, no responses.
    LostResponses,
    /// All but the lines of watches pass.
    CutWatches,
}

/// Network between one replica and the control plane.
struct Network {
    state: KcpNetwork,
    max_latency: Duration,
    /// Error of the replica's wall clock.
    clock_error: SignedDuration,
    /// Leases that were written with such an error.
    written_with_error: u64,
    rng: Rng,
}

/// The network of one replica, and its wall clock, which only the Leases that it writes show to others. Clones share it.
#[derive(Clone)]
pub(crate) struct KcpLink(Arc<Mutex<Network>>);

impl KcpLink {
    pub(crate) fn new(seed: u64) -> Self {
        let network = Network {
            state: KcpNetwork::Healthy,
            max_latency: MAX_LATENCY,
            clock_error: SignedDuration::ZERO,
            written_with_error: 0,
            rng: Rng(seed),
        };
        Self(Arc::new(Mutex::new(network)))
    }

    fn network(&self) -> MutexGuard<'_, Network> {
        self.0.lock()
    }

    pub(crate) fn set(&self, state: KcpNetwork) {
        self.network().state = state;
    }

    pub(crate) fn set_max_latency(&self, latency: Duration) {
        self.network().max_latency = latency;
    }

    pub(crate) fn repair(&self) {
        self.set(KcpNetwork::Healthy);
        self.set_max_latency(MAX_LATENCY);
    }

    /// Sets the replica's wall clock forward, or back. Nothing repairs it.
    pub(crate) fn jump(&self, by: SignedDuration) {
        self.network().clock_error += by;
    }

    /// Leases that the replica wrote with a wrong time.
    pub(crate) fn written_with_error(&self) -> u64 {
        self.network().written_with_error
    }

    /// The request as the replica sends it with its wall clock.
    async fn timed(&self, request: Request<Body>) -> Request<Body> {
        let error = self.network().clock_error;
        if error.is_zero() || request.method() != Method::PUT {
            return request;
        }
        let (head, body) = request.into_parts();
        let mut lease: Lease = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
        if let Some(time) = lease.spec.as_mut().and_then(|spec| spec.renew_time.as_mut()) {
            time.0 += error;
            self.network().written_with_error += 1;
        }
        Request::from_parts(head, serde_json::to_vec(&lease).unwrap().into())
    }

    /// Waits for the latency of one message.
    async fn delay(&self) {
        let latency = {
            let mut network = self.network();
            let max = u64::try_from(network.max_latency.as_millis()).unwrap();
            // Hosts run one after the other for one tick, so a shorter one could reach the past.
            TICK + network.rng.millis(max)
        };
        sleep(latency).await;
    }

    fn is(&self, states: &[KcpNetwork]) -> bool {
        states.contains(&self.network().state)
    }

    /// Delays the lines of a watch, in their order, and retains them while nothing passes.
    fn lines(&self, response: Answer) -> Answer {
        let link = self.clone();
        response.map(|body| {
            let frames = BodyStream::new(body).map(move |frame| {
                let link = link.clone();
                async move {
                    link.delay().await;
                    while link.is(&[KcpNetwork::Cut, KcpNetwork::LostResponses, KcpNetwork::CutWatches]) {
                        sleep(TICK).await;
                    }
                    frame
                }
            });
            StreamBody::new(frames.buffered(LINES_IN_FLIGHT)).boxed_unsync()
        })
    }
}

const MAX_LATENCY: Duration = Duration::from_millis(50);
/// Lines of a watch on their way at most.
const LINES_IN_FLIGHT: usize = 64;
/// Longest wait of a client for a response that was lost.
const GIVE_UP: Duration = Duration::from_secs(60);

/// A request on its way.
struct Sent {
    link: KcpLink,
    request: Request<Body>,
    response: oneshot::Sender<Answer>,
}

/// The control plane. Clones refer to the same one.
#[derive(Clone)]
pub(crate) struct ControlPlane(Arc<Inner>);

struct Inner {
    cluster: FakeCluster,
    requests: mpsc::UnboundedSender<Sent>,
    /// Taken by the host that serves.
    arriving: Mutex<Option<mpsc::UnboundedReceiver<Sent>>>,
}

impl ControlPlane {
    /// A control plane with the Leases of an installation.
    pub(crate) fn new() -> Self {
        let (requests, arriving) = mpsc::unbounded_channel();
        let cluster = FakeCluster::in_memory();
        for lease in leases::objects(NAMESPACE, shards()) {
            let key = format!("coordination.k8s.io/leases/{NAMESPACE}/{}", lease.metadata.name.as_deref().unwrap());
            cluster.edit(&key, |object| *object = serde_json::to_value(&lease).unwrap());
        }
        Self(Arc::new(Inner { cluster, requests, arriving: Mutex::new(Some(arriving)) }))
    }

    /// A client of a replica.
    pub(crate) fn client(&self, link: &KcpLink) -> kube::Client {
        let requests = self.0.requests.clone();
        let link = link.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let requests = requests.clone();
            let link = link.clone();
            async move {
                let request = link.timed(request).await;
                let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
                let (sender, response) = oneshot::channel();
                let _ = requests.send(Sent { link: link.clone(), request, response: sender });
                let response = response.await.map_err(|_| std::io::Error::from(std::io::ErrorKind::ConnectionReset))?;
                Ok::<_, std::io::Error>(if is_watch { link.lines(response) } else { response })
            }
        });
        kube::Client::new(service, NAMESPACE)
    }

    /// Serves for ever.
    pub(crate) async fn run(self) -> turmoil::Result {
        let mut arriving = self.0.arriving.lock().take().unwrap();
        while let Some(Sent { link, request, response }) = arriving.recv().await {
            let cluster = self.0.cluster.clone();
            tokio::spawn(async move {
                link.delay().await;
                let mut is_lost = link.is(&[KcpNetwork::Cut]);
                if !is_lost {
                    let answer = cluster.respond(request).await;
                    link.delay().await;
                    is_lost = link.is(&[KcpNetwork::Cut, KcpNetwork::LostResponses]);
                    if !is_lost {
                        let _ = response.send(answer);
                        return;
                    }
                }
                sleep(GIVE_UP).await;
                drop(response);
            });
        }
        Ok(())
    }
}
