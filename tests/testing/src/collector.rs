//! A trace collector: receives spans over OTLP (gRPC), and stores them.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc};

use bytes::Bytes;
use futures::stream;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Limited, StreamBody};
use hyper::{
    body::{Body, Frame, Incoming},
    server::conn::http2,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::{net::TcpListener, task::JoinSet};

/// Most bytes of one export.
const BODY_BYTES: usize = 16 << 20;
/// Compression flag and length (gRPC over HTTP2, "Length-Prefixed-Message").
const PREFIX: usize = 5;
/// The response to every export: an empty message.
const EMPTY: Bytes = Bytes::from_static(&[0; PREFIX]);

/// A span that has ended. Ids are in hexadecimal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// `service.name` of the program.
    pub service: String,
    /// Its name.
    pub name: String,
    /// Its trace.
    pub trace: String,
    /// Its id.
    pub id: String,
    /// Id of the parent span; empty for the root of a trace.
    pub parent: String,
    /// Traces of the linked spans.
    pub links: Vec<String>,
    /// Nanoseconds since 1970.
    pub begun: u64,
    /// Nanoseconds since 1970.
    pub ended: u64,
}

/// See the module. Dropping it ends it.
pub struct Collector {
    address: SocketAddr,
    spans: Spans,
    _serving: JoinSet<()>,
}

type Spans = Arc<Mutex<Vec<Span>>>;

impl Collector {
    /// Listens on a port of its own.
    ///
    /// # Errors
    /// When no port can be bound.
    pub async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let spans = Spans::default();
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener, spans.clone()));
        Ok(Self { address, spans, _serving: serving })
    }

    /// Value for `--otlp-endpoint`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The spans exported so far.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().clone()
    }
}

async fn serve(listener: TcpListener, spans: Spans) {
    let mut connections = JoinSet::new();
    while let Ok((tcp, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        let spans = spans.clone();
        let service = service_fn(move |request| {
            let spans = spans.clone();
            async move { Ok::<_, Infallible>(take(request, &spans).await) }
        });
        connections.spawn(async move {
            // An exporter opens another connection after a break.
            let _ = http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(tcp), service).await;
        });
    }
}

/// Receives one export.
async fn take(
    request: Request<Incoming>,
    spans: &Spans,
) -> Response<impl Body<Data = Bytes, Error = Infallible> + use<>> {
    let body = Limited::new(request.into_body(), BODY_BYTES).collect().await.map(|body| body.to_bytes());
    let exported = body.ok().and_then(|body| self::spans(body.get(PREFIX..)?));
    // OK, or INVALID_ARGUMENT.
    let status = if exported.is_some() { "0" } else { "3" };
    spans.lock().extend(exported.unwrap_or_default());
    let trailers = HeaderMap::from_iter([("grpc-status".parse().expect("a name"), HeaderValue::from_static(status))]);
    let frames = [Frame::data(EMPTY), Frame::trailers(trailers)];
    let mut answer = Response::new(StreamBody::new(stream::iter(frames.map(Ok))));
    answer.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    answer
}

/// The spans of an `ExportTraceServiceRequest`; `None` for malformed bytes. Numbers are those of the fields in
/// opentelemetry-proto, `trace/v1/trace.proto`.
fn spans(message: &[u8]) -> Option<Vec<Span>> {
    let mut spans = Vec::new();
    for of_resource in all(message, 1)? {
        let service = service(of_resource)?;
        for of_scope in all(of_resource, 2)? {
            for message in all(of_scope, 2)? {
                spans.push(Span { service: service.clone(), ..span(message)? });
            }
        }
    }
    Some(spans)
}

/// `service.name` among the attributes of the resource.
fn service(of_resource: &[u8]) -> Option<String> {
    for resource in all(of_resource, 1)? {
        for attribute in all(resource, 1)? {
            if all(attribute, 1)? == [b"service.name"] {
                let value = all(attribute, 2)?.first().copied().unwrap_or_default();
                return Some(text(all(value, 1)?.first()?));
            }
        }
    }
    Some(String::new())
}

fn span(message: &[u8]) -> Option<Span> {
    let mut span = Span::default();
    for (number, value) in fields(message)? {
        match number {
            1 => span.trace = hex(value),
            2 => span.id = hex(value),
            4 => span.parent = hex(value),
            5 => span.name = text(value),
            7 => span.begun = u64::from_le_bytes(value.try_into().ok()?),
            8 => span.ended = u64::from_le_bytes(value.try_into().ok()?),
            13 => span.links.push(hex(all(value, 1)?.first()?)),
            _ => {}
        }
    }
    Some(span)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// All values of one field.
fn all(message: &[u8], wanted: u64) -> Option<Vec<&[u8]>> {
    let fields = fields(message)?.into_iter();
    Some(fields.filter(|(number, _)| *number == wanted).map(|(_, value)| value).collect())
}

/// The fields of a protobuf message with their bytes, without varint fields; `None` for malformed bytes.
fn fields(mut message: &[u8]) -> Option<Vec<(u64, &[u8])>> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let tag = varint(&mut message)?;
        let length = match tag & 7 {
            0 => {
                varint(&mut message)?;
                continue;
            }
            1 => 8,
            2 => usize::try_from(varint(&mut message)?).ok()?,
            5 => 4,
            _ => return None,
        };
        let (value, rest) = message.split_at_checked(length)?;
        fields.push((tag >> 3, value));
        message = rest;
    }
    Some(fields)
}

fn varint(message: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = message.split_first()?;
        *message = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(number: u8, value: &[u8]) -> Vec<u8> {
        let length = u8::try_from(value.len()).expect("short");
        assert!(length < 0x80);
        [&[number << 3 | 2, length][..], value].concat()
    }

    #[test]
    fn an_export_is_read_and_garbage_is_not() {
        let attribute = [field(1, b"service.name"), field(2, &field(1, b"agent"))].concat();
        // Includes a varint of two bytes, and a fixed-width number of eight.
        let times = [&[7 << 3 | 1][..], &7_u64.to_le_bytes(), &[6 << 3, 0x80, 1]].concat();
        let span = [field(1, &[0xab; 16]), field(2, &[1; 8]), field(5, b"name"), times].concat();
        let link = field(13, &field(1, &[0xcd; 16]));
        let resource = [field(1, &field(1, &attribute)), field(2, &field(2, &[span, link].concat()))].concat();
        let message = field(1, &resource);
        let expected = Span {
            service: "agent".to_owned(),
            name: "name".to_owned(),
            trace: "ab".repeat(16),
            id: "01".repeat(8),
            links: vec!["cd".repeat(16)],
            begun: 7,
            ..Span::default()
        };
        assert_eq!(spans(&message), Some(vec![expected]));
        assert_eq!(spans(&message[..message.len() - 1]), None);
        assert_eq!(spans(&[0xff; 12]), None);
    }
}
