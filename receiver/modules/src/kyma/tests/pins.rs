//! Versions that annotations pin, and the writes of Busola and the Kyma CLI, which know no pins.

use kube::{
    Api,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
};
use tidewatch_api::names::annotation;

use super::*;

const PIN: &str = "version.operator.kyma-project.io/keda";
const NOTICE: &str = "version 1.0.0 is pinned by the annotation version.operator.kyma-project.io/keda";

impl Fixture {
    /// `keda` 1.0.0 in the channel `regular`, which the Kyma follows, and 1.1.0 in `fast`.
    async fn for_pins(modules: Value) -> Self {
        let mut fixture = Self::settled().await;
        fixture.roll_out_at_once();
        fixture.publish(&["1.0.0", "1.1.0", "1.2.0"]);
        fixture.release(&[("regular", "1.0.0"), ("fast", "1.1.0")], json!([]));
        fixture.select(modules);
        assert!(fixture.kyma().await.failed.is_empty());
        fixture
    }

    /// Kymas of the runtime, as a user's program reads and writes them.
    fn users_api(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.runtime.client(), "kyma-system", &ApiResource::erase::<Kyma>(&()))
    }

    /// Busola sends the difference of two forms of the Kyma as a JSON patch.
    async fn busola(&mut self, operations: Value) {
        let patch: json_patch::Patch = serde_json::from_value(operations).unwrap();
        let patched = self.users_api().patch("default", &PatchParams::default(), &Patch::Json::<()>(patch)).await;
        patched.unwrap();
        assert!(self.kyma().await.failed.is_empty());
    }

    /// The Kyma CLI reads the Kyma into its own type, changes the modules, and replaces the Kyma. Its type has all
    /// metadata, but only the members of the spec that are named here.
    async fn kyma_cli(&mut self, change: impl FnOnce(&mut Vec<Value>)) {
        let mut kyma = self.users_api().get("default").await.unwrap();
        let known = |module: &Value| {
            let names = ["name", "controller", "channel", "customResourcePolicy", "managed"];
            names.into_iter().filter_map(|name| Some((name, module.get(name)?.clone()))).collect::<Value>()
        };
        let mut modules = kyma.data["spec"]["modules"].as_array().into_iter().flatten().map(known).collect();
        change(&mut modules);
        let status = |module: &Value| json!({"name": module["name"], "channel": module["channel"], "version": module["version"]});
        let shown: Vec<_> = kyma.data["status"]["modules"].as_array().into_iter().flatten().map(status).collect();
        kyma.data["spec"] = json!({"channel": kyma.data["spec"]["channel"], "modules": modules});
        kyma.data["status"] = json!({"modules": shown});
        self.users_api().replace("default", &PostParams::default(), &kyma).await.unwrap();
        assert!(self.kyma().await.failed.is_empty());
    }

    /// Sets or removes the pin of `keda` in the Kyma of the runtime.
    pub(super) async fn pin(&mut self, version: impl Into<Option<&str>>) {
        annotate(&self.runtime, "kymas/default", PIN, version.into());
        assert!(self.kyma().await.failed.is_empty());
    }

    async fn pin_in_kcp(&mut self, version: impl Into<Option<&str>>) {
        annotate(&self.kcp, "kymas/k", PIN, version.into());
        assert!(self.kyma().await.failed.is_empty());
    }

    fn pinned(&self) -> Value {
        self.runtime.object("kymas/default").unwrap()["metadata"]["annotations"][PIN].clone()
    }

    /// Channel and version of the only module in the status that the user sees.
    fn shown_source(&self) -> (Option<String>, Option<String>) {
        let module = &self.shown()["modules"][0];
        let text = |name: &str| module[name].as_str().map(str::to_owned);
        (text("channel"), text("version"))
    }
}

