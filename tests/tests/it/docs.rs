//! The documentation: links and anchors resolve, tables are for values, and each command block states how it is kept true.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Languages of blocks that readers copy into a shell.
const COMMANDS: [&str; 3] = ["sh", "bash", "console"];

/// Most words of a table's cell. Sentences belong above or below the table.
const CELL_WORDS: usize = 25;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// All pages of the repository with their texts.
fn pages() -> BTreeMap<PathBuf, String> {
    let mut folders = vec![root().join("docs"), root().join("tests/fuzz"), root().join("tests/control-plane")];
    let mut pages = BTreeMap::new();
    let mut add = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        pages.insert(path, text);
    };
    let is_page = |path: &Path| path.extension().is_some_and(|extension| extension == "md");
    let entries = |folder: &Path| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    entries(&root()).into_iter().filter(|path| is_page(path)).for_each(&mut add);
    while let Some(folder) = folders.pop() {
        for path in entries(&folder) {
            if path.is_dir() {
                folders.push(path);
            } else if is_page(&path) {
                add(path);
            }
        }
    }
    pages
}

/// Lines outside code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        (!in_code && !is_fence).then_some((number + 1, line))
    })
}

/// The anchors of a page's headings, as GitHub makes them: lower case, without punctuation, spaces as hyphens.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen = BTreeMap::<String, usize>::new();
    let headings =
        prose(text).filter_map(|(_, line)| line.strip_prefix('#')?.trim_start_matches('#').strip_prefix(' '));
    let anchor = |heading: &str| {
        let kept = heading.trim().chars().filter(|char| char.is_alphanumeric() || " -_".contains(*char));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    let mut anchors = BTreeSet::new();
    for heading in headings {
        let anchor = anchor(heading);
        let count = seen.entry(anchor.clone()).or_default();
        anchors.insert(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
        *count += 1;
    }
    anchors
}

/// The targets of a line's links.
fn links(line: &str) -> Vec<&str> {
    let without_code: Vec<_> = line.split('`').step_by(2).collect();
    let whole = without_code.iter().flat_map(|part| part.split("](").skip(1));
    // A link whose text is code ends one part with `]` and begins the next with `(`.
    let split = line.split("](").skip(1).chain(whole);
    let targets: BTreeSet<_> = split.filter_map(|rest| Some(rest.split_once(')')?.0)).collect();
    targets.into_iter().collect()
}

#[test]
fn links_and_anchors_resolve() {
    let pages = pages();
    let mut broken = Vec::new();
    for (path, text) in &pages {
        for (number, line) in prose(text) {
            for link in links(line).into_iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
                let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
                let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
                let Ok(target) = target.canonicalize() else {
                    broken.push(format!("{}:{number}: {link}", path.display()));
                    continue;
                };
                let has_anchor = |anchor: &str| pages.get(&target).is_some_and(|text| anchors(text).contains(anchor));
                if anchor.is_some_and(|anchor| !has_anchor(anchor)) {
                    broken.push(format!("{}:{number}: {link} (no such heading)", path.display()));
                }
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}

#[test]
fn table_cells_are_short() {
    let mut long = Vec::new();
    for (path, text) in pages() {
        for (number, row) in prose(&text).filter(|(_, line)| line.trim_start().starts_with('|')) {
            let words = row.split('|').map(|cell| cell.split_whitespace().count()).max().unwrap_or_default();
            if words > CELL_WORDS {
                long.push(format!("{}:{number}: {words} words", path.display()));
            }
        }
    }
    assert!(long.is_empty(), "table cells of more than {CELL_WORDS} words:\n{}", long.join("\n"));
}

#[test]
fn command_blocks_state_how_they_are_verified() {
    let mut wrong = Vec::new();
    for (path, text) in pages() {
        let lines: Vec<_> = text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let language = line.trim_start().strip_prefix("```").unwrap_or_default();
            if !COMMANDS.contains(&language) {
                continue;
            }
            let marker = index.checked_sub(1).and_then(|above| lines.get(above)).copied().unwrap_or_default().trim();
            let kind = marker.strip_prefix("<!-- ").and_then(|marker| marker.strip_suffix(" -->")).unwrap_or_default();
            let holds = match kind.split_once(": ") {
                Some(("executed", command)) => names_a_test(command),
                Some(("manual", need)) => need.starts_with("needs "),
                None => kind == "generated",
                Some(_) => false,
            };
            if !holds {
                wrong.push(format!("{}:{}: {marker:?}", path.display(), index + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "blocks that are not marked as executed, generated or manual:\n{}", wrong.join("\n"));
}

/// Returns true if an `executed` marker names a command alias, `.ci/run`, or a module of these integration tests.
fn names_a_test(command: &str) -> bool {
    let here = root().join("tests/tests/it");
    match command.split(" --test it ").nth(1) {
        Some(filter) => {
            let module = filter.trim_start_matches("-- ").split("::").next().unwrap_or_default().trim();
            here.join(format!("{module}.rs")).exists()
        }
        None => command == ".ci/run" || command.starts_with("cargo "),
    }
}
