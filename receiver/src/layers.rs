//! The layers of this crate: a module imports modules of lower layers only.

use std::path::Path;

use tidewatch_kit::testing::upward_imports;

/// Modules, lowest layer first.
const LAYERS: &[&[&str]] = &[
    &["base", "layers"],
    &["telemetry"],
    // Listeners and reconcilers never import each other.
    &[
        "ingress",
        "controllers::evidence",
        "controllers::pending_removal",
        "controllers::module_secrets",
        "controllers::pull_secret",
        "controllers::requeues",
        "controllers::rings",
        "controllers::forward",
        "controllers::windows",
    ],
    &["controllers::watcher"],
    &["controllers::ca_rotation", "controllers::installer"],
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
