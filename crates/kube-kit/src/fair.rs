//! Fair queuing between namespaces, and between the objects of a namespace: a caller with many items delays only itself.
//! [`FairQueue`] orders the items, [`FairLimiter`] limits concurrency.

mod limiter;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use crate::informer::Key;

pub use limiter::{FairLimiter, Limits, Permit};

/// Fair queues: each item belongs to the flow of an object in a namespace. Namespaces are served round-robin, so are the
/// objects of a namespace, and the items of an object are served in FIFO order. Flows without items use no memory.
#[derive(Debug)]
pub struct FairQueue<T> {
    /// Namespaces with items; the front is next.
    order: VecDeque<String>,
    namespaces: HashMap<String, Namespace<T>>,
}

#[derive(Debug)]
struct Namespace<T> {
    /// Objects with items; the front is next.
    order: VecDeque<String>,
    objects: HashMap<String, VecDeque<T>>,
    len: usize,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { order: VecDeque::new(), namespaces: HashMap::new() }
    }
}

impl<T> Default for Namespace<T> {
    fn default() -> Self {
        Self { order: VecDeque::new(), objects: HashMap::new(), len: 0 }
    }
}

impl<T> FairQueue<T> {
    /// Appends an item to its flow.
    pub fn push(&mut self, flow: Key, item: T) {
        let namespace = match self.namespaces.entry(flow.namespace) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(new) => {
                self.order.push_back(new.key().clone());
                new.insert(Namespace::default())
            }
        };
        namespace.push(flow.name, item);
    }

    /// The next item.
    pub fn front(&self) -> Option<&T> {
        let namespace = self.namespaces.get(self.order.front()?)?;
        namespace.objects.get(namespace.order.front()?)?.front()
    }

    /// Returns the next item, and moves its namespace and its object to the back.
    pub fn pop(&mut self) -> Option<(Key, T)> {
        self.pop_if(|_| true, |_| true)
    }

    /// Returns the next item of a flow that is allowed by its namespace and its key. Other flows keep their positions.
    pub fn pop_if(
        &mut self,
        namespace: impl Fn(&str) -> bool,
        flow: impl Fn(&Key) -> bool,
    ) -> Option<(Key, T)> {
        for at in 0..self.order.len() {
            let name = &self.order[at];
            if !namespace(name) {
                continue;
            }
            let Some((object, item)) =
                self.namespaces.get_mut(name).and_then(|found| found.pop_if(name, &flow))
            else {
                continue;
            };
            let name = self.order.remove(at).unwrap_or_default();
            match self.namespaces.get(&name).is_some_and(|left| left.len > 0) {
                true => self.order.push_back(name.clone()),
                false => drop(self.namespaces.remove(&name)),
            }
            self.release_memory();
            return Some((Key::new(name, object), item));
        }
        None
    }

    /// Removes the first item of a flow that matches `pick`.
    pub fn remove(&mut self, flow: &Key, pick: impl Fn(&T) -> bool) -> Option<T> {
        let namespace = self.namespaces.get_mut(&flow.namespace)?;
        let item = namespace.remove(&flow.name, pick)?;
        if namespace.len == 0 {
            self.namespaces.remove(&flow.namespace);
            self.order.retain(|name| *name != flow.namespace);
        }
        self.release_memory();
        Some(item)
    }

    /// Number of items of a namespace.
    pub fn len_of(&self, namespace: &str) -> usize {
        self.namespaces.get(namespace).map_or(0, |namespace| namespace.len)
    }

    /// Whether there are no items.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Releases memory when the queues are empty.
    fn release_memory(&mut self) {
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
                self.order.push_back(new.key().clone());
                new.insert([item].into());
            }
        }
    }

    fn pop_if(&mut self, namespace: &str, may: impl Fn(&Key) -> bool) -> Option<(String, T)> {
        let at = self.order.iter().position(|object| may(&Key::new(namespace, object)))?;
        let object = self.order.remove(at)?;
        let items = self.objects.get_mut(&object)?;
        let item = items.pop_front()?;
        match items.is_empty() {
            true => drop(self.objects.remove(&object)),
            false => self.order.push_back(object.clone()),
        }
        self.len -= 1;
        Some((object, item))
    }

    fn remove(&mut self, object: &str, pick: impl Fn(&T) -> bool) -> Option<T> {
        let items = self.objects.get_mut(object)?;
        let item = items.iter().position(pick).and_then(|at| items.remove(at))?;
        if items.is_empty() {
            self.objects.remove(object);
            self.order.retain(|name| name != object);
        }
        self.len -= 1;
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(namespace: &str, object: &str) -> Key {
        Key::new(namespace, object)
    }

    fn drained(queues: &mut FairQueue<u32>) -> Vec<u32> {
        std::iter::from_fn(|| queues.pop()).map(|(_, item)| item).collect()
    }

    #[test]
    fn namespaces_are_served_round_robin_and_so_are_their_objects() {
        let mut queues = FairQueue::default();
        for item in 0..3 {
            queues.push(flow("loud", "a"), item);
        }
        for item in 10..12 {
            queues.push(flow("loud", "b"), item);
        }
        queues.push(flow("quiet", "c"), 20);
        assert_eq!((queues.len_of("loud"), queues.len_of("quiet"), queues.len_of("none")), (5, 1, 0));
        assert_eq!(drained(&mut queues), [0, 20, 10, 1, 11, 2]);
    }

    #[test]
    fn an_item_of_an_idle_flow_is_served_second() {
        let mut queues = FairQueue::default();
        for item in 0..1000 {
            queues.push(flow("loud", "a"), item);
        }
        assert_eq!(queues.pop(), Some((flow("loud", "a"), 0)));
        queues.push(flow("quiet", "b"), 2000);
        queues.push(flow("loud", "c"), 3000);
        let next: Vec<u32> = (0..4).filter_map(|_| queues.pop()).map(|(_, item)| item).collect();
        assert_eq!(next, [1, 2000, 3000, 2]);
    }

    #[test]
    fn a_flow_that_is_not_allowed_is_skipped_and_keeps_its_position() {
        let mut queues = FairQueue::default();
        for (namespace, object, item) in [("a", "x", 1), ("a", "y", 2), ("b", "z", 3)] {
            queues.push(flow(namespace, object), item);
        }
        assert_eq!(queues.pop_if(|namespace| namespace != "a", |_| true).unwrap().1, 3);
        assert_eq!(queues.pop_if(|_| true, |flow| flow.name != "x").unwrap().1, 2);
        assert!(queues.pop_if(|_| false, |_| true).is_none());
        assert_eq!(drained(&mut queues), [1]);
    }

    #[test]
    fn flows_without_items_use_no_memory() {
        let mut queues = FairQueue::default();
        for object in 0..1000 {
            queues.push(flow("loud", &object.to_string()), object);
        }
        assert_eq!(queues.remove(&flow("loud", "7"), |item| *item == 8), None);
        assert_eq!(queues.remove(&flow("loud", "7"), |item| *item == 7), Some(7));
        assert_eq!(drained(&mut queues).len(), 999);
        assert!(queues.is_empty());
        assert_eq!((queues.order.capacity(), queues.namespaces.capacity()), (0, 0));
        queues.push(flow("quiet", "a"), 1);
        assert_eq!(queues.remove(&flow("quiet", "a"), |_| true), Some(1));
        assert!(queues.is_empty() && queues.pop().is_none());
    }
}
