use proptest::prelude::*;

use super::*;
use crate::kernels::pointwise::to_bf16;
use crate::kernels::{KernelSet, Ops};

/// Random activations and weights, padded and stored as the kernels want them, with a canary around the result.
struct Problem {
    dtype: WeightDtype,
    k: usize,
    stride: usize,
    x: Vec<f32>,
    x_bf16: Vec<u16>,
    /// One byte of offset: nothing is aligned.
    weights: Vec<u8>,
}

fn problem(seed: u64, dtype: WeightDtype, (rows, columns, k): (usize, usize, usize)) -> Problem {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut number = move || random.f32() * 2.0 - 1.0;
    let stride = k.next_multiple_of(PAD) + PAD;
    let mut x = vec![0.0; rows * stride];
    for row in x.chunks_exact_mut(stride) {
        row[..k].fill_with(&mut number);
    }
    let mut weights = vec![0u8];
    for _ in 0..columns * k {
        match dtype {
            WeightDtype::Bf16 => weights.extend(to_bf16(number()).to_le_bytes()),
            WeightDtype::F16 => weights.extend(half::f16::from_f32(number()).to_le_bytes()),
            WeightDtype::F32 => weights.extend(number().to_le_bytes()),
        }
    }
    let x_bf16 = x.iter().map(|v| to_bf16(*v)).collect();
    Problem { dtype, k, stride, x, x_bf16, weights }
}

impl Problem {
    /// `columns` weight rows from `n0` times `rows` activation rows from `r0`.
    fn solve(&self, set: KernelSet, (r0, rows): (usize, usize), (n0, columns): (usize, usize)) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows * columns + 1];
        let mut panel = vec![f32::NAN; PANEL_ELEMENTS];
        let product = Product {
            weights: self.weights[1 + n0 * self.k * self.dtype.bytes()..].as_ptr(),
            dtype: self.dtype,
            k: self.k,
            columns,
            x: self.x[r0 * self.stride..].as_ptr(),
            x_bf16: self.x_bf16[r0 * self.stride..].as_ptr(),
            x_stride: self.stride,
            rows,
            out: out.as_mut_ptr(),
            panel: panel.as_mut_ptr(),
        };
        // SAFETY: every pointer is into a vector that is large enough for the rows and columns.
        unsafe { Ops::of(set).unwrap().product(&product) };
        assert!(out.pop().unwrap().is_nan(), "wrote past the tile");
        out
    }

    fn exact(&self, row: usize, column: usize) -> (f64, f64) {
        let size = self.dtype.bytes();
        let (mut sum, mut absolute) = (0.0, 0.0);
        for i in 0..self.k {
            let b = &self.weights[1 + (column * self.k + i) * size..][..size];
            let w = match self.dtype {
                WeightDtype::Bf16 => f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16),
                WeightDtype::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
                WeightDtype::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            };
            let term = f64::from(self.x[row * self.stride + i]) * f64::from(w);
            sum += term;
            absolute += term.abs();
        }
        (sum, absolute)
    }
}

const DTYPES: [WeightDtype; 3] = [WeightDtype::Bf16, WeightDtype::F16, WeightDtype::F32];

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Any row alone, any range of columns, and any batch give the same bits.
    #[test]
    fn one_row_alone_is_the_row_of_a_batch(
        seed in any::<u64>(), dtype in 0usize..3, rows in 1usize..20, columns in 1usize..14,
        k in prop_oneof![1usize..200, 500usize..530, 1000usize..1100, 2040usize..2100, 4090usize..4100],
    ) {
        let p = problem(seed, DTYPES[dtype], (rows, columns, k));
        for set in KernelSet::available() {
            let whole = p.solve(set, (0, rows), (0, columns));
            for r in 0..rows {
                let alone = p.solve(set, (r, 1), (0, columns));
                for n in 0..columns {
                    prop_assert_eq!(alone[n].to_bits(), whole[r * columns + n].to_bits(), "{} row {} column {}", set, r, n);
                }
            }
            let n0 = seed as usize % columns;
            let part = p.solve(set, (0, rows), (n0, columns - n0));
            for r in 0..rows {
                for n in n0..columns {
                    prop_assert_eq!(part[r * (columns - n0) + n - n0].to_bits(), whole[r * columns + n].to_bits());
                }
            }
        }
    }

    /// Every set is as near to the exact sum as its arithmetic allows.
    #[test]
    fn sets_agree_within_rounding(
        seed in any::<u64>(), dtype in 0usize..3, rows in 1usize..9, columns in 1usize..6, k in 1usize..3000,
    ) {
        let p = problem(seed, DTYPES[dtype], (rows, columns, k));
        for set in KernelSet::available() {
            let got = p.solve(set, (0, rows), (0, columns));
            // Activations rounded to bf16 lose 2^-9 of each term; f32 sums lose 2^-24 for each of some k / 8 additions.
            let bf16 = set == KernelSet::Avx512Bf16 && p.dtype == WeightDtype::Bf16;
            let allowed = if bf16 { 2f64.powi(-9) + 1e-5 } else { 2f64.powi(-24) * (k as f64 / 8.0 + 8.0) };
            for r in 0..rows {
                for n in 0..columns {
                    let (sum, absolute) = p.exact(r, n);
                    let error = (f64::from(got[r * columns + n]) - sum).abs();
                    prop_assert!(error <= allowed * absolute + 1e-30, "{}: error {} of {} at {} {}", set, error, absolute, r, n);
                }
            }
        }
    }
}
