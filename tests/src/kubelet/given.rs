//! What a pod's volumes and variables are filled from, read from the API server.

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

use super::unready::Unready;

/// One question to the API server takes no longer.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// After which part of its life a token is asked for anew, in percent; that of real kubelets.
const RENEW_AFTER_PERCENT: i64 = 80;

/// A token that a volume asks for: audience (the API server's own, if none) and wanted life in seconds.
pub(super) type TokenNeed = (Option<String>, i64);

/// The names of what is needed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    pub(super) maps: BTreeSet<String>,
    pub(super) secrets: BTreeSet<String>,
    pub(super) tokens: BTreeSet<TokenNeed>,
}

/// What was found; an object that is not there is `None`.
#[derive(Debug, Default)]
pub(super) struct Given {
    pub(super) maps: BTreeMap<String, Option<ConfigMap>>,
    pub(super) secrets: BTreeMap<String, Option<Secret>>,
    pub(super) tokens: BTreeMap<TokenNeed, String>,
}

/// Tokens of one pod, held until they are due.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    held: BTreeMap<TokenNeed, (String, Timestamp)>,
    /// Of [`super::Kubelet::renew_tokens`] when they were asked for.
    round: u64,
}

impl Needs {
    /// Reads all of it.
    pub(super) async fn read(
        &self,
        client: &Client,
        pod: &Pod,
        tokens: &mut Tokens,
        round: u64,
    ) -> Result<Given, Unready> {
        let namespace = pod.namespace().unwrap_or_default();
        let mut given = Given::default();
        let maps = Api::<ConfigMap>::namespaced(client.clone(), &namespace);
        for name in &self.maps {
            given.maps.insert(name.clone(), get(&maps, name).await?);
        }
        let secrets = Api::<Secret>::namespaced(client.clone(), &namespace);
        for name in &self.secrets {
            given.secrets.insert(name.clone(), get(&secrets, name).await?);
        }
        if tokens.round != round {
            *tokens = Tokens { round, ..Tokens::default() };
        }
        for need in &self.tokens {
            given.tokens.insert(need.clone(), tokens.get(client, pod, need).await?);
        }
        Ok(given)
    }
}

/// From the API server's watch cache, as a real kubelet's watches show it.
async fn get<K>(api: &Api<K>, name: &str) -> Result<Option<K>, Unready>
where
    K: Resource + Clone + Debug + DeserializeOwned,
{
    let cached = GetParams::any();
    match timeout(PATIENCE, api.get_with(name, &cached)).await {
        Ok(Ok(object)) => Ok(Some(object)),
        Ok(Err(kube::Error::Api(status))) if status.is_not_found() => Ok(None),
        Ok(Err(error)) => Err(Unready::Api(Box::new(error))),
        Err(_) => Err(Unready::Silent),
    }
}

impl Tokens {
    async fn get(&mut self, client: &Client, pod: &Pod, need: &TokenNeed) -> Result<String, Unready> {
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

/// A token that is bound to the pod, and when it is due to be renewed.
async fn request(
    client: &Client,
    pod: &Pod,
    (audience, seconds): &TokenNeed,
    now: Timestamp,
) -> Result<(String, Timestamp), Unready> {
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
    let asked = timeout(PATIENCE, accounts.create_token_request(account, &params, &request)).await;
    let answer = asked.map_err(|_| Unready::Silent)?.map_err(|error| Unready::Api(Box::new(error)))?;
    let status = answer.status.ok_or_else(|| Unready::NotFound("token", account.to_owned()))?;
    let life = status.expiration_timestamp.0.duration_since(now).as_secs();
    let due = now + SignedDuration::from_secs(life * RENEW_AFTER_PERCENT / 100);
    Ok((status.token, due))
}
