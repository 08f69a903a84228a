//! Remembers the selection whose modules the status of a Kyma shows, and the version of the runtime cluster's Kyma, so that
//! a change of a Manifest updates both statuses without reading the runtime cluster.

use kube::ResourceExt as _;
use tidewatch_api::{Kyma, names::annotation, plan::Work, selection::UserSelection};
use tidewatch_fleet::queue::WorkSet;
use tidewatch_kit::digest::short_digest;
use tidewatch_select::kyma::{
    mandatory,
    modules::{self, Decisions},
    validate::validate,
};

use super::{Error, Reconcile, status::ShownStatus};

/// State of both statuses after a reconcile without a failure of a request. Without an entry the status of the modules requires a
/// full reconcile.
#[derive(Debug, Default)]
pub(super) struct Shown {
    /// Hash of the selection whose modules they show; `None` if they show a failure.
    pub(super) selection: Option<String>,
    /// The Kyma in the runtime cluster; `None` if it is to be read before the next write.
    pub(super) runtime: Option<ShownStatus>,
}

/// Hash of a selection.
fn hash(selection: &UserSelection) -> String {
    short_digest(selection.to_json().to_string().as_bytes(), 8)
}

/// The last accepted selection of the runtime cluster's Kyma, if it has this hash. One that was rejected, or that is too
/// large for the annotation, has another hash.
fn accepted(kyma: &Kyma, expected: &str) -> Option<UserSelection> {
    let selection = UserSelection::parse(kyma.annotations().get(annotation::ACCEPTED_SPEC)?).ok()?;
    (hash(&selection) == expected).then_some(selection)
}

/// Returns true if the decisions change no Manifest.
fn is_settled(decisions: &Decisions<'_>) -> bool {
    decisions.wanted.iter().all(|decision| decision.write.is_none())
        && decisions.unwanted.iter().all(|manifest| manifest.metadata.deletion_timestamp.is_some())
}

impl Reconcile<'_> {
    /// Updates the status of the modules from their Manifests, with the selection that the status shows: no request to the
    /// runtime cluster is needed for the decision. Requests a full reconcile if that selection is unknown or a Manifest
    /// must be written.
    pub(super) async fn module_states(&mut self, shown: Option<&str>) -> Result<(), Error> {
        let selection = shown.and_then(|shown| accepted(&self.kyma, shown));
        let wanted = selection.and_then(|selection| validate(&selection, self.kyma.annotations()).ok());
        if let Some(wanted) = wanted {
            let (catalog, owned) = self.owned(Some(&wanted)).await?;
            let mandatory = mandatory::wanted(&catalog, &owned.mandatory);
            let of_mandatory = self.decide(mandatory::decide, &mandatory, &owned.mandatory, &catalog);
            let decisions = self.decide(modules::decide, &wanted.modules, &owned.selected, &catalog);
            if is_settled(&decisions) && is_settled(&of_mandatory) {
                self.wait_for(&of_mandatory);
                return self.apply(&wanted, decisions).await;
            }
        }
        self.outcome.follow_up = WorkSet::of(&[Work::Kyma]);
        Ok(())
    }

    /// Hash of the selection that both statuses show after this reconcile: that of the runtime cluster if the reconcile
    /// read it, else the previous one. `None` if they show a failure.
    pub(super) fn shown_selection(&self, previous: Option<String>) -> Option<String> {
        match &self.runtime {
            _ if self.findings.failure.is_some() => None,
            Some((_, runtime)) => Some(hash(&UserSelection::of(runtime))),
            None => previous,
        }
    }
}
