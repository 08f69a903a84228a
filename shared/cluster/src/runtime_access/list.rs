//! Lists a kind in pages, bounded in pages, objects, bytes and time, so that no server can return an endless list.

use std::{fmt, marker::PhantomData, sync::Arc, time::Duration};

use http_body_util::{BodyExt, Limited};
use kube::{
    Api,
    api::ListParams,
    client::Body,
    core::{ListMeta, Request, Status},
};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _, SeqAccess, Visitor},
};
use thiserror::Error;
use tokio::time::timeout;

use super::{
    budget::{self, Reservation},
    chain,
    response::LimitError,
};

/// Default number of objects per page.
const PAGE: u32 = 100;

/// Smallest page. After a page that exceeded the response limit, the following ones are requested with fewer objects,
/// down to this.
const SMALLEST_PAGE: u32 = 1;

/// Objects accepted in one page. A server that ignores the limit is not a Kubernetes API server.
const MAX_PER_PAGE: usize = 1000;

/// Limits of a list.
#[derive(Clone, Copy, Debug)]
pub struct ListLimits {
    /// Requested objects per page, at most a thousand.
    pub page: u32,
    /// Responses, including failed ones that are repeated.
    pub pages: usize,
    /// Objects of all pages.
    pub objects: usize,
    /// Bytes of all pages.
    pub bytes: usize,
    /// Timeout of all pages together.
    pub deadline: Duration,
}

impl Default for ListLimits {
    fn default() -> Self {
        Self { page: PAGE, pages: 200, objects: 10_000, bytes: 64 << 20, deadline: Duration::from_secs(60) }
    }
}

/// Failure of a list. Must never be treated as an empty list.
#[derive(Debug, Error)]
pub enum ListError {
    /// One request failed.
    #[error("a page could not be read")]
    Page(#[source] kube::Error),
    /// More than [`ListLimits::pages`].
    #[error("the list has more than {0} pages")]
    Pages(usize),
    /// More than [`ListLimits::objects`].
    #[error("the list has more than {0} objects")]
    Objects(usize),
    /// Longer than [`ListLimits::deadline`].
    #[error("the list was not complete within {0:?}")]
    Timeout(Duration),
}

impl From<ListError> for kube::Error {
    fn from(error: ListError) -> Self {
        match error {
            ListError::Page(error) => error,
            error => Self::Service(error.into()),
        }
    }
}

/// Lists all objects that match `selection` (its `limit` and `continue_token` are set here), and keeps what `keep` returns of
/// each. After its continue token expired, a list starts again, within the same limits. For a kind of `PartialObjectMeta`
/// only metadata is transferred. The memory of one page at a time is reserved.
///
/// # Errors
/// [`ListError`]; a partial list is never returned.
pub async fn list_map<K, T>(
    api: &Api<K>,
    selection: &ListParams,
    limits: &ListLimits,
    keep: impl FnMut(K) -> T,
) -> Result<Vec<T>, ListError>
where
    K: kube::Resource + Clone + DeserializeOwned,
{
    let pages = pages(api, selection.clone(), limits, keep);
    timeout(limits.deadline, pages).await.map_err(|_| ListError::Timeout(limits.deadline))?
}

/// Lists the first objects that match `selection`, at most `limit` of them, in one request.
///
/// # Errors
/// Of the request.
pub async fn list_first<K>(api: &Api<K>, selection: &ListParams, limit: u16) -> kube::Result<Vec<K>>
where
    K: kube::Resource + Clone + DeserializeOwned,
{
    let params = selection.clone().limit(limit.into());
    let (page, _reservation) = page(api, &params, &mut ListLimits::default().bytes).await?;
    Ok(page.items.0.into_iter().take(limit.into()).collect())
}

/// Lists one page of the objects that match `selection`, with its limit and token. Returns the token of the next page, if
/// there is one.
///
/// # Errors
/// Of the request; 410 if the token is too old.
pub async fn list_page<K>(api: &Api<K>, selection: &ListParams) -> kube::Result<(Vec<K>, Option<String>)>
where
    K: kube::Resource + Clone + DeserializeOwned,
{
    let (page, _reservation) = page(api, selection, &mut ListLimits::default().bytes).await?;
    let next = page.metadata.and_then(|metadata| metadata.continue_).filter(|token| !token.is_empty());
    Ok((page.items.0, next))
}

/// Reads all pages, and maps their objects.
async fn pages<K, T>(
    api: &Api<K>,
    mut params: ListParams,
    limits: &ListLimits,
    mut keep: impl FnMut(K) -> T,
) -> Result<Vec<T>, ListError>
where
    K: kube::Resource + Clone + DeserializeOwned,
{
    let mut all = Vec::new();
    let mut left = limits.bytes;
    params.limit = Some(limits.page);
    params.continue_token = None;
    for _ in 0..limits.pages {
        let (page, _reservation) = match budget::retain(page(api, &params, &mut left)).await {
            Ok(page) => page,
            Err(error) if too_large(&error) && params.limit > Some(SMALLEST_PAGE) && left > 0 => {
                params.limit = params.limit.map(|limit| (limit / 10).max(SMALLEST_PAGE));
                continue;
            }
            Err(kube::Error::Api(status)) if status.code == 410 && params.continue_token.is_some() => {
                all.clear();
                params.continue_token = None;
                continue;
            }
            Err(error) => return Err(ListError::Page(error)),
        };
        all.extend(page.items.0.into_iter().map(&mut keep));
        if all.len() > limits.objects {
            return Err(ListError::Objects(limits.objects));
        }
        params.continue_token = page.metadata.and_then(|metadata| metadata.continue_).filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(all);
        }
    }
    Err(ListError::Pages(limits.pages))
}

