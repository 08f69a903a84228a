//! Requests that an API server answered, by its own metrics.

use anyhow::Result;
use tidewatch_testing::{control_plane::Cluster, product::metric_sum};

/// Requests since the API server started, watches included, without health checks and without this read of the metrics.
pub(super) async fn answered(cluster: &Cluster) -> Result<f64> {
    let request = http::Request::get("/metrics").body(Vec::new())?;
    let page = cluster.client().await?.request_text(request).await?;
    Ok(metric_sum(&page, "apiserver_request_total", |labels| !labels.contains(",resource=\"\"")))
}
