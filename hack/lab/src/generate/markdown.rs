//! Markdown of generated pages.

use std::fmt::Write;

/// A page with its heading, and a note that it is generated.
pub(super) fn page(title: &str, source: &str) -> String {
    format!("<!-- Written by `cargo lab generate` from {source}. Do not edit. -->\n\n# {title}\n")
}

/// Appends a paragraph.
pub(super) fn paragraph(page: &mut String, text: &str) {
    let _ = write!(page, "\n{}\n", wrapped(text));
}

/// Appends a table.
pub(super) fn table(page: &mut String, columns: &[&str], rows: &[Vec<String>]) {
    let _ = write!(page, "\n| {} |\n|{}\n", columns.join(" | "), " --- |".repeat(columns.len()));
    for row in rows {
        let _ = writeln!(page, "| {} |", row.join(" | "));
    }
}

/// Code in a cell.
pub(super) fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{}`", text.replace('|', "\\|")) }
}

/// A text of the code as the text of a cell: in one line, without HTML.
pub(super) fn cell(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    let parts = text.split('`').enumerate();
    let parts = parts.map(|(at, part)| if at % 2 == 0 { part.replace('<', "&lt;") } else { part.to_owned() });
    parts.collect::<Vec<_>>().join("`")
}

/// A text with lines of at most 130 characters.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + word.chars().count() < 130 => {
                let _ = write!(line, " {word}");
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_have_one_line_and_no_html() {
        assert_eq!(cell("a |\n  <b> `<c>`"), "a \\| &lt;b> `<c>`");
        assert_eq!(code(""), "");
    }

    #[test]
    fn paragraphs_are_wrapped_between_words() {
        let mut page = String::new();
        paragraph(&mut page, &"word ".repeat(40));
        assert!(page.lines().all(|line| line.len() < 131 && !line.ends_with(' ')), "{page}");
    }
}
