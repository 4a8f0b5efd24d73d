//! Which sessions go into the next step, and how many tokens of each: a function of what is there.
//!
//! ```text
//! sessions in order of arrival ─► give pages to those that run (oldest first; the youngest gives way)
//!                              ─► admit those that wait (first come, first served)
//!                              ─► rows: one for each that decodes, then a bounded chunk of prefill, shared
//! ```
//!
//! Invariants: pages are never promised twice; the oldest session always goes on, so that everything ends; a session
//! is admitted only with room for all it has and some of what it will say; prefill in one step is bounded, so that a
//! long prompt does not stall the tokens of the others.
//!
//! It deliberately does **not** know tokens, texts or clocks: how long a chunk may be is the caller's measurement.

/// A session as the plan sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SessionView {
    /// Tokens it has: prompt and generated ones.
    pub(crate) known: usize,
    /// How many of them went through the model.
    pub(crate) computed: usize,
    /// How many of them shall: all of those of a session that speaks; of one that is held, all but the last, whose
    /// row gives the logits of a token that is not to be said yet.
    pub(crate) goal: usize,
    /// Tokens it may still say.
    pub(crate) remaining: usize,
    /// Pages it holds.
    pub(crate) pages: usize,
    /// Whether it runs; else it waits.
    pub(crate) admitted: bool,
}

/// Everything that a plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    /// In order of arrival.
    pub(crate) sessions: &'a [SessionView],
    /// Pages of nobody.
    pub(crate) pages_free: usize,
    /// Positions in a page.
    pub(crate) page_tokens: usize,
    /// Sessions that may run at once.
    pub(crate) slots: usize,
    /// Tokens of prefill that one step may take.
    pub(crate) chunk_tokens: usize,
}

/// What to do, in this order. Sessions are named by their place in the view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// They give their pages back and wait again; what they had is computed anew, to the same bits.
    pub(crate) preempt: Vec<usize>,
    /// They can never run: there is not enough memory for them alone.
    pub(crate) hopeless: Vec<usize>,
    /// They begin to run: reserve pages for so many tokens.
    pub(crate) admit: Vec<(usize, usize)>,
    /// So many rows of each, from its `computed` on. Pages for its `known` tokens are there, or free.
    pub(crate) rows: Vec<(usize, usize)>,
    /// Pages that the first waiting session lacks; zero when none waits for pages.
    pub(crate) pages_lacking: usize,
}

/// Tokens of its answer for which a session has pages when it is admitted: two pages, so that a fresh session does
/// not push another one out with its first words.
const HEADROOM_TOKENS: usize = 32;

/// The least share of a chunk that a prompt gets: below it, the step's fixed cost outweighs the fairness.
const SHARE_TOKENS_MIN: usize = 16;

/// Decides the next step.
pub(crate) fn plan(view: &View<'_>) -> Plan {
    let mut draft = Draft {
        view,
        free: view.pages_free,
        runs: view.sessions.iter().map(|session| session.admitted).collect(),
        plan: Plan::default(),
    };
    draft.give_pages();
    draft.admit();
    draft.deal_rows();
    draft.plan
}

struct Draft<'a> {
    view: &'a View<'a>,
    free: usize,
    runs: Vec<bool>,
    plan: Plan,
}

