//! Scripted doubles of the router's neighbours: an agent whose sessions a test plays by hand, an operator that
//! remembers what it was told.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::{Response, StatusCode};
use axum::routing::post;
use bytes::Bytes;
use pilotlight_api::demand::{DemandAnswer, DemandReport, ModelDemand, Refused};
use pilotlight_domain::session::{
    FailureCode, FinishReason, Logprobs, Retry, SessionCommand, SessionEvent, SessionSpec, Usage,
};
use pilotlight_domain::{ModelName, Phases};
use pilotlight_kit::Stop;
use tokio::sync::{Mutex as AsyncMutex, mpsc, oneshot};

use crate::support::within;

/// Serves `app` on a free port of the loopback; its base URL.
pub(crate) async fn serve(app: axum::Router) -> String {
    let listener = pilotlight_kit::http::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(pilotlight_kit::http::serve_programs(listener, app, Stop::new(), Duration::ZERO));
    url
}

type Opened = oneshot::Sender<(StatusCode, Body)>;

/// An agent. Each session that is opened at it waits until the test plays it.
#[derive(Clone)]
pub(crate) struct FakeAgent {
    pub(crate) url: String,
    sessions: Arc<AsyncMutex<mpsc::Receiver<(SessionSpec, Opened)>>>,
    commands: Arc<AsyncMutex<mpsc::Receiver<(String, SessionCommand)>>>,
}

impl FakeAgent {
    pub(crate) async fn start() -> Self {
        let (told, commands) = mpsc::channel(64);
        let command = async |State(told): State<mpsc::Sender<(String, SessionCommand)>>,
                             Path(id): Path<String>,
                             Query(query): Query<HashMap<String, u32>>,
                             Json(command): Json<SessionCommand>| {
            told.send((format!("{id} {}", query["epoch"]), command)).await.unwrap();
            StatusCode::ACCEPTED
        };
        let commands_at =
            axum::Router::new().route("/v1/sessions/{id}/command", post(command)).with_state(told);
        let (send, sessions) = mpsc::channel::<(SessionSpec, Opened)>(512);
        let open = async |State(send): State<mpsc::Sender<(SessionSpec, Opened)>>,
                          Json(spec): Json<SessionSpec>| {
            let (opened, answer) = oneshot::channel();
            send.send((spec, opened)).await.unwrap();
            let (status, body) = answer.await.unwrap();
            let mut response = Response::new(body);
            *response.status_mut() = status;
            response
        };
        let app = axum::Router::new().route("/v1/sessions", post(open)).with_state(send);
        let url = serve(app.merge(commands_at)).await;
        let (sessions, commands) = (Arc::new(AsyncMutex::new(sessions)), Arc::new(AsyncMutex::new(commands)));
        FakeAgent { url, sessions, commands }
    }

    /// The next command: `id epoch-of-the-opening`, and what.
    pub(crate) async fn command(&self) -> (String, SessionCommand) {
        within(async { self.commands.lock().await.recv().await }).await.expect("the agent lives")
    }

    /// The next session, opened.
    pub(crate) async fn next(&self) -> FakeSession {
        let (spec, opened) = self.knock().await;
        let (lines, body) = mpsc::channel(1024);
        let stream = tokio_stream::wrappers::ReceiverStream::new(body);
        let _router_gone = opened.send((StatusCode::OK, Body::from_stream(stream)));
        FakeSession::new(spec, lines)
    }

    /// Refuses the next session.
    pub(crate) async fn refuse(
        &self,
        status: u16,
        code: FailureCode,
        message: &str,
        retry: Retry,
    ) -> SessionSpec {
        let (spec, opened) = self.knock().await;
        let failed = SessionEvent::Failed { code, message: message.into(), retry };
        let body = Body::from(serde_json::to_vec(&failed).unwrap());
        let _router_gone = opened.send((StatusCode::from_u16(status).unwrap(), body));
        spec
    }

    async fn knock(&self) -> (SessionSpec, Opened) {
        within(async { self.sessions.lock().await.recv().await }).await.expect("the agent lives")
    }

    /// Whether nobody has opened a session that was not played.
    pub(crate) async fn is_idle(&self) -> bool {
        self.sessions.lock().await.is_empty()
    }

    /// Plays every session from now on: these texts, one token each.
    pub(crate) fn answer_all(&self, texts: &'static [&'static str]) {
        let agent = self.clone();
        tokio::spawn(async move {
            loop {
                let Some((spec, opened)) = agent.sessions.lock().await.recv().await else { return };
                let (lines, body) = mpsc::channel(1024);
                let stream = tokio_stream::wrappers::ReceiverStream::new(body);
                let _router_gone = opened.send((StatusCode::OK, Body::from_stream(stream)));
                FakeSession::new(spec, lines).play(texts).await;
            }
        });
    }
}

