//! Which traces of events wait for a pass over a Kyma. Empty in builds that export none.

use std::collections::HashMap;

use crate::key::KymaKey;

/// Traces that one pass continues or links to.
const OF_ONE: usize = 16;
/// Kymas with traces.
const KYMAS: usize = 10_000;

/// The `traceparent`s of what was received, by Kyma.
#[derive(Debug, Default)]
pub(super) struct Traces(HashMap<KymaKey, Vec<String>>);

impl Traces {
    /// One more, if there is room.
    pub(super) fn add(&mut self, key: &KymaKey, traceparent: String) {
        if self.0.len() < KYMAS || self.0.contains_key(key) {
            let traces = self.0.entry(key.clone()).or_default();
            if traces.len() < OF_ONE {
                traces.push(traceparent);
            }
        }
    }

    /// Those that the pass which begins now is caused by.
    pub(super) fn take(&mut self, key: &KymaKey) -> Vec<String> {
        self.0.remove(key).unwrap_or_default()
    }

    /// Nobody will work on this Kyma any more.
    pub(super) fn forget(&mut self, key: &KymaKey) {
        self.0.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_taken_once_and_have_bounds() {
        let (mut traces, key) = (Traces::default(), KymaKey::new("n", "k"));
        (0..=OF_ONE).for_each(|trace| traces.add(&key, trace.to_string()));
        assert_eq!((traces.take(&key).len(), traces.take(&key)), (OF_ONE, vec![]));
        (0..=KYMAS).for_each(|kyma| traces.add(&KymaKey::new("n", kyma.to_string()), String::new()));
        assert_eq!(traces.0.len(), KYMAS);
    }
}
