//! Memory of the least server that keeps connections of agents open: the floor of the receiver's memory per agent.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tidewatch_api::identity::{Epoch, RuntimeId};
use tidewatch_contract::{exchange::EVENTS_PATH, signature::Nonce};
use tidewatch_testing::{
    landscape::now,
    load::{ProtocolState, SignedClient},
    product::memory,
    progress::Step,
};
use tidewatch_trust::RUNTIME_VALIDITY;
use tokio::time::sleep;

use super::{fleet_setup::FleetSetup, plain_server_process::PlainServerProcess};

/// Concurrent handshakes.
const CONCURRENT: usize = 16;
/// Connections before the first reading, which pay for the server's threads and caches.
const WARM_CONNECTIONS: usize = 100;
/// Time until the allocator has returned the memory of the handshakes.
const REST: Duration = Duration::from_secs(10);
const BATCH: &str = "application/cloudevents-batch+json";

/// Memory (PSS) of a [`PlainServerProcess`] for each open connection that has sent one request, in KiB.
pub(super) async fn kib_per_connection(setup: &FleetSetup, connections: usize) -> Result<f64> {
    let step = Step::begin(format!("{connections} connections of a plain server"));
    let plain = PlainServerProcess::start(&setup.landscape, true).await?;
    let reading = async |open: &mut Vec<SignedClient>, to: usize| {
        let more: Vec<_> = stream::iter(open.len()..to)
            .map(|number| connect(setup, &plain, number))
            .buffer_unordered(CONCURRENT)
            .try_collect()
            .await?;
        open.extend(more);
        sleep(REST).await;
        let memory = memory(plain.process()?)?;
        Ok::<_, anyhow::Error>(f64::from(u32::try_from(memory.pss_kib)?))
    };
    let mut open = Vec::new();
    let before = reading(&mut open, WARM_CONNECTIONS).await?;
    let after = reading(&mut open, WARM_CONNECTIONS + connections).await?;
    step.done();
    Ok((after - before) / f64::from(u32::try_from(connections.max(1))?))
}

/// Opens a connection and sends one request over it, as an agent does.
async fn connect(setup: &FleetSetup, plain: &PlainServerProcess, number: usize) -> Result<SignedClient> {
    let landscape = &setup.landscape;
    let ca = setup.landscape.ca();
    let runtime: RuntimeId = format!("{}.plain-{number:05}", landscape.namespace()).parse()?;
    let identity = ca.make_runtime(&runtime, landscape.trust_domain(), now(), RUNTIME_VALIDITY)?.identity()?;
    let mut client = SignedClient::new(&identity, ca.trust_bundle().store()?, plain.address())?;
    let body = ProtocolState::sample_body(runtime, setup.fleet.plan(), 1);
    let nonce = Nonce { epoch: Epoch::new(1), counter: 1 };
    let answer = client.post(EVENTS_PATH, BATCH, body, nonce).await.context("send a request to the plain server")?;
    ensure!(answer.status.is_success(), "the plain server answered {}", answer.status);
    Ok(client)
}
