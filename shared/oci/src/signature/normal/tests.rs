//! Tests of normal forms, with vectors that others published.

use serde_json::json;

use super::*;
use crate::signature::{
    HashAlgorithm,
    testing::{document, published as published_a, resource},
};

fn digest(algorithm: Normalisation, document: &Value) -> String {
    let form = algorithm.normal_form(&Document::from(document.clone())).unwrap();
    HashAlgorithm::Sha256.digest(form.as_bytes()).to_string()
}

fn form(algorithm: Normalisation, document: &Value) -> String {
    algorithm.normal_form(&Document::from(document.clone())).unwrap()
}

/// Component `github.com/mandelsoft/ref` of the same tests, which refers to the other one.
fn published_b(algorithm: Normalisation, digest_of_a: &str) -> Value {
    let value = "54b8007913ec5a907ca69001d59518acfd106f7b02f892eabf9cae3f8b2414b4";
    document(json!({
        "name": "github.com/mandelsoft/ref", "version": "v1", "provider": "mandelsoft", "repositoryContexts": [],
        "sources": null, "resources": [resource("otherdata", "PlainText", "genericBlobDigest/v1", value)],
        "componentReferences": [{
            "name": "ref", "version": "v1", "componentName": "github.com/mandelsoft/test", "digest": {
                "hashAlgorithm": "SHA-256", "normalisationAlgorithm": algorithm.to_string(), "value": digest_of_a,
            },
        }],
    }))
}

#[test]
fn digests_are_those_of_the_reference_implementation() {
    const A_V1: &str = "01de99400030e8336020059a435cea4e7fe8f21aad4faf619da882134b85569d";
    const B_V1: &str = "5f416ec59629d6af91287e2ba13c6360339b6a0acf624af2abd2a810ce4aefce";
    const A_JCS: &str = "10ac0b3a850e1f1becf56d5d45e9742fa0a91103d25ba93cc3a509f68797e90f";
    const B_V2: &str = "1ae74420ef29436ad75133d81bceb59fa8ef1e2ce083a45b5f4baaec641a4266";
    const B_V3: &str = "766f26b09237f9647714e85fac914f115d0b4c3277b01ec00cfeb3b50a68cde9";
    for (algorithm, a, b) in
        [(Normalisation::V1, A_V1, B_V1), (Normalisation::V2, A_JCS, B_V2), (Normalisation::V3, A_JCS, B_V3)]
    {
        assert_eq!(digest(algorithm, &published_a()), a, "{algorithm}");
        assert_eq!(digest(algorithm, &published_b(algorithm, a)), b, "{algorithm}");
    }
    assert_eq!(digest(Normalisation::V4Alpha1, &published_a()), A_JCS);
}

/// Component of the OCM reference implementation's tests of normal forms.
fn introspect() -> Value {
    let resource = |name: &str, kind: &str, relation: &str, version: &str, algorithm: &str, value: &str| {
        json!({
            "name": name, "version": version, "type": kind, "relation": relation,
            "access": {"type": "localBlob", "localReference": "sha256:00", "mediaType": ""},
            "digest": {"hashAlgorithm": "SHA-256", "normalisationAlgorithm": algorithm, "value": value},
        })
    };
    let blob = "genericBlobDigest/v1";
    let artefact = "ociArtifactDigest/v1";
    let value = "6a1c7637a528ab5957ab60edf73b5298a0a03de02a96be0313ee89b22544840c";
    let mut image = resource("introspect-image", "ociImage", "local", "1.0.0", artefact, value);
    image["labels"] = json!([
        {"name": "label1", "value": "foo"},
        {"name": "label2", "value": "bar", "signing": true, "mergeAlgorithm": "test"},
    ]);
    let value = "d1187ac17793b2f5fa26175c21cabb6ce388871ae989e16ff9a38bd6b32507bf";
    let kind = "landscaper.gardener.cloud/blueprint";
    let blueprint = resource("introspect-blueprint", kind, "local", "1.0.0", blob, value);
    let value = "6229be2be7e328f74ba595d93b814b590b1aa262a1b85e49cc1492795a9e564c";
    let helm = resource("introspect-helm", "helm", "external", "0.1.0", artefact, value);
    document(json!({
        "name": "github.com/vasu1124/introspect", "version": "1.0.0", "provider": "internal", "componentReferences": null,
        "repositoryContexts": [{"type": "ociRegistry", "baseUrl": "ghcr.io/vasu1124/ocm"}],
        "resources": [image, blueprint, helm],
        "sources": [{"name": "introspect", "version": "1.0.0", "type": "git", "access": {"type": "git", "repository": "r"}}],
    }))
}

