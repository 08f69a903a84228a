//! Operator of the sample modules in `tests/modules`: brings every custom resource of one kind into a fixed state, and
//! holds its deletion by a finalizer. It acts only while its pod runs.

mod webhook;

use std::{env, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use clap::{ArgAction, Parser, ValueEnum};
use futures::StreamExt as _;
use kube::{
    Api, Client, Config, ResourceExt as _,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
    runtime::{
        controller::{Action, Controller},
        watcher,
    },
};
use serde_json::{Value, json};

use crate::webhook::Webhook;

const GROUP: &str = "operator.kyma-project.io";
const FINALIZER: &str = "sample.kyma-project.io/finalizer";
/// State of a resource whose deletion is held.
const DELETING: &str = "Deleting";
/// Pause after a refused write.
const RETRY: Duration = Duration::from_secs(1);

/// State that the operator reports of its resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
enum State {
    Ready,
    Warning,
    Error,
}

impl State {
    const fn name(self) -> &'static str {
        match self {
            Self::Ready => "Ready",
            Self::Warning => "Warning",
            Self::Error => "Error",
        }
    }
}

/// Brings every custom resource of one kind into a fixed state.
#[derive(Clone, Debug, Parser)]
struct Flags {
    /// State of every resource that is not deleted
    #[arg(long, value_enum, default_value_t = State::Ready)]
    final_state: State,
    /// Add a finalizer to every resource
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    finalizer: bool,
    /// Keep the finalizer of deleted resources
    #[arg(long)]
    hold_finalizer: bool,
    /// Version of the resources in the group operator.kyma-project.io
    #[arg(long, default_value = "v1alpha1")]
    api_version: String,
    /// Kind of the resources
    #[arg(long, default_value = "Sample")]
    kind: String,
    /// Plural of the kind
    #[arg(long, default_value = "samples")]
    plural: String,
    /// Folder with the token of the service account
    #[arg(long, env = "SERVICE_ACCOUNT_DIR", default_value = "/var/run/secrets/kubernetes.io/serviceaccount")]
    service_account_dir: PathBuf,
    /// Address of a validating webhook for the resources; without it, there is none
    #[arg(long)]
    webhook_address: Option<SocketAddr>,
    /// Folder with certificate and key of the webhook, as in a Secret of the type kubernetes.io/tls
    #[arg(long, default_value = "/etc/webhook")]
    webhook_certificate_dir: PathBuf,
}

impl Flags {
    fn resource(&self) -> ApiResource {
        let kind = GroupVersionKind::gvk(GROUP, &self.api_version, &self.kind);
        ApiResource::from_gvk_with_plural(&kind, &self.plural)
    }
}

/// Writes that a resource needs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    finalizers: Option<Vec<String>>,
    state: Option<&'static str>,
}

impl Plan {
    fn of(object: &DynamicObject, flags: &Flags) -> Self {
        let deleted = object.metadata.deletion_timestamp.is_some();
        let held = object.finalizers().iter().any(|name| name == FINALIZER);
        let others = object.finalizers().iter().filter(|name| *name != FINALIZER).cloned();
        let (finalizers, state) = match (deleted, held) {
            (true, true) if flags.hold_finalizer => (None, Some(DELETING)),
            (true, true) => (Some(others.collect()), None),
            (true, false) => (None, None),
            (false, false) if flags.finalizer => {
                (Some(others.chain([FINALIZER.to_owned()]).collect()), Some(flags.final_state.name()))
            }
            (false, _) => (None, Some(flags.final_state.name())),
        };
        let current = object.data.pointer("/status/state").and_then(Value::as_str);
        Self { finalizers, state: state.filter(|state| current != Some(state)) }
    }
}

/// Client and flags of a reconcile.
struct Context {
    client: Client,
    flags: Flags,
}

