//! The receiver as seen from the agent: address, connections, responses, classification of refusals, and retry timers.

mod client;
mod refusal;
mod retry;

pub use client::{BufferedResponse, Dialer, Endpoint, ParseEndpointError};
pub(crate) use client::{RequestError, enrol, exchange};
pub(crate) use refusal::date;
pub use refusal::{RefusalAction, classify_refusal};
pub(crate) use retry::RetryTimer;

pub use crate::outbox::AnnouncedLimits;
