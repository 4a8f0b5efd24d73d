//! The table: a story in words, and what the machine asks for.

use std::time::Duration;

use super::{Effect, Event, Kind, Opening, Policy, Replay};
use crate::session::{FailureCode, FinishReason, Retry, SessionCommand, SessionEvent, SessionSpec, Usage};
use crate::{Phases, Timestamp};

/// Takes a story of words. Said by opening `n` in epoch `e`: `n:token e i`, `n:accepted`, `n:prepared i rate`,
/// `n:frozen i`, `n:moved e i`, `n:done`, `n:failed` (elsewhere), `n:refused` (for good). Otherwise `lost n`, `move`,
/// `must`, `handover`, `abort`, `tick`, `cancel`, `gone`, and `+ms` lets time pass.
fn told(policy: Policy, story: &str) -> String {
    let first: SessionSpec = serde_json::from_str(
        r#"{"id":"s","model":{"namespace":"default","name":"m"},"input":{"text":"hi"},"sampling":{"max_tokens":9}}"#,
    )
    .unwrap();
    let mut now = Timestamp::from_micros(10_000_000);
    let mut replay = Replay::new(&first, vec![1, 2, 3], policy, now);
    let mut out = Vec::new();
    for word in story.split(';').map(str::trim) {
        let numbers: Vec<u32> =
            word.split([' ', ':']).filter_map(|part| part.trim_start_matches('+').parse().ok()).collect();
        let number = |n: usize| numbers.get(n).copied().unwrap_or_default();
        let event = word.split_once(':').map(|(_, what)| said(what.split(' ').next().unwrap(), &number));
        let failure = failed(Retry::No);
        let event = match (&event, word.split(' ').next().unwrap()) {
            (Some(event), _) => Event::Said { by: Opening(number(0)), event },
            (None, "lost") => Event::Lost { opening: Opening(number(0)) },
            (None, "move") => Event::Move { kind: Kind::Migration, must: false },
            (None, "must") => Event::Move { kind: Kind::Migration, must: true },
            (None, "handover") => Event::Move { kind: Kind::HandOver, must: false },
            (None, "abort") => Event::Abort,
            (None, "cancel") => Event::Cancel,
            (None, "gone") => Event::GiveUp { failure: &failure },
            (None, "tick") => {
                now = replay.due().expect("something is due");
                Event::Tick
            }
            (None, _) => {
                now = now + Duration::from_millis(number(0).into());
                continue;
            }
        };
        out.extend(replay.on(event, now).into_iter().map(|effect| shown(&replay, &first, effect)));
    }
    out.join("; ")
}

fn failed(retry: Retry) -> SessionEvent {
    SessionEvent::Failed { code: FailureCode::WorkerLost, message: "the worker died".into(), retry }
}

fn said(what: &str, number: &dyn Fn(usize) -> u32) -> SessionEvent {
    match what {
        "token" => SessionEvent::Token {
            epoch: number(1),
            index: number(2),
            id: 100 + number(2),
            text: String::new(),
            logprobs: None,
        },
        "accepted" => SessionEvent::Accepted {
            prompt_ids: vec![1, 2, 3],
            device: "cpu".into(),
            numerics: "c".into(),
            waited: Phases::default(),
            from: None,
        },
        "prepared" => SessionEvent::Prepared { next_index: number(1), rate: number(2).into() },
        "frozen" => SessionEvent::Frozen { next_index: number(1) },
        "moved" => SessionEvent::Moved { to: "sim".into(), epoch: number(1), next_index: number(2) },
        "done" => SessionEvent::Done { reason: FinishReason::Stop, usage: Usage::default() },
        "failed" => failed(Retry::Elsewhere),
        "refused" => failed(Retry::No),
        what => panic!("{what}?"),
    }
}

