//! The layers of this crate: a module imports modules of lower layers only.

use std::path::Path;

use tidewatch_kit::testing::upward_imports;

/// Top-level modules, lowest layer first.
const LAYERS: &[&[&str]] = &[
    // Clock, random numbers, estimates of memory, logs and counters.
    &["clock", "random", "memory", "layers"],
    &["backoff", "telemetry", "connection"],
    // The API server's client, and the state of one watch.
    &["kubernetes", "index"],
    &["outbox"],
    // All watches and the outbox under one lock; requests to the receiver.
    &["core", "receiver"],
    &["settings"],
    // List and watch loops, and the objects that they watch.
    &["watch"],
    &["plan", "canary"],
    &["identity"],
    // The conversation with the receiver.
    &["link"],
    &["server"],
    &["config", "testing"],
    &["command"],
    &["app"],
];

#[test]
fn modules_import_lower_layers_only() {
    let found = upward_imports(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), LAYERS);
    assert!(found.is_empty(), "these imports do not point to a lower layer:\n{}", found.join("\n"));
}
