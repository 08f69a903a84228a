use std::{collections::BTreeSet, fs, path::Path, slice};

use serde_json::{Value, json};
use strum::VariantArray as _;
use tidewatch_kit::variant::VariantName as _;

use super::*;

fn source(name: &str, text: &str) -> Source {
    Source { name: name.into(), text: text.to_owned() }
}

fn data(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/check/tests").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn options() -> CheckOptions {
    CheckOptions {
        restricted: Some(BTreeSet::from(["keda".to_owned()])),
        today: jiff::civil::date(2026, 6, 1),
        whole: false,
    }
}

fn codes(report: &Report) -> Vec<(&'static str, u64)> {
    report.findings.iter().map(|finding| (finding.code.as_str(), finding.line)).collect()
}

#[test]
fn valid_files_have_no_findings() {
    let report = check(&[source("good.yaml", &data("good.yaml"))], None, &options()).unwrap();
    assert_eq!(report.findings, []);
    let summary = Summary { files: 1, templates: 3, release_metas: 2, errors: 0, warnings: 0 };
    assert_eq!(report.summary, summary);
    assert!(report.is_clean(true));
    let read = read(&[source("good.yaml", &data("good.yaml"))]).unwrap();
    assert_eq!((read.templates.len(), read.release_metas.len()), (3, 2));
}

#[test]
fn each_mistake_has_a_position_a_code_and_advice() {
    let report = check(&[source("wrong.yaml", &data("wrong.yaml"))], None, &options()).unwrap();
    let golden: Value = serde_json::from_str(&data("wrong.json")).unwrap();
    let found = serde_json::to_value(&report).unwrap();
    assert_eq!(found, golden, "{found:#}");
    assert!(report.findings.iter().all(|finding| !finding.suggestion.is_empty()), "{report}");
    assert!(!report.is_clean(false));
    // Codes covered by other tests of this file, and that of a check of the CLI.
    let elsewhere = [
        Code::SharedObject,
        Code::Downgrade,
        Code::TooLarge,
        Code::NotRestricted,
        Code::TemplateEdited,
        Code::ManagerEdited,
        Code::VersionInUse,
        Code::ComponentChanged,
        Code::ComponentMismatch,
        Code::ChannelRemoved,
        Code::ModuleRemoved,
        Code::WithdrawnVersion,
        Code::UnknownReplacement,
        Code::WithdrawnReplacement,
    ];
    let codes: BTreeSet<_> = report.findings.iter().map(|finding| finding.code).chain(elsewhere).collect();
    let missing: Vec<_> = Code::VARIANTS.iter().copied().filter(|code| !codes.contains(code)).collect();
    assert_eq!(missing, []);
}

/// An object of the catalog as JSON.
fn object(kind: Kind, name: &str, spec: Value) -> Value {
    let mut metadata = json!({"name": name});
    if kind == Kind::Template && spec["moduleName"].is_string() {
        metadata["labels"] = json!({"operator.kyma-project.io/module-name": spec["moduleName"]});
    }
    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind.name(), "metadata": metadata, "spec": spec})
}

/// Templates 1.0.0 and 1.1.0 of a module.
fn templates() -> [Value; 2] {
    ["1.0.0", "1.1.0"].map(|version| template("keda", version, json!({})))
}

/// A valid template with these changes to its spec.
fn template(module: &str, version: &str, wrong: Value) -> Value {
    let mut spec = json!({"moduleName": module, "version": version, "descriptor": {}});
    merge(&mut spec, wrong);
    object(Kind::Template, &format!("{module}-{version}"), spec)
}

/// A release meta that is valid beside [`templates`], with these changes to its spec.
fn meta(wrong: Value) -> Value {
    let mut spec = json!({"moduleName": "keda", "ocmComponentName": "kyma-project.io/module/keda",
        "channels": [{"channel": "regular", "version": "1.0.0"}, {"channel": "fast", "version": "1.1.0"}]});
    merge(&mut spec, wrong);
    object(Kind::ReleaseMeta, "keda", spec)
}

