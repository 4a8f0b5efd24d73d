//! The product with AVX512-BF16's dot product: activations and weights both bf16, sums in f32.
//!
//! The same loops as in `linear`, with 32 elements to a vector: a lane sums pairs of neighbours.
#![cfg(target_arch = "x86_64")]
#![expect(clippy::needless_range_loop, reason = "register tiles are indexed, so that they unroll")]

#[allow(clippy::wildcard_imports, reason = "instructions: their names say where they are from")]
use std::arch::x86_64::*;
use std::mem::transmute;

use super::linear::{Product, ahead, put};
use super::simd::{Avx512, NR, Simd};

/// Elements of K in one block. Changing it changes bits: raise the kernel version.
const BLOCK: usize = 2048;

/// Elements in a vector.
const WIDTH: usize = 32;

/// Rows in a register tile: with 4 weights 24 accumulators of 32 registers.
const ROWS: usize = 6;

/// The product of bf16 weights and bf16 activations.
///
/// # Safety
/// AVX512-BF16; `dtype` must be bf16 and `x_bf16` valid; else as for `linear::product`.
#[inline(always)]
pub(crate) unsafe fn product(p: &Product) {
    if p.rows <= ROWS {
        // Few rows wait for memory: each panel is read to the end of K, in the order that it lies in.
        for n0 in (0..p.columns).step_by(NR) {
            for k0 in (0..p.k).step_by(BLOCK) {
                // SAFETY: passed on to the caller.
                unsafe { rows_of_panel(p, n0, k0) };
            }
        }
    } else {
        for k0 in (0..p.k).step_by(BLOCK) {
            for n0 in (0..p.columns).step_by(NR) {
                // SAFETY: passed on to the caller.
                unsafe { rows_of_panel(p, n0, k0) };
            }
        }
    }
}

#[inline(always)]
unsafe fn rows_of_panel(p: &Product, n0: usize, k0: usize) {
    let depth = (p.k - k0).min(BLOCK);
    let count = (p.columns - n0).min(NR);
    // SAFETY: column `n0 + min(i, count - 1)` is in the range; `k0 + depth <= k` stays in its row.
    unsafe {
        let start = p.weights.cast::<u16>().add(n0 * p.k + k0);
        let at = |i: usize| start.add(i.min(count - 1) * p.k);
        let w = [at(0), at(1), at(2), at(3)];
        let mut r = 0;
        while r < p.rows {
            let rows = (p.rows - r).min(ROWS);
            let x = p.x_bf16.add(r * p.x_stride + k0);
            let out = p.out.add(r * p.columns + n0);
            match rows {
                1 => tile::<1, true>(p, x, w, depth, out, count, k0),
                2 => tile::<2, true>(p, x, w, depth, out, count, k0),
                3 => tile::<3, true>(p, x, w, depth, out, count, k0),
                4 => tile::<4, true>(p, x, w, depth, out, count, k0),
                5 => tile::<5, true>(p, x, w, depth, out, count, k0),
                _ if r == 0 => tile::<6, true>(p, x, w, depth, out, count, k0),
                _ => tile::<6, false>(p, x, w, depth, out, count, k0),
            }
            r += rows;
        }
    }
}

#[inline(always)]
unsafe fn load(p: *const u16) -> __m512bh {
    // SAFETY: 32 readable elements, promised by the caller; the two types are 64 plain bytes.
    unsafe { transmute(_mm512_loadu_si512(p.cast())) }
}

/// `AHEAD` asks for weights before they are wanted: see [`ahead`].
#[inline(always)]
unsafe fn tile<const R: usize, const AHEAD: bool>(
    p: &Product,
    x: *const u16,
    w: [*const u16; NR],
    depth: usize,
    out: *mut f32,
    count: usize,
    k0: usize,
) {
    // SAFETY: as the caller says; activations are padded to whole vectors, weights are masked at their end.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); NR]; R];
        let whole = depth / WIDTH * WIDTH;
        let next = ahead(p.k, k0, size_of::<u16>());
        let mut k = 0;
        while k < whole {
            let wv = [load(w[0].add(k)), load(w[1].add(k)), load(w[2].add(k)), load(w[3].add(k))];
            if AHEAD {
                for w in w {
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(next + k).cast());
                }
            }
            for r in 0..R {
                let xv = load(x.add(r * p.x_stride + k));
                for n in 0..NR {
                    acc[r][n] = _mm512_dpbf16_ps(acc[r][n], xv, wv[n]);
                }
            }
            k += WIDTH;
        }
        if whole < depth {
            let mask = (1u32 << (depth - whole)) - 1;
            for n in 0..NR {
                let wv =
                    transmute::<__m512i, __m512bh>(_mm512_maskz_loadu_epi16(mask, w[n].add(whole).cast()));
                for r in 0..R {
                    acc[r][n] = _mm512_dpbf16_ps(acc[r][n], load(x.add(r * p.x_stride + whole)), wv);
                }
            }
        }
        for r in 0..R {
            put(Avx512::sum4(acc[r]), out.add(r * p.columns), count, k0 == 0);
        }
    }
}

/// Independent dot products and nothing else: see `linear::multiply_adds`.
///
/// # Safety
/// AVX512-BF16.
#[inline(always)]
pub(crate) unsafe fn multiply_adds(times: u64) -> u64 {
    const CHAINS: usize = 24;
    // SAFETY: 64 readable bytes; the instructions are the caller's promise.
    unsafe {
        let x = std::hint::black_box([0x3f00u16; WIDTH]);
        let (a, b) = (load(x.as_ptr()), load(x.as_ptr()));
        let mut acc = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..times {
            for chain in &mut acc {
                *chain = _mm512_dpbf16_ps(*chain, a, b);
            }
        }
        for chain in acc.chunks_exact(NR) {
            std::hint::black_box(Avx512::sum4([chain[0], chain[1], chain[2], chain[3]]));
        }
    }
    times * (CHAINS * WIDTH * 2) as u64
}
