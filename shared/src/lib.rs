//! The shared vocabulary of Tidewatch's agent and receiver.
//!
//! Tidewatch is the event system and lifecycle core of Kyma. It replaces lifecycle-manager (KLM) and runtime-watcher, its
//! agent. An *agent* in each *runtime* (a Kyma runtime cluster, SKR) watches the objects of a [plan] and reports changes to
//! the *receiver* in the control plane (KCP). This crate contains everything that both sides must agree on:
//!
//! | Modules | Content |
//! |---|---|
//! | [`names`], [`identity`], `api` | names of objects, labels and annotations; ids of runtimes and processes; the custom resources |
//! | [`plan`], [`event`], [`heartbeat`], [`exchange`], [`problem`] | contract v3: requests and responses |
//! | [`v2`] | contract v2, that of lifecycle-manager |
//! | [`enrolment`], [`certificate`], [`forwarded`], [`tls`], [`signature`] | certificates, TLS, and signatures of requests |
//! | [`digest`], [`hex`] | set digests, which detect lost events |
//! | [`trace`], `metrics`, [`table`] | traces, metrics, and the output of the command lines |
//! | [`addresses`], [`random`], [`error_levels`] | networks of permitted hosts, jitter, errors in log lines |
//! | [`variant`], [`json`] | names of enum variants, and JSON in its stored form |
//!
//! # Design
//!
//! The crate performs no IO, spawns no tasks, and reads neither the environment nor the clock: callers pass bytes and
//! times. The exceptions are the exporter of [`trace`] with the feature `otlp`, and the features `roots` and `testing`.
//!
//! Parsers of contract messages treat their input as untrusted: they bound its size or number of elements, and they
//! return an error instead of panicking.
//!
//! # Features
//!
//! * `api`: the custom resources (module `api`). The agent does without.
//! * `metrics`: the metric registry and the macro `metric_set!` (module `metrics`).
//! * `otlp`: exports spans over OTLP (gRPC); without it, [`trace`] does nothing.
//! * `roots`: reads the root certificates of the system (module `system_roots`).
//! * `testing`: test support for the other crates.
//!
//! # Example
//!
//! An agent receives its plan and reports an object. Both sides maintain the digest of the watch independently; a
//! difference reveals a lost event.
//!
//! ```
//! use tidewatch_shared::{
//!     digest::{Digest, ObjectHasher},
//!     event::{Change, Payload, parse_batch},
//!     identity::RuntimeId,
//!     plan::Plan,
//! };
//!
//! let plan = Plan::parse(
//!     r#"{"revision": "1", "watches": [{
//!         "name": "kyma", "group": "operator.kyma-project.io", "version": "v1beta2", "resource": "kymas",
//!         "field": "spec", "manager": "lifecycle-manager", "work": ["kyma"]
//!     }]}"#,
//! )?;
//! assert_eq!(plan.watches()[0].resource, "kymas");
//!
//! let runtime: RuntimeId = "0a1b2c3d".parse()?;
//! let hash = ObjectHasher::new(&runtime).hash(&[b"kyma-system/default", b"42"]);
//! let agent = Digest::ZERO + hash;
//!
//! let batch = format!(
//!     r#"[{{
//!         "specversion": "1.0", "type": "io.kyma-project.tidewatch.object.changed.v1",
//!         "source": "/runtimes/{runtime}", "subject": "operator.kyma-project.io/v1beta2/kymas/kyma-system/default",
//!         "id": "00000000000000ab-1", "sequence": "1",
//!         "data": {{"watch": "kyma", "manager": "lifecycle-manager", "kind": "Kyma", "uid": "u",
//!                   "resourceVersion": "42", "generation": 3, "change": "created", "delta": "{hash}"}}
//!     }}]"#
//! );
//! let event = parse_batch(batch.as_bytes())?.remove(0).expect("the event is well-formed");
//! assert!(matches!(event.payload, Payload::Object(object) if object.change == Change::Created));
//! let receiver = Digest::ZERO + event.delta;
//! assert_eq!(agent, receiver);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod addresses;
#[cfg(feature = "api")]
pub mod api;
pub mod certificate;
pub mod digest;
pub mod enrolment;
pub mod error_levels;
pub mod event;
pub mod exchange;
pub mod forwarded;
pub mod heartbeat;
pub mod hex;
pub mod identity;
pub mod json;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod names;
pub mod plan;
pub mod problem;
pub mod random;
pub mod signature;
#[cfg(feature = "roots")]
pub mod system_roots;
pub mod table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tls;
pub mod trace;
pub mod v2;
pub mod variant;
