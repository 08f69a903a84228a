//! Tests of component descriptors.

use serde_json::{Value, json};

use super::*;
use crate::archive::fixture::{gzip, tar};

const NAME: &str = "example.org/module/tide";
const OCM: &str = "application/vnd.ocm.software.component-descriptor.v2+yaml+tar";

/// As the OCM command line packs a module.
const V2: &str = r#"
meta:
  schemaVersion: v2
component:
  name: example.org/module/tide
  version: 1.2.0
  provider: '{"name":"example.org","labels":[{"name":"example.org/built-by","value":"tool","version":"v1"}]}'
  creationTime: "2026-01-01T00:00:00Z"
  labels:
  - {name: example.org/scan, value: enabled, version: v1}
  repositoryContexts:
  - {type: OCIRegistry, baseUrl: elsewhere.example.org, componentNameMapping: sha256-digest}
  - {type: OCIRegistry, baseUrl: reg.example.org, subPath: prod, componentNameMapping: urlPath}
  sources:
  - {name: module-sources, type: Github, version: 1.2.0, access: {type: gitHub, repoUrl: r, commit: c}}
  componentReferences: []
  resources:
  - name: manager
    version: 1.2.0
    type: ociArtifact
    relation: external
    access: {type: ociArtifact, imageReference: "reg.example.org/tide:1.2.0"}
  - name: raw-manifest
    version: 1.2.0
    type: directoryTree
    relation: local
    access:
      type: localBlob
      localReference: sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad
      mediaType: application/x-tar
    digest:
      hashAlgorithm: SHA-256
      normalisationAlgorithm: genericBlobDigest/v1
      value: ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad
  - name: default-cr
    version: 1.2.0
    type: directoryTree
    relation: local
    access: {type: localBlob, localReference: "", mediaType: application/x-tar}
signatures: []
"#;

fn expected() -> ComponentVersion {
    ComponentVersion::new(NAME, "1.2.0").unwrap()
}

fn read(content: &[u8]) -> Result<Descriptor, DescriptorError> {
    parse(OCM, content)?.descriptor(&expected())
}

fn archive(descriptor: &str) -> Vec<u8> {
    tar(&[("component-descriptor.yaml", descriptor.as_bytes())])
}

fn resource(name: &str, access: Value) -> Value {
    json!({"name": name, "version": "1.2.0", "type": "t", "relation": "local", "access": access})
}

fn blob() -> Value {
    json!({"type": "localBlob", "localReference": Digest::of(b"abc").to_string(), "mediaType": "application/x-tar"})
}

fn v2(resources: Value) -> Value {
    json!({"meta": {"schemaVersion": "v2"}, "component": {
        "name": NAME, "version": "1.2.0", "provider": "example.org", "repositoryContexts": [], "sources": [],
        "componentReferences": [], "resources": resources,
    }})
}

fn v3(resources: Value) -> Value {
    json!({"apiVersion": "ocm.software/v3alpha1", "kind": "ComponentVersion", "repositoryContexts": [],
        "metadata": {"name": NAME, "version": "1.2.0", "provider": {"name": "example.org"}},
        "spec": {"resources": resources, "sources": [], "references": []}})
}

fn read_json(descriptor: &Value) -> Result<Descriptor, DescriptorError> {
    read(descriptor.to_string().as_bytes())
}

/// Path of the member that an error is about.
fn path(result: Result<Descriptor, DescriptorError>) -> String {
    match result {
        Err(DescriptorError::Member(MemberError { path, .. })) => path,
        other => format!("{other:?}"),
    }
}

/// Sets or removes the member at a JSON pointer.
fn at(descriptor: &Value, pointer: &str, value: Option<Value>) -> Value {
    let mut changed = descriptor.clone();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = changed.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    match value {
        Some(value) => parent.insert(key.to_owned(), value),
        None => parent.remove(key),
    };
    changed
}

