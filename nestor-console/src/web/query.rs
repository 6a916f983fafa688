//! The query of a page: its filter and the pages of its tables. Values that make no sense count as absent.

use serde::Deserialize;

use crate::overview::Filter;

/// Longest search text, in characters.
pub(super) const MAX_TEXT: usize = 200;

/// The parameters as they arrive.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Parameters {
    q: String,
    show: String,
    guests: String,
    disks: String,
    volumes: String,
    after: String,
}

/// Tables with several pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Table {
    Guests,
    Disks,
    Volumes,
}

impl Table {
    /// Parameter of its page, and id of its section.
    pub(super) fn id(self) -> &'static str {
        match self {
            Self::Guests => "guests",
            Self::Disks => "disks",
            Self::Volumes => "volumes",
        }
    }
}

/// What a page shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct View {
    /// The search text.
    pub(super) text: String,
    /// Whether rows that need nothing are hidden.
    pub(super) open_only: bool,
    guests: usize,
    disks: usize,
    volumes: usize,
    /// Number of the last event that a stream's reader has.
    pub(super) after: u64,
}

impl From<Parameters> for View {
    fn from(parameters: Parameters) -> Self {
        let number = |text: String| text.parse().unwrap_or(1).max(1);
        Self {
            text: parameters.q.trim().chars().take(MAX_TEXT).collect::<String>().trim_end().to_owned(),
            open_only: parameters.show == "open",
            guests: number(parameters.guests),
            disks: number(parameters.disks),
            volumes: number(parameters.volumes),
            after: parameters.after.parse().unwrap_or_default(),
        }
    }
}

impl View {
    /// Whether the page shows other rows than it does without parameters.
    pub(super) fn is_changed(&self) -> bool {
        *self != Self::from(Parameters::default())
    }

    /// The filter of the rows.
    pub(super) fn filter(&self) -> Filter {
        Filter::new(&self.text, self.open_only)
    }

    /// The page of a table.
    pub(super) fn page(&self, table: Table) -> usize {
        match table {
            Table::Guests => self.guests,
            Table::Disks => self.disks,
            Table::Volumes => self.volumes,
        }
    }

    /// Link to another page of a table. The other tables stay as they are.
    pub(super) fn link(&self, table: Table, page: usize) -> String {
        let all = [Table::Guests, Table::Disks, Table::Volumes];
        let pages = all.map(|one| (one.id(), if one == table { page } else { self.page(one) }));
        let pages = pages.into_iter().filter(|(_, page)| *page > 1);
        let pages = pages.map(|(name, page)| (name, page.to_string()));
        format!("?{}#{}", encode(self.filters().chain(pages)), table.id())
    }

    /// Link to the rows with this text.
    pub(super) fn search(text: &str) -> String {
        format!("?{}", encode([("q", text.to_owned())]))
    }

    /// The stream of the events after a number.
    pub(super) fn stream(&self, after: u64) -> String {
        format!("events?{}", encode(self.filters().chain([("after", after.to_string())])))
    }

    fn filters(&self) -> impl Iterator<Item = (&'static str, String)> + use<> {
        let text = Some(self.text.clone()).filter(|text| !text.is_empty()).map(|text| ("q", text));
        let show = self.open_only.then(|| ("show", "open".to_owned()));
        text.into_iter().chain(show)
    }
}

/// Parameters of a URL.
fn encode(parameters: impl IntoIterator<Item = (&'static str, String)>) -> String {
    let parameters =
        parameters.into_iter().map(|(name, value)| format!("{name}={}", percent_encoded(&value)));
    parameters.collect::<Vec<_>>().join("&")
}

fn percent_encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(parameters: Parameters) -> View {
        parameters.into()
    }

    #[test]
    fn values_that_make_no_sense_are_absent() {
        let odd = Parameters {
            disks: "-3".into(),
            volumes: "x".into(),
            after: "?".into(),
            ..Parameters::default()
        };
        let view = view(odd);
        assert_eq!((view.page(Table::Disks), view.page(Table::Volumes), view.after), (1, 1, 0));
        let long = Parameters { q: "ü".repeat(500), ..Parameters::default() };
        assert_eq!(super::View::from(long).text.chars().count(), MAX_TEXT);
    }

    #[test]
    fn a_link_keeps_the_filter_and_the_other_pages() {
        let parameters = Parameters {
            q: "a&b=<c>".into(),
            show: "open".into(),
            disks: "3".into(),
            ..Parameters::default()
        };
        let view = view(parameters);
        assert_eq!(view.link(Table::Volumes, 2), "?q=a%26b%3D%3Cc%3E&show=open&disks=3&volumes=2#volumes");
        assert_eq!(view.link(Table::Disks, 1), "?q=a%26b%3D%3Cc%3E&show=open#disks");
        assert_eq!(view.stream(7), "events?q=a%26b%3D%3Cc%3E&show=open&after=7");
    }
}
