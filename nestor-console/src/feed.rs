//! Feed of Kubernetes Events: the newest ones in memory, and a broadcast of new ones to the open pages.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use kube_kit::informer::Key;
use process_kit::text::one_line;
use tokio::sync::broadcast;

/// Events that a page which reconnects can catch up with.
const KEPT: usize = 256;

/// An Event, in text that is safe to show: without control characters and bidirectional marks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventRow {
    /// Identity of the Event. A repeated Event has the same.
    pub uid: String,
    /// When it was last seen.
    pub time: Timestamp,
    /// Whether it is a warning.
    pub is_warning: bool,
    /// Kind of the object.
    pub kind: String,
    /// The object.
    pub object: Key,
    /// Reason in CamelCase.
    pub reason: String,
    /// Message.
    pub message: String,
}

impl EventRow {
    /// The row of an Event; None if it has no time.
    pub fn of(event: &Event) -> Option<Self> {
        let safe = |text: &Option<String>| one_line(text.as_deref().unwrap_or_default()).into_owned();
        let about = &event.involved_object;
        Some(Self {
            uid: event.metadata.uid.clone().unwrap_or_default(),
            time: time(event)?,
            is_warning: event.type_.as_deref() == Some("Warning"),
            kind: safe(&about.kind),
            object: Key::new(safe(&about.namespace), safe(&about.name)),
            reason: safe(&event.reason),
            message: safe(&event.message),
        })
    }
}

fn time(event: &Event) -> Option<Timestamp> {
    let series =
        event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0);
    let last = event.last_timestamp.as_ref().map(|time| time.0);
    let first = event.event_time.as_ref().map(|time| time.0);
    series.or(last).or(first).or_else(|| event.metadata.creation_timestamp.as_ref().map(|time| time.0))
}

/// An Event with its number. Numbers increase, also over restarts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbered {
    /// The number.
    pub number: u64,
    /// The Event.
    pub row: EventRow,
}

/// The feed. Clones share it.
#[derive(Debug, Clone)]
pub struct Feed {
    newest: Arc<Mutex<Newest>>,
    live: broadcast::Sender<Arc<Numbered>>,
}

#[derive(Debug)]
struct Newest {
    last: u64,
    kept: VecDeque<Arc<Numbered>>,
}

impl Feed {
    /// A feed whose numbers begin after that of `start`, so that they are higher than those of an earlier process.
    pub fn starting_at(start: Timestamp) -> Self {
        let last = u64::try_from(start.as_millisecond()).unwrap_or_default();
        let newest = Newest { last, kept: VecDeque::with_capacity(KEPT) };
        Self { newest: Arc::new(Mutex::new(newest)), live: broadcast::Sender::new(KEPT) }
    }

    /// Adds an Event.
    pub fn publish(&self, row: EventRow) {
        let mut newest = self.newest();
        newest.last += 1;
        let event = Arc::new(Numbered { number: newest.last, row });
        if newest.kept.len() == KEPT {
            newest.kept.pop_front();
        }
        newest.kept.push_back(event.clone());
        // Fails if no page is open.
        let _ = self.live.send(event);
    }

    /// Number of the last Event.
    pub fn last(&self) -> u64 {
        self.newest().last
    }

    /// The kept Events after a number, and all that follow.
    pub fn after(&self, number: u64) -> (Vec<Arc<Numbered>>, broadcast::Receiver<Arc<Numbered>>) {
        let newest = self.newest();
        let missed = newest.kept.iter().filter(|event| event.number > number).cloned().collect();
        (missed, self.live.subscribe())
    }

    fn newest(&self) -> MutexGuard<'_, Newest> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A warning about a claim.
    pub(crate) fn warning(reason: &str, message: &str, time: Timestamp) -> EventRow {
        EventRow {
            uid: "u".to_owned(),
            time,
            is_warning: true,
            kind: "PersistentVolumeClaim".to_owned(),
            object: Key::new("n", "pvc-1"),
            reason: reason.to_owned(),
            message: message.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::testing::warning;
    use super::*;

    #[test]
    fn a_reader_gets_what_it_missed_and_what_follows() {
        let feed = Feed::starting_at(Timestamp::from_millisecond(1000).unwrap());
        for reason in ["A", "B", "C"] {
            feed.publish(warning(reason, "", Timestamp::UNIX_EPOCH));
        }
        let (missed, mut live) = feed.after(1001);
        assert_eq!(missed.iter().map(|event| event.row.reason.as_str()).collect::<Vec<_>>(), ["B", "C"]);
        feed.publish(warning("D", "", Timestamp::UNIX_EPOCH));
        assert_eq!(live.try_recv().unwrap().number, 1004);
        assert_eq!(feed.last(), 1004);
    }

    #[test]
    fn only_the_newest_are_kept() {
        let feed = Feed::starting_at(Timestamp::UNIX_EPOCH);
        for _ in 0..KEPT + 5 {
            feed.publish(warning("A", "", Timestamp::UNIX_EPOCH));
        }
        let (kept, _) = feed.after(0);
        assert_eq!((kept.len(), kept[0].number), (KEPT, 6));
    }

    #[test]
    fn the_newest_time_counts_and_text_is_one_line() {
        let event: Event = serde_json::from_value(json!({
            "metadata": {"uid": "u"}, "type": "Warning", "reason": "R", "message": "a\nb\u{202e}c",
            "involvedObject": {"kind": "VirtualMachine", "namespace": "n", "name": "vm"},
            "eventTime": "2026-01-01T00:00:00.000000Z",
            "series": {"count": 2, "lastObservedTime": "2026-01-01T00:05:00.000000Z"},
        }))
        .unwrap();
        let row = EventRow::of(&event).unwrap();
        assert_eq!(row.time.to_string(), "2026-01-01T00:05:00Z");
        assert_eq!((row.message.as_str(), row.object.to_string()), ("a\\nb\\u{202e}c", "n/vm".to_owned()));
        assert!(row.is_warning);
    }
}
