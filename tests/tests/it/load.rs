//! A load of changes by a runtime's user, while other things happen; and what must have come of it in the end.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;
use tidewatch_shared::{
    api::Kyma,
    names::{SKR_KYMA, SKR_NAMESPACE},
};
use tidewatch_tests::{
    demo::stamps,
    landscape::{
        DEADLINE, until,
        watchers::{WATCHED, watcher},
    },
};
use tokio::{sync::watch, task::JoinHandle, time::timeout};

use crate::support::{One, module};

/// The module that the load selects and deselects.
pub(crate) const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

const NAME: &str = "load";
/// Changes of a load that nobody ends.
const MOST: usize = 5_000;
/// ConfigMaps that the load writes to, in turns.
const OBJECTS: usize = 12;
/// A write that is not answered for so long is done again.
const WRITE: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(50);

/// Changes that are being made, one after the other, each until the API server has taken it: some of the Kyma's modules and labels,
/// most of ConfigMaps under a Watcher, which come, change, lose and get their label, and go.
pub(crate) struct Load {
    progress: watch::Receiver<usize>,
    /// Ends it before it has made all.
    stop: Arc<AtomicBool>,
    task: JoinHandle<Result<Made>>,
}

/// What the load has made.
pub(crate) struct Made {
    /// When each ConfigMap was last written, by name.
    written: BTreeMap<String, SystemTime>,
    /// Whether the module is selected.
    selected: bool,
}

struct User {
    maps: Api<ConfigMap>,
    kymas: Api<Kyma>,
    made: Made,
}

/// Has the ConfigMaps of the load watched, and waits until they are.
pub(crate) async fn watch_objects(one: &One) -> Result<()> {
    one.runtime.grant_agent("", "configmaps").await?;
    one.landscape.write_watcher(&watcher(NAME, ("", "v1", "configmaps"), "spec")).await?;
    one.listed(&one.landscape.watch_of(NAME), SystemTime::UNIX_EPOCH).await
}

impl Load {
    /// Starts changes with a pause after each, until [`Load::arrives`].
    pub(crate) fn start(one: &One, pause: Duration) -> Self {
        Self::spawn(one, MOST, pause)
    }

    /// Makes so many changes without a fault between them, and compares.
    pub(crate) async fn run(one: &One, changes: usize, pause: Duration) -> Result<()> {
        Self::spawn(one, changes, pause).compare(one).await
    }

    fn spawn(one: &One, changes: usize, pause: Duration) -> Self {
        let user = one.runtime.user();
        let made = Made { written: BTreeMap::new(), selected: false };
        let mut user =
            User { maps: Api::namespaced(user.clone(), "default"), kymas: Api::namespaced(user, SKR_NAMESPACE), made };
        let (said, progress) = watch::channel(0);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            for number in (0..changes).take_while(|_| !stopped.load(Ordering::Relaxed)) {
                user.make(number).await?;
                said.send_replace(number + 1);
                tokio::time::sleep(pause).await;
            }
            Ok(user.made)
        });
        Self { progress, stop, task }
    }

    /// Waits until so many more changes are made.
    pub(crate) async fn goes_on(&mut self, changes: usize) -> Result<()> {
        let target = *self.progress.borrow() + changes;
        let reached = self.progress.wait_for(|made| *made >= target).await.map(|made| *made);
        reached.map(drop).context("the load ended before")
    }

    /// Ends it, waits until nothing is open on either side, and compares.
    pub(crate) async fn arrives(self, one: &One) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.compare(one).await
    }

    async fn compare(self, one: &One) -> Result<()> {
        let made = self.task.await??;
        made.told(one).await?;
        one.in_sync().await?;
        one.skr_status("the last choice of modules", |status| module(status, KEDA.0).is_some() == made.selected)
            .await?;
        // All is settled, and settled means that it is there.
        assert_eq!(one.manifests().await?.len(), usize::from(made.selected), "Manifests of the last choice");
        one.in_sync().await?;
        one.nothing_was_odd().await
    }
}

impl User {
    /// Makes a change, again and again until the API server says that it took it.
    async fn make(&mut self, number: usize) -> Result<()> {
        let begun = Instant::now();
        loop {
            let outcome = timeout(WRITE, self.change(number)).await.context("no answer to a write").flatten();
            match outcome {
                Err(error) if begun.elapsed() > DEADLINE => return Err(error.context(format!("change {number}"))),
                Err(_) => tokio::time::sleep(AGAIN).await,
                Ok(()) => return Ok(()),
            }
        }
    }

    /// May be repeated when it is not known whether it was made.
    async fn change(&mut self, number: usize) -> Result<()> {
        let (turn, round) = (number % OBJECTS, number / OBJECTS);
        match turn {
            0 => self.kyma(json!({"spec": {"modules": if round.is_multiple_of(2) { json!([{"name": KEDA.0}]) } else { json!([]) }}})).await?,
            1 => self.kyma(json!({"metadata": {"labels": {"load": number.to_string()}}})).await?,
            _ => self.map(&format!("load-{turn}"), round + turn, number).await?,
        }
        if turn == 0 {
            self.made.selected = round.is_multiple_of(2);
        }
        Ok(())
    }

    async fn kyma(&self, patch: serde_json::Value) -> Result<()> {
        self.kymas.patch(SKR_KYMA, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    async fn map(&mut self, name: &str, step: usize, number: usize) -> Result<()> {
        let begun = SystemTime::now();
        if step % 5 == 4 {
            match self.maps.delete(name, &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                deleted => drop(deleted?),
            }
        } else {
            // One state in five is out of sight: the object is there, and the Watcher does not select it.
            let labels = if step % 5 == 2 { json!({}) } else { json!({WATCHED: NAME}) };
            let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels},
                             "data": {"number": number.to_string()}});
            self.maps.patch(name, &PatchParams::apply("load").force(), &Patch::Apply(&map)).await?;
        }
        self.made.written.insert(name.to_owned(), begun);
        Ok(())
    }
}

impl Made {
    /// Waits until the receiver was told the last state of each object that is there, or that something changed in its watch after it
    /// was written.
    async fn told(&self, one: &One) -> Result<()> {
        let maps = Api::<ConfigMap>::namespaced(one.runtime.cluster().client().await?, "default");
        let mine = ListParams::default().labels(&format!("{WATCHED}={NAME}"));
        let present = until("the API server to answer", async || Ok(Some(maps.list(&mine).await?.items))).await?;
        let (file, watch) = (one.landscape.stamp_file(), one.landscape.watch_of(NAME));
        until("each object's last state to be told", async || {
            let stamps = stamps::read(&file)?;
            let stamps: Vec<_> =
                stamps.iter().filter(|s| s.runtime == one.runtime.id().as_str() && s.watch == watch).collect();
            let versions: BTreeSet<_> = stamps.iter().map(|stamp| stamp.resource_version.as_str()).collect();
            let listed = stamps.iter().filter(|stamp| stamp.resource_version == "-").map(|stamp| stamp.wanted).max();
            let untold: Vec<_> = present
                .iter()
                .filter(|map| {
                    let version = map.resource_version().unwrap_or_default();
                    let written = self.written.get(&map.name_any());
                    !versions.contains(version.as_str()) && listed.is_none_or(|at| written.is_none_or(|w| at < *w))
                })
                .map(|map| (map.name_any(), map.resource_version()))
                .collect();
            if untold.is_empty() { Ok(Some(())) } else { bail!("nobody was told of {untold:?}") }
        })
        .await
    }
}
