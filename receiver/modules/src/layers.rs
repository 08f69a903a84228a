//! The layers of this crate: a module imports modules of lower layers only.

use std::path::Path;

use tidewatch_kit::testing::upward_imports;

/// Modules, lowest layer first.
const LAYERS: &[&[&str]] = &[
    &["layers"],
    &["module_secrets", "requeues", "forward", "windows"],
    &["ca_rotation"],
    &["catalog"],
    &["mandatory", "manifest"],
    &["kyma"],
    &["event_path", "module_rollout"],
];

#[test]
fn modules_import_lower_layers_only() {
    let found = upward_imports(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), LAYERS);
    assert!(found.is_empty(), "these imports do not point to a lower layer:\n{}", found.join("\n"));
}
