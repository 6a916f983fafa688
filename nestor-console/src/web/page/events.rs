//! The newest events. The page's script adds new ones.

use maud::{Markup, html};

use super::super::stream::{accepts, clock, kind_of_event, object};
use super::Model;
use super::parts::{safe, scrollable};
use crate::feed::EventRow;

/// Rows of the table, also for the script.
const ROWS: usize = 50;

/// The section of the events.
pub(super) fn section(model: &Model) -> Markup {
    let filter = model.view.filter();
    let rows: Vec<&EventRow> = model.events.iter().filter(|row| accepts(&filter, row)).take(ROWS).collect();
    let table = html! {
        table {
            thead { tr {
                th scope="col" { "Time (UTC)" } th scope="col" { "Type" } th scope="col" { "Object" }
                th scope="col" { "Reason" } th scope="col" { "Message" }
            } }
            tbody #event-rows data-stream=(model.view.stream(model.last)) data-rows=(ROWS) {
                @for event in &rows { (row(event)) }
                @if rows.is_empty() { tr { td.empty colspan="5" { "No events." } } }
            }
        }
    };
    html! {
        section #events aria-labelledby="events-title" {
            h2 #events-title { "Events" }
            p #live.dim role="status" { "Reload the page to see new events." }
            (scrollable("events-title", table))
        }
    }
}

fn row(event: &EventRow) -> Markup {
    html! {
        tr data-uid=(safe(&event.uid)) {
            td { time datetime=(event.time) title=(event.time) { (clock(event)) } }
            td.(kind_of_event(event)) { (kind_of_event(event)) }
            td { (safe(&object(event))) }
            td { (safe(&event.reason)) }
            td.why { (safe(&event.message)) }
        }
    }
}
