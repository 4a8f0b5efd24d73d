//! `pilotlight sessions`, `session ID`, `migrate ID --to NODE` and `drain NODE`: what is generated where, and moving it.

use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use pilotlight_domain::SessionId;
use pilotlight_store::{ClusterStore as _, Kind, ObjectRef};

use crate::args::{DrainArgs, MigrateArgs, SessionArgs, SessionsArgs};
use crate::failure::Failure;
use crate::output::{Format, Table, print};
use crate::server::{Server, read_all, refusal, store, unreachable_hint};

/// Lists sessions, and with `-w` each change.
pub(crate) async fn sessions(args: SessionsArgs) -> Result<(), Failure> {
    let server = Server::from_args(&args.server)?;
    if args.watch {
        return watch(&args, &server).await;
    }
    let list = server.get_json("/router/v1/sessions").await?;
    if args.output.format.is_document() {
        return args.output.format.print(&list);
    }
    match list["items"].as_array() {
        Some(items) if !items.is_empty() => print(&table(items, args.output.format == Format::Wide)),
        _ => print("no sessions; ended ones are kept for ten minutes\n"),
    }
}

async fn watch(args: &SessionsArgs, server: &Server) -> Result<(), Failure> {
    let answer = server.send(Method::GET, "/router/v1/sessions?watch=true", None).await?;
    if answer.status() != StatusCode::OK {
        let status = answer.status();
        return Err(refusal(status, &read_all(answer).await?));
    }
    let (mut body, mut rest, mut first) = (answer.into_body(), Vec::new(), true);
    while let Some(frame) = body.frame().await {
        let Ok(bytes) = frame?.into_data() else { continue };
        rest.extend_from_slice(&bytes);
        while let Some(end) = rest.iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let session: Value = serde_json::from_slice(&line)?;
            if args.output.format.is_document() {
                args.output.format.print(&session)?;
                continue;
            }
            let text = table(&[session], args.output.format == Format::Wide);
            let row = text.split_once('\n').map_or("", |(_, row)| row);
            print(if std::mem::take(&mut first) { &text } else { row })?;
        }
    }
    Err(Failure::new("the server has closed the watch")
        .cure("it is stopping, or was stopped; start it again"))
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn table(items: &[Value], wide: bool) -> String {
    let mut header = vec!["ID", "MODEL", "STATE", "NODE", "DEVICE", "TOKENS", "MOVES", "LAST MOVE"];
    if wide {
        header.extend(["PROMPT", "LONGEST PAUSE"]);
    }
    let mut table = Table::new(header);
    for session in items {
        let moves = session["moves"].as_array().map(Vec::as_slice).unwrap_or_default();
        let last =
            moves.last().map(|m| format!("{} {} to {}", text(&m["kind"]), text(&m["from"]), text(&m["to"])));
        let mut cells: Vec<String> = ["id", "model", "state", "node", "device", "generated_tokens"]
            .map(|key| text(&session[key]))
            .into();
        cells.extend([moves.len().to_string(), last.unwrap_or_default()]);
        if wide {
            let pauses = moves.iter().filter_map(|m| m["pause_seconds"].as_f64());
            let longest = pauses.reduce(f64::max).map(pause).unwrap_or_default();
            cells.extend([text(&session["prompt_tokens"]), longest]);
        }
        table.row(cells);
    }
    table.render()
}

fn pause(seconds: f64) -> String {
    format!("{:.1}ms", seconds * 1000.0)
}

/// One session and its moves.
pub(crate) async fn session(args: SessionArgs) -> Result<(), Failure> {
    let server = Server::from_args(&args.server)?;
    let session = server.get_json(&format!("/router/v1/sessions/{}", segment(&args.id)?)).await?;
    if args.output.format.is_document() {
        return args.output.format.print(&session);
    }
    print(&table(std::slice::from_ref(&session), true))?;
    let moves = session["moves"].as_array().map(Vec::as_slice).unwrap_or_default();
    if moves.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(["TIME", "KIND", "FROM", "TO", "REPLAYED", "PAUSE"]);
    for m in moves {
        let mut cells = ["time", "kind", "from", "to", "tokens_replayed"].map(|key| text(&m[key])).to_vec();
        cells.push(pause(m["pause_seconds"].as_f64().unwrap_or_default()));
        table.row(cells);
    }
    print(&format!("\n{}", table.render()))
}

/// Moves a session to a node; the model is loaded there if need be.
pub(crate) async fn migrate(args: MigrateArgs) -> Result<(), Failure> {
    let server = Server::from_args(&args.server)?;
    let path = format!("/router/v1/sessions/{}/migrate", segment(&args.id)?);
    let moved = post(&server, &path, &json!({ "node": args.to })).await?;
    if args.output.format.is_document() {
        return args.output.format.print(&moved);
    }
    print(&format!(
        "session {} moved from {} to {}: {} tokens replayed, pause {}\n",
        args.id,
        text(&moved["from"]),
        text(&moved["to"]),
        text(&moved["tokens_replayed"]),
        pause(moved["pause_seconds"].as_f64().unwrap_or_default()),
    ))
}

/// Takes a node out of service, and waits until no session is left there.
pub(crate) async fn drain(args: DrainArgs) -> Result<(), Failure> {
    let server = Server::from_args(&args.server)?;
    let node = ObjectRef::new(Kind::ModelNode, "", &args.node);
    let store = store(&args.server.server)?;
    let patch = json!({ "spec": { "drain": !args.undo } });
    store.merge_object(&node, patch).await.map_err(|error| {
        let failure = unreachable_hint(&error, &args.server.server);
        if error.is_not_found() { failure.cure("`pilotlight get nodes` lists them") } else { failure }
    })?;
    if args.undo {
        return print(&format!("node {} takes models and sessions again\n", args.node));
    }
    let path = format!("/router/v1/nodes/{}/drain", segment(&args.node)?);
    let drained = post(&server, &path, &json!({})).await?;
    if args.output.format.is_document() {
        return args.output.format.print(&drained);
    }
    print(&format!(
        "node {} has no session left: {} moved, {} ended there; `pilotlight drain {} --undo` takes it back\n",
        args.node,
        text(&drained["moved"]),
        text(&drained["ended"]),
        args.node,
    ))
}

async fn post(server: &Server, path: &str, body: &Value) -> Result<Value, Failure> {
    let answer = server.send(Method::POST, path, Some(body)).await?;
    let status = answer.status();
    let body = read_all(answer).await?;
    if status != StatusCode::OK {
        return Err(refusal(status, &body));
    }
    Ok(serde_json::from_slice(&body)?)
}

/// A session's id, or a node's name, as a part of a path.
fn segment(name: &str) -> Result<String, Failure> {
    let id: Result<SessionId, _> = name.parse();
    id.map(|id| id.in_path()).map_err(|error| {
        Failure::from_error(&error)
            .cure("`pilotlight sessions` and `pilotlight get nodes` list what there is")
    })
}
