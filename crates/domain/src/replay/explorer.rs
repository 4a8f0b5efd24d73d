//! Runs the machine through **every** interleaving of messages, losses, duplicates, delays, hangs and deaths of a small
//! session, breadth first, and looks at each state once.
//!
//! The openings are little engines with a queue each way. A step is one of: an engine starts, takes a command, or
//! generates a token; a message arrives, or arrives without leaving the queue (a duplicate); an engine dies, with or
//! without what it had said; a connection breaks while its engine lives on; an engine stops without a word; somebody
//! wants a move, or none any more; time passes; the client leaves.
//!
//! Checked in each state: what was forwarded is a beginning of the answer, token by token; no two openings that the
//! arbiter has not given up generate; each opening and each release has an epoch of its own. Checked where no step is
//! left: the session has ended as it should, and everything opened is closed. As each step uses something up, every
//! run comes to such a state: that is progress.

use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use super::{Effect, Event, Kind, Opening, Policy, Replay};
use crate::session::{
    FailureCode, FinishReason, Retry, SessionCommand, SessionEvent, SessionSpec, TokenId, Usage,
};
use crate::{Phases, Timestamp};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    New,
    Held,
    Running,
    Frozen,
    Finished,
    /// Dead, or silent for ever.
    Gone,
}

/// An opening, and both queues.
#[derive(Clone, Debug)]
struct Engine {
    name: Opening,
    mode: Mode,
    hold: bool,
    epoch: u32,
    ids: Vec<TokenId>,
    commands: VecDeque<SessionCommand>,
    events: VecDeque<SessionEvent>,
    /// After its events the arbiter learns that it is lost.
    broken: bool,
    /// The arbiter closed it, knows that it is lost, or heard its last event.
    over: bool,
}

/// How often each thing may go wrong.
#[derive(Clone, Copy, Debug)]
struct Budget {
    tokens: usize,
    moves: u32,
    losses: u32,
    hangs: u32,
    duplicates: u32,
    ticks: u32,
    aborts: u32,
    cancels: u32,
}

