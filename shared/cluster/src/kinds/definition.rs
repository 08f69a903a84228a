//! CRDs, as far as they define which kind is served.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Client, api::GetParams, core::Request};
use serde::Deserialize;
use serde_json::Value;

use super::{
    Kind,
    discovery::{is_group, is_label},
};
use crate::object;

const PATH: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

/// A CustomResourceDefinition without schemas.
#[derive(Clone, Debug, Deserialize)]
pub struct Definition {
    /// Its own metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Clone, Debug, Deserialize)]
struct Spec {
    group: String,
    names: Names,
    scope: String,
    versions: Vec<Version>,
}

#[derive(Clone, Debug, Deserialize)]
struct Names {
    kind: String,
    plural: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Version {
    name: String,
    served: bool,
    #[serde(default)]
    storage: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Status {
    conditions: Option<Vec<Condition>>,
}

#[derive(Clone, Debug, Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

impl Definition {
    /// Reads a CRD; `None` if the API server reports that it does not exist.
    ///
    /// # Errors
    /// The request failed, or the response is not the CRD of this name.
    pub async fn read(client: &Client, name: &str) -> kube::Result<Option<Self>> {
        let request = Request::new(PATH).get(name, &GetParams::default()).map_err(kube::Error::BuildRequest)?;
        let Some(text) = object::if_exists(client.request_text(request).await, name)? else { return Ok(None) };
        // kube would log the whole body when it cannot parse it.
        let definition: Self = serde_json::from_str(&text).map_err(kube::Error::SerdeError)?;
        if definition.has_valid_names() && definition.name() == name {
            return Ok(Some(definition));
        }
        let text = format!("the response is not the CRD {name}");
        Err(kube::Error::SerdeError(serde::de::Error::custom(text)))
    }

    /// The CRD that an object is; `None` for any other object, and for an invalid one.
    pub fn of(object: &Value) -> Option<Self> {
        let is_definition = object["kind"] == "CustomResourceDefinition"
            && object["apiVersion"].as_str().is_some_and(|version| version.starts_with("apiextensions.k8s.io/"));
        let definition = is_definition.then(|| Self::deserialize(object).ok())??;
        definition.has_valid_names().then_some(definition)
    }

    /// The only name that an API server accepts for it.
    fn name(&self) -> String {
        format!("{}.{}", self.spec.names.plural, self.spec.group)
    }

    /// Returns true if the names cannot change the path of a URL.
    fn has_valid_names(&self) -> bool {
        let Spec { group, names, versions, .. } = &self.spec;
        is_group(group) && is_label(&names.plural) && versions.iter().all(|version| is_label(&version.name))
    }

    /// The kind in the version for lists: the storage version if it is served, since it needs no conversion webhook; else
    /// the first served one. `None` without versions.
    pub fn preferred(&self) -> Option<Kind> {
        let versions = &self.spec.versions;
        let preferred = versions.iter().find(|version| version.storage && version.served);
        let preferred = preferred.or_else(|| versions.iter().find(|version| version.served)).or(versions.first())?;
        Some(self.in_version(&preferred.name))
    }

    /// The kind in a version.
    pub fn in_version(&self, version: &str) -> Kind {
        let Spec { group, names, scope, .. } = &self.spec;
        Kind {
            group: group.clone().into(),
            version: version.to_owned().into(),
            kind: names.kind.clone().into(),
            plural: names.plural.clone().into(),
            namespaced: scope == "Namespaced",
        }
    }

    /// Returns true once the API server has served the kind. The condition stays true from then on.
    pub fn is_established(&self) -> bool {
        let mut conditions = self.status.conditions.iter().flatten();
        conditions.any(|condition| condition.kind == "Established" && condition.status == "True")
    }

    /// The kind in all versions that are served.
    pub(super) fn kinds(&self) -> impl Iterator<Item = Kind> {
        let served = self.spec.versions.iter().filter(|version| version.served);
        served.map(|version| self.in_version(&version.name))
    }
}
