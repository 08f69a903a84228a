//! Content of the CA's Secret: the roots with their keys, and the phase of the rotation. Read completely or not at all.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use k8s_openapi::ByteString;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tidewatch_contract::{admin::rotation::PhaseName, certificate::KeyId};
use tidewatch_kit::tls::TlsConfigError;

use super::{Ca, PkiError, Trust, TrustBundle};

/// Common name in the certificate of a root.
const ROOT_NAME: &str = "Tidewatch CA";
/// The issuing root of the phase; in [`Phase::Reissue`] the root that still signs the server's certificate.
const ROOT: Pair = Pair { certificate: "ca.crt", key: "ca.key" };
/// The root that takes over.
const NEXT: Pair = Pair { certificate: "next.crt", key: "next.key" };
/// Roots that no longer issue; leaves of them may still be valid.
const OLD: &str = "old.crt";
/// Phase of the rotation.
const STATE: &str = "state.json";
/// The only supported version of [`STATE`].
const VERSION: u32 = 1;

struct Pair {
    certificate: &'static str,
    key: &'static str,
}

/// Reason for which the Secret's content is rejected.
#[derive(Debug, Error)]
pub enum CaStateError {
    /// The Secret lacks a key that the phase needs.
    #[error("the key {0} is missing")]
    Missing(&'static str),
    /// The state is not readable.
    #[error("{STATE} is not readable")]
    State(#[source] serde_json::Error),
    /// Written with an unknown version.
    #[error("{STATE} has the unknown version {0}")]
    Version(u32),
    /// The expiry of the old leaves is missing.
    #[error("{STATE} lacks the expiry of the last old leaf")]
    LeavesEnd,
    /// A root is unusable.
    #[error("{0} is not usable")]
    Root(&'static str, #[source] PkiError),
    /// A root without subject key identifier, by which leaves are matched to their root.
    #[error("{0} has no subject key identifier")]
    KeyId(&'static str),
    /// The old roots are unusable.
    #[error("{OLD} is not usable")]
    Old(#[source] TlsConfigError),
    /// Two roots of the phase are the same.
    #[error("two of its roots are the same")]
    Same,
}

impl CaStateError {
    /// Reason label of metrics, of a closed set.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Missing(_) => "missing",
            Self::State(_) | Self::Version(_) | Self::LeavesEnd => "state",
            Self::Root(..) | Self::KeyId(_) | Self::Old(_) | Self::Same => "root",
        }
    }
}

/// A CA with the id of its key.
#[derive(Clone)]
pub struct Root {
    /// Certificate and key.
    pub ca: Arc<Ca>,
    /// Id of its key, which its leaves name.
    pub id: KeyId,
}

impl Root {
    /// Generates a root that is valid from `now`, in Unix seconds.
    pub fn generate(validity: Duration, now: i64) -> Result<Self, PkiError> {
        Self::new(Ca::generate(ROOT_NAME, now, validity)?).ok_or(PkiError::NotCa)
    }

    /// A root of this CA; `None` if its certificate has no subject key identifier.
    pub fn new(ca: Ca) -> Option<Self> {
        let id = ca.key_id()?.clone();
        Some(Self { ca: Arc::new(ca), id })
    }

    fn read(data: &BTreeMap<String, ByteString>, pair: &Pair) -> Result<Self, CaStateError> {
        let bytes = |name| data.get(name).map(|bytes| &*bytes.0).ok_or(CaStateError::Missing(name));
        let ca = Ca::from_pem(bytes(pair.certificate)?, bytes(pair.key)?);
        let ca = ca.map_err(|error| CaStateError::Root(pair.certificate, error))?;
        Self::new(ca).ok_or(CaStateError::KeyId(pair.certificate))
    }

    fn write(&self, data: &mut BTreeMap<String, ByteString>, pair: &Pair) {
        let mut put = |name: &str, text: String| data.insert(name.to_owned(), ByteString(text.into_bytes()));
        put(pair.certificate, self.ca.certificate_pem().to_owned());
        put(pair.key, self.ca.key_pem());
    }
}

/// Phase of a rotation. Each phase determines the signing roots and the trusted roots, so no other state is needed.
#[derive(Clone)]
pub enum Phase {
    /// No rotation: one root.
    Steady,
    /// Both roots are trusted everywhere; the old one signs. Agents confirm that they have the new one.
    Spread {
        /// The new root.
        next: Root,
    },
    /// The new root signs the agents' leaves, the old one still the server's. Agents renew.
    Reissue {
        /// The new root.
        next: Root,
        /// End of the last leaf of the old root, in Unix seconds.
        leaves_end: i64,
    },
    /// The new root signs everything. The old ones have left the agents' bundles, and leave this receiver's once their
    /// leaves have expired or are replaced.
    Retire {
        /// The roots that leave.
        old: TrustBundle,
        /// End of their last leaf, in Unix seconds.
        leaves_end: i64,
    },
}

/// Content of the Secret.
#[derive(Clone)]
pub struct CaState {
    /// Root that signs this receiver's own leaf, and the agents' leaves except in [`Phase::Reissue`].
    pub root: Root,
    /// Phase of the rotation.
    pub phase: Phase,
    /// Begin of the phase, in Unix seconds.
    pub since: i64,
    /// Seconds in one phase after which the rotation proceeds without the stragglers; `None` waits for all.
    pub force_after: Option<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    version: u32,
    phase: PhaseName,
    since: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    force_after_seconds: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    leaves_end: Option<i64>,
}

impl CaState {
    /// State of one root without rotation.
    pub const fn steady(root: Root, now: i64) -> Self {
        Self { root, phase: Phase::Steady, since: now, force_after: None }
    }

    /// Reads and validates the complete content. The validity period of the roots is not checked here.
    pub fn read(data: &BTreeMap<String, ByteString>) -> Result<Self, CaStateError> {
        let state = data.get(STATE).ok_or(CaStateError::Missing(STATE))?;
        let state: Document = serde_json::from_slice(&state.0).map_err(CaStateError::State)?;
        if state.version != VERSION {
            return Err(CaStateError::Version(state.version));
        }
        let root = Root::read(data, &ROOT)?;
        let next = || {
            let next = Root::read(data, &NEXT)?;
            if next.id == root.id { Err(CaStateError::Same) } else { Ok(next) }
        };
        let leaves_end = || state.leaves_end.ok_or(CaStateError::LeavesEnd);
        let phase = match state.phase {
            PhaseName::Steady => Phase::Steady,
            PhaseName::Spread => Phase::Spread { next: next()? },
            PhaseName::Reissue => Phase::Reissue { next: next()?, leaves_end: leaves_end()? },
            PhaseName::Retire => {
                let old = data.get(OLD).ok_or(CaStateError::Missing(OLD))?;
                let old = TrustBundle::from_pem(&old.0).map_err(CaStateError::Old)?;
                if old.roots().contains(root.ca.certificate()) {
                    return Err(CaStateError::Same);
                }
                Phase::Retire { old, leaves_end: leaves_end()? }
            }
        };
        Ok(Self { root, phase, since: state.since, force_after: state.force_after_seconds })
    }

    /// Serializes it as the Secret's data.
    pub fn write(&self) -> BTreeMap<String, ByteString> {
        let mut data = BTreeMap::new();
        let mut leaves_end = None;
        self.root.write(&mut data, &ROOT);
        match &self.phase {
            Phase::Steady => {}
            Phase::Spread { next } => next.write(&mut data, &NEXT),
            Phase::Reissue { next, leaves_end: end } => {
                next.write(&mut data, &NEXT);
                leaves_end = Some(*end);
            }
            Phase::Retire { old, leaves_end: end } => {
                data.insert(OLD.to_owned(), ByteString(old.to_pem().into_bytes()));
                leaves_end = Some(*end);
            }
        }
        let since = self.since;
        let force_after_seconds = self.force_after;
        let state = Document { version: VERSION, phase: self.name(), since, force_after_seconds, leaves_end };
        let state = serde_json::to_vec(&state).expect("numbers and names have a JSON form");
        data.insert(STATE.to_owned(), ByteString(state));
        data
    }

    /// Name of the phase.
    pub const fn name(&self) -> PhaseName {
        match self.phase {
            Phase::Steady => PhaseName::Steady,
            Phase::Spread { .. } => PhaseName::Spread,
            Phase::Reissue { .. } => PhaseName::Reissue,
            Phase::Retire { .. } => PhaseName::Retire,
        }
    }

    /// Returns true while a rotation is in progress.
    pub const fn is_rotating(&self) -> bool {
        !matches!(self.phase, Phase::Steady)
    }

    /// Root that signs the agents' leaves.
    pub const fn issuing(&self) -> &Root {
        match &self.phase {
            Phase::Reissue { next, .. } => next,
            Phase::Steady | Phase::Spread { .. } | Phase::Retire { .. } => &self.root,
        }
    }

    /// Root that the rotation leads to; without rotation the only one.
    pub const fn target(&self) -> &Root {
        match &self.phase {
            Phase::Spread { next } | Phase::Reissue { next, .. } => next,
            Phase::Steady | Phase::Retire { .. } => &self.root,
        }
    }

    /// Roots that agents and this receiver trust in this phase.
    pub fn trust(&self) -> Trust {
        let own = self.root.ca.trust_bundle();
        let (agents, clients) = match &self.phase {
            Phase::Steady => (own.clone(), own),
            Phase::Spread { next } | Phase::Reissue { next, .. } => {
                let both = own.with(&next.ca.trust_bundle());
                (both.clone(), both)
            }
            Phase::Retire { old, .. } => (own.clone(), own.with(old)),
        };
        Trust { agents, clients, issuer: Some(self.issuing().id.clone()) }
    }

    /// True when the target root has expired: no certificate of any of the roots is valid any more.
    pub fn has_expired(&self, now: i64) -> bool {
        self.target().ca.not_after() <= now
    }
}

/// Leaves the keys out.
impl fmt::Debug for CaState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { since, force_after, .. } = self;
        f.debug_struct("CaState")
            .field("phase", &self.name())
            .field("since", since)
            .field("force_after", force_after)
            .field("target", &self.target().id)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::phases;

    #[test]
    fn every_phase_round_trips() {
        for state in phases() {
            let read = CaState::read(&state.write()).unwrap();
            assert_eq!(read.write(), state.write());
            assert_eq!((read.name(), read.trust(), read.since), (state.name(), state.trust(), state.since));
            assert_eq!((&read.issuing().id, &read.root.id), (&state.issuing().id, &state.root.id));
        }
    }

    #[test]
    fn each_phase_determines_signing_and_trusted_roots() {
        let phases = phases();
        let [old, new] = [&phases[0], &phases[3]].map(|state| state.target().clone());
        let [only_old, only_new] = [&old, &new].map(|root| root.ca.trust_bundle());
        let both = only_old.with(&only_new);
        let expected = [
            (&old, &old, &only_old, &only_old),
            (&old, &old, &both, &both),
            (&new, &old, &both, &both),
            (&new, &new, &only_new, &both),
        ];
        for (state, (issuing, serving, agents, clients)) in phases.iter().zip(expected) {
            let trust = state.trust();
            assert_eq!((&state.issuing().id, &state.root.id), (&issuing.id, &serving.id), "{state:?}");
            assert_eq!((&trust.agents, &trust.clients, trust.issuer.as_ref()), (agents, clients, Some(&issuing.id)));
            // In every phase, agents trust the serving root and this receiver trusts the issuing root.
            assert!(trust.agents.roots().contains(state.root.ca.certificate()));
            assert!(trust.clients.roots().contains(state.issuing().ca.certificate()));
        }
    }

    #[test]
    fn incomplete_content_is_refused_and_debug_hides_keys() {
        for state in phases() {
            let good = state.write();
            for name in good.keys() {
                let mut data = good.clone();
                data.remove(name);
                assert!(matches!(CaState::read(&data), Err(CaStateError::Missing(key)) if key == name), "{name}");
                data.insert(name.clone(), ByteString(b"garbage".to_vec()));
                assert!(CaState::read(&data).is_err(), "{name}");
            }
            let debug = format!("{state:?}");
            assert!(!debug.contains("PRIVATE") && !debug.contains("BEGIN"), "{debug}");
        }
        let spread = phases()[1].write();
        let changed = |from: &str, to: &str| {
            let mut data = spread.clone();
            let value = data[from].clone();
            data.insert(to.to_owned(), value);
            CaState::read(&data)
        };
        assert!(matches!(changed("ca.key", "next.key"), Err(CaStateError::Root("next.crt", PkiError::KeyMismatch))));
        let mut same = spread.clone();
        for (from, to) in [("ca.crt", "next.crt"), ("ca.key", "next.key")] {
            same.insert(to.to_owned(), spread[from].clone());
        }
        assert!(matches!(CaState::read(&same), Err(CaStateError::Same)));
        for (state, is_expected) in [
            (
                r#"{"version":2,"phase":"steady","since":1}"#,
                (|error| matches!(error, CaStateError::Version(2))) as fn(_) -> _,
            ),
            (r#"{"version":1,"phase":"reissue","since":1}"#, |error| matches!(error, CaStateError::LeavesEnd)),
            (r#"{"version":1,"phase":"later","since":1}"#, |error| matches!(error, CaStateError::State(_))),
        ] {
            let mut data = spread.clone();
            data.insert(STATE.to_owned(), ByteString(state.as_bytes().to_vec()));
            assert!(is_expected(CaState::read(&data).unwrap_err()), "{state}");
        }
    }
}
