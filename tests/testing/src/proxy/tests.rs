use std::num::NonZeroU32;

use tokio::time::Instant;

use super::{connection::NOISE, *};

/// An echo server, and a connection to it through a proxy.
async fn echo() -> (Proxy, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("bound");
    let target = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    });
    let proxy = Proxy::start(target).await.expect("started");
    let stream = TcpStream::connect(proxy.address()).await.expect("connected");
    (proxy, stream)
}

async fn round_trip(stream: &mut TcpStream, text: &str) -> io::Result<()> {
    stream.write_all(text.as_bytes()).await?;
    let mut back = vec![0; text.len()];
    stream.read_exact(&mut back).await?;
    assert_eq!(back, text.as_bytes());
    Ok(())
}

#[tokio::test]
async fn bytes_and_end_of_stream_pass_through() {
    let (_proxy, mut stream) = echo().await;
    round_trip(&mut stream, "hello").await.expect("passed");
    stream.shutdown().await.expect("shut down");
    assert_eq!(stream.read(&mut [0; 8]).await.expect("an end"), 0);
}

#[tokio::test]
async fn cut_breaks_old_and_new_connections_until_resumed() {
    let (proxy, mut stream) = echo().await;
    round_trip(&mut stream, "hello").await.expect("passed");
    proxy.cut();
    assert!(!matches!(stream.read(&mut [0; 8]).await, Ok(1..)));
    let mut new = TcpStream::connect(proxy.address()).await.expect("the kernel takes it");
    assert!(round_trip(&mut new, "hello").await.is_err());
    proxy.resume();
    let mut new = TcpStream::connect(proxy.address()).await.expect("connected");
    round_trip(&mut new, "again").await.expect("passed");
}

#[tokio::test]
async fn one_process_is_cut_off_until_it_is_readmitted() {
    let (proxy, mut stream) = echo().await;
    proxy.cut_off(std::os::unix::process::parent_id());
    round_trip(&mut stream, "hello").await.expect("another process is meant");
    proxy.cut_off(std::process::id());
    assert!(!matches!(stream.read(&mut [0; 8]).await, Ok(1..)));
    let mut new = TcpStream::connect(proxy.address()).await.expect("the kernel takes it");
    assert!(round_trip(&mut new, "hello").await.is_err());
    proxy.readmit();
    let mut new = TcpStream::connect(proxy.address()).await.expect("connected");
    round_trip(&mut new, "again").await.expect("passed");
}

#[tokio::test]
async fn port_of_a_client_alone_does_not_make_a_connection_its_own() {
    let (proxy, stream) = echo().await;
    let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("bound");
    let [from, to] = [stream.local_addr(), other.local_addr()].map(|address| address.expect("an address").port());
    assert!(has_opened(std::process::id(), Ports { from, to: proxy.address().port() }));
    assert!(!has_opened(std::process::id(), Ports { from, to }));
}

#[tokio::test]
async fn black_hole_holds_bytes_until_resumed() {
    let (proxy, mut stream) = echo().await;
    round_trip(&mut stream, "hello").await.expect("passed");
    proxy.black_hole();
    stream.write_all(b"held").await.expect("taken");
    let mut back = [0; 4];
    let silence = timeout(Duration::from_millis(200), stream.read_exact(&mut back)).await;
    assert!(silence.is_err(), "nothing comes through");
    proxy.resume();
    stream.read_exact(&mut back).await.expect("it comes through");
    assert_eq!(&back, b"held");
}

#[tokio::test]
async fn dropped_connections_are_silent_and_new_ones_pass() {
    let (proxy, mut stream) = echo().await;
    round_trip(&mut stream, "hello").await.expect("passed");
    proxy.drop_established();
    stream.write_all(b"lost").await.expect("taken");
    let silence = timeout(Duration::from_millis(200), stream.read(&mut [0; 4])).await;
    assert!(silence.is_err(), "nothing comes through, and nothing breaks");
    let mut new = TcpStream::connect(proxy.address()).await.expect("connected");
    round_trip(&mut new, "again").await.expect("passed");
}

