//! The commands `catalog diff` and `catalog show` against a live KCP, with a check that their predictions come true,
//! and `catalog check` without a cluster.

use std::{fs, process::Output};

use super::*;
use crate::support::{run, run_with_input, text};

/// Runs a catalog command with a kubeconfig that may read KCP.
async fn catalog(setup: &SingleRuntime, arguments: &[&str]) -> Result<Output> {
    let kubeconfig = setup.landscape.kcp().kubeconfig_path(ClusterUser::Admin);
    let kubeconfig = kubeconfig.to_str().context("a path")?;
    let whose = ["--kubeconfig", kubeconfig, "--namespace", setup.landscape.namespace()];
    run("tidewatch", &[&["catalog"], arguments, &whose].concat()).await
}

/// Runs a catalog command that must end with this exit code, and returns its JSON output.
async fn json(setup: &SingleRuntime, arguments: &[&str], code: i32) -> Result<Value> {
    let output = catalog(setup, &[arguments, &["--json"]].concat()).await?;
    assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

#[tokio::test]
async fn catalog_diff_predicts_the_effect_of_a_change() -> TestResult {
    let setup = SingleRuntime::start("foretold", &[KEDA]).await?;
    setup.runtime.start_agent().await?;
    catalog_is_synced(&setup).await?;
    setup.runtime.select(&["keda"]).await?;
    version_becomes(&setup, "1.0.0").await?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("change.yaml");
    let file = file.to_str().context("a path")?;
    let later = template("keda", "1.2.0");
    let moved = release_meta("keda", &[("regular", "1.0.0"), ("fast", "1.2.0")]);
    fs::write(file, format!("{later}\n---\n{moved}\n"))?;

    let report = json(&setup, &["diff", file], 1).await?;
    assert_eq!((&report["runtimes"], &report["affected"]), (&json!(1), &json!(1)), "{report}");
    let plain = &report["classes"][0];
    assert_eq!(plain["runtimes"], 1, "{report}");
    assert_eq!(plain["added"], json!(["moduletemplates/keda-1.2.0"]), "{report}");
    assert_eq!(plain["changed"], json!(["modulereleasemetas/keda"]), "{report}");
    assert_eq!((&plain["removed"], &report["guard"]), (&json!([]), &Value::Null), "{report}");
    assert_eq!((&report["kymas"]["total"], &report["kymas"]["effects"]), (&json!(1), &json!([])), "{report}");
    let page = text(&catalog(&setup, &["diff", file]).await?.stdout);
    assert!(page.contains("~ modulereleasemetas/keda\n") && page.contains("1 of 1 runtimes"), "{page}");
    assert!(!names::<ModuleTemplate>(&setup).await?.contains("keda-1.2.0"), "a diff changes nothing");

    setup.landscape.write_template("keda", "1.2.0").await?;
    setup.landscape.write_channels("keda", &[("regular", "1.0.0"), ("fast", "1.2.0")]).await?;
    until("the predicted objects", async || {
        let metas = Api::<ModuleReleaseMeta>::namespaced(setup.runtime.cluster().client().await?, SKR_NAMESPACE);
        let is_moved = spec(&metas.get("keda").await?)?["channels"] == moved["spec"]["channels"];
        let is_there = names::<ModuleTemplate>(&setup).await?.contains("keda-1.2.0");
        Ok((is_moved && is_there).then_some(()))
    })
    .await?;
    let report = json(&setup, &["diff", file], 0).await?;
    assert_eq!(report["affected"], 0, "{report}");

    // A template of KCP never changes.
    let mut edited = later.clone();
    edited["spec"]["descriptor"] = json!({"another": true});
    fs::write(file, edited.to_string())?;
    let output = catalog(&setup, &["check", "--live", file]).await?;
    let page = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{page}{}", text(&output.stderr));
    assert!(page.contains("error[template-edited] ModuleTemplate/keda-1.2.0 spec.descriptor"), "{page}");

    // Remove a channel: one runtime is affected, and the guard applies from four runtimes on.
    fs::write(file, release_meta("keda", &[("regular", "1.0.0")]).to_string())?;
    let report = json(&setup, &["diff", file], 1).await?;
    assert_eq!(report["classes"][0]["changed"], json!(["modulereleasemetas/keda"]), "{report}");
    assert_eq!((&report["affected"], &report["guard"]), (&json!(1), &Value::Null), "{report}");

    // Move the channel that the user follows: the module is upgraded. A version without a template is refused.
    let kyma = setup.runtime.name();
    fs::write(file, release_meta("keda", &[("regular", "1.1.0")]).to_string())?;
    let report = json(&setup, &["diff", file], 1).await?;
    let upgrade =
        json!({"module": "keda", "outcome": "upgrades", "from": "1.0.0", "to": "1.1.0", "kymas": 1, "names": [kyma]});
    assert_eq!(report["kymas"]["effects"], json!([upgrade]), "{report}");
    setup.landscape.write_channels("keda", &[("regular", "1.1.0")]).await?;
    version_becomes(&setup, "1.1.0").await?;
    fs::write(file, release_meta("keda", &[("regular", "9.9.9")]).to_string())?;
    let report = json(&setup, &["diff", file, "--limit", "0"], 1).await?;
    let refused = &report["kymas"]["effects"][0];
    assert_eq!((&refused["outcome"], &refused["names"]), (&json!("refused"), &json!([])), "{report}");
    setup.landscape.write_channels("keda", &[("regular", "9.9.9")]).await?;
    until("the predicted message", async || {
        let status = setup.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status).unwrap_or_default();
        let message = status.modules.iter().flatten().next().and_then(|module| module.message.clone());
        Ok((message.as_deref() == refused["message"].as_str()).then_some(()))
    })
    .await?;
    assert_eq!(installed_version(&setup).await?.as_deref(), Some("1.1.0"));
    Ok(())
}