#[test]
fn form_is_that_of_the_reference_implementation() {
    let jcs = concat!(
        r#"{"component":{"componentReferences":[],"name":"github.com/vasu1124/introspect","provider":{"name":"internal"},"#,
        r#""resources":[{"digest":{"hashAlgorithm":"SHA-256","normalisationAlgorithm":"ociArtifactDigest/v1","#,
        r#""value":"6a1c7637a528ab5957ab60edf73b5298a0a03de02a96be0313ee89b22544840c"},"#,
        r#""labels":[{"name":"label2","signing":true,"value":"bar"}],"name":"introspect-image","relation":"local","#,
        r#""type":"ociImage","version":"1.0.0"},{"digest":{"hashAlgorithm":"SHA-256","#,
        r#""normalisationAlgorithm":"genericBlobDigest/v1","#,
        r#""value":"d1187ac17793b2f5fa26175c21cabb6ce388871ae989e16ff9a38bd6b32507bf"},"name":"introspect-blueprint","#,
        r#""relation":"local","type":"landscaper.gardener.cloud/blueprint","version":"1.0.0"},{"digest":{"#,
        r#""hashAlgorithm":"SHA-256","normalisationAlgorithm":"ociArtifactDigest/v1","#,
        r#""value":"6229be2be7e328f74ba595d93b814b590b1aa262a1b85e49cc1492795a9e564c"},"name":"introspect-helm","#,
        r#""relation":"external","type":"helm","version":"0.1.0"}],"#,
        r#""sources":[{"name":"introspect","type":"git","version":"1.0.0"}],"version":"1.0.0"}}"#,
    );
    for algorithm in [Normalisation::V2, Normalisation::V3, Normalisation::V4Alpha1] {
        assert_eq!(form(algorithm, &introspect()), jcs, "{algorithm}");
    }
    let entries = concat!(
        r#"[{"component":[{"componentReferences":[]},{"name":"github.com/vasu1124/introspect"},{"provider":"internal"},"#,
        r#"{"resources":[[{"digest":[{"hashAlgorithm":"SHA-256"},{"normalisationAlgorithm":"ociArtifactDigest/v1"},"#,
        r#"{"value":"6a1c7637a528ab5957ab60edf73b5298a0a03de02a96be0313ee89b22544840c"}]},{"extraIdentity":null},"#,
        r#"{"labels":[[{"name":"label2"},{"signing":true},{"value":"bar"}]]},{"name":"introspect-image"},"#,
        r#"{"relation":"local"},{"type":"ociImage"},{"version":"1.0.0"}],[{"digest":[{"hashAlgorithm":"SHA-256"},"#,
        r#"{"normalisationAlgorithm":"genericBlobDigest/v1"},"#,
        r#"{"value":"d1187ac17793b2f5fa26175c21cabb6ce388871ae989e16ff9a38bd6b32507bf"}]},{"extraIdentity":null},"#,
        r#"{"name":"introspect-blueprint"},{"relation":"local"},{"type":"landscaper.gardener.cloud/blueprint"},"#,
        r#"{"version":"1.0.0"}],[{"digest":[{"hashAlgorithm":"SHA-256"},{"normalisationAlgorithm":"ociArtifactDigest/v1"},"#,
        r#"{"value":"6229be2be7e328f74ba595d93b814b590b1aa262a1b85e49cc1492795a9e564c"}]},{"extraIdentity":null},"#,
        r#"{"name":"introspect-helm"},{"relation":"external"},{"type":"helm"},{"version":"0.1.0"}]]},"#,
        r#"{"version":"1.0.0"}]},{"meta":[{"schemaVersion":"v2"}]}]"#,
    );
    assert_eq!(form(Normalisation::V1, &introspect()), entries);
}

#[test]
fn labels_of_component_and_provider_are_those_that_sign() {
    let labels = |value: &str| json!([{"name": "volatile", "value": "x"}, {"name": "non-volatile", "value": value, "signing": true}]);
    let provider = json!({"name": "internal", "labels": labels("prov-value2")});
    let component = |provider: Value| {
        json!({"name": "github.com/vasu1124/introspect", "version": "1.0.0", "provider": provider,
            "labels": labels("comp-value2"), "componentReferences": [], "resources": [], "sources": []})
    };
    let expected = concat!(
        r#"{"component":{"componentReferences":[],"labels":[{"name":"non-volatile","signing":true,"value":"comp-value2"}],"#,
        r#""name":"github.com/vasu1124/introspect","provider":{"labels":[{"name":"non-volatile","signing":true,"#,
        r#""value":"prov-value2"}],"name":"internal"},"resources":[],"sources":[],"version":"1.0.0"}}"#,
    );
    let in_a_string = document(component(provider.to_string().into()));
    assert_eq!(form(Normalisation::V3, &in_a_string), expected);
    let entries = concat!(
        r#"[{"component":[{"componentReferences":[]},{"labels":[[{"name":"non-volatile"},{"signing":true},"#,
        r#"{"value":"comp-value2"}]]},{"name":"github.com/vasu1124/introspect"},{"provider":[{"labels":[["#,
        r#"{"name":"non-volatile"},{"signing":true},{"value":"prov-value2"}]]},{"name":"internal"}]},{"resources":[]},"#,
        r#"{"version":"1.0.0"}]},{"meta":[{"schemaVersion":"v2"}]}]"#,
    );
    assert_eq!(form(Normalisation::V1, &in_a_string), entries);
    let Value::Object(mut metadata) = component(provider) else { unreachable!() };
    metadata.retain(|name, _| !["componentReferences", "resources", "sources"].contains(&name.as_str()));
    let v3 = json!({
        "apiVersion": "ocm.software/v3alpha1", "kind": "ComponentVersion", "metadata": metadata, "spec": {},
    });
    assert_eq!(form(Normalisation::V3, &v3), expected, "the form does not depend on the schema");
    let refused = Normalisation::V1.normal_form(&Document::from(v3)).unwrap_err().to_string();
    assert!(refused.contains("v3alpha1 with the normalisation jsonNormalisation/v1"), "{refused}");
}

