//! A load of changes by a runtime's user during faults, and the comparison of the final states.

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
use tidewatch_api::{
    Kyma,
    names::{SKR_KYMA, SKR_NAMESPACE},
};
use tidewatch_contract::event::Change;
use tidewatch_kit::variant::VariantName as _;
use tidewatch_testing::{
    landscape::{
        DEADLINE, until,
        watchers::{WATCHED, watcher},
    },
    stamps::{self, Stamp},
};
use tokio::{sync::watch, task::JoinHandle, time::timeout};

use crate::{
    support::{SingleRuntime, module},
    sync::sum,
};

/// The module that the load selects and deselects.
pub(crate) const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

const NAME: &str = "load";
/// Upper bound of changes for a load that is ended by [`Load::finish`].
const MAX_CHANGES: usize = 5_000;
/// Number of objects that the load writes to in turns: the Kyma's modules, its labels, and ConfigMaps.
pub(crate) const OBJECTS: usize = 12;
/// Number of states that a ConfigMap passes through in turns: three with the Watcher's label, one without it, one
/// deleted.
pub(crate) const STATES: usize = 5;
/// Timeout of a write, which is then repeated.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// A load of changes, made one at a time and each repeated until the API server has accepted it: some to the Kyma's
/// modules and labels, most to ConfigMaps under a Watcher, which are created, changed, unlabelled, labelled and
/// deleted.
pub(crate) struct Load {
    progress: watch::Receiver<usize>,
    /// Ends the load before its last change.
    stop: Arc<AtomicBool>,
    task: JoinHandle<Result<Expected>>,
}

/// The expected final state after a load.
#[derive(Default)]
pub(crate) struct Expected {
    /// The last write of each ConfigMap, by name.
    written: BTreeMap<String, LastWrite>,
    /// True if the module is selected.
    selected: bool,
}

/// A write of a ConfigMap that the API server has accepted.
struct LastWrite {
    /// Time of the first attempt, which may have been applied without a response.
    begun: SystemTime,
    /// The object left the Watcher's selection: it was deleted or lost its label.
    left: bool,
    /// Range that contains the resource version of this write, and of no other write under that Watcher.
    versions: RangeInclusive<u64>,
}

struct Writer {
    /// Unique mark of this load in all of its objects, so that every write is a change: no earlier load wrote the same.
    mark: String,
    maps: Api<ConfigMap>,
    kymas: Api<Kyma>,
    /// State before the first attempt of the current change.
    before: Option<Before>,
    expected: Expected,
}

/// State of a ConfigMap before it leaves the Watcher's selection.
#[derive(Clone, Copy)]
struct Before {
    /// True if the Watcher selected the object.
    selected: bool,
    /// The newest resource version of the collection.
    newest: u64,
}

/// Creates the Watcher for the ConfigMaps of the load, and waits until the agent watches them.
pub(crate) async fn watch_objects(setup: &SingleRuntime) -> Result<()> {
    setup.runtime.grant_agent("", "configmaps").await?;
    setup.landscape.write_watcher(&watcher(NAME, ("", "v1", "configmaps"), "spec")).await?;
    setup.list_arrives(&setup.landscape.watch_of(NAME), SystemTime::UNIX_EPOCH).await
}

impl Load {
    /// Starts a load with a pause after each change, until [`Load::finish`].
    pub(crate) fn start(setup: &SingleRuntime, pause: Duration) -> Self {
        Self::spawn(setup, MAX_CHANGES, pause)
    }

    /// Makes so many changes without interruption, and compares the final states.
    pub(crate) async fn run(setup: &SingleRuntime, changes: usize, pause: Duration) -> Result<()> {
        Self::spawn(setup, changes, pause).compare(setup).await
    }

    fn spawn(setup: &SingleRuntime, changes: usize, pause: Duration) -> Self {
        let user = setup.runtime.user();
        let maps = Api::namespaced(user.clone(), "default");
        let kymas = Api::namespaced(user, SKR_NAMESPACE);
        let mark = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis().to_string();
        let mut writer = Writer { mark, maps, kymas, before: None, expected: Expected::default() };
        let (done, progress) = watch::channel(0);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            for number in (0..changes).take_while(|_| !stopped.load(Ordering::Relaxed)) {
                writer.change_until_accepted(number).await?;
                done.send_replace(number + 1);
                tokio::time::sleep(pause).await;
            }
            Ok(writer.expected)
        });
        Self { progress, stop, task }
    }

    /// Waits until so many further changes are made.
    pub(crate) async fn advance(&mut self, changes: usize) -> Result<()> {
        let target = *self.progress.borrow() + changes;
        let reached = self.progress.wait_for(|changes| *changes >= target).await.map(|changes| *changes);
        reached.map(drop).context("the load ended early")
    }

    /// Ends the load, waits until no work is pending on either side, and compares the final states.
    pub(crate) async fn finish(self, setup: &SingleRuntime) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.compare(setup).await
    }

    async fn compare(self, setup: &SingleRuntime) -> Result<()> {
        let expected = self.task.await??;
        expected.events_arrive(setup).await?;
        setup.in_sync().await?;
        setup
            .skr_status("the last selection of modules", |status| module(status, KEDA.0).is_some() == expected.selected)
            .await?;
        // The events are settled with the Kyma's reconcile; a Manifest may still wait for its component descriptor or for
        // the removal of its predecessor.
        until("the Manifests of the last selection", async || {
            let manifests = setup.manifests().await?;
            let deleting = manifests.iter().any(|manifest| manifest.metadata.deletion_timestamp.is_some());
            Ok((!deleting && manifests.len() == usize::from(expected.selected)).then_some(()))
        })
        .await?;
        setup.in_sync().await?;
        setup.logs_are_clean().await
    }
}

