//! Tests against a small API server with real TLS.

mod memory;
pub(super) mod test_bed;

use std::{pin::pin, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures::{StreamExt, future::join_all, stream};
use http::{HeaderMap, Version, header};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use parking_lot::Mutex;
use serde_json::json;
use tidewatch_kit::metrics::ReasonLabel;

use self::test_bed::{ApiServer, Party, chunks, named_secret, secret, text};
use super::{addresses::ForbiddenReason, *};
use crate::{
    error_class::ErrorClass,
    leader::{NotLeaderError, WriteFence, fenced},
};

const H2: &[u8] = b"h2";
const H1: &[u8] = b"http/1.1";
const MAP: &str = r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}"#;

fn key() -> KymaKey {
    KymaKey::new("kcp-system", "kyma")
}

fn local() -> Settings {
    Settings { allow: vec!["127.0.0.0/8".parse().unwrap(), "::1".parse().unwrap()], ..Settings::default() }
}

fn access(settings: Settings, kubeconfig: Vec<u8>) -> RuntimeAccess {
    let access = RuntimeAccess::new(settings, Metrics::default());
    assert!(access.set_secrets(&key(), vec![secret("1", kubeconfig)]));
    access
}

async fn get(client: Client) -> Result<ConfigMap, kube::Error> {
    Api::namespaced(client, "default").get("a").await
}

type Seen = Arc<Mutex<Vec<(HeaderMap, Version, String)>>>;

async fn recording(client: Option<&Party>, protocols: &[&[u8]]) -> (ApiServer, Seen) {
    let seen: Seen = Arc::default();
    let log = seen.clone();
    let server = ApiServer::start(client, protocols, move |request| {
        log.lock().push((request.headers().clone(), request.version(), request.uri().path().to_owned()));
        text(200, MAP)
    });
    (server.await, seen)
}

#[tokio::test]
async fn flood_of_frames_ends_the_connection() {
    let ping = [&[0, 0, 8, 6, 0, 0, 0, 0, 0][..], &[7; 8]].concat();
    let settings = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
    for frame in [ping, settings] {
        let server = ApiServer::flooding(frame.repeat(100)).await;
        let metrics = Metrics::default();
        let access = RuntimeAccess::new(local(), metrics.clone());
        access.set_secrets(&key(), vec![secret("1", server.kubeconfig("127.0.0.1", "token: sesame"))]);
        let error = get(access.client(&key()).unwrap()).await.unwrap_err();
        assert_eq!(classify(&error), ErrorClass::Transport, "{error:?}");
        assert!(metrics.refused.get_or_create(&ReasonLabel { reason: "frames" }).get() > 0, "{frame:?}: {error:?}");
    }
}

#[tokio::test]
async fn token_is_sent_over_http2_and_http1() {
    for (protocols, version) in [(&[H2, H1][..], Version::HTTP_2), (&[H1][..], Version::HTTP_11)] {
        let (server, seen) = recording(None, protocols).await;
        let map = get(server.client(local())).await.unwrap();
        assert_eq!(map.metadata.name.as_deref(), Some("a"));
        let seen = seen.lock();
        let (headers, used, path) = &seen[0];
        assert_eq!(headers[header::AUTHORIZATION], "Bearer sesame");
        assert!(headers[header::USER_AGENT].to_str().unwrap().starts_with("tidewatch-receiver/"));
        assert_eq!(*used, version);
        assert_eq!(path, "/api/v1/namespaces/default/configmaps/a");
    }
}

