//! A gateway behind a TLS-terminating proxy, over real TLS: admission of the proxy, and the certificates that it
//! forwards.

use base64::{Engine, engine::general_purpose::STANDARD};
use http::HeaderName;
use tidewatch_contract::{
    admin::rotation::PhaseName,
    certificate::to_pem,
    forwarded::{CLIENT_CERT, CLIENT_CERT_CHAIN, FORWARDED_CLIENT_CERT},
};
use tidewatch_trust::{Proxy, ProxyIdentity, testing::Rotating};

use super::*;

/// Identity in the proxy's certificate.
const PROXY: &str = "spiffe://kyma.local/runtime/proxy";

/// A gateway behind a proxy with a certificate of a separate CA.
struct BehindProxy {
    gateway: TestGateway,
    proxies: Ca,
    proxy: Agent,
}

impl BehindProxy {
    async fn start() -> Self {
        let proxies = ca(unix_now());
        let gateway = TestGateway::behind(&proxies).await;
        let proxy = Agent::new(&proxies, "proxy", unix_now());
        Self { gateway, proxies, proxy }
    }

    /// Sends a request of an agent through the proxy, with these additional fields.
    async fn send(&self, agent: &Agent, counter: u64, fields: &[(&'static str, String)]) -> (u16, Value) {
        let mut sender = self.gateway.http2(&self.proxy).await;
        self.send_over(&mut sender, agent, counter, fields).await
    }

    async fn send_over(
        &self,
        sender: &mut http2::SendRequest<Full<Bytes>>,
        agent: &Agent,
        counter: u64,
        fields: &[(&'static str, String)],
    ) -> (u16, Value) {
        let mut request = self.gateway.request(agent, counter, true);
        for (name, value) in fields {
            request.headers_mut().append(HeaderName::from_static(name), value.parse().unwrap());
        }
        let (status, problem_body) = problem(sender.send_request(request).await.unwrap()).await;
        (status.as_u16(), problem_body)
    }
}

impl TestGateway {
    async fn behind(proxies: &Ca) -> Self {
        let identity: ProxyIdentity = PROXY.parse().unwrap();
        Self::with(Some(proxies.trust_bundle()), |settings, ca| {
            let clients = ca.trust_bundle().store().unwrap();
            settings.proxy = Some(Proxy::new(identity, clients).unwrap());
        })
        .await
    }
}

/// Each client gets the cheaper protocol for its use: multiplexing for a proxy, little memory for an agent.
#[tokio::test]
async fn alpn_selects_http2_for_a_proxy_and_http1_for_an_agent() {
    let behind = BehindProxy::start().await;
    let gateway = TestGateway::start(|_| {}).await;
    for (gateway, identity, protocol) in
        [(&behind.gateway, &behind.proxy.identity, &b"h2"[..]), (&gateway, &gateway.agent("r-1").identity, b"http/1.1")]
    {
        for turned in [false, true] {
            let mut config = gateway.client(identity);
            config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
            if turned {
                config.alpn_protocols.reverse();
            }
            assert_eq!(gateway.connect(config).await.unwrap().get_ref().1.alpn_protocol(), Some(protocol));
        }
    }
    behind.gateway.stop().await;
    gateway.stop().await;
}

/// A proxy may use HTTP/1.1 nevertheless, and adds fields.
#[tokio::test]
async fn proxy_may_send_many_fields_over_http1() {
    let behind = BehindProxy::start().await;
    let one = behind.gateway.agent("r-1");
    let mut sender = behind.gateway.open(&behind.proxy, false).await;
    let mut request = behind.gateway.request(&one, 1, false);
    let fields = request.headers_mut();
    fields.insert(HeaderName::from_static(CLIENT_CERT), plain(&one).parse().unwrap());
    for number in 0..80 {
        fields.insert(HeaderName::try_from(format!("x-{number}")).unwrap(), "added".parse().unwrap());
    }
    assert_eq!(sender.send(request).await.unwrap().status(), StatusCode::ACCEPTED);
    drop(sender);
    behind.gateway.stop().await;
}

fn plain(agent: &Agent) -> String {
    format!(":{}:", STANDARD.encode(&agent.identity.chain[0]))
}

fn envoy(agent: &Agent) -> String {
    let pem = to_pem(&agent.identity.chain[0]);
    let encoded: String = pem
        .bytes()
        .map(|byte| match byte {
            b'\n' | b' ' | b'+' | b'/' | b'=' => format!("%{byte:02X}"),
            byte => char::from(byte).to_string(),
        })
        .collect();
    format!("Hash=00;Cert=\"{encoded}\";Subject=\"CN=x\";URI=spiffe://x")
}

#[tokio::test]
async fn either_field_identifies_the_runtime_and_many_share_the_connection() {
    let behind = BehindProxy::start().await;
    let one = behind.gateway.agent("r-1");
    let two = behind.gateway.agent("r-2");
    let mut sender = behind.gateway.http2(&behind.proxy).await;
    for (agent, counter, field) in [
        (&one, 1, (CLIENT_CERT, plain(&one))),
        (&two, 1, (FORWARDED_CLIENT_CERT, envoy(&two))),
        (&one, 2, (FORWARDED_CLIENT_CERT, envoy(&one))),
    ] {
        assert_eq!(behind.send_over(&mut sender, agent, counter, &[field]).await.0, 202);
    }
    let replayed = behind.send_over(&mut sender, &one, 2, &[(CLIENT_CERT, plain(&one))]).await;
    assert_eq!(replayed.0, 401);
    let stolen = behind.send_over(&mut sender, &one, 3, &[(CLIENT_CERT, plain(&two))]).await;
    assert_eq!(stolen.0, 401, "the signature must be by the key of the forwarded certificate");
    let fields = [(CLIENT_CERT, plain(&one)), (CLIENT_CERT_CHAIN, "x".to_owned())];
    let malformed = behind.send_over(&mut sender, &one, 3, &fields).await;
    assert_eq!(malformed.0, 401, "also with a certificate that is verified already");
    let fine = behind.send_over(&mut sender, &two, 2, &[(CLIENT_CERT, plain(&two))]).await;
    assert_eq!(fine.0, 202, "the connection outlives refusals");
    let received: Vec<_> = behind.gateway.intake.received.lock().iter().map(|(runtime, _)| runtime.clone()).collect();
    assert_eq!(received, ["r-1", "r-2", "r-1", "r-2"]);
    drop(sender);
    behind.gateway.stop().await;
}

#[tokio::test]
async fn requests_without_exactly_one_forwarded_certificate_are_refused() {
    let behind = BehindProxy::start().await;
    let one = behind.gateway.agent("r-1");
    let now = unix_now();
    let plain_one = plain(&one);
    let envoy_one = envoy(&one);
    let stranger = Agent::new(&ca(now), "r-1", now);
    let runtime: RuntimeId = "r-1".parse().unwrap();
    let old = behind.gateway.ca.make_runtime(&runtime, &domain(), now - 500, Duration::from_secs(60)).unwrap();
    let old = Agent::with(old.identity().unwrap(), runtime.clone());
    let foreign = behind.gateway.ca.make_runtime(&runtime, &"other".parse().unwrap(), now, RUNTIME_VALIDITY).unwrap();
    let foreign = Agent::with(foreign.identity().unwrap(), runtime);
    for (counter, (case, agent, fields, status, reason)) in (1..).zip([
        ("none", &one, vec![], 401, "proxy"),
        (
            "both",
            &one,
            vec![(CLIENT_CERT, plain_one.clone()), (FORWARDED_CLIENT_CERT, envoy_one.clone())],
            401,
            "proxy",
        ),
        ("twice", &one, vec![(CLIENT_CERT, plain_one.clone()), (CLIENT_CERT, plain_one.clone())], 401, "proxy"),
        ("two elements", &one, vec![(FORWARDED_CLIENT_CERT, format!("{envoy_one},{envoy_one}"))], 401, "proxy"),
        ("garbage", &one, vec![(CLIENT_CERT, "x".to_owned())], 401, "proxy"),
        (
            "garbage beside it",
            &one,
            vec![(CLIENT_CERT, plain_one.clone()), (CLIENT_CERT_CHAIN, "x".to_owned())],
            401,
            "proxy",
        ),
        ("another CA", &stranger, vec![(CLIENT_CERT, plain(&stranger))], 401, "certificate"),
        ("expired", &old, vec![(CLIENT_CERT, plain(&old))], 401, "certificate"),
        ("another domain", &foreign, vec![(CLIENT_CERT, plain(&foreign))], 403, "identity"),
    ]) {
        let before = behind.gateway.refused(reason);
        let (actual, _) = behind.send(agent, counter, &fields).await;
        assert_eq!((actual, behind.gateway.refused(reason)), (status, before + 1), "{case}");
    }
    assert_eq!(behind.gateway.intake.count(), 0);
    behind.gateway.stop().await;
}

#[tokio::test]
async fn only_the_proxy_may_connect() {
    let behind = BehindProxy::start().await;
    let one = behind.gateway.agent("r-1");
    assert!(behind.gateway.is_refused(behind.gateway.client(&one.identity)).await, "a runtime itself");
    let failed = behind
        .gateway
        .metrics
        .handshakes_failed
        .get_or_create(&metrics::ReasonLabel { reason: "unknown-issuer" })
        .get();
    assert_eq!(failed, 1, "its CA is not trusted there");
    let another = Agent::new(&behind.proxies, "another", unix_now());
    let mut sender = behind.gateway.http2(&another).await;
    let (status, problem_body) = behind.send_over(&mut sender, &one, 1, &[(CLIENT_CERT, plain(&one))]).await;
    assert_eq!((status, &problem_body["status"]), (401, &401.into()), "another client of the proxy's CA");
    assert_eq!((behind.gateway.refused("proxy"), behind.gateway.intake.count()), (1, 0));
    behind.gateway.stop().await;

    let gateway = TestGateway::start(|_| {}).await;
    let one = gateway.agent("r-1");
    let two = gateway.agent("r-2");
    let mut request = gateway.request(&two, 1, true);
    request.headers_mut().insert(HeaderName::from_static(CLIENT_CERT), plain(&two).parse().unwrap());
    let response = gateway.http2(&one).await.send_request(request).await.unwrap();
    assert_eq!(response.status(), 401, "without a proxy the fields are ignored");
    assert_eq!(
        (gateway.refused("signature-keyid"), gateway.intake.count()),
        (1, 0),
        "the signer's certificate is not that of the connection"
    );
    gateway.stop().await;
}

/// The proxy's connection outlives the rotation phases, and every change of roots applies at once, also to certificates
/// verified shortly before.
#[tokio::test]
async fn forwarded_certificates_are_verified_by_the_roots_of_the_rotation_phase() {
    let proxies = ca(unix_now());
    let mut rotating = Rotating::behind(&PROXY.parse().unwrap()).await;
    let gateway = TestGateway::with(Some(proxies.trust_bundle()), |settings, _| {
        settings.proxy = rotating.tls_state.proxy.clone()
    })
    .await;
    let proxy = Agent::new(&proxies, "proxy", unix_now());
    let behind = BehindProxy { gateway, proxies, proxy };
    let mut sender = behind.gateway.http2(&behind.proxy).await;
    let [old, new] = rotating.roots();
    let old = Agent::new(old, "r-1", unix_now());
    let new = Agent::new(new, "r-2", unix_now());
    for (counter, (phase, expected)) in (1..).zip([
        (None, [202, 401]),
        (Some(PhaseName::Spread), [202, 202]),
        (Some(PhaseName::Reissue), [202, 202]),
        (Some(PhaseName::Retire), [202, 202]),
        (Some(PhaseName::Steady), [401, 202]),
    ]) {
        phase.into_iter().for_each(|phase| rotating.enter(phase));
        let (old_status, _) = behind.send_over(&mut sender, &old, counter, &[(CLIENT_CERT, plain(&old))]).await;
        let (new_status, _) =
            behind.send_over(&mut sender, &new, counter, &[(FORWARDED_CLIENT_CERT, envoy(&new))]).await;
        assert_eq!([old_status, new_status], expected, "{phase:?}");
    }
    assert_eq!(behind.gateway.refused("certificate"), 2);
    drop(sender);
    behind.gateway.stop().await;
}
