//! That the step thread goes on, said within a step that takes long: a long prompt on a slow processor may take a
//! minute, and an agent cannot tell that from a thread that hangs.
//!
//! Invariant: only the step thread says it, as it says everything else that leaves the worker: whoever hears anything
//! knows that this thread, and not merely a reader, went on.

use std::sync::Arc;
use std::time::Duration;

use super::clock::Instant;
use super::exchange::Exchange;

/// So often within a step; a tenth of an agent's patience.
pub(super) const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// Asked after each layer, and while a simulated device takes its time.
pub(super) struct Alive {
    exchange: Arc<Exchange>,
    said: Instant,
}

impl Alive {
    pub(super) fn new(exchange: Arc<Exchange>, now: Instant) -> Self {
        Alive { exchange, said: now }
    }

    /// The step has come further.
    pub(super) fn goes_on(&mut self, now: Instant) {
        if now.saturating_duration_since(self.said) >= ALIVE_EVERY {
            self.said = now;
            self.exchange.say_alive();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::FromWorker;
    use crate::worker::clock::MachineClock;

    #[test]
    fn a_long_step_says_once_a_second_that_it_goes_on_and_never_piles_it_up() {
        let (exchange, start) = (Arc::new(Exchange::new(Arc::new(MachineClock::default()))), Instant::now());
        let mut alive = Alive::new(exchange.clone(), start);
        let at = |millis| start + Duration::from_millis(millis);
        for millis in (0..1000).step_by(10) {
            alive.goes_on(at(millis));
        }
        assert_eq!(exchange.waiting(), []);
        // Nobody reads for a while: one is enough.
        for millis in (1000..5000).step_by(10) {
            alive.goes_on(at(millis));
        }
        assert_eq!(exchange.waiting(), [FromWorker::Pong]);
        alive.goes_on(at(4900));
        assert_eq!(exchange.waiting(), []);
        alive.goes_on(at(5000));
        assert_eq!(exchange.waiting(), [FromWorker::Pong]);
    }
}