#[tokio::test]
async fn write_of_a_reconcile_needs_the_fence_of_its_shard_although_that_of_the_process_is_open() {
    let (server, seen) = recording(None, &[H2]).await;
    let maps = Api::<ConfigMap>::namespaced(server.client(local()), "default");
    let shard = WriteFence::default().child();
    let map = serde_json::from_str(MAP).unwrap();
    fenced(shard.clone(), maps.create(&Default::default(), &map)).await.unwrap();
    shard.close();
    let refused = fenced(shard.clone(), maps.create(&Default::default(), &map)).await.unwrap_err();
    let kube::Error::Service(error) = refused else { panic!("{refused:?}") };
    assert!(error.is::<NotLeaderError>(), "{error}");
    assert_eq!(seen.lock().len(), 1, "nothing was sent");
    fenced(shard, maps.get("a")).await.unwrap();
    maps.create(&Default::default(), &map).await.unwrap();
}

#[tokio::test]
async fn upgrade_client_uses_http1_under_the_same_rules() {
    let (server, seen) = recording(None, &[H2, H1]).await;
    let kubeconfig = server.kubeconfig("127.0.0.1", "token: sesame");
    get(access(local(), kubeconfig.clone()).upgrade_client(&key()).unwrap()).await.unwrap();
    {
        let seen = seen.lock();
        assert_eq!(
            (&seen[0].0[header::AUTHORIZATION], seen[0].1),
            (&"Bearer sesame".parse().unwrap(), Version::HTTP_11)
        );
    }
    let refused = access(Settings::default(), kubeconfig).upgrade_client(&key());
    assert!(matches!(
        refused.err(),
        Some(ClientError::Access(RuntimeAccessError::Kubeconfig(KubeconfigError::ForbiddenAddress(_))))
    ));
    let none = RuntimeAccess::new(local(), Metrics::default()).upgrade_client(&key());
    assert_eq!(none.err(), Some(RuntimeAccessError::Missing.into()));
}

#[tokio::test]
async fn host_name_and_path_prefix_are_used() {
    let (server, seen) = recording(None, &[H2]).await;
    let kubeconfig = String::from_utf8(server.kubeconfig("localhost", "token: t")).unwrap();
    let port = server.address.port();
    let kubeconfig = kubeconfig.replace(&format!("localhost:{port}'"), &format!("localhost:{port}/one/'"));
    get(access(local(), kubeconfig.into_bytes()).client(&key()).unwrap()).await.unwrap();
    assert_eq!(seen.lock()[0].2, "/one/api/v1/namespaces/default/configmaps/a");
}

#[tokio::test]
async fn client_certificate_is_presented_and_its_lack_is_an_auth_error() {
    let runtime_user = Party::new("user");
    let (server, seen) = recording(Some(&runtime_user), &[H2]).await;
    let user = format!(
        "client-certificate-data: {}, client-key-data: {}",
        runtime_user.certificate_data(),
        runtime_user.key_data()
    );
    let by_certificate = access(local(), server.kubeconfig("127.0.0.1", &user));
    get(by_certificate.client(&key()).unwrap()).await.unwrap();
    assert!(!seen.lock()[0].0.contains_key(header::AUTHORIZATION));

    let error = get(server.client(local())).await.unwrap_err();
    assert_eq!(classify(&error), ErrorClass::Auth, "{error:?}");
    assert_eq!((untrusted_server(&error), is_unreached(&error)), (None, false), "the server rejects the client");

    let other = Party::new("other");
    let user =
        format!("client-certificate-data: {}, client-key-data: {}", runtime_user.certificate_data(), other.key_data());
    let mismatch = access(local(), server.kubeconfig("127.0.0.1", &user));
    assert_eq!(
        mismatch.client(&key()).err(),
        Some(RuntimeAccessError::from(KubeconfigError::ClientCertificate).into())
    );
}

#[tokio::test]
async fn certificate_and_token_are_sent_together() {
    let runtime_user = Party::new("user");
    let (server, seen) = recording(Some(&runtime_user), &[H2]).await;
    let user = format!(
        "token: sesame, client-certificate-data: {}, client-key-data: {}",
        runtime_user.certificate_data(),
        runtime_user.key_data()
    );
    get(access(local(), server.kubeconfig("127.0.0.1", &user)).client(&key()).unwrap()).await.unwrap();
    assert_eq!(seen.lock()[0].0[header::AUTHORIZATION], "Bearer sesame");
}

