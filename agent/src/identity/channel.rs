//! Channel from the link to the enroller: the receiver's demands concerning the certificate.

use strum::IntoStaticStr;
use tokio::sync::mpsc;

use super::IdentityStatus;

/// Capacity for pending demands. The receiver repeats each demand as long as its cause persists.
const DEMANDS: usize = 4;

/// Demand of the receiver concerning a certificate.
pub(crate) struct Demand {
    pub(super) notice: CertificateNotice,
    /// Fingerprint of the leaf that it concerns.
    pub(super) fingerprint: String,
}

/// Content of a demand; the name of a variant is its value in logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum CertificateNotice {
    /// Renew it.
    Renew,
    /// It was refused.
    Refused,
}

/// The link's end of the channel.
pub struct EnrollerHandle {
    demands: mpsc::Sender<Demand>,
    /// Status of the identity.
    pub(crate) identity_status: IdentityStatus,
}

impl EnrollerHandle {
    /// Creates both ends of the channel.
    pub(crate) fn new(identity_status: IdentityStatus) -> (Self, mpsc::Receiver<Demand>) {
        let (send, demands) = mpsc::channel(DEMANDS);
        (Self { demands: send, identity_status }, demands)
    }

    /// Forwards a demand concerning the leaf with this fingerprint.
    pub(crate) fn notify(&self, notice: CertificateNotice, fingerprint: &str) {
        // If the channel is full, it already holds earlier demands, and this one will be repeated.
        let _ = self.demands.try_send(Demand { notice, fingerprint: fingerprint.to_owned() });
    }
}
