//! Probes of a container: `httpGet` on the port assigned to the container's port.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use k8s_openapi::{
    api::core::v1::{Container, Probe},
    apimachinery::pkg::util::intstr::IntOrString,
};
use tokio::time::Instant;

use super::{rewrite::Ports, start_error::StartError};
use crate::http;

/// Longest period of a readiness probe, so that waits for readiness are short.
const LONGEST_PERIOD: Duration = Duration::from_secs(1);

/// One probe over the lifetime of one process.
#[derive(Debug)]
pub(super) struct Prober {
    address: SocketAddr,
    path: String,
    period: Duration,
    timeout: Duration,
    failure_threshold: i32,
    success_threshold: i32,
    next: Instant,
    consecutive: i32,
    last: Option<bool>,
    result: Option<bool>,
}

impl Prober {
    /// Reads a probe; `quick` shortens its period to a second. The first probe comes after its initial delay.
    ///
    /// # Errors
    /// [`StartError::Unsupported`] for other probes than `httpGet` over plain HTTP.
    pub(super) fn new(
        probe: &Probe,
        container: &Container,
        ports: &mut Ports,
        is_readiness: bool,
        now: Instant,
    ) -> Result<Self, StartError> {
        let get = probe.http_get.as_ref().filter(|get| get.scheme.as_deref() != Some("HTTPS") && get.host.is_none());
        let get =
            get.ok_or_else(|| StartError::Unsupported("a probe that is no httpGet over plain HTTP".to_owned()))?;
        let port = number(&get.port, container)?;
        let port = ports.of(port).map_err(|error| StartError::Host("find a free port", error))?;
        let seconds = |wanted: Option<i32>, default: u64| {
            let wanted = wanted.and_then(|wanted| u64::try_from(wanted).ok()).filter(|wanted| *wanted > 0);
            Duration::from_secs(wanted.unwrap_or(default))
        };
        let period = seconds(probe.period_seconds, 10);
        Ok(Self {
            address: (Ipv4Addr::LOCALHOST, port).into(),
            path: get.path.clone().unwrap_or_else(|| "/".to_owned()),
            period: if is_readiness { period.min(LONGEST_PERIOD) } else { period },
            timeout: seconds(probe.timeout_seconds, 1),
            failure_threshold: probe.failure_threshold.unwrap_or(3),
            success_threshold: probe.success_threshold.unwrap_or(1),
            next: now + seconds(probe.initial_delay_seconds, 0),
            consecutive: 0,
            last: None,
            result: None,
        })
    }

    /// Probes if it is due; returns the result by the thresholds, `None` before the first.
    pub(super) async fn poll(&mut self) -> Option<bool> {
        if self.next <= Instant::now() {
            let answer = http::get(self.address, &self.path, self.timeout).await;
            // A redirect counts as success in real kubelets too.
            let good = answer.is_ok_and(|(status, _)| status.is_success() || status.is_redirection());
            self.next = Instant::now() + self.period;
            self.record(good);
        }
        self.result
    }

    fn record(&mut self, good: bool) {
        self.consecutive = if self.last == Some(good) { self.consecutive.saturating_add(1) } else { 1 };
        self.last = Some(good);
        if self.consecutive >= if good { self.success_threshold } else { self.failure_threshold } {
            self.result = Some(good);
        }
    }
}

/// Number of the port that a probe names.
fn number(port: &IntOrString, container: &Container) -> Result<u16, StartError> {
    let number = match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            ports.find(|port| port.name.as_ref() == Some(name)).map(|port| port.container_port)
        }
    };
    let number = number.and_then(|number| u16::try_from(number).ok());
    number.ok_or_else(|| StartError::Unsupported(format!("the port {port:?} of a probe")))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn container() -> Container {
        from_value(json!({"name": "server", "ports": [{"name": "metrics", "containerPort": 2112}]})).expect("one")
    }

    fn prober(probe: serde_json::Value) -> Result<Prober, StartError> {
        let probe = from_value(probe).expect("a probe");
        Prober::new(&probe, &container(), &mut Ports::default(), true, Instant::now())
    }

    #[tokio::test]
    async fn thresholds_count_consecutive_results() {
        let mut prober = prober(json!({"httpGet": {"path": "/readyz", "port": "metrics"}, "failureThreshold": 2,
            "successThreshold": 1, "periodSeconds": 5, "initialDelaySeconds": 60}))
        .expect("known");
        assert_eq!((prober.poll().await, prober.period), (None, Duration::from_secs(1)));
        let mut after = |good| {
            prober.record(good);
            prober.result
        };
        let seen = [false, true, false, true, false, false, true].map(&mut after);
        assert_eq!(
            seen,
            [None, Some(true), Some(true), Some(true), Some(true), Some(false), Some(true)],
            "two failures in a row, one success"
        );
    }

    #[tokio::test]
    async fn unsupported_probes_are_refused() {
        for bad in [
            json!({"exec": {"command": ["true"]}}),
            json!({"httpGet": {"port": "other"}}),
            json!({"httpGet": {"port": 2112, "scheme": "HTTPS"}}),
        ] {
            assert!(matches!(prober(bad.clone()), Err(StartError::Unsupported(_))), "{bad}");
        }
    }
}
