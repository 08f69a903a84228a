//! What agents are told of roots and certificates.

use std::time::Duration;

use tidewatch_shared::certificate::KeyId;
use tokio::time::Instant;

/// Agents may be asked to renew so much ahead of the rate, after a while without.
const BURST: Duration = Duration::from_secs(1);

/// What heartbeats are answered.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Revision of the bundle that agents should have.
    pub revision: String,
    /// The key that signs new certificates: who has one of another is asked to renew. `None` asks nobody.
    pub issuer: Option<KeyId>,
    /// Agents in one second that are asked.
    pub renewals_per_second: u32,
}

/// The same with the rate that is used up.
#[derive(Debug, Default)]
pub(super) struct Telling {
    told: Option<Told>,
    /// When all that were asked are paid for (GCRA's theoretical arrival time).
    paid: Option<Instant>,
}

impl Telling {
    pub(super) fn tell(&mut self, told: Told) {
        self.told = Some(told);
    }

    pub(super) fn revision(&self) -> Option<String> {
        self.told.as_ref().map(|told| told.revision.clone())
    }

    /// Whether an agent with a certificate of this authority is asked to renew it now.
    pub(super) fn asks(&mut self, authority: Option<&KeyId>, now: Instant) -> bool {
        let Some(Told { issuer: Some(issuer), renewals_per_second, .. }) = &self.told else { return false };
        let rate = (*renewals_per_second).max(1);
        // Nothing can be concluded from a certificate that does not say who signed it.
        if authority.is_none_or(|authority| authority == issuer) {
            return false;
        }
        let paid = self.paid.map_or(now, |paid| paid.max(now));
        if paid.duration_since(now) >= BURST {
            return false;
        }
        self.paid = Some(paid + Duration::from_secs(1) / rate);
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
    fn only_those_of_another_issuer_are_asked_and_at_the_rate() {
        let (now, mut telling) = (Instant::now(), Telling::default());
        assert!(!telling.asks(Some(&key("aa")), now), "nobody has said anything");
        let told = |issuer| Told { revision: "r".into(), issuer, renewals_per_second: 2 };
        telling.tell(told(None));
        assert!(!telling.asks(Some(&key("aa")), now));
        telling.tell(told(Some(key("bb"))));
        assert!(!telling.asks(Some(&key("bb")), now) && !telling.asks(None, now));
        let asked = |telling: &mut Telling, at| (0..9).filter(|_| telling.asks(Some(&key("aa")), at)).count();
        assert_eq!(asked(&mut telling, now), 2);
        assert_eq!(asked(&mut telling, now + Duration::from_millis(500)), 1);
        assert_eq!(asked(&mut telling, now + Duration::from_secs(60)), 2);
        assert_eq!(telling.revision().as_deref(), Some("r"));
    }
}
