//! Values of labels.

use std::collections::BTreeMap;

/// Returns true if a label is `true` in any letter case.
#[must_use]
pub fn is_true(labels: Option<&BTreeMap<String, String>>, key: &str) -> bool {
    labels.and_then(|labels| labels.get(key)).is_some_and(|value| value.eq_ignore_ascii_case("true"))
}
