//! `spec.scaling.schedules` as hours that the plan knows: for each schedule those that are now, or come next.
//!
//! They are made anew whenever the model is planned, which is at the latest when the last ones begin or end. A schedule
//! that cannot be read raises nothing, and its Model says so.

use std::time::Duration;

use cronexpr::{Crontab, MakeTimestamp, parse_crontab};
use pilotlight_api::Model;
use pilotlight_api::model::Schedule;
use pilotlight_domain::Timestamp;
use pilotlight_domain::view::Hours;

/// The hours of a Model's schedules as of `now`.
pub(crate) fn hours(model: &Model, now: Timestamp) -> Vec<Hours> {
    model.spec.scaling.schedules.iter().filter_map(|schedule| next(schedule, now)).collect()
}

/// Why a schedule of a Model says nothing; none: all of them can be read.
pub(crate) fn mistake(model: &Model) -> Option<String> {
    let schedules = model.spec.scaling.schedules.iter().enumerate();
    let mut mistakes = schedules.filter_map(|(at, schedule)| {
        let error = read(schedule).err()?;
        Some(format!("spec.scaling.schedules[{at}] raises nothing: {error}"))
    });
    mistakes.next()
}

/// Five fields and a time zone.
fn read(schedule: &Schedule) -> Result<Crontab, String> {
    // What reads it takes the zone for a sixth field.
    if schedule.cron.split_whitespace().count() != 5 {
        return Err(format!(
            "cron: {:?} has not the five fields minute, hour, day, month, weekday",
            schedule.cron
        ));
    }
    if jiff::tz::TimeZone::get(&schedule.timezone).is_err() {
        return Err(format!("timezone: nothing is known of {:?}; write an IANA name", schedule.timezone));
    }
    // It draws the place, in lines of its own.
    let in_one_line = |error: cronexpr::Error| {
        let words: Vec<String> = error.to_string().split_whitespace().map(str::to_owned).collect();
        format!("cron: {:?}: {}", schedule.cron, words.join(" "))
    };
    parse_crontab(&format!("{} {}", schedule.cron, schedule.timezone)).map_err(in_one_line)
}

fn next(schedule: &Schedule, now: Timestamp) -> Option<Hours> {
    let lasts = Duration::from_secs(u64::try_from(schedule.duration_seconds).ok()?);
    // Those that began as long ago as they last are over by now.
    let since = now.as_micros().saturating_sub(u64::try_from(lasts.as_micros()).ok()?);
    let since = MakeTimestamp::from_microsecond(i64::try_from(since).ok()?).ok()?;
    let begins = read(schedule).ok()?.find_next(since).ok()?.timestamp().as_microsecond();
    let begins = Timestamp::from_micros(u64::try_from(begins).ok()?);
    Some(Hours { begins, ends: begins + lasts, min: u32::try_from(schedule.min_replicas).unwrap_or(0) })
}

#[cfg(test)]
mod tests {
    use pilotlight_kit::clock::parse_rfc3339;

    use super::*;

    fn schedule(cron: &str, timezone: &str, hours: i32) -> Schedule {
        Schedule {
            timezone: timezone.into(),
            cron: cron.into(),
            duration_seconds: hours * 3600,
            min_replicas: 2,
        }
    }

    #[test]
    fn the_hours_that_are_or_come_next() {
        let office = schedule("0 9 * * 1-5", "Europe/Berlin", 8);
        for (now, begins, ends) in [
            // A Friday in summer: two hours before UTC.
            ("2026-07-10T06:59:59Z", "2026-07-10T07:00:00Z", "2026-07-10T15:00:00Z"),
            ("2026-07-10T07:00:00Z", "2026-07-10T07:00:00Z", "2026-07-10T15:00:00Z"),
            ("2026-07-10T14:59:59Z", "2026-07-10T07:00:00Z", "2026-07-10T15:00:00Z"),
            // Then the Monday.
            ("2026-07-10T15:00:00Z", "2026-07-13T07:00:00Z", "2026-07-13T15:00:00Z"),
            // In winter it is one hour.
            ("2026-12-01T00:00:00Z", "2026-12-01T08:00:00Z", "2026-12-01T16:00:00Z"),
        ] {
            let found = next(&office, parse_rfc3339(now).unwrap()).unwrap();
            let expect = (parse_rfc3339(begins).unwrap(), parse_rfc3339(ends).unwrap());
            assert_eq!((found.begins, found.ends), expect, "{now}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_told() {
        for (cron, zone, says) in [
            ("0 9 * *", "UTC", "has not the five fields"),
            ("0 9 * * 1 2", "UTC", "has not the five fields"),
            ("0 99 * * 1", "UTC", "cron: \"0 99 * * 1\": "),
            ("0 9 * * 1", "Mars/Olympus", "timezone: nothing is known of \"Mars/Olympus\""),
        ] {
            let said = read(&schedule(cron, zone, 1)).unwrap_err();
            assert!(said.contains(says) && !said.contains('\n'), "{said}");
            assert_eq!(next(&schedule(cron, zone, 1), Timestamp::default()), None);
        }
    }
}
