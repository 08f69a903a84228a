//! Meaning of an image reference on the test bed.

/// Tag of images that no registry has.
const MISSING_TAG: &str = "does-not-exist";
/// Tags of broken product images, and the shell script that runs in place of the program.
const BROKEN_TAGS: [(&str, &str); 2] =
    [("exits", "echo 'error: this version is broken' >&2; exit 1"), ("hangs", "exec sleep 86400")];

/// A program of the product or of the sample modules, and the defaults of its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProductImage {
    /// Name of the binary, and last segment of the image's repository.
    pub(super) binary: &'static str,
    /// Environment variable of each listener and its default port. A real pod has a network of its own, in which these
    /// ports are free; here the kubelet assigns a free port to each instead.
    pub(super) listeners: &'static [(&'static str, u16)],
    /// Environment variables that the image sets.
    pub(super) env: &'static [(&'static str, &'static str)],
    /// Shell script that runs in its place, whatever its arguments.
    pub(super) broken: Option<&'static str>,
}

const PRODUCT_IMAGES: [ProductImage; 3] = [
    ProductImage {
        binary: "tidewatch-agent",
        listeners: &[("TIDEWATCH_METRICS_ADDRESS", 2112), ("TIDEWATCH_ADMIN_ADDRESS", 2113)],
        env: &[],
        broken: None,
    },
    ProductImage {
        binary: "tidewatch-receiver",
        listeners: &[
            ("TIDEWATCH_METRICS_ADDRESS", 8080),
            ("TIDEWATCH_PROBE_ADDRESS", 8081),
            ("TIDEWATCH_ADMIN_ADDRESS", 8085),
        ],
        env: &[],
        broken: None,
    },
    ProductImage {
        binary: "sample-operator",
        listeners: &[],
        env: &[("SERVICE_ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount")],
        broken: None,
    },
];

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Image {
    /// An image of the product or of the sample modules: the local binary is started.
    Product(ProductImage),
    /// An image that no registry has.
    Missing,
    /// Any other image: its pod is only reported as running.
    Foreign,
}

impl Image {
    /// Parses a reference: `[host[:port]/]path[:tag][@digest]`.
    pub(super) fn of(reference: &str) -> Self {
        let name = reference.split_once('@').map_or(reference, |(name, _)| name);
        let last = name.rsplit_once('/').map_or(name, |(_, last)| last);
        let (last, tag) = last.split_once(':').unwrap_or((last, "latest"));
        if tag == MISSING_TAG {
            return Self::Missing;
        }
        let broken = BROKEN_TAGS.iter().find(|(broken, _)| *broken == tag).map(|(_, script)| *script);
        let own = PRODUCT_IMAGES.into_iter().find(|own| own.binary == last);
        own.map_or(Self::Foreign, |own| Self::Product(ProductImage { broken, ..own }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binary(reference: &str) -> Option<&'static str> {
        match Image::of(reference) {
            Image::Product(own) => Some(own.binary),
            Image::Missing | Image::Foreign => None,
        }
    }

    #[test]
    fn last_repository_segment_selects_the_program() {
        for ours in [
            "tidewatch-agent",
            "example.test/tidewatch-agent:dev",
            "example.test:5000/a/b/tidewatch-agent@sha256:00",
            "example.test:5000/tidewatch-agent:1@sha256:00",
        ] {
            assert_eq!(binary(ours), Some("tidewatch-agent"), "{ours}");
        }
        assert_eq!(binary("example.test/tidewatch-receiver"), Some("tidewatch-receiver"));
        assert_eq!(binary("tidewatch.local/sample-operator:1.0.0"), Some("sample-operator"));
        for foreign in ["nginx", "tidewatch-agent/nginx", "example.test/my-tidewatch-agent:1"] {
            assert_eq!(Image::of(foreign), Image::Foreign, "{foreign}");
        }
        assert_eq!(Image::of("example.test/tidewatch-agent:does-not-exist"), Image::Missing);
        assert_eq!(Image::of("nginx:does-not-exist"), Image::Missing);
        let is_broken = |reference| matches!(Image::of(reference), Image::Product(own) if own.broken.is_some());
        assert!(is_broken("example.test/tidewatch-agent:exits") && !is_broken("example.test/tidewatch-agent:dev"));
        assert_eq!(Image::of("nginx:exits"), Image::Foreign);
    }
}
