//! Tests of layers.

use serde_json::json;

use super::*;
use crate::oci::{
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
    for path in ["./raw.yaml", "sub/raw.yaml", "a..b", "..."] {
        assert_eq!(dir(&tar(&[(path, YAML.as_bytes())])).as_deref(), Ok(YAML), "{path}");
    }
    let none = dir(&tar(&[("._raw.yaml", b"attributes")])).unwrap_err();
    assert_eq!(none, LayerError::Unpack(ArchiveError::NoFile("with YAML")));
    assert_eq!(dir(&tar(&[("raw.yaml", b"\x80")])), Err(LayerError::Encoding(0)));
    assert!(dir(YAML.as_bytes()).is_err(), "text is no archive");
}

#[test]
fn path_outside_the_archive_is_refused() {
    for path in ["/raw.yaml", "../raw.yaml", "sub/../../raw.yaml", "sub\\..\\raw.yaml", ".."] {
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
    assert_eq!(names(&list("ConfigMapList", &["a"])), ["a"]);
    assert_eq!(names("apiVersion: v1\nkind: List\n"), [""; 0]);
    let nested = format!("apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: List\n  items: [{item}]\n");
    assert_eq!(names(&nested), ["NAME"]);
    let own = "apiVersion: a/v1\nkind: AllowList\nmetadata: {name: a}\nspec: {items: [1]}\n";
    assert_eq!(names(own), ["a"], "only the member items makes a list");
}

#[test]
fn document_that_is_no_object_is_named() {
    for (text, reason) in [
        ("text", "it is a single value or a list"),
        ("[1]", "it is a single value or a list"),
        ("{}", "apiVersion is missing or not a string"),
        ("{apiVersion: 1, kind: A, metadata: {name: a}}", "apiVersion is missing or not a string"),
        ("{apiVersion: v1, metadata: {name: a}}", "kind is missing or not a string"),
        ("{apiVersion: v1, kind: A}", "metadata.name is missing or not a string"),
        ("{apiVersion: v1, kind: A, metadata: []}", "metadata.name is missing or not a string"),
        ("{apiVersion: v1, kind: A, metadata: {name: ''}}", "metadata.name is missing or not a string"),
        ("{apiVersion: v1, kind: A, metadata: {name: 1}}", "metadata.name is missing or not a string"),
        ("{apiVersion: v1, kind: A, metadata: {generateName: a-}}", "metadata.name is missing or not a string"),
        ("{apiVersion: v1, kind: A, metadata: {name: a, namespace: n}}", "metadata.namespace is not a string"),
        ("{apiVersion: v1, kind: List, items: [1]}", "it is a single value or a list"),
    ] {
        let whole = format!("{}---\n---\n{text}\n", object("a"));
        assert_eq!(documents(&whole), Err(LayerError::Object { number: 2, line: 6, reason }), "{text}");
    }
    let error = LayerError::Object { number: 2, line: 6, reason: "kind is missing or not a string" };
    assert_eq!(error.to_string(), "document 2 from line 6 on is not an object: kind is missing or not a string");
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
fn hostile_yaml_is_an_error() {
    let repeated = format!("a: &a [{}]\nb: [{}]\n", "x, ".repeat(100), "*a, ".repeat(5_000));
    for text in ["a: [", "a: *b", &repeated, &"- ".repeat(1_000)] {
        assert!(matches!(documents(text), Err(LayerError::Yaml(_))), "{:.20}", text);
    }
}
