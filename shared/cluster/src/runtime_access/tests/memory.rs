//! Responses that are small on the wire and large in memory, and many of them at the same time.

use std::sync::OnceLock;

use http::Request;
use hyper::body::Incoming;
use k8s_openapi::api::{
    authentication::v1::TokenReview,
    core::v1::{ConfigMap, Pod},
};
use kube::{
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, PostParams},
    client::Body,
};
use tokio::task::{JoinSet, yield_now};

use super::{test_bed::Reply, *};

async fn serving(reply: impl Fn(&Request<Incoming>) -> Reply + Send + Sync + 'static) -> ApiServer {
    ApiServer::start(None, &[H2], reply).await
}

fn repeated(start: &str, value: &str, count: usize, end: &str) -> String {
    format!("{start}{}{value}{end}", format!("{value},").repeat(count - 1))
}

fn map(fields: usize) -> String {
    repeated(r#"{"metadata":{"name":"a","managedFields":["#, "{}", fields, "]}}")
}

/// A server of one text, and the access to it.
async fn text_server(body: String, settings: Settings) -> (ApiServer, RuntimeAccess) {
    let server = serving(move |_| text(200, body.clone())).await;
    let access = access(settings, server.kubeconfig("127.0.0.1", "token: t"));
    (server, access)
}

#[tokio::test]
async fn many_small_values_are_refused_before_they_are_decoded() {
    let client = async |text| {
        let (server, access) = text_server(text, local()).await;
        let client = access.client(&key()).unwrap();
        (server, access, client)
    };

    let (_server, access, bomb) = client(map(900_000)).await;
    let error = get(bomb).await.unwrap_err();
    assert_eq!(limit_error(&error), Some(LimitError::TooComplex(32 << 20)), "{error:?}");
    assert_eq!(classify(&error), ErrorClass::Refused);
    assert_eq!(
        describe(&error),
        "the runtime's answer has too many values: they take more than 33554432 bytes of memory"
    );
    assert_eq!(access.0.memory.used(), 0, "its memory is free again");

    let (_server, _access, bomb) = client(map(100_000)).await;
    let error = Api::<ConfigMap>::namespaced(bomb, "default").get_metadata("a").await.unwrap_err();
    assert_eq!(limit_error(&error), Some(LimitError::TooComplex(8 << 20)), "{error:?}");

    let (_server, _access, bomb) = client(repeated(r#"{"metadata":{},"data":["#, "0", 1_400_000, "]}")).await;
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("example.test", "v1", "Thing"));
    let error = Api::<DynamicObject>::all_with(bomb, &resource).get("a").await.unwrap_err();
    assert_eq!(limit_error(&error), Some(LimitError::TooComplex(32 << 20)), "{error:?}");
}

#[tokio::test]
async fn list_of_empty_objects_is_refused_before_it_is_decoded() {
    let (_server, access) = text_server(repeated(r#"{"items":["#, "{}", 1_000_000, "]}"), local()).await;
    let pods = Api::<Pod>::namespaced(access.client(&key()).unwrap(), "default");
    let error = match list_map(&pods, &ListParams::default(), &ListLimits::default(), |pod| pod).await {
        Err(ListError::Page(error)) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(limit_error(&error), Some(LimitError::TooComplex(48 << 20)), "{error:?}");
    let error = list_first(&pods, &ListParams::default(), 5).await.unwrap_err();
    assert_eq!(limit_error(&error), Some(LimitError::TooComplex(48 << 20)), "{error:?}");
    let error = pods.list(&ListParams::default()).await.unwrap_err();
    assert_eq!(limit_error(&error), Some(LimitError::TooComplex(32 << 20)), "{error:?}");
}

#[tokio::test]
async fn token_reviews_have_limits_of_their_own() {
    let long = format!(r#"{{"spec":{{"token":"{}"}}}}"#, "x".repeat(65 << 10));
    let complex = repeated(r#"{"metadata":{"managedFields":["#, "{}", 10_000, r#"]},"spec":{}}"#);
    for (text, expected) in [(long, LimitError::TooLarge(64 << 10)), (complex, LimitError::TooComplex(2 << 20))] {
        let (_server, access) = text_server(text, local()).await;
        let reviews = Api::<TokenReview>::all(access.client(&key()).unwrap());
        let error = reviews.create(&PostParams::default(), &TokenReview::default()).await.unwrap_err();
        assert_eq!(limit_error(&error), Some(expected), "{error:?}");
    }
}

#[tokio::test]
async fn error_responses_are_limited_in_memory_too() {
    let body = repeated(r#"{"code":500,"details":{"causes":["#, "{}", 20_000, "]}}");
    let server = serving(move |_| text(500, body.clone())).await;
    let error = get(server.client(local())).await.unwrap_err();
    assert_eq!(limit_error(&error), Some(LimitError::TooComplex(2 << 20)), "{error:?}");
}

#[tokio::test]
async fn large_ordinary_objects_pass() {
    let data = "line of a file\\n".repeat(1_400_000 / 16);
    let configuration = format!(r#"{{"metadata":{{"name":"a"}},"data":{{"file":"{data}"}}}}"#);
    let node = |number| format!(r#""field{number}":{{"description":"{}","type":"string"}}"#, "Text. ".repeat(12));
    let nodes: Vec<_> = (0..11_500).map(node).collect();
    let definition = format!(r#"{{"metadata":{{"name":"a"}},"spec":{{"properties":{{{}}}}}}}"#, nodes.join(","));
    for text in [configuration, definition] {
        assert!((1_300_000..1_500_000).contains(&text.len()), "{}", text.len());
        let (_server, access) = text_server(text, local()).await;
        get(access.client(&key()).unwrap()).await.unwrap();
    }
}

#[tokio::test]
async fn thirty_hostile_runtimes_do_not_stop_another_one() {
    // About 30 MiB of estimated memory each, and never complete.
    let start = map(40_000);
    let stuck = move |_: &_| chunks(200, stream::iter([Bytes::from(start.clone())]).chain(stream::pending()));
    let hostile = serving(stuck).await;
    let ordinary = serving(|_| text(200, map(5_000))).await;
    let large = serving(|_| text(200, map(40_000))).await;

    let access = RuntimeAccess::new(local(), Metrics::default());
    let client = |name: String, server: &ApiServer| {
        let key = KymaKey::new("kcp-system", name);
        access.set_secrets(&key, vec![secret("1", server.kubeconfig("127.0.0.1", "token: t"))]);
        access.client(&key).unwrap()
    };
    let mut stuck = JoinSet::new();
    for number in 0..30 {
        let client = client(format!("hostile-{number}"), &hostile);
        (0..3).for_each(|_| drop(stuck.spawn(get(client.clone()))));
    }
    // What is left is less than the large response needs.
    while access.0.memory.used() < 240 << 20 {
        yield_now().await;
    }
    let quiet = client("quiet".into(), &ordinary);
    get(quiet).await.unwrap();

    let mut waiting = std::pin::pin!(get(client("large".into(), &large)));
    let early = tokio::time::timeout(Duration::from_millis(300), waiting.as_mut()).await;
    assert!(early.is_err(), "it waits for memory");
    stuck.shutdown().await;
    waiting.await.unwrap();
    assert_eq!(access.0.memory.used(), 0);
}

fn scarce(share: u64) -> Settings {
    let limits = Limits { response: Duration::from_millis(500), ..Limits::default() };
    Settings { memory: MemoryLimits { common: share, guaranteed: 0, share }, limits, ..local() }
}

#[tokio::test]
async fn exhausted_memory_fails_the_response_at_its_deadline() {
    let (_server, access) = text_server(map(10), scarce(1 << 10)).await;
    let error = get(access.client(&key()).unwrap()).await.unwrap_err();
    assert_eq!(limit_error(&error), Some(LimitError::NoMemory(Duration::from_millis(500))), "{error:?}");
    assert_eq!(classify(&error), ErrorClass::Ours);
}

#[tokio::test]
async fn memory_is_reserved_while_a_response_is_read_or_retained() {
    let (_server, access) = text_server(map(10), scarce(1 << 20)).await;
    let client = access.client(&key()).unwrap();
    let used = || access.0.memory.used();
    get(client.clone()).await.unwrap();
    assert_eq!(used(), 0);
    retain(async {
        get(client.clone()).await.unwrap();
        let one = used();
        assert!(one > 0);
        join_all([get(client.clone()), get(client.clone())]).await;
        assert_eq!(used(), 3 * one);
    })
    .await;
    assert_eq!(used(), 0);
    let held = client.send(Request::get("/version").body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(used(), 0, "nothing is received yet");
    drop(held);
}

#[tokio::test]
async fn lists_reserve_one_page() {
    // Used memory when each page is requested.
    let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
    let probe: Arc<OnceLock<RuntimeAccess>> = Arc::default();
    let log = seen.clone();
    let used = probe.clone();
    let server = serving(move |request| {
        log.lock().push(used.get().unwrap().0.memory.used());
        let next = if request.uri().query().unwrap().contains("continue=t") { "" } else { "t" };
        text(200, format!(r#"{{"metadata":{{"continue":"{next}"}},"items":[{}]}}"#, map(10)))
    });
    let server = server.await;
    let access = access(scarce(1 << 20), server.kubeconfig("127.0.0.1", "token: t"));
    assert!(probe.set(access.clone()).is_ok());
    let maps = Api::<ConfigMap>::namespaced(access.client(&key()).unwrap(), "default");
    let params = ListParams::default();
    let limits = ListLimits::default();
    let mut kept = Vec::new();
    let sizes = list_map(&maps, &params, &limits, |map| {
        kept.push(access.0.memory.used());
        map.metadata.managed_fields.unwrap_or_default().len()
    });
    assert_eq!(retain(sizes).await.unwrap(), [10, 10]);
    assert!(kept[0] > 0 && kept[0].abs_diff(kept[1]) < 10, "one page each: {kept:?}");
    assert_eq!(*seen.lock(), [0, 0]);
}
