//! Kills of the receiver in the middle of an upgrade that takes every second way of a write: each ends as without a kill.

mod content;
mod ends;

use std::{
    collections::BTreeMap,
    env,
    time::{Duration, Instant},
};

use content::{CONTROL, NEIGHBOUR, is_upgraded, objects, others_write, shared};
use ends::ends;
use kube::api::ListParams;
use tidewatch_testing::{
    control_plane::audit::{Mark, Write},
    landscape::AGENT_IMAGE,
    progress::print_line,
};

use super::{
    faults::CONTROL_PLANE,
    writing::{FIRST, SECOND, Writers, object},
    *,
};

/// Delay of the receiver's requests and of their answers until it is killed: longer than it takes to read the audit log
/// anew, so that a kill comes before the next write of the object.
const DELAY: Duration = Duration::from_millis(50);

/// A point of an upgrade: an object has been written so often, refused writes included.
#[derive(Clone, Copy, Debug)]
struct Point {
    /// Name of the object in [`CONTROL`].
    object: &'static str,
    writes: usize,
    /// Object whose last write ends the way.
    end: &'static str,
}

const fn after(writes: usize, object: &'static str) -> Point {
    Point { object, writes, end: object }
}

const fn within(end: &'static str, writes: usize, object: &'static str) -> Point {
    Point { object, writes, end }
}

/// In the middle of each second way.
const POINTS: [Point; 10] = [
    // The rest of a conversion is ours, and not removed.
    after(2, "converteds.killsa.test"),
    // One of the user's resources is stored anew.
    within("storeds.killsa.test", 1, "killsa-user-1"),
    // A recreated object, and a Job, are gone.
    after(2, "killsa-frozen"),
    after(2, "killsa-job"),
    // What tools applied is ours, and not removed.
    after(1, "killsa-helm"),
    // A key that lifecycle-manager left is removed.
    after(1, "killsa-secret"),
    // Our webhook has refused an object.
    after(1, "killsa-guarded"),
    // Defaults are ours, and not removed.
    after(2, "killsa-union"),
    // The managed fields are of the next version, and the object is not.
    after(1, "killsa-own"),
    after(2, "killsa-noted"),
];

/// The other points of those ways, with `TIDEWATCH_KILLS=all`.
const FURTHER: [Point; 14] = [
    after(1, "converteds.killsa.test"),
    after(1, "storeds.killsa.test"),
    after(2, "storeds.killsa.test"),
    after(3, "storeds.killsa.test"),
    within("storeds.killsa.test", 1, "killsa-user-3"),
    after(1, "killsa-frozen"),
    after(1, "killsa-held"),
    after(2, "killsa-held"),
    after(1, "killsa-job"),
    after(1, "killsa-early"),
    after(1, "killsa-kubectl"),
    within("killsa-guarded", 1, "killsa-changed"),
    after(1, "killsa-union"),
    after(1, "killsa-noted"),
];

#[tokio::test]
async fn an_upgrade_whose_receiver_is_killed_in_any_second_way_ends_as_without_a_kill() -> TestResult {
    let is_long = env::var("TIDEWATCH_KILLS").is_ok_and(|form| form == "all");
    let points: Vec<_> = if is_long { [&POINTS[..], &FURTHER].concat() } else { POINTS.to_vec() };
    print_line(&format!("kills: {} points, {}", points.len(), if is_long { "all" } else { "the short form" }));
    let began = Instant::now();
    let kills = Kills::start(points.len()).await?;
    print_line(&format!("kills: all modules are installed after {:.1} s", began.elapsed().as_secs_f64()));

    let expected = kills.upgrade(CONTROL, None).await?;
    is_upgraded(&expected.ends);
    for (reason, count) in [("union", 1), ("conversion", 1), ("field-version", 2), ("recreated", 2), ("adopted", 3)] {
        assert_eq!(kills.writers.fallbacks(reason).await?, count, "{reason}");
    }
    assert!(kills.writers.fallbacks("own-webhook").await? >= 2);
    let number = points.len();
    let mut late = Vec::new();
    for (module, point) in kills.modules[1..].iter().zip(points) {
        let upgraded = kills.upgrade(module, Some(point)).await?;
        let done = upgraded.before_kill;
        let all = expected.writes_of(point.end);
        let text = format!("{module}, killed after {done} of {all} writes of {}", point.end);
        print_line(&format!("kills: {text}, {:.1} s", began.elapsed().as_secs_f64()));
        if done >= all {
            late.push(text.clone());
        }
        for (name, object) in &expected.ends {
            assert_eq!(upgraded.ends.get(name), Some(object), "{name} of {text}");
        }
        let surplus: Vec<_> = upgraded.ends.keys().filter(|name| !expected.ends.contains_key(*name)).collect();
        assert!(surplus.is_empty(), "{text}: {surplus:?}");
        let deletions = upgraded.deletions();
        assert!(deletions.keys().eq(expected.deletions().keys()), "{text}: {deletions:?}");
        assert!(deletions.values().all(|confirmed| *confirmed <= 1), "{text}: {deletions:?}");
    }
    // Some come later on a machine that is busy with other tests.
    assert!(late.len() * 2 <= number, "kills that came after their ways: {late:#?}");
    kills.rest().await?;
    print_line(&format!("kills: over after {:.1} s", began.elapsed().as_secs_f64()));
    Ok(())
}

