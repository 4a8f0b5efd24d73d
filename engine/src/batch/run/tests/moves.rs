//! Sessions that move between two batches, by a test that plays the arbiter.

use super::*;

/// Two devices, and the events of the one session that moves between them. A session's key on device `i` is even or
/// odd as `i` is; each opening has its own.
struct Pair {
    worlds: [World; 2],
    said: Vec<(SessionKey, SessionEvent)>,
    next_key: u64,
}

impl Pair {
    fn new() -> Self {
        Pair { worlds: [World::new(60, 3), World::new(60, 3)], said: Vec::new(), next_key: 1000 }
    }

    fn open(&mut self, device: usize, spec: SessionSpec) -> SessionKey {
        self.next_key += 1;
        let key = SessionKey(2 * self.next_key + device as u64);
        let batch = &mut self.worlds[device].batch;
        let prepared = prepared(batch, key, spec);
        batch.start(prepared, &mut self.said);
        key
    }

    fn world(&mut self, key: SessionKey) -> &mut World {
        &mut self.worlds[(key.0 % 2) as usize]
    }

    fn command(&mut self, key: SessionKey, command: &SessionCommand) {
        let mut events = Events::new();
        assert!(self.world(key).batch.command(key, command, &mut events), "{command:?} found nobody");
        self.said.extend(events);
    }

    fn close(&mut self, key: SessionKey) {
        assert!(self.world(key).batch.cancel(key));
        assert!(!self.world(key).batch.cancel(key));
    }

    fn step(&mut self, device: usize) {
        let World { batch, cpu, .. } = &mut self.worlds[device];
        if batch.has_work() {
            let stepped = batch.step(cpu, &mut self.said);
            batch.note(stepped, Duration::from_millis(10), &mut self.said);
        }
    }

    /// Steps both until it has said something like that, which is taken out of what was said.
    fn wait(&mut self, key: SessionKey, what: impl Fn(&SessionEvent) -> bool) -> SessionEvent {
        for turn in 0..10_000 {
            if let Some(at) = self.said.iter().position(|(by, event)| *by == key && what(event)) {
                return self.said.remove(at).1;
            }
            self.step(turn % 2);
        }
        panic!("{key:?} does not say it: {:?}", self.said);
    }
}

fn is_prepared(event: &SessionEvent) -> bool {
    matches!(event, SessionEvent::Prepared { .. })
}

fn is_moved(event: &SessionEvent) -> bool {
    matches!(event, SessionEvent::Moved { .. })
}

fn extend(at: usize, ids: &[TokenId]) -> SessionCommand {
    SessionCommand::Extend { at: at as u32, ids: ids.to_vec() }
}

fn release(epoch: u32, at: usize, ids: &[TokenId]) -> SessionCommand {
    SessionCommand::Release { epoch, at: at as u32, ids: ids.to_vec() }
}

/// Events of one session, epochs left away: what a client sees.
fn seen(events: &[(SessionKey, SessionEvent)]) -> Vec<SessionEvent> {
    let without_epoch = |(_, event): &(SessionKey, SessionEvent)| match event.clone() {
        SessionEvent::Token { index, id, text, logprobs, .. } => {
            Some(SessionEvent::Token { epoch: 0, index, id, text, logprobs })
        }
        done @ SessionEvent::Done { .. } => Some(done),
        _ => None,
    };
    events.iter().filter_map(without_epoch).collect()
}

fn undisturbed(spec: SessionSpec) -> Vec<SessionEvent> {
    let mut pair = Pair::new();
    let key = pair.open(0, spec);
    let done = pair.wait(key, SessionEvent::is_last);
    pair.said.push((key, done));
    seen(&pair.said)
}

/// The arbiter of one session.
struct Arbiter {
    pair: Pair,
    spec: SessionSpec,
    serving: SessionKey,
    epoch: u32,
    /// What the client was told.
    told: Vec<SessionEvent>,
}

