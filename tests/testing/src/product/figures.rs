//! Memory and CPU time of a process from `/proc`, and the series of its `/metrics` page.

use std::{collections::BTreeMap, fs, io, path::Path, time::Duration};

/// The kernel reports times to user space in hundredths of a second (`USER_HZ`) on every supported architecture.
const TICKS_PER_SECOND: u64 = 100;

/// Memory of a process, in KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Its proportional share now: shared pages count by the number of their users (`smaps_rollup`).
    pub pss_kib: u64,
    /// Resident now.
    pub rss_kib: u64,
    /// Resident at most, ever (`VmHWM`).
    pub peak_rss_kib: u64,
}

/// Reads the memory of a process.
///
/// # Errors
/// If it is gone, or the kernel has no `smaps_rollup`.
pub fn memory(pid: u32) -> io::Result<Memory> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    Ok(Memory {
        pss_kib: field(&rollup, "Pss:")?,
        rss_kib: field(&status, "VmRSS:")?,
        peak_rss_kib: field(&status, "VmHWM:")?,
    })
}

/// The number in the line `<name> <number> kB`.
fn field(text: &str, name: &str) -> io::Result<u64> {
    let number = text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok());
    number.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("no {name} in /proc")))
}

/// Returns the value of a series on a `/metrics` page; the name includes the labels.
pub fn metric(page: &str, series: &str) -> Option<f64> {
    page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}

/// Sum of a metric over the series whose labels are selected, from a metrics page.
pub fn metric_sum(page: &str, name: &str, selects: impl Fn(&str) -> bool) -> f64 {
    let series = page.lines().filter_map(|line| line.strip_prefix(name)?.rsplit_once(' '));
    let selected = series.filter(|(labels, _)| (labels.is_empty() || labels.starts_with('{')) && selects(labels));
    selected.filter_map(|(_, value)| value.parse::<f64>().ok()).sum()
}

/// Counts the open file descriptors of a process.
///
/// # Errors
/// If it is gone.
pub fn open_files(pid: u32) -> io::Result<usize> {
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

/// Reads the CPU time of each thread of a process and sums it by thread name.
///
/// # Errors
/// If it is gone.
pub fn cpu_by_thread(pid: u32) -> io::Result<BTreeMap<String, Duration>> {
    let mut sums = BTreeMap::<String, Duration>::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may end while it is read.
        let task = task?.path();
        if let (Ok(name), Some(time)) = (fs::read_to_string(task.join("comm")), cpu_of(&task)) {
            *sums.entry(name.trim_end().to_owned()).or_default() += time;
        }
    }
    Ok(sums)
}

/// Reads the CPU time of a process over all its threads, those that have ended included.
///
/// # Errors
/// If it is gone.
pub fn cpu_time(pid: u32) -> io::Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    ticks(&stat).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "stat without CPU time"))
}

/// In nanoseconds if the kernel provides them, otherwise in hundredths of a second.
fn cpu_of(task: &Path) -> Option<Duration> {
    let schedstat = fs::read_to_string(task.join("schedstat")).unwrap_or_default();
    match schedstat.split_whitespace().next().and_then(|word| word.parse().ok()) {
        Some(nanos) => Some(Duration::from_nanos(nanos)),
        None => ticks(&fs::read_to_string(task.join("stat")).ok()?),
    }
}

/// User plus system time of a `stat` line: fields 14 and 15 of proc(5). Field 2 is a name of arbitrary characters,
/// hence the search from its closing parenthesis.
fn ticks(stat: &str) -> Option<Duration> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let sum = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    Some(Duration::from_millis(sum * 1000 / TICKS_PER_SECOND))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_and_threads() {
        let memory = memory(std::process::id()).expect("readable");
        assert!(memory.pss_kib > 0 && memory.peak_rss_kib >= memory.rss_kib, "{memory:?}");
        assert!(!cpu_by_thread(std::process::id()).expect("readable").is_empty());
    }

    #[test]
    fn time_of_a_thread_that_ended_counts_for_the_process() {
        let spend = Duration::from_millis(50);
        let before = cpu_time(std::process::id()).expect("readable");
        let spinning = std::thread::Builder::new().name("spinning".to_owned()).spawn(move || {
            let path = Path::new("/proc/thread-self");
            while cpu_of(path).expect("readable") < spend {}
        });
        spinning.expect("a thread").join().expect("no panic");
        let threads = cpu_by_thread(std::process::id()).expect("readable");
        assert!(!threads.contains_key("spinning"), "{threads:?}");
        // Of the process the kernel reports whole ticks.
        let tick = Duration::from_millis(1_000 / TICKS_PER_SECOND);
        assert!(cpu_time(std::process::id()).expect("readable") + tick >= before + spend);
    }

    #[test]
    fn a_name_with_spaces_and_parentheses_does_not_shift_the_fields() {
        let stat = "7 (a) b (c) S 1 1 1 0 -1 4194304 1 0 0 0 150 25 0 0 20 0 1 0 1";
        assert_eq!(ticks(stat), Some(Duration::from_millis(1750)));
    }
}
