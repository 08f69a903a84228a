//! The way of a Kyma out of our hands, by its deletion or back to the incumbent: what holds it up is said in KCP, and what is waited for
//! is looked for again.

use std::ops::ControlFlow;

use kube::ResourceExt;
use tidewatch_shared::api::Kyma;

use super::{
    Context, Error,
    status::{self, Conditions, Findings},
};
use crate::{
    controllers::wait::Wait,
    fleet::queue::{Outcome, Works},
};

/// How a Kyma goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// For good.
    Deletion,
    /// To the incumbent.
    HandBack,
}

/// Ends a pass on the way out, or lets it take the last step: with the Kyma as it is then, if nothing is waited for any more.
pub(super) async fn after(
    ctx: &Context,
    kyma: Kyma,
    works: Works,
    way: Way,
    came: Result<Option<Wait>, Error>,
) -> Result<ControlFlow<Outcome, Kyma>, Error> {
    match came {
        Ok(Some(wait)) => {
            let findings = Findings { waits: wait.what, ..Findings::default() };
            say(ctx, kyma, way, findings).await?;
            Ok(ControlFlow::Break(Outcome { again_in: Some(wait.again_in), ..Outcome::ended(works) }))
        }
        // What goes with its status needs no last word in it.
        Ok(None) if way == Way::Deletion => Ok(ControlFlow::Continue(kyma)),
        Ok(None) => say(ctx, kyma, way, Findings::default()).await.map(ControlFlow::Continue),
        Err(error) => {
            if !error.is_conflict() {
                let conditions = Conditions { access: error.access(), ..Conditions::default() };
                let findings = Findings { conditions, failure: Some(error.line()), ..Findings::default() };
                say(ctx, kyma, way, findings).await?;
            }
            Err(error)
        }
    }
}

async fn say(ctx: &Context, mut kyma: Kyma, way: Way, findings: Findings) -> Result<Kyma, Error> {
    let findings = Findings { deleting: way == Way::Deletion, ..findings };
    let (status, version) = status::write_kcp(ctx, &kyma, &findings, &super::now()).await?;
    kyma.status = Some(status);
    kyma.metadata.resource_version = version.or_else(|| kyma.resource_version());
    Ok(kyma)
}
