//! Tests of layers.

use serde_json::json;

use super::*;
use crate::{
    archive::fixture::{gzip, tar},
    excerpt::Excerpt,
};

const YAML: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n";

fn dir(content: &[u8]) -> Result<String, LayerError> {
    yaml_text(LayerKind::Dir, content)
}

fn plain(content: &[u8]) -> Result<String, LayerError> {
    yaml_text(LayerKind::Plain, content)
}

#[test]
fn plain_layer_is_its_text() {
    assert_eq!(plain(YAML.as_bytes()).as_deref(), Ok(YAML));
    assert_eq!(plain(&gzip(YAML.as_bytes())).as_deref(), Ok(YAML));
    assert_eq!(plain(b"a: \xff"), Err(LayerError::Encoding(3)));
    assert!(matches!(plain(&gzip(YAML.as_bytes())[..20]), Err(LayerError::Unpack(ArchiveError::Unpack(_)))));
}

#[test]
fn archive_layer_is_its_first_file() {
    let archive =
        tar(&[("._raw.yaml", b"attributes"), ("sub/._x", b"attributes"), ("raw.yaml", YAML.as_bytes()), ("z", b"")]);
    assert_eq!(dir(&archive).as_deref(), Ok(YAML));
    assert_eq!(dir(&gzip(&archive)).as_deref(), Ok(YAML));
    for path in ["./raw.yaml", "/raw.yaml", "//sub/raw.yaml", "sub/raw.yaml", "sub/../raw.yaml", "a..b", "..."] {
        assert_eq!(dir(&tar(&[(path, YAML.as_bytes())])).as_deref(), Ok(YAML), "{path}");
    }
    let none = dir(&tar(&[("._raw.yaml", b"attributes")])).unwrap_err();
    assert_eq!(none, LayerError::Unpack(ArchiveError::NoFile("with YAML")));
    assert_eq!(dir(&tar(&[("raw.yaml", b"\x80")])), Err(LayerError::Encoding(0)));
    assert!(dir(YAML.as_bytes()).is_err(), "text is no archive");
}

#[test]
fn path_outside_the_archive_is_refused() {
    for path in ["../raw.yaml", "/../raw.yaml", "sub/../../raw.yaml", "..", "sub/.."] {
        let archive = tar(&[(path, YAML.as_bytes()), ("raw.yaml", YAML.as_bytes())]);
        assert_eq!(dir(&archive), Err(LayerError::Unpack(ArchiveError::Path(Excerpt::of(path)))));
    }
}

#[test]
fn sizes_are_bounded() {
    assert_eq!(plain(&vec![b' '; MAX_STORED_BYTES + 1]), Err(LayerError::TooLarge(MAX_STORED_BYTES + 1)));
    let bomb = gzip(&vec![0; MAX_BYTES + 1]);
    assert!(bomb.len() < 1 << 20);
    for kind in [LayerKind::Dir, LayerKind::Plain] {
        let read = yaml_text(kind, &bomb);
        assert!(read.is_err(), "{kind:?}");
    }
    assert_eq!(plain(&bomb), Err(LayerError::Unpack(ArchiveError::TooLarge(MAX_BYTES))));
}

fn names(text: &str) -> Vec<String> {
    let name = |object: &serde_json::Value| object["metadata"]["name"].as_str().unwrap().to_owned();
    documents(text).unwrap().iter().map(name).collect()
}

fn object(name: &str) -> String {
    format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\n")
}

#[test]
fn documents_become_objects_in_their_order() {
    let text = format!("# head\n---\n{}---\n---\n# comment\n---\n{}", object("b"), object("a"));
    assert_eq!(names(&text), ["b", "a"]);
    assert_eq!(documents(""), Ok(Vec::new()));
    let text = "{apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {mode: 0644, flag: on, size: 2.0}}";
    assert_eq!(documents(text).unwrap()[0]["spec"], json!({"mode": 420, "flag": true, "size": 2}));
}

#[test]
fn lists_are_expanded() {
    let item = "{apiVersion: v1, kind: ConfigMap, metadata: {name: NAME}}";
    let list = |kind: &str, items: &[&str]| {
        let items: Vec<_> = items.iter().map(|name| item.replace("NAME", name)).collect();
        format!("apiVersion: v1\nkind: {kind}\nitems: [{}]\n", items.join(", "))
    };
    assert_eq!(names(&format!("{}---\n{}", list("List", &["a", "b"]), object("c"))), ["a", "b", "c"]);
    for kind in ["ConfigMapList", "Samples"] {
        assert_eq!(names(&list(kind, &["a"])), ["a"], "{kind}");
    }
    for empty in ["kind: List\n", "kind: List\nitems: []\n", "kind: RoleList\nitems: ~\n", "kind: Sample\nitems: ~\n"] {
        assert_eq!(names(&format!("apiVersion: v1\n{empty}")), [""; 0], "{empty}");
    }
    let nested = format!("apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: List\n  items: [{item}]\n");
    assert_eq!(names(&nested), ["NAME"]);
    for own in ["spec: {items: [1]}", "items: {a: 1}", "items: text"] {
        let text = format!("apiVersion: a/v1\nkind: AllowList\nmetadata: {{name: a}}\n{own}\n");
        assert_eq!(names(&text), ["a"], "only a list in the member items makes a list");
    }
}