#[test]
fn v2_descriptor_names_layer_and_images() {
    let read = read(&archive(V2)).unwrap();
    assert_eq!((read.component.name(), read.component.version()), (NAME, "1.2.0"));
    let layer = read.raw_manifest.as_ref().unwrap();
    assert_eq!((&layer.digests[..], layer.is_tar()), (&[Digest::of(b"abc")][..], true));
    assert_eq!(read.images, ["reg.example.org/tide:1.2.0"]);
    assert_eq!(
        read.repository().to_string(),
        "component-descriptors/example.org/module/tide",
        "the last context counts"
    );
    let rows: Vec<_> = read
        .resources
        .iter()
        .map(|Resource { name, kind, relation, access, digest, .. }| {
            (&**name, &**kind, relation.to_string(), &**access, digest.is_some())
        })
        .collect();
    assert_eq!(
        rows,
        [
            ("manager", "ociArtifact", "external".to_owned(), "ociArtifact", false),
            ("raw-manifest", "directoryTree", "local".to_owned(), "localBlob", true),
            ("default-cr", "directoryTree", "local".to_owned(), "localBlob", false),
        ]
    );
    let digest = read.resources[1].digest.as_ref().unwrap();
    assert_eq!((&*digest.hash_algorithm, &*digest.normalisation_algorithm), ("SHA-256", "genericBlobDigest/v1"));
    assert_eq!(digest.value, Digest::of(b"abc").hex());
}

#[test]
fn content_decides_on_the_form() {
    let from_yaml = read(V2.as_bytes()).unwrap();
    let json = serde_json::to_string_pretty(&yaml::read(V2, MAX_VALUES).unwrap()[0].value).unwrap();
    let forms = [
        archive(V2),
        gzip(&archive(V2)),
        json.clone().into_bytes(),
        gzip(json.as_bytes()),
        archive(&json),
        tar(&[("/component-descriptor.yaml", V2.as_bytes())]),
        tar(&[("blobs/x", b"x"), ("./component-descriptor.yaml", V2.as_bytes())]),
    ];
    for media_type in [
        OCM,
        "application/vnd.ocm.software.component-descriptor.v2+yaml",
        "application/vnd.ocm.software.component-descriptor.v2+json",
        "application/vnd.gardener.cloud.cnudie.component-descriptor.v2+yaml+tar",
        "application/vnd.gardener.cloud.cnudie.component-descriptor.v2+json",
        "application/vnd.oci.gardener.cloud.cnudie.component-descriptor.config.v2+yaml+tar",
    ] {
        for form in &forms {
            assert_eq!(
                parse(media_type, form).unwrap().descriptor(&expected()).as_ref(),
                Ok(&from_yaml),
                "{media_type}"
            );
        }
    }
    for media_type in ["", "application/x-tar", "application/vnd.oci.image.layer.v1.tar+gzip"] {
        let refused = parse(media_type, &archive(V2));
        assert_eq!(refused, Err(DescriptorError::MediaType(Excerpt::of(media_type))));
    }
}

#[test]
fn v3_descriptor_is_read() {
    let resources = json!([resource(RAW_MANIFEST, blob())]);
    let v2 = v2(resources.clone());
    let v3 = v3(resources);
    let read = read_json(&v3).unwrap();
    assert_eq!(read.schema, Schema::V3alpha1);
    assert_eq!(Descriptor { schema: Schema::V2, ..read }, read_json(&v2).unwrap());
    let without = at(&v3, "/spec/resources", None);
    assert_eq!(read_json(&without).unwrap().raw_manifest, None, "lists are optional in v3");
    let hashed = at(&v3, "/repositoryContexts", Some(json!([{"componentNameMapping": "sha256-digest"}])));
    assert_eq!(read_json(&hashed).unwrap().mapping, Mapping::Sha256Digest);
}

#[test]
fn provider_is_a_string_or_an_object() {
    for provider in [json!("example.org"), json!("{\"name\":\"example.org\"}"), json!({"name": "example.org"})] {
        for (descriptor, pointer) in [(v2(json!([])), "/component/provider"), (v3(json!([])), "/metadata/provider")] {
            assert!(read_json(&at(&descriptor, pointer, Some(provider.clone()))).is_ok(), "{provider}");
        }
    }
}

