//! A row's bits depend on its sequence alone: not on the batch, the cut into steps, the threads, or how it came to be.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{bits, case, kv, rows, run};
use pilotlight_engine::kernels::KernelSet;
use pilotlight_engine::kv::SeqId;
use pilotlight_engine::model::{Cpu, Model, Row, StepError};
use pilotlight_engine::sample::greedy;
use proptest::prelude::*;

/// Cases that differ in what could go wrong: odd sizes, windows, norms, f16 and f32 weights.
const CASES: [&str; 5] = ["headsize24", "mistral-window", "qwen3-qknorm", "llama-f16", "llama-f32"];

fn cpus(threads: usize) -> Vec<Cpu> {
    KernelSet::available().into_iter().map(|set| Cpu::new(set, threads).unwrap()).collect()
}

/// Greedy tokens and the bits of the logits that chose them, one at a time.
fn decode(cpu: &mut Cpu, model: &Model, prompt: &[u32], count: usize) -> (Vec<u32>, Vec<Vec<u32>>) {
    let mut kv = kv(model, prompt.len() + count);
    let seq = kv.open();
    let mut next = rows(seq, 0, prompt);
    let (mut tokens, mut seen) = (Vec::new(), Vec::new());
    for i in 0..count {
        let logits = cpu.step(model, &mut kv, &next).unwrap();
        let last = logits.row(logits.rows() - 1);
        tokens.push(greedy(last));
        seen.push(bits(last));
        next = rows(seq, prompt.len() + i, &tokens[i..]);
    }
    (tokens, seen)
}