/// Replaces members of the same name; null removes one.
fn merge(into: &mut Value, change: Value) {
    let Value::Object(change) = change else { panic!("{change}") };
    for (key, value) in change {
        match value {
            Value::Null => drop(into.as_object_mut().unwrap().remove(&key)),
            value => into[key] = value,
        }
    }
}

/// Findings on objects beside [`templates`].
fn findings_in(objects: &[Value]) -> Vec<Finding> {
    let texts = templates().iter().chain(objects).map(|object| format!("{object}\n---\n")).collect::<String>();
    let report = check(&[source("a", &texts)], None, &CheckOptions { restricted: None, ..options() }).unwrap();
    assert!(report.findings.iter().all(|finding| !finding.suggestion.is_empty()), "{report}");
    report.findings
}

#[test]
fn advice_names_the_replacement_where_possible() {
    let bare = |change: Value| {
        let mut object = meta(json!({}));
        merge(&mut object, change);
        object
    };
    let metadata = |change: Value| bare(json!({"metadata": change}));
    let selector = |requirement: Value| meta(json!({"kymaSelector": {"matchExpressions": [requirement]}}));
    let link = |link: &str| template("keda", "1.0.0", json!({"resources": [{"name": "raw", "link": link}]}));
    let state = |state: Value| {
        template("keda", "1.0.0", json!({"customStateCheck": [{"jsonPath": "a", "value": "b", "mappedState": state}]}))
    };
    let withdrawn = |withdrawal: Value| meta(json!({"versions": [{"version": "1.0.0", "withdrawal": withdrawal}]}));
    let dated = |day: &str| meta(json!({"versions": [{"version": "1.0.0", "deprecationDate": day}]}));
    let long = "x".repeat(70);
    for (object, code, advice) in [
        (template("keda", "1.2", json!({})), Code::Pattern, "write \"1.2.0\""),
        (template("keda", "v1.2.0", json!({})), Code::Pattern, "write \"1.2.0\""),
        (template("keda", "1.2.0-rc.1", json!({})), Code::Pattern, "write \"1.2.0-rc-1\""),
        (template("keda", "latest", json!({})), Code::Pattern, "write three numbers with dots"),
        (meta(json!({"moduleName": "Keda_Http"})), Code::Pattern, "write \"keda-http\""),
        (meta(json!({"ocmComponentName": "keda"})), Code::Pattern, "as kyma-project.io/module/keda"),
        (template(&long, "1.0.0", json!({})), Code::Bounds, "shorten it to 64 characters"),
        (meta(json!({"channels": [{"channel": "x", "version": "1.0.0"}]})), Code::Bounds, "write 3 characters or more"),
        (meta(json!({"moduleName": null})), Code::Required, "add moduleName: keda"),
        (meta(json!({"channels": [{"channel": "fast"}]})), Code::Required, "add version: three numbers"),
        (template("keda", "1.0.0", json!({"descriptor": null})), Code::Required, "add descriptor: an object"),
        (
            template("keda", "1.0.0", json!({"data": {"kind": "Keda"}})),
            Code::Required,
            "add the apiVersion of the object",
        ),
        (bare(json!({"spec": null})), Code::Required, "add spec with moduleName, ocmComponentName and channels"),
        (state(json!(null)), Code::Required, "add mappedState: one of \"\", \"Processing\""),
        (state(json!("ready")), Code::Enum, "write \"Ready\""),
        (state(json!("Fine")), Code::Enum, "write one of them"),
        (dated("2027/2/3"), Code::Format, "write \"2027-02-03\""),
        (dated("soon"), Code::Format, "write a day as YYYY-MM-DD, as 2027-01-31"),
        (withdrawn(json!({"date": "2027/2/3"})), Code::Format, "write \"2027-02-03\""),
        (withdrawn(json!({"replacement": "v1.1.0"})), Code::Pattern, "write \"1.1.0\""),
        (withdrawn(json!({"since": "2027-02-03"})), Code::UnknownField, "date, message"),
        (withdrawn(json!({})), Code::WithdrawnVersion, "point to 1.1.0: it is installed nowhere"),
        (withdrawn(json!({"replacement": "1.2.0"})), Code::UnknownReplacement, "name 1.1.0"),
        (withdrawn(json!({"replacement": "1.0.0"})), Code::WithdrawnReplacement, "name 1.1.0"),
        (
            meta(json!({"channels": null, "mandatory": {"version": "1.1.0"},
                "versions": [{"version": "1.1.0", "withdrawal": {"date": "2026-06-01"}}]})),
            Code::WithdrawnVersion,
            "point to another version",
        ),
        (link("example.com/raw"), Code::Format, "write \"https://example.com/raw\""),
        (link("no link"), Code::Format, "write a URI, as https://example.com/docs"),
        (meta(json!({"chanels": []})), Code::UnknownField, "perhaps channels is meant"),
        (meta(json!({"whatever": []})), Code::UnknownField, "remove it; the fields are beta, channels, "),
        (meta(json!({"beta": "true"})), Code::Type, "write true without quotes"),
        (meta(json!({"channels": {"fast": "1.0.0"}})), Code::Type, "begin each entry with a hyphen"),
        (metadata(json!({"name": "keda", "generation": "x"})), Code::Type, "keep of metadata its name"),
        (bare(json!({"metadata": null})), Code::Metadata, "write metadata.name: keda"),
        (metadata(json!({})), Code::Metadata, "write metadata.name: keda"),
        (metadata(json!({"name": 5})), Code::Type, "write metadata.name: keda"),
        (
            object(Kind::Template, "!", json!({"descriptor": {}})),
            Code::Metadata,
            "write metadata.name: <module>-<version>",
        ),
        (template("keda", "1.0.0-RC", json!({})), Code::Metadata, "write metadata.name: keda-1.0.0-rc, and in spec"),
        (metadata(json!({"name": "keda", "labels": ["a"]})), Code::Type, "write each of its fields as name: value"),
        (metadata(json!({"name": "keda", "labels": {"a b": ""}})), Code::Metadata, "write \"a-b\""),
        (metadata(json!({"name": "keda", "labels": {"!": ""}})), Code::Metadata, "write at most 63 letters"),
        (metadata(json!({"name": "keda", "labels": {"a": "b/c"}})), Code::Metadata, "write \"b-c\", or make it"),
        (metadata(json!({"name": "keda", "labels": {"a": &*long}})), Code::Metadata, "or make it an annotation"),
        (selector(json!({"key": "a", "operator": "in", "values": ["b"]})), Code::Selector, "write operator: In"),
        (
            selector(json!({"key": "a", "operator": "Like", "values": ["b"]})),
            Code::Selector,
            "write In or NotIn with values",
        ),
        (
            selector(json!({"key": "a", "operator": "In"})),
            Code::Selector,
            "add values, or write Exists, if any value of a",
        ),
        (selector(json!({"key": "a", "operator": "NotIn"})), Code::Selector, "add values, or write DoesNotExist, if a"),
        (
            selector(json!({"key": "a", "operator": "Exists", "values": ["b"]})),
            Code::Selector,
            "remove the values, or write In",
        ),
        (
            selector(json!({"key": "a", "operator": "DoesNotExist", "values": ["b"]})),
            Code::Selector,
            "remove the values, or write NotIn",
        ),
        (selector(json!({"key": "a b", "operator": "Exists"})), Code::Selector, "write \"a-b\""),
        (meta(json!({"kymaSelector": {"matchLabels": {"a": "b c"}}})), Code::Selector, "write \"b-c\""),
        (meta(json!({"kymaSelector": {}})), Code::SelectsNobody, "as matchLabels: {team: a}; or remove it"),
        (meta(json!({"channels": []})), Code::NoChannel, "add {channel: regular, version: 1.1.0}"),
        (
            meta(json!({"channels": null})),
            Code::MandatoryAndChannels,
            "add channels: [{channel: regular, version: 1.1.0}]",
        ),
        (meta(json!({"ocmComponentName": null})), Code::NoComponent, "as kyma-project.io/module/keda"),
        (dated("2026-01-01"), Code::PastDeprecation, "move regular to 1.1.0"),
        (
            object(Kind::Template, "keda-1.2.0", json!({"moduleName": "keda", "descriptor": {}})),
            Code::Nameless,
            "write version: 1.2.0",
        ),
        (
            object(Kind::Template, "keda-1.2.0", json!({"version": "1.2.0", "descriptor": {}})),
            Code::Nameless,
            "write moduleName: keda",
        ),
        (
            template("lone", "1.0.0", json!({})),
            Code::NoReleaseMeta,
            "the ModuleReleaseMeta lone, with a channel that names 1.0.0",
        ),
        (
            template("lone", "1.0.0", json!({"mandatory": true})),
            Code::NoReleaseMeta,
            "lone, whose mandatory names 1.0.0",
        ),
        (
            template("keda", "1.2.0", json!({"descriptor": {"x": "y".repeat(1 << 20)}})),
            Code::TooLarge,
            "shorten spec.descriptor, which has 1048584",
        ),
        (
            meta(json!({"versions": [{"version": "1.0.0", "deprecationMessage": "y".repeat(1 << 20)}]})),
            Code::TooLarge,
            "shorten spec.versions",
        ),
        (bare(json!({"kind": "ModuleTemplates"})), Code::OtherKind, "write kind: ModuleTemplate"),
        (bare(json!({"kind": "ConfigMap"})), Code::OtherKind, "leave it out"),
        (bare(json!({"apiVersion": "v1"})), Code::OtherKind, "write apiVersion: operator.kyma-project.io/v1beta2"),
        (
            bare(json!({"apiVersion": "operator.kyma-project.io/v1"})),
            Code::ApiVersion,
            "write apiVersion: operator.kyma-project.io/v1beta2",
        ),
        (bare(json!({"apiVersion": null})), Code::Required, "write apiVersion: operator.kyma-project.io/v1beta2"),
        (bare(json!({"kind": null})), Code::Required, "add the kind, ModuleTemplate or ModuleReleaseMeta"),
        (json!([1]), Code::Type, "write each object after a line with ---"),
    ] {
        let found = findings_in(slice::from_ref(&object));
        let is_match = |finding: &Finding| finding.code == code && finding.suggestion.contains(advice);
        assert!(found.iter().any(is_match), "{code:?} {advice:?}: {found:#?}");
    }
}

