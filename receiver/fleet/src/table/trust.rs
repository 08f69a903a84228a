//! Trust bundle and issuer that responses to heartbeats announce.

use std::time::Duration;

use tidewatch_api::shard::ShardCount;
use tidewatch_contract::certificate::KeyId;
use tokio::time::Instant;

/// Burst of renewal requests ahead of the rate after an idle period.
const BURST: Duration = Duration::from_secs(1);

/// Trust data for the responses to heartbeats.
#[derive(Clone, Debug, Default)]
pub struct TrustAnnouncement {
    /// Revision of the current bundle.
    pub revision: String,
    /// Key that issues new certificates: agents with a certificate of another key are requested to renew. `None`
    /// requests no renewal.
    pub issuer: Option<KeyId>,
    /// Maximum rate of renewal requests of the whole fleet, per second.
    pub renewals_per_second: u32,
}

/// Announcement and the rate limit of its renewal requests.
#[derive(Debug, Default)]
pub(super) struct TrustAnnouncer {
    /// `None` until the first is announced.
    pub(super) announcement: Option<TrustAnnouncement>,
    /// Theoretical arrival time of the rate limit (GCRA).
    paid_until: Option<Instant>,
    /// Part of the rate that this process has: shards that it holds, of so many.
    share: Option<(u32, u32)>,
}

impl TrustAnnouncer {
    pub(super) fn revision(&self) -> Option<String> {
        self.announcement.as_ref().map(|announcement| announcement.revision.clone())
    }

    /// Limits the rate to the share of this many shards.
    pub(super) fn set_share(&mut self, held: usize, shards: ShardCount) {
        self.share = Some((u32::try_from(held).unwrap_or(u32::MAX), shards.get().into()));
    }

    /// Returns true, and charges the rate limit, if an agent with a certificate of this authority is to renew it now.
    pub(super) fn requests_renewal(&mut self, authority: Option<&KeyId>, now: Instant) -> bool {
        let Some(TrustAnnouncement { issuer: Some(issuer), renewals_per_second, .. }) = &self.announcement else {
            return false;
        };
        let rate = (*renewals_per_second).max(1);
        // A certificate without authority key identifier proves nothing about its issuer.
        if authority.is_none_or(|authority| authority == issuer) {
            return false;
        }
        let (held, shards) = self.share.unwrap_or((1, 1));
        let paid_until = self.paid_until.map_or(now, |paid_until| paid_until.max(now));
        if paid_until.duration_since(now) >= BURST {
            return false;
        }
        self.paid_until = Some(paid_until + Duration::from_secs(1) / rate * shards / held.max(1));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> KeyId {
        serde_json::from_value(text.into()).unwrap()
    }

    #[test]
    fn renewals_are_requested_of_other_issuers_at_the_rate() {
        let now = Instant::now();
        let mut announcer = TrustAnnouncer::default();
        assert!(!announcer.requests_renewal(Some(&key("aa")), now), "nothing was announced yet");
        let announcement = |issuer| TrustAnnouncement { revision: "r".into(), issuer, renewals_per_second: 2 };
        announcer.announcement = Some(announcement(None));
        assert!(!announcer.requests_renewal(Some(&key("aa")), now));
        announcer.announcement = Some(announcement(Some(key("bb"))));
        assert!(!announcer.requests_renewal(Some(&key("bb")), now) && !announcer.requests_renewal(None, now));
        let requested = |announcer: &mut TrustAnnouncer, at| {
            (0..9).filter(|_| announcer.requests_renewal(Some(&key("aa")), at)).count()
        };
        assert_eq!(requested(&mut announcer, now), 2);
        assert_eq!(requested(&mut announcer, now + Duration::from_millis(500)), 1);
        assert_eq!(requested(&mut announcer, now + Duration::from_secs(60)), 2);
        announcer.set_share(6, ShardCount::default());
        assert_eq!(requested(&mut announcer, now + Duration::from_secs(90)), 1, "a quarter of the rate");
        assert_eq!(requested(&mut announcer, now + Duration::from_millis(90_900)), 0);
        assert_eq!(requested(&mut announcer, now + Duration::from_millis(91_500)), 1);
        assert_eq!(announcer.revision().as_deref(), Some("r"));
    }
}
