//! Seeds are what an agent reads.

use std::time::Duration;

use tidewatch_agent::{core::Core, link::Announced, reading::WatchReading, telemetry::Metrics};

use super::*;
use crate::fuzz::seeds;

#[test]
fn refusals_have_all_consequences() {
    let verdicts: Vec<_> = seeds("refusal").iter().map(|seed| judge(&answer(seed).unwrap(), seeds::NOW)).collect();
    let told = |seconds| Verdict::Told(Duration::from_secs(seconds));
    let announced = Announced { max_bytes: Some(10_000), max_events: Some(7) };
    let (clock, large) = (Verdict::Clock { offset: 300 }, Verdict::TooLarge(announced));
    assert_eq!(
        verdicts,
        [clock, Verdict::NewEpoch, Verdict::Certificate, large, told(7), told(300), Verdict::BackOff, Verdict::Split]
    );
}

#[test]
fn what_is_issued_is_an_identity() {
    let answer = CertificateAnswer::parse(&seeds("certificate_answer")[0]).unwrap();
    let made = identity(answer.clone()).ok().unwrap();
    assert_eq!((made.runtime.as_str(), made.trust_revision), ("r-1", answer.trust_revision));
    let trust = TrustAnswer::parse(&seeds("trust_answer")[0]).unwrap();
    assert_eq!(tls::certificates(trust.trust_bundle.as_bytes()).unwrap().len(), 1);
}

#[test]
fn watches_are_heard() {
    use Heard::{Refused, Relist, Taken};
    let heard = |number: usize| {
        let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default());
        let plan = r#"{"revision": "1", "watches": [{"name": "w", "version": "v1", "resource": "things", "field": "spec",
                       "manager": "m", "work": ["kyma"]}]}"#;
        let started = core.follow(&Plan::parse(plan).unwrap()).started.remove(0);
        let mut reading = WatchReading::new(started, "kyma-system", core.clone());
        let (mut listing, mut all) = (true, Vec::new());
        for line in seeds("watch")[number].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let heard = if listing { reading.page(line) } else { reading.line(line) };
            listing = if listing { reading.is_listing() } else { heard == Relist };
            all.push(heard);
        }
        (all, core.figures().objects)
    };
    assert_eq!(heard(0), (vec![Taken, Taken, Taken, Taken, Taken, Relist, Taken], 1));
    assert_eq!(heard(1), (vec![Taken, Taken, Taken, Refused, Taken, Taken, Relist], 3));
    assert_eq!(heard(2), (vec![Taken; 4], 3));
    assert_eq!(heard(3), (vec![Taken; 10], 9));
}

#[test]
fn settings_and_plans_are_taken() {
    let seeds = seeds("agent_config");
    let mut lines = seeds[1].split(|byte| *byte == b'\n');
    let mut config = ConfigReading::new("kyma-system");
    assert_eq!(config.page(lines.next().unwrap()), Heard::Taken);
    let mut next = || {
        assert_eq!(config.line(lines.next().unwrap()), Heard::Taken);
        let receiver = config.settings().map(|settings| settings.receiver.authority().to_owned());
        (config.plan().map(|plan| plan.revision().to_owned()), receiver, config.error())
    };
    let good = |revision: &str| (Some(revision.to_owned()), Some("kcp.test:8443".to_owned()));
    for (revision, error) in
        [("r", None), ("r", Some("receiver-url")), ("2", Some("ca.crt")), ("2", Some("there is no"))]
    {
        let (plan, receiver, said) = next();
        assert_eq!((plan, receiver), good(revision));
        assert!(error.is_none_or(|words| said.as_deref().is_some_and(|said| said.contains(words))), "{said:?}");
        assert_eq!(error.is_some(), said.is_some());
    }
}

#[test]
fn kinds_are_discovered() {
    let seeds = seeds("discovery");
    assert_eq!(reading::preferred_version(&seeds[0]).as_deref(), Some("v1beta2"));
    let served = reading::served(&seeds[1], "v1", "kymas").unwrap();
    assert!(served.kind == "Kyma" && served.has_status);
    assert_eq!(reading::served(&seeds[2], "v1", "kymas"), None, "that is no name");
}
