//! Order of the actions of an installation.

use serde_json::Value;

use super::*;
use crate::inventory::DEFINITIONS;

fn object(stage: Stage, group: &str, kind: &str, name: &str) -> RenderedObject {
    let key = ObjectKey::new(group, kind, "", name);
    RenderedObject { key, version: "v1".to_owned(), stage, served: true, body: Value::Null }
}

#[test]
fn only_the_configuration_is_applied_while_crds_are_awaited() {
    let unserved = object(Stage::Configuration, "other.test", "Other", "x");
    let rendered = [
        object(Stage::Definitions, DEFINITIONS, "CustomResourceDefinition", "samples.example.test"),
        object(Stage::Definitions, "", "Namespace", "n"),
        object(Stage::Configuration, "", "ConfigMap", "a"),
        RenderedObject { served: false, ..unserved },
        object(Stage::Configuration, "", "ConfigMap", "b"),
        object(Stage::Workloads, "apps", "Deployment", "d"),
        object(Stage::CustomResources, "example.test", "Sample", "s"),
    ];
    let [definition, namespace, first, _, second, manager, _] = &rendered;
    let mut inventory = Inventory::default();
    for object in rendered.iter().filter(|object| object.served) {
        inventory.grow(&object.key, &object.version);
    }
    let mut facts = Facts {
        goal: Goal::Install,
        has_finalizers: true,
        rendered: Some(&rendered[..]),
        inventory,
        recovered: None,
        seen: BTreeMap::new(),
        established: None,
        default_object: DefaultObject::NotWanted,
        default_created: false,
        installation: Installation::Ours,
        blocked: None,
    };
    assert_eq!(step(&facts), Action::Apply(vec![definition, namespace]));
    for object in [definition, namespace] {
        facts.seen.insert(object.key.clone(), Seen::Current);
    }
    let expected = Action::AwaitDefinitions { definitions: vec![definition], meanwhile: vec![first, second] };
    assert_eq!(step(&facts), expected);
    // Not all of them were applied meanwhile.
    facts.seen.insert(first.key.clone(), Seen::Current);
    facts.established = Some(true);
    assert_eq!(step(&facts), Action::Apply(vec![second]));
    facts.seen.insert(second.key.clone(), Seen::Current);
    assert_eq!(step(&facts), Action::Apply(vec![manager]));
    facts.established = Some(false);
    assert_eq!(step(&facts), Action::End, "no manager starts without its kinds");
}