/// True if one response exceeded its limit of bytes or memory; exceeding the budget of the whole list does not count.
fn too_large(error: &kube::Error) -> bool {
    chain::find::<LimitError>(error)
        .is_some_and(|cut| matches!(cut, LimitError::TooLarge(_) | LimitError::TooComplex(_)))
}

/// Reads one page. Its memory is reserved as long as the returned reservation exists.
async fn page<K: kube::Resource + Clone + DeserializeOwned>(
    api: &Api<K>,
    params: &ListParams,
    left: &mut usize,
) -> kube::Result<(Page<K>, Option<Arc<Reservation>>)> {
    let request = Request::new(api.resource_url());
    let request = if K::metadata_api() { request.list_metadata(params) } else { request.list(params) };
    let request = request.map_err(kube::Error::BuildRequest)?;
    let response = api.clone().into_client().send(request.map(Body::from)).await?;
    let status = response.status();
    // Absent with the API server of a test.
    let reservation = response.extensions().get::<Arc<Reservation>>().cloned();
    let limited = Limited::new(response.into_body(), *left).collect().await;
    let body = limited.map_err(|error| match error.downcast::<kube::Error>() {
        Ok(error) => *error,
        Err(error) => kube::Error::Service(error),
    })?;
    let body = body.to_bytes();
    *left = left.saturating_sub(body.len());
    if status.is_success() {
        // kube would log the whole body when it cannot parse it.
        let page = serde_json::from_slice(&body).map_err(kube::Error::SerdeError)?;
        return Ok((page, reservation));
    }
    let failure = serde_json::from_slice(&body).unwrap_or_else(|_| Status::failure("no readable status", ""));
    // The code of the head takes precedence.
    Err(kube::Error::Api(failure.with_code(status.as_u16()).boxed()))
}

#[derive(Deserialize)]
#[serde(bound = "K: Deserialize<'de>")]
struct Page<K> {
    metadata: Option<ListMeta>,
    items: Items<K>,
}

/// Objects of a page, at most [`MAX_PER_PAGE`]: the smallest objects in a page need the most memory per byte.
struct Items<K>(Vec<K>);

