//! The Kyma in the runtime cluster: created from KCP's, or from the last accepted selection of the user; labels
//! synchronized, its spec and pins stored in KCP. Pins of KCP's Kyma take effect without being written to the runtime cluster,
//! where a write would take the pins of the user away.

use std::collections::BTreeMap;

use jiff::Timestamp;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, PostParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma,
    key::KymaKey,
    labels::is_true,
    names::{GROUP, SKR_KYMA, SKR_NAMESPACE, VERSION, annotation, field_manager, label},
    selection::{UserSelection, pins},
};
use tidewatch_cluster::object::{self, Component, Ownership, Shape, Target};
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::{
    Context, Error,
    base::{self, Prepared},
    fetch,
};

/// Maximal size of the selection stored in KCP as JSON, in bytes; all annotations of an object together are limited to 256
/// KiB.
const MAX_ACCEPTED: usize = 128 << 10;
const RESET: &str = "reset the Kyma in the runtime";

/// The Kyma in the runtime cluster.
pub(super) struct Ensured {
    pub(super) kyma: Kyma,
    /// Members of the metadata of KCP's Kyma that record the selection, if it has others.
    pub(super) record: Option<Value>,
}

/// Reads or creates the runtime cluster's Kyma, and synchronizes the fields that the user does not own. Only a Kyma that does
/// not exist waits for namespace and CRDs; `None` if these could not be prepared.
pub(super) async fn ensure(
    ctx: &Context,
    key: &KymaKey,
    client: &Client,
    kcp: &mut Kyma,
    prepared: oneshot::Receiver<Prepared>,
    contested: &mut Vec<Error>,
) -> Result<Option<Ensured>, Error> {
    let reset = begin_reset(ctx, kcp).await?;
    let found = match fetch::runtime_kyma(client).await {
        Ok(Some(found)) => Some(found),
        Err(error) if !error.is_unserved() => return Err(error),
        absent => {
            let Ok(Prepared { has_no_kyma }) = prepared.await else { return Ok(None) };
            // An API server that serves no Kymas may have one all the same, unless it had no CRD either.
            if absent.is_err() && !has_no_kyma { fetch::runtime_kyma(client).await? } else { None }
        }
    };
    let runtime = match found {
        None => create(client, kcp, reset.as_deref()).await?,
        Some(found) if is_reset_due(&found, reset.as_deref()) => {
            reset_spec(client, found, kcp, reset.as_deref()).await?
        }
        Some(found) => found,
    };
    let runtime = sync_metadata(ctx, key, client, kcp, runtime, contested).await?;
    let record = record_of(kcp, &UserSelection::of(&runtime), reset.is_some());
    Ok(Some(Ensured { kyma: runtime, record }))
}

/// Returns the id of a reset of the modules that is requested in KCP; a new request gets the current time as its id.
async fn begin_reset(ctx: &Context, kcp: &mut Kyma) -> Result<Option<String>, Error> {
    if !is_true(Some(kcp.labels()), label::RESET_MODULES) {
        return Ok(None);
    }
    if !kcp.annotations().contains_key(annotation::RESET_MODULES) {
        let id = Timestamp::now().to_string();
        *kcp = base::patch_metadata(ctx, kcp, json!({"annotations": {annotation::RESET_MODULES: id}})).await?;
    }
    Ok(kcp.annotations().get(annotation::RESET_MODULES).cloned())
}

/// Returns true if the modules are to be reset: the user requests it, or KCP does with an id that was not done yet.
fn is_reset_due(runtime: &Kyma, requested: Option<&str>) -> bool {
    let done = runtime.annotations().get(annotation::RESET_MODULES).map(String::as_str);
    is_true(Some(runtime.labels()), label::RESET_MODULES) || (requested.is_some() && requested != done)
}

