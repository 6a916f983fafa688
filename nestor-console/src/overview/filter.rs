//! Which rows a page shows: those that a filter accepts, and of them one part.

use crate::decide::State;

/// A row of a table.
pub trait Row {
    /// Its state.
    fn state(&self) -> State;
    /// The texts by which it can be found.
    fn texts(&self) -> Vec<&str>;
}

/// A filter of rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Words, each of which must occur in one of the texts, without regard to case.
    pub words: Vec<String>,
    /// Only rows that need attention or wait.
    pub open_only: bool,
}

impl Filter {
    /// The filter of a search text.
    pub fn new(text: &str, open_only: bool) -> Self {
        Self { words: text.split_whitespace().map(str::to_lowercase).collect(), open_only }
    }

    /// Whether the page shows a row.
    pub fn accepts(&self, row: &impl Row) -> bool {
        (!self.open_only || row.state().is_open()) && self.finds(|| row.texts())
    }

    /// Whether all words occur in the texts.
    pub fn finds<'a>(&self, texts: impl FnOnce() -> Vec<&'a str>) -> bool {
        if self.words.is_empty() {
            return true;
        }
        let texts: Vec<String> = texts().into_iter().map(str::to_lowercase).collect();
        self.words.iter().all(|word| texts.iter().any(|text| text.contains(word)))
    }
}

/// A part of a table.
#[derive(Debug, PartialEq, Eq)]
pub struct Page<'a, T> {
    /// The rows.
    pub rows: &'a [T],
    /// Its number, from 1.
    pub number: usize,
    /// Number of pages, at least 1.
    pub pages: usize,
    /// Number of rows of all pages.
    pub total: usize,
}

impl<'a, T> Page<'a, T> {
    /// Page `number` of the rows, or the nearest that exists.
    pub fn of(rows: &'a [T], number: usize, size: usize) -> Self {
        let pages = rows.len().div_ceil(size).max(1);
        let number = number.clamp(1, pages);
        let start = (number - 1) * size;
        let end = rows.len().min(start + size);
        Self { rows: &rows[start..end], number, pages, total: rows.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct One(State, &'static str);

    impl Row for One {
        fn state(&self) -> State {
            self.0
        }

        fn texts(&self) -> Vec<&str> {
            vec!["namespace-a", self.1]
        }
    }

    #[test]
    fn all_words_must_occur() {
        let row = One(State::Ok, "PVC-1");
        for (text, accepts) in [("", true), ("pvc", true), ("pvc-1  NAMESPACE-A", true), ("pvc-1 b", false)] {
            assert_eq!(Filter::new(text, false).accepts(&row), accepts, "{text}");
        }
    }

    #[test]
    fn rows_that_need_nothing_can_be_hidden() {
        let shows = |state| Filter::new("", true).accepts(&One(state, "a"));
        assert!(shows(State::Waiting) && shows(State::Warning) && shows(State::Failed));
        assert!(!shows(State::Ok) && !shows(State::Idle));
    }

    #[test]
    fn a_page_that_does_not_exist_is_the_nearest_one() {
        let rows: Vec<u32> = (0..25).collect();
        let page = |number| {
            let page = Page::of(&rows, number, 10);
            (page.number, page.rows.first().copied(), page.rows.len())
        };
        assert_eq!((page(0), page(1), page(3)), ((1, Some(0), 10), (1, Some(0), 10), (3, Some(20), 5)));
        assert_eq!(page(usize::MAX), (3, Some(20), 5));
        let none = Page::<u32>::of(&[], 7, 10);
        assert_eq!((none.number, none.pages, none.rows.len()), (1, 1, 0));
    }
}
