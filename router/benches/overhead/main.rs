//! What the router costs: time and requests per second of one core beside a bare axum proxy and, if `nginx` is on the
//! PATH, nginx, in turns in one run; and the memory of a request that is held. It prints goals beside the figures and
//! asserts nothing: `cargo bench -p pilotlight-router -- rounds=3 seconds=2 held=4000`.
//!
//! Each subject has a thread of its own, and forwards to the same agent, which answers at once. `direct` is that agent
//! without anybody between: what a subject takes longer is its own. Requests per second and core come from the CPU time
//! of the subject's thread, so that neighbours on the machine falsify little.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "it prints, and a failure ends it")]
#![allow(clippy::disallowed_methods, reason = "arguments")]
#![allow(missing_docs, reason = "a program")]

mod held;
mod load;
mod subjects;

use std::time::Duration;

use load::Figures;
use subjects::Subject;

/// Of design.md's numbers.
const GOAL_P50: Duration = Duration::from_micros(150);
const GOAL_P99: Duration = Duration::from_micros(600);
const GOAL_PER_CORE: f64 = 5_000.0;

fn argument(name: &str, default: u64) -> u64 {
    let given = std::env::args().find_map(|arg| arg.strip_prefix(name)?.strip_prefix('=')?.parse().ok());
    given.unwrap_or(default)
}

fn main() {
    let (rounds, held) = (argument("rounds", 3), argument("held", 4_000));
    let time = Duration::from_secs(argument("seconds", 2));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let world = subjects::World::start();
    held::run(&runtime, &world, usize::try_from(held).unwrap());
    let subjects = Subject::all(&world);
    for connections in [1, 16] {
        let mut figures: Vec<Figures> = subjects.iter().map(|_| Figures::default()).collect();
        for _ in 0..rounds {
            for (subject, figures) in subjects.iter().zip(&mut figures) {
                let before = subject.cpu();
                runtime.block_on(load::run(subject, connections, time, figures));
                figures.cpu += subject.cpu().saturating_sub(before);
            }
        }
        print(connections, &subjects, &mut figures);
    }
}

fn print(connections: usize, subjects: &[Subject], figures: &mut [Figures]) {
    println!("\n{connections} connection(s), each with one request at a time");
    println!(
        "{:<18} {:>10} {:>9} {:>9} {:>10} {:>12} {:>12} {:>14}",
        "", "requests", "p50 ms", "p99 ms", "req/s", "over p50 ms", "over p99 ms", "req/s per core"
    );
    let direct = (figures[0].quantile(0.5), figures[0].quantile(0.99));
    for (subject, figures) in subjects.iter().zip(figures) {
        let (p50, p99) = (figures.quantile(0.5), figures.quantile(0.99));
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let (over50, over99) = (ms(p50) - ms(direct.0), ms(p99) - ms(direct.1));
        let per_core = figures.times.len() as f64 / figures.cpu.as_secs_f64();
        println!(
            "{:<18} {:>10} {:>9.3} {:>9.3} {:>10.0} {over50:>12.3} {over99:>12.3} {per_core:>14.0}",
            subject.name,
            figures.times.len(),
            ms(p50),
            ms(p99),
            figures.times.len() as f64 / figures.wall.as_secs_f64(),
        );
    }
    println!(
        "goals of the router: over p50 <= {:.2} ms, over p99 <= {:.2} ms, at {GOAL_PER_CORE:.0} req/s per core",
        GOAL_P50.as_secs_f64() * 1e3,
        GOAL_P99.as_secs_f64() * 1e3,
    );
}
