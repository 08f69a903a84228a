//! Every shape of module in `tests/modules/shapes`, all of them in one runtime.

use std::collections::BTreeSet;

use tidewatch_testing::{landscape::DEADLINE, modules::shapes};

use super::{
    corpus::{Corpus, Member},
    *,
};

/// Objects that stay after the removal of a shape.
fn left(shape: &str) -> BTreeSet<String> {
    let left: &[&str] = match shape {
        // Kubernetes keeps the claims of a StatefulSet.
        "stateful-claims" => {
            &["PersistentVolumeClaim kyma-system/data-store-0", "PersistentVolumeClaim kyma-system/data-store-1"]
        }
        _ => &[],
    };
    left.iter().map(|object| (*object).to_owned()).collect()
}

#[tokio::test]
async fn every_shape_is_installed_rests_is_upgraded_and_leaves_nothing() -> TestResult {
    let names = shapes::names()?;
    let member = |name: &String| Member { default_cr: shapes::default_cr(name), manager: None, left: left(name) };
    let members = names.iter().map(|name| (name.clone(), member(name))).collect();
    let mut corpus = Corpus::start("shapes", members, DEADLINE).await?;
    let before = corpus.objects().await?;
    corpus.install(names).await?;
    corpus.becomes_idle().await;
    corpus.restart_and_rest().await?;
    corpus.upgrade().await?;
    corpus.leave(&before).await?;
    let failures = corpus.failures();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}
