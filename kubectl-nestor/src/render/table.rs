//! Tables without borders, as kubectl prints them.

use comfy_table::{ContentArrangement, Table, presets};
use process_kit::text::one_line;

/// A table with these headings. Texts from the clusters are escaped.
pub fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(head.iter().copied());
    for row in rows {
        table.add_row(row.iter().map(|cell| one_line(cell).into_owned()));
    }
    let last = head.len().saturating_sub(1);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, if index == last { 0 } else { 2 }));
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_texts_are_escaped() {
        let rows = [
            vec!["a\u{1b}[2J".to_owned(), "1".to_owned()],
            vec!["longer-name-here".to_owned(), "2".to_owned()],
        ];
        assert_eq!(
            table(&["NAME", "N"], rows),
            "NAME              N\na\\u{1b}[2J        1\nlonger-name-here  2\n"
        );
    }
}
