//! Manifests that well-known operators publish, each as a module: installed as they are, at rest, after a restart of the
//! receiver, and removed. They are downloaded, so the run is opt-in.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    time::{Duration, Instant},
};

use tidewatch_testing::{
    control_plane::Tool,
    modules::published::{self, Published},
    progress::print_line,
};

use super::{
    corpus::{Corpus, Member, identity},
    *,
};

/// The manifests have megabytes of CRDs, which take an API server minutes on two cores.
const PATIENCE: Duration = Duration::from_mins(5);

#[tokio::test]
async fn published_manifests_are_installed_rest_and_leave_nothing() -> TestResult {
    if env::var("TIDEWATCH_PUBLISHED").is_ok_and(|value| value == "1") {
        return Ok(prove_all().await?);
    }
    print_line(
        "published manifests: not run; TIDEWATCH_PUBLISHED=1 downloads Go modules of operators and installs them",
    );
    Ok(())
}

async fn prove_all() -> Result<()> {
    let began = Instant::now();
    let kubectl = bed::shared().await?.binaries().get(Tool::Kubectl).await?;
    let mut failures = Vec::new();
    let mut objects = BTreeMap::new();
    let mut phases = vec![BTreeSet::new()];
    for published in published::list()? {
        let downloaded = published.download(&kubectl).await;
        let name = published.module_name();
        match downloaded.and_then(|()| published.objects()) {
            Ok(parsed) => {
                describe(&published, &parsed);
                objects.insert(name.clone(), parsed);
            }
            Err(error) => {
                failures.push(format!("{name}: {error:#}"));
                continue;
            }
        }
        if published.alone.is_some() {
            phases.push([name].into());
        } else {
            phases[0].insert(name);
        }
    }
    print_line(&format!("published manifests: downloaded after {:.0} s", began.elapsed().as_secs_f64()));

    let member =
        |objects: &Vec<DynamicObject>| Member { default_cr: None, manager: manager(objects), left: kept(objects) };
    let members = objects.iter().map(|(name, objects)| (name.clone(), member(objects))).collect();
    let mut corpus = Corpus::start("published", members, PATIENCE).await?;
    for names in phases {
        let before = corpus.objects().await?;
        corpus.install(names.clone()).await?;
        let inventories = corpus.inventories().await?;
        for name in &names {
            let expected = objects[name].len();
            let found = inventories.get(name).map_or(0, BTreeSet::len);
            if found != expected {
                corpus.fails(name, format_args!("{found} of {expected} objects are installed"));
            }
        }
        corpus.becomes_idle().await;
        corpus.restart_and_rest().await?;
        corpus.leave(&before).await?;
        let seconds = began.elapsed().as_secs_f64();
        print_line(&format!("published manifests: {} proven after {seconds:.0} s", names.len()));
    }
    failures.extend(corpus.failures());
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

fn describe(published: &Published, objects: &[DynamicObject]) {
    let definitions = objects.iter().filter(|object| kind(object) == "CustomResourceDefinition").count();
    let name = published.module_name();
    let version = published.version();
    print_line(&format!("{name} {version}: {} objects, {definitions} of them CRDs", objects.len()));
}

fn kind(object: &DynamicObject) -> &str {
    object.types.as_ref().map_or("", |types| &types.kind)
}

/// The first Deployment, whose pods the kubelet of the test bed reports as ready.
fn manager(objects: &[DynamicObject]) -> Option<Value> {
    let deployment = objects.iter().find(|object| kind(object) == "Deployment")?;
    let namespace = deployment.namespace().unwrap_or_else(|| "default".to_owned());
    Some(json!({"group": "apps", "version": "v1", "kind": "Deployment", "namespace": namespace,
        "name": deployment.name_any()}))
}

/// The objects with the marker of Helm, which stay as documented, and the objects that Kubernetes creates in their Namespaces.
fn kept(objects: &[DynamicObject]) -> BTreeSet<String> {
    let is_kept = |object: &&DynamicObject| {
        object.annotations().get("helm.sh/resource-policy").is_some_and(|policy| policy == "keep")
    };
    let mut kept = BTreeSet::new();
    for object in objects.iter().filter(is_kept) {
        let namespace = object.namespace().unwrap_or_default();
        kept.insert(identity(kind(object), &namespace, &object.name_any()));
        if objects.iter().any(|other| kind(other) == "Namespace" && other.name_any() == namespace) {
            kept.insert(identity("Namespace", "", &namespace));
            kept.insert(identity("ServiceAccount", &namespace, "default"));
            kept.insert(identity("ConfigMap", &namespace, "kube-root-ca.crt"));
        }
    }
    kept
}
