//! Text that others wrote, on its way into a log, an event or a status.

use std::borrow::Cow;

/// The text in one line: what would end the line, move a terminal's cursor or turn the direction of writing is escaped. So
/// nobody can make up a log line, or hide one, by what they call their objects or have their servers answer.
pub fn one_line(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for one in text.chars() {
        match is_unsafe(one) {
            true => safe.extend(one.escape_default()),
            false => safe.push(one),
        }
    }
    Cow::Owned(safe)
}

/// Control characters, the line and paragraph separators of Unicode, and the marks that turn text around.
fn is_unsafe(one: char) -> bool {
    one.is_control()
        || matches!(one, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_breaks_its_line() {
        assert_eq!(one_line("a plain text: ü, 卷, \"b\\c\""), "a plain text: ü, 卷, \"b\\c\"");
        assert_eq!(one_line("x\n2026-01-01 INFO forged\r\t"), "x\\n2026-01-01 INFO forged\\r\\t");
        assert_eq!(
            one_line("a\u{1b}[2Jb\u{85}c\u{2028}d\u{202e}e"),
            "a\\u{1b}[2Jb\\u{85}c\\u{2028}d\\u{202e}e"
        );
    }
}