/// Modules of equal content, each upgraded once.
struct Kills {
    writers: Writers,
    modules: Vec<String>,
}

/// An upgrade that has ended.
struct Upgraded {
    module: String,
    /// Writes before the kill of the object that ends the way.
    before_kill: usize,
    /// The receiver's writes of the module's objects.
    writes: Vec<Write>,
    /// All objects of the module and around it, as if they were those of [`CONTROL`], and the inventory.
    ends: BTreeMap<String, Value>,
}

impl Upgraded {
    fn writes_of(&self, object: &str) -> usize {
        self.writes.iter().filter(|write| write.name == object).count()
    }

    /// Objects that were deleted, as if they were those of [`CONTROL`], with the number of confirmed deletions.
    fn deletions(&self) -> BTreeMap<String, usize> {
        let mut confirmed = BTreeMap::<_, usize>::new();
        for Write { name, code, .. } in self.writes.iter().filter(|write| write.verb == "delete") {
            // The API server may have finished a request whose client has gone.
            if *code < 300 || *code == 504 {
                *confirmed.entry(name.replace(&self.module, CONTROL)).or_default() += usize::from(*code < 300);
            }
        }
        confirmed
    }
}

impl Kills {
    /// Installs so many modules besides [`CONTROL`].
    async fn start(number: usize) -> Result<Self> {
        let writers = Writers::start("kills", Options { proxied: true, ..quick_options() }).await?;
        let modules: Vec<_> = ('a'..='z').map(|letter| format!("kills{letter}")).take(number + 1).collect();
        let runtime = &writers.setup.runtime;
        runtime.grant_agent("batch", "jobs").await?;
        runtime.grant_agent("*", "moveds").await?;
        writers.push(NEIGHBOUR, FIRST, &shared(&modules)?).await?;
        let landscape = &writers.setup.landscape;
        for module in &modules {
            for version in [FIRST, SECOND] {
                writers.push(module, version, &objects(module, version)?).await?;
            }
        }
        let all: Vec<_> = modules.iter().map(String::as_str).chain([NEIGHBOUR]).collect();
        for module in &all {
            landscape.write_channels(module, &[("regular", FIRST)]).await?;
        }
        writers.setup.runtime.select(&all).await?;
        for module in &all {
            writers.is_applied(module, FIRST).await?;
        }
        let kills = Self { writers, modules };
        kills.make_available("kills").await?;
        others_write(&kills.writers, &kills.modules).await?;
        kills.writers.setup.becomes_idle().await?;
        Ok(kills)
    }

