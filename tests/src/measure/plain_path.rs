//! What an event costs whoever watches, signs, sends and verifies, and does nothing else: the floor of the CPU figures of the event
//! path.
//!
//! Its agent is a plain watch that posts one signed event for each change, over mTLS and one after the other; its receiver reads,
//! hashes and verifies, in a process of its own. It remembers nothing, decides nothing, and tells nobody. Both run at the rhythm of the
//! same writes, beside the product: at some changes a second it is mostly cold caches and wakes of threads that are paid for, by
//! everybody. The agent's floor is a little too low: its thread finds warm what the user's client, in the same process, has just used.

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
use tidewatch_receiver::watcher::plan;
use tidewatch_shared::{
    api::{Kyma, Watcher},
    exchange::EVENTS_PATH,
    identity::Epoch,
    names::{SKR_KYMA, SKR_NAMESPACE},
    signature::Nonce,
};
use tokio::runtime;

use super::{Settings, apart::Apart, figure::millis, setting::Setting, writer};
use crate::{
    landscape::{now, until},
    load::{Contract, THREADS, Voice},
    product::cpu_by_thread,
};

/// The name of the thread that watches and sends.
const SENDER: &str = "plain-agent";
const BATCH: &str = "application/cloudevents-batch+json";

/// CPU time of one event, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Floor {
    pub(super) agent: f64,
    pub(super) gateway: f64,
}

/// Measures it over one run's writes.
pub(super) async fn measure(setting: &Setting, settings: &Settings) -> Result<Floor> {
    let plain = Apart::start(&setting.landscape).await?;
    let (voice, body) = speaker(setting, &plain)?;
    let sent = Arc::new(AtomicU32::new(0));
    let threads = runtime::Builder::new_multi_thread().worker_threads(1).thread_name(SENDER).enable_all().build()?;
    let cluster = setting.runtime.cluster().clone();
    let counter = sent.clone();
    threads.spawn(async move {
        // Its own client, whose connection is driven by its own thread.
        let Ok(client) = cluster.client().await else { return };
        send(changes(client), voice, body, &counter).await;
    });
    let measured = rounds(setting, settings, &sent, plain.process()?).await;
    // To wait for threads is not allowed inside a task.
    threads.shutdown_background();
    measured
}

async fn rounds(setting: &Setting, settings: &Settings, sent: &AtomicU32, server: u32) -> Result<Floor> {
    let reach = async |count: u32| {
        until("the plain agent to send", async || Ok((sent.load(Ordering::Relaxed) >= count).then_some(()))).await
    };
    // The object as it stands is the first that it tells.
    reach(1).await?;
    writer::toggle(&setting.runtime, settings.rate, settings.pause()).await?;
    reach(1 + settings.rate).await?;
    let spent = || {
        let of = |process, name| {
            let threads = cpu_by_thread(process)?;
            threads.get(name).copied().map(millis).with_context(|| format!("no thread {name}"))
        };
        Ok::<_, anyhow::Error>(Floor { agent: of(process::id(), SENDER)?, gateway: of(server, THREADS)? })
    };
    let (before, begun) = (spent()?, sent.load(Ordering::Relaxed));
    let writes = writer::toggle(&setting.runtime, settings.writes(), settings.pause()).await?;
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

/// Sends one event for each change. Ends when the watch does.
async fn send(
    mut changes: BoxStream<'static, watcher::Result<PartialObjectMeta<Kyma>>>,
    mut voice: Voice,
    body: Bytes,
    sent: &AtomicU32,
) {
    let mut counter = 0;
    while let Some(change) = changes.next().await {
        counter += 1;
        let nonce = Nonce { epoch: Epoch::new(1), counter };
        if change.is_ok()
            && voice.post(EVENTS_PATH, BATCH, body.clone(), nonce).await.is_ok_and(|answer| answer.status.is_success())
        {
            sent.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A voice with the runtime's identity, and what it says: a body as its agent would send it.
fn speaker(setting: &Setting, plain: &Apart) -> Result<(Voice, Bytes)> {
    let (runtime, landscape) = (setting.runtime.id(), &setting.landscape);
    let ca = landscape.ca();
    let validity = tidewatch_receiver::pki::RUNTIME_VALIDITY;
    let identity = ca.make_runtime(runtime, landscape.trust_domain(), now(), validity)?.identity()?;
    let voice = Voice::new(&identity, ca.trust_bundle().store()?, plain.address())?;
    let (plan, _) = plan::<Arc<Watcher>>(&[]);
    Ok((voice, Contract::sample(runtime.clone(), &plan, 1)))
}
