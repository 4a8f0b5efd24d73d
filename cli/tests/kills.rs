//! `kill -9` at random moments: of a worker, of an agent, of the only agent, and of `up` itself. Streams go on and say
//! byte for byte what an undisturbed run says; only who loses `up` loses its connections, and a restart finds the rest.
//!
//! Each round runs a few answers of different kinds at once; the seed is printed. A few rounds run by default;
//! `PILOTLIGHT_ROUNDS=300` runs so many.

#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]
#![allow(clippy::print_stderr, reason = "what a long run came to")]

mod world;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use world::streams::{Dice, Said, Stream, answer, kinds, round, rounds, seed, three_nodes};
use world::{Up, alive, long_model, model, run, signal};

/// Who dies again and again is started later and later, up to ten seconds: a fresh `up` starts at once.
const ROUNDS_OF_AN_UP: u64 = 6;

/// Rounds in which some of these processes die, a few of each `up`.
async fn loops(
    by_default: u64,
    start: impl AsyncFn(&Path) -> Up,
    victims: impl Fn(&Up, &mut Dice) -> Vec<u32>,
) {
    let dir = tempfile::tempdir().unwrap();
    let (rounds, mut dice) = (rounds(by_default), Dice(seed()));
    let (mut undisturbed, mut moved) = (Vec::new(), 0);
    for first in (0..rounds).step_by(usize::try_from(ROUNDS_OF_AN_UP).unwrap()) {
        let up = start(dir.path()).await;
        if undisturbed.is_empty() {
            undisturbed = kinds(&up).await;
        }
        for _ in first..rounds.min(first + ROUNDS_OF_AN_UP) {
            let victims = victims(&up, &mut dice);
            moved += round(&up, &undisturbed, &mut dice, || kill(&victims)).await;
        }
        up.stop();
        eprintln!("{} rounds, {moved} sessions recovered", rounds.min(first + ROUNDS_OF_AN_UP));
    }
    assert!(moved > 0, "nobody was hit");
}

fn kill(victims: &[u32]) {
    for pid in victims.iter().filter(|pid| alive(**pid)) {
        signal(*pid, "KILL");
    }
}

async fn one_node(dir: &Path) -> Up {
    let up = Up::start(&[]);
    up.apply(&[model("demo", &long_model(dir), json!({}))]);
    up
}

#[tokio::test]
async fn streams_survive_their_worker() {
    loops(4, one_node, |up, _| up.children("worker --device cpu")).await;
}

#[tokio::test]
async fn streams_survive_their_only_agent() {
    loops(2, one_node, |up, _| up.children("pilotlight agent")).await;
}

#[tokio::test]
async fn streams_survive_an_agent_of_several() {
    let start = async |dir: &Path| three_nodes(dir).await;
    let any = |up: &Up, dice: &mut Dice| {
        let agents = up.children("pilotlight agent");
        vec![agents[usize::try_from(dice.below(agents.len() as u64)).unwrap()]]
    };
    loops(3, start, any).await;
}

/// Waits until all of these processes are gone; nobody waits for them any more, so nobody but the system knows.
async fn gone(processes: &[u32], seed_and_round: &str) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while processes.iter().any(|pid| alive(*pid)) {
        assert!(Instant::now() < deadline, "processes outlive a killed up: {seed_and_round}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// What was staged from the model's folder to the disk since the agent's start, in bytes.
async fn staged(up: &Up) -> f64 {
    let metrics = up.get_text(&up.agent_url(), "/metrics").await;
    let of = |line: &&str| line.starts_with("pilotlight_agent_load_bytes_total{from=\"remote\"");
    metrics.lines().filter(of).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[tokio::test]
async fn a_killed_up_leaves_no_process_and_its_restart_finds_everything() {
    let dir = tempfile::tempdir().unwrap();
    let made = run(&["key", "new", "alice", "--model", "demo", "-o", "json"]);
    let made: Value = serde_json::from_slice(&made.stdout).unwrap();
    let keys = dir.path().join("keys.yaml");
    std::fs::write(&keys, format!("- {}\n", made["entry"])).unwrap();
    let data = dir.path().join("data");
    let start = || {
        let mut up = Up::start_in(&data, &["--api-keys", keys.to_str().unwrap()]);
        up.key = Some(made["key"].as_str().unwrap().to_owned());
        up
    };
    let (rounds, mut dice) = (rounds(3), Dice(seed()));
    let seed = dice.0;
    let mut up = start();
    up.apply(&[model("demo", &long_model(dir.path()), json!({}))]);
    let undisturbed = kinds(&up).await;
    assert!(staged(&up).await > 0.0, "this is how it is seen that it was staged");
    for round in 0..rounds {
        let mut pick = || &undisturbed[usize::try_from(dice.below(undisturbed.len() as u64)).unwrap()];
        let (open, again): (&(Value, Said), &(Value, Said)) = (pick(), pick());
        // In the middle of a stream, or of its start.
        let stream = Stream::open(&up, &open.0).await;
        tokio::time::sleep(Duration::from_millis(dice.below(400))).await;
        let below = up.kill();
        assert!(!below.is_empty());
        gone(&below, &format!("seed {seed}, round {round}")).await;
        drop(stream);
        up = start();
        assert_eq!(answer(&up, &again.0).await, again.1, "seed {seed}, round {round}\n{}", up.log());
        assert!(up.log().lines().all(|line| !line.contains("panicked")), "{}", up.log());
        assert_eq!(staged(&up).await, 0.0, "the disk tier was not found");
        let key = up.key.take();
        assert_eq!(up.send("POST", "/v1/completions", open.0.to_string()).await.status(), 401);
        up.key = key;
    }
    up.stop();
    eprintln!("{rounds} rounds, each found its model, its bytes on disk and its keys");
}
