use std::borrow::Cow;

use kube::runtime::reflector::Lookup;
use serde_json::{Value, json};
use tidewatch_api::{
    names::{annotation, finalizer, label},
    selection::{ModuleSelection, SelectedVersion},
};

use super::*;

fn kyma(change: impl FnOnce(&mut Value)) -> Kyma {
    let mut kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
        "metadata": {"name": "k", "namespace": "ns", "uid": "u", "resourceVersion": "7", "labels": {"team": "a"}},
        "spec": {"channel": "regular"}});
    change(&mut kyma);
    serde_json::from_value(kyma).unwrap()
}

fn condition(kind: &str, status: &str) -> Value {
    json!({"type": kind, "status": status, "reason": "r", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

/// Everything that readers of both forms find.
fn read(kyma: &CachedKyma) -> impl PartialEq + std::fmt::Debug + use<> {
    let facts = kyma.facts();
    let flags =
        [facts.is_deleting(), facts.is_managed(), facts.has_finalizer(), facts.skips_windows(), facts.lacks_access()];
    let labels = facts.labels().clone();
    let runtime = facts.runtime();
    let version = facts.object_version().map(str::to_owned);
    let names = [Lookup::name(kyma), Lookup::namespace(kyma)].map(|name| name.map(Cow::into_owned));
    (flags, labels, runtime, facts.uid().to_owned(), version, names, kyma.key())
}

#[test]
fn both_forms_have_the_same_facts() {
    let kymas = [
        kyma(|_| ()),
        kyma(|kyma| kyma["metadata"]["labels"] = json!({label::RUNTIME_ID: "r-1", "team": "b"})),
        kyma(|kyma| kyma["metadata"]["labels"] = Value::Null),
        kyma(|kyma| kyma["metadata"]["uid"] = Value::Null),
        kyma(|kyma| kyma["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z")),
        kyma(|kyma| kyma["metadata"]["annotations"] = json!({annotation::INPUTS: "-.-"})),
        kyma(|kyma| kyma["metadata"]["finalizers"] = json!(["other", finalizer::KYMA])),
        kyma(|kyma| kyma["spec"]["skipMaintenanceWindows"] = json!(true)),
        kyma(|kyma| kyma["status"] = json!({"conditions": [condition("RuntimeAccess", "False")]})),
        kyma(|kyma| kyma["status"] = json!({"conditions": [condition("RuntimeAccess", "True")]})),
        kyma(|kyma| kyma["status"] = json!({"conditions": [condition("EventPath", "False")]})),
    ];
    let mut seen = Vec::new();
    for kyma in kymas {
        let whole = CachedKyma::from(kyma.clone());
        let reduced = CachedKyma::reduced(&kyma);
        assert_eq!((whole.is_reduced(), reduced.is_reduced()), (false, true));
        assert_eq!(read(&whole), read(&reduced));
        assert_eq!(whole.whole().map(AsRef::as_ref), Some(&kyma));
        assert!(reduced.whole().is_none());
        seen.push(read(&reduced));
    }
    // The last two differ from the first in nothing that is a fact.
    let plain = seen.iter().filter(|facts| **facts == seen[0]).count();
    assert_eq!(plain, 3, "each fact is in one of them");
}

#[test]
fn both_forms_select_the_same_modules() {
    let modules = json!([{"name": "keda", "managed": true}, {"name": "warden", "channel": "fast", "managed": true},
        {"name": "pinned", "channel": "fast", "managed": true}, {"name": "empty", "channel": "", "managed": true}]);
    let pin = "version.operator.kyma-project.io/pinned";
    let accepted = |text: &str| {
        kyma(|kyma| {
            kyma["metadata"]["annotations"] = json!({annotation::ACCEPTED_SPEC: text, pin: "1.0.0"});
            kyma["spec"]["modules"] = modules.clone();
        })
    };
    let kymas = [
        kyma(|kyma| kyma["metadata"]["annotations"] = json!({pin: "1.0.0"})),
        kyma(|kyma| {
            kyma["spec"]["modules"] = modules.clone();
            kyma["metadata"]["annotations"] = json!({pin: "1.0.0"});
        }),
        accepted(r#"{"channel": "fast", "modules": [{"name": "keda"}, {"name": "keda", "channel": "rapid"}]}"#),
        accepted(
            r#"{"channel": "fast", "modules": [{"name": "pinned", "channel": "rapid"}, {"name": "empty", "version": "3.0.0"}],
                "pins": {"pinned": "2.0.0", "keda": "1.0.0"}, "other": "warden"}"#,
        ),
        accepted(r#"{"channel": "fast", "modules": [{"name": "pinned", "channel": "rapid"}]}"#),
        accepted(r#"{"channel": "fast"}"#),
        accepted("{keda and warden"),
        accepted(""),
    ];
    let names = ["keda", "warden", "pinned", "empty", "unknown"];
    let selected = |kyma: &CachedKyma| names.map(|name| kyma.facts().selected(name));
    let all: Vec<_> = kymas.iter().map(|kyma| selected(&CachedKyma::reduced(kyma))).collect();
    for (kyma, reduced) in kymas.iter().zip(&all) {
        assert_eq!(&selected(&CachedKyma::from(kyma.clone())), reduced, "{:?}", kyma.metadata.annotations);
    }
    let channel = |channel: &str| Some(SelectedVersion::Channel(channel.to_owned()));
    let version = |version: &str| Some(SelectedVersion::Version(version.to_owned()));
    assert_eq!(all[0], [None, None, None, None, None], "a pin selects no module");
    assert_eq!(all[1], [channel("regular"), channel("fast"), version("1.0.0"), channel("regular"), None]);
    assert_eq!(all[2], [channel("fast"), None, None, None, None], "the first entry");
    assert_eq!(all[3], [None, None, version("2.0.0"), channel("fast"), None], "the pin of the runtime wins");
    assert_eq!(all[4], [None, None, version("1.0.0"), None, None]);
    assert_eq!(all[6], [channel("regular"), channel("fast"), None, None, None], "malformed: those that it names");
    let pinned = |kyma: &Kyma| {
        let selection = ModuleSelection::of(kyma);
        selection.pinned().map(|(module, version)| format!("{module} {version}")).collect::<Vec<_>>()
    };
    assert_eq!((pinned(&kymas[2]), pinned(&kymas[3])), (vec![], vec!["pinned 2.0.0".to_owned()]));
}
