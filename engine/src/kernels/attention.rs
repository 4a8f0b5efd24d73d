//! Attention of some queries of one sequence to one key/value head, over its pages, with a running softmax.
//!
//! A query is one head of one row, and sees positions `from .. to`. For each page, in order: 16 scores at a time (a
//! lane is a position, summed over dimensions in order), the running maximum, the weights, then values added in order
//! of position. A query's bits depend on itself and its positions alone; the queries of a tile share loads, not sums.
#![expect(clippy::needless_range_loop, reason = "register tiles are indexed, so that they unroll")]

use super::pointwise::exp;
use super::simd::Simd;
use crate::kv::{PAGE_TOKENS, PageAddress};

/// Queries in a tile at most.
pub(crate) const QUERIES_MAX: usize = 8;

/// One head of one row.
#[derive(Clone, Copy)]
pub(crate) struct Query {
    /// `head_dim` elements, rotated and scaled.
    pub q: *const f32,
    /// `head_dim` elements for the result.
    pub out: *mut f32,
    /// First position seen.
    pub from: usize,
    /// One past the last position seen; more than `from`.
    pub to: usize,
}

/// Up to [`QUERIES_MAX`] queries against one head of one sequence.
pub(crate) struct Attention<'a> {
    pub queries: &'a [Query],
    pub pages: &'a [PageAddress],
    /// Element offsets of this layer's and head's keys and values in a page.
    pub keys: usize,
    pub values: usize,
    pub head_dim: usize,
}

/// Running state of one query; its weighted sum of values stands in `out`.
#[derive(Clone, Copy)]
struct Running {
    max: f32,
    sum: f32,
}

/// # Safety
/// The set's instructions; queries and outputs as described and disjoint; pages cover every `to`, and positions below
/// it are written.
#[inline(always)]
pub(crate) unsafe fn attend<S: Simd>(a: &Attention<'_>) {
    let mut rest = a.queries;
    while !rest.is_empty() {
        let tile = rest.len().min(if S::LANES == 16 { 8 } else { 4 });
        // SAFETY: passed on to the caller.
        unsafe {
            match tile {
                1 => attend_tile::<S, 1>(a, rest),
                2 => attend_tile::<S, 2>(a, rest),
                3 => attend_tile::<S, 3>(a, rest),
                4 => attend_tile::<S, 4>(a, rest),
                5 => attend_tile::<S, 5>(a, rest),
                6 => attend_tile::<S, 6>(a, rest),
                7 => attend_tile::<S, 7>(a, rest),
                _ => attend_tile::<S, 8>(a, rest),
            }
        }
        rest = &rest[tile..];
    }
}

#[inline(always)]
unsafe fn attend_tile<S: Simd, const T: usize>(a: &Attention<'_>, queries: &[Query]) {
    let mut q = [queries[0]; T];
    q.copy_from_slice(&queries[..T]);
    let mut state = [Running { max: f32::NEG_INFINITY, sum: 0.0 }; T];
    let mut first = usize::MAX;
    let mut end = 0;
    for query in &q {
        first = first.min(query.from / PAGE_TOKENS);
        end = end.max(query.to);
        for d in 0..a.head_dim {
            // SAFETY: `out` has `head_dim` elements.
            unsafe { *query.out.add(d) = 0.0 };
        }
    }
    for page in first..end.div_ceil(PAGE_TOKENS) {
        // SAFETY: pages cover every position below `end`; offsets lie inside a page.
        unsafe {
            let base = a.pages[page].get().cast_const();
            let mut weights = [[0.0f32; PAGE_TOKENS]; T];
            scores::<S, T>(&q, base.add(a.keys), a.head_dim, &mut weights);
            let mut ranges = [(0, 0); T];
            for t in 0..T {
                ranges[t] = clip(&q[t], page);
                soften(&mut state[t], &mut weights[t], ranges[t], q[t].out, a.head_dim);
            }
            add_values::<S, T>(&q, base.add(a.values), a.head_dim, &weights, &ranges);
        }
    }
    for t in 0..T {
        let scale = 1.0 / state[t].sum;
        for d in 0..a.head_dim {
            // SAFETY: `out` has `head_dim` elements.
            unsafe { *q[t].out.add(d) *= scale };
        }
    }
}

/// Positions of the page that the query sees.
#[inline(always)]
fn clip(q: &Query, page: usize) -> (usize, usize) {
    let start = page * PAGE_TOKENS;
    (q.from.max(start).min(start + PAGE_TOKENS) - start, q.to.max(start).min(start + PAGE_TOKENS) - start)
}

