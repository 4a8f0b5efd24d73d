//! The budget of retries: at most a fifth of the requests, so that a fleet that fails is not asked three times as
//! often for it.

use std::sync::atomic::{AtomicI64, Ordering};

/// What a request pays in, in hundredths of a retry.
const DEPOSIT: i64 = 20;
const RETRY: i64 = 100;
/// A router with little to do may try ten times in a row.
const MOST: i64 = 10 * RETRY;

/// See the module.
#[derive(Debug)]
pub(crate) struct RetryBudget(AtomicI64);

impl RetryBudget {
    pub(crate) fn new() -> Self {
        RetryBudget(AtomicI64::new(MOST))
    }

    /// A request came.
    pub(crate) fn deposit(&self) {
        self.change(|have| Some((have + DEPOSIT).min(MOST)));
    }

    /// Takes one retry, if there is one.
    pub(crate) fn take(&self) -> bool {
        self.change(|have| (have >= RETRY).then(|| have - RETRY))
    }

    fn change(&self, change: impl FnMut(i64) -> Option<i64>) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_a_fifth_of_the_requests_at_most() {
        let budget = RetryBudget::new();
        assert_eq!((0..100).filter(|_| budget.take()).count(), 10);
        let mut retries = 0;
        for _ in 0..1_000 {
            budget.deposit();
            retries += usize::from(budget.take());
        }
        assert_eq!(retries, 200);
        (0..1_000).for_each(|_| budget.deposit());
        assert_eq!((0..100).filter(|_| budget.take()).count(), 10);
    }
}
