use super::*;
use crate::pki::{
    stored::tests::{NOW, root},
    testing::Fake,
};

fn steady() -> Stored {
    Stored::steady(root("first"), NOW)
}

#[tokio::test]
async fn replicas_that_begin_at_once_agree_on_one_ca() {
    let fake = Fake::default();
    let stores = [(); 4].map(|()| Store::new(fake.client(), "kcp-system"));
    let made = futures::future::join_all(stores.iter().map(|store| store.read_or_create(|| Ok(steady())))).await;
    let ids: Vec<_> = made.into_iter().map(|kept| kept.unwrap().stored.target().id.clone()).collect();
    assert!(ids.iter().all(|id| *id == fake.stored().target().id), "{ids:?}");
    assert!(fake.calls().iter().filter(|call| *call == "POST").count() > 1, "nobody raced");
}

#[tokio::test]
async fn a_write_over_what_was_changed_meanwhile_is_none() {
    let fake = Fake::default();
    let store = Store::new(fake.client(), "kcp-system");
    let kept = store.read_or_create(|| Ok(steady())).await.unwrap();
    fake.edit(|secret| {
        secret.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
    });
    assert!(store.replace(&kept, &steady()).await.unwrap().is_none());
    let kept = Kept::of(&fake.secret().unwrap()).unwrap();
    let written = store.replace(&kept, &steady()).await.unwrap().unwrap();
    assert_ne!(written.version(), kept.version());
    assert_eq!(fake.secret().unwrap().metadata.labels.unwrap()["a"], "b", "others' notes stay");
    fake.remove();
    assert!(store.replace(&written, &steady()).await.unwrap().is_none());
    assert!(store.create(&steady()).await.unwrap().is_some());
    assert!(store.create(&steady()).await.unwrap().is_none());
}

#[tokio::test]
async fn what_cannot_be_used_is_never_written_over() {
    let fake = Fake::default();
    let store = Store::new(fake.client(), "kcp-system");
    store.read_or_create(|| Ok(steady())).await.unwrap();
    fake.set("ca.key", b"garbage");
    fake.calls();
    let refused = store.read_or_create(|| Ok(steady())).await;
    assert!(matches!(refused, Err(Create::Keep(Keep::Content(ReadStored::Root("ca.crt", _))))));
    assert_eq!(fake.calls(), ["GET"]);
    fake.refuse(true);
    fake.remove();
    assert!(matches!(store.read_or_create(|| Ok(steady())).await, Err(Create::Keep(Keep::Api(_)))));
}
