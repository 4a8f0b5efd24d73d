//! The table of compiled kernels of a set.

use super::attention::{Attention, attend};
use super::linear::{Product, multiply_adds, product};
use super::simd::{Portable, Simd};
use super::{KernelError, KernelSet, pointwise};
use crate::weights::WeightDtype;

/// Kernels of one set. All are unsafe for one reason in common: the CPU must have the set's instructions, which
/// [`Ops::of`] has checked for whoever got the table from there.
pub(crate) struct Ops {
    pub set: KernelSet,
    product: unsafe fn(&Product),
    attend: unsafe fn(&Attention<'_>),
    rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
    round_row: unsafe fn(&[f32], &mut [u16]),
    rotate: unsafe fn(&mut [f32], &[f32], &[f32]),
    gate: unsafe fn(&[f32], &[f32], &mut [f32]),
    multiply_adds: unsafe fn(WeightDtype, u64) -> u64,
    read: unsafe fn(&[u8]) -> f32,
}

impl Ops {
    /// The table of a set.
    ///
    /// # Errors
    /// If this machine cannot run it.
    pub(crate) fn of(set: KernelSet) -> Result<&'static Ops, KernelError> {
        if !set.is_available() {
            return Err(KernelError::Unavailable { set });
        }
        Ok(match set {
            KernelSet::Scalar => &scalar::OPS,
            #[cfg(target_arch = "x86_64")]
            KernelSet::Avx2 => &avx2::OPS,
            #[cfg(target_arch = "x86_64")]
            KernelSet::Avx512 => &avx512::OPS,
            #[cfg(target_arch = "x86_64")]
            KernelSet::Avx512Bf16 => &avx512bf16::OPS,
            #[cfg(not(target_arch = "x86_64"))]
            _ => return Err(KernelError::Unavailable { set }),
        })
    }

    /// Whether products with weights of this dtype want activations in bf16.
    pub(crate) fn wants_bf16(&self, dtype: WeightDtype) -> bool {
        self.set == KernelSet::Avx512Bf16 && dtype == WeightDtype::Bf16
    }

    /// # Safety
    /// As [`Product`]'s fields promise.
    pub(crate) unsafe fn product(&self, p: &Product) {
        // SAFETY: `of` checked the instructions; the rest is the caller's promise.
        unsafe { (self.product)(p) }
    }

    /// # Safety
    /// As [`Attention`]'s fields promise.
    pub(crate) unsafe fn attend(&self, a: &Attention<'_>) {
        // SAFETY: `of` checked the instructions; the rest is the caller's promise.
        unsafe { (self.attend)(a) }
    }

    pub(crate) fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        // SAFETY: `of` checked the instructions.
        unsafe { (self.rms_norm)(x, weight, eps, out) }
    }

    pub(crate) fn round_row(&self, x: &[f32], out: &mut [u16]) {
        // SAFETY: `of` checked the instructions.
        unsafe { (self.round_row)(x, out) }
    }

    pub(crate) fn rotate(&self, head: &mut [f32], cos: &[f32], sin: &[f32]) {
        // SAFETY: `of` checked the instructions.
        unsafe { (self.rotate)(head, cos, sin) }
    }

    pub(crate) fn gate(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        // SAFETY: `of` checked the instructions.
        unsafe { (self.gate)(gate, up, out) }
    }

    /// Loads every byte, for the sake of loading.
    pub(crate) fn read(&self, bytes: &[u8]) -> f32 {
        // SAFETY: `of` checked the instructions.
        unsafe { (self.read)(bytes) }
    }

    pub(crate) fn multiply_adds(&self, dtype: WeightDtype, times: u64) -> u64 {
        // SAFETY: `of` checked the instructions.
        unsafe { (self.multiply_adds)(dtype, times) }
    }
}

/// Compiles the kernels for one set: `product` may be its own, all others are the generic ones.
macro_rules! kernels {
    ($name:ident, $set:expr, $simd:ty, [$($features:literal)?], $product:expr, $peak:expr) => {
        mod $name {
            use super::*;

            pub(super) static OPS: Ops =
                Ops { set: $set, product: run_product, attend: run_attend, rms_norm, round_row, rotate, gate, multiply_adds: run_peak, read };

            $(#[target_feature(enable = $features)])?
            unsafe fn run_product(p: &Product) {
                // SAFETY: promised by the caller.
                unsafe { $product(p) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn run_attend(a: &Attention<'_>) {
                // SAFETY: promised by the caller.
                unsafe { attend::<$simd>(a) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
                // SAFETY: promised by the caller.
                unsafe { pointwise::rms_norm::<$simd>(x, weight, eps, out) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn round_row(x: &[f32], out: &mut [u16]) {
                pointwise::round_row(x, out);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
                pointwise::rotate(head, cos, sin);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
                pointwise::gate(gate, up, out);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn read(bytes: &[u8]) -> f32 {
                // SAFETY: promised by the caller.
                unsafe { pointwise::read::<$simd>(bytes) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn run_peak(dtype: WeightDtype, times: u64) -> u64 {
                // SAFETY: promised by the caller.
                unsafe { $peak(dtype, times) }
            }
        }
    };
}

kernels!(scalar, KernelSet::Scalar, Portable, [], product::<Portable>, peak::<Portable>);

#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
kernels!(avx2, KernelSet::Avx2, Avx2, ["avx2,fma,f16c"], product::<Avx2>, peak::<Avx2>);

#[cfg(target_arch = "x86_64")]
kernels!(
    avx512,
    KernelSet::Avx512,
    Avx512,
    ["avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"],
    product::<Avx512>,
    peak::<Avx512>
);

// bf16 weights have a dot product of their own; other weights run as without it.
#[cfg(target_arch = "x86_64")]
kernels!(
    avx512bf16,
    KernelSet::Avx512Bf16,
    Avx512,
    ["avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"],
    product_by_dtype,
    peak_by_dtype
);

/// # Safety
/// As for the two kernels it chooses from.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn product_by_dtype(p: &Product) {
    // SAFETY: promised by the caller.
    unsafe { if p.dtype == WeightDtype::Bf16 { super::bf16::product(p) } else { product::<Avx512>(p) } }
}

/// # Safety
/// As for the kernel.
#[inline(always)]
unsafe fn peak<S: Simd>(_dtype: WeightDtype, times: u64) -> u64 {
    // SAFETY: promised by the caller.
    unsafe { multiply_adds::<S>(times) }
}

/// # Safety
/// As for the two kernels it chooses from.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn peak_by_dtype(dtype: WeightDtype, times: u64) -> u64 {
    // SAFETY: promised by the caller.
    unsafe {
        if dtype == WeightDtype::Bf16 {
            super::bf16::multiply_adds(times)
        } else {
            multiply_adds::<Avx512>(times)
        }
    }
}
