//! Futures that the program runs.

use futures::future::BoxFuture;
use tidewatch_gateway::{ListenError, ports::Gateway};

/// Future that listens on a port, on the executor that polls it.
pub(super) type Binding<H> = BoxFuture<'static, Result<Gateway<H>, ListenError>>;

/// Task of a component; returns its name when it ends.
pub(super) type Task = BoxFuture<'static, &'static str>;
