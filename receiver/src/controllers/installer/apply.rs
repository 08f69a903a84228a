//! Brings one runtime to what an agent needs: reads what nobody has looked at, and writes what differs, in the order of the parts.

use std::collections::BTreeMap;

use futures::{StreamExt as _, stream};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams, Preconditions},
};
use serde_json::{Value, json};
use tidewatch_shared::{
    identity::RuntimeId,
    names::{AGENT_CONTAINER, AGENT_DEPLOYMENT, AGENT_PULL_SECRET, field_manager, label},
};
use tokio::time::Instant;

use super::{
    Error, Failure, Installed, Part, Report,
    error::Object,
    form::{self, LEFT, Verdict, judge},
    kit::{Kit, Wanted, Whose},
    part::{Kind, POLICIES, SECRETS, SERVICES, WEBHOOKS},
    readiness, rights,
    upgrade::{Decided, Image},
};
use crate::kube::object;

/// Objects that are read at the same time.
const AT_ONCE: usize = 6;

/// Objects of the incumbent that have no part any more, besides its webhook configuration.
pub(super) const OBSOLETE: [(Part, Kind, &str); 2] =
    [(Part::MetricsService, SERVICES, AGENT_DEPLOYMENT), (Part::DenyAll, POLICIES, "kyma-project.io--seed-to-watcher")];

/// Without these a webhook configuration of the incumbent's that is still there would make users wait for nobody.
const BEHIND_WEBHOOKS: [Part; 6] =
    [Part::DenyAll, Part::ApiServerPolicy, Part::DnsPolicy, Part::MetricsPolicy, Part::Secret, Part::Deployment];
/// Without one of these nothing else may be denied.
const ALLOWED: [Part; 3] = [Part::ApiServerPolicy, Part::DnsPolicy, Part::MetricsPolicy];
/// A plan must not name what its agent may not read yet.
const RIGHTS: [Part; 5] = [Part::Account, Part::ClusterRole, Part::ClusterRoleBinding, Part::Role, Part::RoleBinding];