#[derive(Clone, Debug)]
struct World {
    replay: Replay,
    now: Timestamp,
    engines: Vec<Engine>,
    said: Vec<TokenId>,
    end: Option<Ended>,
    left: Budget,
    rate: f64,
    must: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ended {
    Well,
    Badly,
    Deserted,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Starts(usize),
    Obeys(usize),
    Generates(usize),
    Arrives(usize),
    ArrivesTwice(usize),
    Dies(usize, bool),
    Breaks(usize),
    Hangs(usize),
    IsLost(usize),
    Move,
    Abort,
    Tick,
    Cancel,
}

fn id(index: usize) -> TokenId {
    100 + TokenId::try_from(index).unwrap()
}

fn spec() -> SessionSpec {
    serde_json::from_str(r#"{"id":"s","model":{"namespace":"default","name":"m"},"input":{"tokens":[1,2]}}"#)
        .unwrap()
}

impl Engine {
    fn new(name: Opening, hold: bool, ids: Vec<TokenId>) -> Self {
        let (commands, events) = (VecDeque::new(), VecDeque::new());
        let epoch = name.0;
        Engine { name, mode: Mode::New, hold, epoch, ids, commands, events, broken: false, over: false }
    }

    fn next(&self) -> u32 {
        u32::try_from(self.ids.len()).unwrap()
    }

    fn learn(&mut self, at: u32, ids: &[TokenId]) {
        assert!(at <= self.next(), "a hole: {} known, told from {at}", self.next());
        let known = self.ids.len() - at as usize;
        self.ids.extend(ids.iter().skip(known));
    }

    fn start(&mut self, rate: f64) {
        self.events.push_back(accepted());
        if self.hold {
            self.mode = Mode::Held;
            self.events.push_back(SessionEvent::Prepared { next_index: self.next(), rate });
        } else {
            self.mode = Mode::Running;
        }
    }

    /// What does not fit the state changes nothing.
    fn obey(&mut self, rate: f64) {
        match (self.commands.pop_front().unwrap(), self.mode) {
            (SessionCommand::Extend { at, ids }, Mode::Held) => {
                self.learn(at, &ids);
                self.events.push_back(SessionEvent::Prepared { next_index: self.next(), rate });
            }
            (SessionCommand::Freeze, Mode::Running) => {
                self.mode = Mode::Frozen;
                self.events.push_back(SessionEvent::Frozen { next_index: self.next() });
            }
            (SessionCommand::Release { epoch, at, ids }, Mode::Held | Mode::Frozen) => {
                self.learn(at, &ids);
                (self.mode, self.epoch) = (Mode::Running, epoch);
                let to = "cpu".into();
                self.events.push_back(SessionEvent::Moved { to, epoch, next_index: self.next() });
            }
            _ => {}
        }
    }

    fn generate(&mut self, tokens: usize) {
        if self.ids.len() < tokens {
            let (index, id) = (self.next(), id(self.ids.len()));
            self.ids.push(id);
            self.events.push_back(SessionEvent::Token {
                epoch: self.epoch,
                index,
                id,
                text: String::new(),
                logprobs: None,
            });
        } else {
            self.mode = Mode::Finished;
            let (reason, usage) = (FinishReason::Stop, Usage::default());
            self.events.push_back(SessionEvent::Done { reason, usage });
        }
    }
}

fn accepted() -> SessionEvent {
    SessionEvent::Accepted {
        prompt_ids: Vec::new(),
        device: String::new(),
        numerics: String::new(),
        waited: Phases::default(),
        from: None,
    }
}

impl World {
    fn new(left: Budget, policy: Policy, rate: f64, must: bool) -> Self {
        let now = Timestamp::from_micros(1_000_000);
        let mut first = Engine::new(Opening(0), false, Vec::new());
        first.mode = Mode::Running;
        World {
            replay: Replay::new(&spec(), vec![1, 2], policy, now),
            now,
            engines: vec![first],
            said: Vec::new(),
            end: None,
            left,
            rate,
            must,
        }
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let left = &self.left;
        for (n, engine) in self.engines.iter().enumerate() {
            let lives = !matches!(engine.mode, Mode::Gone | Mode::Finished);
            // What nobody hears or waits for any more makes no difference.
            let matters = !engine.over;
            if engine.mode == Mode::New && matters {
                steps.push(Step::Starts(n));
            }
            if lives && engine.mode != Mode::New && matters && !engine.commands.is_empty() {
                steps.push(Step::Obeys(n));
            }
            if engine.mode == Mode::Running && matters {
                steps.push(Step::Generates(n));
            }
            if !engine.events.is_empty() {
                steps.push(Step::Arrives(n));
                if left.duplicates > 0 {
                    steps.push(Step::ArrivesTwice(n));
                }
            }
            if engine.broken && matters && engine.events.is_empty() {
                steps.push(Step::IsLost(n));
            }
            if matters && !engine.broken && left.losses > 0 {
                steps.push(Step::Dies(n, true));
                if !engine.events.is_empty() {
                    steps.push(Step::Dies(n, false));
                }
                if lives {
                    steps.push(Step::Breaks(n));
                }
            }
            if lives && matters && left.hangs > 0 {
                steps.push(Step::Hangs(n));
            }
        }
        if self.end.is_none() {
            if left.moves > 0 {
                steps.push(Step::Move);
            }
            if left.aborts > 0 {
                steps.push(Step::Abort);
            }
            if left.cancels > 0 {
                steps.push(Step::Cancel);
            }
            if self.replay.due().is_some() && (left.ticks > 0 || steps.is_empty()) {
                steps.push(Step::Tick);
            }
            if steps.is_empty() {
                // Who hangs while it serves is noticed by others: its agent, its router.
                let silent = |e: &&Engine| e.mode == Mode::Gone && !e.over;
                let silent = self.engines.iter().position(|e| silent(&e));
                steps.extend(silent.map(Step::IsLost));
            }
        }
        steps
    }

    fn take(&mut self, step: Step) {
        let rate = self.rate;
        match step {
            Step::Starts(n) => self.engines[n].start(rate),
            Step::Obeys(n) => self.engines[n].obey(rate),
            Step::Generates(n) => self.engines[n].generate(self.left.tokens),
            Step::Arrives(n) => {
                let event = self.engines[n].events.pop_front().unwrap();
                self.hears(n, &event);
            }
            Step::ArrivesTwice(n) => {
                self.left.duplicates -= 1;
                let event = self.engines[n].events.front().unwrap().clone();
                self.hears(n, &event);
            }
            Step::Dies(n, says) => {
                self.left.losses -= 1;
                let engine = &mut self.engines[n];
                (engine.mode, engine.broken) = (Mode::Gone, true);
                if !says {
                    engine.events.clear();
                }
            }
            Step::Breaks(n) => {
                self.left.losses -= 1;
                self.is_lost(n);
            }
            Step::Hangs(n) => {
                self.left.hangs -= 1;
                self.engines[n].mode = Mode::Gone;
            }
            Step::IsLost(n) => self.is_lost(n),
            Step::Move => {
                self.left.moves -= 1;
                let must = self.must;
                self.on(Event::Move { kind: Kind::Migration, must }, None);
            }
            Step::Abort => {
                self.left.aborts -= 1;
                self.on(Event::Abort, None);
            }
            Step::Tick => {
                self.left.ticks = self.left.ticks.saturating_sub(1);
                self.now = self.replay.due().unwrap();
                self.on(Event::Tick, None);
            }
            Step::Cancel => {
                self.left.cancels -= 1;
                self.end = Some(Ended::Deserted);
                self.on(Event::Cancel, None);
            }
        }
    }

    fn hears(&mut self, n: usize, event: &SessionEvent) {
        if event.is_last() {
            self.engines[n].over = true;
        }
        let by = self.engines[n].name;
        self.on(Event::Said { by, event }, Some(event));
    }

    fn is_lost(&mut self, n: usize) {
        self.engines[n].over = true;
        let opening = self.engines[n].name;
        self.on(Event::Lost { opening }, None);
    }

    fn on(&mut self, event: Event<'_>, said: Option<&SessionEvent>) {
        for effect in self.replay.on(event, self.now) {
            self.carry_out(effect, said);
        }
    }

    fn carry_out(&mut self, effect: Effect, said: Option<&SessionEvent>) {
        match effect {
            Effect::Forward => {
                let Some(SessionEvent::Token { id: token, .. }) = said else { panic!("no token to forward") };
                assert_eq!(*token, id(self.said.len()), "exactly once");
                assert!(self.end.is_none(), "a token after the end");
                self.said.push(*token);
            }
            Effect::Open { opening, hold } => {
                assert!(self.engines.iter().all(|e| e.name < opening), "a new name");
                let ids = self.replay.spec(&spec(), opening, hold).generated;
                assert_eq!(ids, self.said);
                self.engines.push(Engine::new(opening, hold, ids));
            }
            Effect::Command { opening, command } => {
                let used: Vec<u32> = self.engines.iter().map(|e| e.epoch.max(e.name.0)).collect();
                if let SessionCommand::Release { epoch, .. } = command {
                    assert!(used.iter().all(|e| *e < epoch), "a new epoch");
                }
                let engine = self.engine(opening);
                assert!(!engine.over, "a command to one that is closed");
                engine.commands.push_back(command);
            }
            Effect::Close { opening } => {
                let engine = self.engine(opening);
                assert!(!engine.over, "closed twice");
                engine.over = true;
            }
            Effect::End(last) => {
                assert!(self.end.is_none(), "two ends");
                let well = matches!(*last, SessionEvent::Done { .. });
                self.end = Some(if well { Ended::Well } else { Ended::Badly });
            }
            Effect::Drop | Effect::Switched { .. } | Effect::Moved(_) | Effect::NotMoved(_) => {}
        }
    }

    fn engine(&mut self, name: Opening) -> &mut Engine {
        self.engines.iter_mut().find(|e| e.name == name).expect("it was opened")
    }

    fn check(&self) {
        let released = |e: &&Engine| {
            let will = e.commands.iter().any(|c| matches!(c, SessionCommand::Release { .. }));
            let runs = e.mode == Mode::Running || (e.mode == Mode::New && !e.hold);
            !e.over && (runs || (will && matches!(e.mode, Mode::Held | Mode::Frozen)))
        };
        assert!(self.engines.iter().filter(released).count() <= 1, "two sides go on");
    }

    fn check_end(&self, may_fail: bool) {
        match self.end {
            None => panic!("no step is left, and no end"),
            Some(Ended::Well) => assert_eq!(self.said.len(), self.left.tokens, "the whole answer"),
            Some(Ended::Badly) => assert!(may_fail, "a failure where recovery was possible"),
            Some(Ended::Deserted) => {}
        }
        assert!(self.engines.iter().all(|e| e.over), "something is open");
        assert!(self.replay.is_settled());
    }
}

struct Visited {
    states: usize,
    ends: usize,
}

/// A hundred and twenty-eight bits: two different states would meet once in 10²⁷ runs of a million states.
fn key(world: &World) -> (u64, u64) {
    let text = format!("{world:?}");
    let (mut a, mut b) = (DefaultHasher::new(), DefaultHasher::new());
    text.hash(&mut a);
    (0xA5u8, &text).hash(&mut b);
    (a.finish(), b.finish())
}

fn explore(first: World, may_fail: bool) -> Visited {
    let mut seen = HashSet::from([key(&first)]);
    // State → the one before it, and the step; to tell how a breach came about.
    let mut story: Vec<(usize, Option<Step>)> = vec![(0, None)];
    let mut queue = VecDeque::from([(0, first)]);
    let mut ends = 0;
    while let Some((at, world)) = queue.pop_front() {
        let steps = world.steps();
        let looked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            world.check();
            if steps.is_empty() {
                world.check_end(may_fail);
            }
        }));
        if looked.is_err() {
            panic!("after {:?}: {world:#?}", path(&story, at));
        }
        ends += usize::from(steps.is_empty());
        for step in steps {
            let mut next = world.clone();
            let taken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| next.take(step)));
            if taken.is_err() {
                panic!("after {:?}, {step:?}: {world:#?}", path(&story, at));
            }
            if seen.insert(key(&next)) {
                story.push((at, Some(step)));
                queue.push_back((story.len() - 1, next));
            }
        }
    }
    Visited { states: seen.len(), ends }
}

