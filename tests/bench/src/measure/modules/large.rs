//! Installations of large modules: time from a user's selection to the last object, over the event path and a plain client
//! that applies the same objects.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, ensure};
use kube::{ResourceExt as _, core::DynamicObject};
use tidewatch_api::{Manifest, names::annotation};
use tidewatch_testing::{
    control_plane::audit::{Mark, TimedWrite},
    landscape::until,
    modules::{Module, large::Large},
    progress::{Step, print_line},
    stamps,
};

use super::{Figure, PlainClient, Setup, median, millis};

/// The version that is installed.
const VERSION: &str = "1.0.0";
/// Largest ratio of an installation to its floor.
const BAR: f64 = 1.3;

/// Samples of one module, in milliseconds.
#[derive(Default)]
struct Samples {
    ours: Vec<f64>,
    event_path: Vec<f64>,
    plain: Vec<f64>,
}

/// Installs each large module so many times by the product, and by the plain client, and emits the figures.
pub(super) async fn measure(setup: &Setup, number: u32, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    for (large, figure) in
        Large::ALL.into_iter().zip(["module_of_60_objects_applied_p50", "module_of_300_crds_applied_p50"])
    {
        if number == 0 {
            break;
        }
        let step = Step::begin(format!("{number} installations of {} by each", large.name()));
        let Samples { ours, event_path, plain } = setup.samples(large, number).await?;
        step.done();
        let ours = median(ours);
        let floor = median(plain) + median(event_path);
        emit(&Figure::new(figure, ours, "ms").ratio_at_most(floor, ours / floor, BAR));
    }
    Ok(())
}

impl Setup {
    async fn samples(&self, large: Large, number: u32) -> Result<Samples> {
        self.landscape.write_bare(large.name(), VERSION).await?;
        let objects: Vec<DynamicObject> =
            large.objects().into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?;
        let expected = Expected { names: objects.iter().map(DynamicObject::name_any).collect(), count: objects.len() };
        let module = Module {
            component: large.name().to_owned(),
            version: VERSION.to_owned(),
            objects,
            default_cr: None,
            manager: None,
        };
        let plain = PlainClient::new(self.runtime.distant_client().await?, module);
        let mut samples = Samples::default();
        // The first one warms up both.
        for round in 0..=number {
            let Times { applied, accepted } = self.install_large(large, &expected).await?;
            self.runtime.select(&[]).await?;
            until("the Manifest to go", async || Ok(self.manifest(large.name()).await?.is_none().then_some(())))
                .await?;
            let begun = Begin::now(self)?;
            plain.install().await?;
            let plainly = self.last_write(&begun, &expected)?;
            plain.remove().await?;
            let times = [applied, accepted, plainly].map(millis);
            print_line(&format!("{} in round {round}: ours, event path, plain: {times:.0?} ms", large.name()));
            if round > 0 {
                samples.ours.push(times[0]);
                samples.event_path.push(times[1]);
                samples.plain.push(times[2]);
            }
        }
        Ok(samples)
    }

    /// Selects a module. Its objects are applied on return.
    async fn install_large(&self, large: Large, expected: &Expected) -> Result<Times> {
        let begun = Begin::now(self)?;
        self.runtime.select(&[large.name()]).await?;
        until("the applied layer", async || {
            let is_applied = |it: &Manifest| it.annotations().contains_key(annotation::SYNC_OCI_REF);
            Ok(self.manifest(large.name()).await?.filter(is_applied).map(drop))
        })
        .await?;
        let applied = self.last_write(&begun, expected)?;
        let file = self.landscape.stamp_file();
        let accepted = async || stamps::first(&file, self.runtime.id(), "kyma", begun.time);
        let stamp = until("the accepted event", accepted).await?;
        Ok(Times { applied, accepted: stamp.enqueued.duration_since(begun.time)? })
    }

    /// Time until the last of the objects with these names was written first, by the API server's log.
    fn last_write(&self, begun: &Begin, expected: &Expected) -> Result<Duration> {
        let mut seen = BTreeSet::new();
        let mut last = None;
        for TimedWrite { write, ended, .. } in self.runtime.cluster().timed_writes_since(begun.mark)? {
            let is_of_module = expected.names.contains(&write.name) && write.verb == "patch" && write.code < 300;
            if is_of_module && seen.insert((write.resource, write.name)) {
                last = Some(SystemTime::from(ended));
            }
        }
        ensure!(seen.len() == expected.count, "{} of {} objects were written", seen.len(), expected.count);
        Ok(last.context("a write")?.duration_since(begun.time)?)
    }
}

/// The objects of a module.
struct Expected {
    names: BTreeSet<String>,
    count: usize,
}

/// Times of one installation since the selection.
struct Times {
    /// Until the last object.
    applied: Duration,
    /// Until the accepted event.
    accepted: Duration,
}

/// Begin of an installation.
struct Begin {
    time: SystemTime,
    /// Place in the API server's log.
    mark: Mark,
}

impl Begin {
    fn now(setup: &Setup) -> Result<Self> {
        Ok(Self { mark: setup.runtime.cluster().audit_mark()?, time: SystemTime::now() })
    }
}
