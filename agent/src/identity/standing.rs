//! What is told of the identity: where it is from, whether it is kept, and what goes wrong.

use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Where the identity in use is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Provenance {
    /// Files.
    Files,
    /// The agent's own Secret, where an earlier one has kept it.
    Secret,
    /// Asked for with a token.
    Enrolment,
    /// Asked for with the one before.
    Renewal,
}

/// A handle; clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Standing(Arc<Mutex<Told>>);

/// What there is to tell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Told {
    /// Absent before there is an identity.
    pub from: Option<Provenance>,
    /// The agent's Secret does not have it: the next agent has to enrol. Never said of files.
    pub unkept: bool,
    /// Since when asking for a certificate fails, in RFC 3339.
    pub failing_since: Option<String>,
    /// Why, in words.
    pub error: Option<String>,
}

impl Standing {
    /// An identity is in use.
    pub(crate) fn has(&self, from: Provenance) {
        self.with(|told| *told = Told { from: Some(from), unkept: told.unkept, ..Told::default() });
    }

    /// Whether the agent's Secret has it.
    pub(super) fn kept(&self, kept: bool) {
        self.with(|told| told.unkept = !kept);
    }

    /// No certificate is to be had, at a time in Unix seconds.
    pub(super) fn fails(&self, unix: i64, why: String) {
        self.with(|told| {
            let now = || Timestamp::from_second(unix).ok().map(|time| time.to_string());
            told.failing_since = told.failing_since.take().or_else(now);
            told.error = Some(why);
        });
    }

    /// What there is to tell.
    pub(crate) fn told(&self) -> Told {
        self.with(|told| told.clone())
    }

    /// Since when asking for a certificate fails.
    pub(super) fn failing_since(&self) -> Option<String> {
        self.with(|told| told.failing_since.clone())
    }

    fn with<R>(&self, work: impl FnOnce(&mut Told) -> R) -> R {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Told {
    /// What people read after the certificate's end.
    pub(crate) fn line(&self) -> String {
        let from = self.from.map(|from| format!(", from {}", from.as_str())).unwrap_or_default();
        let unkept = if self.unkept { ", not kept in the agent's Secret" } else { "" };
        let since = self.failing_since.as_ref();
        let error = self.error.as_deref().unwrap_or_default();
        let failing = since.map(|since| format!(", asking fails since {since}: {error}")).unwrap_or_default();
        format!("{from}{unkept}{failing}")
    }
}

impl Provenance {
    /// In words.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Secret => "the agent's Secret",
            Self::Enrolment => "enrolment",
            Self::Renewal => "renewal",
        }
    }
}
