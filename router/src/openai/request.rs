//! A request that needs no further check.

use pilotlight_domain::session::{Input, Sampling};

/// What is asked, by path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Task {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
}

impl Task {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Task::Chat => "chat",
            Task::Completion => "completion",
        }
    }
}

/// One parsed request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Request {
    pub(crate) task: Task,
    /// As the client wrote it; the answer repeats it.
    pub(crate) model: String,
    /// One or more, at most [`SESSIONS_MAX`] together with `n`.
    pub(crate) inputs: Vec<Input>,
    /// Choices of each input.
    pub(crate) n: u32,
    /// For every choice; its seed is the first choice's.
    pub(crate) sampling: Sampling,
    pub(crate) stream: bool,
    /// A last chunk with the usage.
    pub(crate) include_usage: bool,
}

/// Sessions of one request: inputs × `n`. OpenAI's bound of `n`, too.
pub(crate) const SESSIONS_MAX: usize = 128;

impl Request {
    /// How many choices the answer has.
    pub(crate) fn choices(&self) -> usize {
        self.inputs.len() * self.n as usize
    }

    /// What choice `index` generates from, and how. Choices of one input differ by their seeds alone; the same
    /// choice of another input has the same seed, so that a list of prompts answers as single requests would.
    pub(crate) fn choice(&self, index: usize) -> (&Input, Sampling) {
        let (input, twin) = (index / self.n as usize, index % self.n as usize);
        let mut sampling = self.sampling.clone();
        // The golden ratio spreads the seeds of siblings over all 64 bits.
        sampling.seed = sampling.seed.wrapping_add((twin as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        (&self.inputs[input], sampling)
    }

    /// The parameter that a fault of the prompt is a fault of.
    pub(crate) fn prompt_param(&self) -> &'static str {
        match self.task {
            Task::Chat => "messages",
            Task::Completion => "prompt",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_numbered_input_by_input_and_siblings_differ_by_seed() {
        let request = Request {
            task: Task::Completion,
            model: "m".into(),
            inputs: vec![Input::Text("a".into()), Input::Text("b".into())],
            n: 2,
            sampling: Sampling { seed: 7, ..Sampling::default() },
            stream: false,
            include_usage: false,
        };
        assert_eq!(request.choices(), 4);
        assert_eq!(request.choice(0).1.seed, 7);
        assert_eq!(request.choice(2), (&Input::Text("b".into()), request.choice(0).1));
        assert_ne!(request.choice(1).1.seed, 7);
        assert_eq!(request.choice(1).1.seed, request.choice(3).1.seed);
    }
}
