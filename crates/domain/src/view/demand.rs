//! Demand for one model, and its recent past for the autoscaler's windows.

use std::collections::VecDeque;
use std::time::Duration;

use crate::Timestamp;

/// What routers say of one model, summed over those that were heard of lately.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    /// Requests being answered.
    pub in_flight: u32,
    /// Requests that wait for a replica.
    pub held: u32,
    /// When the last body ended; none: never, as far as is known.
    pub quiet_since: Option<Timestamp>,
    /// The past, for the windows.
    pub history: LoadHistory,
}

impl Demand {
    /// Requests that want a replica now.
    pub const fn concurrency(&self) -> u32 {
        self.in_flight.saturating_add(self.held)
    }

    /// Takes over a new sum. `ended` is when the last body ended, where a router said so: a request may come and go
    /// between two reports. `window` is the longest one that will be asked for.
    pub fn set(
        &mut self,
        in_flight: u32,
        held: u32,
        ended: Option<Timestamp>,
        now: Timestamp,
        window: Duration,
    ) {
        let fell = self.concurrency() > 0 && in_flight.saturating_add(held) == 0;
        self.quiet_since = self.quiet_since.max(ended.or(fell.then_some(now)));
        (self.in_flight, self.held) = (in_flight, held);
        self.history.observe(self.concurrency(), now, window);
    }
}

/// So many buckets cover the longest window: 60 s come to about a second each, and memory is 65 × 24 bytes.
const BUCKETS: u32 = 64;

#[derive(Clone, Copy, Debug)]
struct Bucket {
    number: u64,
    /// Concurrency × seconds.
    area: f64,
    peak: u32,
}

/// Concurrency as a step function of time, kept in buckets: means and peaks over the recent past.
#[derive(Clone, Debug, Default)]
pub struct LoadHistory {
    width: Duration,
    buckets: VecDeque<Bucket>,
    begun: Option<Timestamp>,
    last: (Timestamp, u32),
}

impl LoadHistory {
    /// From `now` on the concurrency is `value`.
    pub fn observe(&mut self, value: u32, now: Timestamp, window: Duration) {
        let width = (window / BUCKETS).max(Duration::from_millis(50));
        if self.begun.is_none() || self.width != width {
            *self = LoadHistory { width, begun: Some(now), last: (now, value), buckets: VecDeque::new() };
        }
        self.advance(now);
        self.last = (self.last.0.max(now), value);
        self.add(now, value, Duration::ZERO);
    }

    /// The mean over the last `window`, or over what is known of it.
    pub fn mean(&self, window: Duration, now: Timestamp) -> f64 {
        let Some(begun) = self.begun else { return 0.0 };
        let span = window.min(now.since(begun)).as_secs_f64();
        if span <= 0.0 {
            return f64::from(self.last.1);
        }
        let from = Timestamp::from_micros(now.as_micros().saturating_sub(micros(window)));
        let past: f64 = self
            .buckets
            .iter()
            .map(|bucket| {
                // The oldest bucket counts with the part that lies in the window.
                let starts = Timestamp::from_micros(bucket.number * micros(self.width));
                let ends = starts + self.width;
                let inside = ends.since(from.max(starts)).as_secs_f64() / self.width.as_secs_f64();
                bucket.area * inside.clamp(0.0, 1.0)
            })
            .sum();
        let tail = f64::from(self.last.1) * now.since(self.last.0.max(from)).as_secs_f64();
        // Pro-rating a bucket must not invent load that never was.
        ((past + tail) / span).min(f64::from(self.peak(window, now)))
    }

    /// The highest value within the last `window`.
    pub fn peak(&self, window: Duration, now: Timestamp) -> u32 {
        let from = now.as_micros().saturating_sub(micros(window)) / micros(self.width).max(1);
        let past = self.buckets.iter().filter(|bucket| bucket.number >= from).map(|bucket| bucket.peak);
        past.chain([self.last.1]).max().unwrap_or(0)
    }

    /// Writes the last value into the buckets up to `now`.
    fn advance(&mut self, now: Timestamp) {
        let (mut at, value) = self.last;
        let width = micros(self.width);
        let oldest = (now.as_micros() / width).saturating_sub(u64::from(BUCKETS));
        at = at.max(Timestamp::from_micros(oldest * width));
        while at < now {
            let ends = Timestamp::from_micros((at.as_micros() / width + 1) * width).min(now);
            self.add(at, value, ends.since(at));
            at = ends;
        }
        while self.buckets.front().is_some_and(|bucket| bucket.number < oldest) {
            self.buckets.pop_front();
        }
    }

    fn add(&mut self, at: Timestamp, value: u32, time: Duration) {
        let number = at.as_micros() / micros(self.width);
        let area = f64::from(value) * time.as_secs_f64();
        match self.buckets.back_mut() {
            Some(bucket) if bucket.number >= number => {
                bucket.area += area;
                bucket.peak = bucket.peak.max(value);
            }
            _ => self.buckets.push_back(Bucket { number, area, peak: value }),
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_secs(60);

    fn at(seconds: f64) -> Timestamp {
        Timestamp::from_micros(1_000_000_000 + (seconds * 1e6) as u64)
    }

    #[test]
    fn means_and_peaks_forget() {
        let mut history = LoadHistory::default();
        history.observe(4, at(0.0), WINDOW);
        assert_eq!(history.mean(WINDOW, at(0.0)), 4.0);
        history.observe(0, at(10.0), WINDOW);
        let close = |a: f64, b: f64| (a - b).abs() < 0.15;
        assert!(close(history.mean(WINDOW, at(20.0)), 2.0), "{}", history.mean(WINDOW, at(20.0)));
        assert!(close(history.mean(Duration::from_secs(5), at(20.0)), 0.0));
        assert_eq!(history.peak(Duration::from_secs(30), at(20.0)), 4);
        assert_eq!(history.peak(Duration::from_secs(5), at(20.0)), 0);
        history.observe(0, at(75.0), WINDOW);
        assert!(close(history.mean(WINDOW, at(75.0)), 0.0));
        assert_eq!(history.peak(WINDOW, at(75.0)), 0);
    }

    #[test]
    fn memory_is_bounded_however_often_it_is_told() {
        let mut history = LoadHistory::default();
        for i in 0..100_000 {
            history.observe(i % 7, at(f64::from(i) * 0.01), WINDOW);
        }
        assert!(history.buckets.len() <= BUCKETS as usize + 1, "{}", history.buckets.len());
    }

    #[test]
    fn a_clock_that_jumps_does_no_harm() {
        let mut history = LoadHistory::default();
        history.observe(3, at(100.0), WINDOW);
        history.observe(3, at(50.0), WINDOW);
        history.observe(0, at(1e6), WINDOW);
        assert!(history.mean(WINDOW, at(1e6)) <= 3.0);
    }

    #[test]
    fn the_quiet_begins_when_the_last_request_ends() {
        let mut demand = Demand::default();
        demand.set(0, 2, None, at(0.0), WINDOW);
        assert_eq!((demand.concurrency(), demand.quiet_since), (2, None));
        demand.set(0, 0, None, at(3.0), WINDOW);
        assert_eq!(demand.quiet_since, Some(at(3.0)), "nobody said when");
        demand.set(1, 0, None, at(4.0), WINDOW);
        demand.set(0, 0, Some(at(4.5)), at(5.0), WINDOW);
        assert_eq!(demand.quiet_since, Some(at(4.5)), "when it ended, not when that was told");
        demand.set(0, 0, Some(at(5.5)), at(6.0), WINDOW);
        assert_eq!(demand.quiet_since, Some(at(5.5)), "one that came and went between two reports");
    }
}