/// One session, played by hand.
pub(crate) struct FakeSession {
    pub(crate) spec: SessionSpec,
    lines: mpsc::Sender<Result<Bytes, std::io::Error>>,
    pub(crate) epoch: u32,
    index: u32,
}

impl FakeSession {
    fn new(spec: SessionSpec, lines: mpsc::Sender<Result<Bytes, std::io::Error>>) -> Self {
        let (epoch, index) = (spec.epoch, u32::try_from(spec.generated.len()).unwrap());
        FakeSession { spec, lines, epoch, index }
    }

    /// It is released: it goes on in this epoch, after that many tokens.
    pub(crate) async fn released(&mut self, epoch: u32, index: u32) {
        (self.epoch, self.index) = (epoch, index);
        self.say(&SessionEvent::Moved { to: "cpu".into(), epoch, next_index: index }).await;
    }

    pub(crate) async fn say(&self, event: &SessionEvent) {
        self.raw(format!("{}\n", serde_json::to_string(event).unwrap())).await;
    }

    pub(crate) async fn raw(&self, bytes: impl Into<Bytes>) {
        let _router_gone = self.lines.send(Ok(bytes.into())).await;
    }

    pub(crate) async fn accept(&self, waited: Phases) {
        let (prompt_ids, from) = (vec![1, 2, 3], Some(pilotlight_domain::Tier::Disk));
        self.say(&SessionEvent::Accepted {
            prompt_ids,
            device: "cpu".into(),
            numerics: "c".into(),
            waited,
            from,
        })
        .await;
    }

    pub(crate) async fn token_at(&self, index: u32, text: &str, logprobs: Option<Logprobs>) {
        self.say(&SessionEvent::Token {
            epoch: self.epoch,
            index,
            id: 100 + index,
            text: text.into(),
            logprobs,
        })
        .await;
    }

    pub(crate) async fn token(&mut self, text: &str) {
        self.token_at(self.index, text, None).await;
        self.index += 1;
    }

    pub(crate) async fn done(&self, reason: FinishReason) {
        let usage = Usage { prompt_tokens: 3, completion_tokens: self.index, cached_tokens: 0 };
        self.say(&SessionEvent::Done { reason, usage }).await;
    }

    pub(crate) async fn fail(&self, code: FailureCode, message: &str, retry: Retry) {
        self.say(&SessionEvent::Failed { code, message: message.into(), retry }).await;
    }

    pub(crate) async fn play(mut self, texts: &[&str]) {
        self.accept(Phases::default()).await;
        for text in texts {
            self.token(text).await;
        }
        self.done(FinishReason::Stop).await;
    }

    /// Resolves when the router has closed the session.
    pub(crate) async fn closed(&self) {
        within(self.lines.closed()).await;
    }

    /// Breaks the connection.
    pub(crate) async fn cut(&self) {
        let _router_gone = self.lines.send(Err(std::io::Error::other("cut"))).await;
    }
}

/// An operator that remembers.
#[derive(Clone)]
pub(crate) struct FakeOperator {
    pub(crate) url: String,
    reports: Arc<AsyncMutex<mpsc::Receiver<DemandReport>>>,
    answer: Arc<Mutex<DemandAnswer>>,
}

impl FakeOperator {
    pub(crate) async fn start() -> Self {
        let (send, reports) = mpsc::channel::<DemandReport>(4096);
        let answer = Arc::new(Mutex::new(DemandAnswer::default()));
        let take =
            async |State((send, answer)): State<(mpsc::Sender<DemandReport>, Arc<Mutex<DemandAnswer>>)>,
                   Json(report): Json<DemandReport>| {
                let answer = answer.lock().unwrap().clone();
                send.send(report).await.unwrap();
                Json(answer)
            };
        let app =
            axum::Router::new().route("/operator/v1/demand", post(take)).with_state((send, answer.clone()));
        FakeOperator { url: serve(app).await, reports: Arc::new(AsyncMutex::new(reports)), answer }
    }

    /// From now on wakes of this model are refused.
    pub(crate) fn refuse(&self, model: &str, message: &str, retry: bool) {
        let model = ModelName::new("default", model).unwrap();
        self.answer.lock().unwrap().refused = vec![Refused { model, message: message.into(), retry }];
    }

    /// The next report in which something of `model` holds.
    pub(crate) async fn hears(&self, model: &str, holds: impl Fn(&ModelDemand) -> bool) -> ModelDemand {
        let mut last = None;
        let heard = within(async {
            let mut reports = self.reports.lock().await;
            loop {
                let report = reports.recv().await.expect("the operator lives");
                let found = report.models.into_iter().find(|m| m.model.name == model);
                last.clone_from(&found);
                if let Some(found) = found.filter(&holds) {
                    return found;
                }
            }
        });
        heard.await
    }
}
