//! The least that a further process between agent and holder costs: one exchange over an open HTTP/2 connection with mutual TLS,
//! at the rate of the requests, with a server in a process of its own that reads each request and answers it.

use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::Request;
use tidewatch_testing::{landscape::now, load::SignedClient};
use tidewatch_trust::RUNTIME_VALIDITY;
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval},
};

use super::{
    super::{
        figure::{cpu_of, millis},
        plain_server_process::PlainServerProcess,
    },
    number,
    setup::ReplicaSetup,
};

/// Bytes of a body, about those of a request with one event.
const BODY: [u8; 1_024] = [b'x'; 1_024];
/// Bytes of a header field, about those of a certificate in base64.
const FIELD: usize = 1_200;

/// Cost of a hop.
pub(super) struct Hop {
    /// Times of the exchanges in milliseconds.
    pub(super) times: Vec<f64>,
    /// CPU time of the server per exchange in milliseconds.
    pub(super) server: f64,
}

/// Measures it with a client in this process: one exchange in each interval.
pub(super) async fn measure(setup: &ReplicaSetup, pause: Duration, duration: Duration) -> Result<Hop> {
    let landscape = &setup.landscape;
    let member = setup.fleet.members().first().context("no runtime")?;
    let plain = PlainServerProcess::start(landscape, false).await?;
    let ca = landscape.ca();
    let identity = ca.make_runtime(member.id(), landscape.trust_domain(), now(), RUNTIME_VALIDITY)?.identity()?;
    let client = SignedClient::new(&identity, ca.trust_bundle().store()?, plain.address())?;
    let stream = client.connect_http2(plain.address()).await?;
    let (sender, connection) = h2::client::handshake(stream).await?;
    let mut connections = JoinSet::new();
    connections.spawn(connection);

    let uri = format!("https://{}/", plain.address());
    let field = "x".repeat(FIELD);
    let exchange = || {
        let sender = sender.clone();
        let uri = uri.clone();
        let field = field.clone();
        async move {
            let request = Request::post(uri).header("x-field", field).body(())?;
            let begun = Instant::now();
            let (response, mut body) = sender.ready().await?.send_request(request, false)?;
            body.send_data(Bytes::from_static(&BODY), true)?;
            let mut response = response.await?.into_body();
            while let Some(part) = response.data().await {
                response.flow_control().release_capacity(part?.len())?;
            }
            Ok::<_, anyhow::Error>(millis(begun.elapsed()))
        }
    };
    let mut ticks = interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let cpu = cpu_of(plain.process()?)?;
    let end = Instant::now() + duration;
    let mut exchanges = JoinSet::new();
    while ticks.tick().await < end {
        exchanges.spawn(exchange());
    }
    let times = exchanges.join_all().await.into_iter().collect::<Result<Vec<_>>>()?;
    let server = (cpu_of(plain.process()?)? - cpu) * 1e3 / number(times.len()).max(1.0);
    Ok(Hop { times, server })
}
