//! Choosing a token from logits.
//!
//! ```text
//! logits → penalties, bias → grammar → ÷ temperature → top-k → top-p → min-p → one random number decides
//! ```
//!
//! Random numbers are **counter-based**: that of token *i* is Philox4x32-10 with the seed as key and *i* as counter,
//! a function of `(seed, i)` alone, so a session that moved draws the same numbers. Penalties are a function of the
//! token ids. Nothing else is state, and a replayed session needs nothing but its ids.
//!
//! Invariants: greedy takes the lowest id among equals; the same logits and settings give the same token on every
//! machine; whatever the numbers (NaN, infinities, empty sets) a token comes out and nothing panics.
//!
//! It deliberately does **not** validate settings (the router refuses nonsense) and knows neither stop strings nor
//! the end of a text.

mod philox;

use std::collections::HashMap;

use pilotlight_domain::session::{Sampling, TokenId};

pub use philox::uniform;

use crate::text::Mask;

/// Settings with every default filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    /// 0 (or below, or no number) is greedy.
    pub temperature: f32,
    /// Only the k most likely; 0 is off.
    pub top_k: u32,
    /// The smallest set with this much probability; 1 is off.
    pub top_p: f32,
    /// Only tokens at least this likely, relative to the most likely; 0 is off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that occurred; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted for each occurrence among the generated tokens.
    pub frequency_penalty: f32,
    /// Subtracted once if it occurred among the generated tokens.
    pub presence_penalty: f32,
    /// Added to logits.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The key of the random numbers.
    pub seed: u64,
    /// Report log-probabilities, with so many alternatives.
    pub logprobs: Option<u32>,
}

impl Sampler {
    /// From a session's settings, with neutral values for what they leave open. Merge `generation_config.json` in
    /// before, if it should count.
    pub fn new(s: &Sampling) -> Self {
        Sampler {
            temperature: s.temperature.unwrap_or(1.0),
            top_k: s.top_k.unwrap_or(0),
            top_p: s.top_p.unwrap_or(1.0),
            min_p: s.min_p.unwrap_or(0.0),
            repetition_penalty: s.repetition_penalty.unwrap_or(1.0),
            frequency_penalty: s.frequency_penalty,
            presence_penalty: s.presence_penalty,
            logit_bias: s.logit_bias.iter().map(|(id, bias)| (*id, *bias)).collect(),
            seed: s.seed,
            logprobs: s.logprobs,
        }
    }
}

/// Which tokens a session has seen, for the penalties. A function of its ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Token → how often it was generated; a token of the prompt alone counts 0.
    counts: HashMap<TokenId, u32>,
}

impl History {
    /// After a prompt and what was generated so far.
    pub fn new(prompt: &[TokenId], generated: &[TokenId]) -> Self {
        let mut history = History::default();
        for id in prompt {
            history.counts.entry(*id).or_insert(0);
        }
        for id in generated {
            history.push(*id);
        }
        history
    }

    /// A token was generated.
    pub fn push(&mut self, id: TokenId) {
        *self.counts.entry(id).or_insert(0) += 1;
    }
}

/// A token and its log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scored {
    /// The token.
    pub id: TokenId,
    /// Natural logarithm of its probability, in the distribution as the model gave it.
    pub logprob: f32,
}

/// What was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub id: TokenId,
    /// If they were asked for.
    pub logprobs: Option<SampledLogprobs>,
}

/// Log-probabilities of the distribution as the model gave it: before penalties, bias and temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledLogprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// As many as were asked for, most likely first; lowest id first among equals.
    pub top: Vec<Scored>,
}

/// Buffers, kept from token to token.
#[derive(Debug, Default)]
pub struct SampleScratch {
    logits: Vec<f32>,
    order: Vec<TokenId>,
    weights: Vec<f64>,
}

