//! Fair shares between namespaces, and between the objects of one: whoever asks for much waits behind itself, and not
//! before the others. [`Lanes`] says whose turn it is, [`Gate`] how much may be under way at once.

mod gate;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use crate::informer::Key;

pub use gate::{Gate, Limits, Permit};

/// Items that wait, each in the lane of an object in a namespace. Namespaces take turns, the objects of a namespace take
/// turns within its own, and the items of one object come in the order in which they were put in. A lane without items
/// takes no memory.
#[derive(Debug)]
pub struct Lanes<T> {
    /// The namespaces that have items, the next one first.
    turns: VecDeque<String>,
    namespaces: HashMap<String, Namespace<T>>,
}

#[derive(Debug)]
struct Namespace<T> {
    /// The objects that have items, the next one first.
    turns: VecDeque<String>,
    objects: HashMap<String, VecDeque<T>>,
    len: usize,
}

impl<T> Default for Lanes<T> {
    fn default() -> Self {
        Self { turns: VecDeque::new(), namespaces: HashMap::new() }
    }
}

impl<T> Default for Namespace<T> {
    fn default() -> Self {
        Self { turns: VecDeque::new(), objects: HashMap::new(), len: 0 }
    }
}

impl<T> Lanes<T> {
    /// Puts an item behind those of its lane.
    pub fn push(&mut self, lane: Key, item: T) {
        let namespace = match self.namespaces.entry(lane.namespace) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(new) => {
                self.turns.push_back(new.key().clone());
                new.insert(Namespace::default())
            }
        };
        namespace.push(lane.name, item);
    }

    /// The next item. Its namespace, and its object there, come last from then on.
    pub fn pop(&mut self) -> Option<(Key, T)> {
        self.pop_if(|_| true, |_| true)
    }

    /// The next item of a lane that may have a turn, by its namespace and by itself. Those that may not keep their place.
    pub fn pop_if(
        &mut self,
        namespace: impl Fn(&str) -> bool,
        lane: impl Fn(&Key) -> bool,
    ) -> Option<(Key, T)> {
        for at in 0..self.turns.len() {
            let name = &self.turns[at];
            if !namespace(name) {
                continue;
            }
            let Some((object, item)) =
                self.namespaces.get_mut(name).and_then(|found| found.pop_if(name, &lane))
            else {
                continue;
            };
            let name = self.turns.remove(at).unwrap_or_default();
            match self.namespaces.get(&name).is_some_and(|left| left.len > 0) {
                true => self.turns.push_back(name.clone()),
                false => drop(self.namespaces.remove(&name)),
            }
            self.give_back();
            return Some((Key::new(name, object), item));
        }
        None
    }

    /// Takes the first item of a lane out that `pick` takes, wherever it stands.
    pub fn remove(&mut self, lane: &Key, pick: impl Fn(&T) -> bool) -> Option<T> {
        let namespace = self.namespaces.get_mut(&lane.namespace)?;
        let item = namespace.remove(&lane.name, pick)?;
        if namespace.len == 0 {
            self.namespaces.remove(&lane.namespace);
            self.turns.retain(|name| *name != lane.namespace);
        }
        self.give_back();
        Some(item)
    }

    /// How many items of a namespace wait.
    pub fn len_of(&self, namespace: &str) -> usize {
        self.namespaces.get(namespace).map_or(0, |namespace| namespace.len)
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// What was needed for much that waited is not kept for nothing.
    fn give_back(&mut self) {
        if self.is_empty() {
            *self = Self::default();
        }
    }
}

impl<T> Namespace<T> {
    fn push(&mut self, object: String, item: T) {
        self.len += 1;
        match self.objects.entry(object) {
            Entry::Occupied(items) => items.into_mut().push_back(item),
            Entry::Vacant(new) => {
                self.turns.push_back(new.key().clone());
                new.insert([item].into());
            }
        }
    }

