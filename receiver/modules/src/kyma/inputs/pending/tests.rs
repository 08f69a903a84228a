//! Annotations of the inputs that wait, against a fake KCP.

use futures::FutureExt as _;
use tidewatch_cluster::testing::FakeApiServer;
use tokio::time::{Instant, advance};
use tower::Layer as _;

use super::*;

const INPUTS: &str = "operator.kyma-project.io/tidewatch-inputs";

/// Pending annotations, and a KCP with Kymas whose annotation is `a`.
struct Fixture {
    pending: PendingInputs,
    kcp: FakeApiServer,
}

impl Fixture {
    fn new(kymas: usize) -> Self {
        let kcp = FakeApiServer::default();
        for n in 0..kymas {
            kcp.edit(&format!("kymas/k{n}"), |kyma| kyma["metadata"]["annotations"][INPUTS] = "a".into());
        }
        Self { pending: PendingInputs::default(), kcp }
    }

    fn uid(&self, n: usize) -> String {
        self.kcp.object(&format!("kymas/k{n}")).unwrap()["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    /// Ends work that leaves this value; the reconcile read `stored`.
    fn end(&self, n: usize, stored: &str, after: &str) {
        self.end_with(n, stored, after, None);
    }

    fn end_with(&self, n: usize, stored: &str, after: &str, fence: Option<WriteFence>) {
        let differs = |before: &str| (before != after).then(|| after.to_owned());
        self.pending.update(&key(n), &self.uid(n), stored, fence, differs);
    }

    fn stored(&self, n: usize) -> String {
        self.kcp.object(&format!("kymas/k{n}")).unwrap()["metadata"]["annotations"][INPUTS].as_str().unwrap().to_owned()
    }

    async fn write(&self) {
        self.pending.write_all(&self.kcp.client()).await;
    }

    /// Numbers of waiting and of dropped annotations.
    fn counted(&self) -> (i64, u64) {
        let Metrics { pending, dropped } = &self.pending.0.metrics;
        (pending.get(), dropped.get())
    }
}

fn key(n: usize) -> KymaKey {
    KymaKey::new("kcp-system", format!("k{n}"))
}

#[tokio::test]
async fn works_that_end_before_the_write_share_it() {
    let fixture = Fixture::new(1);
    fixture.end(0, "a", "b");
    fixture.end(0, "a", "c");
    fixture.end(0, "a", "c");
    assert_eq!((fixture.stored(0).as_str(), fixture.counted()), ("a", (1, 0)));
    fixture.write().await;
    assert_eq!((fixture.stored(0).as_str(), fixture.counted()), ("c", (0, 0)));
    fixture.end(0, "c", "c");
    fixture.write().await;
    assert_eq!(fixture.kcp.writes(), ["PATCH kymas/k0"]);
}

#[tokio::test]
async fn later_work_adds_to_the_pending_value_and_not_to_the_stored_one() {
    let fixture = Fixture::new(1);
    let add = |part: &'static str| {
        let uid = fixture.uid(0);
        fixture.pending.update(&key(0), &uid, "a", None, |before| Some(format!("{before}{part}")));
    };
    add("b");
    add("c");
    fixture.write().await;
    assert_eq!(fixture.stored(0), "abc");
}

#[tokio::test]
async fn work_that_ends_during_the_write_is_written_next() {
    let fixture = Fixture::new(1);
    fixture.end(0, "a", "b");
    let client = fixture.kcp.client();
    let sent = fixture.pending.0.pending.lock()[&key(0)].clone();
    assert_eq!(send(&client, &key(0), &sent).await, Written::Stored);
    fixture.end(0, "a", "c");
    fixture.pending.settle(&key(0), &sent, Written::Stored);
    assert_eq!(fixture.counted(), (1, 0));
    fixture.write().await;
    assert_eq!((fixture.stored(0).as_str(), fixture.counted()), ("c", (0, 0)));
}

/// A hand-back removes the annotation; another replica writes its own.
#[tokio::test]
async fn annotation_that_another_writer_changed_or_removed_stays() {
    let fixture = Fixture::new(3);
    (0..3).for_each(|n| fixture.end(n, "a", "b"));
    fixture.kcp.edit("kymas/k0", |kyma| drop(kyma["metadata"]["annotations"].as_object_mut().unwrap().remove(INPUTS)));
    fixture.kcp.edit("kymas/k1", |kyma| kyma["metadata"]["annotations"][INPUTS] = "other".into());
    let replaced = fixture.kcp.remove("kymas/k2").unwrap();
    fixture.kcp.edit("kymas/k2", |kyma| kyma["metadata"]["annotations"] = replaced["metadata"]["annotations"].clone());
    let before = fixture.kcp.objects();
    assert_ne!(before["kymas/k2"]["metadata"]["uid"], replaced["metadata"]["uid"]);
    fixture.write().await;
    assert_eq!((fixture.kcp.objects(), fixture.counted()), (before, (0, 3)));
}

#[tokio::test]
async fn nothing_is_written_for_a_forgotten_kyma_or_a_released_shard() {
    let fixture = Fixture::new(3);
    let fence = WriteFence::default();
    (0..2).for_each(|n| fixture.end_with(n, "a", "b", Some(fence.clone())));
    fixture.end_with(2, "a", "b", Some(WriteFence::default()));
    fixture.pending.forget(&key(0));
    fence.close();
    // As the client of KCP, which is behind the fence.
    let client = Client::new(WriteFence::closed().layer().layer(fixture.kcp.service()), "kcp-system");
    fixture.pending.write_all(&client).await;
    assert_eq!([0, 1, 2].map(|n| fixture.stored(n)), ["a", "a", "b"]);
    assert_eq!((fixture.kcp.writes(), fixture.counted()), (vec!["PATCH kymas/k2".to_owned()], (0, 1)));
}

#[tokio::test]
async fn failed_write_is_repeated_a_few_times() {
    let fixture = Fixture::new(1);
    for (failures, wanted) in [(MAX_FAILURES - 1, "b"), (MAX_FAILURES, "c")] {
        fixture.end(0, &fixture.stored(0), wanted);
        fixture.kcp.refuse("PATCH kymas/k0", 503);
        for _ in 0..failures {
            assert_eq!(fixture.counted().0, 1);
            fixture.write().await;
        }
        fixture.kcp.refuse_nothing();
        fixture.write().await;
        assert_eq!((fixture.stored(0).as_str(), fixture.counted().0), ("b", 0));
    }
    assert_eq!(fixture.counted().1, 1);
}

/// A Kyma whose inputs change all the time delays no other.
#[tokio::test(start_paused = true)]
async fn annotations_are_written_in_turn_at_a_limited_rate() {
    let fixture = Fixture::new(40);
    let mut task = Box::pin(fixture.pending.clone().run(fixture.kcp.client()));
    assert!(task.as_mut().now_or_never().is_none(), "it waits for the first");
    (1..40).for_each(|n| fixture.end(n, "a", "b"));
    let start = Instant::now();
    while (1..40).any(|n| fixture.stored(n) == "a") {
        assert!(task.as_mut().now_or_never().is_none());
        let stored = fixture.stored(0);
        fixture.end(0, &stored, if stored == "c" { "d" } else { "c" });
        advance(Duration::from_millis(10)).await;
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", fixture.counted());
    }
    assert!(start.elapsed() >= PAUSE * 38, "{:?}", start.elapsed());
    let writes = fixture.kcp.writes();
    assert!(writes.iter().filter(|write| *write == "PATCH kymas/k0").count() <= 2, "{writes:?}");
}

/// Each attempt of the same entry counts, and the pauses grow.
#[tokio::test(start_paused = true)]
async fn failing_writes_back_off() {
    let fixture = Fixture::new(20);
    let mut task = Box::pin(fixture.pending.clone().run(fixture.kcp.client()));
    fixture.kcp.refuse("WRITE kymas", 503);
    (0..20).for_each(|n| fixture.end(n, "a", "b"));
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(120) {
        assert!(task.as_mut().now_or_never().is_none());
        advance(Duration::from_millis(50)).await;
    }
    let refused = fixture.kcp.writes().len();
    assert!((5..60).contains(&refused), "{refused}");
    fixture.kcp.refuse_nothing();
    while fixture.counted().0 > 0 {
        assert!(task.as_mut().now_or_never().is_none());
        advance(Duration::from_millis(50)).await;
        assert!(start.elapsed() < Duration::from_secs(300), "{:?}", fixture.counted());
    }
    assert!((0..20).all(|n| fixture.stored(n) == "b"));
}
