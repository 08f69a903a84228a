//! Writes the accepted state of KCP's releases.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tidewatch_api::names::{RELEASES, annotation, field_manager};
use tidewatch_cluster::object;

/// Deadline of a write. Kymas that were reconciled before need none for the catalog to take effect.
pub(super) const WRITE_DEADLINE: Duration = Duration::from_secs(5);

/// Reads the ConfigMap; `None` if it does not exist.
pub(super) async fn read(kcp: &Client, namespace: &str) -> kube::Result<Option<ConfigMap>> {
    object::get_by_list(&Api::namespaced(kcp.clone(), namespace), RELEASES).await
}

/// Writes the ConfigMap, after reducing its confirmations to those that are `left`, if some were used; foreign annotations
/// stay.
pub(super) async fn write(
    kcp: &Client,
    namespace: &str,
    data: &BTreeMap<String, String>,
    left: Option<&BTreeSet<String>>,
) -> kube::Result<()> {
    let api: Api<ConfigMap> = Api::namespaced(kcp.clone(), namespace);
    if let Some(left) = left {
        // Removed first: if a crash left it behind, it would confirm the same removal a second time.
        let left = (!left.is_empty()).then(|| left.iter().map(String::as_str).collect::<Vec<_>>().join(","));
        let off = json!({"metadata": {"annotations": {annotation::CONFIRM: left}}});
        match api.patch(RELEASES, &PatchParams::default(), &Patch::Merge(off)).await {
            // The confirmation is gone with its ConfigMap, which the apply recreates.
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            taken => drop(taken?),
        }
    }
    let body = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": RELEASES}, "data": data});
    let params = PatchParams::apply(field_manager::TIDEWATCH).force();
    api.patch(RELEASES, &params, &Patch::Apply(&body)).await.map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::StatusCode;
    use parking_lot::Mutex;
    use serde_json::Value;
    use tidewatch_cluster::testing;

    use super::*;

    /// Runs `write` against a KCP where the merge patch fails with this status and the apply succeeds. Returns the
    /// applied ConfigMap.
    async fn write_after(failure: StatusCode) -> (kube::Result<()>, Option<Value>) {
        let kept = Arc::<Mutex<Option<Value>>>::default();
        let state = kept.clone();
        let client = testing::client("kcp-system", move |parts, body| {
            let content = parts.headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
            if content.contains("apply") {
                let body: Value = serde_json::from_slice(body).unwrap();
                *state.lock() = Some(body.clone());
                return Some((StatusCode::OK, body.to_string()));
            }
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": failure.as_u16(),
                "reason": failure.canonical_reason().unwrap().replace(' ', ""), "message": "m"});
            Some((failure, status.to_string()))
        });
        let data = BTreeMap::from([("accepted".to_owned(), "{}".to_owned())]);
        let result = write(&client, "kcp-system", &data, Some(&BTreeSet::new())).await;
        (result, kept.lock().clone())
    }

    #[tokio::test]
    async fn missing_config_map_does_not_block_the_write() {
        let (result, map) = write_after(StatusCode::NOT_FOUND).await;
        result.unwrap();
        assert_eq!(map.unwrap()["data"]["accepted"], "{}");
        let (result, map) = write_after(StatusCode::FORBIDDEN).await;
        assert!(result.is_err() && map.is_none(), "the confirmation may still be there");
    }
}