    /// Upgrades a module, kills the receiver at a point of it, and starts it again.
    async fn upgrade(&self, module: &str, kill: Option<Point>) -> Result<Upgraded> {
        let SingleRuntime { runtime, landscape, .. } = &self.writers.setup;
        let mark = runtime.cluster().audit_mark()?;
        let proxies = runtime.proxies().context("proxies")?;
        let mut before_kill = 0;
        if let Some(Point { object, writes, end }) = kill {
            proxies.receiver.set_round_trip(2 * DELAY);
            landscape.write_channels(module, &[("regular", SECOND)]).await?;
            let written = |object: &str| {
                let name = object.replace(CONTROL, module);
                anyhow::Ok(self.writes(mark)?.iter().filter(|write| write.name == name).count())
            };
            let condition = format!("{writes} writes of {object} of {module}");
            until(&condition, async || {
                if written(object)? >= writes {
                    return Ok(Some(()));
                }
                self.release(module).await.map(|_| None)
            })
            .await?;
            landscape.with_receiver(async |receiver| receiver.kill9()).await?;
            proxies.receiver.set_round_trip(Duration::ZERO);
            before_kill = written(end)?;
            landscape.start_receiver().await?;
        } else {
            landscape.write_channels(module, &[("regular", SECOND)]).await?;
        }
        until("the held object to be recreated", async || self.release(module).await).await?;
        self.writers.is_applied(module, SECOND).await?;
        self.make_available(module).await?;
        let is_ready = |status: &KymaStatus| {
            let ready = |it: &ModuleStatus| it.state == State::Ready && it.version.as_deref() == Some(SECOND);
            super::module(status, module).is_some_and(ready)
        };
        self.writers.setup.skr_status(&format!("the upgraded {module}"), is_ready).await?;
        let (writes, others): (Vec<_>, Vec<_>) =
            self.writes(mark)?.into_iter().partition(|write| write.name.contains(module));
        let others: Vec<_> = others.into_iter().filter(|write| write.name.contains("kills")).collect();
        assert!(others.is_empty(), "writes of modules that stay as they are: {others:#?}");
        // An API server begins anew to serve the resources of a CRD that has changed.
        let ends = until("the objects", async || ends(&self.writers, module).await.map(Some)).await?;
        Ok(Upgraded { module: module.to_owned(), before_kill, writes, ends })
    }

    /// The receiver's writes to the runtime since the mark.
    fn writes(&self, mark: Mark) -> Result<Vec<Write>> {
        let mut writes = self.writers.setup.runtime.cluster().writes_since(mark)?;
        writes.retain(|write| write.user.ends_with(&format!(":{CONTROL_PLANE}")));
        Ok(writes)
    }

    /// Lets go of the object that a user's finalizer holds, once it is being deleted. `Some` once it is recreated.
    async fn release(&self, module: &str) -> Result<Option<()>> {
        let name = format!("{module}-held");
        let Some(map) = self.writers.get("v1", "ConfigMap", &name).await? else { return Ok(None) };
        if map.metadata.deletion_timestamp.is_some() {
            let none = json!({"metadata": {"finalizers": null}});
            self.writers.foreign.update("user", &object("v1", "ConfigMap", &name), &none).await?;
        }
        Ok((map.data["data"]["version"] == SECOND).then_some(()))
    }

    /// Writes the statuses of the Deployments whose names begin so, as their controller does, which does not run here.
    async fn make_available(&self, name: &str) -> Result<()> {
        let api = Api::<Deployment>::namespaced(self.client().await?, SKR_NAMESPACE);
        let found = api.list_metadata(&ListParams::default()).await?;
        for deployment in found.items.iter().filter(|it| it.name_any().starts_with(name)) {
            let status = json!({"status": {"observedGeneration": deployment.metadata.generation, "replicas": 1,
                "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1,
                "conditions": [{"type": "Available", "status": "True"},
                    {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}]}});
            api.patch_status(&deployment.name_any(), &PatchParams::default(), &Patch::Merge(&status)).await?;
        }
        Ok(())
    }

    /// Restarts the receiver once more, which writes nothing.
    async fn rest(&self) -> Result<()> {
        let setup = &self.writers.setup;
        setup.becomes_idle().await?;
        let mark = setup.runtime.cluster().audit_mark()?;
        setup.landscape.restart_receiver(AGENT_IMAGE, &[]).await?;
        let manifests = setup.manifests().await?;
        let api = Api::<Manifest>::namespaced(setup.landscape.kcp().client().await?, setup.landscape.namespace());
        for manifest in &manifests {
            let touched = Patch::Merge(json!({"metadata": {"annotations": {"kills.test/touched": "1"}}}));
            api.patch(&manifest.name_any(), &PatchParams::default(), &touched).await?;
        }
        let wanted = u64::try_from(manifests.len())?;
        until("a reconcile of each Manifest", async || {
            let ended = self.writers.metric("tidewatch_manifest_passes_total", &["outcome=\"ended\""]).await?;
            Ok((ended >= wanted).then_some(()))
        })
        .await?;
        setup.becomes_idle().await?;
        let writes: Vec<_> = self.writes(mark)?.into_iter().filter(|write| write.name.contains("kills")).collect();
        ensure!(writes.is_empty(), "writes at rest: {writes:#?}");
        Ok(())
    }

    async fn client(&self) -> Result<Client> {
        Ok(self.writers.setup.runtime.cluster().client().await?)
    }
}
