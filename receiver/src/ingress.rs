//! The listeners: events and renewals over mTLS, contract v2, enrolment, relayed requests, admin, probes and metrics.

pub mod admin;
mod bearer;
pub mod enrolment;
pub mod gateway;
mod http;
pub mod probes;
pub mod relay;
mod source;

pub use self::http::{HttpServer, ListenError};
