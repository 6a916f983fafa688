//! Tables of texts from the clusters.

use process_kit::table;
use process_kit::text::one_line;

/// A table with these headings, as kubectl prints it. The texts are escaped.
pub fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let escape = |row: Vec<String>| row.iter().map(|cell| one_line(cell).into_owned()).collect();
    table::format(head, rows.into_iter().map(escape))
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
