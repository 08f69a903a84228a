//! Kinds that the API servers of the runtimes serve, with their plurals and scopes.
//!
//! Those of Kubernetes itself are known without a request (`built_in`); the others are discovered once per runtime
//! (`discovery`) and cached (`cache`); `content` finds all kinds that can be in a namespace. Each reconcile has its own view ([`Kinds`]): it first discovers the kinds that it
//! needs, and then answers without requests.

mod built_in;
mod cache;
mod content;
mod definition;
mod discovery;
mod removed;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures::{StreamExt as _, stream};
use kube::{
    Api, Client, Resource,
    api::{ApiResource, DynamicObject, GroupVersionKind},
    core::DynamicResourceScope,
};
use serde_json::Value;
use tidewatch_api::key::KymaKey;

use crate::runtime_access::is_unanswered;

pub use cache::KindCache;
pub use content::NamespacedKinds;
pub use definition::Definition;
pub use removed::removed;

/// Concurrent discovery requests to one runtime for one reconcile.
const CONCURRENT_REQUESTS: usize = 16;
/// Discovery requests of one reconcile; far more than the API groups of any module.
const MAX_REQUESTS: usize = 200;

/// A kind that an API server serves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// API group; empty for the core group.
    pub group: Cow<'static, str>,
    /// Version of the group.
    pub version: Cow<'static, str>,
    /// Kind.
    pub kind: Cow<'static, str>,
    /// Plural in lower case, as in paths.
    pub plural: Cow<'static, str>,
    /// False for a cluster-scoped kind.
    pub namespaced: bool,
}

impl Kind {
    fn is(&self, group: &str, version: &str, kind: &str) -> bool {
        self.group == group && self.version == version && self.kind == kind
    }

    /// Client of the kind in a namespace, which is ignored for a cluster-scoped kind. An empty one stands for all
    /// namespaces, for lists only.
    pub fn api<K>(&self, client: &Client, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>,
    {
        let kind = GroupVersionKind::gvk(&self.group, &self.version, &self.kind);
        let resource = ApiResource::from_gvk_with_plural(&kind, &self.plural);
        if self.namespaced && !namespace.is_empty() {
            Api::namespaced_with(client.clone(), namespace, &resource)
        } else {
            Api::all_with(client.clone(), &resource)
        }
    }
}

/// Returns true for an API group of Kubernetes itself. Custom resources have other groups.
pub fn is_built_in(group: &str) -> bool {
    built_in::has_group(group)
}

/// Returns true for an API group that no CRD can have, or that Kubernetes itself serves, or has served, in some version.
pub fn is_of_kubernetes(group: &str) -> bool {
    is_built_in(group) || !group.contains('.') || built_in::OTHER_GROUPS.contains(&group)
}

/// Returns true for a kind of Kubernetes itself in a version that every supported API server serves.
pub fn serves(group: &str, version: &str, kind: &str) -> bool {
    built_in::find(group, version, kind).is_some()
}

/// Returns a kind of Kubernetes itself in its preferred version.
pub fn built_in(group: &str, kind: &str) -> Option<&'static Kind> {
    built_in::of_kind(group, kind).next()
}

/// Kinds of Kubernetes itself, each in its preferred version.
pub fn built_in_kinds() -> impl Iterator<Item = &'static Kind> {
    built_in::all().filter(|kind| built_in(&kind.group, &kind.kind) == Some(*kind))
}

/// Returns true for the response to a request for a kind that the API server does not serve: a 404 that names no object.
pub fn is_unserved(error: &kube::Error) -> bool {
    let names_none = |status: &kube::core::Status| status.details.as_ref().is_none_or(|it| it.name.is_empty());
    matches!(error, kube::Error::Api(status) if status.code == 404 && names_none(status))
}

/// Answers by kind, of one version. `None` for a kind that is not served.
type Answers = BTreeMap<String, Option<Arc<Kind>>>;

