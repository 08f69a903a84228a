//! Estimates the memory that a JSON text needs once decoded, from its structure and before it is decoded: two or three
//! bytes of JSON can become some hundred bytes in memory.

/// Copies of the text while it is decoded: the frames or the text joined from them, kube's copy as a `String`, and the
/// strings of the decoded object.
const COPIES_OF_TEXT: u64 = 3;

/// Bytes for each value and for each member name. A scalar in an array has a slot of 32 bytes (`serde_json::Value`),
/// three times while the vector doubles, or a string's allocation; a member of an object shares a half-full B-tree node
/// of 640 bytes with four others, and has two allocations for two tokens.
const BYTES_PER_TOKEN: u64 = 128;

/// Further bytes for each object: the first B-tree node of a map (640 bytes), or the fields of a struct in an array of
/// at most 256 bytes, three times while the vector doubles. The largest are `managedFields` entries and the resources
/// of a discovery response. Objects of a list page are larger, but are limited in number.
const BYTES_PER_OBJECT: u64 = 640;

/// Counts of a JSON text that arrives in pieces. They are exact for the part of a text that a JSON parser accepts. The
/// nesting needs no limit here: `serde_json` refuses more than 128 levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Structure {
    bytes: u64,
    /// Values and member names.
    tokens: u64,
    /// Objects among the values.
    objects: u64,
    state: State,
}

/// Position between two bytes of the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Between,
    /// In a number, `true`, `false` or `null`.
    Scalar,
    String,
    /// In a string, after a backslash.
    Escape,
}

impl Structure {
    /// Continues with the next bytes of the text.
    pub(super) fn scan(&mut self, bytes: &[u8]) {
        self.bytes = self.bytes.saturating_add(bytes.len() as u64);
        for byte in bytes {
            self.state = match (self.state, byte) {
                (State::Escape, _) => State::String,
                (State::String, b'\\') => State::Escape,
                (State::String, b'"') => State::Between,
                (State::String, _) => State::String,
                (_, b'"') => self.token(State::String),
                (_, b'{') => {
                    self.objects += 1;
                    self.token(State::Between)
                }
                (_, b'[') => self.token(State::Between),
                (_, b'}' | b']' | b',' | b':' | b' ' | b'\t' | b'\n' | b'\r') => State::Between,
                (State::Scalar, _) => State::Scalar,
                (State::Between, _) => self.token(State::Scalar),
            };
        }
    }

    fn token(&mut self, next: State) -> State {
        self.tokens += 1;
        next
    }

    /// Upper bound of the memory in bytes while the text is collected and decoded into `serde_json::Value`,
    /// `DynamicObject` or the types of Kubernetes that the receiver reads.
    pub(super) fn memory(&self) -> u64 {
        let text = self.bytes.saturating_mul(COPIES_OF_TEXT);
        let tokens = self.tokens.saturating_mul(BYTES_PER_TOKEN);
        text.saturating_add(tokens).saturating_add(self.objects.saturating_mul(BYTES_PER_OBJECT))
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
        APIResource, Condition, ManagedFieldsEntry, OwnerReference, StatusCause,
    };
    use proptest::{collection::vec, prelude::*};
    use serde_json::Value;

    use super::*;

    fn scanned<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Structure {
        let mut structure = Structure::default();
        pieces.into_iter().for_each(|piece| structure.scan(piece));
        structure
    }

    /// Tokens and objects of a decoded text.
    fn counted(value: &Value) -> (u64, u64) {
        let (own, inner): ((u64, u64), Vec<_>) = match value {
            Value::Object(members) => ((1 + members.len() as u64, 1), members.values().collect()),
            Value::Array(values) => ((1, 0), values.iter().collect()),
            _ => ((1, 0), Vec::new()),
        };
        inner.into_iter().map(counted).fold(own, |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    #[test]
    fn only_structure_outside_of_strings_counts() {
        for (text, expected) in [
            ("", (0, 0)),
            ("0", (1, 0)),
            (" \n", (0, 0)),
            ("[0,-1.5e3, true ,null]", (5, 0)),
            ("[{},{}]", (3, 2)),
            (r#"{"a":{"b":[]}}"#, (5, 2)),
            (r#"["{[,:]}"]"#, (2, 0)),
            (r#"["\"{{{[\\\""]"#, (2, 0)),
            (r#"["\\",{}]"#, (3, 1)),
            (r#"["\u007b",""]"#, (3, 0)),
            ("\"\u{e9}{\u{1f600}[\"", (1, 0)),
        ] {
            let structure = scanned([text.as_bytes()]);
            assert_eq!((structure.tokens, structure.objects), expected, "{text}");
        }
    }

    #[test]
    fn memory_of_small_values_exceeds_their_text_many_times() {
        let memory = |text: String| scanned([text.as_bytes()]).memory() / text.len() as u64;
        assert!(memory(format!("[{}0]", "0,".repeat(1000))) >= 60);
        assert!(memory(format!("[{}{{}}]", "{},".repeat(1000))) >= 250);
        assert!(memory(format!("{{\"a\":\"{}\"}}", "x".repeat(1_000_000))) == COPIES_OF_TEXT);
    }

    #[test]
    fn structs_in_arrays_fit_their_estimate() {
        let estimate = BYTES_PER_TOKEN + BYTES_PER_OBJECT;
        for size in [
            size_of::<ManagedFieldsEntry>(),
            size_of::<OwnerReference>(),
            size_of::<Condition>(),
            size_of::<StatusCause>(),
            size_of::<APIResource>(),
        ] {
            assert!(3 * size as u64 <= estimate, "{size}");
        }
        assert!(3 * size_of::<Value>() as u64 <= BYTES_PER_TOKEN);
    }

    fn json() -> impl Strategy<Value = Value> {
        let text = "[a{}\\[\\],:\"\\\\\u{e9}\n ]{0,6}";
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f32>().prop_map(Value::from),
            text.prop_map(Value::from),
        ];
        leaf.prop_recursive(5, 60, 6, move |inner| {
            let members = vec((text, inner.clone()), 0..6);
            prop_oneof![
                vec(inner, 0..6).prop_map(Value::from),
                members.prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn counts_match_the_decoded_text_in_any_pieces(value in json(), pretty in any::<bool>()) {
            let text = if pretty { serde_json::to_vec_pretty(&value) } else { serde_json::to_vec(&value) }.unwrap();
            let whole = scanned([&text[..]]);
            prop_assert_eq!((whole.tokens, whole.objects), counted(&value));
            for at in 0..=text.len() {
                let (start, end) = text.split_at(at);
                prop_assert_eq!(scanned([start, end]), whole);
            }
            prop_assert_eq!(scanned(text.chunks(1)), whole);
        }
    }
}
