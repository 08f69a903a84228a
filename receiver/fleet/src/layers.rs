//! The layers of this crate: a module imports modules of lower layers only.

use std::path::Path;

use tidewatch_kit::testing::upward_imports;

/// Modules, lowest layer first.
const LAYERS: &[&[&str]] = &[
    // The control plane.
    &["layers", "peers", "plans", "stores"],
    &["evidence", "pause", "recorder"],
    &["shards", "staged", "takeover", "watch"],
    // The runtimes.
    &["compare", "due", "forward", "queue", "sequences", "shares", "tenure", "verified"],
    &["plan_index"],
    &["ledger", "path"],
    &["runtime"],
    &["report"],
    &["table"],
    &["manifest_queue"],
    &["services"],
];

#[test]
fn modules_import_lower_layers_only() {
    let found = upward_imports(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), LAYERS);
    assert!(found.is_empty(), "these imports do not point to a lower layer:\n{}", found.join("\n"));
}