/// The selection of a new Kyma in the runtime cluster: the last accepted one of the user, else the spec of KCP's Kyma.
pub(super) fn initial_selection(kcp: &Kyma, reset: bool) -> UserSelection {
    match UserSelection::accepted(kcp).filter(|_| !reset) {
        Some(Ok(accepted)) => return accepted,
        Some(Err(error)) => warn!(kyma = %kcp.name_any(), %error, "Accepted spec is malformed, using the defaults"),
        None => {}
    }
    UserSelection::of_spec(kcp)
}

async fn create(client: &Client, kcp: &Kyma, reset: Option<&str>) -> Result<Kyma, Error> {
    let UserSelection { spec, pins } = initial_selection(kcp, reset.is_some());
    let mut kyma = Kyma::new(SKR_KYMA, spec);
    kyma.metadata.namespace = Some(SKR_NAMESPACE.to_owned());
    kyma.metadata.labels = Some(labels(kcp));
    kyma.metadata.annotations = Some(annotations(kcp).into_iter().chain(pins.annotations()).collect());
    mark_reset(&mut kyma, reset);
    let params = PostParams { field_manager: Some(field_manager::SYNC_CONTEXT.to_owned()), ..PostParams::default() };
    fetch::in_runtime(client).create(&params, &kyma).await.map_err(Error::runtime("create the Kyma in the runtime"))
}

/// Restores the default spec, without pins. The same request ends the user's request, and records the one of KCP as done.
async fn reset_spec(client: &Client, mut found: Kyma, kcp: &Kyma, requested: Option<&str>) -> Result<Kyma, Error> {
    found.spec = kcp.spec.clone();
    found.metadata.managed_fields = None;
    found.labels_mut().remove(label::RESET_MODULES);
    found.annotations_mut().retain(|key, _| pins::module_of(key).is_none());
    mark_reset(&mut found, requested);
    let params = PostParams { field_manager: Some(field_manager::SYNC_CONTEXT.to_owned()), ..PostParams::default() };
    let reset = fetch::in_runtime(client).replace(SKR_KYMA, &params, &found).await;
    reset.inspect(|_| info!(kyma = %kcp.name_any(), "Modules reset to the defaults")).map_err(Error::runtime(RESET))
}

fn mark_reset(kyma: &mut Kyma, requested: Option<&str>) {
    let done = requested.map(|id| (annotation::RESET_MODULES.to_owned(), id.to_owned()));
    kyma.annotations_mut().extend(done);
}

/// Overwrites labels and annotations with KCP's. A contested Kyma keeps its own, and is added to `contested`.
async fn sync_metadata(
    ctx: &Context,
    key: &KymaKey,
    client: &Client,
    kcp: &Kyma,
    runtime: Kyma,
    contested: &mut Vec<Error>,
) -> Result<Kyma, Error> {
    const DOING: &str = "label the Kyma in the runtime";
    let labels = labels(kcp);
    let annotations = annotations(kcp);
    let budget = ctx.budgets.of(key, Component::Kyma, SKR_KYMA, (&labels, &annotations));
    let desired = json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Kyma", "metadata": {
        "name": SKR_KYMA, "namespace": SKR_NAMESPACE, "labels": labels, "annotations": annotations,
    }});
    let manager = field_manager::SYNC_CONTEXT;
    let shape = &Shape::new(Ownership::Fields);
    let target = Target { name: SKR_KYMA, manager, shape, desired: &desired, budget: Some(&budget) };
    let found = object::erase(&runtime).map_err(Error::runtime(DOING))?;
    if runtime.metadata.deletion_timestamp.is_some() {
        return Ok(runtime);
    }
    let api = Api::namespaced_with(client.clone(), SKR_NAMESPACE, &ApiResource::erase::<Kyma>(&()));
    match target.converge(&api, Some(found), &mut None).await.map_err(Error::converge(DOING, "the Kyma")) {
        Ok(converged) => object::parse(&converged.object).map_err(Error::runtime(DOING)),
        Err(error) if error.is_contested() => {
            contested.push(error);
            Ok(runtime)
        }
        Err(error) => Err(error),
    }
}

