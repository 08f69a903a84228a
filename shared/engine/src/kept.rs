//! Objects that stay because somebody has marked them, and how a message names an object that a version drops. Pure.

use kube::ResourceExt;
use tidewatch_api::names::annotation;

/// Returns true if the author of the module, or a user, wants an object to stay.
pub(super) fn is_marked(object: &impl ResourceExt) -> bool {
    let has = |key: &str, value: &str| object.annotations().get(key).is_some_and(|is| is == value);
    has(annotation::KEEP, "true") || has(annotation::HELM_RESOURCE_POLICY, annotation::HELM_KEEP)
}

/// Begin of the sentence about an object that a version does not contain and that stays, given with its kind and name.
pub(super) fn dropped(object: &str) -> String {
    format!("{object} is not part of this version any more")
}
