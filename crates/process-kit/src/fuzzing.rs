//! Fuzz targets: see CONTRIBUTING.md, "Fuzzing".

use crate::operation::OperationId;
use crate::text::one_line;
use crate::trace::TraceParent;
use crate::{duration, text};

/// Texts from other programs and from the command line: escaping, durations, ids of operations and trace contexts.
pub fn texts(data: &[u8]) {
    let given = String::from_utf8_lossy(data);
    let shown = one_line(&given);
    assert!(!shown.chars().any(text::is_unsafe), "{shown:?}");
    assert_eq!(one_line(&shown), shown);
    if let Ok(parsed) = duration::parse(&given) {
        let shown = duration::show(parsed);
        // Text has a maximum number of days.
        let again = duration::parse(&shown).unwrap_or(parsed);
        assert!(again <= parsed && duration::show(again) == shown, "{parsed:?} {shown}");
    }
    if let Some(id) = OperationId::parse(&given) {
        assert_eq!((id.as_str(), one_line(id.as_str()).as_ref()), (&*given, &*given));
    }
    if let Some(parent) = TraceParent::parse(&given) {
        assert_eq!(TraceParent::parse(&parent.to_string()), Some(parent));
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn texts() {
        fuzz_kit::replay("texts", super::texts);
    }
}
