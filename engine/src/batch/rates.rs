//! Measured speeds, and how much prefill one step may take so that nobody waits long for it.

use std::time::Duration;

use super::Stepped;

/// The weight of a new measurement. Five steps later the old speed counts a sixth.
const WEIGHT: f64 = 0.3;

/// Rows below which a step says little about the speed of prefill.
pub(super) const TELLING_ROWS: usize = 16;

/// Prefill before any measurement.
const FIRST_CHUNK_TOKENS: usize = 64;

/// Products of fewer rows leave the arithmetic units idle.
const CHUNK_TOKENS_MIN: usize = 16;

/// How long others may wait for their next token because somebody's prompt is read.
const CHUNK_TIME_BESIDE_OTHERS: Duration = Duration::from_millis(150);

/// How long a cancellation may wait, when nobody else is there.
const CHUNK_TIME_ALONE: Duration = Duration::from_millis(500);

/// Moving estimates of a model's speeds on this device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    prefill: Option<f64>,
    decode: Option<f64>,
}

impl Rates {
    /// Takes the measurement of one step.
    pub(crate) fn note(&mut self, stepped: Stepped, took: Duration) {
        let seconds = took.as_secs_f64().max(1e-9);
        if stepped.prefill_rows >= TELLING_ROWS {
            blend(&mut self.prefill, (stepped.prefill_rows + stepped.decode_rows) as f64 / seconds);
        } else if stepped.prefill_rows == 0 && stepped.decode_rows > 0 {
            blend(&mut self.decode, 1.0 / seconds);
        }
    }

    /// Prefill, in tokens each second; zero before any measurement.
    pub(crate) fn prefill(&self) -> f64 {
        self.prefill.unwrap_or(0.0)
    }

    /// Decode of one session, in tokens each second; zero before any measurement.
    pub(crate) fn decode(&self) -> f64 {
        self.decode.unwrap_or(0.0)
    }

    /// Tokens of prefill for the next step, at most `most`.
    pub(crate) fn chunk_tokens(&self, beside_others: bool, most: usize) -> usize {
        let time = if beside_others { CHUNK_TIME_BESIDE_OTHERS } else { CHUNK_TIME_ALONE };
        let tokens = self.prefill.map_or(FIRST_CHUNK_TOKENS, |rate| (rate * time.as_secs_f64()) as usize);
        tokens.clamp(CHUNK_TOKENS_MIN, most.max(CHUNK_TOKENS_MIN))
    }
}

fn blend(estimate: &mut Option<f64>, sample: f64) {
    *estimate = Some(estimate.map_or(sample, |old| old + WEIGHT * (sample - old)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_takes_a_bounded_time() {
        let mut rates = Rates::default();
        assert_eq!(rates.chunk_tokens(true, 480), FIRST_CHUNK_TOKENS);
        let half_a_second = Duration::from_millis(500);
        rates.note(Stepped { prefill_rows: 100, decode_rows: 0 }, half_a_second);
        assert_eq!(
            (rates.prefill(), rates.chunk_tokens(true, 480), rates.chunk_tokens(false, 480)),
            (200.0, 30, 100)
        );
        // A slow device still makes progress, a fast one keeps the bound of rows.
        rates.note(Stepped { prefill_rows: 100, decode_rows: 0 }, Duration::from_secs(1000));
        for _ in 0..40 {
            rates.note(Stepped { prefill_rows: 100, decode_rows: 0 }, Duration::from_secs(1000));
        }
        assert_eq!(rates.chunk_tokens(true, 480), CHUNK_TOKENS_MIN);
        for _ in 0..40 {
            rates.note(Stepped { prefill_rows: 100, decode_rows: 1 }, Duration::from_micros(10));
        }
        assert_eq!(rates.chunk_tokens(true, 480), 480);
        // Only steps without prefill tell the speed of decode.
        assert_eq!(rates.decode(), 0.0);
        rates.note(Stepped { prefill_rows: 0, decode_rows: 8 }, Duration::from_millis(20));
        assert_eq!(rates.decode(), 50.0);
    }
}
