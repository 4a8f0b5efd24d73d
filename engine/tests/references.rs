//! Logits against Hugging Face transformers in f32, for every family and every kernel set that this machine can run.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

mod common;

use common::{Case, cases, cosine, run};
use pilotlight_engine::kernels::KernelSet;
use pilotlight_engine::model::Cpu;
use pilotlight_engine::sample::greedy;

/// The promise. torch's own bf16 reaches 0.9969 to 0.9999 on these.
const COSINE_MIN: f64 = 0.998;

fn check(case: &Case, cpu: &mut Cpu) {
    let (name, set) = (&case.name, cpu.kernels());
    let vocab = case.model.config().vocab;
    let mut tokens = case.prompt.clone();
    tokens.extend(&case.continuation[..case.continuation.len() - 1]);
    let got = run(cpu, &case.model, &tokens, &[case.prompt.len(), 1]);
    assert_eq!(got.len() * vocab, case.logits.len(), "{name}");
    let mut error = 0f64;
    let mut worst = 1f64;
    for (position, (got, want)) in got.iter().zip(case.logits.chunks_exact(vocab)).enumerate() {
        let cosine = cosine(got, want);
        worst = worst.min(cosine);
        assert!(cosine >= COSINE_MIN, "{name} {set}: cosine {cosine} at position {position}");
        error = got.iter().zip(want).map(|(a, b)| f64::from((a - b).abs())).fold(error, f64::max);
    }
    // A tenth of the logits' spread would be a wrong model, not a rounding.
    assert!(error < 0.1 * case.logits_std.max(1.0), "{name} {set}: largest error {error}");
    for (k, margin) in case.margins.iter().enumerate() {
        if *margin > 2.0 * error {
            let chosen = greedy(&got[case.prompt.len() - 1 + k]);
            assert_eq!(
                chosen, case.continuation[k],
                "{name} {set}: token {k}, margin {margin}, error {error}"
            );
        }
    }
    println!("{name:16} {set:10} cosine ≥ {worst:.6}, error ≤ {error:.5}");
}

#[test]
fn logits_agree_with_transformers() {
    let cases = cases();
    for set in KernelSet::available() {
        let mut cpu = Cpu::new(set, 2).unwrap();
        for case in &cases {
            check(case, &mut cpu);
        }
    }
}

#[test]
fn kernel_sets_agree_with_the_scalar_one() {
    for case in cases() {
        let scalar = run(&mut Cpu::new(KernelSet::Scalar, 1).unwrap(), &case.model, &case.prompt, &[512]);
        for set in KernelSet::available() {
            let got = run(&mut Cpu::new(set, 2).unwrap(), &case.model, &case.prompt, &[512]);
            // f32 sets differ in rounding only (keys and values are bf16 in all); bf16 products round activations.
            let least = if set == KernelSet::Avx512Bf16 { 0.998 } else { 0.9999 };
            for (a, b) in got.iter().zip(&scalar) {
                assert!(cosine(a, b) >= least, "{} {set}: {}", case.name, cosine(a, b));
            }
        }
    }
}
