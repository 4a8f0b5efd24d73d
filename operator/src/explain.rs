//! An explanation in the words of the wire.

use std::time::Duration;

use pilotlight_api::explain::{Candidate, Estimate, Explanation, TierCost};
use pilotlight_api::model::ColdStartReport;
use pilotlight_domain::view::{Hold, View};
use pilotlight_domain::{Bandwidth, ModelName, Timestamp, estimate, plan};

pub(crate) fn explain(
    view: &View,
    model: &ModelName,
    last: Option<ColdStartReport>,
    now: Timestamp,
) -> Option<Explanation> {
    let found = plan::explain(view, model, now)?;
    Some(Explanation {
        model: Some(model.clone()),
        wanted: found.wanted.0,
        why: found.wanted.1.to_string(),
        chosen: found.chosen.iter().map(ToString::to_string).collect(),
        unplaced: found.unplaced.map(|unplaced| unplaced.message).unwrap_or_default(),
        candidates: found.candidates.into_iter().map(candidate).collect(),
        last_cold_start: last,
    })
}

fn candidate(candidate: plan::Candidate) -> Candidate {
    Candidate {
        node: candidate.node.to_string(),
        chosen: candidate.chosen,
        why_not: candidate.why_not.map(|why| why.to_string()).unwrap_or_default(),
        note: candidate.note,
        estimate: candidate.estimate.map(|(hold, estimate)| wire(hold, &estimate)),
        devices: candidate.devices.iter().map(|(device, e)| wire(Hold::Serve(*device), e)).collect(),
    }
}

fn wire(hold: Hold, estimate: &estimate::Estimate) -> Estimate {
    let [fetch, read, copy] = estimate.bandwidth;
    let tier = |name: &str, time: Duration, rate: Bandwidth| {
        (time > Duration::ZERO).then(|| TierCost {
            tier: name.into(),
            missing_bytes: estimate.missing.get(),
            bytes_per_second: rate.get(),
            seconds: time.as_secs_f64(),
        })
    };
    Estimate {
        device: match hold {
            Hold::Serve(device) => device.as_str().into(),
            Hold::Disk | Hold::Host => String::new(),
        },
        from: estimate.from.as_str().into(),
        total_seconds: estimate.total().as_secs_f64(),
        queue_seconds: estimate.queue.as_secs_f64(),
        warm_seconds: estimate.warm.as_secs_f64(),
        prefill_seconds: estimate.prefill.as_secs_f64(),
        size_is_guess: estimate.size_is_guess,
        tiers: [
            tier("disk", estimate.fetch, fetch),
            tier("host", estimate.read, read),
            tier("device", estimate.copy, copy),
        ]
        .into_iter()
        .flatten()
        .collect(),
    }
}
