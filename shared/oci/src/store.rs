//! Contents by digest in a disposable folder, and the manifests of known tags.
//!
//! The folder saves requests and carries module versions over a restart while the registry is down; it is never needed.
//! Each content is verified when it is read. An operation that fails is counted and logged, and the caller goes on
//! without the folder: a full, read-only or damaged disk stops nothing.

mod folder;
mod tags;
#[cfg(test)]
mod tests;

use std::{io, path::Path, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;
use tidewatch_kit::{
    log_error,
    metrics::{ReasonLabel, ResultLabel},
};
use tokio::task::spawn_blocking;

use super::{digest::Digest, metrics::Metrics};
use folder::{Folder, Found};
use tags::Tags;

/// Private folder in the one of `--oci-content-dir`, which may be a mount that others own.
const FOLDER: &str = "oci";
/// File of the tags.
const TAGS: &str = "tags.json";

/// The store. Clones share it.
#[derive(Clone, Debug)]
pub struct Store {
    state: Arc<Mutex<State>>,
    /// Under a lock of its own, which is held without disk access.
    tags: Arc<Mutex<Tags>>,
    metrics: Metrics,
}

#[derive(Debug)]
struct State {
    /// `None` if it cannot be used.
    folder: Option<Folder>,
    /// True after a failed write, which is logged once until the next success.
    failing: bool,
}

impl Store {
    /// Opens the folder, which is created if necessary, and shrinks it to its limit. Blocking: called at start.
    pub fn open(directory: &Path, max_bytes: u64, metrics: Metrics) -> Self {
        let opened = Folder::open(directory.join(FOLDER), max_bytes).and_then(|mut folder| {
            let evicted = folder.evict(max_bytes)?;
            let tags = folder.read_file(TAGS, tags::MAX_BYTES)?;
            Ok((folder, evicted, tags))
        });
        let (folder, tags) = match opened {
            Ok((folder, evicted, tags)) => {
                metrics.store_evictions.inc_by(evicted);
                (Some(folder), tags.and_then(|json| Tags::parse(&json)).unwrap_or_default())
            }
            Err(error) => {
                metrics.store_errors.get_or_create(&ReasonLabel { reason: "open" }).inc();
                log_error!(warn, &error, path = %directory.display(), "Content folder cannot be used, contents stay in memory");
                (None, Tags::default())
            }
        };
        let state = Arc::new(Mutex::new(State { folder, failing: false }));
        let store = Self { state, tags: Arc::new(Mutex::new(tags)), metrics };
        store.measure(&store.state.lock());
        store
    }

    /// Reads a content; `None` if it is absent, damaged or unreadable.
    pub async fn get(&self, digest: Digest) -> Option<Bytes> {
        self.blocking(move |store, state| {
            let found = match state.folder.as_mut()?.read(&digest) {
                Ok(found) => found,
                Err(error) => {
                    store.failed(state, "read", &error);
                    return None;
                }
            };
            store.measure(state);
            let (result, content) = match found {
                Found::Content(content) => ("hit", Some(content.into())),
                Found::Absent => ("miss", None),
                Found::Corrupt => {
                    tracing::warn!(%digest, "Stored content does not match its digest, it is fetched again");
                    ("corrupt", None)
                }
            };
            store.metrics.store_reads.get_or_create(&ResultLabel { result }).inc();
            content
        })
        .await
        .flatten()
    }

    /// Writes a content that was verified.
    pub async fn put(&self, digest: Digest, content: Bytes) {
        let write = move |store: &Self, state: &mut State| {
            let Some(folder) = state.folder.as_mut() else { return };
            match folder.write(&digest, &content) {
                Ok(evicted) => {
                    store.metrics.store_evictions.inc_by(evicted);
                    state.failing = false;
                }
                Err(error) => store.failed(state, "write", &error),
            }
            store.measure(state);
        };
        self.blocking(write).await;
    }

    /// Digest of the manifest that a tag led to.
    pub fn tag(&self, artefact: &str) -> Option<Digest> {
        self.tags.lock().get(artefact)
    }

    /// Records the manifest of a tag, or forgets it.
    pub async fn set_tag(&self, artefact: String, manifest: Option<Digest>) {
        let write = move |store: &Self, state: &mut State| {
            let json = {
                let mut tags = store.tags.lock();
                if tags.set(&artefact, manifest) { tags.to_json() } else { None }
            };
            let Some((folder, json)) = state.folder.as_ref().zip(json) else { return };
            if let Err(error) = folder.write_file(TAGS, &json) {
                store.failed(state, "write", &error);
            }
        };
        self.blocking(write).await;
    }

    /// Path of a content.
    #[cfg(test)]
    pub(crate) fn path(&self, digest: &Digest) -> Option<std::path::PathBuf> {
        self.state.lock().folder.as_ref().map(|folder| folder.path(digest))
    }

    /// Runs an operation on a thread for blocking work; `None` when the runtime shuts down.
    async fn blocking<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&Self, &mut State) -> T + Send + 'static,
    ) -> Option<T> {
        let store = self.clone();
        spawn_blocking(move || operation(&store, &mut store.state.lock())).await.ok()
    }

    fn failed(&self, state: &mut State, reason: &'static str, error: &io::Error) {
        self.metrics.store_errors.get_or_create(&ReasonLabel { reason }).inc();
        if !std::mem::replace(&mut state.failing, true) {
            log_error!(warn, error, reason, "Content folder failed, contents stay in memory");
        }
    }

    fn measure(&self, state: &State) {
        let bytes = state.folder.as_ref().map_or(0, Folder::bytes);
        self.metrics.store_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
}