#[tokio::test]
async fn noise_follows_the_servers_bytes() {
    let (proxy, mut stream) = echo().await;
    proxy.set(Mode::Noise);
    round_trip(&mut stream, "hello").await.expect("passed");
    let mut noise = [0; NOISE.len()];
    stream.read_exact(&mut noise).await.expect("noise");
    assert_eq!(noise, NOISE);
}

#[tokio::test]
async fn plain_http_answers_in_place_of_the_server() {
    let (proxy, mut stream) = echo().await;
    round_trip(&mut stream, "hello").await.expect("passed");
    proxy.set(Mode::Plain);
    assert!(!matches!(stream.read(&mut [0; 8]).await, Ok(1..)), "the old connection is broken");
    let mut new = TcpStream::connect(proxy.address()).await.expect("connected");
    new.write_all(b"client hello").await.expect("taken");
    let mut answer = Vec::new();
    new.read_to_end(&mut answer).await.expect("an answer and an end");
    assert_eq!(answer, PLAIN);
}

#[tokio::test]
async fn distance_delays_the_handshake_and_each_direction() {
    let (proxy, mut stream) = echo().await;
    round_trip(&mut stream, "hello").await.expect("passed");
    let distance = Duration::from_millis(100);
    proxy.set_round_trip(distance);
    let began = Instant::now();
    round_trip(&mut stream, "hello").await.expect("passed");
    assert!(began.elapsed() >= distance);
    let began = Instant::now();
    let mut new = TcpStream::connect(proxy.address()).await.expect("connected");
    round_trip(&mut new, "hello").await.expect("passed");
    assert!(began.elapsed() >= 2 * distance);
}

#[tokio::test]
async fn connections_share_the_bandwidth_of_a_direction() {
    let (proxy, mut one) = echo().await;
    let mut other = TcpStream::connect(proxy.address()).await.expect("connected");
    round_trip(&mut one, "hello").await.expect("passed");
    round_trip(&mut other, "hello").await.expect("passed");
    let bandwidth = NonZeroU32::new(1_000);
    proxy.set_conditions(Conditions { bandwidth, ..Conditions::default() });
    let began = Instant::now();
    let text = "x".repeat(100);
    let both = tokio::join!(round_trip(&mut one, &text), round_trip(&mut other, &text));
    assert!(both.0.is_ok() && both.1.is_ok());
    // Two hundred bytes take 200 ms to the server.
    assert!(began.elapsed() >= Duration::from_millis(200));
}

#[tokio::test]
async fn idle_connection_is_reset() {
    let (proxy, mut stream) = echo().await;
    round_trip(&mut stream, "hello").await.expect("passed");
    let idle_limit = Some(Duration::from_millis(50));
    proxy.set_conditions(Conditions { idle_limit, ..Conditions::default() });
    let end = stream.read(&mut [0; 8]).await.expect_err("a reset, and no end of the stream");
    assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn swallowed_connection_gets_no_answer_until_resumed() {
    let (proxy, mut old) = echo().await;
    round_trip(&mut old, "hello").await.expect("passed");
    proxy.set(Mode::Swallow);
    old.write_all(b"held").await.expect("taken");
    // The queue is filled when a connection gets no answer.
    let mut waiting = Vec::new();
    let new = loop {
        let mut connection = Box::pin(TcpStream::connect(proxy.address()));
        match timeout(Duration::from_millis(300), &mut connection).await {
            Ok(taken) => waiting.push(taken.expect("taken by the kernel")),
            Err(_) => break connection,
        }
    };
    let silence = timeout(Duration::from_millis(100), old.read(&mut [0; 4])).await;
    assert!(silence.is_err(), "an open connection delivers nothing either");
    proxy.resume();
    // The kernel of the client repeats its packet.
    let mut new = new.await.expect("connected");
    round_trip(&mut new, "again").await.expect("passed");
    let mut back = [0; 4];
    old.read_exact(&mut back).await.expect("it comes through");
    assert_eq!(&back, b"held");
}
