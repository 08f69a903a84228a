//! KCP's catalog as read at one time, and what each visibility class gets of it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use kube::ResourceExt;
use tidewatch_shared::api::{ModuleReleaseMeta, ModuleTemplate};

use super::{
    desired::{self, ComputeError, Wanted},
    visibility::{Admission, Class, Exclusion, template_name, visible_channels},
};

/// Classes whose catalog is kept. Two labels and the restricted modules make the classes, and KCP sets all of them; above
/// this a catalog is computed for each pass.
const MAX_CLASSES: usize = 256;

/// Templates and release metas of KCP, by name, and the catalogs computed from them.
pub(super) struct Snapshot {
    templates: BTreeMap<String, Arc<ModuleTemplate>>,
    metas: BTreeMap<String, (Arc<ModuleReleaseMeta>, Admission)>,
    classes: Mutex<HashMap<Class, Arc<Wanted>>>,
}

impl Snapshot {
    pub(super) fn new(
        templates: Vec<Arc<ModuleTemplate>>,
        metas: Vec<Arc<ModuleReleaseMeta>>,
        restricted: &BTreeSet<String>,
    ) -> Self {
        let admitted = metas.into_iter().map(|meta| {
            let admission = Admission::of(&meta, restricted);
            warn_of(&meta, &admission);
            (meta.name_any(), (meta, admission))
        });
        Self {
            templates: templates.into_iter().map(|template| (template.name_any(), template)).collect(),
            metas: admitted.collect(),
            classes: Mutex::default(),
        }
    }

    pub(super) fn class(&self, kyma_labels: &BTreeMap<String, String>) -> Class {
        Class::of(kyma_labels, self.metas.values().map(|(meta, admission)| (&*meta.spec.module_name, admission)))
    }

    /// The catalog of a class, computed once.
    pub(super) fn wanted(&self, class: Class) -> Result<Arc<Wanted>, ComputeError> {
        let classes = || self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(wanted) = classes().get(&class) {
            return Ok(Arc::clone(wanted));
        }
        let wanted = Arc::new(self.compute(&class)?);
        let mut classes = classes();
        if classes.len() < MAX_CLASSES {
            classes.insert(class, Arc::clone(&wanted));
        }
        Ok(wanted)
    }

    /// Release metas that admit the class, with the channels that it may see, if any; and the templates that those channels
    /// reach by module and version.
    fn compute(&self, class: &Class) -> Result<Wanted, ComputeError> {
        let mut objects = Vec::new();
        let mut reached = BTreeSet::new();
        for (meta, admission) in self.metas.values() {
            if !class.admits(&meta.spec.module_name, admission) {
                continue;
            }
            let channels = visible_channels(class, meta, &self.templates);
            if channels.is_empty() {
                continue;
            }
            objects.push(desired::release_meta(meta, &channels)?);
            reached.extend(channels.into_values());
        }
        for template in self.templates.values().filter(|template| class.sees_template(template)) {
            let conventional = template_name(
                template.spec.module_name.as_deref().unwrap_or_default(),
                template.spec.version.as_deref().unwrap_or_default(),
            );
            if reached.contains(&conventional) {
                objects.push(desired::template(template)?);
            }
        }
        Ok(Wanted::new(objects))
    }
}

fn warn_of(meta: &ModuleReleaseMeta, admission: &Admission) {
    let name = meta.name_any();
    match admission {
        Admission::Nobody(Exclusion::Malformed(why)) => {
            tracing::warn!(release_meta = name, why, "the kymaSelector cannot be read: nobody sees this module");
        }
        Admission::Nobody(Exclusion::NotRestricted) => {
            tracing::warn!(release_meta = name, "a kymaSelector on a module that is not restricted: nobody sees it");
        }
        Admission::Nobody(Exclusion::Mandatory | Exclusion::SelectsNobody)
        | Admission::Everyone
        | Admission::Selected(_) => {}
    }
}
