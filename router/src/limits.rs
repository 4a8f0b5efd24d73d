//! What one caller may use: requests and tokens in a minute, and requests at once.
//!
//! A minute's worth is there at first and comes back evenly. A request is admitted while anything is left; its tokens
//! are taken as they come, so that the last one admitted may overdraw, and the next waits longer for it.
//!
//! Each router counts for itself: behind two of them a caller has twice as much. It deliberately does **not** know
//! keys or models, and does not queue: who is over a limit hears when to come back.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Deserialize;
use tokio::time::Instant;

/// The bounds of one caller; absent: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Limits {
    pub(crate) requests_per_minute: Option<NonZeroU32>,
    pub(crate) tokens_per_minute: Option<NonZeroU32>,
    pub(crate) max_concurrency: Option<NonZeroU32>,
}

/// A limit that is reached.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Over {
    /// Which, for people.
    pub(crate) what: String,
    /// Until it frees; of those at once nobody knows.
    pub(crate) seconds: Option<f64>,
}

/// A minute's worth of something.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    per_second: f64,
    full: f64,
    /// Below zero: overdrawn.
    level: f64,
    at: Instant,
}

impl Bucket {
    fn new(per_minute: NonZeroU32, now: Instant) -> Self {
        let full = f64::from(per_minute.get());
        Bucket { per_second: full / 60.0, full, level: full, at: now }
    }

    fn take(&mut self, amount: f64, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.level = (self.level + passed * self.per_second).min(self.full) - amount;
        self.at = self.at.max(now);
    }

    /// Seconds until one is there; none: it is.
    fn wait(&mut self, now: Instant) -> Option<f64> {
        self.take(0.0, now);
        (self.level < 1.0).then(|| (1.0 - self.level) / self.per_second)
    }
}

#[derive(Debug)]
struct Used {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    open: u32,
}

/// What a caller has used of its limits.
#[derive(Debug)]
pub(crate) struct Account {
    limits: Limits,
    used: Mutex<Used>,
}

/// A request that was admitted. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Permit(Arc<Account>);

impl Account {
    /// None where there are no limits.
    pub(crate) fn new(limits: Limits, now: Instant) -> Option<Arc<Self>> {
        let bucket = |per_minute: Option<NonZeroU32>| per_minute.map(|n| Bucket::new(n, now));
        let (requests, tokens) = (bucket(limits.requests_per_minute), bucket(limits.tokens_per_minute));
        let used = Mutex::new(Used { requests, tokens, open: 0 });
        (limits != Limits::default()).then(|| Arc::new(Account { limits, used }))
    }

    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a request, or says which limit is reached; then nothing is taken.
    pub(crate) fn admit(self: &Arc<Self>, now: Instant) -> Result<Permit, Over> {
        let mut used = self.used();
        let Limits { requests_per_minute, tokens_per_minute, max_concurrency } = self.limits;
        let over = |limit: Option<NonZeroU32>, what: &str, seconds| Over {
            what: format!("{} {what}", limit.map_or(0, NonZeroU32::get)),
            seconds,
        };
        if max_concurrency.is_some_and(|max| used.open >= max.get()) {
            return Err(over(max_concurrency, "requests at once", None));
        }
        if let Some(seconds) = used.requests.as_mut().and_then(|bucket| bucket.wait(now)) {
            return Err(over(requests_per_minute, "requests in a minute", Some(seconds)));
        }
        if let Some(seconds) = used.tokens.as_mut().and_then(|bucket| bucket.wait(now)) {
            return Err(over(tokens_per_minute, "tokens in a minute", Some(seconds)));
        }
        if let Some(requests) = &mut used.requests {
            requests.take(1.0, now);
        }
        used.open += 1;
        drop(used);
        Ok(Permit(self.clone()))
    }
}

impl Permit {
    /// So many tokens were read or said; fewer than none: too many were counted before.
    pub(crate) fn spend(&self, tokens: i64, now: Instant) {
        if let Some(bucket) = &mut self.0.used().tokens {
            bucket.take(tokens as f64, now);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.used().open -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn account(requests: u32, tokens: u32, at_once: u32, now: Instant) -> Arc<Account> {
        let limits = Limits {
            requests_per_minute: NonZeroU32::new(requests),
            tokens_per_minute: NonZeroU32::new(tokens),
            max_concurrency: NonZeroU32::new(at_once),
        };
        Account::new(limits, now).unwrap()
    }

    fn over(account: &Arc<Account>, now: Instant) -> (String, Option<u64>) {
        let over = account.admit(now).unwrap_err();
        (over.what, over.seconds.map(|s| s.round() as u64))
    }

    #[test]
    fn a_minutes_requests_come_back_evenly() {
        let now = Instant::now();
        let account = account(2, 0, 0, now);
        assert!(account.admit(now).is_ok() && account.admit(now).is_ok());
        assert_eq!(over(&account, now), ("2 requests in a minute".into(), Some(30)));
        let later = now + Duration::from_secs(20);
        assert_eq!(over(&account, later).1, Some(10), "a refusal takes nothing");
        let later = now + Duration::from_secs(30);
        assert!(account.admit(later).is_ok() && account.admit(later).is_err());
        // No more than a minute's worth is saved.
        let later = now + Duration::from_secs(3600);
        assert!(
            account.admit(later).is_ok() && account.admit(later).is_ok() && account.admit(later).is_err()
        );
    }

    #[test]
    fn tokens_may_be_overdrawn_once_and_are_waited_for() {
        let now = Instant::now();
        let account = account(0, 60, 0, now);
        let permit = account.admit(now).unwrap();
        permit.spend(100, now);
        assert_eq!(over(&account, now), ("60 tokens in a minute".into(), Some(41)));
        permit.spend(-41, now);
        assert!(account.admit(now).is_ok());
    }

    #[test]
    fn at_once_means_until_it_is_dropped() {
        let now = Instant::now();
        let account = account(0, 0, 1, now);
        let permit = account.admit(now).unwrap();
        assert_eq!(over(&account, now), ("1 requests at once".into(), None));
        drop(permit);
        assert!(account.admit(now).is_ok());
        assert!(Account::new(Limits::default(), now).is_none());
    }
}