/// One installation, from its reads to its report.
pub(super) struct Run<'a> {
    client: &'a Client,
    runtime: &'a RuntimeId,
    /// The image that it gets.
    image: Image,
    /// What it has already goes before.
    keeps: bool,
    kit: &'a Kit,
    installed: &'a mut Installed,
    report: Report,
    /// A role that has more rights than it shall keep, until the plan is there.
    wide: BTreeMap<Part, DynamicObject>,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        client: &'a Client,
        runtime: &'a RuntimeId,
        decided: Decided,
        kit: &'a Kit,
        installed: &'a mut Installed,
    ) -> Self {
        let (image, keeps) = match (decided, &installed.image) {
            (Decided::Is(image), _) => (image, false),
            // What was found once is what it keeps, also when somebody puts another one there.
            (Decided::KeepOr(_), Some(image)) => (image.clone(), false),
            (Decided::KeepOr(image), None) => (image, true),
        };
        Self { client, runtime, image, keeps, kit, installed, report: Report::default(), wide: BTreeMap::new() }
    }

    fn is_known(&self, wanted: &Wanted) -> bool {
        let whose = Whose { runtime: self.runtime, image: &self.image };
        !(self.keeps && wanted.part == Part::Deployment) && self.installed.is(wanted, whose)
    }

    pub(super) async fn run(mut self) -> Report {
        let unknown: Vec<_> = self.kit.wanted().filter(|wanted| !self.is_known(wanted)).collect();
        if unknown.is_empty() && self.installed.cleared {
            return self.report;
        }
        let mut found = match self.read(&unknown).await {
            Some(found) => found,
            None => return self.report,
        };
        if !self.installed.cleared && !self.kit.compat_webhooks {
            self.clear(Part::Webhooks, WEBHOOKS, AGENT_DEPLOYMENT).await;
        }
        for wanted in unknown {
            let Some(found) = found.remove(&wanted.part) else { continue };
            if self.is_over() {
                return self.report;
            }
            if self.waits(wanted.part) {
                self.report.held.insert(wanted.part);
            } else {
                self.ensure(wanted, found).await;
            }
            if wanted.part == Part::ConfigMap {
                self.narrow().await;
            }
        }
        self.narrow().await;
        if !self.installed.cleared && self.report.failures.is_empty() && self.report.held.is_empty() {
            for (part, kind, name) in OBSOLETE {
                self.clear(part, kind, name).await;
            }
            if !self.kit.pulls {
                self.clear(Part::PullSecret, SECRETS, AGENT_PULL_SECRET).await;
            }
            self.installed.cleared = self.report.failures.is_empty();
        }
        self.report
    }

    /// What is there now. `None` when the runtime cannot be asked at all.
    async fn read(&mut self, unknown: &[&'a Wanted]) -> Option<BTreeMap<Part, Option<DynamicObject>>> {
        let reads: Vec<_> = unknown.iter().map(|wanted| read(self.client, wanted.part)).collect();
        let mut reads = stream::iter(reads).buffered(AT_ONCE);
        let mut found = BTreeMap::new();
        while let Some((part, result)) = reads.next().await {
            match result {
                Ok(object) => {
                    found.insert(part, object);
                }
                Err(source) => {
                    self.report.failures.push(Failure { part, error: Error::Read { object: Object::of(part), source } })
                }
            }
            if self.is_over() {
                return None;
            }
        }
        Some(found)
    }

    fn is_over(&self) -> bool {
        self.report.failures.last().is_some_and(|failure| failure.error.is_of_all())
    }

    fn failed(&self, part: Part) -> bool {
        self.report.failures.iter().any(|failure| failure.part == part)
    }

    /// Whether a part needs another one that failed.
    fn waits(&self, part: Part) -> bool {
        (BEHIND_WEBHOOKS.contains(&part) && self.failed(Part::Webhooks))
            || (part == Part::ConfigMap && RIGHTS.into_iter().any(|right| self.failed(right)))
            || (part == Part::DenyAll && ALLOWED.into_iter().any(|allowed| self.failed(allowed)))
    }

    async fn ensure(&mut self, wanted: &Wanted, found: Option<DynamicObject>) {
        let part = wanted.part;
        if part == Part::Deployment && self.keeps {
            self.image = found.as_ref().and_then(our_image).unwrap_or_else(|| self.image.clone());
        }
        let body = wanted.body(Whose { runtime: self.runtime, image: &self.image });
        let (shall, later) = match &found {
            Some(found) if matches!(part, Part::ClusterRole | Part::Role) => widen(&body, found),
            _ => (body, false),
        };
        match self.settle(part, &shall, found).await {
            Ok(object) if later => {
                self.wide.insert(part, object);
            }
            Ok(object) => self.saw(wanted, &object),
            Err(error) => self.report.failures.push(Failure { part, error }),
        }
    }

    fn saw(&mut self, wanted: &Wanted, object: &DynamicObject) {
        if wanted.part == Part::Deployment {
            self.installed.settling |= !readiness::is_available(object);
            self.installed.image = Some(self.image.clone());
        }
        self.installed.saw(wanted, Whose { runtime: self.runtime, image: &self.image });
    }

    /// Takes from roles what the plan before needed and this one does not.
    async fn narrow(&mut self) {
        if self.failed(Part::ConfigMap) || self.report.held.contains(&Part::ConfigMap) {
            return;
        }
        for (part, found) in std::mem::take(&mut self.wide) {
            let Some(wanted) = self.kit.of(part) else { continue };
            let body = wanted.body(Whose { runtime: self.runtime, image: &self.image });
            match self.settle(part, &body, Some(found)).await {
                Ok(object) => self.saw(wanted, &object),
                Err(error) => self.report.failures.push(Failure { part, error }),
            }
        }
    }

    /// Writes an object if it is not as it shall be. Returns it as it is then.
    async fn settle(
        &mut self,
        part: Part,
        shall: &Value,
        found: Option<DynamicObject>,
    ) -> Result<DynamicObject, Error> {
        let known = self.installed.forms.get(&part).copied();
        let found = match found {
            Some(found) if found.metadata.deletion_timestamp.is_some() => {
                self.let_go(part, &found).await?;
                None
            }
            found => found,
        };
        let verdict = found.as_ref().map_or(Verdict::Changed, |found| judge(part, shall, found, known));
        let found = match (verdict, found) {
            (Verdict::Same, Some(found)) => return Ok(found),
            (_, found) => found,
        };
        if !self.installed.may_write(Instant::now()) {
            return Err(Error::Contested(Object::of(part)));
        }
        let api = part.kind().api(self.client);
        let error = |source| Error::Write { object: Object::of(part), source };
        let written = match (verdict, found) {
            (Verdict::Added, Some(found)) => put(&api, part, shall, &found).await.map_err(error)?,
            (Verdict::Held, Some(found)) => release(&api, part.name(), &found).await.map_err(error)?,
            (Verdict::Anew, Some(found)) => {
                delete(&api, part.name(), found.uid())
                    .await
                    .map_err(|source| Error::Delete { object: Object::of(part), source })?;
                apply(&api, part, shall).await.map_err(error)?
            }
            _ => apply(&api, part, shall).await.map_err(error)?,
        };
        self.report.written.insert(part);
        if part == Part::Deployment {
            (self.installed.settling, self.installed.looks) = (true, 0);
        }
        if written.metadata.deletion_timestamp.is_some() {
            return Err(Error::Terminating(Object::of(part)));
        }
        let written = match judge(part, shall, &written, None) {
            Verdict::Same => {
                self.installed.forms.remove(&part);
                return Ok(written);
            }
            // What is in these is the agent's: they are never replaced.
            Verdict::Changed if part.is_agents() => return apply(&api, part, shall).await.map_err(error),
            _ if part.is_agents() => return Ok(written),
            // An apply leaves what others added. What is still different after a PUT is this API server's own doing.
            _ if verdict == Verdict::Added => written,
            _ => put(&api, part, shall, &written).await.map_err(error)?,
        };
        if judge(part, shall, &written, None) == Verdict::Same {
            self.installed.forms.remove(&part);
        } else {
            self.installed.forms.insert(part, form::known(part, shall, &written));
        }
        Ok(written)
    }

    /// Lets an object go that somebody deletes, so that it can be made again.
    async fn let_go(&mut self, part: Part, found: &DynamicObject) -> Result<(), Error> {
        let object = Object::of(part);
        if !form::is_held(&found.metadata) || !self.installed.may_write(Instant::now()) {
            return Err(Error::Terminating(object));
        }
        let left = release(&part.kind().api(self.client), part.name(), found).await;
        let left = left.map_err(|source| Error::Write { object, source })?;
        self.report.written.insert(part);
        if left.finalizers().is_empty() { Ok(()) } else { Err(Error::Terminating(object)) }
    }

    /// Deletes an object of the incumbent's, if it is there and bears its mark.
    async fn clear(&mut self, part: Part, kind: Kind, name: &'static str) {
        let api = kind.api(self.client);
        let object = Object::new(kind, name);
        let error = match metadata(&api, name).await {
            Ok(Some(found)) if found.labels().get(label::MANAGED_BY).is_some_and(|by| by == label::MANAGED_BY_SKR) => {
                match delete(&api, name, found.uid()).await {
                    Ok(()) => {
                        self.report.written.insert(part);
                        return;
                    }
                    Err(source) => Error::Delete { object, source },
                }
            }
            Ok(_) => return,
            Err(source) => Error::Read { object, source },
        };
        self.report.failures.push(Failure { part, error });
    }
}