/// Kinds of one runtime during one reconcile.
#[derive(Debug)]
pub struct Kinds {
    cache: KindCache,
    runtime: KymaKey,
    /// Revision of the client.
    revision: u64,
    /// Answers by group and version.
    answers: BTreeMap<String, BTreeMap<String, Answers>>,
    /// Kinds of the CRDs that this reconcile applies. The API server may refuse these: they are no answers.
    defined: Vec<Kind>,
    /// Versions of the API groups of kinds that were prefetched, by group and kind.
    prefetched: BTreeMap<(String, String), Vec<String>>,
    requests: usize,
}

impl Kinds {
    fn new(cache: KindCache, runtime: KymaKey, revision: u64, known: Vec<Arc<Kind>>) -> Self {
        let mut kinds = Self {
            cache,
            runtime,
            revision,
            answers: BTreeMap::new(),
            defined: Vec::new(),
            prefetched: BTreeMap::new(),
            requests: 0,
        };
        known.into_iter().for_each(|kind| kinds.insert(kind));
        kinds
    }

    fn insert(&mut self, kind: Arc<Kind>) {
        self.answers_of(&kind.group, &kind.version).insert(kind.kind.to_string(), Some(kind));
    }

    fn answers_of(&mut self, group: &str, version: &str) -> &mut Answers {
        self.answers.entry(group.to_owned()).or_default().entry(version.to_owned()).or_default()
    }

    fn answer(&self, group: &str, version: &str, kind: &str) -> Option<&Option<Arc<Kind>>> {
        self.answers.get(group)?.get(version)?.get(kind)
    }

    /// The kind as the runtime serves it, or will serve it once the CRDs of this reconcile are applied. `None` if neither
    /// holds, or if the kind was not discovered before.
    pub fn served(&self, group: &str, version: &str, kind: &str) -> Option<&Kind> {
        let defined = || self.defined.iter().find(|it| it.is(group, version, kind));
        let discovered = || self.answer(group, version, kind)?.as_deref();
        built_in::find(group, version, kind).or_else(defined).or_else(discovered)
    }

    /// Client of a served kind; see [`Self::served`] and [`Kind::api`].
    pub fn api(
        &self,
        client: &Client,
        group: &str,
        version: &str,
        kind: &str,
        namespace: &str,
    ) -> Option<Api<DynamicObject>> {
        Some(self.served(group, version, kind)?.api(client, namespace))
    }

    /// Adds the kind of a CRD that this reconcile applies, without a request. Ignores other objects. The answer is
    /// not cached: the runtime serves the kind only once the CRD is established.
    pub fn define(&mut self, object: &Value) {
        self.defined.extend(Definition::of(object).iter().flat_map(Definition::kinds));
    }

    /// Discovers kinds, given as group, version and kind, as far as they are unknown. A kind that is not served is not
    /// asked for again by this view.
    ///
    /// # Errors
    /// A request failed, or its response is not one of a Kubernetes API server. The kinds of its group and version stay
    /// unknown, the others are discovered.
    pub async fn discover<'a>(
        &mut self,
        client: &Client,
        kinds: impl IntoIterator<Item = (&'a str, &'a str, &'a str)>,
    ) -> kube::Result<()> {
        let unknown = kinds.into_iter().filter(|(group, version, kind)| self.served(group, version, kind).is_none());
        let unknown: Vec<_> = unknown.collect();
        self.ask(client, unknown).await
    }

