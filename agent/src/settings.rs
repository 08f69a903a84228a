//! Settings that accompany the plan in the ConfigMap: addresses of the receiver, trust bundle and runtime ID. Pure.

use std::sync::Arc;

use serde::Deserialize;
use thiserror::Error;
use tidewatch_api::{
    identity::{ParseIdentityError, RuntimeId},
    names::{ENROLMENT_URL_KEY, RECEIVER_URL_KEY, RUNTIME_ID_KEY, TRUST_BUNDLE_KEY},
};
use tidewatch_kit::tls::{self, TlsConfigError};
use tokio::sync::watch;

use crate::receiver::{Endpoint, ParseEndpointError};

/// Limit of a trust bundle in bytes, enough for dozens of roots. A rotation needs three.
const BUNDLE_BYTES: usize = 64 << 10;

/// Valid settings, accepted as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Endpoint for events and heartbeats.
    pub receiver: Endpoint,
    /// Endpoint for certificate requests with a token.
    pub enrolment: Endpoint,
    /// ID of this runtime.
    pub runtime: RuntimeId,
    /// Roots of the receiver's certificates, in PEM.
    pub bundle: Vec<u8>,
}

/// The current settings; `None` before the first valid ones.
pub(crate) type CurrentSettings = watch::Receiver<Option<Arc<Settings>>>;

/// Data of the ConfigMap, without unknown keys: a ConfigMap may have them by the hundred thousand.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ConfigData {
    /// [`PLAN_KEY`](tidewatch_api::names::PLAN_KEY).
    #[serde(rename = "plan.json")]
    pub(crate) plan: Option<String>,
    receiver_url: Option<String>,
    enrolment_url: Option<String>,
    runtime_id: Option<String>,
    #[serde(rename = "ca.crt")]
    trust_bundle: Option<String>,
}

/// Errors of settings. They and their sources do not echo values, because the text is part of heartbeats.
#[derive(Debug, Error)]
pub(crate) enum ParseSettingsError {
    #[error("the ConfigMap has no {0}")]
    Missing(&'static str),
    #[error("{0} is not valid")]
    Endpoint(&'static str, #[source] ParseEndpointError),
    #[error("{RUNTIME_ID_KEY} is not valid")]
    Runtime(#[source] ParseIdentityError),
    #[error("{TRUST_BUNDLE_KEY} is not valid")]
    Bundle(#[source] TlsConfigError),
    #[error("{TRUST_BUNDLE_KEY} exceeds {BUNDLE_BYTES} bytes")]
    TooLarge,
}

impl Settings {
    /// Parses the data of the ConfigMap.
    pub(crate) fn parse(data: &ConfigData) -> Result<Self, ParseSettingsError> {
        let ConfigData { receiver_url, enrolment_url, runtime_id, trust_bundle, .. } = data;
        let bundle = present(TRUST_BUNDLE_KEY, trust_bundle)?.as_bytes();
        if bundle.len() > BUNDLE_BYTES {
            return Err(ParseSettingsError::TooLarge);
        }
        tls::certificates(bundle).and_then(|roots| tls::roots(&roots)).map_err(ParseSettingsError::Bundle)?;
        Ok(Self {
            receiver: endpoint(RECEIVER_URL_KEY, receiver_url)?,
            enrolment: endpoint(ENROLMENT_URL_KEY, enrolment_url)?,
            runtime: present(RUNTIME_ID_KEY, runtime_id)?.parse().map_err(ParseSettingsError::Runtime)?,
            bundle: bundle.to_vec(),
        })
    }
}

fn present<'a>(key: &'static str, value: &'a Option<String>) -> Result<&'a str, ParseSettingsError> {
    let value = value.as_deref().map(str::trim);
    value.filter(|value| !value.is_empty()).ok_or(ParseSettingsError::Missing(key))
}

fn endpoint(key: &'static str, value: &Option<String>) -> Result<Endpoint, ParseSettingsError> {
    present(key, value)?.parse().map_err(|error| ParseSettingsError::Endpoint(key, error))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use tidewatch_api::names::PLAN_KEY;

    use super::*;

    /// A trust bundle with one root.
    pub(crate) fn bundle() -> String {
        rcgen::generate_simple_self_signed(Vec::new()).unwrap().cert.pem()
    }

    /// Data of a valid ConfigMap, except for the plan.
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
    fn only_known_keys_of_the_configmap_are_kept() {
        let data = json!({"a": "b", RUNTIME_ID_KEY: "r-1", PLAN_KEY: "{}", "c": {}});
        let data: ConfigData = serde_json::from_value(data).unwrap();
        assert_eq!(
            (data.runtime_id.as_deref(), data.plan.as_deref(), data.receiver_url),
            (Some("r-1"), Some("{}"), None)
        );
    }

    #[test]
    fn settings_are_accepted_as_a_whole_or_refused() {
        let bundle = bundle();
        let good = || data("https://kcp:8443", "https://kcp:8444\n", "r-1", &bundle);
        let parse = |data: BTreeMap<String, String>| {
            let data: ConfigData = serde_json::from_value(json!(data)).unwrap();
            Settings::parse(&data)
        };
        let settings = parse(good()).unwrap();
        assert_eq!((settings.receiver.authority(), settings.enrolment.authority()), ("kcp:8443", "kcp:8444"));
        assert!(Settings::parse(&ConfigData::default()).is_err());
        for key in [RECEIVER_URL_KEY, ENROLMENT_URL_KEY, RUNTIME_ID_KEY, TRUST_BUNDLE_KEY] {
            let too_long = "x".repeat(BUNDLE_BYTES + 1);
            for bad in ["", " ", "http://kcp", "a/b", too_long.as_str()] {
                let mut data = good();
                data.insert(key.to_owned(), bad.to_owned());
                let error = parse(data).unwrap_err().to_string();
                assert!(error.contains(key) && error.len() < 200, "{error}");
            }
            let mut data = good();
            data.remove(key);
            assert!(matches!(parse(data), Err(ParseSettingsError::Missing(missing)) if missing == key));
        }
    }
}