async fn reconcile(object: Arc<DynamicObject>, context: Arc<Context>) -> Result<Action, kube::Error> {
    let resource = context.flags.resource();
    let api: Api<DynamicObject> = match object.namespace() {
        Some(namespace) => Api::namespaced_with(context.client.clone(), &namespace, &resource),
        None => Api::all_with(context.client.clone(), &resource),
    };
    let name = object.name_any();
    let params = PatchParams::default();
    let plan = Plan::of(&object, &context.flags);
    if let Some(finalizers) = plan.finalizers {
        // With the version, so that a finalizer that another writer adds meanwhile is not lost.
        let metadata = json!({"finalizers": finalizers, "resourceVersion": object.resource_version()});
        api.patch(&name, &params, &Patch::Merge(json!({"metadata": metadata}))).await?;
    }
    if let Some(state) = plan.state {
        api.patch_status(&name, &params, &Patch::Merge(json!({"status": {"state": state}}))).await?;
    }
    Ok(Action::await_change())
}

/// The API server and the service account of the pod.
fn config(flags: &Flags) -> Result<Config> {
    let variable = |name: &str| env::var(name).with_context(|| format!("read the variable {name}"));
    let host = variable("KUBERNETES_SERVICE_HOST")?;
    let port = variable("KUBERNETES_SERVICE_PORT")?;
    let mut config = Config::new(format!("https://{host}:{port}").parse().context("parse the API server's address")?);
    config.root_cert_file = Some(flags.service_account_dir.join("ca.crt"));
    config.auth_info.token_file = Some(flags.service_account_dir.join("token").display().to_string());
    Ok(config)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let flags = Flags::parse();
    // An error only means that one is installed already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    if let Some(address) = flags.webhook_address {
        let webhook = Webhook::bind(address, &flags.webhook_certificate_dir).await.context("start the webhook")?;
        // Ends with the program.
        tokio::spawn(webhook.serve());
    }
    let client = Client::try_from(config(&flags)?).context("make a client")?;
    let resource = flags.resource();
    let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
    eprintln!("Watching {}.{GROUP}/{}", resource.plural, resource.version);
    Controller::new_with(api, watcher::Config::default(), resource)
        .shutdown_on_signal()
        .run(reconcile, |_, _, _| Action::requeue(RETRY), Arc::new(Context { client, flags }))
        .for_each(async |result| {
            if let Err(error) = result {
                eprintln!("Reconcile failed: {:#}", anyhow::Error::from(error));
            }
        })
        .await;
    eprintln!("Shutting down");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(object: &Value, flags: &[&str]) -> Plan {
        let object = serde_json::from_value(object.clone()).expect("an object");
        Plan::of(&object, &Flags::parse_from([&["sample-operator"], flags].concat()))
    }

    fn finalizers(names: &[&str]) -> Option<Vec<String>> {
        Some(names.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn new_resource_gets_finalizer_and_state() {
        let new = json!({"metadata": {"name": "a", "finalizers": ["other"]}});
        let both = Plan { finalizers: finalizers(&["other", FINALIZER]), state: Some("Warning") };
        assert_eq!(plan(&new, &["--final-state=Warning"]), both);
        assert_eq!(plan(&new, &["--finalizer=false"]), Plan { finalizers: None, state: Some("Ready") });
        let settled = json!({"metadata": {"name": "a", "finalizers": [FINALIZER]}, "status": {"state": "Ready"}});
        assert_eq!(plan(&settled, &[]), Plan::default());
    }

    #[test]
    fn deleted_resource_loses_the_finalizer_unless_it_is_held() {
        let at = "2026-01-01T00:00:00Z";
        let deleted = json!({"metadata": {"name": "a", "deletionTimestamp": at, "finalizers": [FINALIZER, "other"]}});
        assert_eq!(plan(&deleted, &[]), Plan { finalizers: finalizers(&["other"]), state: None });
        assert_eq!(plan(&deleted, &["--hold-finalizer"]), Plan { finalizers: None, state: Some("Deleting") });
        let released = json!({"metadata": {"name": "a", "deletionTimestamp": at, "finalizers": ["other"]}});
        assert_eq!(plan(&released, &[]), Plan::default());
    }
}
