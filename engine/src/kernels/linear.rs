//! Rows of activations times rows of weights: `out[r][n] = Σ_k x[r][k] · w[n][k]`.
//!
//! One row (decode) and hundreds (prefill) run through the same loops and the same register tile, only with more rows
//! in it, so a row's bits are the same in both:
//!
//! ```text
//! for block of K            512 elements in f32, 2048 in bf16: lane sums, then one tree across lanes
//!   for panel of 4 weights  f32 sets widen it once if it serves many rows; it stays in L1
//!     for tile of rows      up to 6: 4 × 6 accumulators live in registers
//! ```
//!
//! Weights stay where and as they are (row-major, bf16, f16 or f32, any alignment). Activations are ours: rows are
//! padded with zeros to a multiple of [`PAD`] elements, so only weights need care at the end of a row.
#![expect(clippy::needless_range_loop, reason = "register tiles are indexed, so that they unroll")]

use super::simd::{NR, Simd};
use crate::weights::WeightDtype;

/// Rows of activations are padded with zeros to a multiple of this many elements.
pub(crate) const PAD: usize = 32;

/// Elements of K in one block, f32 kernels. Changing it changes bits: raise the kernel version.
pub(crate) const BLOCK_F32: usize = 512;

/// Panels that share a tile of rows while that lies in L1: 2 × 4 rows × 512 × 4 bytes = 16 KiB, beside 12 KiB of rows.
const PANELS: usize = 2;

/// How far ahead of itself a product of few rows asks for each weight row, in bytes: some microseconds of a memory
/// that is never idle. A whole page, so that it also reaches where the processor's own prefetching stops.
const AHEAD_BYTES: usize = 4096;

/// Elements from where a weight row of a panel is read to what is read [`AHEAD_BYTES`] later: further on in the same
/// row, or after its end in the row of the next panel. A hint: beyond the last panel it is an address like any other.
#[inline(always)]
pub(super) fn ahead(k: usize, k0: usize, element_bytes: usize) -> usize {
    let ahead = k.min(AHEAD_BYTES / element_bytes);
    if k0 + ahead < k { ahead } else { NR * k - (k - ahead) }
}

/// Elements of scratch that a product wants for widened panels.
pub(crate) const PANEL_ELEMENTS: usize = PANELS * NR * BLOCK_F32;

/// One product for a range of weight rows, into a dense tile of the caller's.
pub(crate) struct Product {
    /// First weight row of the range.
    pub weights: *const u8,
    pub dtype: WeightDtype,
    /// Elements in a weight row.
    pub k: usize,
    /// Weight rows in the range.
    pub columns: usize,
    /// First activation row, in f32, and in bf16 where the kernel set wants that for bf16 weights.
    pub x: *const f32,
    pub x_bf16: *const u16,
    /// Elements from one activation row to the next, in both.
    pub x_stride: usize,
    pub rows: usize,
    /// `[rows][columns]`, overwritten.
    pub out: *mut f32,
    /// Room for [`PANEL_ELEMENTS`].
    pub panel: *mut f32,
}

/// How weight elements become lanes.
pub(crate) trait Element {
    const BYTES: usize;
    /// # Safety
    /// As for [`Simd`]: `S::LANES` elements must be readable at `p`.
    unsafe fn load<S: Simd>(p: *const u8) -> S::V;
}

pub(crate) struct Bf16;
pub(crate) struct F16;
pub(crate) struct F32;

impl Element for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load_bf16(p.cast()) }
    }
}

impl Element for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load_f16(p.cast()) }
    }
}

impl Element for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load(p.cast()) }
    }
}

/// The product with f32 arithmetic.
///
/// # Safety
/// The set's instructions; and everything that [`Product`]'s fields promise: readable weights and activations
/// (padded), a writable tile and panel that nobody else touches.
#[inline(always)]
pub(crate) unsafe fn product<S: Simd>(p: &Product) {
    // SAFETY: passed on to the caller.
    unsafe {
        match p.dtype {
            WeightDtype::Bf16 => blocks::<S, Bf16>(p),
            WeightDtype::F16 => blocks::<S, F16>(p),
            WeightDtype::F32 => blocks::<S, F32>(p),
        }
    }
}

/// Up to four weight rows: where they begin in this block of K, and which columns of the tile they make.
#[derive(Clone, Copy)]
struct Panel {
    rows: [*const u8; NR],
    n0: usize,
    count: usize,
}

