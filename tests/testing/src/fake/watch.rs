//! One watch: a response body of lines that follows a runtime's changes.

use std::{convert::Infallible, fmt::Write as _, time::Duration};

use bytes::Bytes;
use futures::{Stream, stream};
use http_body::Frame;
use tokio::time::{Instant, timeout_at};

use super::{FakeCluster, select::Selection, store::Change};

/// Interval of bookmarks without changes.
const BOOKMARK: Duration = Duration::from_secs(30);
/// Most changes in one chunk.
const CHUNK: usize = 256;

/// Position of an open watch, for [`FakeCluster::delivered_version`].
pub(super) struct WatchPosition {
    cluster: FakeCluster,
    number: u64,
}

impl WatchPosition {
    pub(super) fn new(cluster: &FakeCluster, position: u64) -> Self {
        let number = cluster.read().open(position);
        Self { cluster: cluster.clone(), number }
    }
}

impl Drop for WatchPosition {
    fn drop(&mut self) {
        self.cluster.read().close(self.number);
    }
}

/// Parameters and position of a watch.
pub(super) struct Watch {
    pub(super) cluster: FakeCluster,
    /// Key prefix of its objects.
    pub(super) prefix: String,
    pub(super) selection: Selection,
    pub(super) only_metadata: bool,
    /// Changes above this version are delivered.
    pub(super) position: u64,
    /// Its registration in the store.
    pub(super) registration: WatchPosition,
    /// Time at which the server ends it.
    pub(super) end: Instant,
    /// `apiVersion` and `kind` of bookmarks.
    pub(super) kind: (String, String),
}

impl Watch {
    /// The lines, until its end or until it is too far behind.
    pub(super) fn lines(self) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send {
        stream::unfold(Some(self), |watch| async move {
            let mut watch = watch?;
            let text = watch.next().await?;
            let over = text.contains(r#""type":"ERROR""#);
            Some((Ok(Frame::data(Bytes::from(text))), (!over).then_some(watch)))
        })
    }

    /// The next lines; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        let bookmark = Instant::now() + BOOKMARK;
        loop {
            let cluster = self.cluster.clone();
            let mut changed = std::pin::pin!(cluster.changed().notified());
            // Registered before the store is read, so that no change is missed in between.
            changed.as_mut().enable();
            if let Some(text) = self.poll() {
                return Some(text);
            }
            if timeout_at(self.end.min(bookmark), changed).await.is_err() {
                return (Instant::now() < self.end).then(|| self.bookmark());
            }
        }
    }

    fn poll(&mut self) -> Option<String> {
        let cluster = self.cluster.clone();
        let mut store = cluster.read();
        let Some(changes) = store.changes(self.position) else {
            let status = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410}"#;
            return Some(format!("{{\"type\":\"ERROR\",\"object\":{status}}}\n"));
        };
        let mut text = String::new();
        let mut lines = 0;
        for change in changes {
            self.position = change.version;
            if let Some((kind, object)) = self.event_of(change) {
                // Writing to a string cannot fail.
                let _ = writeln!(text, r#"{{"type":"{kind}","object":{object}}}"#);
                lines += 1;
            }
            if lines == CHUNK {
                break;
            }
        }
        store.reach(self.registration.number, self.position);
        (!text.is_empty()).then_some(text)
    }

    /// The event of a change for this watch: an object may enter or leave the selection.
    fn event_of(&self, change: &Change) -> Option<(&'static str, String)> {
        if !change.key.starts_with(&self.prefix) {
            return None;
        }
        let selects = |stored: &&super::store::Stored| self.selection.selects(&stored.metadata);
        let before = change.before.as_ref().filter(selects);
        let after = change.after.as_ref().filter(selects);
        match (before, after) {
            (None, Some(after)) => Some(("ADDED", after.text(self.only_metadata))),
            (Some(_), Some(after)) => Some(("MODIFIED", after.text(self.only_metadata))),
            (Some(before), None) => {
                // The old object with the version of its deletion.
                let mut object: serde_json::Value =
                    serde_json::from_str(&before.text(self.only_metadata)).unwrap_or_default();
                object["metadata"]["resourceVersion"] = change.version.to_string().into();
                Some(("DELETED", object.to_string()))
            }
            (None, None) => None,
        }
    }

    fn bookmark(&self) -> String {
        let (version, kind) = &self.kind;
        let position = self.position;
        let object =
            format!(r#"{{"apiVersion":"{version}","kind":"{kind}","metadata":{{"resourceVersion":"{position}"}}}}"#);
        format!("{{\"type\":\"BOOKMARK\",\"object\":{object}}}\n")
    }
}
