//! Form of a question between replicas, and of its answer.
//!
//! A question is a POST to `/replica/v1/<topic>` on the relay port. The answer names the shards that it covers in a header
//! field, so that the payload is that of the responder alone.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use tidewatch_api::{
    identity::Instance,
    shard::{ShardCount, ShardId},
};
use tidewatch_fleet::peers::Topic;
use tidewatch_kit::variant::VariantName as _;

use super::{RelayError, RelayedPort, RelayedRequest, Replica, http2::ResponseBody};
use crate::{
    http::{response, single_value},
    ports::HttpResponse,
};

/// Path of all questions, before the topic.
pub(crate) const QUESTION_PATH: &str = "/replica/v1/";
/// Bytes of a question at most.
pub(crate) const MAX_QUESTION_BYTES: usize = 64 << 10;
/// Bytes of an answer at most: twice the report of 7,000 runtimes, which have about a KiB each.
pub(super) const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Field with the shards that an answer covers. With all of 256 shards it has a third of the bytes that a head may have.
const SHARDS: HeaderName = HeaderName::from_static("tidewatch-shards");

/// Answer of one replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Shards that it covers, with the instances of their holder.
    pub(super) shards: Vec<(ShardId, Instance)>,
    /// Payload of the responder.
    pub(super) payload: Bytes,
}

/// Reason for which a replica did not answer. The name is the metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub(super) enum QuestionError {
    /// There is no connection to the replica, so it certainly did not get the question.
    Gone,
    /// It did not answer in time.
    Late,
    /// The exchange failed after it began, or the answer is malformed.
    Broken,
    /// It cannot answer this now.
    Unavailable,
    /// It does not accept the question, such as an older version a newer topic.
    Refused,
    /// Its answer is too large.
    TooLarge,
}

impl QuestionError {
    /// True if the question may be asked again. A request for a rotation must not arrive twice.
    pub(super) fn permits_retry(self, topic: Topic) -> bool {
        match self {
            Self::Gone => true,
            Self::Broken | Self::Unavailable => topic != Topic::RotateCa,
            Self::Late | Self::Refused | Self::TooLarge => false,
        }
    }
}

impl From<RelayError> for QuestionError {
    fn from(error: RelayError) -> Self {
        match error {
            RelayError::Gone => Self::Gone,
            _ => Self::Broken,
        }
    }
}

/// Builds the request of a question.
pub(super) fn request(replica: &Replica, topic: Topic, question: Bytes) -> Result<Request<Bytes>, RelayError> {
    let path = format!("{QUESTION_PATH}{}", topic.as_str()).parse().map_err(|_| RelayError::Broken)?;
    let mut request = Request::new(());
    (*request.method_mut(), *request.uri_mut()) = (Method::POST, path);
    let (parts, ()) = request.into_parts();
    let port = RelayedPort::Question;
    let authority = replica.name.as_str();
    RelayedRequest { port, parts: &parts, authority, leaf: None, intermediates: &[], source: None, body: question }
        .build()
}

impl Answer {
    /// Makes the response with this answer.
    pub(crate) fn into_response(self) -> HttpResponse {
        let shards = self.shards.iter().map(|(shard, instance)| format!("{shard}={instance}")).collect::<Vec<_>>();
        let mut response = response(StatusCode::OK, "application/octet-stream", Full::new(self.payload));
        // Numbers and hexadecimal digits are valid in a field.
        if let Ok(value) = HeaderValue::try_from(shards.join(",")) {
            response.headers_mut().insert(SHARDS, value);
        }
        response
    }

    /// Reads the response to a question. The caller sets the deadline.
    pub(super) async fn read(response: Response<ResponseBody>, shards: ShardCount) -> Result<Self, QuestionError> {
        match response.status() {
            StatusCode::OK => {}
            StatusCode::SERVICE_UNAVAILABLE => return Err(QuestionError::Unavailable),
            _ => return Err(QuestionError::Refused),
        }
        let shards = covered(response.headers(), shards).ok_or(QuestionError::Broken)?;
        let announced =
            single_value(response.headers(), &header::CONTENT_LENGTH).and_then(|length| length.parse().ok());
        if announced.is_some_and(|length: usize| length > MAX_ANSWER_BYTES) {
            return Err(QuestionError::TooLarge);
        }
        let payload = response.into_body().read(MAX_ANSWER_BYTES).await?;
        Ok(Self { shards, payload })
    }
}

/// Reads the shards that an answer covers; `None` if the field is missing or malformed.
fn covered(headers: &HeaderMap, shards: ShardCount) -> Option<Vec<(ShardId, Instance)>> {
    let pair = |pair: &str| {
        let (shard, instance) = pair.split_once('=')?;
        Some((shards.shard(shard.parse().ok()?)?, instance.parse().ok()?))
    };
    match single_value(headers, &SHARDS)? {
        "" => Some(Vec::new()),
        pairs => pairs.split(',').map(pair).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(response: &HttpResponse) -> &HeaderMap {
        response.headers()
    }

    #[test]
    fn shards_of_an_answer_are_read_as_written_and_fit_into_a_head() {
        let all = ShardCount::new(ShardCount::MAX).unwrap();
        for count in [0, 1, 256] {
            let shards: Vec<_> = all.shards().take(count).map(|shard| (shard, Instance::new(u64::MAX))).collect();
            let response = Answer { shards: shards.clone(), payload: Bytes::from_static(b"p") }.into_response();
            assert!(fields(&response)[&SHARDS].len() < 6 << 10, "a head has 16 KiB");
            assert_eq!(covered(fields(&response), all), Some(shards));
        }
    }

    #[test]
    fn malformed_shards_are_refused() {
        let shards = ShardCount::new(4).unwrap();
        let read = |value: &'static str| {
            covered(&HeaderMap::from_iter([(SHARDS, HeaderValue::from_static(value))]), shards).is_some()
        };
        assert!(read("") && read("3=00000000000000ff"));
        for bad in ["4=00000000000000ff", "-1=00000000000000ff", "1", "1=", "1=ff,", ",", "a=00000000000000ff", "1=x"] {
            assert!(!read(bad), "{bad}");
        }
        assert_eq!(covered(&HeaderMap::new(), shards), None, "not an answer of a replica");
    }

    #[test]
    fn request_for_a_rotation_is_repeated_only_if_it_never_left() {
        use QuestionError as E;
        for error in [E::Gone, E::Late, E::Broken, E::Unavailable, E::Refused, E::TooLarge] {
            assert_eq!(error.permits_retry(Topic::RotateCa), error == E::Gone, "{error:?}");
        }
        assert!(E::Broken.permits_retry(Topic::Report) && !E::Late.permits_retry(Topic::Report));
    }
}
