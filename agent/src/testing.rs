//! Test support for other crates: decodes responses of an API server as the agent's watches do, without connections and
//! tasks.

use std::sync::Arc;

use tidewatch_api::plan::Plan;
use tokio::sync::watch;

use crate::{
    core::{Core, StartedWatch},
    kubernetes,
    plan::PlanSource,
    settings::{CurrentSettings, Settings},
    telemetry::{Metrics, Readiness},
    watch::{
        self as watching, Discovery, LineBuffer, ListProgress, PlanState, PlannedSink, Reader, ServedResource, Single,
        Sink, Watermarks,
    },
};

/// Result of a page or line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// Decoded and applied.
    Accepted,
    /// The watch has to be relisted.
    Relist,
    /// Not decoded, or an error status: the watch would be retried.
    Refused,
}

/// Decodes one list and watch into a sink.
struct Decoder<S> {
    reader: Reader<S>,
    /// Continue token of the next page; empty for a first page.
    token: String,
    version: String,
}

impl<S: Sink> Decoder<S> {
    fn new(sink: S) -> Self {
        let (token, version) = Default::default();
        Self { reader: Reader::new(sink, Watermarks::default().register()), token, version }
    }

    fn page(&mut self, bytes: &[u8]) -> Decoded {
        let token = std::mem::take(&mut self.token);
        if token.is_empty() {
            self.reader.sink.begin();
        }
        match watching::Page::read(bytes).and_then(|page| self.reader.page(page, &token)) {
            Ok(ListProgress::Complete(version)) => self.version = version,
            Ok(ListProgress::More(next)) => self.token = next,
            Err(_) => return Decoded::Refused,
        }
        Decoded::Accepted
    }

    fn line(&mut self, line: &[u8]) -> Decoded {
        match self.reader.line(line, &mut self.version) {
            Ok(None) => Decoded::Accepted,
            Ok(Some(_)) => Decoded::Relist,
            Err(error) if error.is_gone() => Decoded::Relist,
            Err(_) => Decoded::Refused,
        }
    }
}

/// Decodes a watch of the plan into a core.
pub struct WatchDecoder(Decoder<PlannedSink>);

impl WatchDecoder {
    /// A decoder before its first page. `namespace` is that of the agent's own objects.
    pub fn new(started: StartedWatch, namespace: &str, core: Core) -> Self {
        Self(Decoder::new(PlannedSink::new(started, namespace, core, Discovery::default())))
    }

    /// Decodes a list page: the first one, or the one after the last.
    pub fn page(&mut self, page: &[u8]) -> Decoded {
        self.0.page(page)
    }

    /// Decodes a watch line.
    pub fn line(&mut self, line: &[u8]) -> Decoded {
        self.0.line(line)
    }

    /// Reports whether the list has another page.
    pub fn is_listing(&self) -> bool {
        !self.0.token.is_empty()
    }

    /// The resourceVersion from which the watch would continue; empty before a list was complete.
    pub fn version(&self) -> &str {
        &self.0.version
    }
}

/// Decodes the agent's ConfigMap into plan and settings.
pub struct ConfigDecoder {
    decoder: Decoder<Single<PlanSource>>,
    followed: watch::Receiver<PlanState>,
    settings: CurrentSettings,
}

impl ConfigDecoder {
    /// A decoder before its first page.
    pub fn new(namespace: &str) -> Self {
        let (publish, followed) = watch::channel(PlanState::default());
        let (publish_settings, settings) = watch::channel(None);
        let pending = Readiness::default().pending("plan");
        let source =
            PlanSource::new(namespace.to_owned(), publish, Some(publish_settings), pending, Metrics::default());
        Self { decoder: Decoder::new(source), followed, settings }
    }

    /// Decodes a list page: the first one, or the one after the last.
    pub fn page(&mut self, page: &[u8]) -> Decoded {
        self.decoder.page(page)
    }

    /// Decodes a watch line.
    pub fn line(&mut self, line: &[u8]) -> Decoded {
        self.decoder.line(line)
    }

    /// The last valid plan.
    pub fn plan(&self) -> Option<Arc<Plan>> {
        self.followed.borrow().plan.clone()
    }

    /// The last valid settings.
    pub fn settings(&self) -> Option<Arc<Settings>> {
        self.settings.borrow().clone()
    }

    /// Error of the newest ConfigMap, as reported in heartbeats.
    pub fn error(&self) -> Option<String> {
        self.followed.borrow().error.clone()
    }
}

/// Splits the frames of a watch response into lines; an unterminated last line is dropped. `None` if a line is too
/// long.
pub fn lines<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> Option<Vec<Vec<u8>>> {
    let mut buffer = LineBuffer::default();
    let mut lines = Vec::new();
    for frame in frames {
        buffer.push(frame).ok()?;
        while let Some(line) = buffer.line() {
            lines.push(line.to_vec());
        }
    }
    Some(lines)
}

/// The preferred version in the document of an API group.
pub fn preferred_version(document: &[u8]) -> Option<String> {
    watching::versions_of(document).ok()?.into_iter().next()
}

/// A resource in the document of a group version.
pub fn served(document: &[u8], version: &str, resource: &str) -> Option<ServedResource> {
    watching::find_resource(document, version.to_owned(), resource).ok()?
}

/// Reports whether `text` is a kubeconfig in JSON that the agent accepts. Reads client certificates that it references
/// as files.
pub fn is_kubeconfig(text: &[u8]) -> bool {
    kubernetes::is_kubeconfig(text)
}
