//! Migration of stored resources before a CRD of the module loses the versions in which they are stored. The API server
//! refuses the CRD until then.

use std::time::Duration;

use tidewatch_api::names::field_manager;
use tidewatch_cluster::stored_versions::{Migration, Turn};

use super::{execution::Execution, failure::Failure, memory::Migrating, render::RenderedObject, step::Seen};

/// Share of a runtime in one reconcile; the next one follows after a second. One CRD of a module is migrated at a time.
const TURN: Turn = Turn { objects: 500, time: Duration::from_secs(5), waits_for_storage: false };

impl<'a> Execution<'a> {
    /// Goes on with the migration that an earlier reconcile has begun. Returns the objects that are to be applied now.
    pub(super) async fn go_on_migrating(&mut self, objects: &[&'a RenderedObject]) -> Vec<&'a RenderedObject> {
        let migrating = self.memory.migrating.as_ref().map(|migrating| migrating.definition.clone());
        let of_migration = |object: &&&RenderedObject| migrating.as_ref() == Some(&object.key);
        let Some(definition) = objects.iter().find(of_migration) else { return objects.to_vec() };
        match self.migrate(definition).await {
            Ok(Some(seen)) => drop(self.facts.seen.insert(definition.key.clone(), seen)),
            Ok(None) => self.memory.migrating = None,
            Err(failure) => {
                self.results.failures.push(failure);
                self.facts.seen.insert(definition.key.clone(), Seen::Failed);
            }
        }
        objects.iter().copied().filter(|object| !self.facts.seen.contains_key(&object.key)).collect()
    }

    /// Migrates the resources of a CRD, if that is what its application needs. Returns `None` if it is not.
    pub(super) async fn migrate(&mut self, object: &'a RenderedObject) -> Result<Option<Seen>, Failure> {
        let RenderedObject { key, version, body, .. } = object;
        let Some(remote) = self.remote(key, version) else { return Ok(None) };
        let found = remote.read("read").await?;
        let Some(migration) = found.and_then(|live| Migration::of(&live, body)) else { return Ok(None) };
        let text = format!("{} in {}", key.name, migration.storage());
        let is_other = |migrating: &Migrating| migrating.definition != *key;
        if !self.results.migrating.is_empty() || self.memory.migrating.as_ref().is_some_and(is_other) {
            self.results.migrating.push(text);
            return Ok(Some(Seen::Migrating));
        }
        let known = self.memory.migrating.take().map(|migrating| migrating.progress);
        let mut progress = known.unwrap_or_default();
        let client = &self.request.cluster.client;
        let advanced = migration.advance(client, &remote.api, field_manager::MODULE, &mut progress, TURN).await;
        if !matches!(advanced, Ok(true)) {
            self.memory.migrating = Some(Migrating { definition: key.clone(), progress });
        }
        match advanced {
            Ok(true) => Ok(Some(self.apply_alone(object).await)),
            Ok(false) => {
                self.results.migrating.push(text);
                Ok(Some(Seen::Migrating))
            }
            Err(error) => Err(Failure::new(error.to_string(), &error.source)),
        }
    }
}