#[tokio::test]
async fn kubeconfig_without_roots_trusts_those_of_the_system_alone() {
    let (server, seen) = recording(None, &[H2]).await;
    let kubeconfig = String::from_utf8(server.kubeconfig("127.0.0.1", "token: sesame")).unwrap();
    let with_roots = access(local(), kubeconfig.clone().into_bytes());
    assert_eq!(with_roots.remark(&key()), None);
    let data = format!(", certificate-authority-data: {}", server.party.certificate_data());
    assert!(kubeconfig.contains(&data));
    let kubeconfig = kubeconfig.replace(&data, "").into_bytes();

    let system_roots = SystemRoots::from(server.party.roots());
    let public = access(Settings { system_roots, ..local() }, kubeconfig.clone());
    get(public.client(&key()).unwrap()).await.unwrap();
    assert_eq!(public.remark(&key()), Some(AccessRemark::PublicRoots));

    let system_roots = SystemRoots::from(Party::new("other").roots());
    let foreign = access(Settings { system_roots, ..local() }, kubeconfig.clone());
    let error = get(foreign.client(&key()).unwrap()).await.unwrap_err();
    assert_eq!(untrusted_server(&error), Some(Untrusted::Issuer), "{error:?}");
    let none = access(local(), kubeconfig).client(&key()).err();
    assert_eq!(none, Some(RuntimeAccessError::from(KubeconfigError::NoPublicRoots).into()));
    assert_eq!(seen.lock().len(), 1);
}

#[tokio::test]
async fn server_of_another_ca_or_name_or_time_is_not_trusted() {
    let (server, seen) = recording(None, &[H2]).await;
    let expired = ApiServer::presenting(Party::expired("runtime"), |_| text(200, MAP)).await;
    let of = |server: &ApiServer| String::from_utf8(server.kubeconfig("127.0.0.1", "token: sesame")).unwrap();
    let another_ca = of(&server).replace(&server.party.certificate_data(), &Party::new("runtime").certificate_data());
    let another_name = of(&server).replace("{server:", "{tls-server-name: other.example, server:");
    for (kubeconfig, untrusted) in
        [(another_ca, Untrusted::Issuer), (another_name, Untrusted::Name), (of(&expired), Untrusted::Expired)]
    {
        let error = get(access(local(), kubeconfig.into_bytes()).client(&key()).unwrap()).await.unwrap_err();
        assert_eq!(untrusted_server(&error), Some(untrusted), "{error:?}");
        assert_eq!(classify(&error), ErrorClass::Transport, "{error:?}");
        assert!(is_unanswered(&error), "{error:?}");
    }
    assert!(seen.lock().is_empty());
}

#[tokio::test]
async fn forbidden_addresses_are_refused_by_name_and_by_address() {
    let (server, seen) = recording(None, &[H2]).await;
    // The name looks harmless, but its resolved address decides.
    for host in ["localhost", "127.1"] {
        let kubeconfig = String::from_utf8(server.kubeconfig(host, "token: sesame")).unwrap();
        let kubeconfig = kubeconfig.replace("{server:", "{tls-server-name: localhost, server:");
        let access = access(Settings::default(), kubeconfig.into_bytes());
        let error = get(access.client(&key()).unwrap()).await.unwrap_err();
        let forbidden = forbidden_address(&error).unwrap_or_else(|| panic!("{host}: {error:?}"));
        assert_eq!(forbidden.reason, ForbiddenReason::Loopback);
        assert_eq!(classify(&error), ErrorClass::Auth);
        assert!(describe(&error).contains("is forbidden: it is a loopback address"), "{}", describe(&error));
    }
    let literal = access(Settings::default(), server.kubeconfig("127.0.0.1", "token: sesame"));
    let unusable = literal.client(&key()).err().unwrap();
    assert_eq!(unusable.to_string(), "the runtime's address 127.0.0.1 is forbidden: it is a loopback address");
    assert!(seen.lock().is_empty());
}

