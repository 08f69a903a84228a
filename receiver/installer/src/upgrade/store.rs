//! ConfigMap in KCP with the state of the upgrade.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use tidewatch_api::names::annotation;
use tidewatch_kit::log_error;

use super::UpgradeState;

/// Name of the ConfigMap in the receiver's namespace.
pub const CONFIG_MAP: &str = "tidewatch-agent-upgrade";

/// ConfigMap as last read.
#[derive(Clone, Debug)]
pub(super) enum Stored {
    /// It does not exist.
    Absent,
    /// It contains a valid state. `confirmed` is the image that an operator confirmed for all runtimes in spite of failures.
    Valid { state: UpgradeState, confirmed: Option<String> },
    /// It contains an invalid state, and is never overwritten.
    Invalid,
}

impl Stored {
    /// Reads the ConfigMap of a receiver that is configured with this image.
    pub(super) fn of(map: Option<&ConfigMap>, image: &str) -> Self {
        let Some(map) = map else { return Self::Absent };
        match UpgradeState::from_data(map.data.as_ref().unwrap_or(&BTreeMap::new())) {
            Ok(mut state) => {
                if state.restrict_to_repository_of(image) {
                    tracing::warn!(
                        image,
                        "ConfigMap {CONFIG_MAP} names an image of another repository than --agent-image, which is ignored"
                    );
                }
                let annotations = map.metadata.annotations.as_ref();
                let confirmed = annotations.and_then(|all| all.get(annotation::CONFIRM_AGENT_IMAGE)).cloned();
                Self::Valid { state, confirmed }
            }
            Err(error) => {
                log_error!(
                    error,
                    &error,
                    "ConfigMap {CONFIG_MAP} is invalid, agents keep their images until it is corrected or deleted"
                );
                Self::Invalid
            }
        }
    }

    /// Returns whether an operator confirmed this image.
    pub(super) fn confirms(&self, target: &str) -> bool {
        matches!(self, Self::Valid { confirmed: Some(image), .. } if image == target)
    }
}
