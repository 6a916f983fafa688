//! Lists: volumes, VMs, attachments, capacity, usage, orphans.

pub mod attachments;
pub mod orphans;
pub mod pools;
pub(crate) mod read;
pub mod usage;
pub mod vms;
pub mod volumes;

use serde::Serialize;

use crate::cli::Format;
use crate::error::Error;
use crate::render::{format, print, table::table};

/// A list: its columns, how many of them are shown without `-o wide`, and what is not seen.
pub(crate) struct List<'a> {
    pub(crate) head: &'a [&'a str],
    pub(crate) narrow: usize,
    pub(crate) unseen: Vec<String>,
}

/// A row of a list.
pub(crate) trait Row: Serialize {
    /// The cells, in the order of the head.
    fn cells(&self) -> Vec<String>;
}

/// Prints a list.
pub(crate) fn show<R: Row>(output: Format, list: &List<'_>, rows: &[R]) -> Result<(), Error> {
    let text = |is_wide: bool| {
        let width = if is_wide { list.head.len() } else { list.narrow };
        let cells = rows.iter().map(|row| row.cells().into_iter().take(width).collect());
        let unseen = list.unseen.iter().map(|text| format!("not seen: {text}\n")).collect::<String>();
        match rows.is_empty() {
            true => format!("nothing found\n{unseen}"),
            false => format!("{}{unseen}", table(&list.head[..width], cells)),
        }
    };
    print(&format(output, &rows, text)?)
}

/// A cell for a value that may be absent.
pub(crate) fn or_dash(value: Option<impl Into<String>>) -> String {
    value.map_or_else(|| "-".to_owned(), Into::into)
}

/// What is used, of a limit if there is one.
pub(crate) fn of_limit<T: ToString>(used: Option<T>, max: Option<T>) -> String {
    let used = or_dash(used.map(|used| used.to_string()));
    match max {
        Some(max) => format!("{used} of {}", max.to_string()),
        None => used,
    }
}