#[tokio::test]
async fn endless_response_ends_at_its_byte_limit() {
    let chunk = Bytes::from(vec![b' '; 1 << 14]);
    for protocols in [&[H2][..], &[H1][..]] {
        for (status, limits) in [
            (200, Limits { bytes: 1 << 17, ..Limits::default() }),
            (500, Limits { error_bytes: 1 << 15, ..Limits::default() }),
        ] {
            let chunk = chunk.clone();
            let server =
                ApiServer::start(None, protocols, move |_| chunks(status, stream::repeat(chunk.clone()))).await;
            let error = get(server.client(Settings { limits, ..local() })).await.unwrap_err();
            let limit = if status == 200 { limits.bytes } else { limits.error_bytes };
            assert_eq!(limit_error(&error), Some(LimitError::TooLarge(limit)), "{error:?}");
            assert_eq!(classify(&error), ErrorClass::Refused);
        }
    }
}

#[tokio::test]
async fn slow_response_ends_at_its_timeouts() {
    let limits = Limits { response: Duration::from_millis(200), ..Limits::default() };
    // One byte, then silence for ever.
    let silent = |_: &_| chunks(200, stream::iter([Bytes::from_static(b"{")]).chain(stream::pending()));
    let server = ApiServer::start(None, &[H2], silent).await;
    let error = get(server.client(Settings { limits, ..local() })).await.unwrap_err();
    assert_eq!(limit_error(&error), Some(LimitError::Timeout(limits.response)), "{error:?}");
    assert_eq!(classify(&error), ErrorClass::Transport);

    // A peer that accepts TCP connections and sends nothing.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let kubeconfig = String::from_utf8(server.kubeconfig("127.0.0.1", "token: sesame")).unwrap();
    let port = |server: std::net::SocketAddr| format!("127.0.0.1:{}", server.port());
    let mute = kubeconfig.replace(&port(server.address), &port(listener.local_addr().unwrap())).into_bytes();
    for (limits, cut) in [
        (
            Limits { head: Duration::from_millis(100), ..Limits::default() },
            Some(LimitError::HeadTimeout(Duration::from_millis(100))),
        ),
        (Limits { connect: Duration::from_millis(100), ..Limits::default() }, None),
    ] {
        let client = access(Settings { limits, ..local() }, mute.clone()).client(&key()).unwrap();
        let error = get(client).await.unwrap_err();
        assert_eq!(limit_error(&error), cut, "{error:?}");
        assert_eq!(classify(&error), ErrorClass::Transport);
    }
}

#[tokio::test]
async fn unread_response_holds_its_permit_and_the_client_survives() {
    let server = ApiServer::start(None, &[H2], |_| text(200, MAP)).await;
    let limits = Limits { concurrent: 1, head: Duration::from_secs(2), ..Limits::default() };
    let client = server.client(Settings { limits, ..local() });
    let request = || http::Request::get("/version").body(kube::client::Body::empty()).unwrap();
    let held = client.send(request()).await.unwrap();
    let error = client.send(request()).await.unwrap_err();
    assert_eq!(limit_error(&error), Some(LimitError::HeadTimeout(limits.head)));
    drop(held);
    client.send(request()).await.unwrap();
}

#[tokio::test]
async fn concurrent_first_requests_open_one_connection() {
    let (server, seen) = recording(None, &[H2, H1]).await;
    let client = server.client(local());
    for map in join_all((0..20).map(|_| get(client.clone()))).await {
        map.unwrap();
    }
    assert_eq!((seen.lock().len(), server.connections()), (20, 1));
}

