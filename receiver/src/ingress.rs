//! The listeners: events and renewals over mTLS, contract v2, enrolment, admin, probes and metrics.

pub mod admin;
mod bearer;
pub mod enrolment;
pub mod gateway;
pub mod probes;