impl Arbiter {
    fn new(spec: SessionSpec) -> Self {
        let mut pair = Pair::new();
        // Others on both devices.
        for device in 0..2 {
            let company = Sampling { ignore_eos: true, max_tokens: Some(90), ..Sampling::default() };
            pair.open(device, super::spec(prompt(77, 9), company));
        }
        let serving = pair.open(0, spec.clone());
        Arbiter { pair, spec, serving, epoch: 0, told: Vec::new() }
    }

    fn ids(&self) -> Vec<TokenId> {
        let id = |event: &SessionEvent| match event {
            SessionEvent::Token { id, .. } => Some(*id),
            _ => None,
        };
        self.told.iter().filter_map(id).collect()
    }

    /// Takes what the serving opening said.
    fn listen(&mut self) -> bool {
        for (by, event) in std::mem::take(&mut self.pair.said) {
            match event {
                SessionEvent::Token { epoch, index, .. } if by == self.serving => {
                    assert_eq!((epoch, index as usize), (self.epoch, self.told.len()));
                    self.told.extend(seen(&[(by, event)]));
                }
                SessionEvent::Done { .. } if by == self.serving => self.told.push(event),
                SessionEvent::Accepted { .. } => {}
                SessionEvent::Token { .. } | SessionEvent::Done { .. } if by.0 < 2 * 1003 => {}
                other => self.pair.said.push((by, other)),
            }
        }
        matches!(self.told.last(), Some(SessionEvent::Done { .. }))
    }

    fn steps(&mut self, count: usize) -> bool {
        (0..count).for_each(|turn| self.pair.step(turn % 2));
        self.listen()
    }

    /// One move with everything that may happen on the way; true when the session has ended.
    fn go(&mut self, script: &Script) -> bool {
        if self.steps(script.before) {
            return true;
        }
        let known = self.ids();
        // What the target knows for certain.
        let mut sure = known.len();
        self.epoch += 1;
        let to = SessionSpec { epoch: self.epoch, generated: known, hold: true, ..self.spec.clone() };
        let device = if script.same { self.serving.0 % 2 } else { 1 - self.serving.0 % 2 };
        let target = self.pair.open(device as usize, to);
        self.epoch -= 1;
        for back in &script.extends {
            let prepared = self.pair.wait(target, is_prepared);
            let SessionEvent::Prepared { next_index, .. } = prepared else { panic!() };
            if self.steps(3) {
                return true;
            }
            let ids = self.ids();
            assert_eq!(next_index as usize, sure);
            sure = ids.len();
            let at = (next_index as usize).saturating_sub(*back);
            self.pair.command(target, &extend(at, &ids[at..]));
        }
        if script.prepared {
            self.pair.wait(target, is_prepared);
            if self.listen() {
                return true;
            }
        }
        match script.source {
            // The source is lost, and its last words with it.
            0 => self.pair.close(self.serving),
            _ => {
                self.pair.command(self.serving, &SessionCommand::Freeze);
                let frozen = self.pair.wait(self.serving, |e| matches!(e, SessionEvent::Frozen { .. }));
                assert!(!self.listen());
                assert_eq!(frozen, SessionEvent::Frozen { next_index: self.told.len() as u32 });
                assert!(!self.steps(4) && self.told.len() == self.ids().len(), "frozen sessions are silent");
            }
        }
        let ids = self.ids();
        self.epoch += 2;
        let (chosen, other) = if script.source == 1 { (self.serving, Some(target)) } else { (target, None) };
        let at = ids.len().saturating_sub(script.overlap).min(sure);
        self.pair.command(chosen, &release(self.epoch, at, &ids[at..]));
        let moved = self.pair.wait(chosen, is_moved);
        let expect =
            SessionEvent::Moved { to: "cpu".into(), epoch: self.epoch, next_index: ids.len() as u32 };
        assert_eq!(moved, expect);
        if script.source == 2 {
            self.pair.close(self.serving);
        }
        other.into_iter().for_each(|other| self.pair.close(other));
        self.serving = chosen;
        self.listen()
    }
}