#[tokio::test]
async fn requests_that_wait_for_a_connection_fail_with_it() {
    let server = ApiServer::start(None, &[H2], |_| text(200, MAP)).await;
    // A peer that accepts TCP connections and sends nothing.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let kubeconfig = String::from_utf8(server.kubeconfig("127.0.0.1", "token: sesame")).unwrap();
    let port = |server: std::net::SocketAddr| format!("127.0.0.1:{}", server.port());
    let mute = kubeconfig.replace(&port(server.address), &port(listener.local_addr().unwrap())).into_bytes();
    let limits = Limits { connect: Duration::from_millis(200), ..Limits::default() };
    let client = access(Settings { limits, ..local() }, mute).client(&key()).unwrap();
    let requests = join_all((0..20).map(|_| get(client.clone())));
    let mut held = Vec::new();
    let mut requests = pin!(requests);
    let failed = loop {
        tokio::select! {
            failed = &mut requests => break failed,
            Ok(connection) = listener.accept() => held.push(connection),
        }
    };
    assert_eq!(held.len(), 1, "one connection for all of them");
    for map in failed {
        let error = map.unwrap_err();
        assert!(is_unanswered(&error), "{error:?}");
    }
    // A later request tries anew.
    let again = tokio::join!(get(client), listener.accept());
    assert!(again.0.is_err() && again.1.is_ok());
}

#[tokio::test]
async fn failed_first_request_lets_the_next_one_through() {
    let (server, _) = recording(Some(&Party::new("user")), &[H2]).await;
    let client = server.client(local());
    for map in join_all((0..3).map(|_| get(client.clone()))).await {
        let error = map.unwrap_err();
        assert_eq!(limit_error(&error), None, "it did not wait: {error:?}");
    }
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let server = ApiServer::start(None, &[H2], |_| {
        let mut reply = text(302, MAP);
        reply.headers_mut().insert(header::LOCATION, "https://169.254.169.254/".parse().unwrap());
        reply
    });
    let error = get(server.await.client(local())).await.unwrap_err();
    assert!(
        matches!(limit_error(&error), Some(LimitError::UnexpectedStatus(status)) if status.as_u16() == 302),
        "{error:?}"
    );
}

#[tokio::test]
async fn only_a_changed_secret_gives_a_new_client() {
    let (server, seen) = recording(None, &[H2]).await;
    let old = server.kubeconfig("127.0.0.1", "token: old");
    let access = access(local(), old.clone());
    let (_, first) = access.client_and_revision(&key()).unwrap();
    assert_eq!(access.client_and_revision(&key()).unwrap().1, first);
    // Only a label was written: another resourceVersion, the same content.
    assert!(!access.set_secrets(&key(), vec![secret("2", old.clone())]));
    assert_eq!(access.client_and_revision(&key()).unwrap().1, first);

    assert!(access.set_secrets(&key(), vec![secret("3", server.kubeconfig("127.0.0.1", "token: new"))]));
    let (client, second) = access.client_and_revision(&key()).unwrap();
    assert_ne!(first, second);
    get(client).await.unwrap();
    assert_eq!(seen.lock()[0].0[header::AUTHORIZATION], "Bearer new");

    let other = named_secret("other", "9", old.clone());
    assert!(access.set_secrets(&key(), vec![other.clone(), secret("3", old.clone())]));
    let several = access.client(&key()).err().unwrap();
    assert_eq!(several.to_string(), "several access Secrets are labelled with this Kyma's name: access, other");
    assert!(!access.set_secrets(&key(), vec![secret("3", old.clone()), other.clone()]), "the order does not matter");
    assert!(access.set_secrets(&key(), vec![other]));
    access.client(&key()).unwrap();

    assert!(access.set_secrets(&key(), vec![]));
    assert!(!access.set_secrets(&key(), vec![]));
    assert_eq!(access.client(&key()).err(), Some(RuntimeAccessError::Missing.into()));
    access.set_secrets(&key(), vec![secret("1", old)]);
    access.remove(&key());
    assert_eq!(access.client(&key()).err(), Some(RuntimeAccessError::Missing.into()));
}

