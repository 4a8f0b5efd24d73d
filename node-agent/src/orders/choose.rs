//! On which device a session begins: pure. The one whose first token is predicted to come earliest; where that one is
//! not ready yet, the session waits for it, and looks again when it should be.

use std::time::Duration;

use tokio::time::Instant;

/// The prompt that the agent prepares for, in tokens: a short chat.
const PROMPT_TOKENS: u32 = 64;

/// Something that should take so long, since then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Expected {
    pub(crate) since: Instant,
    pub(crate) takes: Duration,
}

impl Expected {
    /// What is left of it. What is late is expected to take as long again as it is late: then another device may win.
    pub(crate) fn left(&self, now: Instant) -> Duration {
        let elapsed = now.saturating_duration_since(self.since);
        if elapsed < self.takes { self.takes - elapsed } else { (elapsed - self.takes).max(self.takes / 10) }
    }
}

/// What a device offers a session.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Offer {
    /// Until it takes the session; zero: now.
    pub(crate) ready_in: Duration,
    /// Tokens each second, measured or assumed; more than zero.
    pub(crate) prefill: f64,
    /// It takes no such session, or no more of them.
    pub(crate) full: bool,
}

impl Offer {
    /// Until the first token of a session with such a prompt.
    pub(crate) fn first_token(&self, prompt_tokens: u32) -> Duration {
        let prefill = f64::from(prompt_tokens) / self.prefill;
        self.ready_in.saturating_add(Duration::try_from_secs_f64(prefill).unwrap_or(Duration::MAX))
    }
}

/// What a session does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Begin there.
    Begin(usize),
    /// Wait for a change, and look again after this in any case.
    Wait(Duration),
}

/// Whether the CPU is to serve until `home` is ready: a session asks for it, or a short prompt's first token comes
/// earlier from there.
pub(crate) fn serves_meanwhile(cpu: Offer, home: Offer, wished: bool) -> bool {
    wished || cpu.first_token(PROMPT_TOKENS) < home.first_token(PROMPT_TOKENS)
}

/// Looking again is cheap, but not free.
const LOOK_MIN: Duration = Duration::from_millis(10);
/// And what nobody predicts is told by a change.
const LOOK_MAX: Duration = Duration::from_secs(5);

/// Chooses. Of equals the first one.
pub(crate) fn choose(offers: &[Offer], prompt_tokens: u32) -> Choice {
    let open = offers.iter().enumerate().filter(|(_, offer)| !offer.full);
    let Some((best, offer)) = open.min_by_key(|(_, offer)| offer.first_token(prompt_tokens)) else {
        return Choice::Wait(LOOK_MAX);
    };
    if offer.ready_in.is_zero() {
        Choice::Begin(best)
    } else {
        Choice::Wait(offer.ready_in.clamp(LOOK_MIN, LOOK_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(ready_in_ms: u64, prefill: f64) -> Offer {
        Offer { ready_in: Duration::from_millis(ready_in_ms), prefill, full: false }
    }

    #[test]
    fn the_earliest_first_token_wins() {
        let check = |cpu: (u64, f64), sim: (u64, f64), prompt, expect: &str| {
            let got = match choose(&[offer(sim.0, sim.1), offer(cpu.0, cpu.1)], prompt) {
                Choice::Begin(0) => "sim",
                Choice::Begin(_) => "cpu",
                Choice::Wait(_) => "wait",
            };
            assert_eq!(got, expect, "{cpu:?} {sim:?} {prompt}");
        };
        check((0, 200.0), (4000, 800.0), 64, "cpu");
        // A long prompt: the CPU would not be done before the other one has overtaken it.
        check((0, 200.0), (4000, 800.0), 4000, "wait");
        check((0, 200.0), (0, 800.0), 64, "sim");
        check((500, 200.0), (600, 800.0), 64, "wait");
        check((0, 200.0), (300, 800.0), 64, "cpu");
        check((0, 200.0), (300, 800.0), 128, "wait");
    }

    #[test]
    fn a_cpu_too_slow_to_pay_serves_whoever_asks_for_it() {
        let (slow, fast, home) = (offer(0, 10.0), offer(0, 200.0), offer(4000, 800.0));
        let served = [(slow, false), (slow, true), (fast, false)];
        assert_eq!(served.map(|(cpu, wished)| serves_meanwhile(cpu, home, wished)), [false, true, true]);
    }

    #[test]
    fn who_is_full_is_not_chosen() {
        let full = Offer { full: true, ..offer(0, 200.0) };
        assert_eq!(choose(&[full], 64), Choice::Wait(LOOK_MAX));
        assert_eq!(choose(&[offer(900, 800.0), full], 64), Choice::Wait(Duration::from_millis(900)));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_late_is_expected_to_be_later_still() {
        let start = Expected { since: Instant::now(), takes: Duration::from_secs(4) };
        let left = |after: f64| start.left(start.since + Duration::from_secs_f64(after)).as_secs_f64();
        assert_eq!((left(0.0), left(3.0)), (4.0, 1.0));
        assert_eq!((left(4.0), left(7.0)), (0.4, 3.0));
    }
}
