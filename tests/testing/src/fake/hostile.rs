//! A runtime whose owner attacks the receiver: responses that grow when they are decoded, token keys that are costly to
//! verify, and a controller that changes the receiver's objects and holds them by a finalizer.

use std::sync::{
    LazyLock,
    atomic::{AtomicU64, Ordering},
};

use aws_lc_rs::{
    error::Unspecified,
    rand::{SecureRandom as _, SystemRandom},
};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::Bytes;
use serde_json::{Value, json};

use super::{
    store::Store,
    tokens::{claims, compact},
};

/// Of so many reads one gets a response of tiny elements. The others are answered well, so that most reconciles come to the
/// writes that the owner and the controller provoke.
const READS: u64 = 64;
/// Length of such a response, the receiver's limit for a page of a list.
const RESPONSE_BYTES: usize = 16 << 20;
/// Token keys, the most that a receiver accepts, two for each id.
const KEYS: usize = 32;
/// Length of an RSA modulus of 4,096 bits, the longest that a receiver accepts.
const MODULUS_BYTES: usize = 512;
/// Member of spec or data that the controller adds.
const SURPLUS: &str = "contested";
const FINALIZER: &str = "example.com/kept-by-the-owner";
/// Key prefixes of objects that the controller leaves alone: the user's own, and those that a fake's agents share.
const SPARED: [&str; 2] = ["operator.kyma-project.io/kymas/", "coordination.k8s.io/leases/"];

/// A list and an object at once: its items, and the managed fields of its metadata, are empty objects.
static TINY_ELEMENTS: LazyLock<Bytes> = LazyLock::new(|| {
    let elements = vec!["{}"; RESPONSE_BYTES / 6].join(",");
    let head = r#"{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":"1","managedFields":["#;
    format!(r#"{head}{elements}]}},"items":[{elements}]}}"#).into()
});

/// See the module.
pub(super) struct HostileOwner {
    reads: AtomicU64,
    /// JWK set of random moduli: a verification costs as much as with those of real keys.
    keys: Value,
}

impl HostileOwner {
    pub(super) fn new() -> Result<Self, Unspecified> {
        let keys = (0..KEYS).map(|number| {
            let mut modulus = [0; MODULUS_BYTES];
            SystemRandom::new().fill(&mut modulus)?;
            modulus[0] |= 0x80;
            modulus[MODULUS_BYTES - 1] |= 1;
            Ok::<_, Unspecified>(json!({"kty": "RSA", "use": "sig", "alg": "RS256", "kid": key_id(number), "e": "AQAB",
                "n": BASE64_URL_SAFE_NO_PAD.encode(modulus)}))
        });
        Ok(Self { reads: AtomicU64::new(0), keys: json!({"keys": keys.collect::<Result<Vec<_>, _>>()?}) })
    }

    /// The JWK set.
    pub(super) fn keys(&self) -> &Value {
        &self.keys
    }

    /// The response to a read of an object or a list that gets no real one.
    pub(super) fn response(&self) -> Option<Bytes> {
        let is_turn = self.reads.fetch_add(1, Ordering::Relaxed) % READS == READS - 1;
        is_turn.then(|| TINY_ELEMENTS.clone())
    }
}

/// A token of the agent with a random signature that names one of the keys.
pub(super) fn forged_token(number: usize) -> Result<String, Unspecified> {
    let mut signature = [0; MODULUS_BYTES];
    SystemRandom::new().fill(&mut signature)?;
    // Smaller than every modulus, or it would be refused before the expensive step.
    signature[0] = 0;
    let signed = compact(&json!({"alg": "RS256", "kid": key_id(number), "typ": "JWT"}), &claims());
    Ok(format!("{signed}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature)))
}

fn key_id(number: usize) -> String {
    format!("hostile-{}", number % KEYS / 2)
}

/// Changes objects as a competing controller does: adds a member to spec or data that the receiver did not write, and a
/// finalizer. Returns the number of objects that lacked one of them.
pub(super) fn contest(store: &mut Store) -> usize {
    let is_spared = |key: &str| SPARED.iter().any(|prefix| key.starts_with(prefix));
    // Parsing all definitions at each call would cost more than everything else.
    let surplus = format!(r#""{SURPLUS}":"true""#);
    let keys = store.list("", "").filter(|(key, stored)| !is_spared(key) && !stored.contains(&surplus));
    let keys: Vec<_> = keys.map(|(key, _)| key.to_owned()).collect();
    let mut changed = 0;
    for key in keys {
        let Some(mut object) = store.value(&key) else { continue };
        object["metadata"]["finalizers"] = json!([FINALIZER]);
        for part in ["spec", "data"] {
            if object[part].is_object() {
                object[part][SURPLUS] = "true".into();
            }
        }
        let version = store.version();
        store.put(&key, object);
        changed += usize::from(store.version() > version);
    }
    changed
}
