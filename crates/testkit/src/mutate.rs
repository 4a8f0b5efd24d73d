//! Small mutations of real inputs, for parsers of bytes that come from a stranger. The default tests drive each fuzz
//! target's entry function with it for a moment; the fuzzers in `fuzz/` drive the same function for hours.
//!
//! Invariants: one seed gives one sequence of inputs; an input is at most [`BYTES_MAX`]; whatever fails has its seed
//! and its input printed. It deliberately does not follow coverage: that is the fuzzers' work.

use std::path::{Path, PathBuf};

/// The longest input that a mutation makes; the seeds are far shorter.
pub const BYTES_MAX: usize = 64 << 10;

/// Words that parsers of JSON and of lengths stumble over.
const WORDS: [&[u8]; 24] = [
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1e39",
    b"1e309",
    b"-0.0",
    b"4294967296",
    b"9223372036854775808",
    b"18446744073709551615",
    b"\"\"",
    b"[]",
    b"{}",
    b"[[[[[[[[[[[[[[[[",
    b"{\"a\":{\"a\":{\"a\":",
    b"\"\\ud800\"",
    b"\\u0000",
    b"\xff\xfe",
    b"\xf0\x9f\x98\x80",
    b",",
    b"\n",
    b"\r\n",
    b"\x00\x00\x00\x00\x00\x00\x00\x00",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
];

/// Gives `entry` every seed of `fuzz/seeds/{target}`, and then so many mutations of them. `PILOTLIGHT_SEED` repeats a run.
///
/// # Panics
/// Where `entry` does, after the seed and the input were printed; and where the target has no seeds.
#[allow(clippy::disallowed_methods, reason = "a test's seed")]
pub fn drive(target: &str, rounds: u32, entry: impl Fn(&[u8])) {
    let seeds = seeds(target);
    let given = std::env::var("PILOTLIGHT_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| fastrand::u64(..));
    let mut dice = fastrand::Rng::with_seed(seed);
    for input in &seeds {
        run(&entry, input, target, seed);
    }
    for _ in 0..rounds {
        let mut input = seeds[dice.usize(..seeds.len())].clone();
        for _ in 0..=dice.u32(..4) {
            mutate(&mut input, &seeds, &mut dice);
        }
        input.truncate(BYTES_MAX);
        run(&entry, &input, target, seed);
    }
}

fn run(entry: &impl Fn(&[u8]), input: &[u8], target: &str, seed: u64) {
    let told = Told { input, target, seed };
    entry(input);
    std::mem::forget(told);
}

/// Tells of the input that it was dropped with.
struct Told<'a> {
    input: &'a [u8],
    target: &'a str,
    seed: u64,
}

impl Drop for Told<'_> {
    #[allow(clippy::print_stderr, reason = "what failed")]
    fn drop(&mut self) {
        let Told { input, target, seed } = self;
        eprintln!("{target}: PILOTLIGHT_SEED={seed}, input: {}", input.escape_ascii());
    }
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let entries =
        std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("read {}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} holds no seeds", folder.display());
    files.iter().map(|file| std::fs::read(file).expect("a seed can be read")).collect()
}

fn mutate(input: &mut Vec<u8>, seeds: &[Vec<u8>], dice: &mut fastrand::Rng) {
    let (at, to) = range(input.len(), dice);
    match dice.u32(..8) {
        0 if at < input.len() => input[at] ^= 1 << dice.u32(..8),
        1 if at < input.len() => input[at] = dice.u8(..),
        2 => drop(input.drain(at..to)),
        3 => {
            let again = input[at..to].to_vec();
            input.splice(to..to, again);
        }
        4 => drop(input.splice(at..to, dice.choice(WORDS).unwrap_or_default().iter().copied())),
        5 => drop(input.splice(at..at, dice.choice(WORDS).unwrap_or_default().iter().copied())),
        6 => {
            let other = &seeds[dice.usize(..seeds.len())];
            let (from, until) = range(other.len(), dice);
            input.splice(at..to, other[from..until].iter().copied());
        }
        _ => input.truncate(at),
    }
}

/// Mostly short, so that most of an input stays what it was.
fn range(len: usize, dice: &mut fastrand::Rng) -> (usize, usize) {
    let at = dice.usize(..=len);
    let most = if dice.bool() { 8 } else { len - at };
    (at, at + dice.usize(..=most.min(len - at)))
}
