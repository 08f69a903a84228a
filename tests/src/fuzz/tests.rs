//! Short fuzzing run: valid inputs with random mutations. `PROPTEST_CASES` makes it longer.

use std::fs;

use proptest::{prelude::*, sample::Index};
use tidewatch_oci::{
    component::ComponentVersion,
    descriptor,
    layer::{self, LayerKind},
};
use tidewatch_testing::paths;

use super::*;

/// Dictionary of tokens with a meaning for the parsers.
const DICTIONARY: &[&str] = &[
    "\"",
    "\\",
    "\\u0000",
    "\u{fffd}",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    ";",
    "=",
    "%",
    "%00",
    "%2",
    "+",
    "-",
    "\n",
    "\r\n",
    "\0",
    "null",
    "true",
    "1e999",
    "-0",
    "18446744073709551616",
    "Cert=",
    ";Cert=\"",
    ",Cert=",
    "-----BEGIN CERTIFICATE-----",
    "===",
    "tidewatch=",
    ";created=",
    ";tag=\"tidewatch-v3\"",
    "()",
    "&a",
    "*a",
    "<<: ",
    "!!binary ",
    "\n---\n",
    "0644",
    "sha256:",
    "/v1",
    "../",
    "- ",
    "exec: {command: sh}",
    "\"proxy-url\":\"x\",",
    "\"insecure-skip-tls-verify\":true,",
    "secrets",
    "*",
    "/runtimes/",
    "00000000000000ab-1",
    "00000000000000ee-1",
    "\n",
    "202 ",
    "200 ",
    "400\n",
    "413 {\"maxEvents\":1}\n",
    "503\n",
    "Retry-After: 1\n",
    "{\"type\":\"ERROR\",\"object\":{\"code\":410}}\n",
    "\"continue\":\"y\",",
];

#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u8),
    Insert(Index, Index),
    Remove(Index, u8),
    Repeat(Index, u8, u8),
    Splice(Index, Index, Index),
    Cut(Index),
}

fn change() -> impl Strategy<Value = Change> {
    let at = any::<Index>;
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, bits)| Change::Flip(at, bits)),
        (at(), at()).prop_map(|(at, word)| Change::Insert(at, word)),
        (at(), any::<u8>()).prop_map(|(at, length)| Change::Remove(at, length)),
        (at(), any::<u8>(), any::<u8>()).prop_map(|(at, length, times)| Change::Repeat(at, length, times)),
        (at(), at(), at()).prop_map(|(at, seed, from)| Change::Splice(at, seed, from)),
        at().prop_map(Change::Cut),
    ]
}

impl Change {
    fn apply(&self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        let place = |at: &Index, bytes: &[u8]| at.index(bytes.len() + 1);
        match self {
            Self::Flip(at, bits) if !bytes.is_empty() => {
                let place = at.index(bytes.len());
                bytes[place] ^= bits;
            }
            Self::Flip(..) => {}
            Self::Insert(at, word) => {
                let place = place(at, bytes);
                bytes.splice(place..place, word.get(DICTIONARY).bytes());
            }
            Self::Remove(at, length) => {
                let place = place(at, bytes);
                bytes.drain(place..(place + usize::from(*length)).min(bytes.len()));
            }
            Self::Repeat(at, length, times) => {
                let place = place(at, bytes);
                let part = bytes[place..(place + usize::from(*length)).min(bytes.len())].to_vec();
                bytes.splice(place..place, part.repeat(usize::from(*times)));
            }
            Self::Splice(at, seed, from) => {
                let seed = seed.get(seeds);
                let at = place(at, bytes);
                let from = place(from, seed);
                bytes.splice(at.., seed[from..].iter().copied());
            }
            Self::Cut(at) => bytes.truncate(place(at, bytes)),
        }
    }
}

fn run(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let seeds = seeds(name);
    assert!(!seeds.is_empty(), "{name} has nothing to begin with");
    for seed in &seeds {
        (target.run)(seed);
    }
    let inputs = (any::<Index>(), prop::collection::vec(change(), 0..8));
    proptest!(|((seed, changes) in inputs)| {
        let mut bytes = seed.get(&seeds).clone();
        for change in changes {
            change.apply(&mut bytes, &seeds);
        }
        (target.run)(&bytes);
    });
    proptest!(|(bytes: Vec<u8>)| (target.run)(&bytes));
}

