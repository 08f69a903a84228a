//! Objects that several modules of a catalog have, with other values of one field.

use anyhow::Result;
use serde_json::Value;
use tidewatch_author::check::{Code, Finding};
use tidewatch_engine::preview::{Conflict, conflicts};

use crate::module::{ComparedModule, RegistryFlags};

/// Characters of a value in a message.
const MAX_VALUE: usize = 60;

/// Compares the objects of these versions of modules.
///
/// # Errors
/// A version cannot be read, or is invalid.
pub(super) async fn findings(references: &[String], registry: &RegistryFlags) -> Result<Vec<Finding>> {
    let mut names = Vec::new();
    let mut versions = Vec::new();
    for reference in references {
        let ComparedModule { name, version } = ComparedModule::read(reference, registry).await?;
        names.push(name);
        versions.push(version);
    }
    let found = conflicts(&versions).into_iter();
    Ok(found.map(|conflict| finding(references, &names, conflict)).collect())
}

fn finding(references: &[String], names: &[String], conflict: Conflict) -> Finding {
    let Conflict { object, path, versions: [first, second], values: [theirs, own] } = conflict;
    let theirs = shown(&theirs);
    let own = shown(&own);
    Finding {
        file: references[second].clone(),
        line: 1,
        column: 1,
        object: object.to_string(),
        path,
        severity: Code::SharedObject.severity(),
        code: Code::SharedObject,
        message: format!("{} has {own}, and {} has {theirs}", names[second], names[first]),
        suggestion: "give both modules one value, or the object to one of them".to_owned(),
    }
}

/// A value as JSON, cut to [`MAX_VALUE`].
fn shown(value: &Value) -> String {
    let text = value.to_string();
    let mut shown: String = text.chars().take(MAX_VALUE).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The folder of a module with a ConfigMap.
    fn folder(name: &str, data: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let module = format!("component: kyma-project.io/module/{name}\nversion: 1.0.0\n");
        let manifest = format!("{{apiVersion: v1, kind: ConfigMap, metadata: {{name: m}}, data: {{a: {data}}}}}\n");
        fs::write(folder.path().join("module.yaml"), module).unwrap();
        fs::write(folder.path().join("manifest.yaml"), manifest).unwrap();
        folder
    }

    #[tokio::test]
    async fn two_modules_with_other_values_of_one_object_are_named() {
        let folders = [folder("tide", "one"), folder("ebb", "two"), folder("flow", "one")];
        let references = folders.each_ref().map(|folder| folder.path().to_str().unwrap().to_owned());
        let found = findings(&references, &RegistryFlags::default()).await.unwrap();
        let texts: Vec<_> = found.iter().map(ToString::to_string).collect();
        let warning = |file: &str, own: &str, other: &str| {
            format!(
                "{file}:1:1: warning[shared-object] ConfigMap default/m data.a: {own}, and {other}; give both modules one \
                 value, or the object to one of them"
            )
        };
        let expected = [
            warning(&references[1], r#"ebb 1.0.0 has "two""#, r#"tide 1.0.0 has "one""#),
            warning(&references[2], r#"flow 1.0.0 has "one""#, r#"ebb 1.0.0 has "two""#),
        ];
        assert_eq!(texts, expected);
    }
}
