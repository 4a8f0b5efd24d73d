use super::*;
use crate::view::{Hours, Scaling};

fn at(seconds: f64) -> Timestamp {
    Timestamp::from_micros(1_000_000_000 + (seconds * 1e6) as u64)
}

/// `min=0 max=4 target=2 idle=60 delay=10 fixed=3 suspend hours=2` (two from second 100 to 200)
fn facts(words: &str) -> ModelFacts {
    let mut facts = ModelFacts::default();
    let scaling: &mut Scaling = &mut facts.scaling;
    (scaling.max, scaling.target) = (4, Some(2));
    for word in words.split_whitespace() {
        let (key, value) = word.split_once('=').unwrap_or((word, "0"));
        let number: u32 = value.parse().unwrap();
        let seconds = Duration::from_secs(number.into());
        match key {
            "min" => scaling.min = number,
            "max" => scaling.max = number,
            "target" => scaling.target = Some(number),
            "slots" => scaling.target = None,
            "idle" => scaling.idle = seconds,
            "delay" => scaling.down_delay = seconds,
            "fixed" => scaling.fixed = Some(number),
            "suspend" => facts.suspended = true,
            "hours" => scaling.hours.push(Hours { begins: at(100.0), ends: at(200.0), min: number }),
            other => panic!("{other}"),
        }
    }
    facts
}

/// Concurrency by second, for example `0:8 20:1`, up to now.
fn demand(words: &str) -> Demand {
    let mut demand = Demand::default();
    for word in words.split_whitespace() {
        let (second, value) = word.split_once(':').unwrap();
        let window = Duration::from_secs(60);
        demand.set(value.parse().unwrap(), 0, None, at(second.parse().unwrap()), window);
    }
    demand
}

fn ready(ordered: u32, ready: u32) -> Serving {
    Serving {
        ordered,
        ready,
        ready_since: (ready > 0).then(|| at(0.0)),
        under_way_since: (ordered > ready).then(|| at(0.0)),
        slots: 0,
    }
}

#[track_caller]
fn check(spec: &str, load: &str, serving: Serving, now: f64, expect: &str) {
    let wanted = wanted(&facts(spec), &demand(load), serving, at(now));
    let due = wanted.due.map_or(String::new(), |due| format!(", again in {}", Seconds(due.since(at(now)))));
    assert_eq!(format!("{}: {}{due}", wanted.count, wanted.why), expect, "{spec} | {load} | {serving:?}");
}

#[test]
fn from_zero_in_proportion_to_the_backlog() {
    check("", "", ready(0, 0), 0.0, "0: no demand");
    check("min=1", "", ready(0, 0), 0.0, "1: scaling.minReplicas");
    check("", "0:1", ready(0, 0), 0.0, "1: woken by a request");
    check("", "0:5", ready(0, 0), 0.0, "3: woken by 5 requests");
    check("", "0:50", ready(0, 0), 0.0, "4: woken by 50 requests");
    check("slots=0", "0:5", ready(0, 0), 0.0, "1: woken by 5 requests");
    check("slots=0", "0:7", ready(0, 0), 0.0, "2: woken by 7 requests");
    // Warming up, the backlog has shrunk: nothing is taken back.
    check("", "0:1", ready(3, 0), 1.0, "3: woken by a request");
}

#[test]
fn by_the_windows_while_it_serves() {
    check(
        "",
        "0:4",
        ready(2, 2),
        30.0,
        "2: 4.0 sessions in the stable window, 2.0 per replica, again in 1.0s",
    );
    check(
        "",
        "0:2 60:8",
        ready(1, 1),
        62.0,
        "2: 4.0 sessions in the panic window, 2.0 per replica, again in 1.0s",
    );
    check(
        "",
        "0:2 60:8",
        ready(1, 1),
        66.0,
        "4: 8.0 sessions in the panic window, 2.0 per replica, again in 1.0s",
    );
    check("max=1", "0:9", ready(1, 1), 9.0, "1: 9.0 sessions in the stable window, 2.0 per replica");
}

#[test]
fn down_only_after_the_delay() {
    let busy_then_calm = "0:8 60:2";
    check(
        "delay=30",
        busy_then_calm,
        ready(4, 4),
        80.0,
        "4: 6.0 sessions in the stable window, 2.0 per replica, again in 1.0s",
    );
    check(
        "delay=10",
        busy_then_calm,
        ready(4, 4),
        120.0,
        "1: 2.0 sessions in the stable window, 2.0 per replica, again in 1.0s",
    );
}

#[test]
fn to_zero_after_the_idle_time_from_ready_or_the_last_body() {
    check("idle=60", "0:1 10:0", ready(1, 1), 20.0, "1: not idle for long enough, again in 50s");
    check("idle=60", "0:1 10:0", ready(1, 1), 70.0, "0: idle for 60s");
    check("idle=60 min=1", "0:1 10:0", ready(1, 1), 70.0, "1: scaling.minReplicas");
    // The last waiter left long ago; the timer starts when the load is done.
    check("idle=60", "0:1 1:0", ready(1, 0), 500.0, "1: a load goes on, again in 22m");
    let late = Serving { ready_since: Some(at(500.0)), ..ready(1, 1) };
    check("idle=60", "0:1 1:0", late, 501.0, "1: not idle for long enough, again in 59s");
    check("idle=60", "0:1 1:0", ready(1, 0), 1800.0, "0: no progress for 30m, and nobody waits");
}

#[test]
fn people_have_the_last_word() {
    check("suspend", "0:9", ready(2, 2), 5.0, "0: suspended");
    check("fixed=3", "", ready(0, 0), 5.0, "3: as many as spec.replicas says");
    check("fixed=0", "0:9", ready(0, 0), 5.0, "0: as many as spec.replicas says");
}

#[test]
fn hours_of_a_schedule_raise_the_minimum_while_they_last() {
    check("hours=2", "", ready(0, 0), 99.0, "0: no demand, again in 1.0s");
    check("hours=2", "", ready(0, 0), 100.0, "2: scaling.schedules, again in 100s");
    check("hours=2 min=3", "", ready(0, 0), 150.0, "3: scaling.minReplicas, again in 50s");
    check("hours=2", "", ready(2, 2), 199.0, "2: scaling.schedules, again in 1.0s");
    // Idle by then: quiet for longer than the idle time.
    check("hours=2 idle=60", "", ready(2, 2), 200.0, "0: idle for 200s");
    check("hours=2 fixed=1", "", ready(0, 0), 150.0, "1: as many as spec.replicas says");
    check("hours=2 suspend", "", ready(2, 2), 150.0, "0: suspended");
}
