//! Stop strings: texts that end a generation and are not part of it.
//!
//! Text comes in any pieces; the result does not depend on how it was cut. The match that *completes* first wins, and
//! among those that complete together the longest: exactly what one would see reading character by character. What
//! could still become a stop string is held back.

/// What may be said of a piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filtered {
    /// The text to say now.
    pub text: String,
    /// A stop string is complete: nothing is to be said after `text`.
    pub stopped: bool,
}

/// Holds back what could be the beginning of a stop string.
#[derive(Clone, Debug, Default)]
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
}

impl StopFilter {
    /// A filter for these stop strings; empty ones are ignored.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        StopFilter { stops, held: String::new() }
    }

    /// Takes further text.
    pub fn push(&mut self, text: &str) -> Filtered {
        if self.stops.is_empty() {
            return Filtered { text: text.to_owned(), stopped: false };
        }
        let mut all = std::mem::take(&mut self.held);
        all.push_str(text);
        if let Some(start) = self.first_match(&all) {
            all.truncate(start);
            return Filtered { text: all, stopped: true };
        }
        self.held = all.split_off(all.len() - self.possible_beginning(&all));
        Filtered { text: all, stopped: false }
    }

    /// What was held back, once nothing can follow.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where the match that completes first begins.
    fn first_match(&self, text: &str) -> Option<usize> {
        let matches =
            self.stops.iter().filter_map(|stop| text.find(stop.as_str()).map(|at| (at + stop.len(), at)));
        matches.min().map(|(_, start)| start)
    }

    /// Bytes of the longest end of `text` that begins some stop string.
    fn possible_beginning(&self, text: &str) -> usize {
        let longest = |stop: &String| {
            stop.char_indices().map(|(at, _)| at).rev().find(|&len| text.ends_with(&stop[..len])).unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let mut filter = StopFilter::new(&stops);
        let mut said = Vec::new();
        for piece in pieces {
            let filtered = filter.push(piece);
            said.push(filtered.text);
            if filtered.stopped {
                return (said, true);
            }
        }
        said.push(filter.finish());
        (said, false)
    }

    #[test]
    fn table() {
        let check = |stops: &[&str], pieces: &[&str], said: &[&str], stopped: bool| {
            assert_eq!(
                run(stops, pieces),
                (said.iter().map(ToString::to_string).collect(), stopped),
                "{pieces:?}"
            );
        };
        check(&[], &["a", "b"], &["a", "b", ""], false);
        check(&[""], &["a"], &["a", ""], false);
        check(&["stop"], &["no st", "age"], &["no ", "stage", ""], false);
        check(&["stop"], &["no st", "op it"], &["no ", ""], true);
        check(&["stop"], &["cut stop inside"], &["cut "], true);
        check(&["stop"], &["the end st"], &["the end ", "st"], false);
        check(&["aab"], &["aa", "ab"], &["", "a"], true);
        // The one that completes first wins over one that began earlier.
        check(&["abcd", "c"], &["abcd"], &["ab"], true);
        // Completed together: the longest.
        check(&["c", "abc"], &["xabc"], &["x"], true);
        check(&["é!"], &["caf", "é", "s"], &["caf", "", "és", ""], false);
        check(&["\n\n"], &["a\n", "b\n", "\n"], &["a", "\nb", ""], true);
    }

    proptest! {
        #[test]
        fn the_cutting_of_the_text_does_not_matter(
            text in "[ab£]{0,24}",
            stops in proptest::collection::vec("[ab£]{0,4}", 0..4),
            cuts in proptest::collection::vec(0_usize..24, 0..8),
        ) {
            let chars: Vec<char> = text.chars().collect();
            let mut whole = StopFilter::new(&stops);
            let mut one_by_one = String::new();
            let mut stopped = false;
            for c in &chars {
                let filtered = whole.push(&c.to_string());
                one_by_one.push_str(&filtered.text);
                if filtered.stopped { stopped = true; break; }
            }
            if !stopped { one_by_one.push_str(&whole.finish()); }

            let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut <= chars.len()).collect();
            cuts.extend([0, chars.len()]);
            cuts.sort_unstable();
            let mut filter = StopFilter::new(&stops);
            let mut said = String::new();
            let mut stopped_cut = false;
            for pair in cuts.windows(2) {
                let filtered = filter.push(&chars[pair[0]..pair[1]].iter().collect::<String>());
                said.push_str(&filtered.text);
                if filtered.stopped { stopped_cut = true; break; }
            }
            if !stopped_cut { said.push_str(&filter.finish()); }
            prop_assert_eq!((said, stopped_cut), (one_by_one, stopped));
        }
    }
}