fn path(story: &[(usize, Option<Step>)], mut at: usize) -> Vec<Step> {
    let mut steps = Vec::new();
    while let (before, Some(step)) = story[at] {
        steps.push(step);
        at = before;
    }
    steps.reverse();
    steps
}

fn policy() -> Policy {
    Policy { rounds_max: 2, gap_tokens_max: 0, between_min: Duration::ZERO, ..Policy::default() }
}

const QUIET: Budget =
    Budget { tokens: 3, moves: 0, losses: 0, hangs: 0, duplicates: 0, ticks: 0, aborts: 0, cancels: 0 };

fn run(what: &str, first: World, may_fail: bool) {
    let visited = explore(first, may_fail);
    println!("{what}: {} states visited, {} of them ends, each once", visited.states, visited.ends);
    assert!(visited.ends > 0);
}

fn losses(tokens: usize) {
    let left = Budget { tokens, moves: 1, losses: 2, ..QUIET };
    run("losses", World::new(left, policy(), 0.0, false), false);
}

fn duplicates(tokens: usize, losses: u32) {
    let left = Budget { tokens, moves: 1, duplicates: 1, ticks: 1, losses, ..QUIET };
    run("duplicates and impatience", World::new(left, policy(), 0.0, false), false);
}

fn two_moves(tokens: usize, losses: u32) {
    let left = Budget { tokens, moves: 2, aborts: 1, cancels: 1, losses, ..QUIET };
    run("two moves", World::new(left, policy(), 0.0, false), false);
}