#[derive(Clone, Debug)]
struct Script {
    before: usize,
    /// The target is on the source's device.
    same: bool,
    /// How far each extension goes back behind what is known.
    extends: Vec<usize>,
    /// Wait for the last `prepared`.
    prepared: bool,
    /// 0: lost. 1: frozen, and released itself. 2: frozen, and the target is released.
    source: u8,
    overlap: usize,
}

fn scripts() -> impl Strategy<Value = Vec<Script>> {
    let extends = proptest::collection::vec(0_usize..5, 0..3);
    let one = (0_usize..14, any::<bool>(), extends, any::<bool>(), 0_u8..3, 0_usize..30);
    let one = one.prop_map(|(before, same, extends, prepared, source, overlap)| Script {
        before,
        same,
        extends,
        prepared,
        source,
        overlap,
    });
    proptest::collection::vec(one, 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn a_session_says_the_same_however_it_moves(which in 0_u64..40, scripts in scripts()) {
        let expected = undisturbed(mixed(which));
        let mut arbiter = Arbiter::new(mixed(which));
        let ended = scripts.iter().any(|script| arbiter.go(script));
        for _ in 0..4_000 {
            if ended || arbiter.steps(2) { break; }
        }
        prop_assert_eq!(arbiter.told, expected);
    }
}

#[test]
fn a_held_session_prefills_all_but_its_last_token_and_waits() {
    let mut pair = Pair::new();
    let whole = undisturbed(mixed(3));
    let ids: Vec<TokenId> = whole
        .iter()
        .filter_map(|e| if let SessionEvent::Token { id, .. } = e { Some(*id) } else { None })
        .collect();
    assert!(ids.len() > 12, "{ids:?}");
    let spec = SessionSpec { epoch: 1, generated: ids[..4].to_vec(), hold: true, ..mixed(3) };
    let prompt = 5 + (3 * 37) % 90;
    let key = pair.open(1, spec);
    let SessionEvent::Prepared { next_index: 4, rate } = pair.wait(key, is_prepared) else { panic!() };
    assert!(rate > 0.0);
    let batch = &pair.worlds[1].batch;
    assert!(!batch.has_work());
    assert_eq!(batch.computed(&batch.sessions[0]), prompt + 3);
    // What is known is skipped; a gap and a contradiction are refused; an old epoch and a second freeze change nothing.
    pair.command(key, &extend(2, &ids[2..7]));
    let SessionEvent::Prepared { next_index: 7, .. } = pair.wait(key, is_prepared) else { panic!() };
    pair.command(key, &extend(0, &ids[..3]));
    let SessionEvent::Prepared { next_index: 7, .. } = pair.wait(key, is_prepared) else { panic!() };
    pair.command(key, &SessionCommand::Freeze);
    pair.command(key, &release(1, 7, &[]));
    assert!(
        pair.said.iter().all(|(_, event)| matches!(event, SessionEvent::Accepted { .. })),
        "{:?}",
        pair.said
    );
    pair.command(key, &release(5, 7, &ids[7..9]));
    let moved = SessionEvent::Moved { to: "cpu".into(), epoch: 5, next_index: 9 };
    assert_eq!(pair.wait(key, is_moved), moved);
    let done = pair.wait(key, SessionEvent::is_last);
    pair.said.push((key, done));
    assert_eq!(seen(&pair.said), whole[9..]);
}

#[test]
fn tokens_that_do_not_fit_end_the_session() {
    let check = |command: &SessionCommand, expected: &str| {
        let mut pair = Pair::new();
        let key = pair.open(0, SessionSpec { generated: vec![5, 6], hold: true, ..mixed(0) });
        pair.command(key, command);
        let last = pair.wait(key, SessionEvent::is_last);
        let SessionEvent::Failed { code: FailureCode::BadRequest, message, retry } = last else {
            panic!("{last:?}")
        };
        assert!(
            message.contains(expected) && retry == Retry::Elsewhere || message.contains("vocabulary"),
            "{message}"
        );
        let batch = &pair.worlds[0].batch;
        assert!(!batch.has_work() && batch.kv.pages_free() == batch.kv.pages_total());
    };
    check(&extend(3, &[7]), "tokens from index 3 were handed over, and the next one is 2");
    check(&extend(u32::MAX as usize, &[]), "next one is 2");
    check(&extend(1, &[9, 7]), "are not those known here");
    check(&release(1, 0, &[4]), "are not those known here");
    check(&extend(2, &[1024]), "token id 1024 in the tokens handed over is outside the vocabulary");
}

#[test]
fn a_replay_that_contains_the_end_says_it_on_its_release() {
    for (which, generated, fresh, reason) in [
        (0, vec![9; 29], vec![8], FinishReason::Length),
        (3, vec![9; 2], vec![1, 40], FinishReason::Stop),
        (0, vec![9; 30], vec![], FinishReason::Length),
    ] {
        let mut pair = Pair::new();
        let next = generated.len();
        let key = pair.open(0, SessionSpec { generated, hold: true, ..mixed(which) });
        pair.wait(key, is_prepared);
        pair.command(key, &extend(next, &fresh));
        let said = next + fresh.len().min(1);
        let SessionEvent::Prepared { next_index, .. } = pair.wait(key, is_prepared) else { panic!() };
        assert_eq!(next_index as usize, said);
        let batch = &pair.worlds[0].batch;
        assert!(!batch.has_work() && batch.kv.pages_free() == batch.kv.pages_total());
        pair.command(key, &release(2, said, &[]));
        let moved = SessionEvent::Moved { to: "cpu".into(), epoch: 2, next_index: said as u32 };
        assert_eq!(pair.wait(key, is_moved), moved);
        let SessionEvent::Done { reason: found, usage } = pair.wait(key, SessionEvent::is_last) else {
            panic!()
        };
        assert_eq!((found, usage.completion_tokens as usize), (reason, said));
    }
}

#[test]
fn a_replay_stalls_nobody_and_who_waits_for_a_frozen_one_does_not_spin() {
    let mut world = World::new(12, 3);
    let patient = Sampling { max_tokens: Some(80), ignore_eos: true, ..Sampling::default() };
    world.start(1, spec(prompt(1, 20), patient.clone()));
    world.step();
    world.batch.rates = Rates::default();
    (0..30).for_each(|_| {
        let stepped = Stepped { prefill_rows: 16, decode_rows: 0 };
        world.batch.note(stepped, Duration::from_millis(150), &mut Events::new());
    });
    let mut events = Events::new();
    let Input::Tokens(ids) = prompt(2, 65) else { panic!() };
    let target = SessionSpec { hold: true, ..spec(Input::Tokens(ids.clone()), patient.clone()) };
    world.batch.start(Prepared::new(SessionKey(2), target, ids), &mut events);
    for _ in 0..4 {
        let stepped = world.batch.step(&mut world.cpu, &mut events);
        assert_eq!(stepped, Stepped { prefill_rows: 16, decode_rows: 1 });
        world.batch.note(stepped, Duration::from_millis(150), &mut events);
    }
    assert_eq!(events.iter().filter(|(_, event)| is_prepared(event)).count(), 1);
    assert_eq!(world.batch.step(&mut world.cpu, &mut events), Stepped { prefill_rows: 0, decode_rows: 1 });
    // Frozen and prepared ones hold all memory: a third one waits without a step, until one of them goes.
    world.batch.command(SessionKey(1), &SessionCommand::Freeze, &mut events);
    let Input::Tokens(ids) = prompt(3, 50) else { panic!() };
    let third = spec(Input::Tokens(ids.clone()), Sampling { max_tokens: Some(2), ..patient });
    world.batch.start(Prepared::new(SessionKey(3), third, ids), &mut events);
    let mut steps = 0;
    while world.batch.has_work() {
        world.batch.step(&mut world.cpu, &mut events);
        steps += 1;
        assert!(steps < 5);
    }
    assert!(world.batch.cancel(SessionKey(2)) && world.batch.has_work());
    while world.batch.has_work() {
        world.batch.step(&mut world.cpu, &mut events);
    }
    let (last, end) = events.last().unwrap();
    assert!(*last == SessionKey(3) && end.is_last());
}
