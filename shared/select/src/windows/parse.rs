//! Reads a policy from its file, bounded in size, rules, windows and memory of the expressions.
//!
//! A file that is not a policy is refused as a whole. Within a policy, a part that cannot be read affects only itself and is a
//! mistake: an expression matches nothing, and a window never opens.

mod places;
mod window;

use regex::bytes::{Regex, RegexBuilder};
use serde_json::Value;
use thiserror::Error;

pub use places::Mistakes;

use self::{
    places::{Members, list, string},
    window::window,
};
use super::policy::{Attribute, Policy, Rule};

/// Maximum size of the file in bytes.
pub const MAX_BYTES: usize = 256 << 10;
/// Maximum number of rules.
const MAX_RULES: usize = 500;
/// Maximum number of windows of one rule.
const MAX_WINDOWS: usize = 100;
/// Maximum length of an expression in bytes.
const MAX_EXPRESSION: usize = 16 << 10;
/// Memory of a compiled expression in bytes, for each byte of its text and for the whole: so the memory of a policy is bounded
/// by its size, and repetitions cannot multiply it.
const COMPILED: (usize, usize) = (128, 16 << 10);
/// Maximum nesting of an expression.
const MAX_NESTING: u32 = 32;

/// Reason for which a file is not a policy.
#[derive(Debug, Error)]
pub enum PolicyError {
    /// The file is too large.
    #[error("the file has more than {MAX_BYTES} bytes")]
    TooLarge,
    /// The file is not JSON.
    #[error("the file is not JSON")]
    Json(#[source] serde_json::Error),
    /// The policy is not an object, has a member twice, or its rules are not a list within its limit.
    #[error("{0}")]
    Shape(Mistakes),
}

/// Reads a policy.
pub(super) fn policy(bytes: &[u8]) -> Result<Policy, PolicyError> {
    if bytes.len() > MAX_BYTES {
        return Err(PolicyError::TooLarge);
    }
    let value: Value = serde_json::from_slice(bytes).map_err(PolicyError::Json)?;
    let mut mistakes = Mistakes::default();
    let Some(members) = Members::of(&value, "the policy", &["rules", "default"], &mut mistakes) else {
        return Err(PolicyError::Shape(mistakes));
    };
    let entries = match members.get("rules") {
        None => &[],
        Some(rules) => match list(rules, "rules", MAX_RULES, &mut mistakes) {
            Some(entries) => entries,
            None => return Err(PolicyError::Shape(mistakes)),
        },
    };
    let mut rules = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        rules.extend(rule(entry, &format!("rules[{index}]"), &mut mistakes));
    }
    let default = members.get("default").and_then(|default| window(default, "default", &mut mistakes));
    Ok(Policy { rules, default, mistakes })
}

fn rule(value: &Value, place: &str, mistakes: &mut Mistakes) -> Option<Rule> {
    let members = Members::of(value, place, &["match", "windows"], mistakes)?;
    let at = |member: &str| format!("{place}.{member}");
    let expressions = members.get("match").map(|value| expressions(value, &at("match"), mistakes));
    let mistakes_before = mistakes.count();
    let entries = members.get("windows").and_then(|value| list(value, &at("windows"), MAX_WINDOWS, mistakes));
    let mut windows = Vec::new();
    for (index, entry) in entries.unwrap_or_default().iter().enumerate() {
        windows.extend(window(entry, &format!("{place}.windows[{index}]"), mistakes));
    }
    // The rule still matches. Without a window its runtimes get the default one, unless its author wrote one that cannot be
    // read: the default window may be earlier than that one, so they wait.
    let is_unreadable = windows.is_empty() && mistakes.count() > mistakes_before;
    Some(Rule { expressions: expressions.unwrap_or_default(), windows, is_unreadable })
}

fn expressions(value: &Value, place: &str, mistakes: &mut Mistakes) -> Vec<(Attribute, Regex)> {
    let names = Attribute::ALL.map(Attribute::member);
    let Some(members) = Members::of(value, place, &names, mistakes) else { return Vec::new() };
    let mut found = Vec::new();
    for attribute in Attribute::ALL {
        let Some(value) = members.get(attribute.member()) else { continue };
        let place = format!("{place}.{}", attribute.member());
        let text = string(value, &place, mistakes);
        // As the absent expression, the empty one matches nothing.
        let Some(text) = text.filter(|text| !text.is_empty()) else { continue };
        found.extend(expression(text, &place, mistakes).map(|expression| (attribute, expression)));
    }
    found
}

/// Compiles an expression. Labels are ASCII, so classes of ASCII, as lifecycle-manager's RE2 has them, are enough, unless the
/// text needs Unicode.
fn expression(text: &str, place: &str, mistakes: &mut Mistakes) -> Option<Regex> {
    if text.len() > MAX_EXPRESSION {
        mistakes.add(format!("{place} has more than {MAX_EXPRESSION} bytes"));
        return None;
    }
    let size = COMPILED.0 * text.len() + COMPILED.1;
    let unquoted = without_quotes(text);
    let compile = |unicode| {
        let mut builder = RegexBuilder::new(&unquoted);
        builder.unicode(unicode).nest_limit(MAX_NESTING).size_limit(size).build()
    };
    match compile(false).or_else(|error| compile(true).map_err(|_| error)) {
        Ok(expression) => Some(expression),
        Err(error) => {
            // The last line of a syntax error names its kind; the others show the whole expression.
            let cause = error.to_string();
            let cause = cause.lines().last().unwrap_or_default().trim_start_matches("error: ");
            mistakes.add(format!("{place} is not a usable regular expression: {cause}"));
            None
        }
    }
}

/// Replaces literal text between `\Q` and `\E`, which RE2 knows and Rust's expressions do not. Without an end it extends to
/// that of the expression.
fn without_quotes(text: &str) -> String {
    let mut found = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        found.push_str(before);
        let mut escaped = after.chars();
        match escaped.next() {
            Some('Q') => {
                let (literal, end) = after[1..].split_once("\\E").unwrap_or((&after[1..], ""));
                found.push_str(&regex::escape(literal));
                rest = end;
            }
            Some(other) => {
                found.extend(['\\', other]);
                rest = escaped.as_str();
            }
            None => {
                found.push('\\');
                rest = "";
            }
        }
    }
    found + rest
}

#[cfg(test)]
mod tests;
