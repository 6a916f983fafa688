//! The page. maud escapes every value; `one_line` additionally removes control characters and bidirectional marks from text
//! that comes from clusters.

mod events;
mod parts;
mod pools;
mod tables;
#[cfg(test)]
mod tests;

use jiff::Timestamp;
use maud::{DOCTYPE, Markup, html};

use super::query::{MAX_TEXT, View};
use crate::decide::State;
use crate::feed::EventRow;
use crate::overview::{Clock, Overview};
use crate::pools::Pools;
use parts::safe;

/// Sections of the page: id and title.
const SECTIONS: [(&str, &str); 5] = [
    ("disks", "Attach flow"),
    ("volumes", "Volumes"),
    ("guests", "Guests"),
    ("pools", "Pools"),
    ("events", "Events"),
];

/// What a page shows.
pub(super) struct Model {
    pub(super) overview: Overview,
    /// None without a connection to the storage infra.
    pub(super) pools: Option<Pools>,
    /// All events, newest first.
    pub(super) events: Vec<EventRow>,
    /// Number of the last event.
    pub(super) last: u64,
    /// Sources that are not current, and why.
    pub(super) stale: Vec<(String, String)>,
    pub(super) clock: Clock,
    pub(super) view: View,
}

/// Renders a page.
pub(super) fn render(model: &Model) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            (head())
            body {
                a.skip href="#content" { "Skip to the content" }
                (header(model))
                main #content tabindex="-1" {
                    (stale(&model.stale))
                    (summary(model))
                    (tables::disks(model))
                    (tables::volumes(model))
                    (tables::guests(model))
                    (pools::section(model))
                    (events::section(model))
                }
                (footer(model.clock.now))
            }
        }
    }
}

fn head() -> Markup {
    html! {
        head {
            meta charset="utf-8";
            meta name="viewport" content="width=device-width, initial-scale=1";
            meta name="color-scheme" content="light dark";
            title { "Nestor console" }
            link rel="icon" href="icon.svg" type="image/svg+xml";
            link rel="stylesheet" href="console.css";
            script src="console.js" defer {}
        }
    }
}

fn header(model: &Model) -> Markup {
    html! {
        header {
            h1 { a href="?" { "Nestor console" } }
            nav aria-label="Sections" {
                ul { @for (id, title) in SECTIONS { li { a href={ "#" (id) } { (title) } } } }
            }
            (filter(&model.view))
        }
    }
}

fn filter(view: &View) -> Markup {
    html! {
        form role="search" method="get" action="" {
            label for="q" { "Filter" }
            input #q type="search" name="q" value=(safe(&view.text)) maxlength=(MAX_TEXT)
                placeholder="name, guest, class, error" autocomplete="off" spellcheck="false";
            label { input type="checkbox" name="show" value="open" checked[view.open_only]; " only open" }
            button type="submit" { "Apply" }
            @if view.is_changed() { a href="?" { "Reset" } }
        }
    }
}

/// Sources that are not current: the tables may show an earlier state.
fn stale(stale: &[(String, String)]) -> Markup {
    html! {
        @if !stale.is_empty() {
            div.banner role="alert" {
                p { strong { "Not current." } " The page may show an earlier state of:" }
                ul { @for (source, reason) in stale { li { (safe(source)) ": " (safe(reason)) } } }
            }
        }
    }
}

fn summary(model: &Model) -> Markup {
    let overview = &model.overview;
    let guests = overview.guests.iter().filter(|guest| guest.id.is_some()).count();
    html! {
        section aria-label="Summary" {
            dl.summary {
                (figure("Guests", guests, None))
                (figure("VMs", overview.vms, None))
                (figure("Volumes", overview.volumes.len(), None))
                (figure("Attached", overview.attached(), None))
                @for state in [State::Waiting, State::Warning, State::Late, State::Failed] {
                    (figure(state.word(), overview.count(state), Some(state)))
                }
            }
        }
    }
}

fn figure(name: &str, number: usize, state: Option<State>) -> Markup {
    let class = state.filter(|_| number > 0).map(State::word);
    html! { div { dt { (name) } dd class=[class] { (number) } } }
}

fn footer(now: Timestamp) -> Markup {
    html! {
        footer {
            p {
                "Read-only. Rendered at "
                time datetime=(now) { (now.strftime("%Y-%m-%d %H:%M:%S")) " UTC" }
                ", version " (env!("CARGO_PKG_VERSION")) ". Reload the page to update the tables."
            }
        }
    }
}
