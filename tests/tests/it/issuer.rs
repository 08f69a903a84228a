//! The cert-manager issuer: agents get their certificates through `CertificateRequest`s, on cert-manager's real CRDs.
//! The test acts as cert-manager and signs each request as it stands.

use std::{
    path::PathBuf,
    process::Stdio,
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use k8s_openapi::{
    api::rbac::v1::{Role, RoleBinding, RoleRef, Subject},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DynamicObject, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use rcgen::{CertificateSigningRequestParams, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use serde_json::{Value, json};
use tidewatch_receiver::rights;
use tidewatch_testing::{
    bed,
    landscape::{Options, until},
};
use tidewatch_trust::Ca;
use tokio::{process::Command, time};
use tokio_util::task::AbortOnDropHandle;

use crate::support::{Fleet, TestResult, quick_options};

/// The Go module that contains the CRDs.
const MODULE: &str = "github.com/cert-manager/cert-manager@v1.19.2";
const CRD: &str = "deploy/crds/cert-manager.io_certificaterequests.yaml";

/// Fetches the CRD from the Go module proxy, like the binaries of the control plane, or takes it from the module cache.
async fn crd() -> Result<CustomResourceDefinition> {
    let output = Command::new("go")
        .args(["mod", "download", "-json", MODULE])
        .current_dir(std::env::temp_dir())
        .env("GOWORK", "off")
        .stdin(Stdio::null())
        .output();
    let output = time::timeout(Duration::from_secs(300), output).await.context("go mod download does not end")??;
    let download: Value = serde_json::from_slice(&output.stdout).context("parse the output of go mod download")?;
    let folder = PathBuf::from(download["Dir"].as_str().with_context(|| format!("no module: {download}"))?);
    let text = std::fs::read_to_string(folder.join(CRD)).context("read the CRD")?;
    serde_saphyr::from_str(&text).context("parse the CRD")
}

fn requests(kcp: Client, namespace: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("cert-manager.io", "v1", "CertificateRequest");
    Api::namespaced_with(kcp, namespace, &ApiResource::from_gvk(&kind))
}

/// Signs requests for the Issuer `tidewatch` as cert-manager would, until it is cancelled. Leaves other requests alone.
async fn sign_requests(requests: Api<DynamicObject>, issuer: Arc<Issuer<'static, KeyPair>>) {
    loop {
        for object in requests.list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default() {
            let is_new = object.data.pointer("/status/certificate").is_none();
            if is_new && let Some(chain) = sign(&object.data["spec"], &issuer) {
                let condition = json!({"type": "Ready", "status": "True", "reason": "Issued", "message": "signed",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"});
                let status = json!({"status": {"conditions": [condition], "certificate": STANDARD.encode(chain)}});
                let name = object.name_any();
                let signed = PatchParams::default();
                // A request that was deleted meanwhile needs no certificate.
                let _ = requests.patch_status(&name, &signed, &Patch::Merge(status)).await;
            }
        }
        time::sleep(Duration::from_millis(100)).await;
    }
}

fn sign(spec: &Value, issuer: &Issuer<'static, KeyPair>) -> Option<String> {
    if spec["issuerRef"] != json!({"group": "cert-manager.io", "kind": "Issuer", "name": "tidewatch"}) {
        return None;
    }
    let pem = STANDARD.decode(spec["request"].as_str()?).ok()?;
    let mut request = CertificateSigningRequestParams::from_pem(std::str::from_utf8(&pem).ok()?).ok()?;
    request.params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let seconds = spec["duration"].as_str()?.strip_suffix('s')?.parse().ok()?;
    request.params.not_before = SystemTime::now().into();
    request.params.not_after = (SystemTime::now() + Duration::from_secs(seconds)).into();
    request.params.use_authority_key_identifier_extension = true;
    Some(request.signed_by(issuer).ok()?.pem())
}

async fn grant(kcp: &Client, namespace: &str) -> Result<()> {
    let metadata = ObjectMeta { name: Some("cert-manager".to_owned()), ..ObjectMeta::default() };
    let role = Role { metadata: metadata.clone(), rules: Some(rights::cert_manager_rules()) };
    Api::namespaced(kcp.clone(), namespace).create(&PostParams::default(), &role).await?;
    let role_ref = RoleRef {
        api_group: "rbac.authorization.k8s.io".to_owned(),
        kind: "Role".to_owned(),
        name: "cert-manager".to_owned(),
    };
    let subjects = Api::<RoleBinding>::namespaced(kcp.clone(), namespace).list(&ListParams::default()).await?.items;
    let receiver: Vec<Subject> = subjects.into_iter().filter_map(|binding| binding.subjects).flatten().collect();
    let binding = RoleBinding { metadata, role_ref, subjects: Some(receiver) };
    Api::namespaced(kcp.clone(), namespace).create(&PostParams::default(), &binding).await?;
    Ok(())
}

#[tokio::test]
async fn cert_manager_issues_certificates_to_agents() -> TestResult {
    const NAME: &str = "issuer";
    let kcp = bed::shared().await?.kcp().await?;
    let crds = Api::<CustomResourceDefinition>::all(kcp.client().await?);
    let crd = crd().await?;
    crds.patch(&crd.name_any(), &PatchParams::apply("test-bed").force(), &Patch::Apply(&crd)).await?;
    let files = kcp.dir().join("landscapes").join(NAME);
    let flag = |flag: &str, file: &str| format!("--{flag}={}", files.join(file).display());
    let receiver = vec![
        "--issuer=cert-manager:Issuer/tidewatch".to_owned(),
        flag("issuer-ca", "ca.crt"),
        flag("server-ca", "ca.crt"),
        flag("tls-cert", "tls.crt"),
        flag("tls-key", "tls.key"),
    ];
    let (mut fleet, clusters) = Fleet::prepare(NAME, 1, Options { receiver, ..quick_options() }).await?;
    let client = kcp.client().await?;
    grant(&client, NAME).await?;
    let ca: &Ca = fleet.landscape.ca();
    let issuer = Issuer::from_ca_cert_pem(ca.certificate_pem(), KeyPair::from_pem(&ca.key_pem())?)?;
    let requests = requests(client, NAME);
    let _cert_manager = AbortOnDropHandle::new(tokio::spawn(sign_requests(requests.clone(), Arc::new(issuer))));
    fleet.register(clusters).await?;
    fleet.only().path_proven().await?;
    until("the Kyma in the runtime", async || fleet.only().runtime.skr_kyma().await).await?;
    fleet.only().delivers(&["keda"]).await?;
    until("all requests to be deleted", async || {
        Ok(requests.list(&ListParams::default()).await?.items.is_empty().then_some(()))
    })
    .await?;
    Ok(())
}