#[test]
fn items_have_the_kind_of_their_list() {
    let text = "apiVersion: rbac.authorization.k8s.io/v1\nkind: RoleList\nitems:\n- metadata: {name: a}\n\
        - {apiVersion: '', kind: ~, metadata: {name: b}}\n- {apiVersion: v1, kind: Secret, metadata: {name: c}}\n";
    let kinds: Vec<_> =
        documents(text).unwrap().iter().map(|it| (it["apiVersion"].clone(), it["kind"].clone())).collect();
    let role = || (json!("rbac.authorization.k8s.io/v1"), json!("Role"));
    assert_eq!(kinds, [role(), role(), (json!("v1"), json!("Secret"))]);
    for (kind, item) in [("List", "{metadata: {name: a}}"), ("RoleList", "{kind: Role, metadata: {name: a}}")] {
        let text = format!("apiVersion: v1\nkind: {kind}\nitems: [{item}]\n");
        assert!(matches!(documents(&text), Err(LayerError::Object { .. })), "{text}");
    }
}

/// The message without the place of the document.
fn reason(error: &LayerError) -> String {
    let LayerError::Object { place, .. } = error else { panic!("{error}") };
    assert_eq!((place.document, place.line), (2, 6));
    let place = "document 2 from line 6 on";
    error.to_string().strip_prefix(place).unwrap().trim_start_matches([',', ':', ' ']).to_owned()
}

#[test]
fn document_that_is_no_object_is_named() {
    let generated = "metadata.name is missing, and generateName would make another object at each application";
    for (text, expected) in [
        ("text", "it is a single value or a list instead of an object"),
        ("[1]", "it is a single value or a list instead of an object"),
        ("{}", "apiVersion is missing or not a string"),
        (
            "{apiVersion: 1, kind: A, metadata: {name: a}}",
            r#"kind "A", name "a": apiVersion is missing or not a string"#,
        ),
        ("{apiVersion: v1, metadata: {name: a}}", r#"name "a": kind is missing or not a string"#),
        ("{apiVersion: v1, kind: A}", r#"kind "A": metadata.name is missing or not a string"#),
        ("{apiVersion: v1, kind: A, metadata: []}", r#"kind "A": metadata.name is missing or not a string"#),
        ("{apiVersion: v1, kind: A, metadata: {name: ''}}", r#"kind "A": metadata.name is missing or not a string"#),
        ("{apiVersion: v1, kind: A, metadata: {name: 1}}", r#"kind "A": metadata.name is missing or not a string"#),
        (
            "{apiVersion: v1, kind: A, metadata: {generateName: a-}}",
            &*format!(r#"kind "A", generateName "a-": {generated}"#),
        ),
        (
            "{apiVersion: v1, kind: A, metadata: {name: a, namespace: n}}",
            r#"kind "A", name "a": metadata.namespace is not a string"#,
        ),
        ("{apiVersion: v1, items: []}", "kind is missing or not a string"),
        ("{apiVersion: v1, kind: List, items: [1]}", "item 1: it is a single value or a list instead of an object"),
        (
            "{apiVersion: v1, kind: List, items: [{kind: List, items: []}, {kind: List, items: [{kind: A}]}]}",
            r#"item 2.1, kind "A": apiVersion is missing or not a string"#,
        ),
        (
            "{apiVersion: v1, kind: AList, items: [{metadata: {generateName: a-}}]}",
            &*format!(r#"item 1, kind "A", generateName "a-": {generated}"#),
        ),
    ] {
        let whole = format!("{}---\n---\n{text}\n", object("a"));
        assert_eq!(reason(&documents(&whole).unwrap_err()), expected, "{text}");
    }
    let long = format!("{{apiVersion: v1, kind: {}}}", "A".repeat(100_000));
    assert!(documents(&long).unwrap_err().to_string().len() < 500, "errors quote a beginning only");
}

#[test]
fn first_of_equal_objects_is_kept() {
    let object = |version: &str, kind: &str, namespace: &str, number: u8| {
        format!(
            "apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a, namespace: {namespace}}}\nnumber: {number}\n---\n"
        )
    };
    let text = [
        object("v1", "A", "ns", 1),
        object("v1", "A", "ns", 2),
        object("v2", "A", "ns", 3),
        object("v1", "B", "ns", 4),
        object("v1", "A", "m", 5),
        object("v1", "A", "''", 6),
        object("v1", "A", "~", 7),
    ];
    let numbers: Vec<_> = documents(&text.concat()).unwrap().iter().map(|object| object["number"].clone()).collect();
    assert_eq!(numbers, [1, 3, 4, 5, 6], "an empty namespace equals none");
}

#[test]
fn number_of_objects_is_bounded() {
    let objects = |count: usize| {
        let items: Vec<_> =
            (0..count).map(|name| format!("{{apiVersion: v1, kind: A, metadata: {{name: n{name}}}}}")).collect();
        format!("{{apiVersion: v1, kind: List, items: [{}]}}", items.join(", "))
    };
    assert_eq!(documents(&objects(MAX_OBJECTS)).map(|objects| objects.len()), Ok(MAX_OBJECTS));
    assert_eq!(documents(&objects(MAX_OBJECTS + 1)), Err(LayerError::TooMany));
}

#[test]
fn too_many_values_are_refused_with_the_limit_and_a_remedy() {
    let large = format!("a: [{}]\n", "1,".repeat(MAX_VALUES));
    let error = documents(&large).unwrap_err();
    assert_eq!(error, LayerError::TooManyValues { line: 1 });
    let text = error.to_string();
    assert!(text.contains(&format!("more than {MAX_VALUES} values")) && text.contains("split the module"), "{text}");
}

#[test]
fn hostile_yaml_is_an_error() {
    let repeated = format!("a: &a [{}]\nb: [{}]\n", "x, ".repeat(100), "*a, ".repeat(20_000));
    assert_eq!(documents(&repeated), Err(LayerError::TooManyValues { line: 2 }));
    for text in ["a: [", "a: *b", &"- ".repeat(1_000)] {
        assert!(matches!(documents(text), Err(LayerError::Yaml(_))), "{:.20}", text);
    }
}
