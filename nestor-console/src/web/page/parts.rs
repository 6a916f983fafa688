//! Parts of tables: states, times, explanations, links to other pages.

use std::borrow::Cow;
use std::time::Duration;

use jiff::Timestamp;
use maud::{Markup, html};
use process_kit::duration;
use process_kit::text::one_line;

use super::super::query::{Table, View};
use crate::decide::{Since, State, Verdict};
use crate::overview::Page;

/// Length of a cause in bytes from which only its beginning is shown until it is opened.
const LONG: usize = 180;

/// Text of a cluster without control characters and bidirectional marks. maud escapes it.
pub(super) fn safe(text: &str) -> Cow<'_, str> {
    one_line(text)
}

/// A state, as a word with a colour.
pub(super) fn badge(state: State, word: &str) -> Markup {
    html! { span.state.(state.word()) { (word) } }
}

/// How long something lasts.
pub(super) fn since(since: Option<Since>, now: Timestamp) -> Markup {
    html! {
        @if let Some(Since { time, at_least }) = since {
            @let title = format!("since {}{}", if at_least { "at least " } else { "" }, time.strftime("%Y-%m-%d %H:%M:%S UTC"));
            time datetime=(time) title=(title) { @if at_least { "≥ " } (age(time, now)) }
        }
    }
}

/// Time since then, with its two largest units.
pub(super) fn age(time: Timestamp, now: Timestamp) -> String {
    let age = Duration::try_from(now.duration_since(time)).unwrap_or_default();
    duration::show(age)
}

/// Why, and what to do next.
pub(super) fn explanation(verdict: &Verdict) -> Markup {
    html! {
        @if let Some(cause) = &verdict.cause { (cause_text(&safe(cause))) }
        @if let Some(next) = &verdict.next { p.next { (next) } }
    }
}

fn cause_text(cause: &str) -> Markup {
    let cut = (0..=LONG).rev().find(|at| cause.is_char_boundary(*at)).unwrap_or_default();
    html! {
        @if cause.len() <= LONG { p { (cause) } }
        @else { details { summary { (cause[..cut]) "…" } p { (cause) } } }
    }
}

/// A name by which the page can be filtered.
pub(super) fn search_link(text: &str) -> Markup {
    html! { a href=(View::search(text)) { (safe(text)) } }
}

/// Bytes with a binary unit, rounded down to one decimal.
pub(super) fn size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        None => format!("{bytes} B"),
        Some((unit, shift)) => {
            let tenths = (u128::from(bytes) * 10) >> shift;
            match tenths % 10 {
                0 => format!("{} {unit}", tenths / 10),
                tenth => format!("{}.{tenth} {unit}", tenths / 10),
            }
        }
    }
}

/// A table in a region that can be scrolled by keyboard.
pub(super) fn scrollable(heading: &str, table: Markup) -> Markup {
    html! { div.scroll role="region" tabindex="0" aria-labelledby=(heading) { (table) } }
}

/// Heading of a table with the number of its rows.
pub(super) fn heading(id: &str, title: &str, total: usize) -> Markup {
    html! { h2 id={ (id) "-title" } { (title) " " span.count { (total) } } }
}

/// Links to the pages of a table.
pub(super) fn pager<T>(view: &View, table: Table, page: &Page<'_, T>) -> Markup {
    html! {
        @if page.pages > 1 {
            nav.pager aria-label={ "Pages of " (table.id()) } {
                @if page.number > 1 { a rel="prev" href=(view.link(table, page.number - 1)) { "Previous" } }
                span { "Page " (page.number) " of " (page.pages) }
                @if page.number < page.pages { a rel="next" href=(view.link(table, page.number + 1)) { "Next" } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_fitting_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 20, "1 MiB"),
            (3 << 29, "1.5 GiB"),
            (10 << 40, "10 TiB"),
            (u64::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn a_long_cause_is_folded_and_cut_between_characters() {
        let markup = cause_text(&"ü".repeat(LONG)).into_string();
        assert!(markup.starts_with("<details>") && markup.contains('…'), "{markup}");
        assert!(!cause_text("short").into_string().contains("details"));
    }

    #[test]
    fn a_time_in_the_future_has_no_age() {
        let now = Timestamp::UNIX_EPOCH;
        assert_eq!(age(now + jiff::SignedDuration::from_secs(5), now), "0s");
        assert_eq!(age(now - jiff::SignedDuration::from_secs(65), now), "1m5s");
    }
}
