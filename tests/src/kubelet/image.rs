//! What an image reference stands for on the test bed.

/// A tag of images that no registry has.
const MISSING_TAG: &str = "does-not-exist";
/// Tags of images of ours that are broken, and what runs in place of the program.
const BROKEN_TAGS: [(&str, &str); 2] =
    [("exits", "echo 'error: this version is broken' >&2; exit 1"), ("hangs", "exec sleep 86400")];

/// A program of the product, and what its image is known to listen on when no flag says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Own {
    /// Name of the binary, and last segment of the image's repository.
    pub(super) binary: &'static str,
    /// Environment variable of each listener and its port by default. A pod has a network of its own, in which no other pod has
    /// these ports; here the kubelet gives each a free port instead.
    pub(super) listeners: &'static [(&'static str, u16)],
    /// The shell's script that is run in its place, whatever its arguments.
    pub(super) broken: Option<&'static str>,
}

const OWN: [Own; 2] = [
    Own {
        binary: "tidewatch-agent",
        listeners: &[("TIDEWATCH_METRICS_ADDRESS", 2112), ("TIDEWATCH_ADMIN_ADDRESS", 2113)],
        broken: None,
    },
    Own {
        binary: "tidewatch-receiver",
        listeners: &[("TIDEWATCH_METRICS_ADDRESS", 8080), ("TIDEWATCH_ADMIN_ADDRESS", 8085)],
        broken: None,
    },
];

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Image {
    /// One of ours: the local binary is started.
    Own(Own),
    /// No registry has it.
    Missing,
    /// Somebody else's: the pod is pretended to run.
    Foreign,
}

impl Image {
    /// Reads a reference: `[host[:port]/]path[:tag][@digest]`.
    pub(super) fn of(reference: &str) -> Self {
        let name = reference.split_once('@').map_or(reference, |(name, _)| name);
        let last = name.rsplit_once('/').map_or(name, |(_, last)| last);
        let (last, tag) = last.split_once(':').unwrap_or((last, "latest"));
        if tag == MISSING_TAG {
            return Self::Missing;
        }
        let broken = BROKEN_TAGS.iter().find(|(broken, _)| *broken == tag).map(|(_, script)| *script);
        let own = OWN.into_iter().find(|own| own.binary == last);
        own.map_or(Self::Foreign, |own| Self::Own(Own { broken, ..own }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binary(reference: &str) -> Option<&'static str> {
        match Image::of(reference) {
            Image::Own(own) => Some(own.binary),
            Image::Missing | Image::Foreign => None,
        }
    }

    #[test]
    fn the_last_segment_of_the_repository_tells() {
        for ours in [
            "tidewatch-agent",
            "example.test/tidewatch-agent:dev",
            "example.test:5000/a/b/tidewatch-agent@sha256:00",
            "example.test:5000/tidewatch-agent:1@sha256:00",
        ] {
            assert_eq!(binary(ours), Some("tidewatch-agent"), "{ours}");
        }
        assert_eq!(binary("example.test/tidewatch-receiver"), Some("tidewatch-receiver"));
        for foreign in ["nginx", "tidewatch-agent/nginx", "example.test/my-tidewatch-agent:1"] {
            assert_eq!(Image::of(foreign), Image::Foreign, "{foreign}");
        }
        assert_eq!(Image::of("example.test/tidewatch-agent:does-not-exist"), Image::Missing);
        assert_eq!(Image::of("nginx:does-not-exist"), Image::Missing);
        let is_broken = |reference| matches!(Image::of(reference), Image::Own(own) if own.broken.is_some());
        assert!(is_broken("example.test/tidewatch-agent:exits") && !is_broken("example.test/tidewatch-agent:dev"));
        assert_eq!(Image::of("nginx:exits"), Image::Foreign);
    }
}
