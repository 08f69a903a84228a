//! Shows the findings of a reconcile in both Kymas.

use tidewatch_cluster::runtime_access::ClientError;
use tidewatch_installer::Readiness;
use tracing::debug;

use super::{ShownStatus, update_runtime, write_runtime};
use crate::kyma::{Error, Reconcile, fetch};

impl Reconcile<'_> {
    /// Writes the findings to both Kymas, each only if its status differs. Returns the runtime cluster's Kyma with its
    /// status, given as the last reconcile left it; `None` if that is unknown.
    pub(in crate::kyma) async fn record(&mut self, last: Option<ShownStatus>) -> Result<Option<ShownStatus>, Error> {
        if self.findings.covers_modules() {
            self.ctx.write_status(&mut self.kyma, &self.findings).await?;
        } else {
            self.ctx.write_conditions(&mut self.kyma, &self.findings.conditions).await?;
        }
        match &self.runtime {
            Some((client, runtime)) => write_runtime(client, runtime, &self.kyma).await,
            // A failed or aborted reconcile may have written only the status in KCP.
            None if last.is_none() || self.kyma.status != self.before => self.show(last).await,
            None => Ok(last),
        }
    }

    /// As [`Self::record`], but a further failure in the runtime cluster is only logged.
    pub(in crate::kyma) async fn record_failure(&mut self) -> Result<(), Error> {
        self.ctx.write_status(&mut self.kyma, &self.findings).await?;
        if let Some((client, runtime)) = &self.runtime
            && let Err(error) = write_runtime(client, runtime, &self.kyma).await
        {
            debug!(kyma = %self.key, %error, "Failure is not shown in the runtime");
        }
        Ok(())
    }

    /// Writes the status to the runtime cluster's Kyma if it differs, which the reconcile had no need to read until
    /// now. It is read only if it was changed since the last reconcile, or if `last` is unknown.
    async fn show(&self, last: Option<ShownStatus>) -> Result<Option<ShownStatus>, Error> {
        // Without access there is no Kyma to write to, and a server that has just not been reached is not asked again.
        if self.outcome.unreached || matches!(&self.findings.conditions.access, Some(Readiness::Not { .. })) {
            return Ok(None);
        }
        let client = match (self.ctx.clients)(self.key) {
            Ok((client, _)) => client,
            Err(ClientError::Access(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if let Some(last) = last
            && let Some(shown) = update_runtime(&client, &last, &self.kyma).await?
        {
            return Ok(Some(shown));
        }
        match fetch::runtime_kyma(&client).await? {
            Some(runtime) => write_runtime(&client, &runtime, &self.kyma).await,
            None => Ok(None),
        }
    }
}
