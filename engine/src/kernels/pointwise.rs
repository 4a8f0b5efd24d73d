//! Norms, rotation, gating, rounding, and the exponential they share.
//!
//! The exponential is ours (a polynomial of plain multiplications and additions), so that its bits depend neither on
//! the C library nor on the kernel set.

use super::simd::Simd;

/// `e^x` with a relative error below 2e-7; below −87 it stays at `e^-87`, above 88 at `e^88`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Not `clamp`, which keeps NaN; a NaN becomes the lower bound here and cannot panic further on.
    let x = if x > -87.0 { x } else { -87.0 };
    let x = if x < 88.0 { x } else { 88.0 };
    // Adding and subtracting 1.5 × 2^23 rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    let n = (x * std::f32::consts::LOG2_E + ROUND) - ROUND;
    // ln 2 in two parts; the first has few bits, so that `n * part` is exact.
    let r = x - n * 0.693_359_4;
    let r = r + n * 2.121_944_4e-4;
    let mut y = 1.987_569_2e-4_f32;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        y = y * r + c;
    }
    let y = y * (r * r) + r + 1.0;
    // `n` is a whole number in −126 ..= 127: 2^n by its exponent bits.
    y * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

/// Rounds to bf16, to nearest, ties to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
    let nan = bits >> 16 | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16
}

/// Rounds a row.
#[inline(always)]
pub(crate) fn round_row(x: &[f32], out: &mut [u16]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = to_bf16(*x);
    }
}

/// `out = x / rms(x) * weight`, the mean square in the set's lane order.
///
/// # Safety
/// The set's instructions.
#[inline(always)]
pub(crate) unsafe fn rms_norm<S: Simd>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let whole = x.len() / S::LANES * S::LANES;
    // SAFETY: indices stay below `whole <= x.len()`.
    let lanes = unsafe {
        let mut acc = S::zero();
        let mut i = 0;
        while i < whole {
            let v = S::load(x.as_ptr().add(i));
            acc = S::fma(v, v, acc);
            i += S::LANES;
        }
        S::sum4([acc, S::zero(), S::zero(), S::zero()])[0]
    };
    let mut square = lanes;
    for v in &x[whole..] {
        square += v * v;
    }
    let scale = 1.0 / (square / x.len() as f32 + eps).sqrt();
    for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
        *o = x * scale * w;
    }
}

/// Loads every whole vector of `bytes`, four apart: waits for memory and nothing else. The result only keeps the
/// compiler from leaving the loads out.
///
/// # Safety
/// The set's instructions.
#[inline(always)]
pub(crate) unsafe fn read<S: Simd>(bytes: &[u8]) -> f32 {
    let step = 4 * S::LANES;
    let count = bytes.len() / 4 / step * step;
    let start = bytes.as_ptr().cast::<f32>();
    // SAFETY: `count` elements of four bytes lie in the slice; loads take any alignment.
    unsafe {
        let one = S::splat(1.0);
        let mut acc = [S::zero(); 4];
        let mut i = 0;
        while i < count {
            for (j, acc) in acc.iter_mut().enumerate() {
                *acc = S::fma(S::load(start.add(i + j * S::LANES)), one, *acc);
            }
            i += step;
        }
        // All four, or the compiler leaves three quarters of the loads out.
        S::sum4(acc).iter().sum()
    }
}

/// Rotates a head in place: pairs are `(i, i + half)`, as Hugging Face lays them out.
#[inline(always)]
pub(crate) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = x * c - y * s;
        *b = y * c + x * s;
    }
}

/// `out = silu(gate) * up`.
#[inline(always)]
pub(crate) fn gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
        *o = g / (1.0 + exp(-*g)) * u;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst = 0f64;
        for i in -8700..8800 {
            let x = i as f32 / 100.0;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            worst = worst.max(((got - want) / want).abs());
        }
        assert!(worst < 2e-7, "{worst}");
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(f32::INFINITY).is_finite() && exp(f32::NAN) < 1e-37);
    }

    #[test]
    fn bf16_rounds_as_the_half_crate() {
        for bits in (0..=u32::MAX).step_by(9973) {
            let x = f32::from_bits(bits);
            let want = half::bf16::from_f32(x);
            if x.is_nan() {
                assert!(half::bf16::from_bits(to_bf16(x)).is_nan());
            } else {
                assert_eq!(to_bf16(x), want.to_bits(), "{x}");
            }
        }
    }
}
