//! On real connections.

use futures::StreamExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

#[tokio::test]
async fn a_port_in_use_says_so() {
    let held = bind("127.0.0.1:0").await.unwrap();
    let again = bind(&held.local_addr().unwrap().to_string()).await.unwrap_err();
    assert!(again.to_string().contains("another program uses it"), "{again}");
}

#[tokio::test]
async fn headers_are_bounded_and_requests_know_their_peer() {
    let app = axum::Router::new().route(
        "/peer",
        axum::routing::get(async |request: Request| {
            let peer = *request.extensions().get::<Peer>().unwrap();
            format!("{} {}", peer.0.ip(), peer.is_loopback())
        }),
    );
    let listener = bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, app, Stop::new(), Duration::ZERO));
    let ask = async |header: &str| {
        let mut client = TcpStream::connect(address).await.unwrap();
        let request = format!("GET /peer HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: {header}\r\n\r\n");
        let _cut_off = client.write_all(request.as_bytes()).await;
        let mut answer = Vec::new();
        let _reset = client.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    };
    let answer = ask("y").await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("127.0.0.1 true"), "{answer}");
    // What is not read of it must not cost the client its answer.
    let answer = ask(&"y".repeat(2 * BUFFER_BYTES_MAX)).await;
    assert!(answer.starts_with("HTTP/1.1 431") && answer.contains("headers_too_large"), "{answer}");
    assert!(ask("y").await.starts_with("HTTP/1.1 200"));
}

/// Both versions, and a first byte that could begin either.
#[tokio::test]
async fn the_first_bytes_tell_the_version() {
    let app = axum::Router::new().route("/", axum::routing::any(async || "served"));
    let listener = bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, app, Stop::new(), Duration::ZERO));
    for first in [1, 2, 5] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.set_nodelay(true).unwrap();
        let request = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        client.write_all(&request[..first]).await.unwrap();
        tokio::task::yield_now().await;
        client.write_all(&request[first..]).await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("served"), "{answer}");
    }
    let client = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
        .http2_only(true)
        .build_http::<axum::body::Body>();
    let answer = client.get(format!("http://{address}/").parse().unwrap()).await.unwrap();
    assert_eq!((answer.version(), answer.status().as_u16()), (axum::http::Version::HTTP_2, 200));
}

#[tokio::test]
async fn open_requests_are_finished_after_the_stop() {
    let (entered, mut wait_entered) = tokio::sync::mpsc::channel::<()>(1);
    let release = std::sync::Arc::new(tokio::sync::Notify::new());
    let held = release.clone();
    let app = axum::Router::new().route(
        "/slow",
        axum::routing::get(async move || {
            entered.send(()).await.unwrap();
            held.notified().await;
            "done"
        }),
    );
    let listener = bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = Stop::new();
    let server = tokio::spawn(serve(listener, app, stop.clone(), Duration::from_secs(60)));
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    wait_entered.recv().await.unwrap();
    stop.stop();
    release.notify_one();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("done"), "{answer}");
    server.await.unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}

/// Serves `app` on a port of its own, so many connections at once.
async fn serving(app: axum::Router, most: usize) -> SocketAddr {
    let listener = bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let crowd = Crowd::new(HalfClosed::Reads);
    tokio::spawn(
        async move { accept(&listener, &app, &Stop::new(), &TaskTracker::new(), &crowd, most).await },
    );
    address
}

