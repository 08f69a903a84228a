//! The wire contract between Tidewatch's agent and receiver, and the reports of both. All sides parse and write messages
//! with this crate.
//!
//! | Modules | Content |
//! |---|---|
//! | [`event`], [`heartbeat`], [`exchange`], [`problem`] | contract v3: requests and responses |
//! | [`v2`] | contract v2, that of lifecycle-manager |
//! | [`enrolment`], [`certificate`], [`forwarded`], [`signature`] | certificates, and signatures of requests |
//! | [`admin`] | reports of the admin listeners, which the command line reads |
//! | [`digest`] | set digests, which detect lost events |
//!
//! # Design
//!
//! The crate performs no IO, spawns no tasks, and reads neither the environment nor the clock: callers pass bytes and
//! times.
//!
//! Parsers treat their input as untrusted: they bound its size or number of elements, and they return an error instead of
//! panicking.
//!
//! # Example
//!
//! An agent receives its plan and reports an object. Both sides maintain the digest of the watch independently; a
//! difference reveals a lost event.
//!
//! ```
//! use tidewatch_api::{identity::RuntimeId, plan::Plan};
//! use tidewatch_contract::{
//!     digest::{Digest, ObjectHasher},
//!     event::{Change, Payload, parse_batch},
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

pub mod admin;
pub mod certificate;
pub mod digest;
pub mod enrolment;
pub mod event;
pub mod exchange;
pub mod forwarded;
pub mod heartbeat;
pub mod problem;
pub mod signature;
pub mod v2;
