//! An OCI registry on loopback, with the requests for one repository.

use std::cell::Cell;

use tidewatch_oci::testing::{Access, FakeRegistry};
use tokio::task::JoinSet;

/// Path of the repository.
pub(crate) const REPOSITORY: &str = "/v2/modules/component-descriptors/kyma-project.io/module/sample/";

/// A running registry.
pub(crate) struct Registry {
    pub(crate) server: FakeRegistry,
    port: u16,
    /// Number of requests that have been taken.
    taken: Cell<usize>,
    _serving: JoinSet<()>,
}

impl Registry {
    /// Starts a registry that is empty; with a password, it is that of the user `tide`.
    pub(crate) async fn start(password: Option<&'static str>) -> Self {
        Self::with(password.map_or(Access::Anonymous, Access::Password)).await
    }

    /// Starts a registry that is empty.
    pub(crate) async fn with(access: Access) -> Self {
        let server = FakeRegistry::default();
        server.demand(access);
        let (port, serving) = server.listen(None).await;
        Self { server, port, taken: Cell::default(), _serving: serving }
    }

    /// Its address with the path of the repositories, for the command line.
    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/modules", self.port)
    }

    /// Takes method and path of the requests so far, without the repository.
    pub(crate) fn received(&self) -> Vec<String> {
        let all = self.server.received();
        let new = all.iter().skip(self.taken.replace(all.len()));
        let path = |uri: &str| {
            let path = uri.split_once(REPOSITORY).map_or("", |(_, path)| path);
            path.split('?').next().unwrap_or_default().to_owned()
        };
        new.map(|request| format!("{} {}", request.method, path(&request.uri))).collect()
    }
}
