//! Progress of long work: a bar with rate and remaining time on a terminal, a plain line now and then elsewhere.

use std::io::IsTerminal as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pilotlight_domain::{Bandwidth, ByteCount};

/// Off a terminal a line is written each time so much more is done.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// One piece of work, measured in bytes. All output goes to standard error.
pub(crate) struct Progress {
    what: String,
    started: Instant,
    bar: Option<ProgressBar>,
    last_line: Mutex<Instant>,
}

impl Progress {
    /// `quiet` shows nothing.
    pub(crate) fn new(what: &str, quiet: bool) -> Self {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
            let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.set_message(what.to_owned());
            bar
        });
        let now = Instant::now();
        // A quiet piece of work never comes to its first line.
        let last = if quiet { now + Duration::from_secs(u64::from(u32::MAX)) } else { now };
        Progress { what: what.to_owned(), started: now, bar, last_line: Mutex::new(last) }
    }

    /// So much is done.
    #[expect(clippy::print_stderr, reason = "progress is for the person at the terminal")]
    pub(crate) fn set(&self, done: ByteCount, total: ByteCount) {
        if let Some(bar) = &self.bar {
            bar.set_length(total.get());
            bar.set_position(done.get());
            return;
        }
        let Ok(mut last) = self.last_line.lock() else { return };
        if last.checked_add(LINE_EVERY).is_some_and(|due| Instant::now() >= due) {
            *last = Instant::now();
            let rate = Bandwidth::measured(done, self.started.elapsed());
            let left = total.saturating_sub(done).at(rate);
            eprintln!("{}: {done} of {total}, {rate}, {} s left", self.what, left.as_secs());
        }
    }

    /// Takes the bar away.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}