#[test]
fn replay_continues_bit_for_bit() {
    for name in CASES {
        let case = case(name);
        for cpu in &mut cpus(2) {
            let (tokens, seen) = decode(cpu, &case.model, &case.prompt, 20);
            for at in [1, 7, 16] {
                let mut replayed = case.prompt.clone();
                replayed.extend(&tokens[..at]);
                let (rest, bits) = decode(cpu, &case.model, &replayed, 20 - at);
                assert_eq!(rest, tokens[at..], "{name} {}", cpu.kernels());
                assert!(bits == seen[at..], "{name} {}: logits differ after a replay at {at}", cpu.kernels());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_cut_into_steps_does_not_show(
        which in 0..CASES.len(), seed in any::<u64>(), len in 1usize..150,
        steps in prop::collection::vec(1usize..40, 1..8), threads in 1usize..4,
    ) {
        let case = case(CASES[which]);
        let tokens = tokens(seed, len, case.model.config().vocab);
        for (one, many) in cpus(1).iter_mut().zip(&mut cpus(threads)) {
            let whole = run(one, &case.model, &tokens, &[512]);
            let cut = run(many, &case.model, &tokens, &steps);
            for (i, (a, b)) in whole.iter().zip(&cut).enumerate() {
                prop_assert!(bits(a) == bits(b), "{} {}: position {i}, steps {steps:?}", case.name, one.kernels());
            }
        }
    }

    #[test]
    fn neighbours_do_not_show(
        which in 0..CASES.len(), seed in any::<u64>(), lens in prop::collection::vec(1usize..60, 1..12),
    ) {
        let case = case(CASES[which]);
        let mut random = fastrand::Rng::with_seed(seed);
        let texts: Vec<Vec<u32>> =
            lens.iter().map(|n| tokens(random.u64(..), *n, case.model.config().vocab)).collect();
        for cpu in &mut cpus(2) {
            let alone: Vec<_> = texts.iter().map(|t| run(cpu, &case.model, t, &[512])).collect();
            let together = mixed(cpu, &case.model, &texts, &mut random);
            for (i, (a, b)) in alone.iter().zip(&together).enumerate() {
                prop_assert!(a.len() == b.len());
                for (x, y) in a.iter().zip(b) {
                    prop_assert!(bits(x) == bits(y), "{} {}: sequence {i}", case.name, cpu.kernels());
                }
            }
        }
    }
}

fn tokens(seed: u64, len: usize, vocab: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| random.u32(..vocab as u32)).collect()
}

/// All texts at once, in steps of random parts of random sequences.
fn mixed(cpu: &mut Cpu, model: &Model, texts: &[Vec<u32>], random: &mut fastrand::Rng) -> Vec<Vec<Vec<f32>>> {
    let positions = texts.iter().map(|t| t.len().next_multiple_of(16)).sum();
    let mut kv = kv(model, positions);
    let seqs: Vec<SeqId> = texts.iter().map(|_| kv.open()).collect();
    let mut out: Vec<Vec<Vec<f32>>> = vec![Vec::new(); texts.len()];
    while out.iter().zip(texts).any(|(o, t)| o.len() < t.len()) {
        let mut order: Vec<usize> = (0..texts.len()).collect();
        random.shuffle(&mut order);
        let mut step: Vec<Row> = Vec::new();
        let mut owners = Vec::new();
        for i in order {
            let (done, len) = (out[i].len(), texts[i].len());
            let count = random.usize(0..=len - done);
            step.extend(rows(seqs[i], done, &texts[i][done..done + count]));
            owners.extend(std::iter::repeat_n(i, count));
        }
        let logits = cpu.step(model, &mut kv, &step).unwrap();
        for (row, owner) in owners.into_iter().enumerate() {
            out[owner].push(logits.row(row).to_vec());
        }
    }
    out
}

#[test]
fn a_truncated_sequence_goes_on_as_if_it_had_never_been_longer() {
    let case = case("mistral-window");
    for cpu in &mut cpus(2) {
        let mut kv = kv(&case.model, 128);
        let seq = kv.open();
        cpu.step(&case.model, &mut kv, &rows(seq, 0, &[9; 70])).unwrap();
        kv.truncate(seq, 0);
        cpu.step(&case.model, &mut kv, &rows(seq, 0, &case.prompt)).unwrap();
        cpu.step(&case.model, &mut kv, &rows(seq, case.prompt.len(), &[5; 30])).unwrap();
        kv.truncate(seq, 33);
        let got = cpu.step(&case.model, &mut kv, &rows(seq, 33, &case.prompt[33..])).unwrap();
        let got: Vec<_> = got.iter().map(bits).collect();
        let want: Vec<_> =
            run(cpu, &case.model, &case.prompt, &[512])[33..].iter().map(|l| bits(l)).collect();
        assert!(got == want, "{}", cpu.kernels());
    }
}

#[test]
fn a_step_tells_after_each_layer_that_it_goes_on() {
    let case = case("llama-untied");
    let mut cpu = Cpu::new(KernelSet::best(), 1).unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    cpu.between_layers(Box::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    }));
    let mut kv = kv(&case.model, 32);
    let seq = kv.open();
    cpu.step(&case.model, &mut kv, &rows(seq, 0, &[1; 10])).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), case.model.config().layers);
}

#[test]
fn a_refused_step_changes_nothing() {
    let case = case("llama-untied");
    let mut cpu = Cpu::new(KernelSet::best(), 1).unwrap();
    let mut kv = kv(&case.model, 32);
    let (a, b) = (kv.open(), kv.open());
    cpu.step(&case.model, &mut kv, &rows(a, 0, &[1; 10])).unwrap();
    let mut step = |rows: &[Row]| cpu.step(&case.model, &mut kv, rows).map(|l| l.rows()).unwrap_err();
    assert!(matches!(step(&rows(a, 9, &[1])), StepError::Position { row: 0, found: 9, next: Some(10) }));
    assert!(matches!(step(&rows(a, 10, &[1, 2, 100_000])), StepError::Token { row: 2, token: 100_000, .. }));
    assert!(matches!(step(&rows(b, 0, &[1; 513])), StepError::Rows { rows: 513 }));
    let both = [rows(a, 10, &[1]), rows(b, 0, &[1]), rows(a, 11, &[1])].concat();
    assert!(matches!(step(&both), StepError::Position { row: 2, next: None, .. }));
    let both = [rows(a, 10, &[1; 7]), rows(b, 0, &[1])].concat();
    assert!(matches!(step(&both), StepError::Pages(p) if p.wanted == 2 && p.free == 1));
    assert_eq!((kv.len(a), kv.len(b), kv.pages_free()), (Some(10), Some(0), 1));
    cpu.step(&case.model, &mut kv, &[]).unwrap();
}
