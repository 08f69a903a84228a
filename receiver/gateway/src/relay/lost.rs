//! Reports of lost connections to the holders of their runtimes. Best effort: a holder that misses one finds by the
//! absence of heartbeats, later, that the runtime is silent.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use futures::future::join_all;
use http::{HeaderValue, Method, Request, header};
use tidewatch_api::identity::RuntimeId;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};

use super::{Relay, RelayError, RelayedPort, RelayedRequest, Replica, response};

/// Reports that wait at most; further ones are dropped.
pub(super) const CAPACITY: usize = 8_192;
/// Reports in one request at most.
const MAX_REPORTS: usize = 512;
/// Bytes of a request's body at most: above that of [`MAX_REPORTS`] with the longest ids.
pub(crate) const MAX_LOST_BYTES: usize = 64 << 10;
/// Path of the reports on the relay port.
pub(crate) const LOST_PATH: &str = "/relay/lost-connections";

/// A runtime that closed or lost its last connection at a replica, or whose heartbeat over one is overdue there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LostConnection {
    /// The runtime.
    pub(crate) runtime: RuntimeId,
    /// Milliseconds since the last request over it: clocks of machines are not compared.
    pub(crate) silent_millis: u64,
}

impl LostConnection {
    /// Parses the reports of a request; `None` if one is malformed.
    pub(crate) fn parse(body: &[u8]) -> Option<Vec<Self>> {
        let lost: Vec<(RuntimeId, u64)> = serde_json::from_slice(body).ok()?;
        Some(lost.into_iter().map(|(runtime, silent_millis)| Self { runtime, silent_millis }).collect())
    }

    /// Writes the body of a request.
    fn write(lost: &[Self]) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(&lost.iter().map(|lost| (&lost.runtime, lost.silent_millis)).collect::<Vec<_>>())
    }
}

/// A report for one holder.
pub(super) struct Report {
    pub(super) holder: Arc<Replica>,
    pub(super) runtime: RuntimeId,
    pub(super) since: Instant,
}

/// Sends the reports.
pub(super) struct LostConnections {
    pub(super) relay: Relay,
    pub(super) queue: mpsc::Receiver<Report>,
}

impl LostConnections {
    /// Runs for ever: the relay itself has a sender of the queue.
    pub(super) async fn run(mut self) {
        let mut reports = Vec::new();
        while self.queue.recv_many(&mut reports, MAX_REPORTS).await > 0 {
            let mut holders = HashMap::<_, (Arc<Replica>, Vec<_>)>::new();
            for Report { holder, runtime, since } in reports.drain(..) {
                let silent_millis = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
                let (_, lost) = holders.entry(holder.name.clone()).or_insert_with(|| (holder, Vec::new()));
                lost.push(LostConnection { runtime, silent_millis });
            }
            // Each has a deadline, so a holder that hangs delays the others by no more than that.
            join_all(holders.into_values().map(|(holder, lost)| self.report(holder, lost))).await;
        }
    }

    async fn report(&self, holder: Arc<Replica>, lost: Vec<LostConnection>) {
        let count = u64::try_from(lost.len()).unwrap_or(u64::MAX);
        let sent = timeout(self.relay.0.deadlines.of(RelayedPort::Lost), self.send(&holder, &lost)).await;
        let is_taken = matches!(sent, Ok(Ok(true)));
        self.relay.0.metrics.lost_reported(if is_taken { "reported" } else { "failed" }, count);
    }

    /// Sends reports to a holder; true if it took them.
    async fn send(&self, holder: &Arc<Replica>, lost: &[LostConnection]) -> Result<bool, RelayError> {
        let body = LostConnection::write(lost).map_err(|_| RelayError::Broken)?;
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = http::Uri::from_static(LOST_PATH);
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let (parts, ()) = request.into_parts();
        let request = RelayedRequest {
            port: RelayedPort::Lost,
            parts: &parts,
            authority: holder.name.as_str(),
            leaf: None,
            intermediates: &[],
            source: None,
            body: Bytes::from(body),
        };
        let sent = self.relay.pool(holder).send(&self.relay, request.build()?).await?;
        Ok(response::read(sent).await?.status().is_success())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read_as_written_and_fit_into_a_body() {
        let runtime: RuntimeId = "r".repeat(63).parse().unwrap();
        let lost = vec![LostConnection { runtime, silent_millis: u64::MAX }; MAX_REPORTS];
        let body = LostConnection::write(&lost).unwrap();
        assert!(body.len() <= MAX_LOST_BYTES, "{}", body.len());
        assert_eq!(LostConnection::parse(&body), Some(lost));
        for bad in ["", "{}", "[[\"-\", 1]]", "[[\"r-1\", -1]]", "[[\"r-1\"]]"] {
            assert_eq!(LostConnection::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
