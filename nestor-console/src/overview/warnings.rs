//! The warnings about an object.

use std::collections::HashMap;

use kube_kit::informer::Key;

use crate::feed::EventRow;

/// Warnings by kind and object, newest first.
#[derive(Debug, Default)]
pub struct Warnings(HashMap<(String, Key), Vec<EventRow>>);

impl Warnings {
    /// Takes the warnings out of all Events.
    pub fn of(events: impl IntoIterator<Item = EventRow>) -> Self {
        let mut all: HashMap<(String, Key), Vec<EventRow>> = HashMap::new();
        for event in events.into_iter().filter(|event| event.is_warning) {
            all.entry((event.kind.clone(), event.object.clone())).or_default().push(event);
        }
        for events in all.values_mut() {
            events.sort_by_key(|event| std::cmp::Reverse(event.time));
        }
        Self(all)
    }

    /// The newest warning about an object.
    pub fn about(&self, kind: &str, object: &Key) -> Option<&EventRow> {
        self.mentioning(kind, object, "")
    }

    /// The newest warning about an object whose message mentions this text.
    pub fn mentioning(&self, kind: &str, object: &Key, text: &str) -> Option<&EventRow> {
        let events = self.0.get(&(kind.to_owned(), object.clone()))?;
        events.iter().find(|event| event.message.contains(text))
    }
}
