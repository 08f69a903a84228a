use super::*;
use crate::testing::{FakeKcp, NOW, root};

fn steady() -> CaState {
    CaState::steady(root("first"), NOW)
}

#[tokio::test]
async fn concurrent_replicas_agree_on_one_ca() {
    let kcp = FakeKcp::default();
    let stores = [(); 4].map(|()| Store::new(kcp.client(), "kcp-system"));
    let opened = futures::future::join_all(stores.iter().map(|store| store.read_or_fill(|| Ok(steady())))).await;
    let ids: Vec<_> = opened.into_iter().map(|secret| secret.unwrap().state.target().id.clone()).collect();
    assert!(ids.iter().all(|id| *id == kcp.ca_state().target().id), "{ids:?}");
    assert!(kcp.calls().iter().filter(|call| call.starts_with("POST")).count() > 1, "no replicas raced");
}

#[tokio::test]
async fn conflicting_replace_returns_none() {
    let kcp = FakeKcp::default();
    let store = Store::new(kcp.client(), "kcp-system");
    let secret = store.read_or_fill(|| Ok(steady())).await.unwrap();
    kcp.edit(|secret| {
        secret.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
    });
    assert!(store.replace(&secret, &steady()).await.unwrap().is_none());
    let secret = CaSecret::of(&kcp.secret().unwrap()).unwrap();
    let written = store.replace(&secret, &steady()).await.unwrap().unwrap();
    assert_ne!(written.version(), secret.version());
    assert_eq!(kcp.secret().unwrap().metadata.labels.unwrap()["a"], "b", "labels of other writers stay");
    kcp.remove();
    assert!(store.replace(&written, &steady()).await.unwrap().is_none());
    assert!(store.fill(&steady()).await.unwrap().is_some());
    assert!(store.fill(&steady()).await.unwrap().is_none());
}

#[tokio::test]
async fn unusable_content_is_never_overwritten() {
    let kcp = FakeKcp::default();
    let store = Store::new(kcp.client(), "kcp-system");
    store.read_or_fill(|| Ok(steady())).await.unwrap();
    kcp.set("ca.key", b"garbage");
    kcp.calls();
    let refused = store.read_or_fill(|| Ok(steady())).await;
    assert!(matches!(refused, Err(CaSecretError::Content(CaStateError::Root("ca.crt", _)))));
    assert_eq!(kcp.calls(), ["GET secrets/tidewatch-ca"]);
    kcp.refuse(true);
    kcp.remove();
    assert!(matches!(store.read_or_fill(|| Ok(steady())).await, Err(CaSecretError::Missing(_))));
}

#[tokio::test]
async fn empty_secret_is_filled_once() {
    let kcp = FakeKcp::default();
    let store = Store::new(kcp.client(), "kcp-system");
    store.read_or_fill(|| Ok(steady())).await.unwrap();
    kcp.edit(|secret| {
        secret.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        secret.data = None;
    });
    let installed = kcp.secret().unwrap().metadata;
    let stores = [(); 4].map(|()| Store::new(kcp.client(), "kcp-system"));
    let opened = futures::future::join_all(stores.iter().map(|store| store.read_or_fill(|| Ok(steady())))).await;
    let ids: Vec<_> = opened.into_iter().map(|secret| secret.unwrap().state.target().id.clone()).collect();
    assert!(ids.iter().all(|id| *id == kcp.ca_state().target().id), "{ids:?}");
    let filled = kcp.secret().unwrap().metadata;
    assert_eq!((filled.uid, filled.labels), (installed.uid, installed.labels));
    assert!(store.fill(&steady()).await.unwrap().is_none(), "a CA is never written over");
}