impl Sampler {
    /// Chooses token number `index` (counted from 0 over the whole generation) from the model's logits.
    ///
    /// `logits` must not be empty.
    pub fn sample(
        &self,
        logits: &[f32],
        history: &History,
        index: u64,
        scratch: &mut SampleScratch,
    ) -> Sampled {
        self.sample_among(logits, None, history, index, scratch)
    }

    /// As [`sample`](Self::sample), among the tokens that a grammar allows. If it allows none, it is no help.
    pub fn sample_among(
        &self,
        logits: &[f32],
        allowed: Option<&Mask>,
        history: &History,
        index: u64,
        scratch: &mut SampleScratch,
    ) -> Sampled {
        scratch.logits.clear();
        scratch.logits.extend_from_slice(logits);
        self.adjust(&mut scratch.logits, history);
        if let Some(mask) = allowed {
            let forbidden =
                scratch.logits.iter_mut().enumerate().filter(|(id, _)| !mask.allows(*id as TokenId));
            forbidden.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
        }
        let id = if self.temperature > 0.0 && self.temperature.is_finite() {
            self.draw(scratch, uniform(self.seed, index))
        } else {
            greedy(&scratch.logits)
        };
        // Where every allowed token is impossible (or no number) the lowest one is taken.
        let id = match allowed {
            Some(mask) if !mask.allows(id) => {
                mask.first().filter(|first| (*first as usize) < logits.len()).unwrap_or(id)
            }
            _ => id,
        };
        let logprobs = self.logprobs.map(|count| logprobs(logits, id, count as usize, &mut scratch.order));
        Sampled { id, logprobs }
    }

    fn adjust(&self, logits: &mut [f32], history: &History) {
        let penalised =
            self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0;
        if penalised {
            // Each token by itself: the map's order does not matter.
            for (id, count) in &history.counts {
                let Some(logit) = logits.get_mut(*id as usize) else { continue };
                *logit = if *logit > 0.0 {
                    *logit / self.repetition_penalty
                } else {
                    *logit * self.repetition_penalty
                };
                if *count > 0 {
                    *logit -= self.frequency_penalty * *count as f32 + self.presence_penalty;
                }
            }
        }
        for (id, bias) in &self.logit_bias {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit += bias;
            }
        }
    }

    /// Draws with the random number `u` in `0 .. 1`.
    fn draw(&self, scratch: &mut SampleScratch, u: f64) -> TokenId {
        let SampleScratch { logits, order, weights } = scratch;
        let best = greedy(logits);
        let max = f64::from(logits[best as usize]);
        if !max.is_finite() {
            return best;
        }
        // Weights relative to the most likely token, in order of id. A NaN weighs nothing.
        let temperature = f64::from(self.temperature);
        weights.clear();
        weights.extend(logits.iter().map(|l| match ((f64::from(*l) - max) / temperature).exp() {
            w if w >= 0.0 => w,
            _ => 0.0,
        }));
        let floor = f64::from(self.min_p);
        let nucleus = self.top_p < 1.0;
        if self.top_k == 0 && !nucleus {
            if floor > 0.0 {
                weights.iter_mut().filter(|w| **w < floor).for_each(|w| *w = 0.0);
            }
            let ids = 0..weights.len() as TokenId;
            return pick(ids.map(|id| (id, weights[id as usize])), u, best);
        }
        let kept = self.truncate(weights, order);
        let chosen = order[..kept].iter().map(|id| (*id, weights[*id as usize])).filter(|(_, w)| *w >= floor);
        pick(chosen, u, best)
    }

    /// Puts the ids that top-k and top-p keep at the beginning of `order`, most likely first; gives their number.
    fn truncate(&self, weights: &[f64], order: &mut Vec<TokenId>) -> usize {
        let limit = match self.top_k as usize {
            0 => weights.len(),
            k => k.min(weights.len()),
        };
        let by_weight =
            |a: &TokenId, b: &TokenId| weights[*b as usize].total_cmp(&weights[*a as usize]).then(a.cmp(b));
        // Also when it is no number.
        let nucleus = self.top_p < 1.0;
        if !nucleus {
            top(order, weights.len(), limit, by_weight);
            return limit;
        }
        let nucleus = f64::from(self.top_p.max(0.0));
        // The nucleus is small as a rule: sort a few, and more only if they do not reach.
        let mut count = 64.min(limit);
        let mut mass = None;
        loop {
            top(order, weights.len(), count, by_weight);
            let total = *mass.get_or_insert_with(|| self.mass(weights, order, limit, by_weight));
            let mut sum = 0.0;
            for (i, id) in order[..count].iter().enumerate() {
                sum += weights[*id as usize];
                if sum >= nucleus * total {
                    return i + 1;
                }
            }
            if count == limit {
                return limit;
            }
            count = (count * 8).min(limit);
        }
    }

    /// What top-p is a share of: everything, or what top-k kept.
    fn mass(
        &self,
        weights: &[f64],
        order: &mut Vec<TokenId>,
        limit: usize,
        by_weight: impl Fn(&TokenId, &TokenId) -> std::cmp::Ordering + Copy,
    ) -> f64 {
        if limit == weights.len() {
            return weights.iter().sum();
        }
        top(order, weights.len(), limit, by_weight);
        order[..limit].iter().map(|id| weights[*id as usize]).sum()
    }
}

