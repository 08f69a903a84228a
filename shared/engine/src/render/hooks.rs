//! Hooks of Helm among the objects of a version. `helm template` writes them like other objects.

use serde_json::Value;

/// Annotation with the hooks of an object, separated by commas.
const ANNOTATION: &str = "helm.sh/hook";
/// Hooks of which Helm runs the objects at the end of a release, or on demand. Installed with the others they would do their work
/// at once.
const LEFT_OUT: [&str; 7] =
    ["pre-delete", "post-delete", "pre-rollback", "post-rollback", "test", "test-success", "test-failure"];

/// Use of an object with a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hook {
    /// It is never installed.
    LeftOut,
    /// It is installed like other objects, in no order of its own.
    Ordinary,
}

/// The hook of an object; `None` if it has none.
pub(crate) fn hook_of(object: &Value) -> Option<Hook> {
    let hooks = object["metadata"]["annotations"][ANNOTATION].as_str()?;
    let mut hooks = hooks.split(',').map(str::trim).filter(|hook| !hook.is_empty()).peekable();
    hooks.peek()?;
    Some(if hooks.all(|hook| LEFT_OUT.contains(&hook)) { Hook::LeftOut } else { Hook::Ordinary })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_objects_of_hooks_at_the_end_are_left_out() {
        for (hooks, expected) in [
            ("pre-delete", Some(Hook::LeftOut)),
            ("post-delete, pre-rollback", Some(Hook::LeftOut)),
            ("test-success", Some(Hook::LeftOut)),
            ("pre-install,pre-upgrade", Some(Hook::Ordinary)),
            ("post-install,pre-delete", Some(Hook::Ordinary)),
            ("crd-install", Some(Hook::Ordinary)),
            (" ,", None),
        ] {
            let object = json!({"metadata": {"annotations": {ANNOTATION: hooks}}});
            assert_eq!(hook_of(&object), expected, "{hooks}");
        }
        assert_eq!(hook_of(&json!({"metadata": {"annotations": null}})), None);
    }
}
