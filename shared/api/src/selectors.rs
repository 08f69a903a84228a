//! Label selectors, in the query syntax of the API.

#[cfg(feature = "resources")]
use crate::facts::KymaFacts;
use crate::names::{AGENT_DEPLOYMENT, label};

/// The pods of the agent in a runtime.
pub fn agent_pods() -> String {
    format!("{}={AGENT_DEPLOYMENT}", label::APP)
}

/// The Kymas that a receiver manages, limited by `selector` (`--kyma-selector`): those that it has not handed back.
pub fn managed_kymas(selector: &str) -> String {
    let back = format!("{}!={}", label::HAND_BACK, label::HAND_BACK_DONE);
    match selector.trim() {
        "" => back,
        selector => format!("{selector},{back}"),
    }
}

/// Selection of the Kymas that a receiver manages: the label selector `--kyma-selector`. The default selects all of them.
#[cfg(feature = "resources")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KymaSelector(String);

#[cfg(feature = "resources")]
impl KymaSelector {
    /// Makes the selection of a label selector.
    pub fn new(selector: &str) -> Self {
        Self(selector.trim().to_owned())
    }

    /// Label selector of the Kymas that the receiver manages.
    pub fn query(&self) -> String {
        managed_kymas(&self.0)
    }

    /// Returns true if only some Kymas are selected, so that a read by name has to check the selector.
    pub const fn is_limited(&self) -> bool {
        !self.0.is_empty()
    }

    /// Returns true if the selector uses the label `skip-reconciliation`: then the label keeps lifecycle-manager away, and
    /// does not stop this receiver.
    pub fn selects_skipped(&self) -> bool {
        self.0.contains(label::SKIP_RECONCILIATION)
    }

    /// Returns true if the label `skip-reconciliation` stops the reconcile of a Kyma.
    pub fn skips<'a>(&self, kyma: impl Into<KymaFacts<'a>>) -> bool {
        kyma.into().is_skipped() && !self.selects_skipped()
    }

    /// Returns true if the receiver writes to the runtime of a Kyma: it is neither paused, nor skipped, nor handed back.
    pub fn reconciles<'a>(&self, kyma: impl Into<KymaFacts<'a>>, is_paused: bool) -> bool {
        let kyma = kyma.into();
        !is_paused && !kyma.is_hand_back_requested() && !self.skips(kyma)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kymas_that_were_handed_back_are_excluded() {
        let back = "operator.kyma-project.io/tidewatch-hand-back!=done";
        assert_eq!(managed_kymas(" "), back);
        assert_eq!(managed_kymas("a=b,c"), format!("a=b,c,{back}"));
    }

    #[cfg(feature = "resources")]
    #[test]
    fn selector_shows_whether_skipped_kymas_are_selected() {
        assert!(KymaSelector::new("operator.kyma-project.io/skip-reconciliation=true").selects_skipped());
        assert!(!KymaSelector::new("a=b").selects_skipped());
    }
}
