//! `catalog diff` and `catalog show` against a live KCP: what they foretell is what comes; and `catalog check`, without one.

use std::{fs, process::Output};

use super::*;
use crate::support::{run, run_fed, text};

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

    // A channel goes. The guard asks from four runtimes on.
    fs::write(file, release_meta("keda", &[("regular", "1.0.0")]).to_string())?;
    let told = json(&one, &["diff", file], 1).await?;
    assert_eq!(told["classes"][0]["changed"], json!(["modulereleasemetas/keda"]), "{told}");
    assert_eq!((&told["affected"], &told["guard"]), (&json!(1), &Value::Null), "{told}");
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

/// `catalog check` of this text: exit code, standard output, standard error.
async fn checked(arguments: &[&str], input: &str) -> Result<(Option<i32>, String, String)> {
    let output = run_fed("tidewatch-receiver", &[&["catalog", "check"], arguments].concat(), input).await?;
    Ok((output.status.code(), text(&output.stdout), text(&output.stderr)))
}

#[tokio::test]
async fn a_check_ends_with_the_code_that_a_pipeline_goes_by() -> Tested {
    let dir = tempfile::tempdir()?;
    let write = |name: &str, objects: &[Value]| {
        let path = dir.path().join(name);
        fs::write(&path, objects.iter().map(|object| format!("{object}\n---\n")).collect::<String>())?;
        Ok::<_, anyhow::Error>(path.to_str().context("a path")?.to_owned())
    };
    let (low, high) = (template("keda", "1.0.0"), template("keda", "1.1.0"));
    let both = [("regular", "1.0.0"), ("fast", "1.1.0")];
    let good = write("good.yaml", &[low.clone(), high.clone(), release_meta("keda", &both)])?;
    // A template that no channel names is worth a warning, and a channel without a template is wrong.
    let warned = write("warned.yaml", &[low.clone(), high.clone(), release_meta("keda", &both[..1])])?;
    let wrong = write("wrong.yaml", &[low, release_meta("keda", &both)])?;

    let (code, out, err) = checked(&[&good], "").await?;
    assert_eq!(
        (code, out.as_str()),
        (Some(0), "2 templates and 1 release metas in 1 files: 0 errors, 0 warnings\n"),
        "{err}"
    );
    let (code, out, _) = checked(&[&good, "--json", "--deny-warnings"], "").await?;
    let report: Value = serde_json::from_str(&out)?;
    assert_eq!((code, &report["findings"], &report["summary"]["templates"]), (Some(0), &json!([]), &json!(2)));

    let (code, out, _) = checked(&[&warned], "").await?;
    assert!(code == Some(0) && out.contains("warning[unreached-template]"), "{code:?} {out}");
    let (code, denied, _) = checked(&[&warned, "--deny-warnings"], "").await?;
    assert_eq!((code, denied), (Some(1), out), "it says the same");

    let (code, out, _) = checked(&[&wrong], "").await?;
    assert!(
        code == Some(1) && out.starts_with(&format!("{wrong}:3:")) && out.contains("error[unknown-version]"),
        "{code:?} {out}"
    );
    let (code, out, _) = checked(&["--json", "-"], &fs::read_to_string(&wrong)?).await?;
    let report: Value = serde_json::from_str(&out)?;
    let found = &report["findings"][0];
    assert_eq!((code, &found["file"], &found["line"]), (Some(1), &json!("-"), &json!(3)), "{report:#}");
    assert_eq!((&found["code"], &found["severity"]), (&json!("unknown-version"), &json!("error")), "{report:#}");
    assert_eq!((&report["summary"]["errors"], &report["summary"]["files"]), (&json!(1), &json!(1)), "{report:#}");

    // The state before stands in a file of its own, or comes in where a pipeline has it.
    let (code, out, _) =
        checked(&[&good, "--against", "-"], &release_meta("keda", &[("fast", "2.0.0")]).to_string()).await?;
    assert!(code == Some(1) && out.contains("error[downgrade]"), "{code:?} {out}");
    let (code, out, _) = checked(&[&warned, "--against", &good, "--whole"], "").await?;
    assert!(code == Some(0) && out.contains("warning[channel-removed]"), "{code:?} {out}");

    let missing = dir.path().join("missing.yaml");
    let missing = missing.to_str().context("a path")?;
    for (arguments, input, words) in [
        (&["-"][..], "a: [\n", "-:"),
        (&["-", "-"], "", "can be read once only"),
        (&["--json", &good, missing], "", "missing.yaml"),
        (&[], "", "FILE"),
        (&[&good, "--whole"], "", "--against"),
    ] {
        let (code, out, err) = checked(arguments, input).await?;
        assert_eq!((code, out.as_str()), (Some(2), ""), "{arguments:?}: {err}");
        assert!(err.contains(words), "{arguments:?}: {err}");
    }
    Ok(())
}
