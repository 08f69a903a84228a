//! Backoff of watches of many objects.

use std::time::Duration;

use kube::runtime::{utils::Backoff, watcher::DefaultBackoff};

/// Backoff of a watcher with the delays of kube's default one. Only two minutes without an error reset it: each list begins
/// with an event that is no error, so that a list which breaks again and again would be requested at once, in full.
#[derive(Default)]
pub struct WatchBackoff(DefaultBackoff);

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next()
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {}
}