#[test]
fn valid_withdrawal_has_no_findings() {
    let withdrawal = json!({"date": "2026-06-02", "replacement": "1.1.0", "message": "it loses data"});
    let announced = json!({"versions": [{"version": "1.0.0", "withdrawal": withdrawal}]});
    assert_eq!(findings_in(&[meta(announced)]), [], "its channel may move until then");
}

#[test]
fn beta_of_a_release_meta_has_an_effect_and_internal_has_none() {
    assert_eq!(findings_in(&[meta(json!({"beta": true}))]), [], "Busola marks the module by it");
    let found = findings_in(&[meta(json!({"internal": true}))]);
    assert_eq!(
        found.iter().map(|finding| (finding.code, &*finding.path)).collect::<Vec<_>>(),
        [(Code::NoEffect, "spec.internal")]
    );
}

#[test]
fn label_of_a_template_names_its_module() {
    let found = |labels: Value, spec: Value| {
        let mut template = template("keda", "1.0.0", spec);
        template["metadata"]["labels"] = labels;
        let other = self::template("keda", "1.1.0", json!({}));
        let text = format!("{template}\n---\n{other}\n---\n{}", meta(json!({})));
        let report = check(&[source("a", &text)], None, &CheckOptions { restricted: None, ..options() }).unwrap();
        let labels = report.findings.into_iter().filter(|finding| finding.code == Code::ModuleLabel);
        labels.map(|finding| (finding.severity, finding.message)).collect::<Vec<_>>()
    };
    let label = "operator.kyma-project.io/module-name";
    let missing = format!("it lacks the label {label}, by which Busola finds the module");
    assert_eq!(found(json!({"a": "b"}), json!({})), [(Severity::Warning, missing)]);
    let other = format!("the label {label} names the module \"nats\" instead of keda");
    assert_eq!(found(json!({label: "nats"}), json!({})), [(Severity::Warning, other)]);
    assert_eq!(found(json!({label: "keda"}), json!({})), []);
    assert_eq!(found(json!({}), json!({"mandatory": true})), [], "no runtime has its template");
}