/// What a role shall be until the plan is there, and whether that is more than it shall keep.
fn widen(body: &Value, found: &DynamicObject) -> (Value, bool) {
    let rules = |value: &Value| value["rules"].as_array().cloned().unwrap_or_default();
    let (wanted, is) = (rules(body), rules(&found.data));
    let wide = rights::widened(&wanted, &is);
    if wide.len() == wanted.len() {
        return (body.clone(), false);
    }
    let mut shall = body.clone();
    // Where all that is wanted is there already, nothing is written before the plan.
    shall["rules"] = if rights::cover(&is, &wanted) { is.into() } else { wide.into() };
    (shall, true)
}

/// The image of a Deployment, if we put it there: an API server notes who did, and whoever puts another one there takes it over.
fn our_image(deployment: &DynamicObject) -> Option<Image> {
    let container = format!("k:{{\"name\":\"{AGENT_CONTAINER}\"}}");
    let entries = deployment.metadata.managed_fields.iter().flatten();
    let ours = entries.filter(|entry| entry.manager.as_deref() == Some(field_manager::TIDEWATCH));
    let mut fields = ours.filter_map(|entry| entry.fields_v1.as_ref());
    let place = ["f:spec", "f:template", "f:spec", "f:containers", &container, "f:image"];
    let is_noted = fields.any(|fields| place.iter().try_fold(&fields.0, |at, member| at.get(member)).is_some());
    let containers = deployment.data["spec"]["template"]["spec"]["containers"].as_array()?;
    let image = containers.iter().find(|container| container["name"] == AGENT_CONTAINER)?["image"].as_str()?;
    is_noted.then(|| image.into())
}

