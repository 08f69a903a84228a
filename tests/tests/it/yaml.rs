//! The reading of YAML and JSON by `oci::layer` equals that of kubectl, for each file of `data/yaml`.
//!
//! A file that both read differently says so in a comment, with the reason after the colon: `# both refuse: …`,
//! `# kubectl refuses: …`, `# tidewatch refuses: …`, or `# differs: …` if both accept it. Without such a comment both accept
//! the file, and read the same objects in the same order.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;
use tidewatch_oci::layer::{self, LayerKind};
use tidewatch_testing::control_plane::{Binaries, Tool};

/// Annotation that `kubectl annotate --local` adds: the command prints the objects that kubectl would send to an API server,
/// without one.
const MARK: &str = "tidewatch.test/mark";

/// Relation of both readings of a file, as its comment states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    Equal,
    BothRefuse,
    KubectlRefuses,
    TidewatchRefuses,
    Differs,
}

impl Relation {
    fn stated(text: &str) -> Self {
        let stated = [
            ("# both refuse: ", Self::BothRefuse),
            ("# kubectl refuses: ", Self::KubectlRefuses),
            ("# tidewatch refuses: ", Self::TidewatchRefuses),
            ("# differs: ", Self::Differs),
        ];
        stated.into_iter().find(|(comment, _)| text.contains(comment)).map_or(Self::Equal, |(_, relation)| relation)
    }

    fn of<E>(kubectl: &Result<Vec<Value>, E>, tidewatch: &Result<Vec<Value>, E>) -> Self {
        match (kubectl, tidewatch) {
            (Ok(theirs), Ok(ours)) if theirs == ours => Self::Equal,
            (Ok(_), Ok(_)) => Self::Differs,
            (Ok(_), Err(_)) => Self::TidewatchRefuses,
            (Err(_), Ok(_)) => Self::KubectlRefuses,
            (Err(_), Err(_)) => Self::BothRefuse,
        }
    }
}

fn kubectl(program: &Path, file: &Path) -> Result<Vec<Value>, String> {
    let mut command = Command::new(program);
    command.args(["annotate", "--local", "--overwrite", "--output", "json", "--filename"]).arg(file);
    let output = command.arg(format!("{MARK}=1")).output().unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let objects = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    Ok(objects.map(|object| comparable(object.unwrap())).collect())
}

fn tidewatch(content: &[u8]) -> Result<Vec<Value>, String> {
    let text = layer::yaml_text(LayerKind::Plain, content).map_err(|error| error.to_string())?;
    let objects = layer::documents(&text).map_err(|error| error.to_string())?;
    Ok(objects.into_iter().map(comparable).collect())
}

/// An object without the annotation, and with the numbers that an API server reads: integers of 64 bits, and `f64`.
fn comparable(mut object: Value) -> Value {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
            annotations.remove(MARK);
        }
        metadata.retain(|_, value| value.as_object().is_none_or(|members| !members.is_empty()));
    }
    numbers(&mut object);
    object
}

fn numbers(value: &mut Value) {
    match value {
        Value::Number(number) if !number.is_i64() => *value = number.as_f64().into(),
        Value::Array(items) => items.iter_mut().for_each(numbers),
        Value::Object(members) => members.values_mut().for_each(numbers),
        _ => {}
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[tokio::test]
async fn every_text_is_read_as_kubectl_reads_it() {
    let program = Binaries::from_env().get(Tool::Kubectl).await.unwrap();
    let files = files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("data/yaml"));
    assert!(files.len() > 50, "{} files", files.len());
    let mut wrong = Vec::new();
    for file in files {
        let content = fs::read(&file).unwrap();
        let theirs = kubectl(&program, &file);
        let ours = tidewatch(&content);
        let stated = Relation::stated(&String::from_utf8_lossy(&content).replace('\0', ""));
        let found = Relation::of(&theirs, &ours);
        if stated != found {
            let name = file.file_name().unwrap().display();
            wrong
                .push(format!("{name}: {found:?} instead of {stated:?}\n  kubectl: {theirs:?}\n  tidewatch: {ours:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
