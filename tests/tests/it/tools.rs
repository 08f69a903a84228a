//! Replay of the contracts with tools and neighbours in `tests/data/tools`, all of them against one landscape; see
//! [`crate::contracts`].

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use http::{
    Method, StatusCode,
    header::{ACCEPT, CONTENT_TYPE},
};
use http_body_util::BodyExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
    client::Body,
};
use serde_json::{Value, json};
use tidewatch_api::{
    ModuleTemplate,
    names::{SKR_NAMESPACE, label},
};
use tidewatch_testing::{control_plane::ClusterUser, progress::print_line};

use crate::{
    contracts::{self, Contract, Mismatch, Object, Place, Proof, Put, Read, Request, Step, Tool, Values, Way},
    support::{Fleet, TestResult, quick_options},
};

/// Time after which a read of a tool counts as wrong: a user looks no longer.
const SOON: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(50);
/// Attempts of a PUT with a freshly read version.
const PUTS: usize = 3;
/// The tools that come first, in this order: each continues with the modules that the one before it left.
const FIRST: [&str; 3] = ["busola", "kyma-cli", "kyma-environment-broker"];
/// The tool whose last contract deletes the Kyma.
const LAST: &str = "lifecycle-manager";

/// A landscape, and what the placeholders stand for.
struct Replay {
    fleet: Fleet,
    kcp: Client,
    user: Client,
    values: Values,
}

impl Replay {
    async fn start() -> Result<Self> {
        let fleet = Fleet::with_one_runtime("tools", quick_options()).await?;
        let landscape = &fleet.landscape;
        let runtime = &fleet.only().runtime;
        landscape.write_sample("sample", "1.0.0", "1.1.0").await?;
        for module in ["eventing", "telemetry", "application-connector", "cloud-manager", "serverless", "api-gateway"] {
            landscape.write_module(module, "1.0.0", "1.1.0").await?;
        }
        landscape.write_module("istio", "1.0.0", "1.0.0").await?;
        landscape.write_template("nats", "1.0.0").await?;
        landscape.write_channels("nats", &[("fast", "1.0.0")]).await?;
        landscape.write_module("beta-module", "1.0.0", "1.0.0").await?;
        let templates = Api::<ModuleTemplate>::namespaced(landscape.operator(), landscape.namespace());
        let beta = json!({"metadata": {"labels": {label::BETA: "true"}}});
        templates.patch("beta-module-1.0.0", &PatchParams::default(), &Patch::Merge(beta)).await?;

        let kcp = landscape.kcp().client().await?;
        let user = runtime.cluster().client_as(ClusterUser::User).await?;
        let pods = Api::<Pod>::namespaced(user.clone(), SKR_NAMESPACE);
        let pod = pods.list(&ListParams::default().labels("app=skr-webhook")).await?.items.pop();
        let mut values = Values::default();
        values.set("namespace", landscape.namespace());
        values.set("kyma", runtime.name());
        values.set("runtime-id", runtime.id().as_str());
        values.set("kyma-uid", runtime.kcp_kyma().await?.and_then(|kyma| kyma.uid()).context("the Kyma's uid")?);
        values.set("agent-pod", pod.context("the agent's pod")?.name_any());
        let cluster = runtime.cluster();
        let kubeconfig = cluster.kubeconfig_for_token(cluster.credentials().token(ClusterUser::Other));
        values.set("another-kubeconfig", encoded(&kubeconfig));
        Ok(Self { fleet, kcp, user, values })
    }

    /// Replays a contract.
    async fn replay(&self, tool: &Tool, contract: &Contract) -> Result<()> {
        let Proof::Replay { given, sends, then } = &contract.proof else { return Ok(()) };
        for step in given {
            let reached = match step {
                Step::Send(request) => self.send(tool, request).await,
                Step::Await(read) => self.hold(tool, std::slice::from_ref(read), SOON).await,
            };
            reached.context("given")?;
        }
        for request in sends {
            self.send(tool, request).await.context("sends")?;
        }
        self.hold(tool, then, SOON).await.context("then")
    }

