use std::{collections::BTreeSet, fs, path::Path, slice};

use serde_json::json;

use super::*;

fn source(name: &str, text: &str) -> Source {
    Source { name: name.into(), text: text.to_owned() }
}

fn data(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/catalog/check/tests").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn terms() -> Terms {
    Terms { restricted: Some(BTreeSet::from(["keda".to_owned()])), today: jiff::civil::date(2026, 6, 1), whole: false }
}

fn said(report: &Report) -> Vec<(&'static str, u64)> {
    report.findings.iter().map(|finding| (finding.code.as_str(), finding.line)).collect()
}

#[test]
fn nothing_is_said_of_what_is_right() {
    let report = check(&[source("good.yaml", &data("good.yaml"))], None, &terms()).unwrap();
    assert_eq!(report.findings, []);
    let summary = Summary { files: 1, templates: 3, release_metas: 2, errors: 0, warnings: 0 };
    assert_eq!(report.summary, summary);
    assert!(report.is_clean(true));
    let read = read(&[source("good.yaml", &data("good.yaml"))]).unwrap();
    assert_eq!((read.templates.len(), read.release_metas.len()), (3, 2));
}

#[test]
fn each_mistake_has_its_place_its_code_and_what_to_do() {
    let report = check(&[source("wrong.yaml", &data("wrong.yaml"))], None, &terms()).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&data("wrong.json")).unwrap();
    let found = serde_json::to_value(&report).unwrap();
    assert_eq!(found, golden, "{found:#}");
    assert!(!report.is_clean(false));
    // What the other tests of this file are about.
    let elsewhere = [Code::Downgrade, Code::TooLarge, Code::NotRestricted, Code::ChannelRemoved, Code::ModuleRemoved];
    let codes: BTreeSet<_> = report.findings.iter().map(|finding| finding.code).chain(elsewhere).collect();
    let missing: Vec<_> = Code::ALL.into_iter().filter(|code| !codes.contains(code)).collect();
    assert_eq!(missing, []);
}

#[test]
fn people_read_one_line_for_each() {
    let text = "apiVersion: operator.kyma-project.io/v1beta2\nkind: ModuleReleaseMeta\nmetadata: {name: keda}\nspec:\n  \
                moduleName: keda\n  ocmComponentName: kyma-project.io/module/keda\n  channels:\n  - channel: fast\n    version: 1.0.0\n";
    let report = check(&[source("a.yaml", text)], None, &Terms { restricted: None, ..terms() }).unwrap();
    let lines = report.to_string();
    assert_eq!(
        lines,
        "a.yaml:9:5: error[unknown-version] ModuleReleaseMeta/keda spec.channels[0].version: there is no template keda-1.0.0; \
         add it, or point to another version\n0 templates and 1 release metas in 1 files: 1 errors, 0 warnings\n"
    );
}

fn catalog(regular: &str, fast: Option<&str>) -> String {
    let mut text = String::new();
    for version in ["1.0.0", "1.1.0-rc", "1.1.0", "2.0.0"] {
        let template = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": format!("keda-{version}")},
            "spec": {"moduleName": "keda", "version": version, "descriptor": {}}});
        text.push_str(&format!("{template}\n---\n"));
    }
    let mut channels = vec![json!({"channel": "regular", "version": regular})];
    channels.extend(fast.map(|version| json!({"channel": "fast", "version": version})));
    let meta = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
        "metadata": {"name": "keda"}, "spec": {"moduleName": "keda", "channels": channels,
            "ocmComponentName": "kyma-project.io/module/keda"}});
    text + &meta.to_string()
}

#[test]
fn a_channel_must_not_move_down() {
    let codes = |from: &str, to: &str| {
        let (before, now) = (source("before", &catalog(from, None)), source("now", &catalog(to, None)));
        let report = check(&[now], Some(&[before]), &terms()).unwrap();
        let moved = report.findings.iter().filter(|finding| finding.severity == Severity::Error);
        moved.map(|finding| (finding.code, finding.path.clone())).collect::<Vec<_>>()
    };
    let down = [(Code::Downgrade, "spec.channels[0].version".to_owned())];
    assert_eq!(codes("2.0.0", "1.0.0"), down);
    assert_eq!(codes("1.1.0", "1.0.0"), down);
    assert_eq!(codes("1.0.0", "2.0.0"), []);
    assert_eq!(codes("1.1.0", "1.1.0-rc"), [], "runtimes do not look at what follows the numbers");
}

#[test]
fn what_is_new_is_judged_beside_what_is_there() {
    let before = || source("before", &catalog("1.0.0", Some("1.1.0")));
    let whole = |files: &[Source], whole| check(files, Some(&[before()]), &Terms { whole, ..terms() }).unwrap();
    let meta = catalog("2.0.0", None).lines().last().unwrap().to_owned();
    let alone = source("now", &meta);
    assert_eq!(said(&check(slice::from_ref(&alone), None, &terms()).unwrap()), [("unknown-version", 1)]);
    assert_eq!(said(&whole(slice::from_ref(&alone), false)), [("channel-removed", 1)], "its template is there");
    assert_eq!(said(&whole(&[alone], true)), [("channel-removed", 1), ("unknown-version", 1)]);
    let gone = whole(&[], true);
    assert_eq!(said(&gone), [("module-removed", 9)]);
    assert_eq!((&*gone.findings[0].file, gone.is_clean(false), gone.is_clean(true)), ("before", true, false));
}

#[test]
fn a_selector_of_a_module_that_is_not_restricted_hides_it() {
    let files = [source("good.yaml", &data("good.yaml"))];
    let found = |restricted| said(&check(&files, None, &Terms { restricted, ..terms() }).unwrap());
    assert_eq!(found(Some(BTreeSet::new())), [("not-restricted", 49)]);
    assert_eq!(found(None), [], "nobody said what is restricted");
}

#[test]
fn an_object_that_is_too_large_is_named() {
    let text = catalog("1.0.0", None).replacen(
        "\"descriptor\":{}",
        &format!("\"descriptor\":{{\"x\":\"{}\"}}", "y".repeat(1 << 20)),
        1,
    );
    let report = check(&[source("a", &text)], None, &terms()).unwrap();
    assert!(said(&report).contains(&("too-large", 1)), "{:?}", said(&report));
}

#[test]
fn what_cannot_be_read_says_where() {
    let broken = source("b.yaml", "a: 1\nb: [\n");
    let error = check(&[source("good", &data("good.yaml")), broken.clone()], None, &terms()).unwrap_err();
    assert_eq!(&*error.file, "b.yaml");
    assert!(error.line >= 2 && error.to_string().starts_with("b.yaml:"), "{error}");
    assert!(check(&[], Some(&[broken]), &terms()).is_err());
    let error = read(&[source("wrong.yaml", &data("wrong.yaml"))]).unwrap_err().to_string();
    assert!(error.starts_with("wrong.yaml:1:1: error[type] ModuleTemplate/keda-1.0"), "{error}");
    assert!(
        read(&[source(
            "x",
            "apiVersion: operator.kyma-project.io/v1beta2\nkind: ModuleReleaseMeta\nspec: {moduleName: a}\n"
        )])
        .is_err()
    );
}
