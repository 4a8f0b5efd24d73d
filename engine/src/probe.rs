//! What this machine can do at most: read bandwidth and multiply-add rate, measured with the engine's own threads and
//! instructions. Benchmarks report against these.
//!
//! Both are the best of a few short rounds: anything else running on the cores can only make a round slower.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::kernels::{KernelSet, Ops};
use crate::threads::ThreadPool;
use crate::weights::WeightDtype;

/// Bytes that a thread reads at a time.
const PIECE: usize = 1 << 20;

/// The best rate, in bytes per second, at which all threads together read `memory` with the set's loads, over
/// some rounds.
///
/// `memory` should be several times the last-level cache, for example a model's weights.
///
/// # Panics
/// If this machine cannot run the set.
pub fn read_bandwidth(threads: &mut ThreadPool, set: KernelSet, memory: &[&[u8]], rounds: usize) -> f64 {
    let ops = Ops::of(set).expect("the caller runs this set");
    let pieces: Vec<&[u8]> = memory.iter().flat_map(|m| m.chunks(PIECE)).collect();
    let bytes: usize = pieces.iter().map(|p| p.len()).sum();
    best(rounds, || {
        threads.run_many(pieces.len(), |i, _| {
            black_box(ops.read(pieces[i]));
        });
        bytes as f64
    })
}

/// The best rate, in multiplications and additions per second, of the multiply-add instruction that a kernel set uses
/// for weights of this dtype, on all threads.
///
/// # Panics
/// If this machine cannot run the set.
pub fn multiply_add_peak(threads: &mut ThreadPool, set: KernelSet, dtype: WeightDtype, rounds: usize) -> f64 {
    let ops = Ops::of(set).expect("the caller runs this set");
    /// Some tenths of a millisecond for each chunk.
    const TIMES: u64 = 20_000;
    let chunks = threads.threads() * 50;
    best(rounds, || {
        let done = std::sync::atomic::AtomicU64::new(0);
        threads.run(chunks, |_, _| {
            let operations = ops.multiply_adds(dtype, TIMES);
            done.fetch_add(operations, std::sync::atomic::Ordering::Relaxed);
        });
        done.into_inner() as f64
    })
}

/// The best of some rounds of work that says how much it did, per second.
fn best(rounds: usize, mut round: impl FnMut() -> f64) -> f64 {
    let mut rate = 0f64;
    for _ in 0..rounds {
        let start = Instant::now();
        let work = round();
        let seconds = start.elapsed().max(Duration::from_nanos(1)).as_secs_f64();
        rate = rate.max(work / seconds);
    }
    rate
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read() {
        let words: Vec<f32> = (0..4096u16).map(f32::from).collect();
        for set in KernelSet::available() {
            let sum = Ops::of(set).unwrap().read(bytemuck::cast_slice(&words));
            assert_eq!(sum, words.iter().sum::<f32>(), "{set}");
        }
    }

    #[test]
    fn rates_are_of_a_plausible_size() {
        let mut threads = ThreadPool::new(1).unwrap();
        let memory = vec![1u8; 4 << 20];
        let bandwidth = read_bandwidth(&mut threads, KernelSet::best(), &[&memory], 2);
        assert!((1e8..1e13).contains(&bandwidth), "{bandwidth}");
        for set in KernelSet::available() {
            let peak = multiply_add_peak(&mut threads, set, WeightDtype::Bf16, 1);
            assert!((1e8..1e14).contains(&peak), "{set}: {peak}");
        }
    }
}
