//! Foreign texts in errors, with bounded length.

use std::fmt;

/// Maximum length of a quoted text, in characters.
const MAX_QUOTED: usize = 100;
/// Maximum length of the message of a parser, in characters.
const MAX_MESSAGE: usize = 500;

/// Beginning of a foreign text. It is displayed in quotes, with control characters escaped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt(String);

impl Excerpt {
    /// Cuts a text to 100 characters.
    pub(super) fn of(text: &str) -> Self {
        Self(cut(text, MAX_QUOTED))
    }
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// Message of a parser, which may quote its input.
pub(super) fn message(error: &impl fmt::Display) -> String {
    cut(&error.to_string(), MAX_MESSAGE)
}

fn cut(text: &str, limit: usize) -> String {
    let mut cut: String = text.chars().take(limit).collect();
    if cut.len() < text.len() {
        cut.push('…');
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_cut_and_control_characters_are_escaped() {
        assert_eq!(Excerpt::of("a\u{1b}\n").to_string(), r#""a\u{1b}\n""#);
        let whole = "é".repeat(MAX_QUOTED);
        assert_eq!(Excerpt::of(&whole).to_string(), format!("{whole:?}"));
        assert_eq!(Excerpt::of(&format!("{whole}x")).to_string(), format!("\"{whole}…\""));
        assert_eq!(message(&"x".repeat(10_000)).chars().count(), MAX_MESSAGE + 1);
    }
}
