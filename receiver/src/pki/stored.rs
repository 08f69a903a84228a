//! What stands in the CA's Secret: the roots with their keys, and how far a rotation is. Read whole or not at all.

use std::{collections::BTreeMap, fmt, sync::Arc};

use k8s_openapi::ByteString;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tidewatch_shared::{certificate::KeyId, tls::TlsConfigError};

use super::{Ca, Pki, Trust, TrustBundle};

/// The root of the phase: the issuing one, and in [`Phase::Reissue`] the one that still signs the server's certificate.
const ROOT: Pair = Pair { certificate: "ca.crt", key: "ca.key" };
/// The root that takes over.
const NEXT: Pair = Pair { certificate: "next.crt", key: "next.key" };
/// Roots that issue no more and on which leaves may still hang.
const OLD: &str = "old.crt";
/// How far the rotation is.
const STATE: &str = "state.json";
/// The only version of [`STATE`].
const VERSION: u32 = 1;

struct Pair {
    certificate: &'static str,
    key: &'static str,
}

/// Why the Secret's content is refused.
#[derive(Debug, Error)]
pub enum ReadStored {
    /// A key that the phase needs is missing.
    #[error("the key {0} is missing")]
    Missing(&'static str),
    /// The state is not readable.
    #[error("{STATE} is not readable")]
    State(#[source] serde_json::Error),
    /// Written by a version that is not known here.
    #[error("{STATE} has the version {0}, which is not known")]
    Version(u32),
    /// The phase's end of old leaves is missing.
    #[error("{STATE} does not say when the last old leaf ends")]
    LeavesEnd,
    /// A root cannot be used.
    #[error("{0} is not usable")]
    Root(&'static str, #[source] Pki),
    /// A root that has no subject key identifier: nobody could tell whose leaf is whose.
    #[error("{0} has no subject key identifier")]
    KeyId(&'static str),
    /// The old roots cannot be used.
    #[error("{OLD} is not usable")]
    Old(#[source] TlsConfigError),
    /// Two roots of the phase are the same.
    #[error("two of its roots are the same")]
    Same,
}

impl ReadStored {
    /// The reason as metrics name it: one of a closed set.
    pub(crate) const fn as_str(&self) -> &'static str {
        match self {
            Self::Missing(_) => "missing",
            Self::State(_) | Self::Version(_) | Self::LeavesEnd => "state",
            Self::Root(..) | Self::KeyId(_) | Self::Old(_) | Self::Same => "root",
        }
    }
}

/// A CA with the id of its key.
#[derive(Clone)]
pub(crate) struct Root {
    pub(crate) ca: Arc<Ca>,
    pub(crate) id: KeyId,
}

impl Root {
    pub(crate) fn new(ca: Ca) -> Option<Self> {
        let id = ca.key_id()?.clone();
        Some(Self { ca: Arc::new(ca), id })
    }

    fn bundle(&self) -> TrustBundle {
        self.ca.trust_bundle()
    }

    fn read(data: &BTreeMap<String, ByteString>, pair: &Pair) -> Result<Self, ReadStored> {
        let bytes = |name| data.get(name).map(|bytes| &*bytes.0).ok_or(ReadStored::Missing(name));
        let ca = Ca::from_pem(bytes(pair.certificate)?, bytes(pair.key)?);
        let ca = ca.map_err(|why| ReadStored::Root(pair.certificate, why))?;
        Self::new(ca).ok_or(ReadStored::KeyId(pair.certificate))
    }

    fn write(&self, data: &mut BTreeMap<String, ByteString>, pair: &Pair) {
        let mut put = |name: &str, text: String| data.insert(name.to_owned(), ByteString(text.into_bytes()));
        put(pair.certificate, self.ca.certificate_pem().to_owned());
        put(pair.key, self.ca.key_pem());
    }
}

/// How far a rotation is. Each phase says who signs what and who is trusted, so nothing else has to be remembered.
#[derive(Clone)]
pub(crate) enum Phase {
    /// No rotation: one root.
    Steady { root: Root },
    /// Both are trusted everywhere; the old one signs. Agents confirm that they have the new one.
    Spread { root: Root, next: Root },
    /// The new one signs the agents' leaves, the old one still the server's. Agents renew.
    Reissue { root: Root, next: Root, leaves_end: i64 },
    /// The new one signs everything. The old ones have left the agents' bundles, and leave this receiver's when nothing hangs on them.
    Retire { root: Root, old: TrustBundle, leaves_end: i64 },
}

/// The name of a [`Phase`] in the Secret, in metrics and in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PhaseName {
    /// No rotation.
    Steady,
    /// The new root goes to everybody, and agents confirm it.
    Spread,
    /// The new root signs new certificates, and agents renew.
    Reissue,
    /// The old root leaves: first the agents' bundles, then this receiver's.
    Retire,
}

impl PhaseName {
    /// All of them, in their order.
    pub const ALL: [Self; 4] = [Self::Steady, Self::Spread, Self::Reissue, Self::Retire];

    /// As metrics and people read it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::Spread => "spread",
            Self::Reissue => "reissue",
            Self::Retire => "retire",
        }
    }
}

impl fmt::Display for PhaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The content of the Secret.
#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) phase: Phase,
    /// When the phase began, in Unix seconds.
    pub(crate) since: i64,
    /// After so many seconds in one phase a rotation goes on without those who did not follow; `None` waits.
    pub(crate) force_after: Option<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct State {
    version: u32,
    phase: PhaseName,
    since: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    force_after_seconds: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    leaves_end: Option<i64>,
}

impl Stored {
    /// A root, and no rotation.
    pub(crate) const fn steady(root: Root, now: i64) -> Self {
        Self { phase: Phase::Steady { root }, since: now, force_after: None }
    }

