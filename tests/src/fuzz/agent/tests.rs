//! The seeds of an agent are accepted.

use std::time::Duration;

use tidewatch_agent::{core::Core, receiver::AnnouncedLimits, telemetry::Metrics, testing::WatchDecoder};

use super::*;
use crate::fuzz::seeds;

#[test]
fn refusals_cover_all_reactions() {
    let actions: Vec<_> =
        seeds("refusal").iter().map(|seed| classify_refusal(&response(seed).unwrap(), seeds::NOW)).collect();
    let retry_after = |seconds| RefusalAction::RetryAfter(Duration::from_secs(seconds));
    let announced = AnnouncedLimits { max_bytes: Some(10_000), max_events: Some(7) };
    let clock = RefusalAction::Clock { offset: 300 };
    let large = RefusalAction::TooLarge(announced);
    assert_eq!(
        actions,
        [
            clock,
            RefusalAction::NewEpoch,
            RefusalAction::Certificate,
            large,
            retry_after(7),
            retry_after(300),
            RefusalAction::BackOff,
            RefusalAction::Split
        ]
    );
}

#[test]
fn issued_certificates_become_identities() {
    let response = CertificateResponse::parse(&seeds("certificate_answer")[0]).unwrap();
    let made = identity(response.clone()).ok().unwrap();
    assert_eq!((made.runtime.as_str(), made.trust_revision), ("r-1", response.trust_revision));
    let trust = TrustResponse::parse(&seeds("trust_answer")[0]).unwrap();
    assert_eq!(tls::certificates(trust.trust_bundle.as_bytes()).unwrap().len(), 1);
}

#[test]
fn watch_lines_are_decoded() {
    use Decoded::{Accepted, Refused, Relist};
    let outcome = |number: usize| {
        let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default());
        let plan = r#"{"revision": "1", "watches": [{"name": "w", "version": "v1", "resource": "things", "field": "spec",
                       "manager": "m", "work": ["kyma"]}]}"#;
        let started = core.follow(&Plan::parse(plan).unwrap()).started.remove(0);
        let mut reading = WatchDecoder::new(started, "kyma-system", core.clone());
        let mut listing = true;
        let mut all = Vec::new();
        for line in seeds("watch")[number].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let outcome = if listing { reading.page(line) } else { reading.line(line) };
            listing = if listing { reading.is_listing() } else { outcome == Relist };
            all.push(outcome);
        }
        (all, core.figures().objects)
    };
    assert_eq!(outcome(0), (vec![Accepted, Accepted, Accepted, Accepted, Accepted, Relist, Accepted], 1));
    assert_eq!(outcome(1), (vec![Accepted, Accepted, Accepted, Refused, Accepted, Accepted, Relist], 3));
    assert_eq!(outcome(2), (vec![Accepted; 4], 3));
    assert_eq!(outcome(3), (vec![Accepted; 10], 9));
}

#[test]
fn settings_and_plans_are_accepted() {
    let seeds = seeds("agent_config");
    let mut lines = seeds[1].split(|byte| *byte == b'\n');
    let mut config = ConfigDecoder::new("kyma-system");
    assert_eq!(config.page(lines.next().unwrap()), Decoded::Accepted);
    let mut next = || {
        assert_eq!(config.line(lines.next().unwrap()), Decoded::Accepted);
        let receiver = config.settings().map(|settings| settings.receiver.authority().to_owned());
        (config.plan().map(|plan| plan.revision().to_owned()), receiver, config.error())
    };
    let good = |revision: &str| (Some(revision.to_owned()), Some("kcp.test:8443".to_owned()));
    for (revision, error) in
        [("r", None), ("r", Some("receiver-url")), ("2", Some("ca.crt")), ("2", Some("there is no"))]
    {
        let (plan, receiver, error_text) = next();
        assert_eq!((plan, receiver), good(revision));
        assert!(
            error.is_none_or(|words| error_text.as_deref().is_some_and(|error_text| error_text.contains(words))),
            "{error_text:?}"
        );
        assert_eq!(error.is_some(), error_text.is_some());
    }
}

#[test]
fn kinds_are_discovered() {
    let seeds = seeds("discovery");
    assert_eq!(testing::preferred_version(&seeds[0]).as_deref(), Some("v1beta2"));
    let served = testing::served(&seeds[1], "v1", "kymas").unwrap();
    assert!(served.kind == "Kyma" && served.has_status);
    assert_eq!(testing::served(&seeds[2], "v1", "kymas"), None, "that is no name");
}