#[tokio::test]
async fn catalog_show_lists_visible_modules_and_the_rules_that_hide_others() -> TestResult {
    let setup = SingleRuntime::start("shown-catalog", &[KEDA]).await?;
    catalog_is_synced(&setup).await?;
    let kyma = setup.runtime.name();
    let visible = json(&setup, &["show", kyma], 0).await?;
    assert_eq!((&visible["kyma"], &visible["modules"][0]["module"]), (&json!(kyma), &json!("keda")), "{visible}");
    assert_eq!(visible["modules"][0]["visible"], true, "{visible}");
    assert_eq!((&visible["leftOut"], &visible["held"]), (&json!([]), &json!([])), "{visible}");

    let templates = Api::<ModuleTemplate>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    let beta = json!({"metadata": {"labels": {label::BETA: "true"}}});
    templates.patch("keda-1.1.0", &PatchParams::default(), &Patch::Merge(&beta)).await?;
    let visible = json(&setup, &["show", kyma], 0).await?;
    let versions = visible["modules"][0]["versions"].as_array().context("versions")?;
    let rules: Vec<_> = versions.iter().map(|version| (&version["version"], &version["rule"])).collect();
    assert!(rules.contains(&(&json!("1.0.0"), &Value::Null)), "{visible}");
    assert!(rules.contains(&(&json!("1.1.0"), &json!("beta"))), "{visible}");
    let page = text(&catalog(&setup, &["show", kyma]).await?.stdout);
    assert!(page.contains("keda") && page.contains("beta"), "{page}");

    let kymas = setup.kcp_kymas().await?;
    kymas.patch(kyma, &PatchParams::default(), &Patch::Merge(&beta)).await?;
    let visible = json(&setup, &["show", kyma], 0).await?;
    let hidden = |version: &Value| version["visible"] == false;
    assert!(!visible["modules"][0]["versions"].as_array().context("versions")?.iter().any(hidden), "{visible}");

    let unknown = catalog(&setup, &["show", "unknown"]).await?;
    assert_eq!((unknown.status.code(), unknown.stdout.len()), (Some(2), 0));
    assert!(text(&unknown.stderr).contains("there is no Kyma unknown"), "{}", text(&unknown.stderr));
    Ok(())
}

