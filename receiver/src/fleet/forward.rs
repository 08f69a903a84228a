//! Events of other managers: a Watcher may name a manager and a service of its own, and what its watch tells is sent there in
//! contract v2, at least once, with the runtime's certificate.
//!
//! [`Outbox`] is pure and stands in the hub's lock: an event is recorded and put here in one step. It is keyed by runtime, watch and
//! object, so it is bounded by objects, and newest wins (v2 carries no state, so a later event of an object is the same event).
//! Of a `watch.changed` nothing is sent, because the agent tells each object of such a watch as well; one that says that it moved
//! objects which nobody can name is sent as an event without a name.
//! Each service has a lane of its own with its own backoff, so a dead one delays nobody else. [`run`] does the sending.
//!
//! A watch is settled up to what was accepted when everything that its mailbox held then has been taken by the manager. What finds no
//! room is not recorded as settled either: it is refused one by one as `unknown-watch`, so the agent keeps it and tries again with
//! backoff, and until the agent is known to have seen that refusal nothing of that epoch is settled. Memory stays bounded here, and
//! nothing is lost, whichever answer gets lost.
//!
//! A manager that refuses an event (4xx other than 408 and 429, or a redirect) may be one that is just rolled out, or it was its mesh that
//! spoke. The event is *parked*: tried again after about a second, then two, and after the third time every five minutes, unsettled all the
//! while; the others go on, and the Watcher's condition tells. Only what is refused for five minutes with a word about the event itself (400,
//! 413, 422) is given up, and counted. A service that has refused as many objects as can be parked counts as one that fails.
//! When a Watcher names another service, what was parked is tried there at once.

mod client;
mod lane;
mod mailbox;
mod metrics;
mod outbox;
mod route;

use std::time::Duration;

pub use client::Client;
pub use lane::Health;
pub use metrics::Metrics;
pub use outbox::Delivery;
pub use route::{InvalidTemplate, Routes, Service, Target, UrlTemplate};

pub(crate) use mailbox::Settled;
pub(crate) use outbox::{Limits, Outbox};

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The manager took it (2xx).
    Delivered,
    /// Whoever answers there refuses it, with this status: 4xx other than 408 and 429, or a redirect, which is never followed.
    Refused(u16),
    /// It may succeed later; the service may have said when.
    Failed(Option<Duration>),
}