#[tokio::test(start_paused = true)]
async fn idle_client_is_evicted_and_rebuilt_with_the_same_revision() {
    let (server, _) = recording(None, &[H2]).await;
    let access = access(local(), server.kubeconfig("127.0.0.1", "token: t"));
    let is_built = || access.0.table.lock().entries[&key()].cached.is_some();
    let (client, revision) = access.client_and_revision(&key()).unwrap();
    tokio::time::advance(client::IDLE_TIMEOUT / 2).await;
    access.client(&key()).unwrap();
    tokio::time::advance(client::IDLE_TIMEOUT / 2).await;
    access.evict_idle();
    assert!(is_built(), "it was used a moment ago");
    let usage = access.0.table.lock().entries[&key()].cached.as_ref().unwrap().usage.clone();
    let held = usage.permits.clone().try_acquire_owned().unwrap();
    tokio::time::advance(client::IDLE_TIMEOUT).await;
    access.evict_idle();
    assert!(is_built(), "an answer is under way");
    drop(held);
    access.evict_idle();
    assert!(!is_built());
    assert_eq!(access.client_and_revision(&key()).unwrap().1, revision);
    drop(client);
}

#[tokio::test(start_paused = true)]
async fn least_recently_used_clients_are_evicted_first() {
    let (server, _) = recording(None, &[H2]).await;
    let kubeconfig = server.kubeconfig("127.0.0.1", "token: t");
    let access = RuntimeAccess::new(local(), Metrics::default());
    let keys: Vec<_> = (0..MAX_IDLE_CLIENTS + 2).map(|number| KymaKey::new("kcp-system", number.to_string())).collect();
    for key in &keys {
        access.set_secrets(key, vec![secret("1", kubeconfig.clone())]);
        access.client(key).unwrap();
        tokio::time::advance(client::IDLE_TIMEOUT / 1_000).await;
    }
    access.client(&keys[0]).unwrap();
    access.evict_idle();
    let is_built = |key| access.0.table.lock().entries[key].cached.is_some();
    let dropped: Vec<_> = keys.iter().filter(|key| !is_built(key)).collect();
    assert_eq!(dropped, [&keys[1], &keys[2]], "the first was used again");
}

#[test]
fn secret_is_held_once_whichever_was_set_first() {
    let kubeconfig = |token: &str| {
        let ca = Party::new("runtime").certificate_data();
        format!(
            "clusters: [{{name: a, cluster: {{server: 'https://runtime', certificate-authority-data: {ca}}}}}]\n\
             users: [{{name: b, user: {{token: {token}}}}}]\ncontexts: [{{name: c, context: {{cluster: a, user: b}}}}]\n"
        )
    };
    let access = RuntimeAccess::new(local(), Metrics::default());
    let old = kubeconfig("old");
    let first = secret("1", old.clone().into_bytes());
    let listed_again = secret("2", old.into_bytes());
    assert!(access.set_secrets(&key(), vec![first.clone()]));
    assert_eq!(Arc::strong_count(&first), 2, "the access shares the cached Secret");
    assert!(!access.set_secrets(&key(), vec![listed_again.clone()]));
    assert_eq!((Arc::strong_count(&first), Arc::strong_count(&listed_again)), (1, 2), "the replaced one is dropped");
    assert!(access.set_secrets(&key(), vec![secret("3", kubeconfig("new").into_bytes())]));
    assert_eq!(Arc::strong_count(&listed_again), 1);
}

