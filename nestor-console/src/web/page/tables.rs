//! The tables of disks, volumes and guests.

use jiff::Timestamp;
use maud::{Markup, html};

use super::super::query::{Table, View};
use super::Model;
use super::parts::{badge, explanation, heading, pager, safe, scrollable, search_link, since, size};
use crate::decide::State;
use crate::overview::{DiskRow, GuestRow, Page, Row, VolumeRow};

/// Rows of a page of a table.
const ROWS: usize = 50;

/// The rows that the filter accepts.
fn shown<'a, R: Row>(model: &Model, rows: &'a [R]) -> Vec<&'a R> {
    let filter = model.view.filter();
    rows.iter().filter(|row| filter.accepts(*row)).collect()
}

fn empty(columns: usize, what: &str) -> Markup {
    html! { tbody { tr { td.empty colspan=(columns) { "No " (what) "." } } } }
}

/// The disks of all VMs, by stage.
pub(super) fn disks(model: &Model) -> Markup {
    let rows = shown(model, &model.overview.disks);
    let page = Page::of(&rows, model.view.page(Table::Disks), ROWS);
    let table = html! {
        table {
            thead { tr {
                th scope="col" { "Disk" } th scope="col" { "spec.volumes" } th scope="col" { "VolumeAttachment" }
                th scope="col" { "status.volumes" } th scope="col" { "State" } th scope="col" { "Since" }
                th scope="col" { "Why, and what next" }
            } }
            @for disks in page.rows.chunk_by(|a, b| a.vm == b.vm) { (vm(disks, model.clock.now)) }
            @if page.rows.is_empty() { (empty(7, "disks")) }
        }
    };
    html! {
        section #disks aria-labelledby="disks-title" {
            (heading("disks", "Attach flow", page.total))
            (scrollable("disks-title", table))
            (pager(&model.view, Table::Disks, &page))
        }
    }
}

/// The disks of one VM.
fn vm(disks: &[&DiskRow], now: Timestamp) -> Markup {
    let first = disks[0];
    html! {
        tbody {
            tr.group { th scope="rowgroup" colspan="7" {
                (search_link(&first.vm.name)) " "
                span.dim { "VM in " (safe(&first.vm.namespace)) @if let Some(power) = &first.power { ", " (safe(power)) } }
            } }
            @for disk in disks { (disk_row(disk, now)) }
        }
    }
}

fn disk_row(disk: &DiskRow, now: Timestamp) -> Markup {
    let stages = [disk.stages.requested, disk.stages.attachment, disk.stages.reported];
    html! {
        tr {
            th scope="row" { code { (safe(&disk.entry)) } }
            @for stage in stages { td { (badge(stage.state, stage.word)) } }
            td { (safe(&disk.verdict.summary)) @if disk.verdict.state == State::Late { " " (badge(State::Late, "late")) } }
            td.number { (since(disk.verdict.since, now)) }
            td.why { (explanation(&disk.verdict)) }
        }
    }
}

/// The volumes.
pub(super) fn volumes(model: &Model) -> Markup {
    let rows = shown(model, &model.overview.volumes);
    let page = Page::of(&rows, model.view.page(Table::Volumes), ROWS);
    let table = html! {
        table {
            thead { tr {
                th scope="col" { "Volume" } th scope="col" { "Guest" } th scope="col" { "Guest's claim" } th.number scope="col" { "Size" }
                th scope="col" { "Class" } th scope="col" { "On VM" } th scope="col" { "State" }
                th scope="col" { "Since" } th scope="col" { "Why, and what next" }
            } }
            tbody { @for row in page.rows { (volume_row(row, model.clock.now)) } }
            @if page.rows.is_empty() { (empty(9, "volumes")) }
        }
    };
    html! {
        section #volumes aria-labelledby="volumes-title" {
            (heading("volumes", "Volumes", page.total))
            (scrollable("volumes-title", table))
            (pager(&model.view, Table::Volumes, &page))
        }
    }
}

fn volume_row(row: &VolumeRow, now: Timestamp) -> Markup {
    html! {
        tr {
            th scope="row" { (volume_name(row)) }
            td { @if let Some(guest) = &row.guest { (guest_link(guest)) } }
            td { (safe(row.guest_claim.as_deref().unwrap_or_default())) }
            td.number { @if let Some(bytes) = row.bytes { (size(bytes)) } }
            td { (safe(row.class.as_deref().unwrap_or_default())) }
            td { @for vm in &row.on { (search_link(vm)) " " } }
            td { (badge(row.verdict.state, &row.verdict.summary)) }
            td.number { (since(row.verdict.since, now)) }
            td.why { (explanation(&row.verdict)) }
        }
    }
}

fn volume_name(row: &VolumeRow) -> Markup {
    html! {
        @match (&row.claim, &row.volume) {
            (Some(claim), _) => { span.dim { (safe(&claim.namespace)) "/" } code { (safe(&claim.name)) } }
            (None, Some(volume)) => { span.dim { "PersistentVolume " } code { (safe(volume)) } }
            (None, None) => {}
        }
    }
}

/// A guest by the beginning of its cluster ID, which usually is a UUID.
fn guest_link(id: &str) -> Markup {
    let short: String = id.chars().take(8).collect();
    html! { a href=(View::search(id)) title=(safe(id)) { (safe(&short)) } }
}

/// The guests.
pub(super) fn guests(model: &Model) -> Markup {
    let rows = shown(model, &model.overview.guests);
    let page = Page::of(&rows, model.view.page(Table::Guests), ROWS);
    let table = html! {
        table {
            thead { tr {
                th scope="col" { "Guest" } th scope="col" { "Namespaces" }
                @for name in ["VMs", "Volumes", "Size", "Attached", "Waiting", "Warning", "Late", "Failed"] {
                    th.number scope="col" { (name) }
                }
            } }
            tbody { @for row in page.rows { (guest_row(row)) } }
            @if page.rows.is_empty() { (empty(10, "guests")) }
        }
    };
    html! {
        section #guests aria-labelledby="guests-title" {
            (heading("guests", "Guests", page.total))
            (scrollable("guests-title", table))
            (pager(&model.view, Table::Guests, &page))
        }
    }
}

fn guest_row(row: &GuestRow) -> Markup {
    html! {
        tr {
            th scope="row" { @match &row.id { Some(id) => (search_link(id)), None => span.dim { "no guest" } } }
            td { @for namespace in &row.namespaces { (safe(namespace)) " " } }
            td.number { (row.vms) }
            td.number { (row.volumes) }
            td.number { (size(row.bytes)) }
            td.number { (row.attached) }
            @for state in [State::Waiting, State::Warning, State::Late, State::Failed] { (count(state, row.count(state))) }
        }
    }
}

fn count(state: State, number: usize) -> Markup {
    let class = if number > 0 { state.word() } else { "dim" };
    html! { td.number.(class) { (number) } }
}
