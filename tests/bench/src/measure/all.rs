//! All measurements, one after the other, each in a process of its own; in full, or in a short form that finds what has
//! become worse. The figures of the last full run are in `tests/data/figures.jsonl`.

use std::{collections::HashMap, env, fs, path::PathBuf, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use tidewatch_testing::{paths, progress::Step};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
    time::timeout,
};

/// The longest measurement takes an hour and a quarter in full.
const FULL_DEADLINE: Duration = Duration::from_secs(2 * 3_600);
/// Several times as long as the longest short form takes on two cores.
const SHORT_DEADLINE: Duration = Duration::from_secs(15 * 60);

/// A measurement, and the arguments of its short form.
struct Measurement {
    command: &'static str,
    short: &'static str,
}

const fn measurement(command: &'static str, short: &'static str) -> Measurement {
    Measurement { command, short }
}

const MEASUREMENTS: [Measurement; 17] = [
    measurement("event-path", "--objects 2000 --seconds 15 --runs 1"),
    measurement("user-write", "--objects 2000 --seconds 10 --runs 1"),
    measurement("idle", "--objects 2000 --minutes 1"),
    measurement("receiver-knee", "--seconds 5"),
    measurement("fleet", "--agents 200,600 --seconds 70 --plain-connections 400"),
    measurement("restart", "--agents 200,600 --rounds 1"),
    measurement("replicas", "--part relay --seconds 10 --runs 1"),
    measurement("enrolment", "--agents 200,600"),
    measurement("catalog", "--runtimes 200,600 --rounds 1 --idle-seconds 30"),
    measurement("modules", "--installs 10 --flips 20 --runtimes 1 --large 1"),
    measurement("module-fleet", "--runtimes 100,500 --changed 50 --idle-seconds 60"),
    measurement("scale", "--runtimes 500 --idle-seconds 30"),
    measurement("rollout", "--runtimes 200"),
    measurement("preview", "--runs 5"),
    measurement("flood", "--seconds 10 --rounds 1"),
    measurement("hostile", "--changes 3 --onset 7"),
    measurement("soak", "--runtimes 50 --minutes 6"),
];

/// Extent of the run.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Run the short form of each measurement
    #[arg(long)]
    pub short: bool,
    /// Run only these measurements
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
    /// Write the figures to tests/data/figures.jsonl, with which later runs are compared
    #[arg(long, conflicts_with = "short")]
    pub record: bool,
}

/// A figure as a measurement prints it, with the name of the measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct NamedFigure {
    #[serde(default)]
    measurement: String,
    figure: String,
    value: f64,
    unit: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    floor: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bar: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    holds: Option<bool>,
}

/// A figure beside that of the last full run.
#[derive(Debug, Serialize)]
struct Compared<'a> {
    #[serde(flatten)]
    figure: &'a NamedFigure,
    #[serde(skip_serializing_if = "Option::is_none")]
    full: Option<&'a NamedFigure>,
}

impl Compared<'_> {
    /// True if the figure misses its bar, and did not in the last full run.
    fn is_new_miss(&self) -> bool {
        self.figure.holds == Some(false) && self.full.is_none_or(|full| full.holds != Some(false))
    }
}

/// Runs the measurements, and prints each figure beside that of the last full run.
///
/// # Errors
/// A measurement fails or exceeds its deadline, or a figure misses a bar that it did not miss in the last full run. All
/// others run all the same.
pub async fn measure(settings: &Settings, print: &mut impl FnMut(&str)) -> Result<()> {
    for name in &settings.only {
        if !MEASUREMENTS.iter().any(|measurement| measurement.command == name) {
            bail!("there is no measurement {name:?}");
        }
    }
    let full = recorded()?;
    let mut figures = Vec::new();
    let mut failed = Vec::new();
    let is_selected = |measurement: &&Measurement| {
        settings.only.is_empty() || settings.only.iter().any(|name| name == measurement.command)
    };
    for measurement in MEASUREMENTS.iter().filter(is_selected) {
        let step = Step::begin(measurement.command.to_owned());
        match run(measurement, settings.short).await {
            Ok(measured) => {
                for figure in &measured {
                    let key = (figure.measurement.clone(), figure.figure.clone());
                    let compared = Compared { figure, full: full.get(&key) };
                    print(&serde_json::to_string(&compared)?);
                    if compared.is_new_miss() {
                        failed.push(format!("{} of {} misses its bar", figure.figure, measurement.command));
                    }
                }
                figures.extend(measured);
            }
            Err(error) => failed.push(format!("{}: {error:#}", measurement.command)),
        }
        step.done();
    }
    if !failed.is_empty() {
        bail!("{}", failed.join("; "));
    }
    if settings.record { record(&full, figures) } else { Ok(()) }
}