#[test]
fn unreachable_template_has_advice_to_reach_it() {
    let unreached = |objects: &[Value]| {
        let found = findings_in(objects).into_iter().filter(|finding| finding.code == Code::UnreachedTemplate);
        found.map(|finding| finding.suggestion).collect::<Vec<_>>()
    };
    let everyone = meta(json!({"channels": null, "mandatory": {"version": "1.1.0"}}));
    assert_eq!(unreached(&[everyone]), ["remove it, or let mandatory of the ModuleReleaseMeta keda name 1.0.0"]);
    let mandatory = template("keda", "1.2.0", json!({"mandatory": true}));
    let expected =
        "remove mandatory here, or give the ModuleReleaseMeta keda mandatory: {version: 1.2.0} for its channels";
    assert_eq!(unreached(&[mandatory, meta(json!({}))]), [expected]);
    let plain = template("keda", "1.2.0", json!({}));
    assert!(unreached(&[plain, meta(json!({}))])[0].starts_with("it can only be installed by its version"));
}

#[test]
fn selector_finding_names_the_invalid_requirement() {
    let requirements = json!([{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Like"}]);
    let found = findings_in(&[meta(json!({"kymaSelector": {"matchExpressions": requirements}}))]);
    assert_eq!(found[0].path, "spec.kymaSelector.matchExpressions[1]");
    let found =
        findings_in(&[meta(json!({"kymaSelector": {"matchLabels": {"a": "!"}, "matchExpressions": requirements}}))]);
    assert_eq!(found[0].path, "spec.kymaSelector", "the labels are wrong as well");
}

#[test]
fn text_report_has_one_line_per_finding() {
    let text = "apiVersion: operator.kyma-project.io/v1beta2\nkind: ModuleReleaseMeta\nmetadata: {name: keda}\nspec:\n  \
                moduleName: keda\n  ocmComponentName: kyma-project.io/module/keda\n  channels:\n  - channel: fast\n    version: 1.0.0\n";
    let report = check(&[source("a.yaml", text)], None, &CheckOptions { restricted: None, ..options() }).unwrap();
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
            "metadata": {"name": format!("keda-{version}"), "labels": {"operator.kyma-project.io/module-name": "keda"}},
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
fn channel_downgrade_is_an_error() {
    let codes = |from: &str, to: &str| {
        let before = source("before", &catalog(from, None));
        let now = source("now", &catalog(to, None));
        let report = check(&[now], Some(&[before]), &options()).unwrap();
        let moved = report.findings.iter().filter(|finding| finding.severity == Severity::Error);
        moved.map(|finding| (finding.code, finding.path.clone())).collect::<Vec<_>>()
    };
    let down = [(Code::Downgrade, "spec.channels[0].version".to_owned())];
    assert_eq!(codes("2.0.0", "1.0.0"), down);
    assert_eq!(codes("1.1.0", "1.0.0"), down);
    assert_eq!(codes("1.0.0", "2.0.0"), []);
    assert_eq!(codes("1.1.0", "1.1.0-rc"), [], "pre-release parts are not compared");
}

#[test]
fn changed_component_is_reported() {
    let before = catalog("1.0.0", None);
    let now = before.replace("kyma-project.io/module/keda", "kyma-project.io/module/keda-manager");
    let report = check(&[source("now", &now)], Some(&[source("before", &before)]), &options()).unwrap();
    let found: Vec<_> = report.findings.iter().filter(|finding| finding.code == Code::ComponentChanged).collect();
    assert!(matches!(&found[..], [one] if one.path == "spec.ocmComponentName"), "{report}");
    assert_eq!((found[0].line, found[0].severity), (9, Severity::Error));
    let same = check(&[source("now", &before)], Some(&[source("before", &before)]), &options()).unwrap();
    assert!(same.findings.iter().all(|finding| finding.code != Code::ComponentChanged), "{same}");
}

#[test]
fn component_of_a_descriptor_is_that_of_the_release_meta() {
    let described = |name: &str| template("keda", "1.1.0", json!({"descriptor": {"component": {"name": name}}}));
    let found = |objects: &[Value]| {
        let texts = objects.iter().map(|object| format!("{object}\n---\n")).collect::<String>();
        let report = check(&[source("a", &texts)], None, &CheckOptions { restricted: None, ..options() }).unwrap();
        let found = report.findings.into_iter().filter(|finding| finding.code == Code::ComponentMismatch);
        found.map(|finding| (finding.line, finding.path, finding.suggestion)).collect::<Vec<_>>()
    };
    let low = template("keda", "1.0.0", json!({}));
    assert_eq!(found(&[low.clone(), described("kyma-project.io/module/keda"), meta(json!({}))]), []);
    let expected = "keep the name kyma-project.io/module/keda in every version of the module";
    assert_eq!(
        found(&[low, described("kyma-project.io/module/keda-manager"), meta(json!({}))]),
        [(3, "spec.descriptor.component.name".to_owned(), expected.to_owned())]
    );
    assert_eq!(found(&[described("kyma-project.io/module/other")]), [], "there is no release meta");
}

/// Templates of lifecycle-manager's first form have no module and no version, but a channel.
#[test]
fn template_of_the_old_form_is_told_its_new_one() {
    let component = |name: &str| json!({"component": {"name": name, "version": "1.2.3"}});
    let old = |name: &str, labels: Value, descriptor: Value| {
        let mut template = object(Kind::Template, name, json!({"channel": "regular", "descriptor": descriptor}));
        template["metadata"]["labels"] = labels;
        template
    };
    let good = format!("{}\n---\n{}", template("keda", "1.0.0", json!({})), meta(json!({})));
    let found = |template: &Value| {
        let file = source("a", &format!("{good}\n---\n{template}"));
        let report = check(&[file], None, &CheckOptions { restricted: None, ..options() }).unwrap();
        let advice = |finding: Finding| (finding.code, finding.object, finding.suggestion);
        report.findings.into_iter().filter(|finding| finding.line == 5).map(advice).collect::<Vec<_>>()
    };
    let advice = |module: &str, version: &str| {
        format!(
            "name it {module}-{version}, write moduleName: {module} and version: {version}, remove channel, and let the \
             ModuleReleaseMeta {module} have {{channel: regular, version: {version}}} in its channels"
        )
    };
    let label = json!({"operator.kyma-project.io/module-name": "nats"});
    for (name, labels, descriptor, module, version) in [
        ("serverless-regular", Value::Null, component("kyma-project.io/module/serverless"), "serverless", "1.2.3"),
        ("old-template", label, component("kyma-project.io/module/other"), "nats", "1.2.3"),
        ("moduletemplate-btp", Value::Null, component("kyma-project.io/module/btp-operator"), "btp-operator", "1.2.3"),
        ("keda-regular", Value::Null, json!({}), "keda", "<version>"),
    ] {
        let expected = (Code::Nameless, format!("ModuleTemplate/{name}"), advice(module, version));
        assert_eq!(found(&old(name, labels, descriptor)), [expected]);
    }
}

#[test]
fn edited_template_is_an_error() {
    let found = |before: Value, now: Value| {
        let now = format!("{}\n---\n{}", template("keda", "1.0.0", json!({})), template("keda", "1.1.0", now));
        let before = template("keda", "1.1.0", before).to_string();
        let options = CheckOptions { restricted: None, ..options() };
        let report = check(&[source("now", &now)], Some(&[source("before", &before)]), &options).unwrap();
        let edits = [Code::TemplateEdited, Code::ManagerEdited];
        let found = report.findings.into_iter().filter(|finding| edits.contains(&finding.code));
        let found = found.inspect(|finding| assert_eq!(&*finding.file, "now"));
        found.map(|finding| (finding.line, finding.path, finding.severity)).collect::<Vec<_>>()
    };
    let error = |path: &str| [(3, path.to_owned(), Severity::Error)];
    let data = |replicas: u8| json!({"data": {"apiVersion": "a/v1", "kind": "Keda", "spec": {"replicas": replicas}}});
    assert_eq!(found(data(1), data(1)), []);
    assert_eq!(found(data(1), data(2)), error("spec.data"));
    assert_eq!(found(data(1), json!({})), error("spec.data"));
    assert_eq!(found(json!({}), json!({"descriptor": {"x": 1}})), error("spec.descriptor"));
    let associated = json!({"associatedResources": [{"group": "a", "version": "v1", "kind": "A"}]});
    assert_eq!(found(json!({}), associated), error("spec.associatedResources"));
    let manager = json!({"manager": {"group": "apps", "version": "v1", "kind": "Deployment", "name": "m"}});
    assert_eq!(found(json!({}), manager), [(3, "spec.manager".to_owned(), Severity::Warning)], "it may be a repair");
    let info = json!({"info": {"repository": "https://r", "documentation": "https://d"},
        "resources": [{"name": "raw", "link": "https://l"}]});
    assert_eq!(found(json!({}), info), [], "it informs users only");
    let state_check = json!([{"jsonPath": "status.x", "value": "y", "mappedState": "Ready"}]);
    assert_eq!(found(json!({}), json!({"channel": "regular", "customStateCheck": state_check})), [], "without effect");
}

#[test]
fn removal_of_a_version_in_use_is_an_error() {
    let kyma = |name: &str, pin: &str, modules: Value, accepted: Option<Value>| {
        let mut annotations = json!({format!("version.operator.kyma-project.io/{pin}"): "1.0.0"});
        if let Some(accepted) = accepted {
            annotations["operator.kyma-project.io/tidewatch-accepted-spec"] = accepted.to_string().into();
        }
        json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": name, "annotations": annotations}, "spec": {"channel": "regular", "modules": modules}})
    };
    let found = |kymas: &[Value], now: &str, whole: bool| {
        let before = kymas.iter().map(|kyma| format!("{kyma}\n---\n")).collect::<String>() + &catalog("2.0.0", None);
        let options = CheckOptions { restricted: None, whole, ..options() };
        let report = check(&[source("now", now)], Some(&[source("before", &before)]), &options).unwrap();
        let found = report.findings.into_iter().filter(|finding| finding.code == Code::VersionInUse);
        let found =
            found.inspect(|finding| assert_eq!((&*finding.file, finding.severity), ("before", Severity::Error)));
        found.map(|finding| (finding.line, finding.object, finding.message)).collect::<Vec<_>>()
    };
    let all = catalog("2.0.0", None);
    // The first template, 1.0.0, is removed.
    let less = all.split_once("---\n").unwrap().1;
    let keda = json!([{"name": "keda", "channel": "regular"}]);
    // A version in the entry of a module, which API servers prune, is no pin.
    let version = json!([{"name": "keda", "version": "1.0.0"}]);
    let accepted = |pins: Value| Some(json!({"channel": "regular", "modules": keda, "pins": pins}));
    let kymas = [
        kyma("a", "keda", keda.clone(), None),
        kyma("b", "other", json!([]), accepted(json!({"keda": "1.0.0"}))),
        kyma("c", "keda", keda.clone(), accepted(json!({"keda": "2.0.0"}))),
        kyma("d", "keda", json!([]), None),
        kyma("e", "other", version, None),
        kyma("f", "keda", json!({"no": "list"}), None),
    ];
    let message = "the template is removed, and Kymas pin its version: a, b".to_owned();
    assert_eq!(found(&kymas, less, true), [(13, "ModuleTemplate/keda-1.0.0".to_owned(), message)]);
    assert_eq!(found(&kymas, less, false), [], "nothing is removed");
    assert_eq!(found(&kymas, &all, true), []);
    assert_eq!(found(&kymas[2..], less, true), []);
    let many: Vec<_> = (0..8).map(|n| kyma(&format!("k{n}"), "keda", keda.clone(), None)).collect();
    assert!(found(&many, less, true)[0].2.ends_with("k0, k1, k2, k3, k4 and 3 more"));
    // The release meta of the files still describes it.
    let described = less.replace("\"channels\"", "\"versions\":[{\"version\":\"1.0.0\"}],\"channels\"");
    assert!(found(&[], &described, true)[0].2.contains("spec.versions of the ModuleReleaseMeta keda"));
}

#[test]
fn new_objects_are_checked_against_the_existing_ones() {
    let open = || CheckOptions { restricted: None, ..options() };
    let before = || source("before", &catalog("1.0.0", Some("1.1.0")));
    let whole = |files: &[Source], whole| check(files, Some(&[before()]), &CheckOptions { whole, ..open() }).unwrap();
    let meta = catalog("2.0.0", None).lines().last().unwrap().to_owned();
    let alone = source("now", &meta);
    assert_eq!(codes(&check(slice::from_ref(&alone), None, &open()).unwrap()), [("unknown-version", 1)]);
    assert_eq!(
        codes(&whole(slice::from_ref(&alone), false)),
        [("channel-removed", 1)],
        "its template is in the earlier state"
    );
    assert_eq!(codes(&whole(&[alone], true)), [("channel-removed", 1), ("unknown-version", 1)]);
    let gone = whole(&[], true);
    assert_eq!(codes(&gone), [("module-removed", 9)]);
    assert_eq!((&*gone.findings[0].file, gone.is_clean(false), gone.is_clean(true)), ("before", true, false));
}

#[test]
fn selector_of_an_unrestricted_module_is_reported() {
    let files = [source("good.yaml", &data("good.yaml"))];
    let found = |restricted| codes(&check(&files, None, &CheckOptions { restricted, ..options() }).unwrap());
    assert_eq!(found(Some(BTreeSet::new())), [("not-restricted", 50)]);
    assert_eq!(found(None), [], "the restricted modules are unknown");
}

#[test]
fn selector_without_effect_or_missing_is_reported() {
    let keda = Some(BTreeSet::from(["keda".to_owned()]));
    let found = |change: Value, restricted: Option<BTreeSet<String>>| {
        let files = [source("a", &format!("{}\n---\n{}", template("keda", "1.0.0", json!({})), meta(change)))];
        let report = check(&files, None, &CheckOptions { restricted, ..options() }).unwrap();
        let of_selectors = [Code::SelectsNobody, Code::NotRestricted];
        let found = report.findings.into_iter().filter(|finding| of_selectors.contains(&finding.code));
        found.map(|finding| (finding.code, finding.path, finding.message)).collect::<Vec<_>>()
    };
    let nobody = (
        Code::SelectsNobody,
        "spec.moduleName".to_owned(),
        "no Kyma sees the module: it is restricted, and has no kymaSelector".to_owned(),
    );
    assert_eq!(found(json!({}), keda.clone()), [nobody]);
    assert_eq!(found(json!({}), None), []);
    assert_eq!(found(json!({"kymaSelector": {"matchLabels": {"a": "b"}}}), keda.clone()), []);
    let mandatory =
        json!({"channels": null, "mandatory": {"version": "1.0.0"}, "kymaSelector": {"matchLabels": {"a": "b"}}});
    let ignored = (
        Code::NotRestricted,
        "spec.kymaSelector".to_owned(),
        "every runtime has a mandatory module: its selector has no effect".to_owned(),
    );
    for restricted in [None, keda, Some(BTreeSet::new())] {
        assert_eq!(found(mandatory.clone(), restricted), std::slice::from_ref(&ignored));
    }
}

#[test]
fn oversized_object_is_reported() {
    let text = catalog("1.0.0", None).replacen(
        "\"descriptor\":{}",
        &format!("\"descriptor\":{{\"x\":\"{}\"}}", "y".repeat(1 << 20)),
        1,
    );
    let report = check(&[source("a", &text)], None, &options()).unwrap();
    assert!(codes(&report).contains(&("too-large", 1)), "{:?}", codes(&report));
}

#[test]
fn parse_errors_have_a_position() {
    let broken = source("b.yaml", "a: 1\nb: [\n");
    let error = check(&[source("good", &data("good.yaml")), broken.clone()], None, &options()).unwrap_err();
    assert_eq!(&*error.file, "b.yaml");
    assert!(error.line >= 2 && error.to_string().starts_with("b.yaml:"), "{error}");
    assert!(check(&[], Some(&[broken]), &options()).is_err());
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
