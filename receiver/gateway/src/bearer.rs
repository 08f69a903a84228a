//! Bearer tokens of requests.

use http::{HeaderMap, header::AUTHORIZATION};

use super::http::single_value;

/// Returns the bearer token of a request that has exactly one (RFC 6750, section 2.1).
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = single_value(headers, &AUTHORIZATION)?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn exactly_one_bearer_token_is_accepted() {
        let read = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(AUTHORIZATION, HeaderValue::from_static(value));
            }
            bearer(&headers).map(str::to_owned)
        };
        for (values, token) in [
            (&["Bearer abc"][..], Some("abc")),
            (&["bearer abc"], Some("abc")),
            (&["Bearer  abc "], Some("abc")),
            (&[], None),
            (&["Bearer"], None),
            (&["Bearer "], None),
            (&["Bearer   "], None),
            (&["Basic abc"], None),
            (&["Bearer abc", "Bearer abc"], None),
        ] {
            assert_eq!(read(values).as_deref(), token, "{values:?}");
        }
    }
}
