//! The pools, or why they are not shown.

use maud::{Markup, html};

use super::Model;
use super::parts::{age, badge, explanation, heading, safe, scrollable, size};
use crate::decide::pool::{decide, percent};
use crate::pools::{Pools, Read};

/// The section of the pools.
pub(super) fn section(model: &Model) -> Markup {
    let count = model.pools.as_ref().and_then(|pools| pools.read.as_ref()).map_or(0, |read| read.pools.len());
    html! {
        section #pools aria-labelledby="pools-title" {
            (heading("pools", "Pools", count))
            @match &model.pools {
                None => p.dim { "Not shown: the console has no connection to the storage infra (--infra-url)." },
                Some(pools) => (known(pools, model)),
            }
        }
    }
}

fn known(pools: &Pools, model: &Model) -> Markup {
    html! {
        @match &pools.read {
            None => p { "The storage infra has not answered yet." },
            Some(read) => {
                p.dim { "Read " (age(read.time, model.clock.now)) " ago from storage-infra " (safe(&read.health.version)) "." }
                (scrollable("pools-title", table(read)))
                (hypervisors(read))
            }
        }
    }
}

fn table(read: &Read) -> Markup {
    html! {
        table {
            thead { tr {
                th scope="col" { "Pool" } th scope="col" { "Zone" } th scope="col" { "Used" } th.number scope="col" { "" }
                th scope="col" { "Reserved" } th.number scope="col" { "" } th.number scope="col" { "Free" }
                th.number scope="col" { "Size" } th scope="col" { "State" } th scope="col" { "Why, and what next" }
            } }
            tbody { @for pool in &read.pools { (row(pool)) } }
        }
    }
}

fn zones(pool: &infra_api::Pool) -> String {
    match pool.reachable_zones() {
        zones if zones.is_empty() => "all".to_owned(),
        zones => zones.join(", "),
    }
}

fn row(pool: &infra_api::Pool) -> Markup {
    let verdict = decide(pool);
    html! {
        tr {
            th scope="row" { code { (safe(pool.name.as_ref())) } }
            td { (safe(&zones(pool))) }
            (fill("used", pool.used_bytes, pool.capacity_bytes))
            (fill("reserved", pool.reserved_bytes, pool.capacity_bytes))
            td.number { (size(pool.free_bytes)) }
            td.number { (size(pool.capacity_bytes)) }
            td { (badge(verdict.state, &verdict.summary)) }
            td.why { (explanation(&verdict)) }
        }
    }
}

/// Two cells: a bar, and the numbers beside it.
fn fill(what: &str, part: u64, whole: u64) -> Markup {
    let percent = percent(part, whole);
    html! {
        td { meter min="0" max="100" high="90" optimum="0" value=(percent.min(100)) aria-label={ (percent) " % " (what) } {} }
        td.number { (size(part)) " " span.dim { (percent) " %" } }
    }
}

/// Hypervisors that do not respond.
fn hypervisors(read: &Read) -> Markup {
    let silent: Vec<_> = read.health.hypervisors.iter().filter(|hypervisor| !hypervisor.reachable).collect();
    html! {
        @if !silent.is_empty() {
            div.banner role="alert" {
                p { strong { "Hypervisors that do not respond:" } }
                ul { @for one in silent { li { (safe(&one.name)) ": " (safe(one.message.as_deref().unwrap_or("no message"))) } } }
            }
        }
    }
}
