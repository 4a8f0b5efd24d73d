//! Philox4x32-10, a counter-based random function (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").

/// A number in `0 .. 1` with 53 random bits, a function of the two arguments alone.
pub fn uniform(seed: u64, index: u64) -> f64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let block = philox([index as u32, (index >> 32) as u32, 0, 0], key);
    let bits = u64::from(block[1]) << 32 | u64::from(block[0]);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xd251_1f53;
        let b = u64::from(counter[2]) * 0xcd9e_8d57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' Random123 library.
    #[test]
    fn agrees_with_the_published_vectors() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn numbers_are_spread_and_differ_by_seed_and_index() {
        let mean = (0..10_000).map(|i| uniform(7, i)).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        assert_ne!(uniform(7, 1), uniform(8, 1));
        assert_ne!(uniform(7, 1), uniform(7, 2));
        assert!((0..10_000).all(|i| (0.0..1.0).contains(&uniform(i, u64::MAX - i))));
    }
}
