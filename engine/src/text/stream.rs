//! A session's text: the detokeniser and the stop filter in line.

use pilotlight_domain::session::TokenId;

use super::{Detokenizer, Filtered, Pieces, StopFilter};

/// What a session has said and holds back; derived from its generated ids and stop strings.
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    detokenizer: Detokenizer,
    stop: StopFilter,
}

impl TextStream {
    /// The stream before the first token.
    pub fn new(stops: &[String]) -> Self {
        TextStream { detokenizer: Detokenizer::default(), stop: StopFilter::new(stops) }
    }

    /// The text that a generated token adds.
    pub fn push(&mut self, pieces: &impl Pieces, id: TokenId) -> Filtered {
        self.stop.push(&self.detokenizer.push(pieces, id))
    }

    /// What is held back, when no token follows. A stop string that completes in it cuts it, as ever.
    pub fn finish(&mut self, pieces: &impl Pieces) -> Filtered {
        let mut last = self.stop.push(&self.detokenizer.finish(pieces));
        if !last.stopped {
            last.text.push_str(&self.stop.finish());
        }
        last
    }
}