fn annotate(server: &FakeApiServer, id: &str, key: &str, value: Option<&str>) {
    server.edit(id, |kyma| {
        if kyma["metadata"]["annotations"].is_null() {
            kyma["metadata"]["annotations"] = json!({});
        }
        let annotations = kyma["metadata"]["annotations"].as_object_mut().unwrap();
        match value {
            Some(value) => drop(annotations.insert(key.to_owned(), value.into())),
            None => drop(annotations.remove(key)),
        }
    });
}

fn some(text: &str) -> Option<String> {
    Some(text.to_owned())
}

/// Busola writes `version` beside `channel` when a user chooses a channel, and leaves it there when the user returns to the
/// channel of the Kyma. API servers prune it; one whose definition of the Kyma still has it keeps it.
#[tokio::test]
async fn version_that_busola_writes_beside_a_channel_has_no_effect() {
    let mut fixture = Fixture::for_pins(json!([{"name": "keda", "managed": true}])).await;
    fixture
        .busola(json!([{"op": "add", "path": "/spec/modules/0/channel", "value": "fast"},
        {"op": "add", "path": "/spec/modules/0/version", "value": "1.1.0"}]))
        .await;
    assert_eq!(
        (fixture.module(), fixture.version()),
        (("Processing".to_owned(), String::new()), ("1.1.0".to_owned(), some("fast")))
    );
    fixture.release(&[("regular", "1.2.0"), ("fast", "1.1.0")], json!([]));
    fixture.busola(json!([{"op": "remove", "path": "/spec/modules/0/channel"}])).await;
    assert_eq!(
        (fixture.module(), fixture.version()),
        (("Processing".to_owned(), String::new()), ("1.2.0".to_owned(), some("regular")))
    );
}

/// Busola makes the user choose a channel if the module lacks that of the Kyma.
#[tokio::test]
async fn module_that_busola_adds_with_a_channel_and_a_version_follows_the_channel() {
    let mut fixture = Fixture::for_pins(json!([])).await;
    fixture.release(&[("fast", "1.1.0")], json!([]));
    fixture
        .busola(json!([{"op": "add", "path": "/spec/modules/0",
        "value": {"name": "keda", "channel": "fast", "version": "1.1.0"}}]))
        .await;
    assert_eq!(
        (fixture.module(), fixture.version()),
        (("Processing".to_owned(), String::new()), ("1.1.0".to_owned(), some("fast")))
    );
}

#[tokio::test]
async fn pin_survives_the_kyma_cli_which_can_delete_the_module() {
    let mut fixture = Fixture::for_pins(json!([{"name": "keda", "managed": true}])).await;
    fixture.pin("1.0.0").await;
    fixture.kyma_cli(|modules| modules[0]["channel"] = json!("fast")).await;
    assert_eq!((fixture.pinned(), fixture.version()), (json!("1.0.0"), ("1.0.0".to_owned(), None)));
    assert_eq!(fixture.shown_source(), (some("fast"), some("1.0.0")));
    fixture.kyma_cli(|modules| drop(modules[0].as_object_mut().unwrap().remove("channel"))).await;
    // The CLI looks for the template of the module by this channel.
    assert_eq!(fixture.shown_source(), (some("regular"), some("1.0.0")));
    fixture.kyma_cli(Vec::clear).await;
    assert!(fixture.is_manifest_deleted());
    assert_eq!(fixture.shown_source(), (some("regular"), some("1.0.0")), "until it is gone");
    fixture.release_manifest();
    fixture.kyma_cli(|modules| modules.push(json!({"name": "keda", "channel": "fast"}))).await;
    assert_eq!((fixture.pinned(), fixture.version()), (json!("1.0.0"), ("1.0.0".to_owned(), None)), "listed again");
}

