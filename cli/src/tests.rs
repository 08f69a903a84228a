use clap::CommandFactory as _;

use super::{
    catalog::Catalog,
    module::{Module, Show},
    *,
};

fn parse(arguments: &[&str]) -> Result<Command, clap::Error> {
    Cli::try_parse_from([&["tidewatch"], arguments].concat()).map(|cli| cli.command)
}

#[test]
fn arguments_select_the_command() {
    Cli::command().debug_assert();
    let Ok(Command::Fleet(fleet)) = parse(&["fleet", "--json"]) else { panic!() };
    assert!(fleet.json && !fleet.check && fleet.admin.admin_url.is_none());
    let Ok(Command::Shards(shards)) = parse(&["shards", "--check"]) else { panic!() };
    assert!(shards.check && !shards.json);
    let rotate = parse(&["rotate-ca", "--force-after", "60", "--no-wait"]);
    assert!(matches!(rotate, Ok(Command::RotateCa(rotate_ca::RotateCa { force_after: Some(60), no_wait: true, .. }))));
    let check = parse(&["catalog", "check", "a.yaml", "-", "--against", "b", "--json"]);
    let Ok(Command::Catalog(Catalog::Check(check))) = check else { panic!("{check:?}") };
    assert_eq!((check.files.len(), check.against.len(), check.json, check.whole), (2, 1, true, false));
    let show = parse(&["catalog", "show", "k", "-n", "kcp"]);
    let Ok(Command::Catalog(Catalog::Show(show))) = show else { panic!("{show:?}") };
    assert_eq!((&*show.kyma, &*show.live.cluster.namespace), ("k", "kcp"));
    let list = parse(&["rollout", "--all", "--json", "--module-rollout-rings", "1%,100%"]);
    let Ok(Command::Rollout(rollout)) = list else { panic!("{list:?}") };
    assert!(rollout.action.is_none() && rollout.list.all && rollout.list.json);
    assert_eq!(rollout.list.rules.module_rollout_rings.map(|rings| rings.count()), Some(2));
    let confirm = parse(&["rollout", "confirm", "c-1", "-n", "kcp"]);
    let Ok(Command::Rollout(rollout)) = confirm else { panic!("{confirm:?}") };
    let Some(rollout::Action::Confirm(confirm)) = rollout.action else { panic!() };
    assert_eq!((&*confirm.confirmation, &*confirm.cluster.namespace), ("c-1", "kcp"));
    let status = parse(&["status", "k", "--json", "--allow-runtime-addresses", "10.0.0.0/8,127.0.0.1"]);
    let Ok(Command::Status(status)) = status else { panic!("{status:?}") };
    assert_eq!((&*status.kyma, status.json, status.allow_runtime_addresses.len()), ("k", true, 2));
    let pack = parse(&[
        "module",
        "pack",
        "f",
        "--push",
        "http://localhost:5000/a",
        "--overwrite",
        "--username",
        "u",
        "--password-stdin",
    ]);
    let Ok(Command::Module(Module::Pack(pack))) = pack else { panic!("{pack:?}") };
    assert!(pack.push.overwrite && pack.push.registry.password_stdin && pack.output.is_none());
    let show = parse(&["module", "show", "reg/component-descriptors/a.b/c:1.0.0", "--json"]);
    assert!(matches!(show, Ok(Command::Module(Module::Show(Show { json: true, .. })))));
    let diff = parse(&["module", "diff", "a", "b", "--to-template", "t.yaml"]);
    let Ok(Command::Module(Module::Diff(diff))) = diff else { panic!("{diff:?}") };
    assert!(diff.to == "b" && diff.from_template.is_none() && diff.to_template.is_some());
    for invalid in [
        &["module", "pack", "f"][..],
        &["module", "pack", "--output", "d"],
        &["module", "pack", "f", "--output", "d", "--overwrite"],
        &["module", "pack", "f", "--push", "r", "--tar"],
        &["module", "pack", "f", "--push", "ftp://r"],
        &["module", "pack", "f", "--push", "r", "--username", "u"],
        &["module", "pack", "f", "--push", "r", "--password-stdin"],
        &["module", "show"],
        &["module", "render"],
        &["module", "render", "r", "--username", "u"],
        &["module", "diff", "r"],
        &["catalog"],
        &["catalog", "check"],
        &["catalog", "check", "a", "--whole"],
        &["catalog", "show"],
        &["catalog", "diff"],
        &["catalog", "diff", "f", "--limit", "-1"],
        &["rollout", "confirm"],
        &["rollout", "-n", "kcp", "confirm", "c-1"],
        &["rollout", "--module-rollout-rings", "1%"],
        &["catalog", "diff", "f", "--module-rollout-pause-seconds", "-1"],
        &["fleet", "--admin-url", "ftp://x"],
        &["fleet", "--token-file", "t"],
        &["fleet", "--ca-file", "c"],
        &["status"],
        &["completions", "cmd"],
        &["man"],
    ] {
        assert!(parse(invalid).is_err(), "{invalid:?}");
    }
}

/// Every command that does something, by its path.
fn leaves(command: &clap::Command, path: &str) -> Vec<(String, clap::Command)> {
    let path = format!("{path} {}", command.get_name());
    let mut children = command.get_subcommands().filter(|child| child.get_name() != "help").peekable();
    let is_leaf = children.peek().is_none() || command.is_args_conflicts_with_subcommands_set();
    let own = is_leaf.then(|| (path.clone(), command.clone()));
    own.into_iter().chain(children.flat_map(|child| leaves(child, &path))).collect()
}

#[test]
fn help_documents_exit_codes_and_every_argument() {
    let leaves = leaves(&Cli::command(), "");
    let paths: Vec<_> = leaves.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths.len(), 17, "{paths:?}");
    for (path, mut command) in leaves {
        let help = command.render_long_help().to_string();
        assert!(help.contains("Exit codes: 0 "), "{path}: {help}");
        for argument in command.get_arguments() {
            assert!(argument.get_help().is_some(), "{path} {}", argument.get_id());
        }
    }
}