    /// Reads and checks all of it. Whether roots hold now is not asked here.
    pub(crate) fn read(data: &BTreeMap<String, ByteString>) -> Result<Self, ReadStored> {
        let state = data.get(STATE).ok_or(ReadStored::Missing(STATE))?;
        let state: State = serde_json::from_slice(&state.0).map_err(ReadStored::State)?;
        if state.version != VERSION {
            return Err(ReadStored::Version(state.version));
        }
        let root = Root::read(data, &ROOT)?;
        let next = || {
            let next = Root::read(data, &NEXT)?;
            if next.id == root.id { Err(ReadStored::Same) } else { Ok(next) }
        };
        let leaves_end = || state.leaves_end.ok_or(ReadStored::LeavesEnd);
        let phase = match state.phase {
            PhaseName::Steady => Phase::Steady { root },
            PhaseName::Spread => Phase::Spread { next: next()?, root },
            PhaseName::Reissue => Phase::Reissue { next: next()?, leaves_end: leaves_end()?, root },
            PhaseName::Retire => {
                let old = data.get(OLD).ok_or(ReadStored::Missing(OLD))?;
                let old = TrustBundle::from_pem(&old.0).map_err(ReadStored::Old)?;
                if old.roots().contains(root.ca.certificate()) {
                    return Err(ReadStored::Same);
                }
                Phase::Retire { old, leaves_end: leaves_end()?, root }
            }
        };
        Ok(Self { phase, since: state.since, force_after: state.force_after_seconds })
    }

    /// As the Secret's data.
    pub(crate) fn write(&self) -> BTreeMap<String, ByteString> {
        let mut data = BTreeMap::new();
        let mut end = None;
        match &self.phase {
            Phase::Steady { root } => root.write(&mut data, &ROOT),
            Phase::Spread { root, next } => {
                root.write(&mut data, &ROOT);
                next.write(&mut data, &NEXT);
            }
            Phase::Reissue { root, next, leaves_end } => {
                root.write(&mut data, &ROOT);
                next.write(&mut data, &NEXT);
                end = Some(*leaves_end);
            }
            Phase::Retire { root, old, leaves_end } => {
                root.write(&mut data, &ROOT);
                data.insert(OLD.to_owned(), ByteString(old.to_pem().into_bytes()));
                end = Some(*leaves_end);
            }
        }
        let Self { since, force_after, .. } = *self;
        let state =
            State { version: VERSION, phase: self.name(), since, force_after_seconds: force_after, leaves_end: end };
        let state = serde_json::to_vec(&state).expect("numbers and names have a JSON form");
        data.insert(STATE.to_owned(), ByteString(state));
        data
    }

    pub(crate) const fn name(&self) -> PhaseName {
        match self.phase {
            Phase::Steady { .. } => PhaseName::Steady,
            Phase::Spread { .. } => PhaseName::Spread,
            Phase::Reissue { .. } => PhaseName::Reissue,
            Phase::Retire { .. } => PhaseName::Retire,
        }
    }

    pub(crate) const fn is_rotating(&self) -> bool {
        !matches!(self.phase, Phase::Steady { .. })
    }

    /// Who signs the agents' leaves.
    pub(crate) const fn issuing(&self) -> &Root {
        match &self.phase {
            Phase::Steady { root } | Phase::Spread { root, .. } | Phase::Retire { root, .. } => root,
            Phase::Reissue { next, .. } => next,
        }
    }

    /// Who signs this receiver's own leaf.
    pub(crate) const fn serving(&self) -> &Root {
        let (Phase::Steady { root }
        | Phase::Spread { root, .. }
        | Phase::Reissue { root, .. }
        | Phase::Retire { root, .. }) = &self.phase;
        root
    }

    /// The root that a rotation leads to, or the one that there is.
    pub(crate) const fn target(&self) -> &Root {
        match &self.phase {
            Phase::Steady { root } | Phase::Retire { root, .. } => root,
            Phase::Spread { next, .. } | Phase::Reissue { next, .. } => next,
        }
    }

    /// Who is trusted by whom.
    pub(crate) fn trust(&self) -> Trust {
        let (agents, clients) = match &self.phase {
            Phase::Steady { root } => (root.bundle(), root.bundle()),
            Phase::Spread { root, next } | Phase::Reissue { root, next, .. } => {
                let both = root.bundle().with(&next.bundle());
                (both.clone(), both)
            }
            Phase::Retire { root, old, .. } => (root.bundle(), root.bundle().with(old)),
        };
        Trust { agents, clients, issuer: Some(self.issuing().id.clone()) }
    }