    fn pop_if(&mut self, namespace: &str, may: impl Fn(&Key) -> bool) -> Option<(String, T)> {
        let at = self.turns.iter().position(|object| may(&Key::new(namespace, object)))?;
        let object = self.turns.remove(at)?;
        let items = self.objects.get_mut(&object)?;
        let item = items.pop_front()?;
        match items.is_empty() {
            true => drop(self.objects.remove(&object)),
            false => self.turns.push_back(object.clone()),
        }
        self.len -= 1;
        Some((object, item))
    }

    fn remove(&mut self, object: &str, pick: impl Fn(&T) -> bool) -> Option<T> {
        let items = self.objects.get_mut(object)?;
        let item = items.iter().position(pick).and_then(|at| items.remove(at))?;
        if items.is_empty() {
            self.objects.remove(object);
            self.turns.retain(|name| name != object);
        }
        self.len -= 1;
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(namespace: &str, object: &str) -> Key {
        Key::new(namespace, object)
    }

    fn drained(lanes: &mut Lanes<u32>) -> Vec<u32> {
        std::iter::from_fn(|| lanes.pop()).map(|(_, item)| item).collect()
    }

    #[test]
    fn namespaces_take_turns_and_then_their_objects() {
        let mut lanes = Lanes::default();
        for item in 0..3 {
            lanes.push(lane("loud", "a"), item);
        }
        for item in 10..12 {
            lanes.push(lane("loud", "b"), item);
        }
        lanes.push(lane("quiet", "c"), 20);
        assert_eq!((lanes.len_of("loud"), lanes.len_of("quiet"), lanes.len_of("none")), (5, 1, 0));
        assert_eq!(drained(&mut lanes), [0, 20, 10, 1, 11, 2]);
    }

    #[test]
    fn who_comes_while_another_has_much_is_next_but_one() {
        let mut lanes = Lanes::default();
        for item in 0..1000 {
            lanes.push(lane("loud", "a"), item);
        }
        assert_eq!(lanes.pop(), Some((lane("loud", "a"), 0)));
        lanes.push(lane("quiet", "b"), 2000);
        lanes.push(lane("loud", "c"), 3000);
        let next: Vec<u32> = (0..4).filter_map(|_| lanes.pop()).map(|(_, item)| item).collect();
        assert_eq!(next, [1, 2000, 3000, 2]);
    }

    #[test]
    fn who_may_not_have_a_turn_is_passed_over_and_keeps_its_place() {
        let mut lanes = Lanes::default();
        for (namespace, object, item) in [("a", "x", 1), ("a", "y", 2), ("b", "z", 3)] {
            lanes.push(lane(namespace, object), item);
        }
        assert_eq!(lanes.pop_if(|namespace| namespace != "a", |_| true).unwrap().1, 3);
        assert_eq!(lanes.pop_if(|_| true, |lane| lane.name != "x").unwrap().1, 2);
        assert!(lanes.pop_if(|_| false, |_| true).is_none());
        assert_eq!(drained(&mut lanes), [1]);
    }

    #[test]
    fn lanes_without_items_take_no_memory() {
        let mut lanes = Lanes::default();
        for object in 0..1000 {
            lanes.push(lane("loud", &object.to_string()), object);
        }
        assert_eq!(lanes.remove(&lane("loud", "7"), |item| *item == 8), None);
        assert_eq!(lanes.remove(&lane("loud", "7"), |item| *item == 7), Some(7));
        assert_eq!(drained(&mut lanes).len(), 999);
        assert!(lanes.is_empty());
        assert_eq!((lanes.turns.capacity(), lanes.namespaces.capacity()), (0, 0));
        lanes.push(lane("quiet", "a"), 1);
        assert_eq!(lanes.remove(&lane("quiet", "a"), |_| true), Some(1));
        assert!(lanes.is_empty() && lanes.pop().is_none());
    }
}
