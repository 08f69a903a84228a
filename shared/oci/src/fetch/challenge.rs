//! Authentication challenges: `WWW-Authenticate` (RFC 9110, section 11.6.1).

use http::{HeaderMap, header::WWW_AUTHENTICATE};

/// Longest header that is parsed, in bytes.
const MAX_BYTES: usize = 4 << 10;

/// A challenge that can be met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// A token is obtained at the realm (distribution token specification).
    Bearer {
        /// URL of the token server.
        realm: String,
        /// Name of the registry at the token server.
        service: Option<String>,
    },
    /// User and password are sent (RFC 7617).
    Basic,
}

impl Challenge {
    /// Returns the preferred challenge of a response: Bearer before Basic.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let values = headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
        let challenges: Vec<_> = values.filter(|value| value.len() <= MAX_BYTES).flat_map(parse).collect();
        let bearer = challenges.iter().find(|challenge| matches!(challenge, Self::Bearer { .. }));
        bearer.or(challenges.first()).cloned()
    }
}

fn parse(value: &str) -> Vec<Challenge> {
    let mut rest = value;
    let mut found = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let (scheme, after) = token(rest);
        if scheme.is_empty() {
            return found;
        }
        let mut realm = None;
        let mut service = None;
        rest = after;
        while let Some((name, value, after)) = parameter(rest) {
            match () {
                () if name.eq_ignore_ascii_case("realm") => realm = Some(value),
                () if name.eq_ignore_ascii_case("service") => service = Some(value),
                () => {}
            }
            rest = after;
        }
        match realm {
            Some(realm) if scheme.eq_ignore_ascii_case("bearer") => found.push(Challenge::Bearer { realm, service }),
            _ if scheme.eq_ignore_ascii_case("basic") => found.push(Challenge::Basic),
            _ => {}
        }
    }
}

/// Splits off the leading token characters.
fn token(text: &str) -> (&str, &str) {
    let is_token = |char: char| char.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(char);
    let end = text.find(|char| !is_token(char)).unwrap_or(text.len());
    text.split_at_checked(end).unwrap_or((text, ""))
}

/// Splits off `name=value`; `None` if a scheme or the end follows.
fn parameter(text: &str) -> Option<(&str, String, &str)> {
    let (name, rest) = token(text.trim_start_matches([' ', '\t', ',']));
    let rest = rest.trim_start().strip_prefix('=')?.trim_start();
    let Some(quoted) = rest.strip_prefix('"') else {
        // More than a token is accepted: some servers do not quote URLs.
        let end = rest.find([',', ' ', '\t']).unwrap_or(rest.len());
        let (value, rest) = rest.split_at_checked(end)?;
        return Some((name, value.to_owned(), rest));
    };
    let mut value = String::new();
    let mut escaped = false;
    for (index, char) in quoted.char_indices() {
        match char {
            '"' if !escaped => return Some((name, value, quoted.get(index + 1..).unwrap_or_default())),
            '\\' if !escaped => escaped = true,
            _ => {
                value.push(char);
                escaped = false;
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(values: &[&str]) -> Option<Challenge> {
        let headers = values.iter().map(|value| (WWW_AUTHENTICATE, value.parse().unwrap()));
        Challenge::of(&headers.collect())
    }

    fn bearer(realm: &str, service: Option<&str>) -> Option<Challenge> {
        Some(Challenge::Bearer { realm: realm.into(), service: service.map(str::to_owned) })
    }

    #[test]
    fn challenges_of_registries_are_parsed() {
        let docker = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push""#;
        assert_eq!(of(&[docker]), bearer("https://auth.docker.io/token", Some("registry.docker.io")));
        assert_eq!(of(&[r#"bearer REALM = "a\"b" , error="x""#]), bearer("a\"b", None));
        assert_eq!(of(&[r#"Basic realm="x", Bearer realm=y"#]), bearer("y", None));
        assert_eq!(of(&[r#"Basic realm="x""#, r#"Bearer realm="z""#]), bearer("z", None));
        assert_eq!(of(&["Basic"]), Some(Challenge::Basic));
        assert_eq!(of(&["Negotiate, Basic realm=\"x\""]), Some(Challenge::Basic));
        // Values without quotes, as some registries and proxies send them.
        let unquoted =
            "Bearer service=a.example.org:5000, realm=https://a.example.org/token?x=y,scope=repository:a:pull";
        assert_eq!(of(&[unquoted]), bearer("https://a.example.org/token?x=y", Some("a.example.org:5000")));
        assert_eq!(of(&["Negotiate YWI=, Basic realm=x"]), Some(Challenge::Basic));
        for none in ["", "Bearer", "Bearer service=\"x\"", "Bearer realm=\"open", "Digest realm=\"x\"", "=", "\"\""] {
            assert_eq!(of(&[none]), None, "{none}");
        }
    }

    proptest! {
        #[test]
        fn any_header_is_parsed_or_refused(text in "[ -~]{0,200}") {
            let _ = parse(&text);
        }
    }
}