#[test]
fn missing_member_is_named() {
    let resources = json!([resource("x-y", json!({"type": "none"})), resource(RAW_MANIFEST, blob())]);
    let v2 = v2(resources.clone());
    let v3 = v3(resources);
    for (descriptor, pointer) in [
        (&v2, "/component"),
        (&v2, "/component/name"),
        (&v2, "/component/version"),
        (&v2, "/component/provider"),
        (&v2, "/component/resources"),
        (&v2, "/component/resources/1/name"),
        (&v2, "/component/resources/1/version"),
        (&v2, "/component/resources/1/type"),
        (&v2, "/component/resources/0/relation"),
        (&v2, "/component/resources/0/access"),
        (&v2, "/component/resources/0/access/type"),
        (&v2, "/component/resources/1/access/localReference"),
        (&v3, "/kind"),
        (&v3, "/metadata"),
        (&v3, "/metadata/name"),
        (&v3, "/metadata/provider"),
        (&v3, "/spec"),
        (&v3, "/spec/resources/1/access"),
    ] {
        let expected = pointer[1..].replace('/', ".").replace(".0", "[0]").replace(".1", "[1]");
        assert_eq!(path(read_json(&at(descriptor, pointer, None))), expected);
    }
    let error = read_json(&at(&v2, "/component/provider", None)).unwrap_err();
    assert_eq!(error.to_string(), "invalid component descriptor: component.provider is missing");
}

#[test]
fn unexpected_type_is_named() {
    let whole = v2(json!([resource(RAW_MANIFEST, blob())]));
    for (pointer, value) in [
        ("/component", json!([])),
        ("/component/name", json!(1)),
        ("/component/version", json!(1.0)),
        ("/component/name", json!("")),
        ("/component/resources", json!({})),
        ("/component/repositoryContexts", json!("x")),
        ("/component/resources/0/version", json!(true)),
        ("/component/resources/0/relation", json!("remote")),
        ("/component/resources/0/access", json!("localBlob")),
        ("/component/resources/0/digest", json!("sha256:00")),
        ("/component/resources/0/access/mediaType", json!(["application/x-tar"])),
    ] {
        let expected = pointer[1..].replace('/', ".").replace(".0", "[0]");
        assert_eq!(path(read_json(&at(&whole, pointer, Some(value)))), expected);
    }
    for (list, expected) in [(json!([1]), "component.resources[0]"), (json!([{}]), "component.resources[0].access")] {
        assert_eq!(path(read_json(&v2(list))), expected);
    }
    let number = V2.replace("  version: 1.2.0\n  provider", "  version: 1.2\n  provider");
    assert_eq!(path(read(number.as_bytes())), "component.version", "an unquoted version may be a number");
}

#[test]
fn lists_may_be_null() {
    let whole = v2(Value::Null);
    let null = at(&whole, "/component/repositoryContexts", Some(Value::Null));
    assert_eq!(read_json(&null).unwrap().resources, []);
}

#[test]
fn schema_is_v2_or_v3() {
    let v2 = v2(json!([]));
    let v3 = v3(json!([]));
    for (descriptor, reason) in [
        (at(&v2, "/meta/schemaVersion", Some(json!("v1"))), "version \"v1\""),
        (at(&v2, "/meta", None), "neither meta.schemaVersion nor apiVersion is set"),
        (
            at(&v2, "/apiVersion", Some(json!("ocm.software/v3alpha1"))),
            "both meta.schemaVersion and apiVersion are set",
        ),
        (at(&v3, "/apiVersion", Some(json!("ocm.software/v4"))), "API version \"ocm.software/v4\""),
        (at(&v3, "/kind", Some(json!("Component"))), "kind \"Component\""),
    ] {
        assert_eq!(read_json(&descriptor), Err(DescriptorError::Schema(reason.to_owned())));
    }
    assert_eq!(path(read_json(&json!([]))), "the document");
    assert_eq!(path(read_json(&at(&v2, "/meta", Some(json!({}))))), "meta.schemaVersion");
}

#[test]
fn descriptor_of_another_component_is_refused() {
    for descriptor in [v2(json!([])), v3(json!([]))] {
        let head = if descriptor["component"].is_object() { "/component" } else { "/metadata" };
        for (member, found) in [("name", "example.org/other:1.2.0"), ("version", "example.org/module/tide:1.2.1")] {
            let value = if member == "name" { "example.org/other" } else { "1.2.1" };
            let other = at(&descriptor, &format!("{head}/{member}"), Some(json!(value)));
            let expected = format!("{NAME}:1.2.0");
            let found = Excerpt::of(found);
            assert_eq!(read_json(&other), Err(DescriptorError::Mismatch { expected, found }));
        }
    }
}