fn shown(replay: &Replay, first: &SessionSpec, effect: Effect) -> String {
    match effect {
        Effect::Forward => "say".into(),
        Effect::Drop => "drop".into(),
        Effect::Open { opening, hold } => {
            let spec = replay.spec(first, opening, hold);
            assert_eq!((spec.epoch, spec.hold, spec.sampling.max_tokens), (opening.0, hold, Some(9)));
            format!("open {} with {}{}", opening.0, spec.generated.len(), if hold { ", held" } else { "" })
        }
        Effect::Command { opening, command } => match command {
            SessionCommand::Extend { at, ids } => format!("{}: extend {at}+{}", opening.0, ids.len()),
            SessionCommand::Freeze => format!("{}: freeze", opening.0),
            SessionCommand::Release { epoch, at, ids } => {
                format!("{}: release in {epoch}, {at}+{}", opening.0, ids.len())
            }
        },
        Effect::Close { opening } => format!("close {}", opening.0),
        Effect::Switched { opening, epoch, next_index } => {
            format!("{} serves in {epoch} from {next_index}", opening.0)
        }
        Effect::Moved(r) => {
            let kind = r.kind.as_str();
            let device = r.device.map(|d| format!(" ({d})")).unwrap_or_default();
            let (from, to, ms) = (r.from.0, r.to.0, r.pause.as_millis());
            format!("{kind} {from} to {to}{device}, {} replayed, {ms} ms", r.replayed)
        }
        Effect::NotMoved(why) => format!("not moved: {why:?}"),
        Effect::End(last) => match *last {
            SessionEvent::Done { .. } => "end".into(),
            _ => "fail".into(),
        },
    }
}

fn check(story: &str, expect: &str) {
    assert_eq!(told(Policy::default(), story), expect, "{story}");
}

#[test]
fn only_the_next_token_of_who_serves_is_said() {
    check("0:token 0 0; 0:token 0 1; 0:done", "say; say; end");
    check("0:token 0 0; 0:token 0 0; 0:token 1 1; 7:token 0 1; 0:token 0 1", "say; drop; drop; drop; say");
    check("0:done; 0:token 0 0", "end; drop");
    check("0:refused", "fail");
}

#[test]
fn a_hole_is_a_loss() {
    check("0:token 0 0; 0:token 0 2; 1:accepted", "say; drop; close 0; open 1 with 1; 1 serves in 1 from 1");
    check("0:moved 1 1", "close 0; open 1 with 0");
}

#[test]
fn a_loss_is_replayed_as_often_as_may_be() {
    check(
        "0:token 0 0; +5; lost 0; +70; 1:accepted; +5; 1:token 1 1; 1:done",
        "say; open 1 with 1; 1 serves in 1 from 1; say; recovery 0 to 1, 4 replayed, 80 ms; end",
    );
    check("0:failed; 1:failed; lost 2; gone", "open 1 with 0; open 2 with 0; open 3 with 0; close 3; fail");
    check("lost 0; 1:done", "open 1 with 0; 1 serves in 1 from 0; recovery 0 to 1, 3 replayed, 0 ms; end");
    let once = Policy { recoveries_max: 1, ..Policy::default() };
    assert_eq!(told(once, "lost 0; 1:accepted; 1:failed"), "open 1 with 0; 1 serves in 1 from 0; fail");
    assert_eq!(told(Policy::default().without_recovery(), "0:token 0 0; 0:failed"), "say; fail");
}

#[test]
fn a_move_is_overlapped_and_seamless() {
    check(
        "0:token 0 0; move; 0:token 0 1; 1:accepted; 1:prepared 1 5000; 0:token 0 2; 0:frozen 3; +30; 1:moved 2 3; \
         1:token 2 3; 0:token 0 3; 1:done",
        "say; open 1 with 1, held; say; 0: freeze; say; 1: release in 2, 1+2; close 0; 1 serves in 2 from 3; \
         say; migration 0 to 1, 6 replayed, 30 ms; drop; end",
    );
}

