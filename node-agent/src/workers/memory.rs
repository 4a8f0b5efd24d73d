//! A device's own memory: weights and KV pages of the models on it never exceed it. A device without memory of its
//! own (the CPU, which uses the host pool) takes everything: the pool is bounded already.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pilotlight_domain::ByteCount;

use crate::tiers::policy::NoRoom;

/// Shared by whoever puts models on the device. Cheap to clone.
#[derive(Clone)]
pub(crate) struct DeviceMemory {
    capacity: Option<ByteCount>,
    used: Arc<Mutex<ByteCount>>,
}

impl DeviceMemory {
    /// `None`: it has none of its own.
    pub(crate) fn new(capacity: Option<ByteCount>) -> Self {
        DeviceMemory { capacity, used: Arc::default() }
    }

    /// Zero where it has none of its own.
    pub(crate) fn capacity(&self) -> ByteCount {
        self.capacity.unwrap_or_default()
    }

    pub(crate) fn used(&self) -> ByteCount {
        *self.lock()
    }

    /// Never waits.
    ///
    /// # Errors
    /// When it does not fit, now or ever.
    pub(crate) fn reserve(&self, need: ByteCount) -> Result<DeviceReservation, NoRoom> {
        let Some(capacity) = self.capacity else {
            return Ok(DeviceReservation { memory: self.clone(), bytes: ByteCount::ZERO });
        };
        if need > capacity {
            return Err(NoRoom::Never { need, capacity });
        }
        let mut used = self.lock();
        let available = capacity.saturating_sub(*used);
        if need > available {
            return Err(NoRoom::Now { need, available });
        }
        *used += need;
        drop(used);
        Ok(DeviceReservation { memory: self.clone(), bytes: need })
    }

    fn lock(&self) -> MutexGuard<'_, ByteCount> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Taken until it is dropped.
pub(crate) struct DeviceReservation {
    memory: DeviceMemory,
    bytes: ByteCount,
}

impl DeviceReservation {
    /// How many of these pieces would fit beside what is taken.
    pub(crate) fn more(&self, piece: ByteCount, wanted: u32) -> u32 {
        let Some(capacity) = self.memory.capacity else { return wanted };
        let free = capacity.saturating_sub(self.memory.used()).get() / piece.get().max(1);
        wanted.min(u32::try_from(free).unwrap_or(u32::MAX))
    }

    /// Takes further bytes; two at once may overshoot by one grant, which the next one waits for.
    pub(crate) fn take(&mut self, bytes: ByteCount) {
        if self.memory.capacity.is_some() {
            *self.memory.lock() += bytes;
            self.bytes += bytes;
        }
    }
}

impl Drop for DeviceReservation {
    fn drop(&mut self) {
        let mut used = self.memory.lock();
        *used = used.saturating_sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_never_promised_twice() {
        let mib = ByteCount::from_mib;
        let memory = DeviceMemory::new(Some(mib(100)));
        assert!(matches!(memory.reserve(mib(101)), Err(NoRoom::Never { .. })));
        let mut first = memory.reserve(mib(60)).ok().unwrap();
        assert!(
            matches!(memory.reserve(mib(41)), Err(NoRoom::Now { available, .. }) if available == mib(40))
        );
        assert_eq!(first.more(mib(8), 9), 5);
        first.take(mib(8));
        assert_eq!((memory.used(), first.more(mib(8), 9)), (mib(68), 4));
        drop(first);
        assert_eq!(memory.used(), ByteCount::ZERO);
    }

    #[test]
    fn a_device_without_memory_of_its_own_takes_everything() {
        let memory = DeviceMemory::new(None);
        let mut all = memory.reserve(ByteCount::new(u64::MAX)).ok().unwrap();
        all.take(ByteCount::from_gib(1));
        assert_eq!((all.more(ByteCount::from_mib(8), 7), memory.used()), (7, ByteCount::ZERO));
    }
}