/// Sends what is asked, closes its half, and reads what comes until the server closes.
async fn half_closed(address: SocketAddr, asked: &str) -> String {
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(asked.as_bytes()).await.unwrap();
    client.shutdown().await.unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_client_that_closes_its_half_after_its_request_gets_its_answer() {
    let stream = async || {
        let pieces = futures::stream::iter(0..6).then(async |piece| {
            tokio::time::sleep(Duration::from_millis(50)).await;
            Ok::<_, io::Error>(format!("{piece};"))
        });
        Body::from_stream(pieces)
    };
    let soon = async |body: String| {
        tokio::time::sleep(Duration::from_millis(100)).await;
        format!("heard {body}")
    };
    let app = axum::Router::new()
        .route("/soon", axum::routing::post(soon))
        .route("/stream", axum::routing::get(stream))
        .route("/much", axum::routing::get(async || "y".repeat(32 << 20)));
    let address = serving(app, 8).await;
    let soon = |version| format!("POST /soon HTTP/{version}\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi");
    let answer = half_closed(address, &soon("1.1")).await;
    assert!(answer.starts_with("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.ends_with("heard hi"), "{answer}");
    let answer = half_closed(address, &soon("1.0")).await;
    assert!(answer.starts_with("HTTP/1.0 200 OK\r\n") && answer.ends_with("heard hi"), "{answer}");
    let answer = half_closed(address, "GET /stream HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(answer.contains("5;") && answer.ends_with("0\r\n\r\n"), "{answer}");
    let answer = half_closed(address, "GET /much HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(answer.ends_with(&"y".repeat(32 << 20)), "{} bytes came", answer.len());
    let both = "GET /stream HTTP/1.1\r\nhost: a\r\n\r\n".repeat(2);
    let answer = half_closed(address, &both).await;
    assert_eq!(answer.matches("5;").count(), 2, "{answer}");
    let part = "POST /soon HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nhi";
    let answer = half_closed(address, part).await;
    assert!(!answer.contains(" 200 "), "nobody waits for the rest: {answer}");
}

#[tokio::test]
async fn a_client_that_is_gone_before_its_answer_is_noticed() {
    let (entered, mut wait_entered) = tokio::sync::mpsc::channel(2);
    let app = axum::Router::new().route(
        "/",
        axum::routing::any(async move |_body: String| {
            let (here, gone) = tokio::sync::oneshot::channel::<()>();
            entered.send(gone).await.unwrap();
            std::future::pending::<()>().await;
            drop(here);
        }),
    );
    let address = serving(app, 8).await;
    let whole = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi";
    for asked in ["GET / HTTP/1.1\r\nhost: a\r\n\r\n", whole] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(asked.as_bytes()).await.unwrap();
        let handler_gone = wait_entered.recv().await.unwrap();
        drop(client);
        let _dropped =
            tokio::time::timeout(Duration::from_secs(60), handler_gone).await.unwrap().unwrap_err();
    }
}

#[tokio::test]
async fn one_connection_too_many_takes_the_place_of_one_that_waits() {
    let (entered, mut wait_entered) = tokio::sync::mpsc::channel(3);
    let release = Arc::new(tokio::sync::Notify::new());
    let held = release.clone();
    let app = axum::Router::new().route(
        "/",
        axum::routing::get(async move || {
            entered.send(()).await.unwrap();
            held.notified().await;
            "done"
        }),
    );
    let address = serving(app, 2).await;
    let mut silent = TcpStream::connect(address).await.unwrap();
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(b"GET / HTTP/1.1\r\nhost:").await.unwrap();
    let ask = async || {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
        client
    };
    let mut answers = vec![ask().await, ask().await];
    wait_entered.recv().await.unwrap();
    wait_entered.recv().await.unwrap();
    answers.push(ask().await);
    let mut nothing = Vec::new();
    assert_eq!(silent.read_to_end(&mut nothing).await.unwrap(), 0);
    assert_eq!(slow.read_to_end(&mut nothing).await.unwrap_or_default(), 0, "cut in its headers");
    // The third has waited for one of them.
    for client in &mut answers {
        release.notify_one();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("done"), "{answer}");
    }
}

#[tokio::test]
async fn whoever_is_gone_from_a_silent_stream_ends_it() {
    for half_closed in [HalfClosed::Gone, HalfClosed::Reads] {
        leaves_a_silent_stream(half_closed).await;
    }
}

/// Returns when the server has noticed.
async fn leaves_a_silent_stream(half_closed: HalfClosed) {
    let (open, mut closed) = tokio::sync::mpsc::channel::<()>(1);
    let open = Arc::new(std::sync::Mutex::new(Some(open)));
    let stream = async move || {
        let open = open.lock().unwrap().take();
        let pieces = futures::stream::once(async { Ok::<_, io::Error>("first") });
        // Says one thing, and holds the channel open until it is dropped.
        let silent = futures::stream::once(async move {
            std::future::pending::<()>().await;
            drop(open);
            Ok("never")
        });
        Body::from_stream(pieces.chain(silent))
    };
    let listener = bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = axum::Router::new().route("/", axum::routing::get(stream));
    tokio::spawn(serve_whom(half_closed, listener, app, Stop::new(), Duration::ZERO));
    let mut program = TcpStream::connect(address).await.unwrap();
    program.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut heard = Vec::new();
    while !String::from_utf8_lossy(&heard).contains("first") {
        assert!(program.read_buf(&mut heard).await.unwrap() > 0);
    }
    drop(program);
    let ended = tokio::time::timeout(Duration::from_secs(60), closed.recv()).await;
    assert_eq!(ended.expect("it is noticed"), None, "{half_closed:?}");
}
