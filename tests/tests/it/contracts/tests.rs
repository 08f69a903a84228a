use serde_json::json;

use super::*;

const HEAD: &str =
    "tool: T\nversion: v\nsources: []\nobjects: {o: {cluster: kcp, path: /o}}\nshapes: {s: {a: all}}\ncontracts:\n";

fn fault(contracts: &str) -> String {
    let error = parse(Path::new("t.yaml"), &format!("{HEAD}{contracts}")).expect_err("refused");
    std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source())
        .map(|e| e.to_string())
        .collect()
}

#[test]
fn all_files_are_contracts_and_the_tests_that_they_name_exist() {
    let tools = read_all(&folder()).expect("the contracts");
    assert!(!tools.is_empty());
    let mut missing = Vec::new();
    for Tool { file, contracts, sources, version, .. } in &tools {
        assert!(!sources.is_empty() && !version.is_empty(), "{file} names no sources");
        for Contract { name, proof } in contracts {
            if let Proof::Elsewhere(test) = proof
                && !test.exists().unwrap_or(false)
            {
                missing.push(format!("{file}: {name}: {} has no test {}", test.file.display(), test.test));
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn a_contract_that_contradicts_itself_is_refused_by_name() {
    for (contract, words) in [
        ("- {name: n, then: [{object: o, exists: true}], more: 1}", "more"),
        ("- {name: n, then: []}", "nothing is expected"),
        ("- {name: n, sends: [{object: o, delete: {}}]}", "nothing is expected"),
        ("- {name: n, then: [{object: p, exists: true}]}", "no object \"p\""),
        ("- {name: n, then: [{object: o, at: $.a}]}", "neither a request nor a read"),
        ("- {name: n, then: [{object: o, at: $.a, exists: true, absent: true}]}", "expects 2 things"),
        ("- {name: n, then: [{object: o, is: 1}]}", "no path"),
        ("- {name: n, then: [{object: o, at: '$.[', is: 1}]}", "$.["),
        ("- {name: n, then: [{object: o, delete: {}}]}", "then has a request"),
        ("- {name: n, sends: [{object: o, exists: true}], then: [{object: o, exists: true}]}", "sends has a read"),
        ("- {name: n, sends: [{object: o, delete: {}, mergePatch: {}, answer: 200}]}", "2 requests"),
        ("- {name: n, sends: [{object: o, put: {knows: t, change: []}, answer: 200}]}", "no shape \"t\""),
        ("- {name: n, sends: [{object: o, delete: {}, answer: 200}], provedBy: {file: f, test: t}}", "provedBy"),
        ("- {name: n, then: [{object: o, gone: true}]}\n- {name: n, then: [{object: o, gone: true}]}", "has this name"),
    ] {
        let fault = fault(contract);
        assert!(fault.contains(words), "{contract}: {fault}");
    }
}

#[test]
fn a_named_test_is_found_below_its_attribute_alone() {
    let test = |test: &str| NamedTest { file: "tests/tests/it/contracts/tests.rs".into(), test: test.to_owned() };
    assert!(test("a_named_test_is_found_below_its_attribute_alone").exists().expect("the file"));
    for absent in ["fault", "a_named_test_is_found", "nowhere"] {
        assert!(!test(absent).exists().expect("the file"), "{absent}");
    }
}

#[test]
fn a_typed_program_writes_back_what_it_knows() {
    let live = json!({"metadata": {"name": "n", "annotations": {"a": "b"}},
        "spec": {"skip": true, "modules": [{"name": "x", "version": "1"}, {"name": "y"}]}});
    let shape =
        serde_json::from_value(json!({"metadata": "all", "spec": {"modules": {"name": "all", "channel": "all"}}}));
    let change = [json!({"op": "add", "path": "/spec/modules/{name=y}/channel", "value": "fast"})];
    let body = body::put(&live, Some(&shape.expect("a shape")), &change).expect("a body");
    let expected = json!({"metadata": {"name": "n", "annotations": {"a": "b"}},
        "spec": {"modules": [{"name": "x"}, {"name": "y", "channel": "fast"}]}});
    assert_eq!(body, expected);
}

#[test]
fn a_patch_that_names_no_element_is_refused() {
    let remove = [json!({"op": "remove", "path": "/modules/{name=z}"})];
    let error = resolve(&remove, &json!({"modules": [{"name": "x"}]})).expect_err("no such element");
    assert_eq!(error.to_string(), "no element {name=z} in /modules");
}

#[test]
fn reads_compare_what_their_path_selects() {
    let answer = json!({"modules": [{"name": "x", "state": "Ready"}, {"name": "y"}], "page": "a 1\nb 2"});
    let read = |at: &str, expected| Read::new("o".to_owned(), Some(at.to_owned()), expected).expect("a read");
    for (at, expected) in [
        ("$.modules[?@.name=='x'].state", Expected::Is(json!("Ready"))),
        ("$.modules[?@.name=='x'].state", Expected::OneOf(vec![json!("Warning"), json!("Ready")])),
        ("$.modules[?!@.state]", Expected::Exists),
        ("$.modules[?!@.name]", Expected::Absent),
        ("$.page", Expected::Contains("b 2".to_owned())),
    ] {
        assert_eq!(read(at, expected).check(Some(&answer)), Ok(()), "{at}");
    }
    for (at, expected, found) in [
        ("$.modules[*].name", Expected::Is(json!("x")), "o $.modules[*].name is not \"x\", found [\"x\", \"y\"]"),
        ("$.modules[?!@.state].name", Expected::Absent, "o $.modules[?!@.state].name has a value, found [\"y\"]"),
        ("$", Expected::Gone, "o $ still exists"),
    ] {
        let mismatch = read(at, expected).check(Some(&answer)).expect_err(at).to_string();
        assert!(mismatch.starts_with(found), "{mismatch}");
    }
    assert_eq!(read("$", Expected::Gone).check(None), Ok(()));
    assert!(read("$.a", Expected::Absent).check(None).is_err(), "only of an object that exists");
}

#[test]
fn placeholders_are_filled_everywhere_and_unknown_ones_are_named() {
    let mut values = Values::default();
    values.set("kyma", "k-1");
    let filled = values.fill_all(&json!({"${kyma}": ["a-${kyma}-b", 1]})).expect("filled");
    assert_eq!(filled, json!({"k-1": ["a-k-1-b", 1]}));
    assert_eq!(values.fill("${other}").expect_err("unknown").to_string(), "no value for ${other}");
}

#[test]
fn the_page_of_tools_names_each_tool_with_its_version() {
    let page = fs::read_to_string(paths::workspace().join("docs/tools.md")).expect("the page");
    let rows: Vec<Vec<_>> = page
        .lines()
        .filter(|line| line.starts_with("| "))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let on_page = rows.iter().map(|row| (row[0], row[1])).filter(|row| row.1 != "version").collect::<BTreeSet<_>>();
    let tools = read_all(&folder()).expect("the contracts");
    let in_data = tools.iter().map(|tool| (tool.name.as_str(), tool.version.as_str())).collect::<BTreeSet<_>>();
    assert_eq!(on_page, in_data);
    for cell in rows.iter().flatten() {
        assert!(cell.split_whitespace().count() <= 25, "more than 25 words: {cell}");
    }
}
