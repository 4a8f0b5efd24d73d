//! The few vector operations that kernels are written in.
//!
//! A kernel is generic over [`Simd`] and `#[inline(always)]`, so that it is compiled inside a function with the right
//! `#[target_feature]`; nothing here may be called from elsewhere.
//!
//! Sums across lanes always take the same tree, halves onto halves: lane *i* with *i + n/2*, down to one.

/// Vectors of one instruction set.
///
/// # Safety
/// Every function must run on a CPU with the set's instructions; pointers must be valid for the elements read or
/// written, at any alignment.
pub(crate) trait Simd: Copy {
    /// Lanes of f32.
    const LANES: usize;
    /// Rows of activations in one register tile of [`NR`] weight rows.
    const ROWS: usize;
    type V: Copy;

    unsafe fn zero() -> Self::V;
    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Widens [`LANES`](Self::LANES) bf16.
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    /// Widens [`LANES`](Self::LANES) IEEE halves.
    unsafe fn load_f16(p: *const u16) -> Self::V;
    /// `a * b + c`, fused where the set fuses.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Asks for a cache line; any address will do, also one that is not mapped.
    unsafe fn fetch(_p: *const u8) {}
    /// Sums across lanes, of four vectors at once.
    unsafe fn sum4(v: [Self::V; NR]) -> [f32; NR];
}

/// Weight rows in a register tile, whatever the set: the tree of [`Simd::sum4`] takes four vectors.
pub(crate) const NR: usize = 4;

/// Portable lanes; the compiler makes of them what the target has.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Simd for Portable {
    const LANES: usize = 8;
    const ROWS: usize = 1;
    type V = [f32; 8];

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        [0.0; 8]
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: the caller gives 8 readable elements, at any alignment.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: the caller gives 8 writable elements, at any alignment.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: the caller gives 8 readable elements, at any alignment.
        let raw = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        raw.map(|x| f32::from_bits(u32::from(x) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: the caller gives 8 readable elements, at any alignment.
        let raw = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        raw.map(|x| half::f16::from_bits(x).to_f32())
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Two roundings: a fused one without the instruction is a call into libm.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn sum4(v: [Self::V; NR]) -> [f32; NR] {
        v.map(|v| {
            let four: [f32; 4] = std::array::from_fn(|i| v[i] + v[i + 4]);
            (four[0] + four[2]) + (four[1] + four[3])
        })
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    #[allow(clippy::wildcard_imports, reason = "instructions: their names say where they are from")]
    use std::arch::x86_64::*;

    use super::{NR, Simd};

    #[derive(Clone, Copy)]
    pub(crate) struct Avx2;

    /// Four sums of four lanes each, halves onto halves.
    #[inline(always)]
    unsafe fn sum4_of_128(a: __m128, b: __m128, c: __m128, d: __m128) -> [f32; NR] {
        // SAFETY: SSE instructions, which every x86-64 has; the array has room for four lanes.
        unsafe {
            // [a0+a2, b0+b2, a1+a3, b1+b3]
            let ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
            let cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
            let sum = _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
            let mut out = [0.0; NR];
            _mm_storeu_ps(out.as_mut_ptr(), sum);
            out
        }
    }

    #[inline(always)]
    unsafe fn halve_256(v: __m256) -> __m128 {
        // SAFETY: AVX, promised by the caller.
        unsafe { _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v)) }
    }

    // SAFETY of the bodies below: the trait's callers promise the instructions and the pointers.
    impl Simd for Avx2 {
        const LANES: usize = 8;
        const ROWS: usize = 3;
        type V = __m256;

        #[inline(always)]
        unsafe fn zero() -> Self::V {
            // SAFETY: AVX, promised by the caller.
            unsafe { _mm256_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self::V {
            // SAFETY: AVX, promised by the caller.
            unsafe { _mm256_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self::V {
            // SAFETY: AVX and 8 elements, promised by the caller.
            unsafe { _mm256_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(p: *mut f32, v: Self::V) {
            // SAFETY: AVX and 8 elements, promised by the caller.
            unsafe { _mm256_storeu_ps(p, v) }
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const u16) -> Self::V {
            // SAFETY: AVX2 and 8 elements, promised by the caller.
            unsafe {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const u16) -> Self::V {
            // SAFETY: F16C and 8 elements, promised by the caller.
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
        }
        #[inline(always)]
        unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            // SAFETY: FMA, promised by the caller.
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn fetch(p: *const u8) {
            // SAFETY: a hint, which never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }
        #[inline(always)]
        unsafe fn sum4(v: [Self::V; NR]) -> [f32; NR] {
            // SAFETY: AVX, promised by the caller.
            unsafe { sum4_of_128(halve_256(v[0]), halve_256(v[1]), halve_256(v[2]), halve_256(v[3])) }
        }
    }

    #[derive(Clone, Copy)]
    pub(crate) struct Avx512;

    #[inline(always)]
    unsafe fn halve_512(v: __m512) -> __m256 {
        // SAFETY: AVX512DQ, promised by the caller.
        unsafe { _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)) }
    }

    impl Simd for Avx512 {
        const LANES: usize = 16;
        const ROWS: usize = 6;
        type V = __m512;

        #[inline(always)]
        unsafe fn zero() -> Self::V {
            // SAFETY: AVX-512, promised by the caller.
            unsafe { _mm512_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self::V {
            // SAFETY: AVX-512, promised by the caller.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self::V {
            // SAFETY: AVX-512 and 16 elements, promised by the caller.
            unsafe { _mm512_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(p: *mut f32, v: Self::V) {
            // SAFETY: AVX-512 and 16 elements, promised by the caller.
            unsafe { _mm512_storeu_ps(p, v) }
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const u16) -> Self::V {
            // SAFETY: AVX-512 and 16 elements, promised by the caller.
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const u16) -> Self::V {
            // SAFETY: AVX-512 and 16 elements, promised by the caller.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
        }
        #[inline(always)]
        unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            // SAFETY: AVX-512, promised by the caller.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn fetch(p: *const u8) {
            // SAFETY: a hint, which never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }
        #[inline(always)]
        unsafe fn sum4(v: [Self::V; NR]) -> [f32; NR] {
            // SAFETY: AVX-512, promised by the caller.
            unsafe { Avx2::sum4([halve_512(v[0]), halve_512(v[1]), halve_512(v[2]), halve_512(v[3])]) }
        }
    }
}