impl Writer {
    /// Repeats a change until the API server confirms it.
    async fn change_until_accepted(&mut self, number: usize) -> Result<()> {
        let begun = SystemTime::now();
        let began = Instant::now();
        self.before = None;
        loop {
            let outcome =
                timeout(WRITE_TIMEOUT, self.change(number, begun)).await.context("no answer to a write").flatten();
            match outcome {
                Err(error) if began.elapsed() > DEADLINE => return Err(error.context(format!("change {number}"))),
                Err(_) => tokio::time::sleep(RETRY_DELAY).await,
                Ok(()) => return Ok(()),
            }
        }
    }

    /// Makes one change; it is idempotent, since an attempt without a response may have been applied.
    async fn change(&mut self, number: usize, begun: SystemTime) -> Result<()> {
        let turn = number % OBJECTS;
        let round = number / OBJECTS;
        match turn {
            0 => self.kyma(json!({"spec": {"modules": if round.is_multiple_of(2) { json!([{"name": KEDA.0}]) } else { json!([]) }}})).await?,
            1 => self.kyma(json!({"metadata": {"labels": {"load": format!("{}-{number}", self.mark)}}})).await?,
            _ => self.map(&format!("load-{turn}"), round + turn, number, begun).await?,
        }
        if turn == 0 {
            self.expected.selected = round.is_multiple_of(2);
        }
        Ok(())
    }

    async fn kyma(&self, patch: serde_json::Value) -> Result<()> {
        self.kymas.patch(SKR_KYMA, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    async fn map(&mut self, name: &str, step: usize, number: usize, begun: SystemTime) -> Result<()> {
        let deletes = step % STATES == 4;
        let unlabels = step % STATES == 2;
        let mut before = None;
        if deletes || unlabels {
            // The state found by the first attempt counts, as that attempt may have been applied.
            let seen = self.observe(name).await?;
            before = Some(*self.before.get_or_insert(seen));
        }
        let versions = if let Some(Before { newest, .. }) = before.filter(|_| deletes) {
            match self.maps.delete(name, &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                deleted => drop(deleted?),
            }
            newest + 1..=self.observe(name).await?.newest
        } else {
            let labels = if unlabels { json!({}) } else { json!({WATCHED: NAME}) };
            let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels},
                             "data": {"load": self.mark, "number": number.to_string()}});
            let written = self.maps.patch(name, &PatchParams::apply("load").force(), &Patch::Apply(&map)).await?;
            let version = version(written.resource_version())?;
            version..=version
        };
        if before.is_none_or(|before| before.selected) {
            self.expected.written.insert(name.to_owned(), LastWrite { begun, left: before.is_some(), versions });
        } else {
            // The object was not selected before: no event is expected for it.
            self.expected.written.remove(name);
        }
        Ok(())
    }

    async fn observe(&self, name: &str) -> Result<Before> {
        let found = self.maps.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await?;
        let selected = found.items.iter().any(|map| map.labels().get(WATCHED).is_some_and(|label| label == NAME));
        Ok(Before { selected, newest: version(found.metadata.resource_version)? })
    }
}

fn version(version: Option<String>) -> Result<u64> {
    Ok(version.context("a resource version")?.parse()?)
}

impl Expected {
    /// Waits until the receiver has an event of the last write of each object that is or was selected by the Watcher,
    /// or a relist of that watch since the write; and until the agent holds as many objects as exist.
    async fn events_arrive(&self, setup: &SingleRuntime) -> Result<()> {
        let maps = Api::<ConfigMap>::namespaced(setup.runtime.cluster().client().await?, "default");
        let mine = ListParams::default().labels(&format!("{WATCHED}={NAME}"));
        let present = until("the API server to answer", async || Ok(Some(maps.list(&mine).await?.items))).await?;
        let file = setup.landscape.stamp_file();
        let watch = setup.landscape.watch_of(NAME);
        until("an event of each object's last state", async || {
            let stamps = stamps::read(&file)?;
            let stamps: Vec<_> =
                stamps.iter().filter(|s| s.runtime == setup.runtime.id().as_str() && s.watch == watch).collect();
            let missing: Vec<_> = self
                .written
                .iter()
                .filter(|(_, written)| !stamps.iter().any(|stamp| written.matches(stamp)))
                .map(|(name, written)| (name, written.left, &written.versions))
                .collect();
            ensure!(missing.is_empty(), "no event of {missing:?}");
            Ok(Some(()))
        })
        .await?;
        until("the agent to hold the existing objects", async || {
            let page = setup.agent_page().await?;
            let held = sum(&page, "tidewatch_agent_watch_objects", &[&format!("watch=\"{watch}\"")]);
            let names: Vec<_> = present.iter().map(|map| map.name_any()).collect();
            ensure!(held == names.len() as u64, "the agent holds {held} objects, and there are {names:?}");
            Ok(Some(()))
        })
        .await
    }
}

impl LastWrite {
    fn matches(&self, stamp: &Stamp) -> bool {
        // After a restore of etcd the resource versions of the discarded history are assigned again.
        let of_it = stamp.resource_version.parse().is_ok_and(|version| self.versions.contains(&version));
        stamp.enqueued >= self.begun
            && (stamp.resource_version == "-" || of_it && (stamp.change == Change::Deleted.as_str()) == self.left)
    }
}
