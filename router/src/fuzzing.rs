//! What the fuzzers and the mutation tests feed with bytes: each function takes any input, and panics where the
//! router's promises about it do not hold. Only in tests and fuzzing builds.

use pilotlight_domain::replay::{Effect, Event, Opening, Policy, Replay};
use pilotlight_domain::session::{Input, Sampling, SessionEvent, SessionSpec};
use pilotlight_domain::{ModelName, SessionId, Timestamp};

use crate::openai::request::SESSIONS_MAX;
use crate::openai::{Task, read};
use crate::upstream::Lines;

/// A body of the OpenAI API: a request within its bounds that the next part reads as this one wrote it, or an error
/// object that says something.
pub fn request(body: &[u8]) {
    for task in [Task::Chat, Task::Completion] {
        match read::read(task, body, 7) {
            Ok(request) => {
                let choices = request.choices();
                assert!((1..=SESSIONS_MAX).contains(&choices), "{choices} choices");
                for index in [0, choices - 1] {
                    let (input, sampling) = request.choice(index);
                    same_after_the_wire(&spec(input.clone(), sampling));
                }
            }
            Err(error) => {
                let json: serde_json::Value =
                    serde_json::from_slice(&error.json()).expect("an error is JSON");
                assert!(
                    json["error"]["message"].as_str().is_some_and(|message| !message.is_empty()),
                    "{json}"
                );
                assert!((400..500).contains(&error.code.status().as_u16()), "{json}");
            }
        }
    }
}

/// What an agent says on a session's stream: the lines are the same in whatever pieces the bytes come, each event is
/// the same after it was written and read again, and whatever they say, a client hears each token once and in order.
pub fn events(data: &[u8]) {
    let lines = cut(data, data.len().max(1));
    assert_eq!(lines, cut(data, 1 + data.len() % 7));
    let first = spec(Input::Tokens(vec![1, 2]), Sampling::default());
    let mut replay = Replay::new(&first, vec![1, 2], Policy::default(), Timestamp::default());
    let mut heard = 0;
    for line in &lines {
        let Ok(event) = serde_json::from_slice::<SessionEvent>(line) else { continue };
        let written = serde_json::to_vec(&event).expect("an event is JSON");
        let again: SessionEvent = serde_json::from_slice(&written).expect("what was written can be read");
        assert_eq!(again, event);
        for effect in replay.on(Event::Said { by: Opening(0), event: &event }, Timestamp::default()) {
            if effect == Effect::Forward {
                assert!(matches!(event, SessionEvent::Token { index, .. } if index == heard), "{event:?}");
                heard += 1;
            }
        }
    }
    assert_eq!(replay.ids().len(), heard as usize);
}

fn spec(input: Input, sampling: Sampling) -> SessionSpec {
    SessionSpec {
        id: "fuzz".parse::<SessionId>().expect("a session's name"),
        model: ModelName::new("default", "fuzz").expect("a model's name"),
        epoch: 0,
        input,
        generated: Vec::new(),
        sampling,
        hold: false,
        on_cpu: false,
    }
}

fn same_after_the_wire(spec: &SessionSpec) {
    let written = serde_json::to_vec(spec).expect("a session is JSON");
    let again: SessionSpec = serde_json::from_slice(&written).expect("an agent reads what a router writes");
    assert_eq!(&again, spec);
}

fn cut(data: &[u8], piece: usize) -> Vec<bytes::Bytes> {
    let (mut lines, mut out) = (Lines::default(), Vec::new());
    for bytes in data.chunks(piece) {
        lines.push(bytes);
        loop {
            match lines.next() {
                Ok(Some(line)) => out.push(line),
                Ok(None) => break,
                Err(_) => return out,
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use pilotlight_testkit::mutate::drive;

    #[test]
    fn requests() {
        drive("request", 10_000, super::request);
    }

    #[test]
    fn events() {
        drive("events", 10_000, super::events);
    }
}
