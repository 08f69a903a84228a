//! Kubernetes Events about the catalog of the control plane: objects left out of it, and removals that wait for a confirmation.

use super::{
    Renewed,
    desired::{Kind, ObjectId},
    facts::Held,
    snapshot::LeftOut,
};
use crate::kube::record::{About, News};

impl Renewed {
    /// The Events of this change. `namespace` is that of the objects.
    pub(crate) fn events(&self, namespace: &str) -> Vec<News> {
        compose(namespace, &self.left_out, self.held.as_ref())
    }
}

/// What is new of the catalog: what was left out of it, and what waits for a confirmation. `namespace` is that of the objects.
fn compose(namespace: &str, left_out: &[LeftOut], held: Option<&Held>) -> Vec<News> {
    let tell = |id: &ObjectId, uid: &str, reason, note| {
        let about = About {
            kind: id.kind.name(),
            namespace: namespace.to_owned(),
            name: id.name.to_string(),
            uid: uid.to_owned(),
        };
        News { about, warning: true, reason, note }
    };
    let left_out = left_out.iter().map(|left| tell(&left.id, &left.uid, "LeftOutOfCatalog", left.fault.to_string()));
    let held = held.into_iter().flat_map(|held| {
        held.modules.iter().map(|module| {
            let id = ObjectId::new(Kind::ReleaseMeta, module);
            tell(&id, "", "RemovalHeld", held.to_string())
        })
    });
    left_out.chain(held).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::catalog::snapshot::Fault;

    #[test]
    fn omissions_and_held_removals_are_reported_on_their_objects() {
        let left = LeftOut {
            id: ObjectId::new(Kind::Template, "keda-wrong"),
            uid: "u-1".to_owned(),
            fault: Fault::Name { expected: "keda-1.0.0".to_owned() },
        };
        let modules = ["keda", "warden"].map(str::to_owned).into();
        let held = Held { change: "c0ffee".to_owned(), modules, runtimes: 4, of: 9 };
        let told = compose("kcp-system", std::slice::from_ref(&left), Some(&held));
        let seen: Vec<_> =
            told.iter().map(|news| (news.about.kind, &*news.about.name, &*news.about.uid, news.reason)).collect();
        assert_eq!(
            seen,
            [
                ("ModuleTemplate", "keda-wrong", "u-1", "LeftOutOfCatalog"),
                ("ModuleReleaseMeta", "keda", "", "RemovalHeld"),
                ("ModuleReleaseMeta", "warden", "", "RemovalHeld"),
            ]
        );
        assert!(told.iter().all(|news| news.warning && news.about.namespace == "kcp-system"));
        assert_eq!(told[0].note, "it is left out: its name should be keda-1.0.0");
        assert!(told[1].note.contains("4 of 9 runtimes") && told[1].note.ends_with("says c0ffee"), "{}", told[1].note);
        assert!(compose("kcp-system", &[], None).is_empty());
    }
}
