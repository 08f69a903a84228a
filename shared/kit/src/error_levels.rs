//! Levels of an error, as the fields of a log line show them: `error` has the text of the error itself, `cause` those of
//! its sources. Many libraries repeat the text of a source in their own; a repeated text is removed.

use std::{error::Error, iter::successors};

/// Sources that are shown; real chains are shorter.
const DEPTH: usize = 16;

/// Text of an error without those of its sources, for the field `error`.
pub fn own(error: &dyn Error) -> String {
    levels(error).next().unwrap_or_default()
}

/// Texts of the sources of an error, outermost first and separated by a colon, for the field `cause`; `None` if the error
/// has none.
pub fn cause(error: &dyn Error) -> Option<String> {
    let causes: Vec<_> = levels(error).skip(1).collect();
    (!causes.is_empty()).then(|| causes.join(": "))
}

/// Texts of an error and its sources in one line, for a terminal.
pub fn line(error: &dyn Error) -> String {
    levels(error).collect::<Vec<_>>().join(": ")
}

/// Logs an event with the fields `error` and `cause` of an error, before other fields and the message:
/// `log_error!(warn, &error, kind, "Watch failed")`.
#[macro_export]
macro_rules! log_error {
    ($level:ident, $error:expr, $($rest:tt)+) => {
        ::tracing::$level!(
            error = $crate::error_levels::own($error),
            cause = $crate::error_levels::cause($error),
            $($rest)+
        )
    };
}

/// The text of each level. A level that only repeats its source has none.
fn levels(error: &dyn Error) -> impl Iterator<Item = String> {
    let all = successors(Some(error), |&error| error.source()).take(DEPTH);
    let own = all.map(|error| {
        let text = error.to_string();
        let Some(source) = error.source().map(ToString::to_string).filter(|source| !source.is_empty()) else {
            return text;
        };
        match text.strip_suffix(source.as_str()) {
            Some(own) => own.trim_end_matches([':', ' ']).to_owned(),
            None => text,
        }
    });
    own.filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc};

    use parking_lot::Mutex;
    use serde_json::Value;
    use thiserror::Error;

    use super::*;

    #[derive(Debug, Error)]
    #[error("not found")]
    struct NotFound;

    #[derive(Debug, Error)]
    #[error("object: {0}")]
    struct Repeating(#[source] NotFound);

    #[derive(Debug, Error)]
    #[error(transparent)]
    struct Transparent(#[from] Repeating);

    #[derive(Debug, Error)]
    #[error("read the Secret")]
    struct Plain(#[source] Transparent);

    #[test]
    fn each_text_of_a_chain_is_shown_once() {
        let error = Plain(Repeating(NotFound).into());
        assert_eq!((own(&error), cause(&error).as_deref()), ("read the Secret".to_owned(), Some("object: not found")));
        assert_eq!(line(&error), "read the Secret: object: not found");
        assert_eq!((own(&NotFound), cause(&NotFound)), ("not found".to_owned(), None));
        let context = anyhow::Error::new(error).context("prepare the certificates");
        assert_eq!(line(context.as_ref()), "prepare the certificates: read the Secret: object: not found");
    }

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn log_line_has_error_and_cause_in_fields_of_their_own() {
        let lines = Lines::default();
        let error = Plain(Repeating(NotFound).into());
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt().json().flatten_event(true).with_writer(move || writer.clone());
        tracing::subscriber::with_default(subscriber.finish(), || {
            tracing::warn!(error = own(&error), cause = cause(&error), "Failed");
            tracing::warn!(error = own(&NotFound), cause = cause(&NotFound), "Failed");
        });
        let text = String::from_utf8(lines.0.lock().clone()).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&lines[0]["error"], &lines[0]["cause"]), (&"read the Secret".into(), &"object: not found".into()));
        assert_eq!((&lines[1]["error"], lines[1].get("cause")), (&"not found".into(), None));
    }
}