    /// As [`Self::discover`], of the kinds that CRDs of this reconcile define, too.
    async fn ask<'a>(
        &mut self,
        client: &Client,
        kinds: impl IntoIterator<Item = (&'a str, &'a str, &'a str)>,
    ) -> kube::Result<()> {
        let mut wanted: BTreeMap<_, BTreeSet<&str>> = BTreeMap::new();
        for (group, version, kind) in kinds {
            if self.answer(group, version, kind).is_none() && built_in::find(group, version, kind).is_none() {
                wanted.entry((group, version)).or_default().insert(kind);
            }
        }
        self.count_requests(wanted.len())?;
        let requests: Vec<_> = wanted
            .into_iter()
            .map(|((group, version), kinds)| async move {
                let found = discovery::kinds(client, group, version, &kinds).await;
                (group, version, kinds, found)
            })
            .collect();
        let responses: Vec<_> = stream::iter(requests).buffered(CONCURRENT_REQUESTS).collect().await;
        let mut served = Vec::new();
        let mut failure = None;
        for (group, version, kinds, found) in responses {
            match found {
                Ok(found) => {
                    let answers = self.answers_of(group, version);
                    answers.extend(kinds.into_iter().map(|kind| (kind.to_owned(), None)));
                    served.extend(found);
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        let served = self.cache.keep(&self.runtime, self.revision, served);
        served.into_iter().for_each(|kind| self.insert(kind));
        failure.map_or(Ok(()), Err)
    }

    /// Finds a version in which the runtime serves a kind; the preferred one if none is known. `None` if it does not
    /// serve the kind at all. CRDs that this reconcile is to apply do not count.
    ///
    /// # Errors
    /// As [`Self::discover`].
    pub async fn locate(&mut self, client: &Client, group: &str, kind: &str) -> kube::Result<Option<Arc<Kind>>> {
        if let Some(known) = self.known(group, kind) {
            return Ok(Some(known));
        }
        let versions = match self.prefetched.remove(&(group.to_owned(), kind.to_owned())) {
            Some(versions) => versions,
            None => {
                self.count_requests(1)?;
                discovery::versions(client, group).await?
            }
        };
        self.ask(client, versions.iter().map(|version| (group, version.as_str(), kind))).await?;
        Ok(versions.iter().find_map(|version| self.answer(group, version, kind)?.clone()))
    }

    /// Asks for several kinds, given as group and kind, in their preferred versions at the same time. [`Self::locate`] then needs no
    /// request for a kind that is served in that version, or in none. Another failed request is repeated by it.
    ///
    /// # Errors
    /// Nothing answered.
    pub async fn prefetch<'a>(
        &mut self,
        client: &Client,
        kinds: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> kube::Result<()> {
        let mut unknown: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (group, kind) in kinds {
            if self.known(group, kind).is_none() {
                unknown.entry(group).or_default().push(kind);
            }
        }
        self.count_requests(unknown.len())?;
        let requests: Vec<_> = unknown.keys().map(|group| discovery::versions(client, group)).collect();
        let found: Vec<_> = stream::iter(requests).buffered(CONCURRENT_REQUESTS).collect().await;
        let mut wanted = Vec::new();
        for ((group, kinds), versions) in unknown.into_iter().zip(found) {
            let versions = match versions {
                Ok(versions) => versions,
                Err(error) if is_unanswered(&error) => return Err(error),
                Err(_) => continue,
            };
            for kind in kinds {
                wanted.extend(versions.first().map(|version| (group, version.clone(), kind)));
                self.prefetched.insert((group.to_owned(), kind.to_owned()), versions.clone());
            }
        }
        let wanted = wanted.iter().map(|(group, version, kind)| (*group, version.as_str(), *kind));
        match self.ask(client, wanted).await {
            Err(error) if is_unanswered(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// A version in which the runtime serves a kind, if one is known.
    fn known(&self, group: &str, kind: &str) -> Option<Arc<Kind>> {
        if let Some(found) = built_in::of_kind(group, kind).next() {
            return Some(Arc::new(found.clone()));
        }
        self.answers.get(group)?.values().find_map(|answers| answers.get(kind)?.clone())
    }

    /// Drops all answers of an API group, after a request for one of its kinds failed with [`is_unserved`].
    pub fn invalidate(&mut self, group: &str) {
        self.answers.remove(group);
        self.prefetched.retain(|(of, _), _| of != group);
        self.cache.invalidate(&self.runtime, group);
    }

    fn count_requests(&mut self, more: usize) -> kube::Result<()> {
        self.requests += more;
        if self.requests <= MAX_REQUESTS {
            return Ok(());
        }
        let text = format!("more than {MAX_REQUESTS} API groups and versions");
        Err(kube::Error::Discovery(kube::error::DiscoveryError::InvalidGroupVersion(text)))
    }
}

#[cfg(test)]
mod tests;
