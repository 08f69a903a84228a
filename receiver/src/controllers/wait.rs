//! What a removal waits for before it is looked at again.

use std::time::Duration;

/// Until what an API server is deleting is looked for again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What the way out waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    /// Until it is looked for again.
    pub(crate) again_in: Duration,
    /// What holds it up, as one sentence that stays the same while the same things do.
    pub(crate) what: Option<String>,
}

impl Wait {
    /// For something that is said elsewhere.
    pub(crate) const fn of(again_in: Duration) -> Self {
        Self { again_in, what: None }
    }

    /// For objects of a runtime that are being deleted; `held` are those that are not gone at once, in words.
    pub(crate) fn for_these(held: &[String]) -> Self {
        let what = (!held.is_empty()).then(|| format!("waiting for {} to go in the runtime", held.join(", ")));
        Self { again_in: LOOK_AGAIN, what }
    }
}
