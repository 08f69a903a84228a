//! Process of the agent.

use std::{process::ExitCode, time::Duration};

use tidewatch_agent::{app, command::Command, config::Config, telemetry};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Idle time after which the name resolution thread ends, because a second stack costs memory.
const IDLE_THREAD: Duration = Duration::from_secs(1);
/// Upper bound of the shutdown.
const HARD_DEADLINE: Duration = Duration::from_secs(8);

fn main() -> ExitCode {
    // An invalid configuration exits here, with code 2 and the errors on stderr.
    let config = match Command::parse() {
        Command::Run(config) => config,
        Command::Status(status) => return status.run(),
    };
    match start(*config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let code = error.downcast_ref().map_or(1, app::RunError::exit_code);
            tracing::error!(error = telemetry::error_chain(error.as_ref()), code, "Agent terminated");
            ExitCode::from(code)
        }
    }
}

fn start(config: Config) -> anyhow::Result<()> {
    telemetry::init_logging(&config.log)?;
    // Libraries that use the process default get the provider that all other TLS configurations name explicitly.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .thread_keep_alive(IDLE_THREAD)
        .build()?;
    let result = runtime.block_on(async {
        let stop = CancellationToken::new();
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut running = std::pin::pin!(app::run(config, stop.clone()));
        tokio::select! {
            ended = &mut running => return ended.map_err(anyhow::Error::from),
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
        tokio::time::timeout(HARD_DEADLINE, running).await?.map_err(anyhow::Error::from)
    });
    runtime.shutdown_timeout(IDLE_THREAD);
    result
}
