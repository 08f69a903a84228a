//! ConfigMaps, Secrets and tokens for a pod's volumes and variables, read from the API server.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    time::Duration,
};

use k8s_openapi::{
    api::{
        authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
        core::v1::{ConfigMap, Pod, Secret, ServiceAccount},
    },
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{GetParams, PostParams},
};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::start_error::StartError;

/// Timeout of a request to the API server.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Part of its lifetime after which a token is renewed, in percent, as in real kubelets.
const RENEW_AFTER_PERCENT: i64 = 80;

/// A token of a volume: audience (the API server's own, if none) and requested lifetime in seconds.
pub(super) type TokenNeed = (Option<String>, i64);

/// Names of the required objects.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SourceRefs {
    pub(super) maps: BTreeSet<String>,
    pub(super) secrets: BTreeSet<String>,
    pub(super) tokens: BTreeSet<TokenNeed>,
}

/// The objects that were read; `None` for an object that does not exist.
#[derive(Debug, Default)]
pub(super) struct Sources {
    pub(super) maps: BTreeMap<String, Option<ConfigMap>>,
    pub(super) secrets: BTreeMap<String, Option<Secret>>,
    pub(super) tokens: BTreeMap<TokenNeed, String>,
}

/// Tokens of one pod, cached until they are due for renewal.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    held: BTreeMap<TokenNeed, (String, Timestamp)>,
    /// Value of [`super::Kubelet::renew_tokens`]'s counter at their request.
    round: u64,
}

impl SourceRefs {
    /// Reads all of them.
    pub(super) async fn read(
        &self,
        client: &Client,
        pod: &Pod,
        tokens: &mut Tokens,
        round: u64,
    ) -> Result<Sources, StartError> {
        let namespace = pod.namespace().unwrap_or_default();
        let mut sources = Sources::default();
        let maps = Api::<ConfigMap>::namespaced(client.clone(), &namespace);
        for name in &self.maps {
            sources.maps.insert(name.clone(), get(&maps, name).await?);
        }
        let secrets = Api::<Secret>::namespaced(client.clone(), &namespace);
        for name in &self.secrets {
            sources.secrets.insert(name.clone(), get(&secrets, name).await?);
        }
        if tokens.round != round {
            *tokens = Tokens { round, ..Tokens::default() };
        }
        for need in &self.tokens {
            sources.tokens.insert(need.clone(), tokens.get(client, pod, need).await?);
        }
        Ok(sources)
    }
}

/// Reads from the API server's watch cache, as consistent as a real kubelet's watches.
async fn get<K>(api: &Api<K>, name: &str) -> Result<Option<K>, StartError>
where
    K: Resource + Clone + Debug + DeserializeOwned,
{
    let cached = GetParams::any();
    match timeout(REQUEST_TIMEOUT, api.get_with(name, &cached)).await {
        Ok(Ok(object)) => Ok(Some(object)),
        Ok(Err(kube::Error::Api(status))) if status.is_not_found() => Ok(None),
        Ok(Err(error)) => Err(StartError::Refused(Box::new(error))),
        Err(_) => Err(StartError::Timeout),
    }
}

impl Tokens {
    async fn get(&mut self, client: &Client, pod: &Pod, need: &TokenNeed) -> Result<String, StartError> {
        let now = Timestamp::now();
        if let Some((token, due)) = self.held.get(need)
            && *due > now
        {
            return Ok(token.clone());
        }
        let (token, due) = request(client, pod, need, now).await?;
        self.held.insert(need.clone(), (token.clone(), due));
        Ok(token)
    }
}

/// Requests a token that is bound to the pod; returns it with the time of its renewal.
async fn request(
    client: &Client,
    pod: &Pod,
    (audience, seconds): &TokenNeed,
    now: Timestamp,
) -> Result<(String, Timestamp), StartError> {
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
    };
    let spec = TokenRequestSpec {
        audiences: audience.iter().cloned().collect(),
        expiration_seconds: Some(*seconds),
        bound_object_ref: Some(bound),
    };
    let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref()).unwrap_or("default");
    let accounts = Api::<ServiceAccount>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let request = TokenRequest { spec, ..TokenRequest::default() };
    let params = PostParams::default();
    let response = timeout(REQUEST_TIMEOUT, accounts.create_token_request(account, &params, &request)).await;
    let answer = response.map_err(|_| StartError::Timeout)?.map_err(|error| StartError::Refused(Box::new(error)))?;
    let status = answer.status.ok_or_else(|| StartError::NotFound("token", account.to_owned()))?;
    let life = status.expiration_timestamp.0.duration_since(now).as_secs();
    let due = now + SignedDuration::from_secs(life * RENEW_AFTER_PERCENT / 100);
    Ok((status.token, due))
}
