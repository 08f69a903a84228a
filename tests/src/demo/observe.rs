//! Sees at which instant an object comes to be as expected, by a watch of its own that stands before the act begins.

use std::{fmt::Debug, time::SystemTime};

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::de::DeserializeOwned;
use tokio::{sync::oneshot, task::JoinHandle, time::timeout};

use crate::landscape::DEADLINE;

/// Selects an object by its name.
pub(super) fn named(name: &str) -> watcher::Config {
    watcher::Config::default().fields(&format!("metadata.name={name}"))
}

/// A standing watch.
pub(super) struct Observer {
    what: String,
    seen: JoinHandle<Option<SystemTime>>,
}

impl Observer {
    /// Watches the one object that a selector selects, and returns once the watch stands.
    pub(super) async fn stand<K>(
        what: &str,
        api: Api<K>,
        selected: watcher::Config,
        expected: impl Fn(Option<&K>) -> bool + Send + 'static,
    ) -> Result<Self>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (stands, standing) = oneshot::channel();
        let seen = tokio::spawn(async move {
            let mut stream = watcher(api, selected).default_backoff().boxed();
            let (mut stands, mut listed) = (Some(stands), None);
            while let Some(event) = stream.next().await {
                let holds = match event {
                    Ok(watcher::Event::Apply(object)) => expected(Some(&object)),
                    Ok(watcher::Event::Delete(_)) => expected(None),
                    Ok(watcher::Event::InitApply(object)) => {
                        listed = Some(object);
                        false
                    }
                    Ok(watcher::Event::InitDone) => {
                        if let Some(stands) = stands.take() {
                            let _ = stands.send(());
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
        timeout(DEADLINE, standing).await.context("a watch of the demo did not stand")??;
        Ok(Self { what: what.to_owned(), seen })
    }

    /// Waits until the object was as expected.
    pub(super) async fn seen(self) -> Result<SystemTime> {
        let seen = timeout(DEADLINE, self.seen).await;
        seen.with_context(|| format!("waited {DEADLINE:?} in vain for: {}", self.what))??
            .context("a watch of the demo ended")
    }
}
