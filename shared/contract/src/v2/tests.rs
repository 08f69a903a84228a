use proptest::prelude::*;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P384_SHA384};
use serde::Deserialize;

use super::*;
use crate::certificate::{ReadCertificateError, to_pem};

/// A request of runtime-watcher's agent, from a golden file.
#[derive(Deserialize)]
struct SentRequest {
    about: String,
    manager: String,
    namespace: String,
    name: String,
    group: String,
    version: String,
    kind: String,
    path: String,
    body: String,
}

/// A header value with the placeholders `{pem}` and `{encoded}` for a certificate, and the expected result.
#[derive(Deserialize)]
struct Header {
    about: String,
    value: String,
    #[serde(default)]
    refused: bool,
}

fn leaf(names: &[&str]) -> CertificateDer<'static> {
    signed(names, &KeyPair::generate().unwrap())
}

fn signed(names: &[&str], key: &KeyPair) -> CertificateDer<'static> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    for name in names {
        params.distinguished_name.push(DnType::CommonName, *name);
    }
    params.self_signed(key).unwrap().der().clone()
}

#[test]
fn a_written_event_equals_lifecycle_managers() {
    let sent: Vec<SentRequest> = serde_json::from_str(include_str!("../../../../tests/golden/v2/sent.json")).unwrap();
    assert!(!sent.is_empty());
    for SentRequest { about, manager, namespace, name, group, version, kind, path: expected, body } in sent {
        let event = Event { namespace, name, group, version, kind };
        assert_eq!((path(&manager), event.to_body()), (expected, body.clone()), "{about}");
        assert_eq!(Event::parse(body.as_bytes()).unwrap(), event, "{about}");
    }
}

#[test]
fn repeated_members_are_read_like_lifecycle_managers_decoder_does() {
    let parse =
        |body: &str| Event::parse(body.as_bytes()).map(|event| [event.namespace, event.name, event.kind].join("/"));
    for (body, expected) in [
        (r#"{"watched": {"Name": "a", "name": "b"}}"#, "/b/"),
        (r#"{"watched": {"name": "b", "Name": "a"}}"#, "/a/"),
        (r#"{"watched": {"name": "a", "name": null}}"#, "/a/"),
        (r#"{"watched": {"namespace": "n", "name": "a"}, "WATCHED": {"name": "b"}, "watched": null}"#, "n/b/"),
        (r#"{"watchedGvk": {"\u212aind": "K"}, "other": {"name": 1}}"#, "//K"),
    ] {
        assert_eq!(parse(body).unwrap(), expected, "{body}");
    }
    for body in [
        r#"{"watched": {"name": 1, "name": "a"}}"#,
        r#"{"watched": [], "watched": {}}"#,
        r#"{"other": tru}"#,
        r#"{"other": {"a": 1e999}}"#,
        r#"{"watched": {"name": "a"}"#,
        r#"{"watched": {"name": "a"}} {}"#,
        "[]",
        "null",
        "\"watched\"",
    ] {
        assert_eq!(parse(body), None, "{body}");
    }
}

#[test]
fn headers_are_parsed_like_lifecycle_managers_listener_does() {
    let headers: Vec<Header> =
        serde_json::from_str(include_str!("../../../../tests/golden/v2/forwarded.json")).unwrap();
    let leaf = leaf(&["r-1"]);
    let pem = to_pem(&leaf);
    let encoded = forwarded_header(&leaf);
    let encoded = encoded.strip_prefix("Cert=\"").unwrap().strip_suffix('"').unwrap();
    for Header { about, value, refused } in headers {
        let value = value.replace("{encoded}", encoded).replace("{pem}", &pem.replace('\n', "%0A").replace('+', "%2B"));
        assert_eq!(parse_forwarded(value.as_bytes()).as_ref(), (!refused).then_some(&leaf), "{about}");
    }
    let header = forwarded_header(&leaf);
    let padded = |bytes: usize| format!("By={};{header}", "a".repeat(bytes - header.len() - 4));
    assert_eq!(parse_forwarded(padded(MAX_FORWARDED_BYTES).as_bytes()).as_ref(), Some(&leaf));
    assert_eq!(parse_forwarded(padded(MAX_FORWARDED_BYTES + 1).as_bytes()), None, "too long");
}

#[test]
fn only_event_paths_have_a_manager() {
    assert_eq!(manager_of("/v2/lifecycle-manager/event"), Some("lifecycle-manager"));
    for bad in [
        "/v2//event",
        "/v2/event",
        "/v2/a/b/event",
        "/v2/a/event/",
        "/v1/a/event",
        "/v2/../event",
        "/v2/a%2Fb/event",
        "v2/a/event",
        "",
    ] {
        assert_eq!(manager_of(bad), None, "{bad}");
    }
}

#[test]
fn the_common_name_identifies_the_caller() {
    let der = leaf(&["r-1"]);
    let read = read_caller(&der).unwrap();
    assert_eq!((read.runtime.as_str(), read.leaf.der), ("r-1", der));
    for (bad, expected) in [
        (leaf(&[]), ReadCallerError::Empty),
        (leaf(&[""]), ReadCallerError::Empty),
        (leaf(&["no id"]), ReadCallerError::NotId),
        (vec![0x30, 0x00].into(), ReadCallerError::Unreadable),
    ] {
        assert_eq!(read_caller(&bad), Err(expected));
    }
}

#[test]
fn a_caller_may_have_any_key_which_contract_v3_refuses() {
    let der = signed(&["r-1"], &KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap());
    assert_eq!(read_caller(&der).unwrap().runtime.as_str(), "r-1");
    assert_eq!(Leaf::read(&der), Err(ReadCertificateError::Key));
}

proptest! {
    #[test]
    fn an_event_survives_being_written_and_read(
        namespace in ".{0,40}", name in ".{0,40}", group in ".{0,20}", version in ".{0,20}", kind in ".{0,20}",
    ) {
        let event = Event { namespace, name, group, version, kind };
        prop_assert_eq!(Event::parse(event.to_body().as_bytes()).unwrap(), event);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), text in ".{0,60}") {
        let _ = Event::parse(&bytes);
        let _ = parse_forwarded(&bytes);
        let _ = parse_forwarded(format!("Cert={text}").as_bytes());
        let _ = manager_of(&text);
        let _ = read_caller(&bytes.into());
    }
}
