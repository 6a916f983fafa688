//! Fuzz target of the page's query.

use axum::extract::Query;
use axum::http::Uri;

use super::query::{MAX_TEXT, Parameters, Table, View};

/// Queries of the page: its links lead to the same view, and contain nothing that HTML or a URL treats in a special way.
pub fn console_queries(data: &[u8]) {
    let Some(mut view) = view(&String::from_utf8_lossy(data)) else { return };
    // Links do not keep it.
    view.after = 0;
    assert!(view.text.chars().count() <= MAX_TEXT);
    view.filter();
    for table in [Table::Guests, Table::Disks, Table::Volumes] {
        let page = view.page(table);
        let link = view.link(table, page);
        assert!(link.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"'<>\\`".contains(&byte)), "{link}");
        let query = link.trim_start_matches('?').split('#').next().unwrap_or_default();
        assert_eq!(self::view(query), Some(view.clone()));
    }
}

fn view(query: &str) -> Option<View> {
    let uri: Uri = format!("/?{query}").parse().ok()?;
    Query::<Parameters>::try_from_uri(&uri).ok().map(|Query(parameters)| parameters.into())
}
