//! Test support for the other crates, compiled only with the feature `testing`: checks of what the modules of a crate import.

use std::{fs, path::Path};

/// Imports under `source` that do not point to a lower layer, each as `file:line: from -> to`.
///
/// `layers` lists the modules of the crate by their paths (`telemetry`, `app::build`), lowest layer first; modules of one layer must not
/// import each other. A file belongs to the longest of these paths that is a prefix of its own. An import is any path from the crate's
/// root, in `use` declarations and inline, in test code too: `crate::x`, `crate::{x, y::{…}}`, or a chain of `super` that leaves the module.
/// Files that belong to no layer, and modules that are in a layer but not in the crate, are reported as well; `lib.rs`, `main.rs` and the
/// parents of listed modules may import everything.
pub fn upward_imports(source: &Path, layers: &[&[&str]]) -> Vec<String> {
    let rooms: Vec<(Vec<&str>, usize)> = (layers.iter().enumerate())
        .flat_map(|(layer, modules)| modules.iter().map(move |module| (module.split("::").collect(), layer)))
        .collect();
    let room_of = |path: &[String]| {
        let room = rooms.iter().filter(|(room, _)| path.len() >= room.len() && room.iter().eq(&path[..room.len()]));
        room.max_by_key(|(room, _)| room.len())
    };
    let mut files = Vec::new();
    rust_files(source, &mut Vec::new(), &mut files);
    let exists = |room: &[&str]| files.iter().any(|(path, _)| room.iter().eq(path));
    let missing = rooms.iter().filter(|(room, _)| !exists(room));
    let mut found: Vec<String> =
        missing.map(|(room, _)| format!("{} is in a layer, but not in the crate", room.join("::"))).collect();
    for (path, text) in &files {
        let Some((from, layer)) = room_of(path) else {
            let is_parent =
                rooms.iter().any(|(room, _)| room.len() > path.len() && path.iter().eq(&room[..path.len()]));
            found.extend((!is_parent).then(|| format!("{}.rs is in no layer", path.join("/"))));
            continue;
        };
        for (line, import) in imports(&code_of(text), path) {
            let to = room_of(&import).filter(|(to, above)| to != from && above >= layer);
            found.extend(
                to.map(|(to, _)| format!("{}.rs:{line}: {} -> {}", path.join("/"), from.join("::"), to.join("::"))),
            );
        }
    }
    found
}

/// Collects the sources under a folder with their module paths; the crate's roots have an empty one.
fn rust_files(folder: &Path, path: &mut Vec<String>, files: &mut Vec<(Vec<String>, String)>) {
    let mut entries: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    for entry in entries {
        let Some(name) = entry.file_stem().and_then(|name| name.to_str()) else { continue };
        let is_root = path.is_empty() && matches!(name, "lib" | "main") || name == "mod";
        path.extend((!is_root).then(|| name.to_owned()));
        if entry.is_dir() {
            rust_files(&entry, path, files);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            files.extend(fs::read_to_string(&entry).ok().map(|text| (path.clone(), text)));
        }
        path.truncate(path.len() - usize::from(!is_root));
    }
}

/// The code of a source with comments and literals left out; line breaks stay.
fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let skipped = skipped(rest).min(rest.len());
        if skipped == 0 {
            code.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            code.extend(rest[..skipped].chars().filter(|char| *char == '\n').chain([' ']));
            rest = &rest[skipped..];
        }
    }
    code
}

/// Bytes of the comment or literal at the beginning of a text; 0 if there is none.
fn skipped(text: &str) -> usize {
    let past = |end: Option<usize>, length: usize| end.map_or(text.len(), |end| end + length);
    if text.starts_with("//") {
        return past(text.find('\n'), 0);
    }
    if text.starts_with("/*") {
        let mut depth = 0_usize;
        let mut at = 0;
        loop {
            match text.as_bytes().get(at..at + 2) {
                None => return text.len(),
                Some(b"/*") => (depth, at) = (depth + 1, at + 2),
                Some(b"*/") if depth == 1 => return at + 2,
                Some(b"*/") => (depth, at) = (depth - 1, at + 2),
                Some(_) => at += 1,
            }
        }
    }
    if let Some(raw) = text.strip_prefix('r') {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        let end = format!("\"{}", &raw[..hashes]);
        return raw[hashes..].strip_prefix('"').map_or(0, |body| past(body.find(&end), hashes * 2 + 3));
    }
    match text.as_bytes() {
        [b'"', ..] => past(closing(text, '"'), 1),
        [b'\'', b'\\', ..] => past(closing(text, '\''), 1),
        // A quote that no other one closes after one character begins a lifetime.
        [b'\'', ..] => text.char_indices().nth(2).filter(|(_, char)| *char == '\'').map_or(0, |(end, _)| end + 1),
        _ => 0,
    }
}

/// Where the quote at the beginning of a text is closed; an escaped one does not close it.
fn closing(text: &str, quote: char) -> Option<usize> {
    let mut chars = text.char_indices().skip(1);
    while let Some((at, char)) = chars.next() {
        match char {
            '\\' => drop(chars.next()),
            _ if char == quote => return Some(at),
            _ => {}
        }
    }
    None
}

