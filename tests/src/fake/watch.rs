//! One watch: a body of lines that follows a runtime's changes.

use std::{convert::Infallible, fmt::Write as _, time::Duration};

use bytes::Bytes;
use futures::{Stream, stream};
use http_body::Frame;
use tokio::time::{Instant, timeout_at};

use super::{FakeCluster, select::Selection, store::Change};

/// Without a change, a watch says every so often how far it is.
const BOOKMARK: Duration = Duration::from_secs(30);
/// Changes of one chunk.
const CHUNK: usize = 256;

/// How far an open watch is, for [`FakeCluster::seen`].
pub(super) struct Place {
    cluster: FakeCluster,
    number: u64,
}

impl Place {
    pub(super) fn new(cluster: &FakeCluster, position: u64) -> Self {
        let number = cluster.read().open(position);
        Self { cluster: cluster.clone(), number }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.cluster.read().close(self.number);
    }
}

/// What a watch was asked for.
pub(super) struct Watch {
    pub(super) cluster: FakeCluster,
    /// What the keys of its objects begin with.
    pub(super) prefix: String,
    pub(super) selection: Selection,
    pub(super) only_metadata: bool,
    /// Changes above this are told.
    pub(super) position: u64,
    /// Where it says how far it is.
    pub(super) place: Place,
    /// When the server ends it.
    pub(super) end: Instant,
    /// `apiVersion` and `kind` of bookmarks.
    pub(super) kind: (String, String),
}

impl Watch {
    /// The lines, until its time is over or it is too far behind.
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
            // Registered before looking, so that no change falls between.
            changed.as_mut().enable();
            if let Some(text) = self.look() {
                return Some(text);
            }
            if timeout_at(self.end.min(bookmark), changed).await.is_err() {
                return (Instant::now() < self.end).then(|| self.bookmark());
            }
        }
    }

    fn look(&mut self) -> Option<String> {
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
            if let Some((kind, object)) = self.told(change) {
                // Writing to a string cannot fail.
                let _ = writeln!(text, r#"{{"type":"{kind}","object":{object}}}"#);
                lines += 1;
            }
            if lines == CHUNK {
                break;
            }
        }
        store.reach(self.place.number, self.position);
        (!text.is_empty()).then_some(text)
    }

    /// What this watch says of a change: an object may enter or leave the selection.
    fn told(&self, change: &Change) -> Option<(&'static str, String)> {
        if !change.key.starts_with(&self.prefix) {
            return None;
        }
        let selects = |stored: &&super::store::Stored| self.selection.selects(&stored.metadata);
        let (before, after) = (change.before.as_ref().filter(selects), change.after.as_ref().filter(selects));
        match (before, after) {
            (None, Some(after)) => Some(("ADDED", after.text(self.only_metadata))),
            (Some(_), Some(after)) => Some(("MODIFIED", after.text(self.only_metadata))),
            (Some(before), None) => {
                // As the object was, but with the version of its going.
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
