//! Text output of both command lines: aligned columns, short ages, and no terminal control sequences.

/// Replaces control characters in text from an agent or a server.
pub fn sanitize(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { '\u{fffd}' } else { char }).collect()
}

/// Formats seconds as `45s`, `3m12s`, `2h5m` or `3d4h`; `-` for `None`.
pub fn age(seconds: Option<u64>) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    match seconds {
        None => "-".to_owned(),
        Some(seconds) if seconds < MINUTE => format!("{seconds}s"),
        Some(seconds) if seconds < HOUR => format!("{}m{}s", seconds / MINUTE, seconds % MINUTE),
        Some(seconds) if seconds < DAY => format!("{}h{}m", seconds / HOUR, seconds % HOUR / MINUTE),
        Some(seconds) => format!("{}d{}h", seconds / DAY, seconds % DAY / HOUR),
    }
}

/// Formats one line per row under a header, with columns padded to a common width.
pub fn aligned<const N: usize>(head: [&str; N], rows: Vec<[String; N]>) -> String {
    let rows: Vec<[String; N]> = rows.into_iter().map(|row| row.map(|cell| sanitize(&cell))).collect();
    let widths: Vec<usize> = (0..N)
        .map(|column| rows.iter().map(|row| row[column].chars().count()).fold(head[column].len(), usize::max))
        .collect();
    let mut text = String::new();
    let head = head.map(str::to_owned);
    for row in std::iter::once(&head).chain(&rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(&format!("{cell:<width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_short() {
        let ages = [None, Some(0), Some(59), Some(61), Some(7_505), Some(273_700)].map(age);
        assert_eq!(ages, ["-", "0s", "59s", "1m1s", "2h5m", "3d4h"]);
    }

    #[test]
    fn columns_are_aligned_by_characters() {
        let text = aligned(["A", "B"], vec![["ä\u{1b}c".into(), "1".into()], ["x".into(), String::new()]]);
        assert_eq!(text, "A    B\nä\u{fffd}c  1\nx\n");
    }
}
