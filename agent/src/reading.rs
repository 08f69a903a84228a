//! What the agent makes of the bytes that an API server sends: the readers of its own loops, without connection and task, for whoever
//! wants to see what comes of given bytes.

use std::sync::Arc;

use tidewatch_shared::plan::Plan;
use tokio::sync::watch;

pub use crate::{settings::Settings, watch::Served};

use crate::{
    canary::Sightings,
    core::{Core, Started},
    plan::{CurrentSettings, Followed, PlanSource},
    telemetry::{Metrics, Readiness},
    watch::{self as watching, Buffer, Listed, Planned, Reader, Sink},
};

/// What became of a page or of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// It was read.
    Taken,
    /// It says that only a list can tell what is there.
    Relist,
    /// It was not read, or tells of a failure: what it stands for is asked for again.
    Refused,
}

/// A list and a watch, read into a sink.
struct Reading<S> {
    reader: Reader<S>,
    /// Behind which the next page is; empty for a first page.
    token: String,
    version: String,
}

impl<S: Sink> Reading<S> {
    fn new(sink: S) -> Self {
        let (token, version) = Default::default();
        Self { reader: Reader::new(sink, Sightings::default().enter()), token, version }
    }

    fn page(&mut self, bytes: &[u8]) -> Heard {
        let token = std::mem::take(&mut self.token);
        if token.is_empty() {
            self.reader.begin();
        }
        match watching::Page::read(bytes).and_then(|page| self.reader.page(page, &token)) {
            Ok(Listed::Whole(version)) => self.version = version,
            Ok(Listed::Part(next)) => self.token = next,
            Err(_) => return Heard::Refused,
        }
        Heard::Taken
    }

    fn line(&mut self, line: &[u8]) -> Heard {
        match self.reader.line(line, &mut self.version) {
            Ok(None) => Heard::Taken,
            Ok(Some(_)) => Heard::Relist,
            Err(why) if why.is_gone() => Heard::Relist,
            Err(_) => Heard::Refused,
        }
    }
}

/// A watch of the plan, read into a core.
pub struct WatchReading(Reading<Planned>);

impl WatchReading {
    /// Nothing has been read yet. `namespace` is that of the agent's own objects.
    #[must_use]
    pub fn new(started: Started, namespace: &str, core: Core) -> Self {
        Self(Reading::new(Planned::new(started, namespace, core)))
    }

    /// Reads a page of a list: the first one, or that behind the last.
    pub fn page(&mut self, page: &[u8]) -> Heard {
        self.0.page(page)
    }

    /// Reads a line of a watch.
    pub fn line(&mut self, line: &[u8]) -> Heard {
        self.0.line(line)
    }

    /// Whether the list has another page.
    #[must_use]
    pub fn is_listing(&self) -> bool {
        !self.0.token.is_empty()
    }

    /// The resource version from which a watch would go on; empty before a list was read to its end.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.0.version
    }
}

/// The agent's ConfigMap, read as plan and settings.
pub struct ConfigReading {
    reading: Reading<PlanSource>,
    followed: watch::Receiver<Followed>,
    settings: CurrentSettings,
}

impl ConfigReading {
    /// Nothing has been read yet.
    #[must_use]
    pub fn new(namespace: &str) -> Self {
        let (publish, followed) = watch::channel(Followed::default());
        let (tell, settings) = watch::channel(None);
        let pending = Readiness::default().guard("plan");
        let source = PlanSource::new(namespace.to_owned(), publish, Some(tell), pending, Metrics::default());
        Self { reading: Reading::new(source), followed, settings }
    }

    /// Reads a page of a list: the first one, or that behind the last.
    pub fn page(&mut self, page: &[u8]) -> Heard {
        self.reading.page(page)
    }

    /// Reads a line of a watch.
    pub fn line(&mut self, line: &[u8]) -> Heard {
        self.reading.line(line)
    }

    /// The last good plan.
    #[must_use]
    pub fn plan(&self) -> Option<Arc<Plan>> {
        self.followed.borrow().plan.clone()
    }

    /// The last good settings.
    #[must_use]
    pub fn settings(&self) -> Option<Arc<Settings>> {
        self.settings.borrow().clone()
    }

    /// What is wrong with the newest ConfigMap, as the heartbeat says it.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.followed.borrow().error.clone()
    }
}

/// The lines of a watch whose bytes come in these frames; what has no end is none. `None` if one is too long.
pub fn lines<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> Option<Vec<Vec<u8>>> {
    let (mut buffer, mut lines) = (Buffer::new(), Vec::new());
    for frame in frames {
        buffer.push(frame).ok()?;
        while let Some(line) = buffer.line() {
            lines.push(line.to_vec());
        }
    }
    Some(lines)
}

/// The version that the document of an API group prefers.
#[must_use]
pub fn preferred_version(document: &[u8]) -> Option<String> {
    watching::preferred_of(document).ok()
}

/// A resource in the document of a group's version.
#[must_use]
pub fn served(document: &[u8], version: &str, resource: &str) -> Option<Served> {
    watching::find(document, version.to_owned(), resource).ok()?
}
