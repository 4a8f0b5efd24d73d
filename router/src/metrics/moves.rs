//! What the router counts of sessions that move, and of those that could not.

use std::time::Duration;

use pilotlight_domain::replay::NotMoved;
use pilotlight_kit::metrics::Register;
use prometheus::{HistogramVec, IntCounter, IntCounterVec};

/// Two decode steps up to a worker's restart, or a node's.
const PAUSE_BUCKETS: &[f64] =
    &[0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0];

/// See the module.
#[derive(Debug)]
pub(crate) struct Moves {
    moved: IntCounterVec,
    given_up: IntCounterVec,
    replayed_tokens: IntCounter,
    pause_seconds: HistogramVec,
    sessions_lost: IntCounter,
}

impl Moves {
    pub(super) fn register(r: &Register<'_>) -> prometheus::Result<Self> {
        let moved = r.counters(
            "moves_total",
            "Moves of sessions; class: whether source and target are of one numerics class",
            &["kind", "class"],
        )?;
        let pause_seconds = r.histograms(
            "move_pause_seconds",
            "What a client sees of a move: last token before it to the first token after it",
            PAUSE_BUCKETS,
            &["kind"],
        )?;
        for kind in ["handover", "migration", "recovery"] {
            pause_seconds.with_label_values(&[kind]);
            for class in ["same", "other"] {
                moved.with_label_values(&[kind, class]);
            }
        }
        let given_up = r.counters_of(
            "moves_given_up_total",
            "Moves that were refused or given up, by reason; their sessions went on where they were",
            "reason",
            &[
                "busy",
                "too_often",
                "too_soon",
                "too_long",
                "finished",
                "too_slow",
                "target_lost",
                "timed_out",
                "source_lost",
                "aborted",
            ],
        )?;
        let replayed_tokens =
            r.counter("replayed_tokens_total", "Tokens that moves computed a second time")?;
        let sessions_lost = r.counter(
            "sessions_lost_total",
            "Sessions that ended with an error because no replica could take them over",
        )?;
        Ok(Moves { moved, given_up, replayed_tokens, pause_seconds, sessions_lost })
    }

    /// A session moved.
    pub(crate) fn moved(&self, kind: &str, same_class: bool, replayed: u32, pause: Duration) {
        self.moved.with_label_values(&[kind, if same_class { "same" } else { "other" }]).inc();
        self.replayed_tokens.inc_by(replayed.into());
        self.pause_seconds.with_label_values(&[kind]).observe(pause.as_secs_f64());
    }

    /// A session did not move.
    pub(crate) fn not_moved(&self, why: &NotMoved) {
        let reason = match why {
            NotMoved::Busy => "busy",
            NotMoved::TooOften => "too_often",
            NotMoved::TooSoon => "too_soon",
            NotMoved::TooLong => "too_long",
            NotMoved::Finished => "finished",
            NotMoved::TooSlow => "too_slow",
            NotMoved::TargetLost => "target_lost",
            NotMoved::TimedOut => "timed_out",
            NotMoved::SourceLost => "source_lost",
            NotMoved::Aborted => "aborted",
        };
        self.given_up.with_label_values(&[reason]).inc();
    }

    /// A session could not be recovered.
    pub(crate) fn lost_for_good(&self) {
        self.sessions_lost.inc();
    }
}
