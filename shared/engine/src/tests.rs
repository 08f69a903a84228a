//! Tests of several modules together.

mod model;
