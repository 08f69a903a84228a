//! The reference pages of flags and custom resources.

use std::fmt::Write as _;

use clap::{Arg, Command, CommandFactory as _};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};

use crate::render::File;

const FLAGS: &str = "# Flags

<!-- Generated from the programs' parsers by `cargo generate`; changes made here are lost. -->

Each flag can also be set by its environment variable; a flag wins. Every program prints the same texts with `--help`.
";

const RESOURCES: &str = "# Custom resources

<!-- Generated from the Rust types by `cargo generate`; changes made here are lost. -->

The fields of the custom resources of `operator.kyma-project.io/v1beta2`, as `kubectl explain` shows them. `[]` is an element of a list,
`{}` a value of a map.
";

/// Renders `docs/reference/flags.md`.
pub fn flags() -> File {
    let mut content = FLAGS.to_owned();
    for command in [
        tidewatch_receiver::config::Config::command(),
        tidewatch_agent::config::Config::command(),
        tidewatch_cli::Cli::command(),
    ] {
        command_section(&command, "", &mut content);
    }
    File { name: "flags.md".to_owned(), content }
}

fn command_section(command: &Command, parent: &str, page: &mut String) {
    let name = format!("{parent}{}", command.get_name());
    let about = command.get_about().map(|about| one_line(&about.to_string())).unwrap_or_default();
    // Writing to a String cannot fail.
    let _ = write!(page, "\n## {name}\n\n{about}.\n", about = about.trim_end_matches('.'));
    let arguments: Vec<_> = command.get_arguments().filter(|argument| is_shown(argument)).collect();
    let mut headings: Vec<_> = arguments.iter().map(|argument| argument.get_help_heading()).collect();
    headings.sort_unstable();
    headings.dedup();
    for heading in headings {
        let _ = heading.map(|heading| write!(page, "\n### {name}: {heading}\n"));
        page.push('\n');
        for argument in arguments.iter().filter(|argument| argument.get_help_heading() == heading) {
            page.push_str(&flag_item(argument));
        }
    }
    for subcommand in command.get_subcommands().filter(|subcommand| subcommand.get_name() != "help") {
        command_section(subcommand, &format!("{name} "), page);
    }
}

fn is_shown(argument: &Arg) -> bool {
    !argument.is_hide_set() && !["help", "version"].contains(&argument.get_id().as_str())
}

fn flag_item(argument: &Arg) -> String {
    let value = argument.get_value_names().filter(|_| argument.get_action().takes_values()).unwrap_or_default();
    let value = value.iter().map(|value| format!("<{value}>")).collect::<Vec<_>>().join(" ");
    let flag = match argument.get_long() {
        Some(long) => format!("--{long} {value}"),
        None => value,
    };
    let environment = argument.get_env().map(|env| format!("`{}`", env.to_string_lossy()));
    let defaults: Vec<_> = argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = match (argument.is_required_set(), defaults.join(",")) {
        (true, _) => Some("required".to_owned()),
        (false, default) if default.is_empty() => None,
        (false, default) => Some(format!("default `{default}`")),
    };
    let facts: Vec<_> = environment.into_iter().chain(default).collect();
    let facts = if facts.is_empty() { String::new() } else { format!(" ({})", facts.join(", ")) };
    let help = argument.get_long_help().or(argument.get_help()).map(|help| one_line(&help.to_string()));
    format!("* `{}`{facts}: {}\n", flag.trim(), help.unwrap_or_default())
}

/// Renders `docs/reference/custom-resources.md`.
pub fn custom_resources() -> File {
    let mut content = RESOURCES.to_owned();
    for definition in tidewatch_api::crds::crds() {
        resource_section(&definition, &mut content);
    }
    File { name: "custom-resources.md".to_owned(), content }
}

fn resource_section(definition: &CustomResourceDefinition, page: &mut String) {
    let names = &definition.spec.names;
    for version in &definition.spec.versions {
        let schema = version.schema.as_ref().and_then(|schema| schema.open_api_v3_schema.as_ref());
        let Some(schema) = schema else { continue };
        let _ = write!(page, "\n## {} {}\n\n", names.kind, version.name);
        let _ = writeln!(page, "{}\n", one_line(schema.description.as_deref().unwrap_or_default()));
        for (name, property) in schema.properties.iter().flatten() {
            if !["apiVersion", "kind", "metadata"].contains(&name.as_str()) {
                field_items(name, property, page);
            }
        }
    }
}

fn field_items(path: &str, schema: &JSONSchemaProps, page: &mut String) {
    let kind = schema.type_.as_deref().unwrap_or("any");
    let description = one_line(schema.description.as_deref().unwrap_or_default());
    let _ = writeln!(page, "* `{path}` ({kind}): {description}");
    property_items(path, schema, page);
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
        property_items(&format!("{path}[]"), items, page);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &schema.additional_properties {
        property_items(&format!("{path}{{}}"), values, page);
    }
}

/// The items below a field. An element of a list or map has no item of its own.
fn property_items(path: &str, schema: &JSONSchemaProps, page: &mut String) {
    for (name, property) in schema.properties.iter().flatten() {
        field_items(&format!("{path}.{name}"), property, page);
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_is_described() {
        let page = flags().content;
        assert!(page.contains("* `--authority <HOST:PORT>` (`TIDEWATCH_AUTHORITY`, required): "), "{page}");
        let undescribed: Vec<_> = page.lines().filter(|line| line.starts_with("* `") && line.ends_with(": ")).collect();
        assert!(undescribed.is_empty(), "{undescribed:#?}");
    }

    #[test]
    fn every_field_is_described() {
        let page = custom_resources().content;
        assert!(page.contains("* `spec.modules[].channel` (string): "), "{page}");
        let undescribed: Vec<_> = page.lines().filter(|line| line.starts_with("* `") && line.ends_with(": ")).collect();
        assert!(undescribed.is_empty(), "{undescribed:#?}");
    }
}