/// Runs `catalog check` with this input; returns exit code, standard output and standard error.
async fn check(arguments: &[&str], input: &str) -> Result<(Option<i32>, String, String)> {
    let output = run_with_input("tidewatch", &[&["catalog", "check"], arguments].concat(), input).await?;
    Ok((output.status.code(), text(&output.stdout), text(&output.stderr)))
}

#[tokio::test]
async fn catalog_check_exits_with_the_documented_code() -> TestResult {
    let dir = tempfile::tempdir()?;
    let write = |name: &str, objects: &[Value]| {
        let path = dir.path().join(name);
        fs::write(&path, objects.iter().map(|object| format!("{object}\n---\n")).collect::<String>())?;
        Ok::<_, anyhow::Error>(path.to_str().context("a path")?.to_owned())
    };
    let low = template("keda", "1.0.0");
    let high = template("keda", "1.1.0");
    let both = [("regular", "1.0.0"), ("fast", "1.1.0")];
    let good = write("good.yaml", &[low.clone(), high.clone(), release_meta("keda", &both)])?;
    // A template that no channel names yields a warning, a channel without a template an error.
    let warned = write("warned.yaml", &[low.clone(), high.clone(), release_meta("keda", &both[..1])])?;
    let wrong = write("wrong.yaml", &[low, release_meta("keda", &both)])?;

    let (code, out, err) = check(&[&good], "").await?;
    assert_eq!(
        (code, out.as_str()),
        (Some(0), "2 templates and 1 release metas in 1 files: 0 errors, 0 warnings\n"),
        "{err}"
    );
    let (code, out, _) = check(&[&good, "--json", "--deny-warnings"], "").await?;
    let report: Value = serde_json::from_str(&out)?;
    assert_eq!((code, &report["findings"], &report["summary"]["templates"]), (Some(0), &json!([]), &json!(2)));

    let (code, out, _) = check(&[&warned], "").await?;
    assert!(code == Some(0) && out.contains("warning[unreached-template]"), "{code:?} {out}");
    let (code, denied, _) = check(&[&warned, "--deny-warnings"], "").await?;
    assert_eq!((code, denied), (Some(1), out), "the findings are the same");

    let (code, out, _) = check(&[&wrong], "").await?;
    assert!(
        code == Some(1) && out.starts_with(&format!("{wrong}:3:")) && out.contains("error[unknown-version]"),
        "{code:?} {out}"
    );
    let (code, out, _) = check(&["--json", "-"], &fs::read_to_string(&wrong)?).await?;
    let report: Value = serde_json::from_str(&out)?;
    let found = &report["findings"][0];
    assert_eq!((code, &found["file"], &found["line"]), (Some(1), &json!("-"), &json!(3)), "{report:#}");
    assert_eq!((&found["code"], &found["severity"]), (&json!("unknown-version"), &json!("error")), "{report:#}");
    assert_eq!((&report["summary"]["errors"], &report["summary"]["files"]), (&json!(1), &json!(1)), "{report:#}");

    // The former state comes from a file of its own, or from standard input as in a pipeline.
    let (code, out, _) =
        check(&[&good, "--against", "-"], &release_meta("keda", &[("fast", "2.0.0")]).to_string()).await?;
    assert!(code == Some(1) && out.contains("error[downgrade]"), "{code:?} {out}");
    let (code, out, _) = check(&[&warned, "--against", &good, "--whole"], "").await?;
    assert!(code == Some(0) && out.contains("warning[channel-removed]"), "{code:?} {out}");

    let missing = dir.path().join("missing.yaml");
    let missing = missing.to_str().context("a path")?;
    for (arguments, input, words) in [
        (&["-"][..], "a: [\n", "-:"),
        (&["-", "-"], "", "can be read only once"),
        (&["--json", &good, missing], "", "missing.yaml"),
        (&[], "", "FILE"),
        (&[&good, "--whole"], "", "--against"),
    ] {
        let (code, out, err) = check(arguments, input).await?;
        assert_eq!((code, out.as_str()), (Some(2), ""), "{arguments:?}: {err}");
        assert!(err.contains(words), "{arguments:?}: {err}");
    }
    Ok(())
}
