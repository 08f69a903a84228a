use serde_json::{Value, json};
use tidewatch_select::windows::NoWindowError;

use super::*;

fn kyma(change: impl FnOnce(&mut Value)) -> Kyma {
    let mut kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
        "metadata": {"name": "k", "namespace": "kcp-system", "labels": {"kyma-project.io/region": "eu-1"}},
        "spec": {"channel": "regular"}});
    change(&mut kyma);
    serde_json::from_value(kyma).unwrap()
}

fn now() -> Timestamp {
    "2026-11-28T19:00:00Z".parse().unwrap()
}

fn policy(begin: &str) -> Value {
    json!({"rules": [{"match": {"region": "eu-"}, "windows": [{"days": ["Sat"], "begin": begin, "end": "23:00:00Z"}]}]})
}

#[test]
fn kymas_count_as_waiting_until_their_window_opens() {
    let key = KymaKey::new("kcp-system", "k");
    let windows = MaintenanceWindows::new(Duration::from_secs(1_200), Metrics::default());
    let plain = kyma(|_| ());
    let opens = WindowState::Opens("2026-11-28T20:00:00Z".parse().unwrap());
    assert_eq!(windows.await_window(&key, &plain, now()), WindowState::Unknown(NoWindowError::NoPolicy));
    assert_eq!(windows.waiting(), std::slice::from_ref(&key));
    windows.set_policy(&policy("20:00:00Z"));
    assert_eq!(windows.await_window(&key, &plain, now()), opens);
    assert_eq!(windows.waiting(), std::slice::from_ref(&key));
    windows.set_policy(&policy("18:00:00Z"));
    assert_eq!(windows.await_window(&key, &plain, now()), WindowState::Open);
    assert_eq!(windows.waiting(), []);
    windows.set_policy(&policy("20:00:00Z"));
    windows.await_window(&key, &plain, now());
    windows.forget(&key);
    assert_eq!(windows.waiting(), []);
    let elsewhere = kyma(|kyma| kyma["metadata"]["labels"] = json!({}));
    assert_eq!(windows.await_window(&key, &elsewhere, now()), WindowState::Unknown(NoWindowError::NoneFound));
}

#[test]
fn kyma_that_skips_windows_never_waits() {
    let key = KymaKey::new("kcp-system", "k");
    let skips = kyma(|kyma| kyma["spec"]["skipMaintenanceWindows"] = json!(true));
    let windows = MaintenanceWindows::new(Duration::ZERO, Metrics::default());
    assert_eq!(windows.await_window(&key, &skips, now()), WindowState::Open);
    windows.set_policy(&policy("20:00:00Z"));
    assert_eq!(windows.await_window(&key, &skips, now()), WindowState::Open);
    assert_eq!(windows.waiting(), []);
}

#[test]
fn status_tells_a_new_process_which_kymas_wait() {
    let key = KymaKey::new("kcp-system", "k");
    let unknown = format!("{UNKNOWN}: {}", NoWindowError::NoPolicy);
    for (module, waits) in [
        (json!({"maintenance": true}), true),
        (json!({"maintenance": false, "message": "waiting"}), false),
        (json!({"message": unknown}), true),
        (json!({}), false),
    ] {
        let windows = MaintenanceWindows::with_policy(&policy("20:00:00Z"));
        let shown = kyma(|kyma| {
            let mut entry = module.clone();
            (entry["name"], entry["state"]) = (json!("keda"), json!("Ready"));
            kyma["status"] = json!({"state": "Ready", "modules": [{"name": "a", "state": "Ready"}, entry]});
        });
        let window = windows.resume(&key, &shown, now());
        assert_eq!((window.is_some(), windows.waiting().len()), (waits, usize::from(waits)), "{module}");
    }
    let windows = MaintenanceWindows::with_policy(&policy("20:00:00Z"));
    assert_eq!(windows.resume(&key, &kyma(|_| ()), now()), None);
}
