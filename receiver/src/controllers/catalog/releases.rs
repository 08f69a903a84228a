//! What of KCP's releases is accepted, written down in KCP: so that a process that begins knows what changed while nobody looked,
//! and neither begins a roll-out again nor forgets it. Its ConfigMap is also where a removal is confirmed.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tidewatch_shared::names::{RELEASES, annotation, field_manager};

use super::facts::{Held, Releases};

/// Facts by module, as JSON.
const ACCEPTED: &str = "accepted";
/// The removal that waits for a confirmation, as JSON.
const HELD: &str = "held";

/// What is accepted, and what of it is written down.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// `None` where nothing was ever accepted.
    pub(super) accepted: Option<Releases>,
    /// The change that the ConfigMap's annotation names.
    pub(super) confirmed: Option<String>,
    written: Option<BTreeMap<String, String>>,
}

impl Ledger {
    /// Takes the ConfigMap as it is. What it says is accepted counts only in a process that has accepted nothing itself. Whether
    /// somebody confirmed something.
    pub(super) fn take(&mut self, map: Option<&ConfigMap>) -> bool {
        self.written = map.map(|map| map.data.clone().unwrap_or_default());
        if self.accepted.is_none()
            && let Some(text) = self.written.as_ref().and_then(|data| data.get(ACCEPTED))
        {
            match serde_json::from_str(text) {
                Ok(accepted) => self.accepted = Some(accepted),
                Err(error) => {
                    tracing::warn!(%error, "what was accepted of the releases cannot be read: it begins anew")
                }
            }
        }
        let confirmed = map.and_then(|map| map.annotations().get(annotation::CONFIRM).cloned());
        let moved = confirmed.is_some() && confirmed != self.confirmed;
        self.confirmed = confirmed;
        moved
    }

    /// What the ConfigMap should hold, if that is something else than it holds.
    pub(super) fn unwritten(&self, held: Option<&Held>) -> Option<BTreeMap<String, String>> {
        let accepted = self.accepted.as_ref()?;
        let text = |value: serde_json::Result<String>| value.expect("plain data with string keys");
        let mut data = BTreeMap::from([(ACCEPTED.to_owned(), text(serde_json::to_string(accepted)))]);
        if let Some(held) = held {
            data.insert(HELD.to_owned(), text(serde_json::to_string(held)));
        }
        (self.written.as_ref() != Some(&data)).then_some(data)
    }

    /// The removal that waits for a confirmation, as the ConfigMap says it.
    pub(super) fn held(map: Option<&ConfigMap>) -> Option<Held> {
        serde_json::from_str(map?.data.as_ref()?.get(HELD)?).ok()
    }

    pub(super) fn wrote(&mut self, data: BTreeMap<String, String>) {
        self.written = Some(data);
    }
}

/// Writes the ConfigMap, and takes a confirmation that was `spent` off it; annotations of others stay.
pub(crate) async fn write(
    kcp: &Client,
    namespace: &str,
    data: &BTreeMap<String, String>,
    spent: bool,
) -> kube::Result<()> {
    let api: Api<ConfigMap> = Api::namespaced(kcp.clone(), namespace);
    if spent {
        // First: one that a crash leaves there would let the same change through once more.
        let off = json!({"metadata": {"annotations": {annotation::CONFIRM: null}}});
        match api.patch(RELEASES, &PatchParams::default(), &Patch::Merge(off)).await {
            // It went with its ConfigMap, which is made again.
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
    use std::sync::{Arc, Mutex};

    use http::StatusCode;
    use serde_json::Value;

    use super::*;
    use crate::{
        controllers::catalog::facts::{Facts, Marks, Pointer, Whom},
        testing,
    };

    fn map(data: BTreeMap<String, String>, confirmed: Option<&str>) -> ConfigMap {
        let mut map = ConfigMap { data: Some(data), ..ConfigMap::default() };
        map.metadata.annotations =
            confirmed.map(|change| BTreeMap::from([(annotation::CONFIRM.to_owned(), change.to_owned())]));
        map
    }

    #[test]
    fn what_is_written_is_where_the_next_process_begins() {
        let to = Pointer { version: "1.0.0".to_owned(), beta: false, internal: false, since: Some(7) };
        let versions = BTreeMap::from([("1.0.0".to_owned(), Marks::default())]);
        let facts = Facts { whom: Whom::Everyone, channels: BTreeMap::from([("fast".to_owned(), to)]), versions };
        let mut ledger = Ledger { accepted: Some(Releases::from([("a".to_owned(), facts)])), ..Ledger::default() };
        let data = ledger.unwritten(None).unwrap();
        ledger.wrote(data.clone());
        assert_eq!(ledger.unwritten(None), None);
        let held = Held { change: "c".to_owned(), modules: ["a".into()].into(), runtimes: 4, of: 9 };
        assert!(ledger.unwritten(Some(&held)).unwrap().contains_key(HELD));

        let mut next = Ledger::default();
        assert!(!next.take(Some(&map(data.clone(), None))));
        assert_eq!((&next.accepted, next.unwritten(None)), (&ledger.accepted, None));
        assert!(next.take(Some(&map(data.clone(), Some("c")))));
        assert!(!next.take(Some(&map(data, Some("c")))), "that is known");
        assert!(!next.take(None));
        assert!(next.accepted.is_some() && next.unwritten(None).is_some(), "it is written again");
    }

    /// KCP, where a merge finds the ConfigMap or this failure, and an apply makes it.
    async fn written(failure: StatusCode) -> (kube::Result<()>, Option<Value>) {
        let kept = Arc::<Mutex<Option<Value>>>::default();
        let state = kept.clone();
        let client = testing::client("kcp-system", move |parts, body| {
            let content = parts.headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
            if content.contains("apply") {
                let body: Value = serde_json::from_slice(body).unwrap();
                *state.lock().unwrap() = Some(body.clone());
                return Some((StatusCode::OK, body.to_string()));
            }
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": failure.as_u16(),
                "reason": failure.canonical_reason().unwrap().replace(' ', ""), "message": "m"});
            Some((failure, status.to_string()))
        });
        let data = BTreeMap::from([(ACCEPTED.to_owned(), "{}".to_owned())]);
        let result = write(&client, "kcp-system", &data, true).await;
        (result, kept.lock().unwrap().clone())
    }

    #[tokio::test]
    async fn a_used_confirmation_that_is_gone_with_its_map_holds_nothing_up() {
        let (result, map) = written(StatusCode::NOT_FOUND).await;
        result.unwrap();
        assert_eq!(map.unwrap()["data"][ACCEPTED], "{}");
        let (result, map) = written(StatusCode::FORBIDDEN).await;
        assert!(result.is_err() && map.is_none(), "it may still stand there");
    }

    #[test]
    fn what_cannot_be_read_is_as_if_nothing_was_accepted() {
        let mut ledger = Ledger::default();
        ledger.take(Some(&map(BTreeMap::from([(ACCEPTED.to_owned(), "{".to_owned())]), None)));
        assert_eq!(ledger.accepted, None);
        assert_eq!(ledger.unwritten(None), None);
    }
}
