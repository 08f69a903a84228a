//! Applies the Jobs of a module: a Job that exists with another content is replaced, and one that has run is not run again.

use std::borrow::Cow;

use kube::api::DynamicObject;
use serde_json::json;
use tidewatch_cluster::object::{Repair, Shape, WriteError};

use super::{
    apply::{Applied, TYPED, Wanted},
    execution::Execution,
    failure::Failure,
    jobs::{Existing, content_of, existing, is_same},
    render::{RenderedObject, names_pull_secret, without_pull_secret},
    step::Seen,
};

/// Text of an API server about a field that does not let change.
const IMMUTABLE: &str = "field is immutable";

/// Rules of the comparison of a Job that keeps its pod template.
const KEPT: Shape = Shape { ignored: &["/spec/template"], ..TYPED };

impl Execution<'_> {
    /// Applies a Job, given as it was found, unless it has run.
    pub(super) async fn apply_job(
        &self,
        wanted: &Wanted<'_>,
        found: Option<DynamicObject>,
    ) -> Result<Applied, Failure> {
        let RenderedObject { key, body, .. } = wanted.object;
        let Some(live) = found else {
            if self.jobs.was_created(key, content_of(body)) {
                return Ok(Applied::has_run());
            }
            return match self.converge(wanted, None).await {
                // It was not read before.
                Err(error) if is_immutable(&error) => match wanted.remote.read("read").await? {
                    Some(live) => self.replace_job(wanted, &live).await,
                    None => Err(self.failure(wanted.object, error)),
                },
                applied => applied.map_err(|error| self.failure(wanted.object, error)),
            };
        };
        if is_same(&live, body) && KEPT.compare(&wanted.body, &live, None) == Repair::None {
            return Ok(self.current(key, live, self.memory.accepted(key)));
        }
        match self.converge(wanted, Some(live.clone())).await {
            Err(error) if is_immutable(&error) => self.replace_job(wanted, &live).await,
            applied => applied.map_err(|error| self.failure(wanted.object, error)),
        }
    }

    /// Deals with an existing Job whose pod template does not let change.
    async fn replace_job(&self, wanted: &Wanted<'_>, live: &DynamicObject) -> Result<Applied, Failure> {
        let Wanted { object, remote, .. } = wanted;
        let RenderedObject { key, body, .. } = object;
        match existing(live, body) {
            Existing::Terminating => Ok(Applied::seen(Seen::Terminating)),
            Existing::Running => Ok(Applied::seen(Seen::Running)),
            Existing::Same => {
                let marks =
                    json!({"labels": body["metadata"]["labels"], "annotations": body["metadata"]["annotations"]});
                let patched = remote.merge("apply", json!({"metadata": marks})).await?;
                Ok(self.current(key, patched, None))
            }
            Existing::Ended => {
                if remote.delete(live).await?.is_some() {
                    return Ok(Applied::seen(Seen::Terminating));
                }
                let applied = self.converge(&Wanted::of(object, remote), None).await;
                applied.map_err(|error| self.failure(object, error))
            }
        }
    }

    /// Drops the image pull secret from the body for an existing object whose pods cannot get one any more.
    pub(super) fn fit(&self, wanted: &mut Wanted<'_>, live: &DynamicObject) {
        let key = &wanted.object.key;
        let secret = self.request.pull_secret.as_ref().map(|secret| secret.name.as_str());
        if let Some(secret) = secret.filter(|secret| !names_pull_secret(&live.data, key, secret)) {
            wanted.body = Cow::Owned(without_pull_secret(&wanted.body, key, secret));
        }
    }
}

/// True if the API server refused to change an immutable field.
fn is_immutable(error: &WriteError) -> bool {
    let WriteError::Apply(kube::Error::Api(status)) = error else { return false };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let mut texts = causes.map(|cause| &cause.message).chain([&status.message]);
    status.code == 422 && texts.any(|text| text.contains(IMMUTABLE))
}
