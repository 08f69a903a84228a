//! Requests on a kind in any version that the runtime cluster serves.

use std::sync::Arc;

use kube::Client;
use tidewatch_cluster::kinds::{Kind, Kinds};

use super::failure::Failure;

/// Finds a kind in a version that the runtime serves. `None` if it does not serve the kind at all.
pub(super) async fn locate(
    client: &Client,
    kinds: &mut Kinds,
    group: &str,
    kind: &str,
) -> Result<Option<Arc<Kind>>, Failure> {
    kinds.locate(client, group, kind).await.map_err(Failure::during(format!("find the kind {kind}")))
}

/// Sends a request on a kind in a version that the runtime serves, and once more if the known version is out of date. `None`
/// if the kind is not served.
pub(super) async fn in_served_version<T, F>(
    client: &Client,
    kinds: &mut Kinds,
    group: &str,
    kind: &str,
    mut send: impl FnMut(Arc<Kind>) -> F + Send,
) -> Result<Option<T>, Failure>
where
    F: Future<Output = Result<T, Failure>> + Send,
{
    let Some(located) = locate(client, kinds, group, kind).await? else { return Ok(None) };
    match send(located).await {
        Err(failure) if failure.is_unserved => {}
        sent => return sent.map(Some),
    }
    kinds.invalidate(group);
    let Some(located) = locate(client, kinds, group, kind).await? else { return Ok(None) };
    send(located).await.map(Some)
}
