//! What lists and watches say, on its way into a [`Sink`]. Nothing is awaited here: what is read comes in, and what follows from it
//! comes out.

use serde::de::Error as _;

use super::{
    Sink,
    body::{Kind, Line, Page},
    object::{VERSION, Versioned},
};
use crate::{canary::Height, kubernetes::Call};

/// Why a watch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Go on from the last resource version.
    Reopen,
    /// The same: nothing was heard for too long.
    Silent,
    /// That version is no longer there: only a list can tell what is there.
    Gone,
    /// Versions went back: what was seen belongs to a history that is no more.
    Backwards,
}

/// How far a list is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Listed {
    /// At its end: a watch goes on from this resource version.
    Whole(String),
    /// There is another page, behind this token.
    Part(String),
}

/// One watch's sink, and how far it has seen.
pub(crate) struct Reader<S> {
    pub(super) sink: S,
    height: Height,
}

impl<S: Sink> Reader<S> {
    pub(crate) const fn new(sink: S, height: Height) -> Self {
        Self { sink, height }
    }

    /// A list begins; what an earlier one that broke off has told counts for nothing.
    pub(crate) fn begin(&mut self) {
        self.sink.begin();
    }

    /// A page of a list, the first one or that behind a token.
    pub(crate) fn page(&mut self, page: Page<S::Item>, token: &str) -> Result<Listed, Call> {
        let version = page.metadata.version()?;
        let more = self.sink.page(page.items);
        if !more || page.metadata.token.is_empty() {
            self.height.listed(version);
            self.sink.complete(version);
            return Ok(Listed::Whole(page.metadata.version));
        }
        if page.metadata.token == token {
            return Err(Call::Parse(serde_json::Error::custom("a list that goes in a circle")));
        }
        Ok(Listed::Part(page.metadata.token))
    }

    /// A line of a watch; says if it ends the watch. The version moves on only when what came with it was read: what was not is asked
    /// for again.
    pub(crate) fn line(&mut self, line: &[u8], version: &mut String) -> Result<Option<End>, Call> {
        let line = Line::read(line)?;
        match line.kind()? {
            Kind::Error => {
                let status = line.status()?;
                return match status.code {
                    410 => Ok(Some(End::Gone)),
                    _ => Err(status.into()),
                };
            }
            Kind::Bookmark => {
                if !self.advance(version, line.version()?)? {
                    return Ok(Some(End::Backwards));
                }
                self.sink.bookmark(version);
            }
            Kind::Present => {
                let item: S::Item = line.item()?;
                if !self.advance(version, item.version())? {
                    return Ok(Some(End::Backwards));
                }
                self.sink.present(item);
            }
            Kind::Gone => {
                let item: S::Item = line.item()?;
                if !self.advance(version, item.version())? {
                    return Ok(Some(End::Backwards));
                }
                self.sink.gone(item);
            }
        }
        Ok(None)
    }

    /// False if the version is lower than the one before it. Versions that are no numbers only differ.
    fn advance(&self, version: &mut String, next: &str) -> Result<bool, Call> {
        if next.is_empty() || next.len() > VERSION {
            let unfit = "an object without a resource version, or with a long one";
            return Err(Call::Parse(serde_json::Error::custom(unfit)));
        }
        if let (Ok(old), Ok(new)) = (version.parse::<u64>(), next.parse::<u64>())
            && new < old
        {
            return Ok(false);
        }
        version.clear();
        version.push_str(next);
        self.height.seen(next);
        Ok(true)
    }
}
