//! The least cost of an event: watch, sign, send and verify, and nothing else. The floor of the CPU figures of the
//! event path.
//!
//! Its agent is a plain watch that posts one signed event for each change, over mTLS and one after the other; its
//! receiver reads, hashes and verifies, in a process of its own. Neither keeps state, decides, or notifies. Both run at
//! the rhythm of the same writes, beside the product: at a few changes per second most of the cost is cold caches and
//! thread wake-ups, in every implementation. The agent's floor is slightly too low: its thread finds caches warm that
//! the user's client, in the same process, has just used.

use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use futures::{StreamExt as _, stream::BoxStream};
use kube::{
    Api,
    core::PartialObjectMeta,
    runtime::{WatchStreamExt as _, watcher},
};
use tidewatch_api::{
    Kyma, Watcher,
    identity::Epoch,
    names::{SKR_KYMA, SKR_NAMESPACE},
};
use tidewatch_contract::{exchange::EVENTS_PATH, signature::Nonce};
use tidewatch_installer::watcher::plan;
use tidewatch_testing::{
    landscape::{now, until},
    load::{ProtocolState, SignedClient, THREADS},
    product::cpu_by_thread,
};
use tokio::runtime;

use super::{Settings, figure::millis, plain_server_process::PlainServerProcess, runtime_setup::RuntimeSetup, writer};

/// Name of the thread that watches and sends.
const SENDER: &str = "plain-agent";
const BATCH: &str = "application/cloudevents-batch+json";

/// CPU time of one event, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Floor {
    pub(super) agent: f64,
    pub(super) gateway: f64,
}

/// Measures it over the writes of one run.
pub(super) async fn measure(setup: &RuntimeSetup, settings: &Settings) -> Result<Floor> {
    let plain = PlainServerProcess::start(&setup.landscape, true).await?;
    let (signed_client, body) = client_and_body(setup, &plain)?;
    let sent = Arc::new(AtomicU32::new(0));
    let threads = runtime::Builder::new_multi_thread().worker_threads(1).thread_name(SENDER).enable_all().build()?;
    let cluster = setup.runtime.cluster().clone();
    let counter = sent.clone();
    threads.spawn(async move {
        // A client of its own, whose connection is driven by its own thread.
        let Ok(client) = cluster.client().await else { return };
        send(changes(client), signed_client, body, &counter).await;
    });
    let measured = rounds(setup, settings, &sent, plain.process()?).await;
    // Waiting for threads is not allowed inside a task.
    threads.shutdown_background();
    measured
}

async fn rounds(setup: &RuntimeSetup, settings: &Settings, sent: &AtomicU32, server: u32) -> Result<Floor> {
    let reach = async |count: u32| {
        until("the plain agent to send", async || Ok((sent.load(Ordering::Relaxed) >= count).then_some(()))).await
    };
    // The first event is the object's current state.
    reach(1).await?;
    writer::toggle(&setup.runtime, settings.rate, settings.pause()).await?;
    reach(1 + settings.rate).await?;
    let spent = || {
        let of = |process, name| {
            let threads = cpu_by_thread(process)?;
            threads.get(name).copied().map(millis).with_context(|| format!("no thread {name}"))
        };
        Ok::<_, anyhow::Error>(Floor { agent: of(process::id(), SENDER)?, gateway: of(server, THREADS)? })
    };
    let before = spent()?;
    let begun = sent.load(Ordering::Relaxed);
    let writes = writer::toggle(&setup.runtime, settings.writes(), settings.pause()).await?;
    let count = u32::try_from(writes.len())?;
    reach(begun + count).await?;
    let after = spent()?;
    let each = |spent: f64| spent / f64::from(count.max(1));
    Ok(Floor { agent: each(after.agent - before.agent), gateway: each(after.gateway - before.gateway) })
}

fn changes(client: kube::Client) -> BoxStream<'static, watcher::Result<PartialObjectMeta<Kyma>>> {
    let api = Api::<PartialObjectMeta<Kyma>>::namespaced(client, SKR_NAMESPACE);
    let config = watcher::Config::default().fields(&format!("metadata.name={SKR_KYMA}"));
    watcher(api, config).default_backoff().applied_objects().boxed()
}

/// Sends one event for each change. Ends with the watch.
async fn send(
    mut changes: BoxStream<'static, watcher::Result<PartialObjectMeta<Kyma>>>,
    mut signed_client: SignedClient,
    body: Bytes,
    sent: &AtomicU32,
) {
    let mut counter = 0;
    while let Some(change) = changes.next().await {
        counter += 1;
        let nonce = Nonce { epoch: Epoch::new(1), counter };
        if change.is_ok()
            && signed_client
                .post(EVENTS_PATH, BATCH, body.clone(), nonce)
                .await
                .is_ok_and(|answer| answer.status.is_success())
        {
            sent.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A client with the runtime's identity, and its request body, as its agent would send it.
fn client_and_body(setup: &RuntimeSetup, plain: &PlainServerProcess) -> Result<(SignedClient, Bytes)> {
    let runtime = setup.runtime.id();
    let landscape = &setup.landscape;
    let ca = landscape.ca();
    let validity = tidewatch_trust::RUNTIME_VALIDITY;
    let identity = ca.make_runtime(runtime, landscape.trust_domain(), now(), validity)?.identity()?;
    let signed_client = SignedClient::new(&identity, ca.trust_bundle().store()?, plain.address())?;
    let (plan, ..) = plan::<Arc<Watcher>>(Vec::new(), &[]);
    Ok((signed_client, ProtocolState::sample_body(runtime.clone(), &plan, 1)))
}
