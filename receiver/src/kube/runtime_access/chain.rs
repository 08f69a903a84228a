//! Looks for causes in an error's chain of sources.

use std::{error::Error, io, iter};

type Cause<'a> = &'a (dyn Error + 'static);

/// How many sources are looked at; a chain is never that long.
const DEPTH: usize = 32;

/// The error and its causes.
pub(super) fn causes(error: Cause<'_>) -> impl Iterator<Item = Cause<'_>> {
    iter::successors(Some(error), |error| source(*error)).take(DEPTH)
}

/// The first cause of type `E`.
pub(super) fn find<'a, E: Error + 'static>(error: Cause<'a>) -> Option<&'a E> {
    causes(error).find_map(|cause| cause.downcast_ref::<E>())
}

/// The next cause. Looks into `io::Error` too, which hides the error that it carries from its chain.
fn source(error: Cause<'_>) -> Option<Cause<'_>> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(carried) => Some(carried),
        None => error.source(),
    }
}
