//! A load of changes by a runtime's user, while other things happen; and what must have come of it in the end.

use std::{
    collections::BTreeMap,
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;
use tidewatch_shared::{
    api::Kyma,
    event::Change,
    names::{SKR_KYMA, SKR_NAMESPACE},
};
use tidewatch_tests::{
    demo::stamps::{self, Stamp},
    landscape::{
        DEADLINE, until,
        watchers::{WATCHED, watcher},
    },
};
use tokio::{sync::watch, task::JoinHandle, time::timeout};

use crate::{
    support::{One, module},
    sync::sum,
};

/// The module that the load selects and deselects.
pub(crate) const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

const NAME: &str = "load";
/// Changes of a load that nobody ends.
const MOST: usize = 5_000;
/// Objects that the load writes to, in turns.
pub(crate) const OBJECTS: usize = 12;
/// States of a ConfigMap, which it has one after the other: three under the Watcher, one out of its sight, one gone.
pub(crate) const STATES: usize = 5;
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
#[derive(Default)]
pub(crate) struct Made {
    /// The last write of each ConfigMap, by name.
    written: BTreeMap<String, Written>,
    /// Whether the module is selected.
    selected: bool,
}

/// A write of a ConfigMap that the API server has taken.
struct Written {
    /// When it was tried first: an earlier try may have been taken without a word.
    begun: SystemTime,
    /// The object left the set that the Watcher selects: it was deleted, or lost its label.
    left: bool,
    /// Its resource version is one of these, and no other write under that Watcher has got one of them.
    versions: RangeInclusive<u64>,
}

struct User {
    /// Stands in all that it writes, so that each write is one: no load before has written the same.
    mark: String,
    maps: Api<ConfigMap>,
    kymas: Api<Kyma>,
    /// Before the change that is being made was tried first.
    before: Option<Before>,
    made: Made,
}

/// A ConfigMap before it was to leave.
#[derive(Clone, Copy)]
struct Before {
    /// The Watcher selected it.
    selected: bool,
    /// The newest resource version of all.
    newest: u64,
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
        let (maps, kymas) = (Api::namespaced(user.clone(), "default"), Api::namespaced(user, SKR_NAMESPACE));
        let mark = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis().to_string();
        let mut user = User { mark, maps, kymas, before: None, made: Made::default() };
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
        let (begun, began) = (SystemTime::now(), Instant::now());
        self.before = None;
        loop {
            let outcome = timeout(WRITE, self.change(number, begun)).await.context("no answer to a write").flatten();
            match outcome {
                Err(error) if began.elapsed() > DEADLINE => return Err(error.context(format!("change {number}"))),
                Err(_) => tokio::time::sleep(AGAIN).await,
                Ok(()) => return Ok(()),
            }
        }
    }

    /// May be repeated when it is not known whether it was made.
    async fn change(&mut self, number: usize, begun: SystemTime) -> Result<()> {
        let (turn, round) = (number % OBJECTS, number / OBJECTS);
        match turn {
            0 => self.kyma(json!({"spec": {"modules": if round.is_multiple_of(2) { json!([{"name": KEDA.0}]) } else { json!([]) }}})).await?,
            1 => self.kyma(json!({"metadata": {"labels": {"load": format!("{}-{number}", self.mark)}}})).await?,
            _ => self.map(&format!("load-{turn}"), round + turn, number, begun).await?,
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

    async fn map(&mut self, name: &str, step: usize, number: usize, begun: SystemTime) -> Result<()> {
        let (goes, hides) = (step % STATES == 4, step % STATES == 2);
        let mut before = None;
        if goes || hides {
            // What an earlier try has found holds: that may have been taken.
            let seen = self.look(name).await?;
            before = Some(*self.before.get_or_insert(seen));
        }
        let versions = if let Some(Before { newest, .. }) = before.filter(|_| goes) {
            match self.maps.delete(name, &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                deleted => drop(deleted?),
            }
            newest + 1..=self.look(name).await?.newest
        } else {
            let labels = if hides { json!({}) } else { json!({WATCHED: NAME}) };
            let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels},
                             "data": {"load": self.mark, "number": number.to_string()}});
            let written = self.maps.patch(name, &PatchParams::apply("load").force(), &Patch::Apply(&map)).await?;
            let version = version(written.resource_version())?;
            version..=version
        };
        if before.is_none_or(|before| before.selected) {
            self.made.written.insert(name.to_owned(), Written { begun, left: before.is_some(), versions });
        } else {
            // Nobody was to know of it, and nobody has seen it go.
            self.made.written.remove(name);
        }
        Ok(())
    }

    async fn look(&self, name: &str) -> Result<Before> {
        let found = self.maps.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await?;
        let selected = found.items.iter().any(|map| map.labels().get(WATCHED).is_some_and(|label| label == NAME));
        Ok(Before { selected, newest: version(found.metadata.resource_version)? })
    }
}

fn version(version: Option<String>) -> Result<u64> {
    Ok(version.context("a resource version")?.parse()?)
}

impl Made {
    /// Waits until the receiver was told of the last write of each object that was or is under the Watcher, or that something changed in
    /// its watch after it was written; and until the agent holds as many objects as there are.
    async fn told(&self, one: &One) -> Result<()> {
        let maps = Api::<ConfigMap>::namespaced(one.runtime.cluster().client().await?, "default");
        let mine = ListParams::default().labels(&format!("{WATCHED}={NAME}"));
        let present = until("the API server to answer", async || Ok(Some(maps.list(&mine).await?.items))).await?;
        let (file, watch) = (one.landscape.stamp_file(), one.landscape.watch_of(NAME));
        until("each object's last state to be told", async || {
            let stamps = stamps::read(&file)?;
            let stamps: Vec<_> =
                stamps.iter().filter(|s| s.runtime == one.runtime.id().as_str() && s.watch == watch).collect();
            let untold: Vec<_> = self
                .written
                .iter()
                .filter(|(_, written)| !stamps.iter().any(|stamp| written.is_told_by(stamp)))
                .map(|(name, written)| (name, written.left, &written.versions))
                .collect();
            ensure!(untold.is_empty(), "nobody was told of {untold:?}");
            Ok(Some(()))
        })
        .await?;
        until("the agent to hold what is there", async || {
            let page = one.agent_page().await?;
            let held = sum(&page, "tidewatch_agent_watch_objects", &[&format!("watch=\"{watch}\"")]);
            let names: Vec<_> = present.iter().map(|map| map.name_any()).collect();
            ensure!(held == names.len() as u64, "the agent holds {held} objects, and there are {names:?}");
            Ok(Some(()))
        })
        .await
    }
}

impl Written {
    fn is_told_by(&self, stamp: &Stamp) -> bool {
        // Versions of a history that was undone come again.
        let of_it = stamp.resource_version.parse().is_ok_and(|version| self.versions.contains(&version));
        stamp.wanted >= self.begun
            && (stamp.resource_version == "-" || of_it && (stamp.change == Change::Deleted.as_str()) == self.left)
    }
}
