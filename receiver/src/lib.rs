//! The receiver: verifies the agents' events and reconciles the Kymas of their runtime clusters.
//!
//! Layers, lowest first; a layer imports only from those before it, and `ingress` and `controllers` never from each
//! other:
//!
//! | layer | responsibility |
//! |---|---|
//! | [`base`] | keys, pause, take-over, caches, limits, small maps; no IO |
//! | [`telemetry`] | logs, metrics, readiness |
//! | [`kube`] | watches of the control plane, leader election, write fence, Event recorder, clients of runtime clusters |
//! | [`pki`] | certificate authority, issuers, TLS of the receiver |
//! | [`fleet`] | runtime table and work queue under one lock |
//! | [`ingress`] | listeners: events, contract v2, enrolment, admin, probes |
//! | [`controllers`] | reconcilers: Kyma, catalog, agent installation, Watchers, event path, CA rotation, forwarding |
//! | [`app`] | wiring, configuration |

pub mod app;
pub mod base;
pub mod config;
pub mod controllers;
pub mod fleet;
pub mod ingress;
pub mod kube;
#[cfg(test)]
mod layers;
pub mod pki;
pub mod rights;
pub mod telemetry;
#[cfg(test)]
mod testing;