fn labels(kcp: &Kyma) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::from([
        (label::WATCHED_BY.to_owned(), label::WATCHED_BY_KYMA.to_owned()),
        (label::MANAGED_BY.to_owned(), label::MANAGED_BY_SKR.to_owned()),
    ]);
    for key in [label::RUNTIME_ID, label::GLOBAL_ACCOUNT_ID, label::SUBACCOUNT_ID] {
        labels.extend(kcp.labels().get_key_value(key).map(|(key, value)| (key.clone(), value.clone())));
    }
    labels
}

fn annotations(kcp: &Kyma) -> BTreeMap<String, String> {
    let owner = format!("{}/{}", kcp.namespace().unwrap_or_default(), kcp.name_any());
    BTreeMap::from([(annotation::OWNED_BY.to_owned(), owner)])
}

/// Members of the metadata that store the user's selection in KCP, so that a deleted Kyma is recreated with it, and that
/// end a reset; `None` if KCP's Kyma has them.
fn record_of(kcp: &Kyma, selection: &UserSelection, reset: bool) -> Option<Value> {
    let now = selection.to_json();
    let before =
        kcp.annotations().get(annotation::ACCEPTED_SPEC).and_then(|text| serde_json::from_str::<Value>(text).ok());
    let mut metadata = json!({});
    if before.as_ref() != Some(&now) && tidewatch_select::kyma::validate::validate(selection, kcp.annotations()).is_ok()
    {
        let text = now.to_string();
        if text.len() <= MAX_ACCEPTED {
            metadata["annotations"] = json!({annotation::ACCEPTED_SPEC: text});
        } else {
            warn!(kyma = %kcp.name_any(), bytes = text.len(), "Spec of the runtime's Kyma is too large to be recorded");
        }
    }
    if reset {
        metadata["labels"] = json!({label::RESET_MODULES: null});
    }
    if kcp.annotations().contains_key(annotation::RESET_MODULES) {
        // Also that of a request that was taken back.
        metadata["annotations"][annotation::RESET_MODULES] = Value::Null;
    }
    (metadata != json!({})).then_some(metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kyma(metadata: Value) -> Kyma {
        serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "metadata": metadata,
            "spec": {"channel": "regular", "modules": [{"name": "default", "managed": true}]}
        }))
        .unwrap()
    }

    fn accepted(text: &str) -> Kyma {
        kyma(json!({"name": "k", "annotations": {"operator.kyma-project.io/tidewatch-accepted-spec": text}}))
    }

    #[test]
    fn a_deleted_kyma_comes_back_with_the_users_selection() {
        let users = r#"{"channel":"fast","modules":[{"name":"mine","managed":true}],"pins":{"mine":"1.0.0"}}"#;
        let initial = |kcp: &Kyma, reset| {
            let UserSelection { spec, pins } = initial_selection(kcp, reset);
            (spec.channel, pins.of_module("mine").map(str::to_owned))
        };
        let defaults = ("regular".to_owned(), None);
        assert_eq!(initial(&accepted(users), false), ("fast".to_owned(), Some("1.0.0".to_owned())));
        assert_eq!(initial(&accepted(users), true), defaults, "the reset restores the defaults");
        assert_eq!(initial(&accepted("{"), false), defaults);
        assert_eq!(initial(&kyma(json!({"name": "k"})), false), defaults);
    }

    #[test]
    fn ids_go_along_and_other_labels_do_not() {
        let kcp = kyma(json!({"name": "k", "namespace": "kcp-system", "labels": {
            "kyma-project.io/runtime-id": "r", "kyma-project.io/global-account-id": "g", "operator.kyma-project.io/beta": "true"
        }}));
        let labels: Vec<_> = labels(&kcp).into_iter().collect();
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(
            labels,
            [
                pair("kyma-project.io/global-account-id", "g"),
                pair("kyma-project.io/runtime-id", "r"),
                pair("operator.kyma-project.io/managed-by", "kyma"),
                pair("operator.kyma-project.io/watched-by", "kyma"),
            ]
        );
        assert_eq!(annotations(&kcp).into_values().collect::<Vec<_>>(), ["kcp-system/k"]);
    }
}