async fn read(client: &Client, part: Part) -> (Part, kube::Result<Option<DynamicObject>>) {
    let api = part.kind().api(client);
    let found = if part.is_agents() { metadata(&api, part.name()).await } else { object::get(&api, part.name()).await };
    (part, found)
}

/// An object without its content.
pub(super) async fn metadata(api: &Api<DynamicObject>, name: &str) -> kube::Result<Option<DynamicObject>> {
    match api.get_metadata(name).await {
        Ok(found) => Ok(Some(bare(found.metadata))),
        Err(error) if object::is_absent(&error, name) => Ok(None),
        Err(error) => Err(error),
    }
}

fn bare(metadata: ObjectMeta) -> DynamicObject {
    DynamicObject { types: None, metadata, data: Value::Null }
}

async fn apply(api: &Api<DynamicObject>, part: Part, shall: &Value) -> kube::Result<DynamicObject> {
    let params = PatchParams::apply(field_manager::TIDEWATCH).force();
    if part.is_agents() {
        // Not even the answer to a write shows what is in it.
        let written = api.patch_metadata(part.name(), &params, &Patch::Apply(shall)).await?;
        return Ok(bare(written.metadata));
    }
    api.patch(part.name(), &params, &Patch::Apply(shall)).await
}

/// Replaces an object unless somebody wrote since it was read: what others added goes, but for labels and annotations of its head.
async fn put(
    api: &Api<DynamicObject>,
    part: Part,
    shall: &Value,
    found: &DynamicObject,
) -> kube::Result<DynamicObject> {
    let mut object: DynamicObject = serde_json::from_value(shall.clone()).map_err(kube::Error::SerdeError)?;
    let marks = object.metadata.labels.take();
    object.metadata = form::released(&found.metadata);
    object.metadata.managed_fields = None;
    object.metadata.labels.get_or_insert_default().extend(marks.into_iter().flatten());
    for (_, place, member) in LEFT.iter().filter(|(of, ..)| *of == part) {
        let kept = found.data.pointer(place).and_then(|value| value.get(*member));
        if let (Some(kept), Some(members)) = (kept, object.data.pointer_mut(place).and_then(Value::as_object_mut)) {
            members.insert((*member).to_owned(), kept.clone());
        }
    }
    let params = PostParams { field_manager: Some(field_manager::TIDEWATCH.to_owned()), ..PostParams::default() };
    api.replace(part.name(), &params, &object).await
}

/// Takes off what holds an object, or lets it go with another one, if it is still this one. What is in it stays, and is not read.
pub(super) async fn release(
    api: &Api<DynamicObject>,
    name: &str,
    found: &DynamicObject,
) -> kube::Result<DynamicObject> {
    let finalizers = form::released(&found.metadata).finalizers;
    let patch = json!({"metadata": {"uid": found.uid(), "finalizers": finalizers, "ownerReferences": null}});
    let params = PatchParams { field_manager: Some(field_manager::TIDEWATCH.to_owned()), ..PatchParams::default() };
    let released = api.patch_metadata(name, &params, &Patch::Merge(patch)).await?;
    // Content that is known is still so.
    Ok(DynamicObject { metadata: released.metadata, ..found.clone() })
}

/// Deletes an object, if it is still this one.
pub(super) async fn delete(api: &Api<DynamicObject>, name: &str, uid: Option<String>) -> kube::Result<()> {
    let params = DeleteParams {
        preconditions: Some(Preconditions { uid, ..Preconditions::default() }),
        ..DeleteParams::background()
    };
    match api.delete(name, &params).await {
        Ok(_) => Ok(()),
        Err(error) if object::is_absent(&error, name) => Ok(()),
        Err(error) => Err(error),
    }
}