#[test]
fn rounds_go_on_until_the_gap_is_small_but_not_for_ever() {
    let few = Policy { gap_tokens_max: 1, ..Policy::default() };
    // Nobody measured: tokens are counted.
    assert_eq!(
        told(
            few,
            "move; 0:token 0 0; 0:token 0 1; 1:prepared 0 0; 0:token 0 2; 1:prepared 0 0; 1:prepared 2 0"
        ),
        "open 1 with 0, held; say; say; 1: extend 0+2; say; 0: freeze"
    );
    assert_eq!(
        told(
            Policy { gap_tokens_max: 0, ..few },
            "move; 0:token 0 0; 0:token 0 1; 1:prepared 0 0; 0:token 0 2; 1:prepared 2 0; 0:token 0 3; 1:prepared 3 0"
        ),
        "open 1 with 0, held; say; say; 1: extend 0+2; say; 1: extend 2+1; say; 0: freeze"
    );
    // A token each 10 ms, and a target of 50 a second is 40 ms behind; one of 15 cannot catch up.
    let begin = "+10; 0:token 0 0; +10; 0:token 0 1; move; +10; 0:token 0 2; +10; 0:token 0 3";
    let began = "say; say; open 1 with 2, held; say; say";
    check(&format!("{begin}; 1:prepared 2 5000"), &format!("{began}; 0: freeze"));
    check(&format!("{begin}; 1:prepared 2 199"), &format!("{began}; close 1; not moved: TooSlow"));
    check(&format!("{begin}; 1:prepared 2 201"), &format!("{began}; 0: freeze"));
    let strict = Policy { gap_max: Duration::from_millis(1), ..Policy::default() };
    assert_eq!(told(strict, &format!("{begin}; 1:prepared 2 250")), format!("{began}; 1: extend 2+2"));
    let must = begin.replace("move", "must");
    // One that must move goes on as long as that makes the gap smaller.
    let caught = format!("{began}; 1: extend 2+2; say; 1: extend 4+1");
    check(&format!("{must}; 1:prepared 2 15; 0:token 0 4; 1:prepared 4 15"), &caught);
    let apart = format!("{began}; 1: extend 2+2; say; say; 0: freeze");
    check(&format!("{must}; 1:prepared 2 15; 0:token 0 4; 0:token 0 5; 1:prepared 4 15"), &apart);
}

#[test]
fn moves_are_refused_where_they_do_not_pay() {
    check("move; move", "open 1 with 0, held; not moved: Busy");
    check("lost 0; move", "open 1 with 0; not moved: Busy");
    check("lost 0; 1:accepted; move", "open 1 with 0; 1 serves in 1 from 0; not moved: TooSoon");
    let tight = Policy { tokens_max: 3, ..Policy::default() };
    assert_eq!(told(tight, "0:token 0 0; move"), "say; not moved: TooLong");
    let often = Policy { moves_max: 1, ..Policy::default() };
    assert_eq!(
        told(often, "lost 0; 1:accepted; +1000; move"),
        "open 1 with 0; 1 serves in 1 from 0; not moved: TooOften"
    );
}

