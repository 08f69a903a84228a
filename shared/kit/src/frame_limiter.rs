//! Rate limit of HTTP/2 frames with few or no body bytes, for either side of a connection. SETTINGS, PING, PRIORITY,
//! WINDOW_UPDATE, RST_STREAM, CONTINUATION and tiny DATA cost the receiver work and the sender a few bytes, and the
//! HTTP library may refuse HEADERS by itself: limits of requests and of response bytes would stop none of them. Requests
//! and responses need a fraction of the rate.

use std::time::Duration;

use tokio::time::Instant;

/// Length of the client's connection preface (RFC 9113, section 3.4).
const PREFACE: usize = 24;
/// Length of a frame header (RFC 9113, section 4.1).
const HEADER: usize = 9;
/// Payload of DATA in bytes, padding included, below which a frame counts unless it ends its stream.
const TINY: usize = 64;
const DATA: u8 = 0;
/// Flag of DATA.
const END_STREAM: u8 = 1;

/// Finds frame headers in a byte stream, however the reads split it.
struct FrameScanner {
    /// Bytes to skip: the preface, then payloads.
    skip: usize,
    header: [u8; HEADER],
    have: usize,
}

impl FrameScanner {
    /// Counts the frames with few or no body bytes that have their header's end within these bytes.
    fn light_frames(&mut self, mut bytes: &[u8]) -> u32 {
        let mut light = 0_u32;
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let taken = (HEADER - self.have).min(bytes.len());
            self.header[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            if self.have == HEADER {
                let [a, b, c, kind, flags, ..] = self.header;
                self.have = 0;
                self.skip = u32::from_be_bytes([0, a, b, c]) as usize;
                let is_body = kind == DATA && (self.skip >= TINY || flags & END_STREAM != 0);
                light += u32::from(!is_body);
            }
        }
        light
    }
}

/// Rate limit of one connection (GCRA).
pub struct FrameLimiter {
    scanner: FrameScanner,
    cost: Duration,
    burst: Duration,
    /// Theoretical arrival time.
    paid: Option<Instant>,
}

impl FrameLimiter {
    /// Limits the frames of a client: this many per second, and twice as many in a burst.
    pub fn of_client(per_second: u32) -> Self {
        Self::new(per_second, PREFACE)
    }

    /// Limits the frames of a server, which sends no preface.
    pub fn of_server(per_second: u32) -> Self {
        Self::new(per_second, 0)
    }

    fn new(per_second: u32, preface: usize) -> Self {
        let cost = Duration::from_secs(1) / per_second.max(1);
        let scanner = FrameScanner { skip: preface, header: [0; HEADER], have: 0 };
        Self { scanner, cost, burst: cost * per_second.max(1) * 2, paid: None }
    }

    /// True if the frames in these bytes are within the rate.
    pub fn admits(&mut self, bytes: &[u8], now: Instant) -> bool {
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

    /// Preface, requests and housekeeping of a client, with six frames that count.
    fn client_frames() -> Vec<u8> {
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        for (kind, flags, payload) in
            [(4, 0, 12), (1, 4, 40), (0, 0, 300), (0, 0, 0), (0, 1, 0), (6, 0, 8), (1, 5, 7), (8, 0, 4)]
        {
            bytes.extend(frame(kind, flags, payload));
        }
        bytes
    }

    #[test]
    fn rate_and_burst_are_admitted_and_body_frames_are_free() {
        let mut limiter = FrameLimiter::of_client(10);
        let start = Instant::now();
        assert!(limiter.admits(&client_frames(), start));
        for _ in 0..14 {
            assert!(limiter.admits(&frame(6, 0, 8), start));
        }
        assert!(!limiter.admits(&frame(6, 0, 8), start), "the twenty-first");
        assert!(!limiter.admits(&frame(0, 0, TINY - 1), start), "a body in tiny pieces");
        assert!(limiter.admits(&frame(0, 0, TINY), start), "body bytes are limited elsewhere");
        assert!(limiter.admits(&frame(0, END_STREAM, 9), start), "one for each stream");
        assert!(limiter.admits(&frame(6, 0, 8), start + Duration::from_millis(300)));
    }

    #[test]
    fn frames_of_a_server_have_no_preface() {
        let mut limiter = FrameLimiter::of_server(1);
        let start = Instant::now();
        assert!(limiter.admits(&frame(4, 0, 12), start) && limiter.admits(&frame(6, 0, 8), start));
        assert!(!limiter.admits(&frame(6, 0, 8), start));
    }

    proptest! {
        #[test]
        fn frame_headers_are_found_across_any_split_of_the_bytes(cuts in prop::collection::vec(1..20usize, 0..40)) {
            let mut scanner = FrameScanner { skip: PREFACE, header: [0; HEADER], have: 0 };
            let client_frames = client_frames();
            let mut rest = &client_frames[..];
            let mut light = 0;
            for cut in cuts {
                let (now, later) = rest.split_at(cut.min(rest.len()));
                light += scanner.light_frames(now);
                rest = later;
            }
            prop_assert_eq!(light + scanner.light_frames(rest), 6);
        }
    }
}
