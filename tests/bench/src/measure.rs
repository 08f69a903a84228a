//! Measurements of the whole system. Each figure comes with the floor that the same run saw, because times alone are not
//! stable on shared machines.

pub mod all;
mod api_calls;
mod bare;
pub mod catalog;
mod cli;
pub mod enrolment;
mod event_path;
mod figure;
pub mod fleet;
mod fleet_setup;
pub mod flood;
pub mod hostile;
mod idle;
pub mod knee;
pub mod module_fleet;
pub mod modules;
mod network;
mod plain_connections;
mod plain_modules;
mod plain_path;
mod plain_server_process;
pub mod preview;
pub mod replicas;
pub mod restart;
pub mod rollout;
mod runtime_setup;
pub mod scale;
pub mod soak;
mod user_write;
mod writer;

pub use cli::main;
pub use event_path::event_path;
pub use figure::Figure;
pub use idle::idle;
pub use network::Network;
pub use runtime_setup::Settings;
pub use user_write::user_write;
