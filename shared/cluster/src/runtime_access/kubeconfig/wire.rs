//! Wire format of the kubeconfig: only the fields that are used or rejected. Of fields that would make a client act on
//! the receiver's own machine, only the presence is parsed. `null` and empty values, which Go writes for fields without
//! content, count as absent. Nothing here has a `Debug`, which would show tokens and keys.

use std::collections::BTreeMap;

use serde::{Deserialize, de::IgnoredAny};

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Kubeconfig {
    pub(super) clusters: Option<Vec<NamedCluster>>,
    pub(super) users: Option<Vec<NamedUser>>,
    pub(super) contexts: Option<Vec<NamedContext>>,
    pub(super) current_context: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct NamedCluster {
    pub(super) name: Option<String>,
    pub(super) cluster: Option<Cluster>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Cluster {
    pub(super) server: Option<String>,
    pub(super) insecure_skip_tls_verify: Option<bool>,
    pub(super) certificate_authority: Option<String>,
    pub(super) certificate_authority_data: Option<String>,
    pub(super) proxy_url: Option<String>,
    pub(super) tls_server_name: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct NamedUser {
    pub(super) name: Option<String>,
    pub(super) user: Option<User>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct User {
    pub(super) token: Option<String>,
    #[serde(rename = "tokenFile")]
    pub(super) token_file: Option<String>,
    pub(super) client_certificate: Option<String>,
    pub(super) client_certificate_data: Option<String>,
    pub(super) client_key: Option<String>,
    pub(super) client_key_data: Option<String>,
    pub(super) username: Option<String>,
    pub(super) password: Option<String>,
    pub(super) exec: Option<IgnoredAny>,
    pub(super) auth_provider: Option<IgnoredAny>,
    #[serde(rename = "as")]
    pub(super) impersonate: Option<String>,
    pub(super) as_uid: Option<String>,
    pub(super) as_groups: Option<Vec<IgnoredAny>>,
    pub(super) as_user_extra: Option<BTreeMap<String, IgnoredAny>>,
}

#[derive(Deserialize)]
pub(super) struct NamedContext {
    pub(super) name: Option<String>,
    pub(super) context: Option<Context>,
}

#[derive(Default, Deserialize)]
pub(super) struct Context {
    pub(super) cluster: Option<String>,
    pub(super) user: Option<String>,
}
