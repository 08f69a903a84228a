//! The layers of this crate: a module imports modules of lower layers only.

use std::path::Path;

use tidewatch_kit::testing::{modules_with, upward_imports};

/// Modules, lowest layer first.
const LAYERS: &[&[&str]] = &[
    &["layers"],
    &["telemetry"],
    &["controllers::module_secrets", "controllers::requeues", "controllers::forward", "controllers::windows"],
    &["controllers::ca_rotation"],
    &["controllers::status"],
    &["controllers::catalog"],
    &["controllers::mandatory", "controllers::manifest"],
    &["controllers::kyma"],
    &["controllers::event_path", "controllers::module_rollout"],
    &["config", "rights"],
    &["app"],
];

#[test]
fn modules_import_lower_layers_only() {
    let found = upward_imports(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), LAYERS);
    assert!(found.is_empty(), "these imports do not point to a lower layer:\n{}", found.join("\n"));
}

#[test]
fn no_reconciler_imports_the_gateway() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    assert!(!modules_with(&source, "tidewatch_gateway").is_empty(), "the wiring imports it");
    assert_eq!(modules_with(&source.join("controllers"), "tidewatch_gateway"), Vec::<String>::new());
}