/// All paths from the crate's root that the code of the module at `path` names, with their lines.
fn imports(code: &str, path: &[String]) -> Vec<(usize, Vec<String>)> {
    let tokens = tokens(code);
    let word = |at: usize| tokens.get(at).map_or("", |(_, word)| *word);
    let is_path = |at: usize| word(at) == ":" && word(at + 1) == ":";
    let mut found = Vec::new();
    let mut blocks = Vec::new();
    for at in 0..tokens.len() {
        match word(at) {
            "{" => blocks.push(at >= 2 && word(at - 2) == "mod"),
            "}" => drop(blocks.pop()),
            "crate" if is_path(at + 1) => {
                tree(&tokens, at + 3, &mut Vec::new(), &mut found);
            }
            "super" if at == 0 || word(at - 1) != ":" => {
                let supers =
                    (0..).take_while(|step| word(at + step * 3) == "super" && is_path(at + step * 3 + 1)).count();
                let depth = path.len() + blocks.iter().filter(|is_module| **is_module).count();
                // A chain that ends inside the file leaves no module.
                if let Some(left) = depth.checked_sub(supers).filter(|left| supers > 0 && *left < path.len()) {
                    tree(&tokens, at + supers * 3, &mut path[..left].to_vec(), &mut found);
                }
            }
            _ => {}
        }
    }
    found
}

/// Collects the paths of the tree that begins at a position, below `prefix`; returns the position behind it.
fn tree(
    tokens: &[(usize, &str)],
    mut at: usize,
    prefix: &mut Vec<String>,
    found: &mut Vec<(usize, Vec<String>)>,
) -> usize {
    let word = |at: usize| tokens.get(at).map_or("", |(_, word)| *word);
    if word(at) == "{" {
        at += 1;
        while at < tokens.len() && word(at) != "}" {
            at = if word(at) == "," { at + 1 } else { tree(tokens, at, &mut prefix.clone(), found) };
        }
        return at + 1;
    }
    prefix.push(word(at).to_owned());
    if word(at + 1) == ":" && word(at + 2) == ":" {
        return tree(tokens, at + 3, prefix, found);
    }
    found.extend(tokens.get(at).map(|(line, _)| (*line, std::mem::take(prefix))));
    if word(at + 1) == "as" { at + 3 } else { at + 1 }
}

/// Words and single other characters, each with its line.
fn tokens(code: &str) -> Vec<(usize, &str)> {
    let mut tokens = Vec::new();
    for (line, row) in code.lines().enumerate() {
        let mut rest = row.trim_start();
        while let Some(first) = rest.chars().next() {
            let is_word = |char: char| char.is_alphanumeric() || char == '_';
            let length = rest.find(|char| !is_word(char)).filter(|length| *length > 0);
            let length = if is_word(first) { length.unwrap_or(rest.len()) } else { first.len_utf8() };
            tokens.push((line + 1, &rest[..length]));
            rest = rest[length..].trim_start();
        }
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, path: &[&str]) -> Vec<String> {
        let path: Vec<_> = path.iter().copied().map(str::to_owned).collect();
        let found = imports(&code_of(text), &path);
        found.into_iter().map(|(line, import)| format!("{line} {}", import.join("::"))).collect()
    }

    #[test]
    fn imports_are_found_in_trees_inline_paths_and_tests() {
        let text = "use crate::{\n    a::{b, crate_c::{d}},\n    e, self as root,\n};\npub(crate) use crate::f;\n\
                    fn g() { crate::h::i(); }\nmod tests { use super::super::j; use super::k; }\nuse super::l;\n";
        let expected = ["2 a::b", "2 a::crate_c::d", "3 e", "3 self", "5 f", "6 h::i", "7 j", "8 l"];
        assert_eq!(found(text, &["m"]), expected);
        assert_eq!(found("use super::a;\nuse super::super::{b, c::d};", &["m", "n"]), ["1 m::a", "2 b", "2 c::d"]);
    }

    #[test]
    fn comments_and_literals_are_no_imports() {
        let text = r####"
            // crate::a
            /* crate::b /* crate::c */ crate::d */
            /// [`crate::e`]
            const F: &str = "\"crate::f";
            const G: &str = r#"crate::g"#;
            const H: [char; 3] = ['"', '\'', '{'];
            fn i<'a>(j: &'a str) -> crate::k::K { 'l: loop { break 'l } }
        "####;
        assert_eq!(found(text, &["m"]), ["8 k::K"]);
    }

    #[test]
    fn edges_that_do_not_point_down_are_named() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let found = upward_imports(&source, &[&["testing"], &["no_such_module"]]);
        assert!(found.contains(&"no_such_module is in a layer, but not in the crate".to_owned()), "{found:?}");
        assert!(found.contains(&"hex.rs is in no layer".to_owned()), "{found:?}");
        assert!(!found.iter().any(|line| line.starts_with("testing.rs")), "{found:?}");
    }
}
