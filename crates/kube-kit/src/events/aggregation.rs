//! Event aggregation: Warnings about many objects of one group with one cause become one Event of the group.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;

use super::{Events, Topic, topic};

/// How long a Warning waits for similar ones.
const AGGREGATION_WINDOW: Duration = Duration::from_secs(1);
/// Maximum number of object names in an Event.
const MAX_NAMES: usize = 10;

/// A Warning about one object of a group.
#[derive(Debug, Clone)]
pub struct GroupedWarning {
    /// Object to which the group belongs.
    pub group: ObjectReference,
    /// Cause as a CamelCase word.
    pub cause: String,
    /// Object of the Warning.
    pub about: ObjectReference,
    /// Name of the object in an aggregated Event.
    pub name: String,
    /// Text if the Warning is not aggregated.
    pub note: String,
}

/// Pending Warnings by group, action, reason and cause.
#[derive(Debug, Default)]
pub(super) struct Aggregator(Mutex<HashMap<(Topic, String), Aggregate>>);

/// The first Warning, and names and number of all.
#[derive(Debug)]
struct Aggregate {
    first: GroupedWarning,
    names: Vec<String>,
    count: usize,
}

impl Aggregator {
    /// Adds a Warning. Returns true for the first one; its caller takes the aggregate later.
    fn add(&self, key: &(Topic, String), one: GroupedWarning) -> bool {
        let mut all = self.all();
        if let Some(aggregate) = all.get_mut(key) {
            aggregate.count += 1;
            if aggregate.names.len() < MAX_NAMES && !aggregate.names.contains(&one.name) {
                aggregate.names.push(one.name);
            }
            return false;
        }
        let names = vec![one.name.clone()];
        all.insert(key.clone(), Aggregate { first: one, names, count: 1 });
        true
    }

    fn take(&self, key: &(Topic, String)) -> Option<Aggregate> {
        let mut all = self.all();
        let taken = all.remove(key);
        if all.is_empty() {
            *all = HashMap::new();
        }
        taken
    }

    fn all(&self) -> MutexGuard<'_, HashMap<(Topic, String), Aggregate>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Events {
    /// Sends a Warning that may be aggregated: Warnings of the same group and cause within a second become one Event of the
    /// group's object. A single Warning is sent for its own object.
    pub fn grouped_warning(&self, action: &'static str, reason: &'static str, one: GroupedWarning) {
        let key = (topic(&one.group, action, reason), one.cause.clone());
        if !self.aggregator.add(&key, one) {
            return;
        }
        let events = self.clone();
        process_kit::supervise::worker("event aggregation", async move {
            tokio::time::sleep(AGGREGATION_WINDOW).await;
            if let Some(aggregate) = events.aggregator.take(&key) {
                events.send_aggregate(action, reason, aggregate);
            }
        });
    }

    /// Sends at most one aggregated Event per group and cause in six minutes.
    fn send_aggregate(&self, action: &str, reason: &str, Aggregate { first, names, count }: Aggregate) {
        let of_group = format!("{action}{}", first.cause);
        if count == 1 && !self.was_sent_recently(&first.group, &of_group, reason) {
            return self.warning(first.about, action, reason, first.note);
        }
        let note = format!("{count} × {}: {}; first: {}", first.cause, name_list(&names, count), first.note);
        self.warning_once(first.group, &of_group, reason, note);
    }
}

/// Joins the first of `count` names.
pub fn name_list<T: AsRef<str>>(names: &[T], count: usize) -> String {
    let shown: Vec<&str> = names.iter().take(MAX_NAMES).map(AsRef::as_ref).collect();
    let more = if count > shown.len() { ", …" } else { "" };
    format!("{}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(cause: &str, name: &str) -> GroupedWarning {
        let of = |name: &str| ObjectReference { name: Some(name.into()), ..ObjectReference::default() };
        GroupedWarning {
            group: of("vm"),
            cause: cause.into(),
            about: of(name),
            name: name.into(),
            note: "no".into(),
        }
    }

    #[test]
    fn similar_warnings_are_aggregated_with_few_names_and_release_their_memory() {
        let aggregator = Aggregator::default();
        let key = |cause: &str| (topic(&one(cause, "a").group, "Attach", "Failed"), cause.to_owned());
        assert!(aggregator.add(&key("InUse"), one("InUse", "v0")));
        for number in 1..128 {
            assert!(!aggregator.add(&key("InUse"), one("InUse", &format!("v{number}"))));
        }
        assert!(aggregator.add(&key("Other"), one("Other", "w")));
        let aggregate = aggregator.take(&key("InUse")).unwrap();
        assert_eq!((aggregate.count, aggregate.names.len()), (128, MAX_NAMES));
        assert!(aggregator.take(&key("InUse")).is_none());
        assert_eq!(aggregator.take(&key("Other")).unwrap().count, 1);
        assert_eq!(aggregator.all().capacity(), 0);
    }

    #[test]
    fn a_truncated_list_of_names_ends_with_an_ellipsis() {
        assert_eq!(name_list(&["a", "b"], 2), "a, b");
        assert_eq!(name_list(&["a", "b"], 9), "a, b, …");
    }
}
