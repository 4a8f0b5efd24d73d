//! A faulty disk, as a plan: which reads go wrong, and how. A test's reader asks it what becomes of each read and does
//! that; the plan itself touches nothing.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// What becomes of a read.
#[derive(Clone, Debug)]
pub enum DiskFault {
    /// Only so many bytes come.
    Short(usize),
    /// The system call fails with this error number.
    Error(i32),
    /// One bit of the byte at this place of the read is wrong.
    Flip(usize),
    /// Nothing comes before the gate opens.
    Stall(Gate),
}

#[derive(Debug)]
struct Rule {
    file: u32,
    at: u64,
    times: u32,
    fault: DiskFault,
}

/// What goes wrong, and where. Clones share one plan.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan(Arc<Mutex<Vec<Rule>>>);

impl FaultPlan {
    /// A healthy disk.
    pub fn new() -> Self {
        Self::default()
    }

    /// The first `times` reads that cover byte `at` of file number `file` go wrong so.
    #[must_use]
    pub fn with(self, file: u32, at: u64, times: u32, fault: DiskFault) -> Self {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Rule { file, at, times, fault });
        self
    }

    /// What becomes of this read.
    pub fn on_read(&self, file: u32, offset: u64, len: usize) -> Option<DiskFault> {
        let mut rules = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let hit =
            |r: &&mut Rule| r.times > 0 && r.file == file && (offset..offset + len as u64).contains(&r.at);
        let rule = rules.iter_mut().find(hit)?;
        rule.times -= 1;
        Some(rule.fault.clone())
    }
}

/// Closed until somebody opens it. Clones are one gate.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// Closed.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens it, for ever.
    pub fn open(&self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }

    /// Whether it is open.
    pub fn is_open(&self) -> bool {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it is.
    pub fn wait(&self) {
        let mut open = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        while !*open {
            open = self.0.1.wait(open).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_where_and_as_often_as_planned() {
        let plan = FaultPlan::new().with(1, 100, 2, DiskFault::Short(3));
        assert!(plan.on_read(0, 0, 200).is_none(), "another file");
        assert!(plan.on_read(1, 101, 200).is_none(), "another place");
        for _ in 0..2 {
            assert!(matches!(plan.on_read(1, 0, 101), Some(DiskFault::Short(3))));
        }
        assert!(plan.on_read(1, 0, 101).is_none(), "twice only");
    }
}
