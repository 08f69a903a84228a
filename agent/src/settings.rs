//! What the ConfigMap says beside the plan: where the receiver is, what makes it trustworthy, and which runtime this is. Pure.

use std::collections::BTreeMap;

use thiserror::Error;
use tidewatch_shared::{
    identity::{ParseIdentity, RuntimeId},
    names::{ENROLMENT_URL_KEY, RECEIVER_URL_KEY, RUNTIME_ID_KEY, TRUST_BUNDLE_KEY},
    tls::{self, TlsConfig},
};

use crate::link::{Endpoint, ParseEndpoint};

/// Bytes of a trust bundle, at most: some dozens of roots. A rotation needs three.
const BUNDLE_BYTES: usize = 64 << 10;

/// Settings that hold, taken whole or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where events and heartbeats go.
    pub receiver: Endpoint,
    /// Where a certificate is asked for with a token.
    pub enrolment: Endpoint,
    /// Which runtime this is.
    pub runtime: RuntimeId,
    /// Roots of the receiver's certificates, in PEM.
    pub bundle: Vec<u8>,
}

/// Why settings are refused. The values are not echoed: the words stand in heartbeats.
#[derive(Debug, Error)]
pub(crate) enum ParseSettings {
    #[error("the ConfigMap has no {0}")]
    Missing(&'static str),
    #[error("{0}: {1}")]
    Endpoint(&'static str, ParseEndpoint),
    #[error("{RUNTIME_ID_KEY}: {0}")]
    Runtime(ParseIdentity),
    #[error("{TRUST_BUNDLE_KEY}: {0}")]
    Bundle(TlsConfig),
    #[error("{TRUST_BUNDLE_KEY} has more than {BUNDLE_BYTES} bytes")]
    TooLarge,
}

impl Settings {
    /// Reads the data of the ConfigMap.
    pub(crate) fn parse(data: Option<&BTreeMap<String, String>>) -> Result<Self, ParseSettings> {
        let value = |key| {
            let value = data.and_then(|data| data.get(key)).map(|value| value.trim());
            value.filter(|value| !value.is_empty()).ok_or(ParseSettings::Missing(key))
        };
        let endpoint = |key| value(key)?.parse().map_err(|error| ParseSettings::Endpoint(key, error));
        let bundle = value(TRUST_BUNDLE_KEY)?.as_bytes();
        if bundle.len() > BUNDLE_BYTES {
            return Err(ParseSettings::TooLarge);
        }
        tls::certificates(bundle).and_then(|roots| tls::roots(&roots)).map_err(ParseSettings::Bundle)?;
        Ok(Self {
            receiver: endpoint(RECEIVER_URL_KEY)?,
            enrolment: endpoint(ENROLMENT_URL_KEY)?,
            runtime: value(RUNTIME_ID_KEY)?.parse().map_err(ParseSettings::Runtime)?,
            bundle: bundle.to_vec(),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::identity::tests::TestCa;

    /// The data of a ConfigMap that holds, but for the plan.
    pub(crate) fn data(receiver: &str, enrolment: &str, runtime: &str, bundle: &str) -> BTreeMap<String, String> {
        [
            (RECEIVER_URL_KEY, receiver),
            (ENROLMENT_URL_KEY, enrolment),
            (RUNTIME_ID_KEY, runtime),
            (TRUST_BUNDLE_KEY, bundle),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
    }

    #[test]
    fn settings_are_taken_whole_or_not_at_all() {
        let bundle = TestCa::new().pem();
        let good = || data("https://kcp:8443", "https://kcp:8444\n", "r-1", &bundle);
        let settings = Settings::parse(Some(&good())).unwrap();
        assert_eq!((settings.receiver.authority(), settings.enrolment.authority()), ("kcp:8443", "kcp:8444"));
        assert!(Settings::parse(None).is_err());
        for key in [RECEIVER_URL_KEY, ENROLMENT_URL_KEY, RUNTIME_ID_KEY, TRUST_BUNDLE_KEY] {
            let too_long = "x".repeat(BUNDLE_BYTES + 1);
            for bad in ["", " ", "http://kcp", "a/b", too_long.as_str()] {
                let mut data = good();
                data.insert(key.to_owned(), bad.to_owned());
                let said = Settings::parse(Some(&data)).unwrap_err().to_string();
                assert!(said.contains(key) && said.len() < 200, "{said}");
            }
            let mut data = good();
            data.remove(key);
            assert!(matches!(Settings::parse(Some(&data)), Err(ParseSettings::Missing(missing)) if missing == key));
        }
    }
}
