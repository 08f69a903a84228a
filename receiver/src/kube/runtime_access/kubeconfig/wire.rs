//! Wire format of the kubeconfig: only the fields that are used or rejected. Of fields that would make a client act on
//! the receiver's own machine, only the presence is parsed.

use std::fmt;

use serde::{Deserialize, Deserializer, de::IgnoredAny};

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(super) struct Kubeconfig {
    #[serde(deserialize_with = "nullable")]
    pub(super) clusters: Vec<NamedCluster>,
    #[serde(deserialize_with = "nullable")]
    pub(super) users: Vec<NamedUser>,
    #[serde(deserialize_with = "nullable")]
    pub(super) contexts: Vec<NamedContext>,
    pub(super) current_context: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct NamedCluster {
    #[serde(deserialize_with = "nullable")]
    pub(super) name: String,
    #[serde(deserialize_with = "nullable")]
    pub(super) cluster: Cluster,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(super) struct Cluster {
    pub(super) server: Option<String>,
    pub(super) insecure_skip_tls_verify: Option<bool>,
    pub(super) certificate_authority: Option<String>,
    pub(super) certificate_authority_data: Option<String>,
    pub(super) proxy_url: Option<String>,
    pub(super) tls_server_name: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct NamedUser {
    #[serde(deserialize_with = "nullable")]
    pub(super) name: String,
    #[serde(deserialize_with = "nullable")]
    pub(super) user: User,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(super) struct User {
    pub(super) token: Option<Hidden>,
    #[serde(rename = "tokenFile")]
    pub(super) token_file: Option<String>,
    pub(super) client_certificate: Option<String>,
    pub(super) client_certificate_data: Option<String>,
    pub(super) client_key: Option<String>,
    pub(super) client_key_data: Option<Hidden>,
    pub(super) username: Option<IgnoredAny>,
    pub(super) password: Option<IgnoredAny>,
    pub(super) exec: Option<IgnoredAny>,
    pub(super) auth_provider: Option<IgnoredAny>,
    #[serde(rename = "as")]
    pub(super) impersonate: Option<IgnoredAny>,
    pub(super) as_uid: Option<IgnoredAny>,
    pub(super) as_groups: Option<IgnoredAny>,
    pub(super) as_user_extra: Option<IgnoredAny>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct NamedContext {
    #[serde(deserialize_with = "nullable")]
    pub(super) name: String,
    #[serde(deserialize_with = "nullable")]
    pub(super) context: Context,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Context {
    pub(super) cluster: Option<String>,
    pub(super) user: Option<String>,
}

/// A text that `Debug` hides.
#[derive(Deserialize)]
#[serde(transparent)]
pub(super) struct Hidden(pub(super) String);

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

/// Accepts `null`, which Go writes for empty lists and structs.
fn nullable<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
