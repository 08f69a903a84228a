//! Pausing of runtimes: nothing is written to a paused runtime, and its events stay accepted and unsettled.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use k8s_openapi::api::core::v1::ConfigMap;
use tidewatch_api::facts::{KymaFacts, pauses_all};

/// Reason for which a runtime is paused; if several apply, the first of this list. The name is the reason of the
/// condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
pub enum PauseReason {
    /// The flag `--pause`.
    Flag,
    /// The key `pause` of the ConfigMap `tidewatch`.
    ConfigMap,
    /// The label `operator.kyma-project.io/tidewatch-pause` of the Kyma.
    Label,
}

impl PauseReason {
    /// The reason in words, for conditions and logs.
    pub const fn message(self) -> &'static str {
        match self {
            Self::Flag => "the receiver was started with --pause",
            Self::ConfigMap => "the ConfigMap tidewatch pauses all runtimes",
            Self::Label => "the label operator.kyma-project.io/tidewatch-pause pauses this runtime",
        }
    }
}

/// Pause switches: the flag, the ConfigMap and the Kymas' labels. Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Pause {
    flag: bool,
    map: Arc<AtomicBool>,
}

impl Pause {
    /// `flag` is `--pause`.
    pub fn new(flag: bool) -> Self {
        Self { flag, map: Arc::default() }
    }

    /// Reason for which a Kyma's runtime is paused, if any.
    pub fn of<'a>(&self, kyma: impl Into<KymaFacts<'a>>) -> Option<PauseReason> {
        self.of_all().or_else(|| kyma.into().is_paused().then_some(PauseReason::Label))
    }

    /// Reason for which all runtimes are paused, if any.
    pub fn of_all(&self) -> Option<PauseReason> {
        if self.flag {
            Some(PauseReason::Flag)
        } else {
            self.map.load(Ordering::Acquire).then_some(PauseReason::ConfigMap)
        }
    }

    /// Applies the current ConfigMap, `None` if it does not exist. Returns true if this ended a pause of all runtimes.
    pub fn set(&self, map: Option<&ConfigMap>) -> bool {
        let paused = pauses_all(map);
        let was = self.map.swap(paused, Ordering::AcqRel);
        if was != paused {
            tracing::info!(paused, "Pause of all runtimes changed");
        }
        was && !paused
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_api::{Kyma, names::label};

    use super::*;

    #[test]
    fn flag_configmap_and_label_pause() {
        let kyma = |labels| -> Kyma {
            serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
                "metadata": {"name": "k", "labels": labels}, "spec": {"channel": "regular"}}))
            .unwrap()
        };
        let map = |value: &str| -> ConfigMap { serde_json::from_value(json!({"data": {"pause": value}})).unwrap() };
        let plain = kyma(json!({}));
        let labelled = kyma(json!({label::PAUSE: "true"}));
        assert_eq!(Pause::new(true).of(&plain), Some(PauseReason::Flag));
        let pause = Pause::default();
        assert_eq!((pause.of(&plain), pause.of(&labelled)), (None, Some(PauseReason::Label)));
        assert!(!pause.clone().set(Some(&map("true"))));
        assert_eq!(pause.of(&plain), Some(PauseReason::ConfigMap));
        assert!(pause.set(Some(&map("false"))));
        assert!(!pause.set(None));
        assert_eq!(pause.of(&plain), None);
        pause.set(Some(&map("True")));
        assert!(pause.set(None), "a deleted ConfigMap pauses no runtime");
    }
}
