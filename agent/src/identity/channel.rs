//! Channel between the link and the enroller: the link sends renewals beside its own requests, authenticated by the
//! current identity, and forwards the receiver's demands concerning the certificate.

use bytes::Bytes;
use strum::IntoStaticStr;
use tokio::sync::{mpsc, oneshot};

use super::IdentityStatus;
use crate::receiver::{BufferedResponse, RequestError};

/// Capacity for pending demands. The receiver repeats each demand as long as its cause persists.
const NOTICES: usize = 4;

/// A renewal request for the link to send.
pub(crate) struct RenewalOrder {
    /// Body of the request.
    pub(crate) body: Bytes,
    reply: oneshot::Sender<Result<BufferedResponse, RequestError>>,
}

impl RenewalOrder {
    /// True if the enroller no longer waits for the response.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.reply.is_closed()
    }

    /// Delivers the response.
    pub(crate) fn complete(self, response: Result<BufferedResponse, RequestError>) {
        // An enroller that has given up sends another request.
        let _ = self.reply.send(response);
    }
}

/// Demand of the receiver concerning a certificate; the name of a variant is its value in logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum CertificateNotice {
    /// Renew it.
    Renew,
    /// It was refused.
    Refused,
}

/// The link's end of the channel.
pub(crate) struct EnrollerHandle {
    orders: mpsc::Receiver<RenewalOrder>,
    /// Demands with the fingerprint of the leaf they concern.
    notices: mpsc::Sender<(CertificateNotice, String)>,
    /// Status of the identity.
    pub(crate) identity_status: IdentityStatus,
}

/// The enroller's end of the channel.
pub(crate) struct LinkHandle {
    orders: mpsc::Sender<RenewalOrder>,
    notices: mpsc::Receiver<(CertificateNotice, String)>,
}

/// Creates both ends of the channel.
pub(crate) fn renewal_channel(identity_status: IdentityStatus) -> (EnrollerHandle, LinkHandle) {
    let (order, orders) = mpsc::channel(1);
    let (notify, notices) = mpsc::channel(NOTICES);
    (EnrollerHandle { orders, notices: notify, identity_status }, LinkHandle { orders: order, notices })
}

impl EnrollerHandle {
    /// Takes a pending renewal request.
    pub(crate) fn try_next_order(&mut self) -> Option<RenewalOrder> {
        self.orders.try_recv().ok()
    }

    /// Waits for the next renewal request.
    pub(crate) async fn next_order(&mut self) -> RenewalOrder {
        match self.orders.recv().await {
            Some(order) => order,
            // The enroller is gone, so no request can come.
            None => std::future::pending().await,
        }
    }

    /// Forwards a demand concerning the leaf with this fingerprint.
    pub(crate) fn notify(&self, kind: CertificateNotice, fingerprint: &str) {
        // If the channel is full, it already holds earlier demands, and this one will be repeated.
        let _ = self.notices.try_send((kind, fingerprint.to_owned()));
    }
}

impl LinkHandle {
    /// Sends a renewal through the link and returns the response; `None` when the link is gone.
    pub(crate) async fn request_renewal(&self, body: Bytes) -> Option<Result<BufferedResponse, RequestError>> {
        let (reply, response) = oneshot::channel();
        self.orders.send(RenewalOrder { body, reply }).await.ok()?;
        response.await.ok()
    }

    /// Waits for the next demand; returns it with the fingerprint of the leaf it concerns.
    pub(super) async fn notice(&mut self) -> (CertificateNotice, String) {
        match self.notices.recv().await {
            Some(notice) => notice,
            // The link is gone, so no demand can come.
            None => std::future::pending().await,
        }
    }
}