#[test]
fn every_spelling_of_a_local_blob_is_read() {
    let one = Digest::of(b"abc");
    for (kind, key) in [("localBlob", "localReference"), ("LocalBlob", "localReference"), ("localOciBlob", "digest")] {
        for suffix in ["", "/v1"] {
            let access = json!({"type": format!("{kind}{suffix}"), key: one.to_string()});
            let read = read_json(&v2(json!([resource(RAW_MANIFEST, access)]))).unwrap();
            let layer = LocalBlob { digests: vec![one], media_type: String::new() };
            assert_eq!(read.raw_manifest, Some(layer), "{kind}{suffix}");
        }
    }
}

#[test]
fn only_the_exact_media_type_is_an_archive() {
    for (media_type, is_tar) in [
        ("application/x-tar", true),
        ("application/x-tgz", false),
        ("application/x-tar+gzip", false),
        ("application/X-TAR", false),
        ("application/yaml", false),
        ("", false),
    ] {
        let mut access = blob();
        access["mediaType"] = json!(media_type);
        let read = read_json(&v2(json!([resource(RAW_MANIFEST, access)]))).unwrap();
        assert_eq!(read.raw_manifest.unwrap().is_tar(), is_tar, "{media_type}");
    }
}

#[test]
fn split_blob_is_a_list_of_digests() {
    let parts = [Digest::of(b"a"), Digest::of(b"b")];
    let reference = |reference: String| {
        let mut access = blob();
        access["localReference"] = json!(reference);
        read_json(&v2(json!([resource(RAW_MANIFEST, access)])))
    };
    let read = reference(format!("{},{}", parts[0], parts[1])).unwrap();
    assert_eq!(read.raw_manifest.unwrap().digests, parts);
    for bad in
        [String::new(), "1.2.0".to_owned(), format!("{},", parts[0]), format!(",{}", parts[0]), "sha512:00".to_owned()]
    {
        assert_eq!(path(reference(bad)), "component.resources[0].access.localReference");
    }
}

#[test]
fn every_spelling_of_an_image_is_read() {
    let spellings = ["ociArtifact", "ociRegistry", "OCIImage", "ociImage", "OCIArtifact"];
    let spellings: Vec<_> = spellings.iter().flat_map(|name| [(*name).to_owned(), format!("{name}/v1")]).collect();
    let image = |(number, kind): (usize, &String)| {
        resource(&format!("i{number}"), json!({"type": kind, "imageReference": format!("r.io/i:{number}")}))
    };
    let read = read_json(&v2(spellings.iter().enumerate().map(image).collect())).unwrap();
    assert_eq!(read.images, (0..spellings.len()).map(|number| format!("r.io/i:{number}")).collect::<Vec<_>>());
    let without = read_json(&v2(json!([resource("i-0", json!({"type": "ociArtifact"}))])));
    assert_eq!(path(without), "component.resources[0].access.imageReference");
}

#[test]
fn unknown_access_fails_the_raw_manifest_only() {
    for kind in ["none", "None", "gitHub", "s3/v2", "localBlob/v2", "LOCALBLOB"] {
        let read = read_json(&v2(json!([resource("other", json!({"type": kind}))]))).unwrap();
        assert_eq!((read.images.len(), &*read.resources[0].access), (0, kind));
    }
    for kind in ["none", "gitHub", "ociArtifact", "localBlob/v2"] {
        let error = read_json(&v2(json!([resource(RAW_MANIFEST, json!({"type": kind, "imageReference": "r.io/i"}))])));
        let reason = format!("component.resources[0].access.type is {kind:?}, a local blob is required");
        assert_eq!(error.unwrap_err().to_string(), format!("invalid component descriptor: {reason}"));
    }
}

#[test]
fn several_raw_manifests_are_ambiguous() {
    let twice = json!([resource(RAW_MANIFEST, blob()), resource(RAW_MANIFEST, blob())]);
    assert_eq!(read_json(&v2(twice)), Err(DescriptorError::SeveralRawManifests));
}

