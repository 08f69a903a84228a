//! What the plan and discovery know of a watch.

use tidewatch_shared::plan::{PlannedWatch, Work};

/// What every event of a watch says alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    /// API group.
    pub(crate) group: Box<str>,
    /// API version; the plan's until discovery has resolved it.
    pub(crate) version: Box<str>,
    /// Plural resource name.
    pub(crate) resource: Box<str>,
    /// Kind; empty until discovery has told it.
    pub(crate) kind: Box<str>,
    /// Who is told.
    pub(crate) manager: Box<str>,
    /// The events go to another manager, which knows objects only.
    pub(crate) forward: bool,
}

impl Facts {
    /// What the plan alone tells.
    pub(crate) fn of(planned: &PlannedWatch) -> Self {
        let PlannedWatch { group, version, resource, manager, work, .. } = planned;
        let [group, version, resource, manager] = [group, version, resource, manager].map(|text| text.as_str().into());
        Self { group, version, resource, kind: "".into(), manager, forward: work.contains(&Work::Forward) }
    }
}
