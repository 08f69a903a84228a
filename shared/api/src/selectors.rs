//! Label selectors, in the query syntax of the API.

use crate::names::{AGENT_DEPLOYMENT, label};

/// The pods of the agent in a runtime.
#[must_use]
pub fn agent_pods() -> String {
    format!("{}={AGENT_DEPLOYMENT}", label::APP)
}

/// The Kymas that a receiver manages, limited by `selector` (`--kyma-selector`): those that it has not handed back.
#[must_use]
pub fn managed_kymas(selector: &str) -> String {
    let back = format!("{}!={}", label::HAND_BACK, label::HAND_BACK_DONE);
    match selector.trim() {
        "" => back,
        selector => format!("{selector},{back}"),
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
}