#[inline(always)]
unsafe fn blocks<S: Simd, E: Element>(p: &Product) {
    if p.rows <= S::ROWS {
        // Few rows wait for memory: each panel is read to the end of K, in the order that it lies in.
        for n0 in (0..p.columns).step_by(NR) {
            for k0 in (0..p.k).step_by(BLOCK_F32) {
                // SAFETY: passed on to the caller.
                unsafe {
                    let panel = panel_at::<E>(p, n0, k0);
                    rows_of_panels::<S, E, true>(p, &[panel], k0, (p.k - k0).min(BLOCK_F32));
                }
            }
        }
        return;
    }
    let mut k0 = 0;
    while k0 < p.k {
        let depth = (p.k - k0).min(BLOCK_F32);
        let mut n0 = 0;
        while n0 < p.columns {
            // SAFETY: passed on to the caller.
            unsafe {
                let mut panels = [panel_at::<E>(p, n0, k0); PANELS];
                let mut count = 1;
                while count < PANELS && n0 + count * NR < p.columns {
                    panels[count] = panel_at::<E>(p, n0 + count * NR, k0);
                    count += 1;
                }
                if E::BYTES == 2 {
                    for (i, panel) in panels[..count].iter_mut().enumerate() {
                        panel.rows =
                            widen_panel::<S, E>(p, p.panel.add(i * NR * BLOCK_F32), panel.rows, depth);
                    }
                    rows_of_panels::<S, F32, false>(p, &panels[..count], k0, depth);
                } else {
                    rows_of_panels::<S, E, false>(p, &panels[..count], k0, depth);
                }
            }
            n0 += PANELS * NR;
        }
        k0 += BLOCK_F32;
    }
}

/// The panel of columns `n0 ..`, at element `k0` of each row. Columns that do not exist repeat the last.
#[inline(always)]
unsafe fn panel_at<E: Element>(p: &Product, n0: usize, k0: usize) -> Panel {
    let count = (p.columns - n0).min(NR);
    // SAFETY: column `n0 + min(i, count - 1)` is in the range, and `k0` in its row.
    unsafe {
        let first = p.weights.add((n0 * p.k + k0) * E::BYTES);
        let at = |i: usize| first.add(i.min(count - 1) * p.k * E::BYTES);
        Panel { rows: [at(0), at(1), at(2), at(3)], n0, count }
    }
}

/// Copies `depth` elements of four weight rows to f32.
#[inline(always)]
unsafe fn widen_panel<S: Simd, E: Element>(
    p: &Product,
    panel: *mut f32,
    w: [*const u8; NR],
    depth: usize,
) -> [*const u8; NR] {
    let whole = depth / S::LANES * S::LANES;
    let mut out = [std::ptr::null(); NR];
    for n in 0..NR {
        // SAFETY: the panel has room for NR blocks; `depth <= BLOCK_F32`, a multiple of the lanes.
        unsafe {
            let row = panel.add(n * BLOCK_F32);
            let mut k = 0;
            while k < whole {
                if k % (64 / E::BYTES) == 0 {
                    S::fetch(w[n].wrapping_add((PANELS * NR * p.k + k) * E::BYTES));
                }
                S::store(row.add(k), E::load::<S>(w[n].add(k * E::BYTES)));
                k += S::LANES;
            }
            if whole < depth {
                S::store(row.add(whole), load_part::<S, E>(w[n].add(whole * E::BYTES), depth - whole));
            }
            out[n] = row.cast_const().cast();
        }
    }
    out
}

/// Fewer than all lanes: the rest are zeros, and nothing beyond is read.
#[inline(always)]
unsafe fn load_part<S: Simd, E: Element>(p: *const u8, elements: usize) -> S::V {
    let mut buffer = [0u8; 64];
    // SAFETY: fewer elements than lanes, so they and a whole vector fit the buffer (16 lanes × 4 bytes).
    unsafe {
        std::ptr::copy_nonoverlapping(p, buffer.as_mut_ptr(), elements * E::BYTES);
        E::load::<S>(buffer.as_ptr())
    }
}