    /// Nothing that it signs or signed can hold any more.
    pub(crate) fn has_ended(&self, now: i64) -> bool {
        self.target().ca.not_after() <= now
    }
}

/// Keys are never shown.
impl fmt::Debug for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { since, force_after, .. } = self;
        f.debug_struct("Stored")
            .field("phase", &self.name())
            .field("since", since)
            .field("force_after", force_after)
            .field("target", &self.target().id)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;

    pub(crate) const NOW: i64 = 1_800_000_000;

    pub(crate) fn root(name: &str) -> Root {
        Root::new(Ca::generate(name, NOW, Duration::from_secs(1_000_000)).unwrap()).unwrap()
    }

    /// One content in each phase, of the same two roots.
    pub(crate) fn phases() -> [Stored; 4] {
        let (old, new) = (root("old"), root("new"));
        let leaves_end = NOW + 86_400;
        [
            Phase::Steady { root: old.clone() },
            Phase::Spread { root: old.clone(), next: new.clone() },
            Phase::Reissue { root: old.clone(), next: new.clone(), leaves_end },
            Phase::Retire { root: new, old: old.ca.trust_bundle(), leaves_end },
        ]
        .map(|phase| Stored { phase, since: NOW, force_after: Some(60) })
    }

    #[test]
    fn every_phase_survives_being_written_and_read() {
        for stored in phases() {
            let read = Stored::read(&stored.write()).unwrap();
            assert_eq!(read.write(), stored.write());
            assert_eq!((read.name(), read.trust(), read.since), (stored.name(), stored.trust(), stored.since));
            assert_eq!((&read.issuing().id, &read.serving().id), (&stored.issuing().id, &stored.serving().id));
        }
    }

    #[test]
    fn each_phase_says_who_signs_and_who_is_trusted() {
        let phases = phases();
        let [old, new] = [&phases[0], &phases[3]].map(|stored| stored.target().clone());
        let [only_old, only_new] = [&old, &new].map(|root| root.ca.trust_bundle());
        let both = only_old.with(&only_new);
        let expected = [
            (&old, &old, &only_old, &only_old),
            (&old, &old, &both, &both),
            (&new, &old, &both, &both),
            (&new, &new, &only_new, &both),
        ];
        for (stored, (issuing, serving, agents, clients)) in phases.iter().zip(expected) {
            let trust = stored.trust();
            assert_eq!((&stored.issuing().id, &stored.serving().id), (&issuing.id, &serving.id), "{stored:?}");
            assert_eq!((&trust.agents, &trust.clients, trust.issuer.as_ref()), (agents, clients, Some(&issuing.id)));
            // Whoever serves is trusted by agents, and whoever issues by this receiver, in every phase.
            assert!(trust.agents.roots().contains(stored.serving().ca.certificate()));
            assert!(trust.clients.roots().contains(stored.issuing().ca.certificate()));
        }
    }

    #[test]
    fn what_is_not_whole_is_refused_and_no_key_is_shown() {
        for stored in phases() {
            let good = stored.write();
            for name in good.keys() {
                let mut data = good.clone();
                data.remove(name);
                assert!(matches!(Stored::read(&data), Err(ReadStored::Missing(key)) if key == name), "{name}");
                data.insert(name.clone(), ByteString(b"garbage".to_vec()));
                assert!(Stored::read(&data).is_err(), "{name}");
            }
            let shown = format!("{stored:?}");
            assert!(!shown.contains("PRIVATE") && !shown.contains("BEGIN"), "{shown}");
        }
        let spread = phases()[1].write();
        let changed = |from: &str, to: &str| {
            let mut data = spread.clone();
            let value = data[from].clone();
            data.insert(to.to_owned(), value);
            Stored::read(&data)
        };
        assert!(matches!(changed("ca.key", "next.key"), Err(ReadStored::Root("next.crt", Pki::Pair))));
        let mut same = spread.clone();
        for (from, to) in [("ca.crt", "next.crt"), ("ca.key", "next.key")] {
            same.insert(to.to_owned(), spread[from].clone());
        }
        assert!(matches!(Stored::read(&same), Err(ReadStored::Same)));
        for (state, is_expected) in [
            (
                r#"{"version":2,"phase":"steady","since":1}"#,
                (|why| matches!(why, ReadStored::Version(2))) as fn(_) -> _,
            ),
            (r#"{"version":1,"phase":"reissue","since":1}"#, |why| matches!(why, ReadStored::LeavesEnd)),
            (r#"{"version":1,"phase":"later","since":1}"#, |why| matches!(why, ReadStored::State(_))),
        ] {
            let mut data = spread.clone();
            data.insert(STATE.to_owned(), ByteString(state.as_bytes().to_vec()));
            assert!(is_expected(Stored::read(&data).unwrap_err()), "{state}");
        }
    }
}