impl<'de, K: Deserialize<'de>> Deserialize<'de> for Items<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BoundedItems<K>(PhantomData<K>);
        impl<'de, K: Deserialize<'de>> Visitor<'de> for BoundedItems<K> {
            type Value = Items<K>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of objects")
            }

            fn visit_unit<E>(self) -> Result<Items<K>, E> {
                Ok(Items(Vec::new()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Items<K>, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    if items.len() == MAX_PER_PAGE {
                        return Err(A::Error::custom("the page has more objects than requested"));
                    }
                    items.push(item);
                }
                Ok(Items(items))
            }
        }
        deserializer.deserialize_any(BoundedItems(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::{Response, StatusCode};
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::{Client, core::PartialObjectMeta};
    use parking_lot::Mutex;
    use serde_json::{Value, json};
    use tower::service_fn;

    use super::*;
    use crate::testing;

    /// Fake API server that responds by a function of the query, and the log of its queries.
    fn server(
        answer: impl Fn(&str) -> (u16, Value) + Send + Sync + 'static,
    ) -> (Api<ConfigMap>, Arc<Mutex<Vec<String>>>) {
        let queries = Arc::new(Mutex::new(Vec::new()));
        let log = queries.clone();
        let client = testing::client("default", move |parts, _| {
            let query = parts.uri.query().unwrap_or_default().to_owned();
            let (code, body) = answer(&query);
            log.lock().push(query);
            Some((StatusCode::from_u16(code).unwrap(), body.to_string()))
        });
        (Api::namespaced(client, "a"), queries)
    }

    async fn list_all<K>(api: &Api<K>, selection: &ListParams, limits: &ListLimits) -> Result<Vec<K>, ListError>
    where
        K: kube::Resource + Clone + DeserializeOwned,
    {
        list_map(api, selection, limits, |object| object).await
    }

    fn list(names: std::ops::Range<u32>, token: &str) -> Value {
        let items: Vec<_> = names.map(|n| json!({"metadata": {"name": format!("n{n}")}})).collect();
        json!({"metadata": {"continue": token}, "items": items})
    }

    #[tokio::test]
    async fn pages_are_joined() {
        let (api, queries) =
            server(|query| (200, if query.contains("continue=t") { list(2..3, "") } else { list(0..2, "t") }));
        let all = list_all(&api, &ListParams::default().labels("a=b"), &ListLimits::default()).await.unwrap();
        let names: Vec<_> = all.iter().filter_map(|map| map.metadata.name.as_deref()).collect();
        assert_eq!(names, ["n0", "n1", "n2"]);
        let queries = queries.lock();
        assert_eq!(queries.len(), 2);
        assert!(
            queries.iter().all(|query| query.contains("limit=100") && query.contains("labelSelector=a%3Db")),
            "{queries:?}"
        );
    }

    #[tokio::test]
    async fn endless_list_ends_at_each_limit() {
        let endless = || server(|_| (200, list(0..10, "more"))).0;
        let limits = ListLimits::default();
        let by = |limits| async move { list_all(&endless(), &ListParams::default(), &limits).await.unwrap_err() };
        assert!(matches!(by(ListLimits { pages: 3, ..limits }).await, ListError::Pages(3)));
        assert!(matches!(by(ListLimits { objects: 25, ..limits }).await, ListError::Objects(25)));
        assert!(matches!(by(ListLimits { bytes: 1000, ..limits }).await, ListError::Page(kube::Error::Service(_))));
        let (api, _) = server(|_| (200, list(0..1001, "")));
        let crowded = list_all(&api, &ListParams::default(), &limits).await.unwrap_err();
        assert!(matches!(crowded, ListError::Page(kube::Error::SerdeError(_))), "{crowded:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_list_times_out() {
        let client = testing::client("default", |_, _| None::<(StatusCode, String)>);
        let api: Api<ConfigMap> = Api::namespaced(client, "a");
        let error = list_all(&api, &ListParams::default(), &ListLimits::default()).await.unwrap_err();
        assert!(matches!(error, ListError::Timeout(_)), "{error:?}");
    }

    #[tokio::test]
    async fn metadata_lists_request_only_metadata() {
        let accepted = Arc::new(Mutex::new(Vec::new()));
        let log = accepted.clone();
        let client = testing::client("default", move |parts, _| {
            let accept = parts.headers[http::header::ACCEPT].to_str().unwrap().to_owned();
            log.lock().push((accept, parts.uri.query().unwrap_or_default().contains("limit=500")));
            Some((StatusCode::OK, list(0..3, "").to_string()))
        });
        let api: Api<PartialObjectMeta<ConfigMap>> = Api::namespaced(client, "a");
        let limits = ListLimits { page: 500, ..ListLimits::default() };
        let all = list_all(&api, &ListParams::default(), &limits).await.unwrap();
        assert_eq!(all[2].metadata.name.as_deref(), Some("n2"));
        let accepted = accepted.lock();
        assert!(
            matches!(&accepted[..], [(accept, true)] if accept.contains("as=PartialObjectMetadataList")),
            "{accepted:?}"
        );
    }

    #[tokio::test]
    async fn too_large_pages_are_requested_smaller() {
        let queries = Arc::new(Mutex::new(Vec::new()));
        let log = queries.clone();
        let service = service_fn(move |request: http::Request<Body>| {
            let query = request.uri().query().unwrap_or_default().to_owned();
            let fits = !query.contains("limit=100");
            log.lock().push(query);
            let body = Body::from(list(0..3, "").to_string().into_bytes());
            async move { if fits { Ok(Response::new(body)) } else { Err(LimitError::TooLarge(16)) } }
        });
        let api: Api<ConfigMap> = Api::namespaced(Client::new(service, "default"), "a");
        assert_eq!(list_all(&api, &ListParams::default(), &ListLimits::default()).await.unwrap().len(), 3);
        let queries = queries.lock();
        let limits: Vec<_> =
            queries.iter().flat_map(|query| query.split('&')).filter(|pair| pair.starts_with("limit=")).collect();
        assert_eq!(limits, ["limit=100", "limit=10"]);
    }

    #[tokio::test]
    async fn list_restarts_after_an_expired_token() {
        let tries = Mutex::new(0);
        let (api, queries) = server(move |query| {
            let mut tries = tries.lock();
            *tries += 1;
            match (*tries, query.contains("continue=")) {
                (1 | 3, false) => (200, list(0..2, "t")),
                (2, true) => (410, json!({"kind": "Status", "code": 410, "reason": "Expired"})),
                (4, true) => (200, list(2..3, "")),
                other => panic!("{other:?}"),
            }
        });
        let all = list_all(&api, &ListParams::default(), &ListLimits::default()).await.unwrap();
        let names: Vec<_> = all.iter().filter_map(|map| map.metadata.name.as_deref()).collect();
        assert_eq!(names, ["n0", "n1", "n2"], "each once");
        assert_eq!(queries.lock().len(), 4);
    }

    #[tokio::test]
    async fn repeated_expiry_ends_at_the_page_limit_and_errors_are_not_empty_lists() {
        let expired = json!({"kind": "Status", "code": 410, "reason": "Expired"});
        let (api, queries) = server(move |query| match query {
            query if query.contains("continue=old") => (410, expired.clone()),
            _ => (200, list(0..1, "old")),
        });
        let error = list_all(&api, &ListParams::default(), &ListLimits { pages: 5, ..ListLimits::default() }).await;
        assert!(matches!(error, Err(ListError::Pages(5))));
        assert_eq!(queries.lock().iter().filter(|query| query.contains("continue")).count(), 2);
        // The body has another code than the head.
        let (api, _) = server(|_| (500, json!({"code": 404, "reason": "NotFound"})));
        let error = list_all(&api, &ListParams::default(), &ListLimits::default()).await.unwrap_err();
        assert!(matches!(error, ListError::Page(kube::Error::Api(status)) if status.code == 500));
    }
}
