//! Versions of modules, as lifecycle-manager compares them.

use semver::Version;

/// Major, minor and patch version, by which downgrades are recognised; pre-release and build are ignored. As for
/// lifecycle-manager, a `v` may precede the version, and minor and patch may be absent: `v1.2` is 1.2.0. `None` if a text is
/// not a version.
pub fn core_version(text: &str) -> Option<(u64, u64, u64)> {
    let text = text.strip_prefix('v').unwrap_or(text);
    let (numbers, suffix) = text.split_at(text.find(['-', '+']).unwrap_or(text.len()));
    let mut core = [0; 3];
    let mut parts = numbers.split('.');
    for number in &mut core {
        let Some(part) = parts.next() else { break };
        let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        *number = part.parse().ok().filter(|_| is_number)?;
    }
    let is_whole = parts.next().is_none() && Version::parse(&format!("0.0.0{suffix}")).is_ok();
    let [major, minor, patch] = core;
    is_whole.then_some((major, minor, patch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_read_as_lifecycle_manager_reads_it() {
        for (text, core) in [
            ("1.2.3", (1, 2, 3)),
            ("v1.2.3", (1, 2, 3)),
            ("1.2", (1, 2, 0)),
            ("v1", (1, 0, 0)),
            ("1.2-rc.1", (1, 2, 0)),
            ("1.2.3-rc1+build.5", (1, 2, 3)),
            ("1.2.3+build-5", (1, 2, 3)),
            ("01.2.3", (1, 2, 3)),
            ("18446744073709551615.0.0", (u64::MAX, 0, 0)),
        ] {
            assert_eq!(core_version(text), Some(core), "{text}");
        }
        for text in [
            "",
            "v",
            "V1.2.3",
            "vv1",
            "1.",
            ".1",
            "1..2",
            "1.2.3.4",
            "1.x",
            "+1.2.3",
            "1.2.3-",
            "1.2.3-é",
            "1.2.3-01",
            "1.2.3 ",
            "latest",
            "18446744073709551616.0.0",
        ] {
            assert_eq!(core_version(text), None, "{text}");
        }
    }
}
