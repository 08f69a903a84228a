use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{Full, StreamBody};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{sleep, timeout},
};

use super::*;
use crate::{
    connection::tests::{Fixture, harness_with},
    kubernetes::{CONNECTION_SETTINGS, WATCHES_PER_CLIENT},
    watch::object::Object,
};

fn body(bytes: impl Into<Bytes>) -> Body {
    Full::from(bytes.into()).map_err(Into::into).boxed_unsync()
}

fn lines(body: Body) -> Lines {
    Lines::new(body, Arc::new(Semaphore::new(1)))
}

#[tokio::test(start_paused = true)]
async fn large_lines_of_all_watches_take_turns() {
    let large = Arc::new(Semaphore::new(2));
    let open = || {
        let (send, receive) = mpsc::unbounded_channel::<Bytes>();
        let frames = stream::unfold(receive, async |mut receive| {
            let frame = receive.recv().await?;
            Some((Ok(Frame::data(frame)), receive))
        });
        (send, Lines::new(StreamBody::new(frames).boxed_unsync(), large.clone()))
    };
    let arrives = async |lines: &mut Lines| {
        let line = timeout(Duration::from_secs(1), lines.next()).await.ok()?;
        line.unwrap().map(<[u8]>::len)
    };
    let [mut first, mut second, mut third] = [(); 3].map(|()| open());
    let part = Bytes::from(vec![b'x'; KEPT_BYTES + 1]);
    for (send, lines) in [&mut first, &mut second, &mut third] {
        send.send(part.clone()).unwrap();
        assert_eq!(arrives(lines).await, None);
        send.send(Bytes::from_static(b"x\n")).unwrap();
    }
    assert_eq!(arrives(&mut third.1).await, None, "two lines of others are incomplete");
    for (_, lines) in [&mut first, &mut second] {
        assert_eq!(arrives(lines).await, Some(KEPT_BYTES + 2));
    }
    assert_eq!(arrives(&mut third.1).await, None, "their permits last until they wait for the next line");
    first.0.send(Bytes::from_static(b"small\n")).unwrap();
    assert_eq!(arrives(&mut first.1).await, Some(5));
    assert_eq!(arrives(&mut third.1).await, Some(KEPT_BYTES + 2));
}

#[tokio::test(start_paused = true)]
async fn large_lines_that_wait_do_not_block_their_connection() {
    const LINE: usize = 200 << 10;
    let Fixture { connection, mut opened, .. } = harness_with(true, CONNECTION_SETTINGS);
    tokio::spawn(async move {
        let mut server = h2::server::handshake(opened.recv().await.unwrap()).await.unwrap();
        while let Some(Ok((request, mut respond))) = server.accept().await {
            let is_watch = request.uri().path() == "/watch";
            let mut body = vec![b'x'; if is_watch { LINE } else { 7 }];
            body.push(b'\n');
            respond.send_response(Response::new(()), false).unwrap().send_data(body.into(), true).unwrap();
        }
    });
    let get = async |path: &str| {
        let request = Request::get(format!("https://kcp:1{path}")).body(Bytes::new()).unwrap();
        connection.send(request).await.unwrap().into_body().boxed_unsync()
    };
    let large = Arc::new(Semaphore::new(2));
    let others = large.clone().acquire_many_owned(2).await.unwrap();
    let mut watches = JoinSet::new();
    for _ in 0..WATCHES_PER_CLIENT {
        let mut lines = Lines::new(get("/watch").await, large.clone());
        watches.spawn(async move { lines.next().await.unwrap().map(<[u8]>::len) });
    }
    // Until the server cannot send more to any of them.
    sleep(Duration::from_secs(1)).await;
    assert!(watches.try_join_next().is_none(), "the lines of others are incomplete");
    let page = timeout(Duration::from_secs(10), async { get("/list").await.collect().await.unwrap().to_bytes() });
    assert_eq!(page.await.expect("lists are answered while watches wait").len(), 8);
    drop(others);
    let lines = timeout(Duration::from_secs(10), watches.join_all()).await.expect("each line arrives");
    assert_eq!(lines, [Some(LINE); WATCHES_PER_CLIENT]);
}

#[tokio::test]
async fn lines_end_where_they_end_and_not_where_frames_do() {
    let mut lines = lines(body("{\"a\":1}\n\n{}\nhalf"));
    assert_eq!(lines.next().await.unwrap().unwrap(), b"{\"a\":1}");
    assert_eq!(lines.next().await.unwrap().unwrap(), b"");
    assert_eq!(lines.next().await.unwrap().unwrap(), b"{}");
    assert!(lines.next().await.unwrap().is_none());
}

#[tokio::test]
async fn line_size_is_limited() {
    let mut lines = lines(body(vec![b'x'; LINE_BYTES + 1]));
    assert!(matches!(lines.next().await, Err(ApiError::TooLarge { .. })));
}

#[test]
fn number_of_objects_in_a_page_is_limited() {
    let page = |items: usize| {
        let items = vec!["{\"metadata\":{}}"; items].join(",");
        Page::<Object>::read(format!(r#"{{"metadata":{{"resourceVersion":"7"}},"items":[{items}]}}"#).as_bytes())
    };
    assert_eq!(page(ITEMS).unwrap().items.len(), ITEMS);
    assert!(matches!(page(ITEMS + 1), Err(ApiError::Parse(_))));
}

#[test]
fn page_without_items_is_read() {
    for text in [r#"{"metadata":{"resourceVersion":"7"}}"#, r#"{"metadata":{"resourceVersion":"7"},"items":null}"#] {
        let page: Page<u8> = serde_json::from_str(text).unwrap();
        assert_eq!((page.items.len(), page.metadata.version.as_str()), (0, "7"));
    }
}
