//! Rotary positions: a frequency for each pair of dimensions, and the angles of a row.
//!
//! As transformers does it: frequencies and angles in f32. Their sines and cosines are taken in f64 and rounded once.

use std::f64::consts::TAU;

use super::config::{ModelConfig, RopeScaling};

/// `head_dim / 2` frequencies.
pub(super) fn frequencies(config: &ModelConfig) -> Vec<f32> {
    (0..config.head_dim / 2)
        .map(|i| {
            let plain = config.rope_theta.powf(-((2 * i) as f64) / config.head_dim as f64);
            scaled(plain, config.rope_scaling) as f32
        })
        .collect()
}

fn scaled(frequency: f64, scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let turns = original_context * frequency / TAU;
            if turns < low_freq_factor {
                frequency / factor
            } else if turns > high_freq_factor {
                frequency
            } else {
                let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

/// Cosines and sines of one position.
pub(super) fn angles(frequencies: &[f32], position: u32, cos: &mut [f32], sin: &mut [f32]) {
    for ((f, c), s) in frequencies.iter().zip(cos).zip(sin) {
        let (sine, cosine) = f64::from(position as f32 * f).sin_cos();
        (*c, *s) = (cosine as f32, sine as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_high_and_stretches_low_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192.0,
        };
        assert_eq!(scaled(1.0, scaling), 1.0);
        assert_eq!(scaled(1e-5, scaling), 1e-5 / 32.0);
        let middle = TAU * 2.5 / 8192.0;
        assert!((scaled(middle, scaling) - middle * (0.5 + 0.5 / 32.0)).abs() < 1e-12);
    }
}
