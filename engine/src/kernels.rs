//! CPU kernels, chosen at run time.
//!
//! ```text
//! simd        the few vector operations that kernels are written in: 8 lanes (portable, AVX2) or 16 (AVX-512)
//! linear      rows × weights, in place, for any number of rows; bf16's own dot product in `bf16`
//! attention   one query row, the heads of one key/value head, over pages
//! pointwise   norms, rotation, gating, exponential
//! ```
//!
//! Each kernel is written once, generically, and compiled once for each [`KernelSet`] behind `#[target_feature]`; an
//! `Ops` table holds the compiled functions. What `unsafe` buys: in-place weights at any alignment at the speed of
//! the memory (0.8 of its bandwidth, where safe slices of widened copies would double the bytes).
//!
//! Invariants: **a row's bits depend on that row alone.** Each output element is summed in one order over K, fixed by
//! the kernel set (lane sums inside blocks of K, one tree across lanes, blocks in order), whatever the number of rows,
//! their tiling, and the thread. Different sets are different [numerics classes](crate::numerics).
//!
//! It deliberately does **not** allocate, start threads, or read the environment.

pub(crate) mod attention;
mod bf16;
pub(crate) mod linear;
mod ops;
pub(crate) mod pointwise;
mod simd;

use std::fmt;
use std::str::FromStr;

pub(crate) use ops::Ops;

/// Sets of kernels by what they need of the CPU, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KernelSet {
    /// Portable.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL; bf16 is widened by a shift.
    Avx512,
    /// The same with AVX512-BF16: activations are rounded to bf16 before they meet bf16 weights.
    Avx512Bf16,
}

impl KernelSet {
    /// All of them, slowest first.
    pub const ALL: [KernelSet; 4] =
        [KernelSet::Scalar, KernelSet::Avx2, KernelSet::Avx512, KernelSet::Avx512Bf16];

    /// Those that this machine can run, slowest first.
    pub fn available() -> Vec<KernelSet> {
        Self::ALL.into_iter().filter(|set| set.is_available()).collect()
    }

    /// The fastest that this machine can run.
    pub fn best() -> KernelSet {
        Self::available().last().copied().unwrap_or(KernelSet::Scalar)
    }

    /// Its name in settings and numerics classes.
    pub const fn name(self) -> &'static str {
        match self {
            KernelSet::Scalar => "scalar",
            KernelSet::Avx2 => "avx2",
            KernelSet::Avx512 => "avx512",
            KernelSet::Avx512Bf16 => "avx512bf16",
        }
    }

    /// Whether this machine can run it.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        let avx2 = || {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        };
        let avx512 = || {
            avx2()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        };
        match self {
            KernelSet::Scalar => true,
            KernelSet::Avx2 => avx2(),
            KernelSet::Avx512 => avx512(),
            KernelSet::Avx512Bf16 => avx512() && is_x86_feature_detected!("avx512bf16"),
        }
    }

    /// Whether this machine can run it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == KernelSet::Scalar
    }
}

impl fmt::Display for KernelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A kernel set that does not exist, or that this machine cannot run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// No such name.
    #[error("`{name}` is no kernel set; choose scalar, avx2, avx512 or avx512bf16")]
    Unknown {
        /// As given.
        name: String,
    },
    /// The CPU lacks the instructions.
    #[error("this CPU cannot run the `{set}` kernels; the best it can is `{}`", KernelSet::best())]
    Unavailable {
        /// Which.
        set: KernelSet,
    },
}

impl FromStr for KernelSet {
    type Err = KernelError;
    fn from_str(name: &str) -> Result<Self, KernelError> {
        Self::ALL
            .into_iter()
            .find(|s| s.name() == name)
            .ok_or_else(|| KernelError::Unknown { name: name.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for set in KernelSet::ALL {
            assert_eq!(set.name().parse(), Ok(set));
        }
        assert!("sse9".parse::<KernelSet>().is_err());
        assert!(KernelSet::available().contains(&KernelSet::best()));
        assert_eq!(KernelSet::available()[0], KernelSet::Scalar);
    }
}
