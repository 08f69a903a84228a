//! Metadata of a watch from the plan and from API discovery.

use tidewatch_shared::plan::{PlannedWatch, Work};

/// Fields that all events of a watch share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WatchInfo {
    /// API group.
    pub(crate) group: Box<str>,
    /// API version; that of the plan until discovery has resolved it.
    pub(crate) version: Box<str>,
    /// Plural resource name.
    pub(crate) resource: Box<str>,
    /// Kind; empty until discovery has resolved it.
    pub(crate) kind: Box<str>,
    /// Manager that receives the events.
    pub(crate) manager: Box<str>,
    /// The receiver forwards the events to another manager, which understands single objects only.
    pub(crate) forward: bool,
}

impl WatchInfo {
    /// Metadata as the plan defines it, before discovery.
    pub(crate) fn of(planned: &PlannedWatch) -> Self {
        let PlannedWatch { group, version, resource, manager, work, .. } = planned;
        let [group, version, resource, manager] = [group, version, resource, manager].map(|text| text.as_str().into());
        Self { group, version, resource, kind: "".into(), manager, forward: work.contains(&Work::Forward) }
    }
}
