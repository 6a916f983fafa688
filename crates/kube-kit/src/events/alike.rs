//! Warnings that are alike: many objects of one that fail for one cause are one event of that one.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;

use super::{Events, Topic, topic};

/// How long a warning waits for others that are alike.
const GATHER: Duration = Duration::from_secs(1);
/// How many names an event has.
const NAMED: usize = 10;

/// A warning about one of the objects that belong to another.
#[derive(Debug, Clone)]
pub struct Alike {
    /// What they all belong to.
    pub group: ObjectReference,
    /// Why, in one CamelCase word.
    pub cause: String,
    /// What it is about.
    pub about: ObjectReference,
    /// Name of that, where several are told of.
    pub name: String,
    /// What is said where it is the only one.
    pub note: String,
}

/// Those that wait for others, by what they belong to, action, reason and cause.
#[derive(Debug, Default)]
pub(super) struct Gathering(Mutex<HashMap<(Topic, String), Gathered>>);

/// The first of them, and what is told of the others.
#[derive(Debug)]
struct Gathered {
    first: Alike,
    names: Vec<String>,
    count: usize,
}

impl Gathering {
    /// Whether it is the first of its kind: whoever asks then takes them all later.
    fn put(&self, key: &(Topic, String), one: Alike) -> bool {
        let mut all = self.all();
        if let Some(gathered) = all.get_mut(key) {
            gathered.count += 1;
            if gathered.names.len() < NAMED && !gathered.names.contains(&one.name) {
                gathered.names.push(one.name);
            }
            return false;
        }
        let names = vec![one.name.clone()];
        all.insert(key.clone(), Gathered { first: one, names, count: 1 });
        true
    }

    fn take(&self, key: &(Topic, String)) -> Option<Gathered> {
        let mut all = self.all();
        let taken = all.remove(key);
        if all.is_empty() {
            *all = HashMap::new();
        }
        taken
    }

    fn all(&self) -> MutexGuard<'_, HashMap<(Topic, String), Gathered>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Events {
    /// Something went wrong, and perhaps with others of the same object, too. What comes within a second for the same
    /// cause is one event of that object; one alone is an event of its own.
    pub fn warning_of(&self, action: &'static str, reason: &'static str, one: Alike) {
        let key = (topic(&one.group, action, reason), one.cause.clone());
        if !self.alike.put(&key, one) {
            return;
        }
        let events = self.clone();
        process_kit::supervise::worker("event aggregation", async move {
            tokio::time::sleep(GATHER).await;
            if let Some(gathered) = events.alike.take(&key) {
                events.say(action, reason, gathered);
            }
        });
    }

    /// One event of each object and cause in six minutes, however many come after those that were gathered.
    fn say(&self, action: &str, reason: &str, Gathered { first, names, count }: Gathered) {
        let of_group = format!("{action}{}", first.cause);
        if count == 1 && !self.has_said(&first.group, &of_group, reason) {
            return self.warning(first.about, action, reason, first.note);
        }
        let note =
            format!("{count} times {}: {}; the first: {}", first.cause, listed(&names, count), first.note);
        self.warning_once(first.group, &of_group, reason, note);
    }
}

/// The first of `count` names.
pub fn listed<T: AsRef<str>>(names: &[T], count: usize) -> String {
    let shown: Vec<&str> = names.iter().take(NAMED).map(AsRef::as_ref).collect();
    let more = if count > shown.len() { ", …" } else { "" };
    format!("{}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(cause: &str, name: &str) -> Alike {
        let of = |name: &str| ObjectReference { name: Some(name.into()), ..ObjectReference::default() };
        Alike { group: of("vm"), cause: cause.into(), about: of(name), name: name.into(), note: "no".into() }
    }

    #[test]
    fn what_is_alike_is_gathered_with_few_names_and_nothing_is_kept_of_it() {
        let gathering = Gathering::default();
        let key = |cause: &str| (topic(&one(cause, "a").group, "Attach", "Failed"), cause.to_owned());
        assert!(gathering.put(&key("InUse"), one("InUse", "v0")));
        for number in 1..128 {
            assert!(!gathering.put(&key("InUse"), one("InUse", &format!("v{number}"))));
        }
        assert!(gathering.put(&key("Other"), one("Other", "w")));
        let gathered = gathering.take(&key("InUse")).unwrap();
        assert_eq!((gathered.count, gathered.names.len()), (128, NAMED));
        assert!(gathering.take(&key("InUse")).is_none());
        assert_eq!(gathering.take(&key("Other")).unwrap().count, 1);
        assert_eq!(gathering.all().capacity(), 0);
    }

    #[test]
    fn a_list_of_names_says_that_there_are_more() {
        assert_eq!(listed(&["a", "b"], 2), "a, b");
        assert_eq!(listed(&["a", "b"], 9), "a, b, …");
    }
}
