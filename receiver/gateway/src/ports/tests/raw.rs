//! Hand-written HTTP/2, which can violate the protocol.

use http::Request;
use http_body_util::Full;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf, split};

use super::*;

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const PRIORITY: u8 = 2;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PING: u8 = 6;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const CONTINUATION: u8 = 9;
pub(super) const END_STREAM: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;

/// Encodes a frame (RFC 9113, section 4.1).
pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Encodes header fields, each as a literal without indexing and with a new name (RFC 7541, section 6.2.2).
pub(super) fn fields(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in fields {
        bytes.push(0);
        for text in [name, value] {
            let mut length = text.len();
            if length < 127 {
                bytes.push(u8::try_from(length).unwrap());
            } else {
                bytes.push(127);
                length -= 127;
                while length >= 128 {
                    bytes.push(u8::try_from(length % 128).unwrap() | 128);
                    length /= 128;
                }
                bytes.push(u8::try_from(length).unwrap());
            }
            bytes.extend(text.bytes());
        }
    }
    bytes
}

/// The head of an unsigned request.
pub(super) fn unsigned(gateway: &TestGateway) -> Vec<u8> {
    let content_type = "application/cloudevents-batch+json";
    let pseudo =
        [(":method", "POST"), (":scheme", "https"), (":authority", &gateway.authority), (":path", "/v3/events")];
    fields(&[&pseudo[..], &[("content-type", content_type)]].concat())
}

/// The head of a request with an agent's signature.
pub(super) fn signed(gateway: &TestGateway, request: &Request<Full<Bytes>>) -> Vec<u8> {
    let mut head = unsigned(gateway);
    for (name, value) in request.headers() {
        if name.as_str() != "content-type" && name.as_str() != "host" {
            head.extend(fields(&[(name.as_str(), value.to_str().unwrap())]));
        }
    }
    head
}

/// A connection after its preface. A background task reads the server's frames, as unread ones would stall the server.
pub(super) struct Raw {
    write: WriteHalf<TlsStream<TcpStream>>,
    /// All bytes from the server until it ended the connection.
    pub(super) received: JoinHandle<Vec<u8>>,
}

impl Raw {
    pub(super) async fn open(gateway: &TestGateway, agent: &Agent, settings: &[u8]) -> Self {
        let stream = gateway.connect(gateway.client(&agent.identity)).await.unwrap();
        let (read, mut write) = split(stream);
        let mut greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        greeting.extend(frame(SETTINGS, 0, 0, settings));
        write.write_all(&greeting).await.unwrap();
        Self { write, received: tokio::spawn(read_all(read)) }
    }

    /// Sends bytes as far as the server reads them.
    pub(super) async fn send(&mut self, bytes: &[u8]) {
        let sent = async {
            let _ = self.write.write_all(bytes).await;
            let _ = self.write.flush().await;
        };
        timeout(PATIENCE, sent).await.expect("the server reads, or ends the connection");
    }

    /// Waits until the server has ended the connection.
    pub(super) async fn ended(self) -> Vec<u8> {
        timeout(PATIENCE, self.received).await.expect("the server ends the connection").unwrap()
    }
}

async fn read_all(mut read: ReadHalf<TlsStream<TcpStream>>) -> Vec<u8> {
    let mut received = Vec::new();
    let _ = read.read_to_end(&mut received).await;
    received
}
