//! Escaping of untrusted text for logs, Events and statuses.

use std::borrow::Cow;

/// Escapes line breaks, terminal control characters and bidirectional marks, so that object names or server responses cannot
/// forge or hide log lines.
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

/// Control characters, Unicode line and paragraph separators, and bidirectional marks.
pub(crate) fn is_unsafe(one: char) -> bool {
    one.is_control()
        || matches!(one, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_text_is_one_line() {
        assert_eq!(one_line("a plain text: ü, 卷, \"b\\c\""), "a plain text: ü, 卷, \"b\\c\"");
        assert_eq!(one_line("x\n2026-01-01 INFO forged\r\t"), "x\\n2026-01-01 INFO forged\\r\\t");
        assert_eq!(
            one_line("a\u{1b}[2Jb\u{85}c\u{2028}d\u{202e}e"),
            "a\\u{1b}[2Jb\\u{85}c\\u{2028}d\\u{202e}e"
        );
    }
}
