//! A rate for HTTP/2 frames, all but those that carry a body. SETTINGS, PING, PRIORITY, WINDOW_UPDATE, RST_STREAM,
//! CONTINUATION and empty DATA cost the receiver work and the sender nine bytes, and HEADERS may be ones that the HTTP library
//! refuses by itself: the rate of requests would stop none of them. What a client needs for its requests is a fraction of it.

use std::time::Duration;

use tokio::time::Instant;

/// Length of the client's connection preface (RFC 9113, section 3.4).
const PREFACE: usize = 24;
/// Length of a frame's head (RFC 9113, section 4.1).
const HEAD: usize = 9;
const DATA: u8 = 0;
/// Flag of DATA.
const END_STREAM: u8 = 1;

/// Finds the heads of frames in what is read, however it is cut.
struct Scanner {
    /// Bytes that are no head: the preface, then payloads.
    skip: usize,
    head: [u8; HEAD],
    have: usize,
}

impl Scanner {
    /// How many frames, whose heads end within these bytes, carry no body.
    fn light_frames(&mut self, mut bytes: &[u8]) -> u32 {
        let mut light = 0_u32;
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let taken = (HEAD - self.have).min(bytes.len());
            self.head[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            if self.have == HEAD {
                let [a, b, c, kind, flags, ..] = self.head;
                self.have = 0;
                self.skip = u32::from_be_bytes([0, a, b, c]) as usize;
                let is_body = kind == DATA && (self.skip > 0 || flags & END_STREAM != 0);
                light += u32::from(!is_body);
            }
        }
        light
    }
}

/// The rate of such frames on one connection (GCRA).
pub(super) struct Meter {
    scanner: Scanner,
    cost: Duration,
    burst: Duration,
    paid: Option<Instant>,
}

impl Meter {
    /// Allows so many frames a second, and twice that number at once.
    pub(super) fn new(per_second: u32) -> Self {
        let cost = Duration::from_secs(1) / per_second.max(1);
        let scanner = Scanner { skip: PREFACE, head: [0; HEAD], have: 0 };
        Self { scanner, cost, burst: cost * per_second.max(1) * 2, paid: None }
    }

    /// Whether a peer may have sent these bytes.
    pub(super) fn allows(&mut self, bytes: &[u8], now: Instant) -> bool {
        let light = self.scanner.light_frames(bytes);
        if light == 0 {
            return true;
        }
        let paid = self.paid.map_or(now, |paid| paid.max(now)) + self.cost * light;
        self.paid = Some(paid);
        paid.saturating_duration_since(now) <= self.burst
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap().to_be_bytes();
        let mut bytes = vec![length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
        bytes.extend(std::iter::repeat_n(kind, payload));
        bytes
    }

    /// What a client sends that asks, uploads, and keeps house: six frames that count.
    fn talk() -> Vec<u8> {
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        for (kind, flags, payload) in
            [(4, 0, 12), (1, 4, 40), (0, 0, 300), (0, 0, 0), (0, 1, 0), (6, 0, 8), (1, 5, 7), (8, 0, 4)]
        {
            bytes.extend(frame(kind, flags, payload));
        }
        bytes
    }

    #[test]
    fn a_rate_and_a_burst_pass() {
        let (mut meter, start) = (Meter::new(10), Instant::now());
        assert!(meter.allows(&talk(), start));
        for _ in 0..14 {
            assert!(meter.allows(&frame(6, 0, 8), start));
        }
        assert!(!meter.allows(&frame(6, 0, 8), start), "the twenty-first");
        assert!(meter.allows(&frame(0, 0, 9), start), "bodies have limits of their own");
        assert!(meter.allows(&frame(6, 0, 8), start + Duration::from_millis(300)));
    }

    proptest! {
        #[test]
        fn heads_are_found_however_the_bytes_are_cut(cuts in prop::collection::vec(1..20usize, 0..40)) {
            let (mut scanner, talk) = (Scanner { skip: PREFACE, head: [0; HEAD], have: 0 }, talk());
            let (mut rest, mut light) = (&talk[..], 0);
            for cut in cuts {
                let (now, later) = rest.split_at(cut.min(rest.len()));
                light += scanner.light_frames(now);
                rest = later;
            }
            prop_assert_eq!(light + scanner.light_frames(rest), 6);
        }
    }
}
