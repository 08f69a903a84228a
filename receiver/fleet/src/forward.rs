//! Forwarding of events to other managers: a Watcher may name a manager and a service of its own; events of its watch
//! are delivered there in contract v2, at least once, with the runtime's certificate.
//!
//! [`Outbox`] is pure and lives under the runtime table's lock, so that an event is recorded and put here in one step.
//! It is keyed by runtime, watch and object, hence bounded by objects, and the newest event wins (v2 carries no state,
//! so a later event of an object is the same event). A `watch.changed` is not delivered, because the agent also sends
//! each object of such a watch; a `watch.changed` for objects that cannot be named is delivered as an event without a
//! name. Each service has a lane with its own backoff, so a dead service delays no other.
//!
//! A watch is settled up to the accepted sequence once the manager has taken everything that its queue held at that
//! point. An event that finds no room is not recorded as settled either: it is refused individually as `unknown-watch`,
//! so that the agent keeps it and retries with backoff. Until the agent is known to have seen that refusal, nothing of
//! that epoch is settled. Memory stays bounded here and no event is lost, whichever response is lost.
//!
//! A manager that refuses an event (4xx other than 408 and 429, or a redirect) may be in the middle of a rollout, or
//! its mesh may have answered. The event is *parked*: retried after up to one second, then two, and from the third
//! refusal on every five minutes. It stays unsettled meanwhile, other events continue, and the Watcher's condition
//! reports it. Only an event refused throughout five minutes with a status about the event itself (400, 413, 422) is
//! given up and counted. A service that has refused as many objects as can be parked is treated as failing. When a
//! Watcher names another service, parked events are retried there at once.

mod client;
mod lane;
mod metrics;
mod outbox;
mod route;
mod shares;
mod watch_queue;

use std::time::Duration;

pub use client::Client;
pub use lane::Health;
pub use metrics::Metrics;
pub use outbox::Delivery;
pub use route::{ParseTemplateError, Routes, Service, Target, UrlTemplate};

pub(crate) use lane::QueueKey;
pub(crate) use outbox::{Limits, Outbox};
pub(crate) use watch_queue::Settlement;

/// Result of one delivery attempt. The name is the value of the label `result`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum DeliveryOutcome {
    /// The manager took the event (2xx).
    Delivered,
    /// The service refused it with this status: 4xx other than 408 and 429, or a redirect, which is never followed.
    Refused(u16),
    /// The attempt failed and may succeed later; carries the `Retry-After` of the response, if any.
    Failed(Option<Duration>),
}