impl Draft<'_> {
    fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.view.page_tokens)
    }

    /// Those that run get the pages for the tokens they have; if there are none left, the youngest gives way.
    fn give_pages(&mut self) {
        let sessions = self.view.sessions;
        for (i, session) in sessions.iter().enumerate() {
            let wanted = self.pages_for(session.known).saturating_sub(session.pages);
            while self.runs[i] && wanted > self.free {
                let youngest = (0..sessions.len()).rev().find(|j| self.runs[*j]).unwrap_or(i);
                self.runs[youngest] = false;
                self.free += sessions[youngest].pages;
                match self.runs.contains(&true) || youngest != i {
                    true => self.plan.preempt.push(youngest),
                    false => self.plan.hopeless.push(youngest),
                }
            }
            if self.runs[i] {
                self.free -= wanted;
            }
        }
    }

    /// Those that wait begin in order of arrival, while there are slots and pages.
    fn admit(&mut self) {
        if !self.plan.preempt.is_empty() {
            return;
        }
        for (i, session) in self.view.sessions.iter().enumerate() {
            if session.admitted {
                continue;
            }
            let running = self.runs.iter().filter(|runs| **runs).count();
            if running >= self.view.slots {
                return;
            }
            let roomy = session.known + session.remaining.min(HEADROOM_TOKENS);
            let tokens = [roomy, session.known].into_iter().find(|tokens| {
                // Alone it need not be considerate.
                self.pages_for(*tokens) <= self.free && (*tokens == roomy || running == 0)
            });
            match tokens {
                Some(tokens) => {
                    self.runs[i] = true;
                    self.free -= self.pages_for(tokens);
                    self.plan.admit.push((i, tokens));
                }
                None if running == 0 => self.plan.hopeless.push(i),
                None => {
                    self.plan.pages_lacking = self.pages_for(roomy) - self.free;
                    return;
                }
            }
        }
    }

    /// One row for each that decodes; the chunk is shared between those that prefill, the rest of it goes to the oldest.
    fn deal_rows(&mut self) {
        let missing = |session: &SessionView| session.goal.saturating_sub(session.computed);
        let mut rows: Vec<usize> = vec![0; self.runs.len()];
        let mut prefilling = Vec::new();
        for (i, session) in self.view.sessions.iter().enumerate().filter(|(i, _)| self.runs[*i]) {
            match missing(session) {
                0 => {}
                1 => rows[i] = 1,
                _ => prefilling.push(i),
            }
        }
        let mut budget = self.view.chunk_tokens.max(1);
        let share = (budget / prefilling.len().max(1)).max(SHARE_TOKENS_MIN);
        for limit in [share, usize::MAX] {
            for &i in &prefilling {
                let dealt = (missing(&self.view.sessions[i]) - rows[i]).min(limit).min(budget);
                rows[i] += dealt;
                budget -= dealt;
            }
        }
        self.plan.rows = rows.into_iter().enumerate().filter(|(_, count)| *count > 0).collect();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn runs(known: usize, computed: usize, pages: usize) -> SessionView {
        SessionView { known, computed, goal: known, remaining: 100, pages, admitted: true }
    }

    fn waits(known: usize) -> SessionView {
        SessionView { known, computed: 0, goal: known, remaining: 100, pages: 0, admitted: false }
    }

    fn held(session: SessionView) -> SessionView {
        SessionView { goal: session.known - 1, ..session }
    }

    /// Pages of 16, 2 slots, chunks of 64.
    fn check(sessions: &[SessionView], pages_free: usize, expect: &Plan) {
        let view = View { sessions, pages_free, page_tokens: 16, slots: 2, chunk_tokens: 64 };
        assert_eq!(plan(&view), *expect, "{sessions:?} with {pages_free} free");
    }

    #[test]
    fn table() {
        let nothing = Plan::default();
        check(&[], 9, &nothing);
        // Decode needs no page within one, and takes one at its end.
        check(&[runs(20, 19, 2)], 0, &Plan { rows: vec![(0, 1)], ..nothing.clone() });
        check(&[runs(33, 32, 2)], 1, &Plan { rows: vec![(0, 1)], ..nothing.clone() });
        // A prompt is admitted with its headroom: 20 + 32 tokens.
        check(&[waits(20)], 9, &Plan { admit: vec![(0, 52)], rows: vec![(0, 20)], ..nothing.clone() });
        // Alone it does without; too large for everything, it is hopeless.
        check(&[waits(20)], 2, &Plan { admit: vec![(0, 20)], rows: vec![(0, 20)], ..nothing.clone() });
        check(&[waits(40)], 2, &Plan { hopeless: vec![0], ..nothing.clone() });
        // Beside another one it waits, and says what it lacks.
        check(
            &[runs(20, 19, 2), waits(20)],
            3,
            &Plan { rows: vec![(0, 1)], pages_lacking: 1, ..nothing.clone() },
        );
        // First come, first served: a small one does not overtake.
        check(
            &[runs(20, 19, 2), waits(90), waits(1)],
            4,
            &Plan { rows: vec![(0, 1)], pages_lacking: 4, ..nothing.clone() },
        );
        // Slots are bounded.
        check(
            &[runs(20, 19, 2), runs(5, 4, 1), waits(5)],
            99,
            &Plan { rows: vec![(0, 1), (1, 1)], ..nothing.clone() },
        );
        // A long prompt takes a chunk, beside the row of the one that decodes.
        check(
            &[runs(500, 0, 32), runs(5, 4, 1)],
            0,
            &Plan { rows: vec![(0, 64), (1, 1)], ..nothing.clone() },
        );
        // Two prompts share a chunk; what a short one leaves goes to the long one.
        check(
            &[runs(500, 64, 32), runs(500, 0, 32)],
            0,
            &Plan { rows: vec![(0, 32), (1, 32)], ..nothing.clone() },
        );
        check(
            &[runs(500, 64, 32), runs(10, 0, 1)],
            0,
            &Plan { rows: vec![(0, 54), (1, 10)], ..nothing.clone() },
        );
        // No page left: the youngest gives way, whoever needs the page.
        check(
            &[runs(33, 32, 2), runs(20, 19, 2)],
            0,
            &Plan { preempt: vec![1], rows: vec![(0, 1)], ..nothing.clone() },
        );
        check(
            &[runs(20, 19, 2), runs(33, 32, 2)],
            0,
            &Plan { preempt: vec![1], rows: vec![(0, 1)], ..nothing.clone() },
        );
        // Nobody is admitted in the step that pushed one out.
        check(
            &[runs(33, 32, 2), runs(20, 19, 2), waits(1)],
            0,
            &Plan { preempt: vec![1], rows: vec![(0, 1)], ..nothing.clone() },
        );
        // Who is held prefills all but the last token, keeps its pages, and has no row when that is done.
        check(&[held(waits(20))], 9, &Plan { admit: vec![(0, 52)], rows: vec![(0, 19)], ..nothing.clone() });
        check(&[held(runs(20, 19, 2)), runs(5, 4, 1)], 0, &Plan { rows: vec![(1, 1)], ..nothing.clone() });
        check(&[held(runs(20, 19, 2)), waits(90)], 4, &Plan { pages_lacking: 4, ..nothing.clone() });
        // Alone and out of pages.
        check(&[runs(33, 32, 2)], 0, &Plan { hopeless: vec![0], ..nothing });
    }

    fn sessions() -> impl Strategy<Value = Vec<SessionView>> {
        let one = (1_usize..90, 0_usize..90, 0_usize..100, any::<bool>(), any::<bool>()).prop_map(
            |(known, computed, remaining, admitted, held)| {
                let computed = if admitted { computed % known } else { 0 };
                let pages = if admitted { computed.div_ceil(16) } else { 0 };
                let goal = if held { known - 1 } else { known };
                SessionView { known, computed, goal, remaining, pages, admitted }
            },
        );
        proptest::collection::vec(one, 0..8)
    }

    proptest! {
        #[test]
        fn pages_are_promised_once_and_somebody_goes_on(sessions in sessions(), pages_free in 0_usize..30, slots in 1_usize..6) {
            let view = View { sessions: &sessions, pages_free, page_tokens: 16, slots, chunk_tokens: 64 };
            let plan = plan(&view);
            let mut free = pages_free as i64;
            let gone: Vec<usize> = plan.preempt.iter().chain(&plan.hopeless).copied().collect();
            for i in &gone {
                free += sessions[*i].pages as i64;
                prop_assert!(plan.rows.iter().all(|(j, _)| j != i));
            }
            for (i, tokens) in &plan.admit {
                prop_assert!(!sessions[*i].admitted && *tokens >= sessions[*i].known);
                free -= tokens.div_ceil(16) as i64;
            }
            let mut prefill = 0;
            for (i, count) in &plan.rows {
                let session = &sessions[*i];
                prop_assert!(*count >= 1 && session.computed + count <= session.goal);
                prefill += if session.goal - session.computed > 1 { *count } else { 0 };
                if session.admitted {
                    free -= session.known.div_ceil(16).saturating_sub(session.pages) as i64;
                }
            }
            prop_assert!(prefill <= 64);
            // Running sessions without a row in this step (the chunk was used up) have their pages promised as well.
            prop_assert!(free >= 0, "{free}");
            // Only sessions that are held and done stand still, and keep others waiting.
            let idle = |session: &SessionView| session.admitted && session.computed == session.goal;
            if !sessions.iter().any(idle) && !sessions.is_empty() {
                prop_assert!(!plan.rows.is_empty() || !gone.is_empty() || !plan.admit.is_empty());
            }
        }
    }
}
