use proptest::prelude::*;

use super::*;

fn neutral() -> Sampler {
    Sampler::new(&Sampling { temperature: Some(1.0), seed: 1, ..Sampling::default() })
}

fn one(sampler: &Sampler, logits: &[f32], index: u64) -> TokenId {
    sampler.sample(logits, &History::default(), index, &mut SampleScratch::default()).id
}

/// The set of tokens that a thousand draws give.
fn support(sampler: &Sampler, logits: &[f32]) -> Vec<TokenId> {
    let mut seen: Vec<TokenId> = (0..1000).map(|i| one(sampler, logits, i)).collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    let greedy = Sampler { temperature: 0.0, ..neutral() };
    assert_eq!(one(&greedy, &[1.0, 3.0, 3.0, 2.0], 0), 1);
    assert_eq!(one(&greedy, &[f32::NAN, -1.0, f32::NAN], 0), 1);
    assert_eq!(one(&greedy, &[f32::NAN, f32::NEG_INFINITY], 0), 0);
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.0f32, (2.0f32).ln(), (5.0f32).ln()];
    let mut counts = [0u32; 3];
    for i in 0..20_000 {
        counts[one(&neutral(), &logits, i) as usize] += 1;
    }
    for (count, share) in counts.iter().zip([1.0, 2.0, 5.0]) {
        let got = f64::from(*count) / 20_000.0;
        assert!((got - share / 8.0).abs() < 0.01, "{counts:?}");
    }
}

#[test]
fn truncations_keep_what_they_say() {
    // Probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625.
    let logits = [8f32, 4.0, 2.0, 1.0, 1.0].map(f32::ln);
    let with = |change: fn(&mut Sampler)| {
        let mut s = neutral();
        change(&mut s);
        support(&s, &logits)
    };
    assert_eq!(with(|_| ()), [0, 1, 2, 3, 4]);
    assert_eq!(with(|s| s.top_k = 2), [0, 1]);
    assert_eq!(with(|s| s.top_k = 100), [0, 1, 2, 3, 4]);
    assert_eq!(with(|s| s.top_p = 0.74), [0, 1]);
    assert_eq!(with(|s| s.top_p = 0.76), [0, 1, 2]);
    assert_eq!(with(|s| s.top_p = 0.0), [0]);
    assert_eq!(with(|s| s.min_p = 0.2), [0, 1, 2]);
    // Of the two that top-k keeps, 0.66 is the first one's share.
    assert_eq!(with(|s| (s.top_k, s.top_p) = (2, 0.66)), [0]);
    assert_eq!(with(|s| (s.top_k, s.min_p) = (4, 0.3)), [0, 1]);
}

#[test]
fn penalties_and_bias_move_logits() {
    let greedy = Sampler { temperature: 0.0, ..neutral() };
    let history = History::new(&[0], &[1, 1]);
    let choose =
        |s: &Sampler, logits: &[f32]| s.sample(logits, &history, 0, &mut SampleScratch::default()).id;
    let logits = [2.0, 2.1, 1.9];
    assert_eq!(choose(&greedy, &logits), 1);
    // The prompt's token is touched by the repetition penalty only.
    assert_eq!(choose(&Sampler { presence_penalty: 0.5, ..greedy.clone() }, &logits), 0);
    assert_eq!(choose(&Sampler { frequency_penalty: 0.06, ..greedy.clone() }, &logits), 0);
    assert_eq!(choose(&Sampler { repetition_penalty: 1.5, ..greedy.clone() }, &logits), 2);
    assert_eq!(choose(&Sampler { repetition_penalty: 1.5, ..greedy.clone() }, &[-1.0, -1.1, -1.2]), 2);
    assert_eq!(choose(&Sampler { logit_bias: vec![(2, 1.0), (99, 5.0)], ..greedy }, &logits), 2);
}

#[test]
fn logprobs_are_of_the_models_own_distribution() {
    let logits = [8f32, 4.0, 2.0, 1.0, 1.0].map(f32::ln);
    let sampler = Sampler { temperature: 0.1, logit_bias: vec![(4, 100.0)], logprobs: Some(3), ..neutral() };
    let sampled = sampler.sample(&logits, &History::default(), 0, &mut SampleScratch::default());
    let logprobs = sampled.logprobs.unwrap();
    assert_eq!(sampled.id, 4);
    assert!((logprobs.chosen - 0.0625f32.ln()).abs() < 1e-6);
    assert_eq!(logprobs.top.iter().map(|t| t.id).collect::<Vec<_>>(), [0, 1, 2]);
    assert!((logprobs.top[0].logprob - 0.5f32.ln()).abs() < 1e-6);
}

proptest! {
    #[test]
    fn hostile_numbers_never_panic(
        logits in prop::collection::vec(prop::num::f32::ANY, 1..300),
        temperature in prop::num::f32::ANY, top_k in any::<u32>(), top_p in prop::num::f32::ANY,
        min_p in prop::num::f32::ANY, penalty in prop::num::f32::ANY, bias in prop::num::f32::ANY,
        index in any::<u64>(), seed in any::<u64>(), wanted in 0u32..400,
    ) {
        let sampler = Sampler {
            temperature, top_k, top_p, min_p, repetition_penalty: penalty, frequency_penalty: penalty,
            presence_penalty: penalty, logit_bias: vec![(0, bias)], seed, logprobs: Some(wanted),
        };
        let history = History::new(&[0, 5], &[1, 1, 400]);
        let got = sampler.sample(&logits, &history, index, &mut SampleScratch::default());
        prop_assert!((got.id as usize) < logits.len());
        prop_assert_eq!(&got, &sampler.sample(&logits, &history, index, &mut SampleScratch::default()));
        let logprobs = got.logprobs.unwrap();
        prop_assert!(logprobs.top.len() == logits.len().min(wanted as usize));
        prop_assert!(logprobs.chosen.is_finite());
    }

    /// Truncation that is wide enough changes nothing about which tokens may come.
    #[test]
    fn nucleus_is_the_smallest_set(logits in prop::collection::vec(-10f32..10.0, 2..600), top_p in 0.05f32..0.999, index in any::<u64>()) {
        let sampler = Sampler { top_p, ..neutral() };
        let id = one(&sampler, &logits, index);
        let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        let above: f64 = logits.iter().filter(|l| **l > logits[id as usize]).map(|l| f64::from(*l).exp()).sum();
        prop_assert!(above <= f64::from(top_p) * total * (1.0 + 1e-9));
    }
}