const FORWARDED: [&str; 3] = ["client_cert", "xfcc", "v2_forwarded"];
const EVENTS: [&str; 4] = ["signature", "events", "heartbeat", "v2_event"];
const CONFIGURED: [&str; 3] = ["plan", "kubeconfig", "agent_kubeconfig"];
const ENROLLING: [&str; 3] = ["token", "token_keys", "certificate_request"];
const ANSWERED: [&str; 4] = ["answers", "refusal", "certificate_answer", "trust_answer"];
const WATCHED: [&str; 3] = ["watch", "discovery", "agent_config"];
const FETCHED: [&str; 2] = ["descriptor", "layer"];

#[test]
fn forwarded_certificates() {
    FORWARDED.iter().for_each(|name| run(name));
}

#[test]
fn signed_events_and_heartbeats() {
    EVENTS.iter().for_each(|name| run(name));
}

#[test]
fn plans_and_kubeconfigs() {
    CONFIGURED.iter().for_each(|name| run(name));
}

#[test]
fn enrolments() {
    ENROLLING.iter().for_each(|name| run(name));
}

#[test]
fn receiver_responses() {
    ANSWERED.iter().for_each(|name| run(name));
}

#[test]
fn api_server_streams() {
    WATCHED.iter().for_each(|name| run(name));
}

#[test]
fn module_artifacts() {
    FETCHED.iter().for_each(|name| run(name));
}

#[test]
fn each_target_is_run() {
    let run = [&FORWARDED[..], &EVENTS, &CONFIGURED, &ENROLLING, &ANSWERED, &WATCHED, &FETCHED].concat();
    for Target { name, .. } in TARGETS {
        assert!(run.contains(&name), "{name}");
    }
}

#[test]
fn parsers_accept_the_seeds() {
    let text = |name, number: usize| String::from_utf8(seeds(name)[number].clone()).unwrap();
    assert!(forwarded::parse_client_cert(&text("client_cert", 0)).is_some());
    assert!(forwarded::parse_xfcc(&text("xfcc", 0)).is_some());
    assert!(v2::parse_forwarded(text("v2_forwarded", 1).as_bytes()).is_some());
    assert_eq!(event::parse_batch(&seeds("events")[0]).unwrap().iter().filter(|received| received.is_ok()).count(), 2);
    assert!(Heartbeat::parse(&seeds("heartbeat")[0]).is_some());
    assert!(seeds("v2_event").iter().all(|seed| v2::Event::parse(seed).is_some()));
    assert!(Plan::parse(&text("plan", 0)).is_ok());
    for seed in seeds("kubeconfig") {
        assert!(RuntimeKubeconfig::parse(&seed).is_ok(), "{}", String::from_utf8_lossy(&seed));
    }
    assert!(Token::read(&text("token", 0), seeds::AUDIENCE, seeds::NOW).is_ok());
    let keys = KeySet::parse(&seeds("token_keys")[0]).unwrap();
    assert!(keys.has("k"), "a key that cannot be used is left out");
    let request = CertificateRequest::parse(&seeds("certificate_request")[0]).unwrap();
    assert!(SigningRequest::from_pem(request.request.as_bytes()).is_ok());
    for seed in seeds("descriptor") {
        let expected = ComponentVersion::new(seeds::COMPONENT, seeds::COMPONENT_VERSION).unwrap();
        let document = descriptor::parse(seeds::DESCRIPTOR_MEDIA_TYPE, &seed).unwrap();
        let read = document.descriptor(&expected).unwrap();
        assert_eq!(read.images.len(), 1, "{}", String::from_utf8_lossy(&seed));
    }
    for (seed, kind) in seeds("layer").iter().zip([LayerKind::Dir, LayerKind::Plain, LayerKind::Plain]) {
        let text = layer::yaml_text(kind, seed).unwrap();
        assert_eq!(layer::documents(&text).unwrap().len(), 3);
    }
    assert!(seeds("agent_kubeconfig").iter().all(|seed| tidewatch_agent::testing::is_kubeconfig(seed)));
}

#[test]
fn each_target_has_its_file() {
    let folder = paths::workspace().join("tests/fuzz");
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    for Target { name, .. } in TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        let file = fs::read_to_string(folder.join(format!("fuzz_targets/{name}.rs"))).unwrap();
        assert!(file.contains(&format!("tidewatch_tests::fuzz::{name}(data)")), "{name}");
    }
}
