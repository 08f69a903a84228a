//! Searches the source chain of an error.

use std::{error::Error, io, iter};

type Cause<'a> = &'a (dyn Error + 'static);

/// Limit of sources that are searched; real chains are shorter.
const DEPTH: usize = 32;

/// The error and its sources.
pub(super) fn causes(error: Cause<'_>) -> impl Iterator<Item = Cause<'_>> {
    iter::successors(Some(error), |error| source(*error)).take(DEPTH)
}

/// The first source of type `E`, the error itself included.
pub(super) fn find<'a, E: Error + 'static>(error: Cause<'a>) -> Option<&'a E> {
    causes(error).find_map(|cause| cause.downcast_ref::<E>())
}

/// The next source. Also unwraps `io::Error`, which leaves its inner error out of the chain.
fn source(error: Cause<'_>) -> Option<Cause<'_>> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(carried) => Some(carried),
        None => error.source(),
    }
}