#[tokio::test]
async fn pin_wins_over_any_channel_and_the_status_says_so() {
    let mut fixture = Fixture::for_pins(json!([{"name": "keda"}])).await;
    fixture.pin("1.0.0").await;
    assert_eq!(fixture.module(), ("Processing".to_owned(), NOTICE.to_owned()));
    fixture.set_manifest_state("Ready");
    for channel in ["fast", "regular", "rapid"] {
        fixture.select(json!([{"name": "keda", "channel": channel}]));
        fixture.kyma().await;
        assert_eq!(
            (fixture.module(), fixture.version()),
            (("Ready".to_owned(), NOTICE.to_owned()), ("1.0.0".to_owned(), None))
        );
        assert_eq!(fixture.shown_source(), (some(channel), some("1.0.0")));
    }
    fixture.select(json!([{"name": "keda", "managed": false}]));
    fixture.kyma().await;
    assert_eq!(
        (fixture.module(), fixture.shown_source().0),
        (("Unmanaged".to_owned(), String::new()), some("regular"))
    );
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));
}

#[tokio::test]
async fn pin_of_a_module_that_is_not_listed_is_ignored() {
    let mut fixture = Fixture::for_pins(json!([])).await;
    for version in ["1.1.0", "latest"] {
        fixture.pin(version).await;
        assert_eq!((fixture.status()["modules"].as_array().map(Vec::len), fixture.manifest()), (Some(0), None));
        assert_eq!(fixture.status()["state"], "Ready");
    }
}

#[tokio::test]
async fn invalid_pin_is_an_error_of_its_module_alone() {
    let mut fixture = Fixture::for_pins(json!([{"name": "keda"}, {"name": "other"}])).await;
    let before = fixture.status()["modules"][1].clone();
    for (text, problem) in [
        ("latest", "\"latest\" is not a semantic version"),
        ("", "\"\" is not a semantic version"),
        ("v1.0.0", "\"v1.0.0\" is not a semantic version"),
        (" 1.0.0", "\" 1.0.0\" is not a semantic version"),
        (&format!("1.0.0-{}", "a".repeat(100_000)), "the version has more than 32 characters"),
    ] {
        fixture.pin(text).await;
        let message = format!("invalid annotation {PIN}: {problem}");
        assert_eq!((fixture.module(), fixture.version().0.as_str()), (("Error".to_owned(), message), "1.0.0"));
        assert_eq!(fixture.shown_source().0, some("regular"), "the CLI can delete it");
        assert_eq!(fixture.status()["modules"][1], before);
    }
    fixture.pin(None).await;
    assert_eq!(fixture.module(), ("Processing".to_owned(), String::new()));
    let name = "No_Module";
    fixture.select(json!([{"name": name}]));
    annotate(&fixture.runtime, "kymas/default", &format!("version.operator.kyma-project.io/{name}"), Some("1.0.0"));
    fixture.kyma().await;
    let message =
        "invalid annotation version.operator.kyma-project.io/No_Module: no module can have the name \"No_Module\"";
    let refused =
        fixture.status()["modules"].as_array().unwrap().iter().find(|it| it["name"] == name).cloned().unwrap();
    assert_eq!((&refused["state"], &refused["message"]), (&json!("Error"), &json!(message)));
}

#[tokio::test]
async fn deleted_kyma_comes_back_with_its_pins() {
    let mut fixture = Fixture::for_pins(json!([{"name": "keda"}])).await;
    let unlisted = "version.operator.kyma-project.io/warden";
    annotate(&fixture.runtime, "kymas/default", unlisted, Some("2.0.0"));
    fixture.pin("1.1.0").await;
    assert_eq!(fixture.version(), ("1.1.0".to_owned(), None));
    fixture.runtime.remove("kymas/default");
    fixture.kyma().await;
    let annotations = fixture.runtime.object("kymas/default").unwrap()["metadata"]["annotations"].clone();
    assert_eq!((&annotations[PIN], &annotations[unlisted]), (&json!("1.1.0"), &json!("2.0.0")));
    assert_eq!(fixture.version(), ("1.1.0".to_owned(), None));
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));
    // A removed pin does not come back.
    fixture.pin(None).await;
    fixture.runtime.remove("kymas/default");
    fixture.kyma().await;
    assert_eq!((fixture.pinned(), fixture.module().0.as_str()), (Value::Null, "Warning"), "1.0.0 would be a downgrade");
}