#[test]
fn who_dies_when() {
    // The target: preparing, freezing, releasing.
    check("move; lost 1; 0:token 0 0", "open 1 with 0, held; not moved: TargetLost; say");
    let freezing = "move; 1:prepared 0 0";
    let froze = "open 1 with 0, held; 0: freeze";
    check(
        &format!("{freezing}; 1:failed; 0:token 0 0; 0:frozen 1; 0:moved 2 1; 0:token 2 1"),
        &format!("{froze}; not moved: TargetLost; say; 0: release in 2, 1+0; 0 serves in 2 from 1; say"),
    );
    check(
        &format!("{freezing}; 0:frozen 0; lost 1; 1:moved 2 0; 0:moved 3 0; 0:token 3 0"),
        &format!(
            "{froze}; 1: release in 2, 0+0; not moved: TargetLost; 0: release in 3, 0+0; 0 serves in 3 from 0; say"
        ),
    );
    // The source: not prepared, prepared, freezing, releasing, thawing.
    check("move; lost 0", "open 1 with 0, held; close 1; not moved: SourceLost; open 2 with 0");
    let ahead = Policy { gap_tokens_max: 0, ..Policy::default() };
    assert_eq!(
        told(ahead, "move; 0:token 0 0; 1:prepared 0 0; lost 0; 1:prepared 1 0; 1:moved 2 1; 1:token 2 1"),
        "open 1 with 0, held; say; 1: extend 0+1; 1: release in 2, 1+0; 1 serves in 2 from 1; say; \
         recovery 0 to 1, 4 replayed, 0 ms"
    );
    check(
        &format!("{freezing}; 0:token 0 0; lost 0; 1:moved 2 1"),
        &format!("{froze}; say; 1: release in 2, 0+1; 1 serves in 2 from 1"),
    );
    check(
        &format!("{freezing}; 0:frozen 0; lost 0; 1:moved 2 0"),
        &format!("{froze}; 1: release in 2, 0+0; 1 serves in 2 from 0"),
    );
    check(
        &format!("{freezing}; lost 1; 0:frozen 0; lost 0"),
        &format!("{froze}; not moved: TargetLost; 0: release in 2, 0+0; open 3 with 0"),
    );
    // Both.
    check(
        &format!("{freezing}; 0:frozen 0; lost 0; lost 1; 3:accepted"),
        &format!("{froze}; 1: release in 2, 0+0; not moved: TargetLost; open 3 with 0; 3 serves in 3 from 0"),
    );
}

#[test]
fn who_is_late() {
    check("move; tick; 0:token 0 0", "open 1 with 0, held; close 1; not moved: TimedOut; say");
    let freezing = "move; 1:prepared 0 0";
    let froze = "open 1 with 0, held; 0: freeze";
    check(&format!("{freezing}; tick"), &format!("{froze}; close 0; 1: release in 2, 0+0"));
    check(
        &format!("{freezing}; 0:frozen 0; tick; tick"),
        &format!(
            "{froze}; 1: release in 2, 0+0; close 1; not moved: TimedOut; 0: release in 3, 0+0; close 0; open 4 with 0"
        ),
    );
}

#[test]
fn finish_wins_and_nothing_stays_open() {
    let froze = "open 1 with 0, held; 0: freeze";
    check("move; 0:done", "open 1 with 0, held; close 1; not moved: Finished; end");
    check("move; 1:prepared 0 0; 0:done", &format!("{froze}; close 1; not moved: Finished; end"));
    check(
        "move; 1:prepared 0 0; 0:frozen 0; 1:done",
        &format!(
            "{froze}; 1: release in 2, 0+0; close 0; 1 serves in 2 from 0; migration 0 to 1, 3 replayed, 0 ms; end"
        ),
    );
    check("move; 1:done; 0:token 0 0", "open 1 with 0, held; not moved: TargetLost; say");
    check("cancel", "close 0");
    check("move; cancel", "open 1 with 0, held; close 0; close 1; not moved: Finished");
    check("move; abort", "open 1 with 0, held; close 1; not moved: Aborted");
    check("abort", "");
}

#[test]
fn an_opening_may_move_by_itself() {
    check(
        "0:token 0 0; 0:moved 1 1; 0:token 0 1; +7; 0:token 1 1; 0:moved 1 2",
        "say; 0 serves in 1 from 1; drop; say; handover 0 to 0 (sim), 4 replayed, 7 ms",
    );
    // A name that is taken inside is not given again.
    check("0:moved 1 0; lost 0", "0 serves in 1 from 0; open 2 with 0");
    check(
        "move; 0:moved 1 0; 0:token 1 0",
        "open 1 with 0, held; 0 serves in 1 from 0; say; handover 0 to 0 (sim), 3 replayed, 0 ms",
    );
}
