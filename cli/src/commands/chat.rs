//! `pilotlight chat`: a conversation with a model, streamed.

use std::io::{BufRead as _, IsTerminal as _, Read as _};

use http::Method;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use crate::args::ChatArgs;
use crate::failure::Failure;
use crate::output::print;
use crate::server::{Server, read_all, refusal};

/// Interactive on a terminal; one answer with `--message` or piped input.
pub(crate) async fn run(args: ChatArgs) -> Result<(), Failure> {
    let server = Server::from_args(&args.server)?;
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(json!({ "role": "system", "content": system }));
    }
    let once = match args.message.as_deref() {
        Some("-") => Some(read_stdin()?),
        Some(text) => Some(text.to_owned()),
        None if !std::io::stdin().is_terminal() => Some(read_stdin()?),
        None => None,
    };
    if let Some(text) = once {
        messages.push(json!({ "role": "user", "content": text }));
        say(&server, &args, &messages).await?;
        return Ok(());
    }
    print(&format!("Talking to {}. An empty line or Ctrl-D ends it.\n", args.name))?;
    loop {
        print("> ")?;
        let mut line = String::new();
        let read = std::io::stdin().lock().read_line(&mut line)?;
        if read == 0 || line.trim().is_empty() {
            return Ok(());
        }
        messages.push(json!({ "role": "user", "content": line.trim_end() }));
        let answer = say(&server, &args, &messages).await?;
        messages.push(json!({ "role": "assistant", "content": answer }));
    }
}

fn read_stdin() -> Result<String, Failure> {
    let mut text = String::new();
    std::io::stdin().lock().read_to_string(&mut text)?;
    Ok(text)
}

async fn say(server: &Server, args: &ChatArgs, messages: &[Value]) -> Result<String, Failure> {
    let mut body = json!({ "model": args.name, "messages": messages, "stream": true });
    for (key, value) in [
        ("max_tokens", args.max_tokens.map(Value::from)),
        ("temperature", args.temperature.map(Value::from)),
        ("seed", args.seed.map(Value::from)),
    ] {
        if let Some(value) = value {
            body[key] = value;
        }
    }
    let mut answer = Answer::default();
    stream(server, &body, &mut |delta| {
        answer.text.push_str(delta);
        print(delta)
    })
    .await?;
    print("\n")?;
    Ok(answer.text)
}

#[derive(Default)]
struct Answer {
    text: String,
}

/// Headers of a streamed answer.
pub(crate) type Headers = http::HeaderMap;

/// Sends a chat request with `stream: true` and hands each piece of text on as it comes.
pub(crate) async fn stream(
    server: &Server,
    body: &Value,
    on_text: &mut dyn FnMut(&str) -> Result<(), Failure>,
) -> Result<Headers, Failure> {
    let answer = server.send(Method::POST, "/v1/chat/completions", Some(body)).await?;
    if !answer.status().is_success() {
        let status = answer.status();
        return Err(refusal(status, &read_all(answer).await?));
    }
    let headers = answer.headers().clone();
    let mut events = EventLines::default();
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| Failure::new(format!("the stream broke off: {e}")))?;
        let Some(bytes) = frame.data_ref() else { continue };
        for data in events.feed(bytes) {
            if data == "[DONE]" {
                return Ok(headers);
            }
            let event: Value = serde_json::from_str(&data)?;
            if let Some(message) = event["error"]["message"].as_str() {
                return Err(Failure::new(message));
            }
            if let Some(text) = event["choices"][0]["delta"]["content"].as_str() {
                on_text(text)?;
            }
        }
    }
    Err(Failure::new("the stream ended before it was done")
        .cure("ask again; `pilotlight get nodes` shows who is there"))
}

/// Cuts a stream of server-sent events into the data of each.
#[derive(Default)]
struct EventLines {
    rest: Vec<u8>,
}

impl EventLines {
    fn feed(&mut self, bytes: &[u8]) -> Vec<String> {
        self.rest.extend_from_slice(bytes);
        let mut data = Vec::new();
        while let Some(end) = self.rest.iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            if let Some(text) = String::from_utf8_lossy(&line).trim_end().strip_prefix("data:") {
                data.push(text.trim_start().to_owned());
            }
        }
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_may_be_cut_anywhere() {
        let text = "data: {\"a\":1}\n\n: comment\n\ndata: [DONE]\n\n".as_bytes();
        for cut in 0..text.len() {
            let mut lines = EventLines::default();
            let mut all = lines.feed(&text[..cut]);
            all.extend(lines.feed(&text[cut..]));
            assert_eq!(all, ["{\"a\":1}", "[DONE]"], "cut at {cut}");
        }
    }
}
