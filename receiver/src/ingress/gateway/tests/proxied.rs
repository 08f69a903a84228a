//! Behind a proxy that ends TLS, over real TLS: who may connect, and what the proxy must tell.

use base64::{Engine, engine::general_purpose::STANDARD};
use http::HeaderName;
use tidewatch_shared::{
    certificate::to_pem,
    forwarded::{CLIENT_CERT, FORWARDED_CLIENT_CERT},
};

use super::*;
use crate::pki::{PhaseName, Proxy, ProxyIdentity, testing::Rotating};

/// What the proxy's certificate names.
const PROXY: &str = "spiffe://kyma.local/runtime/proxy";

/// A gateway behind a proxy. The proxy's certificate is one of a CA of its own, and so is the name in it.
struct Behind {
    bed: Bed,
    proxies: Ca,
    proxy: Agent,
}

impl Behind {
    async fn start() -> Self {
        let proxies = ca(unix_now());
        let bed = Bed::behind(&proxies).await;
        let proxy = Agent::new(&proxies, "proxy", unix_now());
        Self { bed, proxies, proxy }
    }

    /// Sends a request of an agent as the proxy, with these fields in addition.
    async fn say(&self, agent: &Agent, counter: u64, fields: &[(&'static str, String)]) -> (u16, Value) {
        let mut sender = self.bed.http2(&self.proxy).await;
        self.say_over(&mut sender, agent, counter, fields).await
    }

    async fn say_over(
        &self,
        sender: &mut http2::SendRequest<Full<Bytes>>,
        agent: &Agent,
        counter: u64,
        fields: &[(&'static str, String)],
    ) -> (u16, Value) {
        let mut request = self.bed.request(agent, counter, true);
        for (name, value) in fields {
            request.headers_mut().append(HeaderName::from_static(name), value.parse().unwrap());
        }
        let (status, told) = problem(sender.send_request(request).await.unwrap()).await;
        (status.as_u16(), told)
    }
}

impl Bed {
    async fn behind(proxies: &Ca) -> Self {
        let identity: ProxyIdentity = PROXY.parse().unwrap();
        Self::with(Some(proxies.trust_bundle()), |settings, ca| {
            let clients = ca.trust_bundle().store().unwrap();
            settings.proxy = Some(Proxy::new(identity, clients).unwrap());
        })
        .await
    }
}

/// Each gets what costs it and us the least.
#[tokio::test]
async fn of_both_protocols_a_proxy_gets_http2_and_an_agent_http1() {
    let (behind, bed) = (Behind::start().await, Bed::start(|_| {}).await);
    for (bed, identity, protocol) in
        [(&behind.bed, &behind.proxy.identity, &b"h2"[..]), (&bed, &bed.agent("r-1").identity, b"http/1.1")]
    {
        for turned in [false, true] {
            let mut config = bed.client(identity);
            config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
            if turned {
                config.alpn_protocols.reverse();
            }
            assert_eq!(bed.connect(config).await.unwrap().get_ref().1.alpn_protocol(), Some(protocol));
        }
    }
    behind.bed.stop().await;
    bed.stop().await;
}

/// A proxy may speak HTTP/1.1 all the same, and adds fields of its own.
#[tokio::test]
async fn over_http1_a_proxy_may_send_many_fields() {
    let behind = Behind::start().await;
    let one = behind.bed.agent("r-1");
    let mut sender = behind.bed.open(&behind.proxy, false).await;
    let mut request = behind.bed.request(&one, 1, false);
    let fields = request.headers_mut();
    fields.insert(HeaderName::from_static(CLIENT_CERT), plain(&one).parse().unwrap());
    for number in 0..80 {
        fields.insert(HeaderName::try_from(format!("x-{number}")).unwrap(), "added".parse().unwrap());
    }
    assert_eq!(sender.send(request).await.unwrap().status(), StatusCode::ACCEPTED);
    drop(sender);
    behind.bed.stop().await;
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
async fn either_field_tells_who_speaks_and_many_share_the_connection() {
    let behind = Behind::start().await;
    let (one, two) = (behind.bed.agent("r-1"), behind.bed.agent("r-2"));
    let mut sender = behind.bed.http2(&behind.proxy).await;
    for (agent, counter, field) in [
        (&one, 1, (CLIENT_CERT, plain(&one))),
        (&two, 1, (FORWARDED_CLIENT_CERT, envoy(&two))),
        (&one, 2, (FORWARDED_CLIENT_CERT, envoy(&one))),
    ] {
        assert_eq!(behind.say_over(&mut sender, agent, counter, &[field]).await.0, 202);
    }
    let replayed = behind.say_over(&mut sender, &one, 2, &[(CLIENT_CERT, plain(&one))]).await;
    assert_eq!(replayed.0, 401);
    let stolen = behind.say_over(&mut sender, &one, 3, &[(CLIENT_CERT, plain(&two))]).await;
    assert_eq!(stolen.0, 401, "whoever has no key of the certificate speaks for nobody");
    let fine = behind.say_over(&mut sender, &two, 2, &[(CLIENT_CERT, plain(&two))]).await;
    assert_eq!(fine.0, 202, "the connection outlives refusals");
    let said: Vec<_> = behind.bed.intake.said.lock().unwrap().iter().map(|(runtime, _)| runtime.clone()).collect();
    assert_eq!(said, ["r-1", "r-2", "r-1", "r-2"]);
    drop(sender);
    behind.bed.stop().await;
}

#[tokio::test]
async fn anything_but_one_certificate_in_one_field_is_refused() {
    let behind = Behind::start().await;
    let (one, now) = (behind.bed.agent("r-1"), unix_now());
    let (plain_one, envoy_one) = (plain(&one), envoy(&one));
    let stranger = Agent::new(&ca(now), "r-1", now);
    let runtime: RuntimeId = "r-1".parse().unwrap();
    let old = behind.bed.ca.make_runtime(&runtime, &domain(), now - 500, Duration::from_secs(60)).unwrap();
    let old = Agent::with(old.identity().unwrap(), runtime.clone());
    let foreign = behind.bed.ca.make_runtime(&runtime, &"other".parse().unwrap(), now, RUNTIME_VALIDITY).unwrap();
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
        ("another CA", &stranger, vec![(CLIENT_CERT, plain(&stranger))], 401, "certificate"),
        ("expired", &old, vec![(CLIENT_CERT, plain(&old))], 401, "certificate"),
        ("another domain", &foreign, vec![(CLIENT_CERT, plain(&foreign))], 403, "identity"),
    ]) {
        let before = behind.bed.refused(reason);
        let (told, _) = behind.say(agent, counter, &fields).await;
        assert_eq!((told, behind.bed.refused(reason)), (status, before + 1), "{case}");
    }
    assert_eq!(behind.bed.intake.count(), 0);
    behind.bed.stop().await;
}

#[tokio::test]
async fn nobody_but_the_proxy_may_connect() {
    let behind = Behind::start().await;
    let one = behind.bed.agent("r-1");
    assert!(behind.bed.is_refused(behind.bed.client(&one.identity)).await, "a runtime itself");
    let failed = behind.bed.metrics.handshakes_failed.get_or_create(&metrics::Why { reason: "unknown-issuer" }).get();
    assert_eq!(failed, 1, "nobody has heard of its CA there");
    let another = Agent::new(&behind.proxies, "another", unix_now());
    let mut sender = behind.bed.http2(&another).await;
    let (status, told) = behind.say_over(&mut sender, &one, 1, &[(CLIENT_CERT, plain(&one))]).await;
    assert_eq!((status, &told["status"]), (401, &401.into()), "somebody else of the proxy's CA");
    assert_eq!((behind.bed.refused("proxy"), behind.bed.intake.count()), (1, 0));
    behind.bed.stop().await;

    let bed = Bed::start(|_| {}).await;
    let (one, two) = (bed.agent("r-1"), bed.agent("r-2"));
    let mut request = bed.request(&two, 1, true);
    request.headers_mut().insert(HeaderName::from_static(CLIENT_CERT), plain(&two).parse().unwrap());
    let answer = bed.http2(&one).await.send_request(request).await.unwrap();
    assert_eq!(answer.status(), 401, "where there is no proxy, the fields say nothing");
    assert_eq!((bed.refused("signature-keyid"), bed.intake.count()), (1, 0), "who signs is not who has connected");
    bed.stop().await;
}

/// The proxy's connection outlives the phases; whom it speaks for is judged by the roots of the phase at once, also whoever was heard
/// a moment before.
#[tokio::test]
async fn whoever_the_proxy_tells_of_is_trusted_as_the_rotation_of_the_ca_says() {
    let proxies = ca(unix_now());
    let mut rotating = Rotating::behind(&PROXY.parse().unwrap()).await;
    let bed = Bed::with(Some(proxies.trust_bundle()), |settings, _| settings.proxy = rotating.standing.proxy()).await;
    let proxy = Agent::new(&proxies, "proxy", unix_now());
    let behind = Behind { bed, proxies, proxy };
    let mut sender = behind.bed.http2(&behind.proxy).await;
    let [old, new] = rotating.roots();
    let (old, new) = (Agent::new(old, "r-1", unix_now()), Agent::new(new, "r-2", unix_now()));
    for (counter, (phase, expected)) in (1..).zip([
        (None, [202, 401]),
        (Some(PhaseName::Spread), [202, 202]),
        (Some(PhaseName::Reissue), [202, 202]),
        (Some(PhaseName::Retire), [202, 202]),
        (Some(PhaseName::Steady), [401, 202]),
    ]) {
        phase.into_iter().for_each(|phase| rotating.enter(phase));
        let (old_told, _) = behind.say_over(&mut sender, &old, counter, &[(CLIENT_CERT, plain(&old))]).await;
        let (new_told, _) = behind.say_over(&mut sender, &new, counter, &[(FORWARDED_CLIENT_CERT, envoy(&new))]).await;
        assert_eq!([old_told, new_told], expected, "{phase:?}");
    }
    assert_eq!(behind.bed.refused("certificate"), 2);
    drop(sender);
    behind.bed.stop().await;
}
