//! Metadata of a watch from the plan and from API discovery.

use tidewatch_api::plan::{PlannedWatch, Work};

/// Fields that all events of a watch share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WatchInfo {
    /// Name of the watch in the plan, which several watches have that are on resources of one group.
    pub(crate) watch: Box<str>,
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
        let PlannedWatch { name, group, version, resource, manager, work, .. } = planned;
        let [watch, group, version, resource, manager] =
            [name, group, version, resource, manager].map(|text| text.as_str().into());
        Self { watch, group, version, resource, kind: "".into(), manager, forward: work.contains(&Work::Forward) }
    }
}
