//! `catalog diff` and `catalog show` against a live KCP: what they foretell is what comes.

use std::{fs, process::Output};

use super::*;
use crate::support::{run, text};

/// The command line of somebody who may read KCP.
async fn catalog(one: &One, arguments: &[&str]) -> Result<Output> {
    let kubeconfig = one.landscape.kcp().kubeconfig_path(Person::Admin);
    let kubeconfig = kubeconfig.to_str().context("a path")?;
    let whose = ["--kubeconfig", kubeconfig, "--namespace", one.landscape.namespace()];
    run("tidewatch-receiver", &[&["catalog"], arguments, &whose].concat()).await
}

/// What it says to programs, when it ends with this code.
async fn json(one: &One, arguments: &[&str], code: i32) -> Result<Value> {
    let output = catalog(one, &[arguments, &["--json"]].concat()).await?;
    assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

#[tokio::test]
async fn what_a_change_will_do_is_told_before_it_is_done() -> Tested {
    let one = One::start("foretold", &[KEDA]).await?;
    synced(&one).await?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("change.yaml");
    let file = file.to_str().context("a path")?;
    let later = template("keda", "1.2.0");
    let moved = release_meta("keda", &[("regular", "1.0.0"), ("fast", "1.2.0")]);
    fs::write(file, format!("{later}\n---\n{moved}\n"))?;

    let told = json(&one, &["diff", file], 1).await?;
    assert_eq!((&told["runtimes"], &told["affected"]), (&json!(1), &json!(1)), "{told}");
    let plain = &told["classes"][0];
    assert_eq!(plain["runtimes"], 1, "{told}");
    assert_eq!(plain["added"], json!(["moduletemplates/keda-1.2.0"]), "{told}");
    assert_eq!(plain["changed"], json!(["modulereleasemetas/keda"]), "{told}");
    assert_eq!((&plain["removed"], &told["guard"]), (&json!([]), &Value::Null), "{told}");
    let page = text(&catalog(&one, &["diff", file]).await?.stdout);
    assert!(page.contains("~ modulereleasemetas/keda\n") && page.contains("1 of 1 runtimes"), "{page}");
    assert!(!names::<ModuleTemplate>(&one).await?.contains("keda-1.2.0"), "nothing is done by telling");

    one.landscape.write_template("keda", "1.2.0").await?;
    one.landscape.write_channels("keda", &[("regular", "1.0.0"), ("fast", "1.2.0")]).await?;
    until("what was foretold", async || {
        let metas = Api::<ModuleReleaseMeta>::namespaced(one.runtime.cluster().client().await?, SKR_NAMESPACE);
        let is_moved = spec(&metas.get("keda").await?)?["channels"] == moved["spec"]["channels"];
        let is_there = names::<ModuleTemplate>(&one).await?.contains("keda-1.2.0");
        Ok((is_moved && is_there).then_some(()))
    })
    .await?;
    let told = json(&one, &["diff", file], 0).await?;
    assert_eq!(told["affected"], 0, "{told}");

    // The only runtime is more than a twentieth of all.
    fs::write(file, release_meta("keda", &[("regular", "1.0.0")]).to_string())?;
    let told = json(&one, &["diff", file], 1).await?;
    assert_eq!((&told["guard"]["runtimes"], &told["guard"]["of"]), (&json!(1), &json!(1)), "{told}");
    assert_eq!(told["guard"]["modules"], json!(["keda"]), "{told}");
    Ok(())
}

#[tokio::test]
async fn what_a_runtime_may_see_is_shown_with_the_rule_that_hides_the_rest() -> Tested {
    let one = One::start("shown-catalog", &[KEDA]).await?;
    synced(&one).await?;
    let kyma = one.runtime.name();
    let shown = json(&one, &["show", kyma], 0).await?;
    assert_eq!((&shown["kyma"], &shown["modules"][0]["module"]), (&json!(kyma), &json!("keda")), "{shown}");
    assert_eq!(shown["modules"][0]["visible"], true, "{shown}");
    assert_eq!((&shown["leftOut"], &shown["held"]), (&json!([]), &json!([])), "{shown}");

    let templates = Api::<ModuleTemplate>::namespaced(one.landscape.operator(), one.landscape.namespace());
    let beta = json!({"metadata": {"labels": {label::BETA: "true"}}});
    templates.patch("keda-1.1.0", &PatchParams::default(), &Patch::Merge(&beta)).await?;
    let shown = json(&one, &["show", kyma], 0).await?;
    let versions = shown["modules"][0]["versions"].as_array().context("versions")?;
    let rules: Vec<_> = versions.iter().map(|version| (&version["version"], &version["rule"])).collect();
    assert!(rules.contains(&(&json!("1.0.0"), &Value::Null)), "{shown}");
    assert!(rules.contains(&(&json!("1.1.0"), &json!("beta"))), "{shown}");
    let page = text(&catalog(&one, &["show", kyma]).await?.stdout);
    assert!(page.contains("keda") && page.contains("beta"), "{page}");

    let kymas = one.kcp_kymas().await?;
    kymas.patch(kyma, &PatchParams::default(), &Patch::Merge(&beta)).await?;
    let shown = json(&one, &["show", kyma], 0).await?;
    let hidden = |version: &Value| version["visible"] == false;
    assert!(!shown["modules"][0]["versions"].as_array().context("versions")?.iter().any(hidden), "{shown}");

    let nobody = catalog(&one, &["show", "nobody"]).await?;
    assert_eq!((nobody.status.code(), nobody.stdout.len()), (Some(2), 0));
    assert!(text(&nobody.stderr).contains("there is no Kyma nobody"), "{}", text(&nobody.stderr));
    Ok(())
}
