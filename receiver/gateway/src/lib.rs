//! How agents, replicas and operators speak to the receiver.
//!
//! | Modules | Content |
//! |---|---|
//! | [`ports`] | event port, port of contract v2, enrolment port: one connection layer, one sequence of steps for every request |
//! | [`relay`] | passes a request to the replica that holds its runtime; asks all replicas about the fleet |
//! | [`enrolment`] | which runtime gets a certificate, and which one loses it |
//! | [`admin`], [`probes`] | small servers for operators, kubelets and Prometheus |

pub mod admin;
mod bearer;
pub mod enrolment;
mod http;
pub mod ports;
pub mod probes;
pub mod relay;
mod source;

pub use self::http::{HttpServer, ListenError};
