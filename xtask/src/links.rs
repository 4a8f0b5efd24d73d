//! The documents as text: links lead somewhere, and error messages that are explained are still said.
//!
//! Deliberately small: inline links of Markdown, and headings as anchors. Addresses on the web are not asked.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The book: its pages link one another only, because nothing else is there where it is read.
const BOOK: &str = "docs";
/// The page that begins each row with an error message in backticks.
const MESSAGES: &str = "docs/troubleshooting.md";

/// Everything that is wrong with the documents among `files`.
pub(crate) fn check(root: &Path, files: &[PathBuf]) -> Vec<String> {
    let read = |file: &PathBuf| Some((file.clone(), fs::read_to_string(root.join(file)).ok()?));
    let of_kind = |kind: &str| -> BTreeMap<PathBuf, String> {
        files.iter().filter(|f| f.extension().is_some_and(|e| e == kind)).filter_map(read).collect()
    };
    let pages = of_kind("md");
    let mut broken = Vec::new();
    for (page, text) in &pages {
        for link in links(text) {
            broken.extend(wrong(page, &link, &pages, &|path| root.join(path).exists()));
        }
    }
    if let Some(text) = pages.get(Path::new(MESSAGES)) {
        let sources: Vec<String> = of_kind("rs").values().map(|source| joined(source)).collect();
        broken.extend(
            messages(text)
                .filter(|message| !sources.iter().any(|source| says(source, message)))
                .map(|message| format!("{MESSAGES} explains `{message}`, which no source says any more")),
        );
    }
    broken
}

/// The lines outside of fenced code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

/// The targets of `[…](target)`, those in inline code left out.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in prose(text) {
        let plain: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        let targets = plain.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        found.extend(targets.map(|(target, _)| target.to_owned()));
    }
    found
}

/// What is wrong with a link, if anything.
fn wrong(
    page: &Path,
    link: &str,
    pages: &BTreeMap<PathBuf, String>,
    exists: &dyn Fn(&Path) -> bool,
) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = match path {
        "" => page.to_path_buf(),
        _ => plain(&page.parent().unwrap_or(Path::new("")).join(path)),
    };
    let at = page.display();
    if !exists(&target) {
        return Some(format!("{at} links {link}, which is not there"));
    }
    if page.starts_with(BOOK) && !target.starts_with(BOOK) {
        return Some(format!("{at} links {link}, which is not in the book; name it as code"));
    }
    let has_anchor = |text: &String| prose(text).filter_map(slug).any(|slug| slug == anchor);
    (!anchor.is_empty() && !pages.get(&target).is_some_and(has_anchor))
        .then(|| format!("{at} links {link}, but there is no such heading"))
}

/// The path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => _ = plain.pop(),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

/// A heading's anchor.
fn slug(line: &str) -> Option<String> {
    let heading = line.strip_prefix('#')?.trim_start_matches('#').strip_prefix(' ')?;
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    Some(kept.collect::<String>().to_lowercase().replace(' ', "-"))
}

/// The first cell of each row, if it is code: an error message, in which `…` stands for what varies.
fn messages(text: &str) -> impl Iterator<Item = &str> {
    prose(text).filter_map(|line| line.strip_prefix("| `")?.split_once("` |").map(|(message, _)| message))
}

fn says(source: &str, message: &str) -> bool {
    message.split('…').map(str::trim).all(|piece| source.contains(piece))
}

/// Rust's text with string literals that go over several lines made one.
fn joined(source: &str) -> String {
    let mut pieces = source.split("\\\n");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| text + piece.trim_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_outside_of_code() {
        let text = "see [a](a.md) and [b](b.md#c), not `[x](y)`\n```text\n[z](z.md)\n```\n[d](d)";
        assert_eq!(links(text), ["a.md", "b.md#c", "d"]);
    }

    #[test]
    fn a_link_must_lead_somewhere() {
        let text = "# A page\n## What it keeps: where?\n".to_owned();
        let pages = BTreeMap::from([(PathBuf::from("docs/a.md"), text)]);
        let wrong = |link: &str| {
            let exists = |path: &Path| pages.contains_key(path) || path == Path::new("README.md");
            wrong(Path::new("docs/a.md"), link, &pages, &exists)
        };
        for good in ["https://example.org/x", "a.md", "./a.md#a-page", "#what-it-keeps-where", "../docs/a.md"]
        {
            assert_eq!(wrong(good), None, "{good}");
        }
        for bad in ["b.md", "#what", "a.md#b", "../README.md"] {
            assert!(wrong(bad).is_some(), "{bad}");
        }
    }

    #[test]
    fn an_explained_message_must_still_be_said() {
        let table = "| it says | cause |\n|---|---|\n| `no room for … here` | x |\n";
        let messages: Vec<_> = messages(table).collect();
        assert_eq!(messages, ["no room for … here"]);
        assert!(says(&joined("\"no room \\\n    for {name} here\""), messages[0]));
        assert!(!says("no room for", messages[0]));
    }
}