/// Runs one measurement, and returns its figures.
async fn run(measurement: &Measurement, short: bool) -> Result<Vec<NamedFigure>> {
    let mut command = Command::new(env::current_exe().context("find this program")?);
    command.args([measurement.command, "--no-enforce"]).stdout(Stdio::piped()).kill_on_drop(true);
    if short {
        command.args(measurement.short.split_whitespace());
    }
    let mut child = command.spawn().context("start the measurement")?;
    let stdout = child.stdout.take().context("its standard output")?;
    let finished = async {
        let mut lines = BufReader::new(stdout).lines();
        let mut figures = Vec::new();
        while let Some(line) = lines.next_line().await? {
            let figure: NamedFigure = serde_json::from_str(&line).with_context(|| format!("read {line:?}"))?;
            figures.push(NamedFigure { measurement: measurement.command.to_owned(), ..figure });
        }
        let status = child.wait().await?;
        if !status.success() {
            bail!("it ended with {status}");
        }
        Ok(figures)
    };
    let deadline = if short { SHORT_DEADLINE } else { FULL_DEADLINE };
    timeout(deadline, finished).await.with_context(|| format!("it takes more than {} s", deadline.as_secs()))?
}

fn path() -> PathBuf {
    paths::workspace().join("tests/data/figures.jsonl")
}

/// Figures of the last full run of each measurement, by measurement and name.
fn recorded() -> Result<HashMap<(String, String), NamedFigure>> {
    let text = fs::read_to_string(path()).context("read the figures of the last full run")?;
    let figures = text.lines().map(serde_json::from_str::<NamedFigure>);
    let figures = figures.collect::<Result<Vec<_>, _>>().context("read the figures of the last full run")?;
    Ok(figures.into_iter().map(|figure| ((figure.measurement.clone(), figure.figure.clone()), figure)).collect())
}

/// Writes the figures of this run, and those of the measurements that it left out.
fn record(full: &HashMap<(String, String), NamedFigure>, figures: Vec<NamedFigure>) -> Result<()> {
    let is_kept = |known: &&NamedFigure| figures.iter().all(|figure| figure.measurement != known.measurement);
    let mut lines: Vec<_> = full.values().filter(is_kept).cloned().collect();
    lines.extend(figures);
    lines.sort_by(|one, other| (&one.measurement, &one.figure).cmp(&(&other.measurement, &other.figure)));
    let lines = lines.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
    fs::write(path(), lines.join("\n") + "\n").context("record the figures")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::measure::cli::Arguments;

    fn figure(holds: Option<bool>) -> NamedFigure {
        let line = r#"{"measurement":"m","figure":"f","value":2.0,"unit":"ms","bar":1.0}"#;
        NamedFigure { holds, ..serde_json::from_str(line).unwrap() }
    }

    #[test]
    fn every_measurement_has_a_short_form_with_valid_arguments() {
        let command = Arguments::command();
        let names = command.get_subcommands().filter(|it| !it.is_hide_set()).map(clap::Command::get_name);
        let names: Vec<_> = names.filter(|name| !matches!(*name, "all" | "help")).collect();
        assert_eq!(MEASUREMENTS.map(|measurement| measurement.command).to_vec(), names);
        for Measurement { command: name, short } in MEASUREMENTS {
            let arguments = ["measure", name].into_iter().chain(short.split_whitespace());
            command.clone().try_get_matches_from(arguments).unwrap();
        }
    }

    #[test]
    fn bar_that_the_last_full_run_missed_is_no_new_miss() {
        for (now, full, is_new) in [
            (figure(Some(false)), Some(figure(Some(true))), true),
            (figure(Some(false)), None, true),
            (figure(Some(false)), Some(figure(Some(false))), false),
            (figure(Some(true)), Some(figure(Some(false))), false),
            (figure(None), None, false),
        ] {
            assert_eq!(Compared { figure: &now, full: full.as_ref() }.is_new_miss(), is_new);
        }
    }

    #[test]
    fn recorded_figures_are_readable() {
        assert!(!recorded().unwrap().is_empty());
    }
}