#[test]
fn last_context_has_the_mapping() {
    let contexts = |contexts: Value| read_json(&at(&v2(json!([])), "/component/repositoryContexts", Some(contexts)));
    for (last, mapping) in [
        (json!({"type": "OCIRegistry"}), Mapping::UrlPath),
        (json!({"componentNameMapping": ""}), Mapping::UrlPath),
        (json!({"componentNameMapping": "urlPath"}), Mapping::UrlPath),
        (json!({"componentNameMapping": "sha256-digest"}), Mapping::Sha256Digest),
    ] {
        let read = contexts(json!([{"componentNameMapping": "other"}, last]));
        assert_eq!(read.unwrap().mapping, mapping, "earlier contexts do not matter");
    }
    let other = contexts(json!([{}, {"componentNameMapping": "other"}]));
    assert_eq!(path(other), "component.repositoryContexts[1].componentNameMapping");
}

#[test]
fn hostile_content_is_an_error() {
    let large = format!("{V2}#{}", "x".repeat(MAX_BYTES));
    let size = large.len() as u64;
    assert_eq!(read(large.as_bytes()), Err(DescriptorError::TooLarge(size, MAX_BYTES)));
    assert_eq!(read(&archive(&large)), Err(DescriptorError::TooLarge(size, MAX_BYTES)));
    let stored = vec![b' '; MAX_STORED_BYTES + 1];
    assert_eq!(read(&stored), Err(DescriptorError::TooLarge(stored.len() as u64, MAX_STORED_BYTES)));
    let bomb = gzip(&vec![b' '; 4 * MAX_STORED_BYTES]);
    assert_eq!(read(&bomb), Err(DescriptorError::Unpack(ArchiveError::TooLarge(MAX_STORED_BYTES))));
    assert_eq!(read(b"meta: \xff"), Err(DescriptorError::Encoding(6)));
    let elsewhere = tar(&[("../component-descriptor.yaml", V2.as_bytes())]);
    assert_eq!(read(&elsewhere), Err(DescriptorError::Unpack(ArchiveError::NoFile(FILE))));
    let long = v2(json!([])).to_string().replace("1.2.0", &"9".repeat(500_000));
    assert!(read(long.as_bytes()).unwrap_err().to_string().len() < 1_000, "errors quote a beginning only");
    let two = format!("{V2}---\n{V2}");
    assert_eq!(read(two.as_bytes()), Err(DescriptorError::Documents(2)));
    assert_eq!(read(b""), Err(DescriptorError::Documents(0)));
    let many = format!("{{a: [{}]}}", "{},".repeat(MAX_VALUES));
    for text in [&*many, &"[".repeat(10_000), "a: *b", "\u{7f}\u{1}"] {
        assert!(matches!(read(text.as_bytes()), Err(DescriptorError::Yaml(_))), "{:.20}", text);
    }
}

#[test]
fn config_blob_points_to_the_descriptor() {
    let digest = Digest::of(b"abc");
    let config = |digest: &str, size: Value| {
        let layer = json!({"mediaType": OCM, "digest": digest, "size": size});
        component_descriptor_pointer(json!({"componentDescriptorLayer": layer, "other": 1}).to_string().as_bytes())
    };
    let pointer = BlobReference { media_type: OCM.to_owned(), digest, size: 10_240 };
    assert_eq!(config(&digest.to_string(), json!(10_240)), Ok(pointer));
    assert_eq!(
        config("sha512:00", json!(1)),
        Err(DescriptorError::Pointer(Excerpt::of("sha512:00"), DigestError)),
        "no other algorithm is supported"
    );
    let too_large = MAX_STORED_BYTES as u64 + 1;
    assert_eq!(
        config(&digest.to_string(), json!(too_large)),
        Err(DescriptorError::TooLarge(too_large, MAX_STORED_BYTES))
    );
    assert!(matches!(config(&digest.to_string(), json!(-1)), Err(DescriptorError::Config(_))));
    for text in ["", "{}", "[]", "{\"componentDescriptorLayer\": null}", "{\"componentDescriptorLayer\": {}}", "\u{1}"]
    {
        assert!(matches!(component_descriptor_pointer(text.as_bytes()), Err(DescriptorError::Config(_))), "{text}");
    }
    let large = vec![b' '; MAX_CONFIG_BYTES + 1];
    let refused = DescriptorError::TooLarge(large.len() as u64, MAX_CONFIG_BYTES);
    assert_eq!(component_descriptor_pointer(&large), Err(refused));
}
