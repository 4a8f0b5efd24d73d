//! What commands print: tables for people, one JSON or YAML document for programs.

use clap::ValueEnum;
use serde::Serialize;

use crate::failure::Failure;

/// How a result is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Columns.
    #[default]
    Table,
    /// More columns.
    Wide,
    /// One JSON document and nothing else.
    Json,
    /// One YAML document and nothing else.
    Yaml,
}

impl Format {
    /// Whether a program reads it.
    pub(crate) fn is_document(self) -> bool {
        matches!(self, Format::Json | Format::Yaml)
    }

    /// Prints a document; only for the document formats.
    pub(crate) fn print<T: Serialize>(self, value: &T) -> Result<(), Failure> {
        let text = match self {
            Format::Yaml => format!("---\n{}", serde_yaml::to_string(value)?),
            _ => serde_json::to_string_pretty(value)? + "\n",
        };
        print(&text)
    }
}

/// Writes to standard output. A reader that went away (`| head`) ends the program quietly.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => Ok(other?),
    }
}

/// Rows under a header, columns as wide as their widest cell.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// With its header.
    pub(crate) fn new(header: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Table { rows: vec![header.into_iter().map(Into::into).collect()] }
    }

    /// One more row.
    pub(crate) fn row<I: IntoIterator<Item = String>>(&mut self, cells: I) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Three blanks between columns, as kubectl does; an empty cell is `-`.
    pub(crate) fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let cell =
            |text: &str| if text.is_empty() { "-".to_owned() } else { text.replace(['\n', '\r'], " ") };
        let width = |column: usize| {
            self.rows.iter().filter_map(|r| r.get(column)).map(|c| cell(c).chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (value, width) in row.iter().zip(&widths) {
                line.push_str(&format!("{:<width$}   ", cell(value)));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_empty_cells_show() {
        let mut table = Table::new(["NAME", "PHASE"]);
        table.row(["demo".to_owned(), String::new()]);
        table.row(["a-longer-name".to_owned(), "Ready".to_owned()]);
        assert_eq!(table.render(), "NAME            PHASE\ndemo            -\na-longer-name   Ready\n");
    }
}
