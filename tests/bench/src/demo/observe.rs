//! Records the instant at which an object reaches an expected state, by a watch that is established before the act
//! begins.

use std::{fmt::Debug, time::SystemTime};

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::de::DeserializeOwned;
use tidewatch_testing::landscape::DEADLINE;
use tokio::{sync::oneshot, task::JoinHandle, time::timeout};

/// Selects an object by its name.
pub(crate) fn named(name: &str) -> watcher::Config {
    watcher::Config::default().fields(&format!("metadata.name={name}"))
}

/// An established watch.
pub(crate) struct Observer {
    expectation: String,
    reached: JoinHandle<Option<SystemTime>>,
}

impl Observer {
    /// Watches the one object of a selector, and returns once the watch is established.
    pub(crate) async fn establish<K>(
        expectation: &str,
        api: Api<K>,
        selected: watcher::Config,
        expected: impl Fn(Option<&K>) -> bool + Send + 'static,
    ) -> Result<Self>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (ready, established) = oneshot::channel();
        let reached = tokio::spawn(async move {
            let mut stream = watcher(api, selected).default_backoff().boxed();
            let mut ready = Some(ready);
            let mut listed = None;
            while let Some(event) = stream.next().await {
                let holds = match event {
                    Ok(watcher::Event::Apply(object)) => expected(Some(&object)),
                    Ok(watcher::Event::Delete(_)) => expected(None),
                    Ok(watcher::Event::InitApply(object)) => {
                        listed = Some(object);
                        false
                    }
                    Ok(watcher::Event::InitDone) => {
                        if let Some(ready) = ready.take() {
                            let _ = ready.send(());
                        }
                        expected(listed.take().as_ref())
                    }
                    Ok(watcher::Event::Init) | Err(_) => false,
                };
                if holds {
                    return Some(SystemTime::now());
                }
            }
            None
        });
        timeout(DEADLINE, established).await.context("a watch of the demo was not established")??;
        Ok(Self { expectation: expectation.to_owned(), reached })
    }

    /// Waits until the object reaches the expected state.
    pub(crate) async fn reached(self) -> Result<SystemTime> {
        let reached = timeout(DEADLINE, self.reached).await;
        reached
            .with_context(|| format!("timed out after {DEADLINE:?} waiting for {}", self.expectation))??
            .context("a watch of the demo ended")
    }
}
