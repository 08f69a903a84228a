//! Settings that accompany the plan in the ConfigMap: addresses of the receiver, trust bundle and runtime ID. Pure.

use std::{collections::BTreeMap, fmt, ops::Deref, sync::Arc};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use thiserror::Error;
use tidewatch_api::{
    identity::{ParseIdentityError, RuntimeId},
    names::{ENROLMENT_URL_KEY, PLAN_KEY, RECEIVER_URL_KEY, RUNTIME_ID_KEY, TRUST_BUNDLE_KEY},
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
#[derive(Debug, Default)]
pub(crate) struct ConfigData(BTreeMap<String, String>);

impl Deref for ConfigData {
    type Target = BTreeMap<String, String>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<'de> Deserialize<'de> for ConfigData {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const KEYS: [&str; 5] = [PLAN_KEY, RECEIVER_URL_KEY, ENROLMENT_URL_KEY, RUNTIME_ID_KEY, TRUST_BUNDLE_KEY];
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = ConfigData;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a map of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<ConfigData, A::Error> {
                let mut data = ConfigData::default();
                while let Some(key) = entries.next_key::<String>()? {
                    if KEYS.contains(&&*key) {
                        data.0.insert(key, entries.next_value()?);
                    } else {
                        entries.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(data)
            }
        }
        deserializer.deserialize_map(Entries)
    }
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
    pub(crate) fn parse(data: Option<&BTreeMap<String, String>>) -> Result<Self, ParseSettingsError> {
        let value = |key| {
            let value = data.and_then(|data| data.get(key)).map(|value| value.trim());
            value.filter(|value| !value.is_empty()).ok_or(ParseSettingsError::Missing(key))
        };
        let endpoint = |key| value(key)?.parse().map_err(|error| ParseSettingsError::Endpoint(key, error));
        let bundle = value(TRUST_BUNDLE_KEY)?.as_bytes();
        if bundle.len() > BUNDLE_BYTES {
            return Err(ParseSettingsError::TooLarge);
        }
        tls::certificates(bundle).and_then(|roots| tls::roots(&roots)).map_err(ParseSettingsError::Bundle)?;
        Ok(Self {
            receiver: endpoint(RECEIVER_URL_KEY)?,
            enrolment: endpoint(ENROLMENT_URL_KEY)?,
            runtime: value(RUNTIME_ID_KEY)?.parse().map_err(ParseSettingsError::Runtime)?,
            bundle: bundle.to_vec(),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
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
        let data: ConfigData = serde_json::from_str(r#"{"a":"b","runtime-id":"r-1","c":{}}"#).unwrap();
        assert_eq!(*data, BTreeMap::from([(RUNTIME_ID_KEY.to_owned(), "r-1".to_owned())]));
    }

    #[test]
    fn settings_are_accepted_as_a_whole_or_refused() {
        let bundle = bundle();
        let good = || data("https://kcp:8443", "https://kcp:8444\n", "r-1", &bundle);
        let settings = Settings::parse(Some(&good())).unwrap();
        assert_eq!((settings.receiver.authority(), settings.enrolment.authority()), ("kcp:8443", "kcp:8444"));
        assert!(Settings::parse(None).is_err());
        for key in [RECEIVER_URL_KEY, ENROLMENT_URL_KEY, RUNTIME_ID_KEY, TRUST_BUNDLE_KEY] {
            let too_long = "x".repeat(BUNDLE_BYTES + 1);
            for bad in ["", " ", "http://kcp", "a/b", too_long.as_str()] {
                let mut data = good();
                data.insert(key.to_owned(), bad.to_owned());
                let error = Settings::parse(Some(&data)).unwrap_err().to_string();
                assert!(error.contains(key) && error.len() < 200, "{error}");
            }
            let mut data = good();
            data.remove(key);
            assert!(
                matches!(Settings::parse(Some(&data)), Err(ParseSettingsError::Missing(missing)) if missing == key)
            );
        }
    }
}
