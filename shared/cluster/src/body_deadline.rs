//! Deadline of a response's body: without one, a list whose server stalls amid its body would never end.

use std::time::Duration;

use http::Uri;
use thiserror::Error;

/// The body of a response was not complete in time.
#[derive(Clone, Copy, Debug, Error)]
#[error("the response was not complete within {} s", .0.as_secs_f32())]
pub struct BodyDeadlineError(pub(super) Duration);

/// Returns true for a request that begins a watch.
pub fn is_watch(uri: &Uri) -> bool {
    let parameters = uri.query().unwrap_or_default().split('&');
    parameters.into_iter().any(|parameter| matches!(parameter, "watch=true" | "watch=1"))
}

/// Extension of a request for a response of any length: the deadline holds for each part of its body.
#[derive(Clone, Copy, Debug)]
pub struct DeadlinePerPart;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watches_are_recognized_by_their_query() {
        for (uri, expected) in [
            ("/api/v1/namespaces/n/configmaps?&watch=true&timeoutSeconds=290", true),
            ("/api/v1/configmaps?watch=1", true),
            ("/api/v1/configmaps?limit=500&fieldSelector=metadata.name%3Dwatch", false),
            ("/api/v1/namespaces/watch=true/configmaps", false),
        ] {
            assert_eq!(is_watch(&Uri::from_static(uri)), expected, "{uri}");
        }
    }
}
