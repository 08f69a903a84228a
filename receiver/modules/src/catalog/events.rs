//! Kubernetes Events regarding the control plane's catalog: objects left out of it, and removals that wait for a
//! confirmation.

use tidewatch_api::names::RELEASES;
use tidewatch_fleet::recorder::{PendingEvent, Regarding};

use super::CatalogUpdate;

impl CatalogUpdate {
    /// Events of this change: one per new omission, one per newly held removal, on its release meta, and one on the ConfigMap of the
    /// releases for a newly lost state. `namespace` is that of KCP's catalog.
    pub fn events(&self, namespace: &str) -> Vec<PendingEvent> {
        let left_out = self.left_out.iter().map(|left| {
            let kind = left.id.kind.name();
            let name = left.id.name.to_string();
            let regarding = Regarding { kind, namespace: namespace.to_owned(), name, uid: left.uid.clone() };
            PendingEvent::warning(regarding, "LeftOutOfCatalog", left.reason.to_string())
        });
        let held = self.held.iter().map(|held| {
            let regarding = Regarding::release_meta(namespace, &held.module, "");
            PendingEvent::warning(regarding, "RemovalHeld", held.to_string())
        });
        let lost = self.lost.iter().map(|lost| {
            let regarding = Regarding::config_map(namespace, RELEASES);
            PendingEvent::warning(regarding, "AcceptedReleasesLost", lost.to_string())
        });
        left_out.chain(held).chain(lost).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::Arc};

    use tidewatch_select::catalog::{
        desired::{Kind, ObjectId},
        holds::Holds,
        removal_guard::{HeldRemoval, LossCause, LostReleases, Part},
        snapshot::{Omission, OmissionReason, Snapshot},
    };

    use super::*;

    #[test]
    fn omissions_and_held_removals_are_reported_on_their_objects() {
        let left = Omission {
            id: ObjectId::new(Kind::Template, "keda-wrong"),
            uid: "u-1".to_owned(),
            reason: OmissionReason::Name { expected: "keda-1.0.0".to_owned() },
        };
        let held = [("keda", Part::Channel("fast".to_owned())), ("warden", Part::Module)].map(|(module, part)| {
            HeldRemoval { change: "c0ffee".to_owned(), module: module.to_owned(), part, runtimes: 4, of: 9 }
        });
        let lost = LostReleases { change: "f00d".to_owned(), cause: LossCause::Missing };
        let now = Arc::new(Snapshot::new([], [], &BTreeSet::new(), Holds::default()));
        let nothing = CatalogUpdate {
            before: None,
            now,
            held: Vec::new(),
            lost: None,
            no_longer_held: BTreeSet::new(),
            left_out: Vec::new(),
            is_decision: true,
        };
        assert!(nothing.events("kcp-system").is_empty());
        let update = CatalogUpdate { held: held.into(), lost: Some(lost), left_out: vec![left], ..nothing };
        let events = update.events("kcp-system");
        let reported: Vec<_> = events
            .iter()
            .map(|event| (event.regarding.kind, &*event.regarding.name, &*event.regarding.uid, event.reason))
            .collect();
        assert_eq!(
            reported,
            [
                ("ModuleTemplate", "keda-wrong", "u-1", "LeftOutOfCatalog"),
                ("ModuleReleaseMeta", "keda", "", "RemovalHeld"),
                ("ModuleReleaseMeta", "warden", "", "RemovalHeld"),
                ("ConfigMap", "tidewatch-releases", "", "AcceptedReleasesLost"),
            ]
        );
        assert!(events.iter().all(|event| event.warning && event.regarding.namespace == "kcp-system"));
        assert_eq!(events[0].note, "it is left out: its name should be keda-1.0.0");
        assert!(
            events[1].note.contains("4 of 9 runtimes") && events[1].note.ends_with("names c0ffee"),
            "{}",
            events[1].note
        );
        assert!(events[3].note.contains("are missing: every removal waits") && events[3].note.contains("names f00d"));
    }
}