#[tokio::test]
async fn reduced_secret_is_neither_missing_nor_another_access_and_its_client_is_dropped() {
    let (server, _) = recording(None, &[H2]).await;
    let whole = secret("1", server.kubeconfig("127.0.0.1", "token: t"));
    let reduced = Arc::new(whole.reduced());
    let metrics = Metrics::default();
    let access = RuntimeAccess::new(local(), metrics.clone());
    assert!(access.set_secrets(&key(), vec![reduced.clone()]));
    let missing = || Some(ClientError::Body(BodyMissingError { kind: "access Secret", key: whole.key().to_string() }));
    assert_eq!(access.client(&key()).err(), missing());
    assert_eq!(access.upgrade_client(&key()).err(), missing());
    access.missed().await;
    assert!(!access.set_secrets(&key(), vec![whole.clone()]), "the same access");
    let (_, revision) = access.client_and_revision(&key()).unwrap();
    let is_built = || access.0.table.lock().entries[&key()].cached.is_some();
    assert!(is_built());

    assert!(!access.set_secrets(&key(), vec![reduced.clone()]));
    assert!(!is_built(), "it would hold the credentials");
    assert_eq!(access.client(&key()).err(), missing());
    assert!(!access.set_secrets(&key(), vec![whole.clone()]));
    assert_eq!(access.client_and_revision(&key()).unwrap().1, revision, "results stay verified");
    let changed = Arc::new(secret("2", server.kubeconfig("127.0.0.1", "token: new")).reduced());
    assert!(access.set_secrets(&key(), vec![changed]), "its digest shows a change");
    let other = Arc::new(named_secret("other", "9", Vec::new()).reduced());
    assert!(access.set_secrets(&key(), vec![other, reduced]));
    let several = RuntimeAccessError::Several(vec!["access".to_owned(), "other".to_owned()]);
    assert_eq!(access.client(&key()).err(), Some(several.into()), "by their names");
    assert!(access.set_secrets(&key(), vec![]));
    assert_eq!(access.client(&key()).err(), Some(RuntimeAccessError::Missing.into()));
}

#[test]
fn secret_without_kubeconfig_gives_no_access() {
    let empty = Arc::new(AccessSecret::from(k8s_openapi::api::core::v1::Secret::default()));
    let access = RuntimeAccess::new(Settings::default(), Metrics::default());
    assert!(access.set_secrets(&key(), vec![empty]));
    assert_eq!(access.client(&key()).err(), Some(RuntimeAccessError::from(KubeconfigError::NoKey).into()));
}

/// The access Secret as an object with this uid, and with this kubeconfig.
fn object(uid: &str, kubeconfig: Option<Vec<u8>>) -> Arc<AccessSecret> {
    let data = kubeconfig.map(|text| json!({"config": STANDARD.encode(text)}));
    let object = json!({"metadata": {"name": "access", "namespace": "kcp-system", "uid": uid}, "data": data});
    Arc::new(serde_json::from_value::<ListedSecret>(object).unwrap().into())
}

fn no_kubeconfig() -> Option<ClientError> {
    Some(RuntimeAccessError::from(KubeconfigError::NoKey).into())
}

#[tokio::test(start_paused = true)]
async fn kubeconfig_of_a_secret_that_loses_it_is_used_for_a_while() {
    let (server, _) = recording(None, &[H2]).await;
    let with_kubeconfig = || object("u", Some(server.kubeconfig("127.0.0.1", "token: t")));
    let access = RuntimeAccess::new(local(), Metrics::default());
    assert!(access.set_secrets(&key(), vec![with_kubeconfig()]));
    let (_, revision) = access.client_and_revision(&key()).unwrap();
    assert_eq!(access.kept_for(&key()), None);
    // The other writes change a label, or leave an empty text.
    for lost in [None, None, Some(Vec::new())] {
        assert!(!access.set_secrets(&key(), vec![object("u", lost)]));
        assert_eq!(access.client_and_revision(&key()).unwrap().1, revision);
        assert_eq!(access.kept_for(&key()), Some(KEPT_FOR));
    }
    tokio::time::advance(KEPT_FOR - Duration::from_secs(1)).await;
    access.evict_kept();
    access.client(&key()).unwrap();
    access.upgrade_client(&key()).unwrap();
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(access.client(&key()).err(), no_kubeconfig());
    assert_eq!(access.upgrade_client(&key()).err(), no_kubeconfig());
    assert_eq!(access.kept_for(&key()), None);
    access.evict_kept();
    let has_credentials = |entry: &Entry| entry.kept.is_some() || entry.cached.is_some();
    assert!(!has_credentials(&access.0.table.lock().entries[&key()]));
    assert!(access.set_secrets(&key(), vec![with_kubeconfig()]));
    assert_ne!(access.client_and_revision(&key()).unwrap().1, revision);
}

