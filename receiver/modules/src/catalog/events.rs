//! Kubernetes Events regarding the control plane's catalog: objects left out of it, and removals that wait for a
//! confirmation.

use tidewatch_api::names::RELEASES;
use tidewatch_fleet::recorder::{PendingEvent, Regarding};
use tidewatch_select::catalog::{
    desired::{Kind, ObjectId},
    removal_guard::{HeldRemoval, LostReleases},
    snapshot::Omission,
};

use super::CatalogUpdate;

impl CatalogUpdate {
    /// Events of this change; `namespace` is that of KCP's catalog.
    pub fn events(&self, namespace: &str) -> Vec<PendingEvent> {
        compose(namespace, &self.left_out, &self.held, self.lost.as_ref())
    }
}

/// Composes one Event per new omission and per newly held removal, on its release meta, and one on the ConfigMap of the releases
/// for a newly lost state.
fn compose(
    namespace: &str,
    left_out: &[Omission],
    held: &[HeldRemoval],
    lost: Option<&LostReleases>,
) -> Vec<PendingEvent> {
    let event = |id: &ObjectId, uid: &str, reason, note| {
        let regarding = Regarding {
            kind: id.kind.name(),
            namespace: namespace.to_owned(),
            name: id.name.to_string(),
            uid: uid.to_owned(),
        };
        PendingEvent { regarding, warning: true, reason, note }
    };
    let left_out = left_out.iter().map(|left| event(&left.id, &left.uid, "LeftOutOfCatalog", left.reason.to_string()));
    let held = held.iter().map(|held| {
        let id = ObjectId::new(Kind::ReleaseMeta, &held.module);
        event(&id, "", "RemovalHeld", held.to_string())
    });
    let lost = lost.map(|lost| {
        let regarding = Regarding::config_map(namespace, RELEASES);
        let note = lost.to_string();
        PendingEvent { regarding, warning: true, reason: "AcceptedReleasesLost", note }
    });
    left_out.chain(held).chain(lost).collect()
}

#[cfg(test)]
mod tests {
    use tidewatch_select::catalog::{
        removal_guard::{LossCause, Part},
        snapshot::OmissionReason,
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
        let events = compose("kcp-system", std::slice::from_ref(&left), &held, Some(&lost));
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
        assert!(compose("kcp-system", &[], &[], None).is_empty());
    }
}
