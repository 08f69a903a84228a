//! The listeners: events and renewals over mTLS, contract v2, enrolment, admin, probes and metrics.

pub mod admin;
mod bearer;
pub mod enrolment;
pub mod gateway;
mod http;
pub mod probes;
mod source;

pub use self::http::{HttpServer, ListenError};
