//! Whom a change concerns (`03`, Which Kymas wake).

use std::sync::Arc;

use tidewatch_shared::api::Kyma;

use super::essence::{self, Decided, Moved, Release, key_of};
use crate::key::KymaKey;

/// What a change of a Kyma asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum KymaMoved {
    /// Its reconcile.
    Reconcile,
    /// Its reconcile and its catalog: it is new, or may see something else.
    Everything,
}

/// A Kyma moved.
pub(super) fn kyma(now: &Decided, moved: &Moved<Decided>) -> KymaMoved {
    match moved {
        Moved::From(old) if !now.labels_moved(old) => KymaMoved::Reconcile,
        _ => KymaMoved::Everything,
    }
}

/// A release meta moved: the Kymas that follow one of the channels that moved, or all that use the module when something else moved.
pub(super) fn release(kymas: &[Arc<Kyma>], module: &str, now: Option<&Release>, old: Option<&Release>) -> Vec<KymaKey> {
    let channels = match (now, old) {
        (Some(now), Some(old)) if now.decided.labels_moved(&old.decided) => None,
        (Some(now), Some(old)) => Some(now.moved_channels(old)).filter(|moved| !moved.is_empty()),
        _ => None,
    };
    users(kymas, module, channels.as_deref())
}

/// Kymas that use a module, on certain channels or on any.
pub(super) fn users(kymas: &[Arc<Kyma>], module: &str, channels: Option<&[String]>) -> Vec<KymaKey> {
    let concerned = kymas.iter().filter(|kyma| essence::follows(kyma, module, channels));
    concerned.map(|kyma| key_of(kyma.as_ref())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_shared::api::ModuleReleaseMeta;

    use super::*;

    fn kyma_named(name: &str, module: &str, channel: Option<&str>) -> Arc<Kyma> {
        let mut status = json!({"name": module, "state": "Ready"});
        if let Some(channel) = channel {
            status["channel"] = json!(channel);
        }
        let kyma = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": name, "namespace": "kcp-system"},
            "spec": {"channel": "regular"}, "status": {"state": "Ready", "modules": [status]}
        });
        Arc::new(serde_json::from_value(kyma).unwrap())
    }

    fn release_of(channels: &[(&str, &str)], label: &str) -> Release {
        let channels: Vec<_> =
            channels.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
        let meta = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": "template-operator", "labels": {"x": label}},
            "spec": {"moduleName": "template-operator", "channels": channels}
        });
        Release::of(&serde_json::from_value::<ModuleReleaseMeta>(meta).unwrap())
    }

    #[test]
    fn a_moved_channel_wakes_those_who_follow_it_and_nobody_else() {
        let kymas = [
            kyma_named("fast", "template-operator", Some("fast")),
            kyma_named("regular", "template-operator", Some("regular")),
            kyma_named("unresolved", "template-operator", None),
            kyma_named("other", "warden", Some("fast")),
        ];
        let names = |now: Option<&Release>, old: Option<&Release>| -> Vec<String> {
            release(&kymas, "template-operator", now, old).into_iter().map(|key| key.name).collect()
        };
        let old = release_of(&[("fast", "1.0.0"), ("regular", "1.0.0")], "a");
        let moved = release_of(&[("fast", "2.0.0"), ("regular", "1.0.0")], "a");
        assert_eq!(names(Some(&moved), Some(&old)), ["fast", "unresolved"]);
        let relabelled = release_of(&[("fast", "1.0.0"), ("regular", "1.0.0")], "b");
        assert_eq!(names(Some(&relabelled), Some(&old)), ["fast", "regular", "unresolved"]);
        assert_eq!(names(None, Some(&old)), ["fast", "regular", "unresolved"]);
    }
}