#[tokio::test]
async fn kubeconfig_is_kept_of_the_same_whole_secret_alone() {
    let (server, _) = recording(None, &[H2]).await;
    let whole = object("u", Some(server.kubeconfig("127.0.0.1", "token: t")));
    let empty = object("u", None);
    let refused = object("u", Some(b"{}".to_vec()));
    let other = named_secret("other", "9", Vec::new());
    for states in [
        vec![vec![whole.clone()], vec![object("recreated", None)]],
        vec![vec![whole.clone()], vec![], vec![empty.clone()]],
        vec![vec![Arc::new(whole.reduced())], vec![empty.clone()]],
        vec![vec![refused], vec![empty.clone()]],
        vec![vec![whole.clone()], vec![empty.clone(), other.clone()], vec![empty.clone()]],
        // It is recreated unseen while it has no kubeconfig.
        vec![vec![whole.clone()], vec![empty.clone()], vec![object("recreated", None)]],
        // Its shard is released, and acquired again.
        vec![vec![whole.clone()], vec![empty.clone()], vec![Arc::new(empty.reduced())], vec![empty.clone()]],
        // A restarted receiver knows no last one.
        vec![vec![empty.clone()]],
    ] {
        let access = RuntimeAccess::new(local(), Metrics::default());
        for secrets in states.clone() {
            access.set_secrets(&key(), secrets);
        }
        assert_eq!(access.client(&key()).err(), no_kubeconfig(), "{states:?}");
        assert_eq!(access.kept_for(&key()), None);
    }
}

#[test]
fn deleted_secret_is_named_until_the_kyma_has_one_or_is_removed() {
    let access = RuntimeAccess::new(local(), Metrics::default());
    let deleted = || Some(RuntimeAccessError::SecretDeleted("access".to_owned()).into());
    let missing = || Some(RuntimeAccessError::Missing.into());
    let delete = || {
        access.secret_deleted(&key(), &KymaKey::new("kcp-system", "access"));
        access.set_secrets(&key(), vec![]);
        assert_eq!((access.client(&key()).err(), access.upgrade_client(&key()).err()), (deleted(), deleted()));
    };
    delete();
    access.set_secrets(&key(), vec![object("u", None)]);
    assert_eq!(access.client(&key()).err(), no_kubeconfig());
    access.set_secrets(&key(), vec![]);
    assert_eq!(access.client(&key()).err(), missing(), "nothing was seen of the new one");
    delete();
    access.remove(&key());
    assert_eq!(access.client(&key()).err(), missing());
}

#[test]
fn concurrent_refreshes_do_not_lose_a_secret() {
    let access = RuntimeAccess::new(local(), Metrics::default());
    let (sender, received) = std::sync::mpsc::channel();
    let other = access.clone();
    let mut later = None;
    access.refresh_secrets(&key(), || {
        later = Some(std::thread::spawn(move || {
            let changed = other.refresh_secrets(&key(), || vec![secret("1", b"{}".to_vec())]);
            sender.send(changed)
        }));
        // The other thread can only be done by then if it did not wait.
        let overtaken = received.recv_timeout(Duration::from_millis(200)).is_ok();
        assert!(!overtaken, "the other one waits for its turn");
        Vec::new()
    });
    later.expect("it was begun").join().expect("it ended").expect("the result is received");
    assert!(
        !matches!(access.client(&key()), Err(ClientError::Access(RuntimeAccessError::Missing))),
        "the Secret is known"
    );
}
