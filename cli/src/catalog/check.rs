//! `catalog check`.

use std::collections::BTreeSet;

use anyhow::Result;
use clap::Args;
use jiff::{Timestamp, tz::TimeZone};
use tidewatch_author::check::{self, CheckOptions, Report, Source};
use tidewatch_oci::credentials::RegistryAddress;
use tidewatch_select::catalog::visibility::restricted_modules;

use super::{LiveFlags, current, files, shared};
use crate::{
    block_on,
    cluster::ClusterFlags,
    exit,
    module::{RegistryFlags, reference},
    output,
};

/// Arguments of `catalog check`.
#[derive(Clone, Debug, Args)]
pub struct Check {
    /// Files with YAML or JSON documents; - for standard input
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<String>,

    /// File with the current catalog, and with Kymas, if they matter; repeatable. Finds channels that move down and edits of
    /// templates, and permits files with only the new objects
    #[arg(long, value_name = "FILE", group = "current")]
    pub against: Vec<String>,

    /// Take the current catalog and the Kymas from the control plane, instead of --against
    #[arg(long, group = "current")]
    pub live: bool,

    /// Control plane with the current catalog.
    #[command(flatten)]
    pub cluster: ClusterFlags,

    /// The files are the whole catalog: objects only in the current one are removed
    #[arg(long, requires = "current")]
    pub whole: bool,

    /// Modules visible only to runtimes that match their release meta's kymaSelector, as for the receiver. Without it
    /// selectors of unrestricted modules are not found
    #[arg(long, env = "TIDEWATCH_RESTRICTED_DEFAULT_MODULES", value_delimiter = ',')]
    pub restricted_default_modules: Option<Vec<String>>,

    /// Version of a module whose objects are compared with those of the other modules: a reference as for module render;
    /// repeatable
    #[arg(long, value_name = "REF")]
    pub module: Vec<String>,

    /// Registry with the artefacts; compares the objects of all versions that the channels of the files name
    #[arg(long, value_name = "REGISTRY")]
    pub artefacts: Option<RegistryAddress>,

    /// Access to the registry.
    #[command(flatten)]
    pub registry: RegistryFlags,

    /// Treat warnings as errors
    #[arg(long)]
    pub deny_warnings: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Check {
    pub(super) fn run(&self) -> Result<u8> {
        let report = self.report()?;
        output::report(self.json, &report)?;
        Ok(if report.is_clean(self.deny_warnings) { exit::SUCCESS } else { exit::FAILURE })
    }

    fn report(&self) -> Result<Report> {
        let mut sources = files::read(self.files.iter().chain(&self.against))?;
        let mut against = sources.split_off(self.files.len());
        if self.live {
            let live = LiveFlags { cluster: self.cluster.clone(), restricted_default_modules: Vec::new() };
            against.push(block_on(current::read(&live))?);
        }
        let options = CheckOptions {
            restricted: self.restricted_default_modules.as_ref().map(restricted_modules),
            today: Timestamp::now().to_zoned(TimeZone::UTC).date(),
            whole: self.whole,
        };
        let against = (!against.is_empty()).then_some(&*against);
        let report = check::check(&sources, against, &options)?;
        let references = self.references(&sources);
        if references.is_empty() {
            return Ok(report);
        }
        Ok(report.with(block_on(shared::findings(&references, &self.registry))?))
    }

    /// References of the versions whose objects are compared.
    fn references(&self, sources: &[Source]) -> Vec<String> {
        let mut references = self.module.clone();
        // What is no catalog has findings of its own.
        let catalog = self.artefacts.as_ref().and_then(|registry| Some((registry, check::read(sources).ok()?)));
        let Some((registry, catalog)) = catalog else { return references };
        for meta in &catalog.release_metas {
            let spec = &meta.spec;
            let Some(component) = &spec.ocm_component_name else { continue };
            let channels = spec.channels().iter().map(|channel| &channel.version);
            let mandatory = spec.mandatory.iter().map(|mandatory| &mandatory.version);
            let versions: BTreeSet<_> = channels.chain(mandatory).collect();
            references.extend(versions.iter().map(|version| reference(registry, component, version)));
        }
        references
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    /// Catalogs of the check's own tests.
    const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/author/src/check/tests");

    #[test]
    fn current_catalog_is_separate_from_the_checked_files() {
        let file = |name: &str| format!("{FIXTURES}/{name}");
        let report = |files: &[&str], against: &[&str]| {
            let named = |names: &[&str]| names.iter().map(|name| file(name)).collect();
            let files = named(files);
            let against = named(against);
            let check = Check {
                files,
                against,
                live: false,
                cluster: ClusterFlags { kubeconfig: None, namespace: "kcp-system".to_owned() },
                whole: false,
                restricted_default_modules: None,
                module: Vec::new(),
                artefacts: None,
                registry: RegistryFlags::default(),
                deny_warnings: false,
                json: false,
            };
            check.report().map(|report| (report.summary.files, report.is_clean(true)))
        };
        assert_eq!(report(&["good.yaml"], &[]).unwrap(), (1, true));
        assert_eq!(report(&["good.yaml"], &["wrong.yaml"]).unwrap(), (1, false), "its channels move down from there");
        assert_eq!(report(&["wrong.yaml", "good.yaml"], &[]).unwrap(), (2, false));
        assert!(report(&["good.yaml", "missing.yaml"], &[]).is_err());
    }

    #[test]
    fn artefacts_are_those_of_the_versions_that_the_channels_name() {
        let args = ["check", "-", "--module", "folder", "--artefacts", "http://registry.test/modules"];
        let check = Parsed::try_parse_from(args).unwrap().check;
        let release = "apiVersion: operator.kyma-project.io/v1beta2\nkind: ModuleReleaseMeta\nmetadata: {name: keda}\n\
            spec: {moduleName: keda, ocmComponentName: kyma-project.io/module/keda, channels: [{channel: fast, version: 1.1.0}, \
            {channel: regular, version: 1.0.0}, {channel: other, version: 1.0.0}]}\n";
        let source = Source { name: "f".into(), text: release.to_owned() };
        let at = |version: &str| {
            format!("http://registry.test/modules/component-descriptors/kyma-project.io/module/keda:{version}")
        };
        assert_eq!(check.references(&[source]), ["folder".to_owned(), at("1.0.0"), at("1.1.0")]);
    }

    #[derive(clap::Parser)]
    struct Parsed {
        #[command(flatten)]
        check: Check,
    }
}