    /// Waits until all reads hold at one time.
    async fn hold(&self, tool: &Tool, reads: &[Read], within: Duration) -> Result<()> {
        let deadline = Instant::now() + within;
        loop {
            let mut faults = Vec::new();
            for read in reads {
                match self.check(tool, read).await {
                    Ok(mismatch) => faults.extend(mismatch.map(|mismatch| mismatch.to_string())),
                    // For instance an API server that does not serve a new kind yet.
                    Err(error) => faults.push(format!("{error:#}")),
                }
            }
            if faults.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{}", faults.join("; "));
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn check(&self, tool: &Tool, read: &Read) -> Result<Option<Mismatch>> {
        let answer = self.get(&tool.objects[&read.object]).await?;
        let expected = self.values.fill_expected(&read.expected)?;
        let read = Read { object: read.object.clone(), at: self.values.fill(&read.at)?, expected };
        Ok(read.check(answer.as_ref()).err())
    }

    /// The answer to a read; `None` if there is no such object.
    async fn get(&self, object: &Object) -> Result<Option<Value>> {
        let path = self.values.fill(&object.path)?;
        if object.cluster == Place::Receiver {
            let (_, page) = self.fleet.landscape.with_receiver(async |receiver| receiver.get(&path).await).await??;
            return Ok(Some(Value::String(page)));
        }
        let (status, answer) = self.call(object.cluster, Method::GET, &path, None).await?;
        if status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        ensure!(status.is_success(), "GET {path}: {status}: {}", answer["message"]);
        Ok(Some(answer))
    }

    async fn send(&self, tool: &Tool, request: &Request) -> Result<()> {
        let object = &tool.objects[&request.object];
        if let Way::Put(put) = &request.way {
            return self.put(tool, object, put).await;
        }
        let mut path = self.values.fill(&object.path)?;
        let json = "application/json";
        let (method, content, body) = match &request.way {
            Way::Create(body) => (Method::POST, json, body.clone()),
            Way::JsonPatch(patch) => {
                let live = self.get(object).await?.context("no such object")?;
                (Method::PATCH, "application/json-patch+json", json!(contracts::resolve(patch, &live)?))
            }
            Way::MergePatch(patch) => (Method::PATCH, "application/merge-patch+json", patch.clone()),
            Way::Apply { manager, force, body } => {
                path = format!("{path}?fieldManager={manager}&force={force}");
                (Method::PATCH, "application/apply-patch+yaml", body.clone())
            }
            Way::Delete { propagation } => {
                let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation});
                (Method::DELETE, json, options)
            }
            Way::Put(_) => return Ok(()),
        };
        let body = self.values.fill_all(&body)?;
        let (status, answer) = self.call(object.cluster, method.clone(), &path, Some((content, &body))).await?;
        let is_expected = request.answer.map_or(status.is_success(), |expected| status == expected);
        ensure!(is_expected, "{method} {path}: {status}: {}", answer["message"]);
        Ok(())
    }

    /// Reads, changes and writes an object. Only a change in between may refuse the write.
    async fn put(&self, tool: &Tool, object: &Object, put: &Put) -> Result<()> {
        let path = self.values.fill(&object.path)?;
        let shape = put.knows.as_ref().map(|name| &tool.shapes[name]);
        let change: Vec<_> = put.change.iter().map(|change| self.values.fill_all(change)).collect::<Result<_, _>>()?;
        let mut last = (StatusCode::CONFLICT, Value::Null);
        for _ in 0..PUTS {
            let live = self.get(object).await?.context("no such object")?;
            let body = contracts::put(&live, shape, &change)?;
            last = self.call(object.cluster, Method::PUT, &path, Some(("application/json", &body))).await?;
            if last.0 != StatusCode::CONFLICT {
                break;
            }
        }
        ensure!(last.0.is_success(), "PUT {path}: {}: {}", last.0, last.1["message"]);
        Ok(())
    }

    async fn call(
        &self,
        place: Place,
        method: Method,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<(StatusCode, Value)> {
        let request = http::Request::builder().method(method).uri(path).header(ACCEPT, "application/json");
        let request = match body {
            Some((content, body)) => {
                request.header(CONTENT_TYPE, content).body(Body::from(body.to_string().into_bytes()))
            }
            None => request.body(Body::empty()),
        };
        let client = if place == Place::Kcp { &self.kcp } else { &self.user };
        let response = client.send(request?).await?;
        let status = response.status();
        let bytes = response.into_body().collect().await?.to_bytes();
        Ok((status, serde_json::from_slice(&bytes).unwrap_or_default()))
    }
}

/// The text as a member of a Secret's data.
fn encoded(text: &str) -> String {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    STANDARD.encode(text)
}

/// Position of a tool in the replay.
fn position(tool: &Tool) -> (usize, &str) {
    let early = FIRST.iter().position(|name| *name == tool.file);
    let rank = if tool.file == LAST { FIRST.len() + 1 } else { early.unwrap_or(FIRST.len()) };
    (rank, &tool.file)
}

#[tokio::test]
async fn contracts_with_tools_and_neighbours_hold() -> TestResult {
    let mut tools = contracts::read_all(&contracts::folder())?;
    tools.sort_by(|left, right| position(left).cmp(&position(right)));
    let replay = Replay::start().await?;
    let mut failures = Vec::new();
    for tool in &tools {
        let started = Instant::now();
        for contract in &tool.contracts {
            if let Err(error) = replay.replay(tool, contract).await {
                let failure = format!("{}: {}: {error:#}", tool.file, contract.name);
                print_line(&failure);
                failures.push(failure);
            }
        }
        print_line(&format!("{}: {} contracts in {:.1?}", tool.file, tool.contracts.len(), started.elapsed()));
    }
    assert!(failures.is_empty(), "{} contracts do not hold:\n{}", failures.len(), failures.join("\n"));
    Ok(())
}
