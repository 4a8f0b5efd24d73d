//! A closed loop of requests over connections that stay open.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use crate::subjects::Subject;

/// What was measured of one subject.
#[derive(Default)]
pub(crate) struct Figures {
    pub(crate) times: Vec<Duration>,
    pub(crate) wall: Duration,
    pub(crate) cpu: Duration,
}

impl Figures {
    pub(crate) fn quantile(&mut self, q: f64) -> Duration {
        self.times.sort_unstable();
        let at = (self.times.len() as f64 * q) as usize;
        self.times[at.min(self.times.len() - 1)]
    }
}

/// Asks for `time`.
pub(crate) async fn run(subject: &Subject<'_>, connections: usize, time: Duration, figures: &mut Figures) {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build(connector);
    let begin = Instant::now();
    let loops = (0..connections).map(|_| async {
        let mut times = Vec::new();
        // The first is for the connection.
        ask(&client, subject).await;
        while begin.elapsed() < time {
            let asked = Instant::now();
            ask(&client, subject).await;
            times.push(asked.elapsed());
        }
        times
    });
    let times = futures::future::join_all(loops).await;
    figures.times.extend(times.into_iter().flatten());
    figures.wall += begin.elapsed();
}

async fn ask(client: &Client<HttpConnector, Full<Bytes>>, subject: &Subject<'_>) {
    let request = Request::post(&subject.url).header("content-type", "application/json");
    let answer = client.request(request.body(Full::new(subject.body.clone())).unwrap()).await.unwrap();
    let status = answer.status();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert!(status.is_success() && !body.is_empty(), "{}: {status} {body:?}", subject.name);
}