/// 16 scores for each query; those of unwritten positions are garbage that nobody looks at.
#[inline(always)]
unsafe fn scores<S: Simd, const T: usize>(
    q: &[Query; T],
    keys: *const u16,
    head_dim: usize,
    out: &mut [[f32; PAGE_TOKENS]; T],
) {
    // SAFETY: keys are `[head_dim][16]`; queries have `head_dim` elements; two vectors hold 16 lanes or more.
    unsafe {
        let mut acc = [[S::zero(); 2]; T];
        for d in 0..head_dim {
            let mut v = 0;
            while v * S::LANES < PAGE_TOKENS {
                let key = S::load_bf16(keys.add(d * PAGE_TOKENS + v * S::LANES));
                for t in 0..T {
                    acc[t][v] = S::fma(S::splat(*q[t].q.add(d)), key, acc[t][v]);
                }
                v += 1;
            }
        }
        for t in 0..T {
            let mut v = 0;
            while v * S::LANES < PAGE_TOKENS {
                S::store(out[t].as_mut_ptr().add(v * S::LANES), acc[t][v]);
                v += 1;
            }
        }
    }
}

/// Scores to weights, with the running maximum; what was summed so far is rescaled when it rises.
#[inline(always)]
unsafe fn soften(
    state: &mut Running,
    weights: &mut [f32; PAGE_TOKENS],
    (from, to): (usize, usize),
    out: *mut f32,
    head_dim: usize,
) {
    if from >= to {
        return;
    }
    let mut max = state.max;
    for w in &weights[from..to] {
        max = if *w > max { *w } else { max };
    }
    if max > state.max {
        let scale = if state.max == f32::NEG_INFINITY { 0.0 } else { exp(state.max - max) };
        state.sum *= scale;
        for d in 0..head_dim {
            // SAFETY: `out` has `head_dim` elements.
            unsafe { *out.add(d) *= scale };
        }
        state.max = max;
    }
    for w in weights.iter_mut() {
        *w = exp(*w - max);
    }
    for (i, w) in weights.iter_mut().enumerate() {
        *w = if i >= from && i < to { *w } else { 0.0 };
    }
    let mut lanes = *weights;
    let mut half = PAGE_TOKENS / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    state.sum += lanes[0];
}

/// Adds weighted values. Positions that all queries see are added for all at once; no query touches any other.
#[inline(always)]
unsafe fn add_values<S: Simd, const T: usize>(
    q: &[Query; T],
    values: *const u16,
    head_dim: usize,
    weights: &[[f32; PAGE_TOKENS]; T],
    ranges: &[(usize, usize); T],
) {
    let (mut from, mut to) = ranges[0];
    for r in &ranges[1..] {
        from = from.max(r.0);
        to = to.min(r.1);
    }
    // SAFETY: positions below each range's end are written; outputs have `head_dim` elements.
    unsafe {
        if from >= to {
            for t in 0..T {
                values_of::<S, 1>(&[q[t]], values, head_dim, &[weights[t]], ranges[t]);
            }
            return;
        }
        for t in 0..T {
            values_of::<S, 1>(&[q[t]], values, head_dim, &[weights[t]], (ranges[t].0, from));
        }
        values_of::<S, T>(q, values, head_dim, weights, (from, to));
        for t in 0..T {
            values_of::<S, 1>(&[q[t]], values, head_dim, &[weights[t]], (to, ranges[t].1));
        }
    }
}

#[inline(always)]
unsafe fn values_of<S: Simd, const T: usize>(
    q: &[Query; T],
    values: *const u16,
    head_dim: usize,
    weights: &[[f32; PAGE_TOKENS]; T],
    (from, to): (usize, usize),
) {
    if from >= to {
        return;
    }
    let whole = head_dim / S::LANES * S::LANES;
    // SAFETY: values are `[16][head_dim]`; `d + LANES <= head_dim`.
    unsafe {
        let mut d = 0;
        while d < whole {
            let mut acc = [S::zero(); T];
            for t in 0..T {
                acc[t] = S::load(q[t].out.add(d));
            }
            for j in from..to {
                let v = S::load_bf16(values.add(j * head_dim + d));
                for t in 0..T {
                    acc[t] = S::fma(S::splat(weights[t][j]), v, acc[t]);
                }
            }
            for t in 0..T {
                S::store(q[t].out.add(d), acc[t]);
            }
            d += S::LANES;
        }
        while d < head_dim {
            for t in 0..T {
                let mut sum = *q[t].out.add(d);
                for j in from..to {
                    let v = f32::from_bits(u32::from(values.add(j * head_dim + d).read_unaligned()) << 16);
                    sum += weights[t][j] * v;
                }
                *q[t].out.add(d) = sum;
            }
            d += 1;
        }
    }
}