#[inline(always)]
unsafe fn rows_of_panels<S: Simd, E: Element, const AHEAD: bool>(
    p: &Product,
    panels: &[Panel],
    k0: usize,
    depth: usize,
) {
    let mut r = 0;
    while r < p.rows {
        let rows = (p.rows - r).min(S::ROWS);
        for panel in panels {
            // SAFETY: rows `r .. r + rows` exist in `x` and in the tile, and the panel's columns too.
            unsafe {
                let x = p.x.add(r * p.x_stride + k0);
                let out = p.out.add(r * p.columns + panel.n0);
                let (w, count) = (panel.rows, panel.count);
                match rows {
                    1 => tile::<S, E, 1, AHEAD>(p, x, w, depth, out, count, k0),
                    2 => tile::<S, E, 2, AHEAD>(p, x, w, depth, out, count, k0),
                    3 => tile::<S, E, 3, AHEAD>(p, x, w, depth, out, count, k0),
                    4 => tile::<S, E, 4, AHEAD>(p, x, w, depth, out, count, k0),
                    5 => tile::<S, E, 5, AHEAD>(p, x, w, depth, out, count, k0),
                    _ => tile::<S, E, 6, AHEAD>(p, x, w, depth, out, count, k0),
                }
            }
        }
        r += rows;
    }
}

#[inline(always)]
unsafe fn tile<S: Simd, E: Element, const R: usize, const AHEAD: bool>(
    p: &Product,
    x: *const f32,
    w: [*const u8; NR],
    depth: usize,
    out: *mut f32,
    count: usize,
    k0: usize,
) {
    // SAFETY: as the caller says; activations are padded, so whole vectors of them are readable up to `depth`.
    unsafe {
        let mut acc = [[S::zero(); NR]; R];
        let whole = depth / S::LANES * S::LANES;
        let next = ahead(p.k, k0, E::BYTES);
        let mut k = 0;
        while k < whole {
            if AHEAD && k % (64 / E::BYTES) == 0 {
                for w in w {
                    S::fetch(w.wrapping_add((next + k) * E::BYTES));
                }
            }
            let mut wv = [S::zero(); NR];
            for n in 0..NR {
                wv[n] = E::load::<S>(w[n].add(k * E::BYTES));
            }
            for r in 0..R {
                let xv = S::load(x.add(r * p.x_stride + k));
                for n in 0..NR {
                    acc[r][n] = S::fma(xv, wv[n], acc[r][n]);
                }
            }
            k += S::LANES;
        }
        if whole < depth {
            for n in 0..NR {
                let wv = load_part::<S, E>(w[n].add(whole * E::BYTES), depth - whole);
                for r in 0..R {
                    acc[r][n] = S::fma(S::load(x.add(r * p.x_stride + whole)), wv, acc[r][n]);
                }
            }
        }
        for r in 0..R {
            put(S::sum4(acc[r]), out.add(r * p.columns), count, k0 == 0);
        }
    }
}

/// Independent multiply-adds and nothing else, `times` rounds of them: the peak that products are measured against.
/// Gives the number of multiplications and additions.
///
/// # Safety
/// The set's instructions.
#[inline(always)]
pub(crate) unsafe fn multiply_adds<S: Simd>(times: u64) -> u64 {
    const CHAINS: usize = 12;
    // SAFETY: passed on to the caller.
    unsafe {
        // Hidden from the compiler, so that it computes them.
        let x = std::hint::black_box([0.5f32; 16]);
        let (a, b) = (S::load(x.as_ptr()), S::load(x.as_ptr()));
        let mut acc = [S::zero(); CHAINS];
        for _ in 0..times {
            for chain in &mut acc {
                *chain = S::fma(a, b, *chain);
            }
        }
        for chain in acc.chunks_exact(NR) {
            std::hint::black_box(S::sum4([chain[0], chain[1], chain[2], chain[3]]));
        }
    }
    times * (CHAINS * S::LANES * 2) as u64
}

/// Puts the sums of the first block, adds those of the others.
///
/// # Safety
/// `count` elements must be readable and writable at `out`.
#[inline(always)]
pub(super) unsafe fn put(sums: [f32; NR], out: *mut f32, count: usize, first: bool) {
    for (i, sum) in sums.iter().enumerate().take(count) {
        // SAFETY: `i < count`.
        unsafe {
            let to = out.add(i);
            *to = if first { *sum } else { *to + *sum };
        }
    }
}

#[cfg(test)]
mod tests;