/// The status of the modules follows their Manifests without a read of the runtime, also with pins.
#[tokio::test]
async fn state_of_a_pinned_module_needs_no_read_of_the_runtime() {
    let mut fixture = Fixture::for_pins(json!([{"name": "keda"}])).await;
    fixture.pin("1.0.0").await;
    fixture.kyma().await;
    fixture.set_manifest_state("Ready");
    fixture.forget_calls();
    assert_eq!(fixture.reconcile(WorkSet::STATUS, Drift::None).await, ReconcileOutcome::ended(WorkSet::STATUS));
    assert_eq!(
        (fixture.module(), fixture.runtime.calls()),
        (("Ready".to_owned(), NOTICE.to_owned()), vec!["PATCH kymas/default/status".to_owned()])
    );
}

#[tokio::test]
async fn pin_in_the_control_plane_holds_unless_the_runtime_has_one() {
    let mut fixture = Fixture::for_pins(json!([{"name": "keda", "channel": "fast"}])).await;
    fixture.pin_in_kcp("1.2.0").await;
    let notice = format!("version 1.2.0 is pinned by the annotation {PIN} of the Kyma in the control plane");
    assert_eq!((fixture.version(), fixture.module().1), (("1.2.0".to_owned(), None), notice));
    assert_eq!(
        (fixture.pinned(), fixture.shown_source().0),
        (Value::Null, some("fast")),
        "nothing is written to the runtime"
    );
    fixture.publish(&["1.0.0", "1.1.0", "1.2.0", "1.3.0"]);
    fixture.pin("1.3.0").await;
    assert_eq!((fixture.version().0.as_str(), fixture.pinned()), ("1.3.0", json!("1.3.0")));
    fixture.pin_in_kcp("latest").await;
    assert_eq!((fixture.version().0.as_str(), fixture.module().0.as_str()), ("1.3.0", "Processing"));
    fixture.pin(None).await;
    let message =
        format!("invalid annotation {PIN} of the Kyma in the control plane: \"latest\" is not a semantic version");
    assert_eq!((fixture.version().0.as_str(), fixture.module()), ("1.3.0", ("Error".to_owned(), message)));
    fixture.release(&[("regular", "1.0.0"), ("fast", "1.3.0")], json!([]));
    fixture.pin_in_kcp(None).await;
    assert_eq!(fixture.version(), ("1.3.0".to_owned(), some("fast")));
}

#[tokio::test]
async fn pins_in_the_control_plane_belong_to_the_defaults() {
    let mut fixture = Fixture::new();
    annotate(&fixture.kcp, "kymas/k", PIN, Some("1.0.0"));
    fixture.kcp.edit("kymas/k", |kyma| kyma["spec"]["modules"] = json!([{"name": "keda", "managed": true}]));
    fixture.kyma().await;
    assert_eq!((fixture.version(), fixture.pinned()), (("1.0.0".to_owned(), None), Value::Null));
    // A reset removes the pins of the user, like the rest of the selection.
    fixture.pin("1.1.0").await;
    fixture.runtime.edit("kymas/default", |kyma| kyma["metadata"]["labels"][label::RESET_MODULES] = "true".into());
    fixture.kyma().await;
    assert_eq!((fixture.version(), fixture.pinned()), (("1.0.0".to_owned(), None), Value::Null));
    let accepted = fixture.kcp.object("kymas/k").unwrap()["metadata"]["annotations"][annotation::ACCEPTED_SPEC].clone();
    assert!(!accepted.as_str().unwrap().contains("1.1.0"), "{accepted}");
}