/// As in the reference implementation: `signing` may be a string, and of a provider only name and labels are covered.
#[test]
fn signing_label_in_a_string_and_members_of_the_provider() {
    let component = |signing: Value| {
        document(json!({
            "name": "a.bc/d", "version": "1", "provider": json!({"name": "p", "note": "x"}).to_string(), "resources": [],
            "componentReferences": [], "labels": [{"name": "l", "value": 1, "signing": signing}],
        }))
    };
    let labels = |signing: Value| {
        let form: Value = serde_json::from_str(&form(Normalisation::V3, &component(signing))).unwrap();
        assert_eq!(form["component"]["provider"], json!({"name": "p"}));
        form["component"]["labels"].clone()
    };
    assert_eq!(labels(json!("true")), json!([{"name": "l", "signing": "true", "value": 1}]));
    for signing in [json!("false"), json!("yes"), json!(1), json!(null)] {
        assert_eq!(labels(signing.clone()), Value::Null, "{signing}");
    }
}

/// Members that are empty, not covered, or covered in a form of their own.
#[test]
fn only_covered_members_are_in_the_form() {
    let element = json!({
        "name": "a", "version": "", "type": "t", "relation": "local", "access": {"type": "none"}, "srcRefs": [{}],
        "extraIdentity": {}, "labels": [], "digest": {"hashAlgorithm": "x"},
    });
    let reference = json!({
        "name": "r", "version": "1", "componentName": "c.d/e", "extraIdentity": {"x": "y"}, "digest": null,
        "labels": [{"name": "l", "value": null, "version": "", "signing": false, "merge": {"algorithm": "m"}}],
    });
    let component = document(json!({
        "name": "a.bc/d", "version": "1", "provider": "p", "creationTime": "2026-01-01T01:00:00.6+01:00",
        "resources": [element], "componentReferences": [reference], "labels": [{"name": "l", "value": 1}],
    }));
    let expected = concat!(
        r#"{"component":{"componentReferences":[{"componentName":"c.d/e","extraIdentity":{"x":"y"},"#,
        r#""labels":[{"merge":{"algorithm":"m"},"name":"l","value":null}],"name":"r","version":"1"}],"#,
        r#""creationTime":"2026-01-01T00:00:01Z","name":"a.bc/d","provider":{"name":"p"},"#,
        r#""resources":[{"name":"a","relation":"local","type":"t","version":""}],"sources":[],"version":"1"}}"#,
    );
    assert_eq!(form(Normalisation::V3, &component), expected);
    let entries = form(Normalisation::V1, &component);
    assert!(!entries.contains("merge") && !entries.contains("\"sources\""), "{entries}");
}

#[test]
fn legacy_forms_distinguish_resources_of_one_identity() {
    let resource = |version: &str| json!({"name": "a", "version": version, "type": "t", "relation": "local"});
    let component = document(json!({
        "name": "a.bc/d", "version": "1", "provider": "p", "componentReferences": [], "sources": [],
        "resources": [resource("1"), resource("2"), resource("3")],
    }));
    let versions = |algorithm: Normalisation| {
        let form = form(algorithm, &component);
        ["1", "2", "3"].map(|version| form.contains(&format!(r#""extraIdentity":{{"version":"{version}"}}"#)))
    };
    assert_eq!(versions(Normalisation::V2), [true, true, false], "the last one stays as it is");
    assert_eq!(versions(Normalisation::V3), [false; 3]);
    let entries = form(Normalisation::V1, &component);
    let counts =
        [r#"{"extraIdentity":[{"version":"#, r#"{"extraIdentity":null}"#].map(|text| entries.matches(text).count());
    assert_eq!(counts, [2, 1]);
}

#[test]
fn malformed_members_are_named() {
    for (member, value) in [
        ("creationTime", json!("yesterday")),
        ("creationTime", json!(1)),
        ("labels", json!({})),
        ("sources", json!("x")),
        ("provider", json!(7)),
        ("provider", Value::Null),
    ] {
        let mut changed = introspect();
        changed["component"][member] = value;
        let refused = Normalisation::V3.normal_form(&Document::from(changed)).unwrap_err().to_string();
        assert!(refused.contains(&format!("component.{member}")), "{refused}");
    }
}
