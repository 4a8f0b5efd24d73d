//! Numerics classes: outputs are byte-identical inside one class, greedy and sampled, whatever the batch, the number
//! of threads, and the split between prefill and decode.
//!
//! A class is a back end, a kernel set, and a version that changes whenever any kernel's bits change. The digest of
//! the model is not in it: who compares classes compares digests as well.

use crate::kernels::KernelSet;

/// Counts changes of any CPU kernel's results.
pub const KERNEL_VERSION: u32 = 1;

/// The class of a kernel set on the CPU, for example `cpu-avx512bf16-1`.
pub fn class(set: KernelSet) -> String {
    format!("cpu-{}-{KERNEL_VERSION}", set.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_is_its_own_class() {
        let classes: std::collections::BTreeSet<String> = KernelSet::ALL.into_iter().map(class).collect();
        assert_eq!(classes.len(), KernelSet::ALL.len());
        assert!(classes.contains("cpu-avx512bf16-1"));
    }
}
