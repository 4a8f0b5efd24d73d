//! What the plan would do if a request came now, with every node's numbers: the same judgements, written out.

use super::draft::{Draft, Known};
use super::judge::{Fit, WhyNot, key};
use super::{Unplaced, plan_some};
use crate::estimate::Estimate;
use crate::scale::Why;
use crate::view::{Device, Hold, Slot, View};
use crate::{ModelName, NodeName, Timestamp};

/// One node.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Which.
    pub node: NodeName,
    /// What would serve, and the time to its first token; none where nothing could.
    pub estimate: Option<(Hold, Estimate)>,
    /// The same for each kind of device that it has, the accelerator first.
    pub devices: Vec<(Device, Estimate)>,
    /// It serves, or would be chosen.
    pub chosen: bool,
    /// Why it would not be.
    pub why_not: Option<WhyNot>,
    /// What it costs others, and the like.
    pub note: String,
}

/// Every node, best first, then those that cannot.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// One per node.
    pub candidates: Vec<Candidate>,
    /// Where it serves, or would.
    pub chosen: Vec<NodeName>,
    /// Replicas wanted now, and why.
    pub wanted: (u32, Why),
    /// Why a wanted replica has no order.
    pub unplaced: Option<Unplaced>,
}

/// A node with what serving there would cost, and whether it can.
type Judged<'a> = (Option<Fit>, Result<(), WhyNot>, &'a NodeName, Slot);

/// Explains one model; none if there is no such.
pub fn explain(view: &View, model: &ModelName, now: Timestamp) -> Option<Explanation> {
    let (name, entry) = view.model_key_value(model)?;
    let model = Known { name, entry, facts: entry.facts.as_ref()? };
    let draft = Draft::new(view, now);
    let tiers = draft.tiers(model);
    let mut judged: Vec<Judged<'_>> = view
        .nodes()
        .filter(|(_, node)| node.facts.is_some())
        .map(|(slot, node)| {
            let (fit, verdict) = draft.judge(model, slot, &tiers);
            (fit, verdict, &node.name, slot)
        })
        .collect();
    judged.sort_by_key(|(fit, verdict, node, _)| {
        let rank = match verdict {
            Err(WhyNot::Serves) => 0,
            Ok(()) => 1,
            Err(WhyNot::Full(..)) => 2,
            Err(_) => 3,
        };
        (rank, fit.as_ref().map(|fit| key(&draft, fit)), *node)
    });
    let serves = judged.first().is_some_and(|(_, verdict, ..)| *verdict == Err(WhyNot::Serves));
    let mut best: Option<Fit> = None;
    let mut candidates = Vec::with_capacity(judged.len());
    for (fit, verdict, node, slot) in judged {
        let mut candidate = Candidate {
            node: node.clone(),
            estimate: fit.map(|fit| (fit.hold, fit.estimate)),
            devices: draft.devices(model, slot, &tiers),
            chosen: false,
            why_not: None,
            note: String::new(),
        };
        match (verdict, fit) {
            (Err(WhyNot::Serves), _) => {
                candidate.chosen = true;
                candidate.note = "serves it".into();
            }
            (Ok(()), Some(fit)) if best.is_none() && !serves => {
                candidate.chosen = true;
                best = Some(fit);
            }
            (Err(why @ WhyNot::Full(..)), Some(fit)) if best.is_none() && !serves => {
                match draft.would_evict(model, &fit) {
                    Some(names) => {
                        candidate.chosen = true;
                        candidate.note = format!("in the place of idle {names}");
                        best = Some(fit);
                    }
                    None => candidate.why_not = Some(why),
                }
            }
            (Ok(()), Some(fit)) => {
                let ahead = best.map_or(fit.estimate.total(), |best| best.estimate.total());
                let slower = fit.estimate.total().saturating_sub(ahead);
                candidate.why_not =
                    Some(if slower.as_millis() > 0 { WhyNot::Slower(slower) } else { WhyNot::Equal });
            }
            (verdict, _) => candidate.why_not = verdict.err(),
        }
        candidates.push(candidate);
    }
    let chosen = candidates.iter().filter(|c| c.chosen).map(|c| c.node.clone()).collect();
    let outlook = plan_some(view, [name], now).outlook.into_iter().find(|outlook| outlook.model == *name);
    let (wanted, unplaced) = outlook
        .map_or(((0, Why::NoDemand), None), |outlook| ((outlook.wanted, outlook.why), outlook.unplaced));
    Some(Explanation { candidates, chosen, wanted, unplaced })
}

/// The least time to first token on any node where the model serves, could serve, or could if the idle made room;
/// else why there is none.
///
/// # Errors
/// What keeps it from every node, for code and for people.
pub fn best_estimate(
    view: &View,
    model: &ModelName,
    now: Timestamp,
) -> Result<(NodeName, Estimate), Option<Unplaced>> {
    let (name, entry) = view.model_key_value(model).ok_or(None)?;
    let model = Known { name, entry, facts: entry.facts.as_ref().ok_or(None)? };
    let draft = Draft::new(view, now);
    let tiers = draft.tiers(model);
    let fits = view.nodes().filter_map(|(slot, _)| match draft.judge(model, slot, &tiers) {
        (
            Some(fit),
            Ok(()) | Err(WhyNot::Serves | WhyNot::Holds | WhyNot::Full(..) | WhyNot::Cooling(..)),
        ) => Some(fit),
        _ => None,
    });
    match fits.min_by_key(|fit| key(&draft, fit)) {
        Some(fit) => Ok((draft.node(fit.slot).name.clone(), fit.estimate)),
        None => Err(Some(draft.unplaced(model))),
    }
}