/// Puts the `count` first ids by `compare` at the beginning of `order`, sorted.
fn top(
    order: &mut Vec<TokenId>,
    vocab: usize,
    count: usize,
    compare: impl Fn(&TokenId, &TokenId) -> std::cmp::Ordering + Copy,
) {
    order.clear();
    order.extend(0..vocab as TokenId);
    if 0 < count && count < vocab {
        order.select_nth_unstable_by(count - 1, compare);
    }
    order[..count].sort_unstable_by(compare);
}

/// The first token at which the running sum exceeds the share `u` of the whole.
fn pick(tokens: impl Iterator<Item = (TokenId, f64)> + Clone, u: f64, otherwise: TokenId) -> TokenId {
    let total: f64 = tokens.clone().map(|t| t.1).sum();
    let mut sum = 0.0;
    let mut last = otherwise;
    for (id, weight) in tokens {
        if weight <= 0.0 {
            continue;
        }
        sum += weight;
        last = id;
        if sum > u * total {
            return id;
        }
    }
    last
}

/// The most likely token; the lowest id among equals. NaN is never it unless there is nothing else.
pub fn greedy(logits: &[f32]) -> TokenId {
    let mut best = 0;
    let mut max = f32::NEG_INFINITY;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > max {
            (best, max) = (id, *logit);
        }
    }
    best as TokenId
}

fn logprobs(logits: &[f32], chosen: TokenId, count: usize, order: &mut Vec<TokenId>) -> SampledLogprobs {
    let max = f64::from(logits[greedy(logits) as usize]);
    let sum: f64 = logits.iter().map(|l| (f64::from(*l) - max).exp()).filter(|w| *w >= 0.0).sum();
    let of = |id: TokenId| {
        let logprob = f64::from(logits[id as usize]) - max - sum.ln();
        // JSON has no infinities; this is as unlikely as an f32 can say.
        if logprob.is_finite() { logprob as f32 } else { f32::MIN }
    };
    let rank = |id: &TokenId| Some(logits[*id as usize]).filter(|l| !l.is_nan()).unwrap_or(f32::NEG_INFINITY);
    let count = count.min(logits.len());
    top(order, logits.len(), count, |a, b| rank(b).total_cmp(&rank(a)).then(a.cmp(b)));
    SampledLogprobs {
        chosen: of(chosen),
        top: order[..count].iter().map(|id| Scored { id: *id, logprob: of(*id) }).collect(),
    }
}

#[cfg(test)]
mod tests;