#[test]
fn one_move_with_losses_of_either_side_or_both() {
    losses(2);
}

#[test]
fn one_move_with_duplicates_and_impatience() {
    duplicates(2, 0);
}

#[test]
fn two_moves_one_called_off_and_clients_that_leave() {
    two_moves(1, 0);
}

#[test]
fn one_move_with_a_side_that_hangs() {
    let left = Budget { tokens: 2, moves: 1, hangs: 1, losses: 1, ..QUIET };
    run("hangs", World::new(left, policy(), 0.0, false), false);
}

#[test]
#[ignore = "two million states take minutes: `cargo test -p pilotlight-domain replay -- --ignored --nocapture`"]
fn larger_worlds() {
    losses(3);
    duplicates(3, 1);
    two_moves(2, 1);
}

#[test]
fn a_target_that_is_too_slow() {
    for must in [false, true] {
        let left = Budget { moves: 1, losses: 1, ..QUIET };
        let mut world = World::new(left, Policy { gap_max: Duration::ZERO, ..policy() }, 0.001, must);
        world.replay.set_rate(1.0);
        run(if must { "slow, and it must" } else { "slow" }, world, false);
    }
}

#[test]
fn an_arbiter_that_does_not_recover_fails_and_leaves_nothing_open() {
    let left = Budget { moves: 1, losses: 2, ticks: 1, ..QUIET };
    run("no recovery", World::new(left, policy().without_recovery(), 0.0, false), true);
}

#[test]
fn the_explorer_sees_a_failure_said_by_the_source() {
    // A failure that the source says itself is a loss, and recovered the same way.
    let mut world = World::new(Budget { moves: 1, ..QUIET }, policy(), 0.0, false);
    let failed = SessionEvent::Failed {
        code: FailureCode::WorkerLost,
        message: "gone".into(),
        retry: Retry::Elsewhere,
    };
    world.engines[0].mode = Mode::Finished;
    world.engines[0].events.push_back(failed);
    run("a failure said", world, false);
}
