//! How much may be under way at once: in all, for one namespace, and for one object.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::Lanes;
use crate::informer::Key;

/// What may be under way at once.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// In all.
    pub total: usize,
    /// For one namespace.
    pub namespace: usize,
    /// For one object.
    pub object: usize,
}

/// Lets in as much as its limits say. Who must wait waits in its lane; what becomes free goes to the next lane in turn
/// that may have it. Cloning it is cheap and shares the limits.
#[derive(Debug, Clone)]
pub struct Gate(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limits: Limits,
    state: Mutex<State>,
}

/// What is under way, and what waits. Nothing waits that might be under way.
#[derive(Debug, Default)]
struct State {
    total: usize,
    namespaces: HashMap<String, usize>,
    objects: HashMap<Key, usize>,
    waiting: Lanes<Waiting>,
    last: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    let_in: oneshot::Sender<()>,
}

/// Something is under way until this is dropped.
#[derive(Debug)]
pub struct Permit {
    gate: Gate,
    lane: Key,
}

/// A place in a lane, given up when it is dropped.
struct Place<'a> {
    gate: &'a Gate,
    lane: &'a Key,
    number: u64,
    is_let_in: bool,
    let_in: oneshot::Receiver<()>,
}

impl Gate {
    /// Nothing is under way.
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Shared { limits, state: Mutex::default() }))
    }

    /// Waits until it may be under way. Whoever stops waiting has left its lane.
    pub async fn enter(&self, lane: &Key) -> Permit {
        let place = {
            let mut state = self.state();
            if state.admits(&self.0.limits, lane) {
                state.count(lane);
                return Permit { gate: self.clone(), lane: lane.clone() };
            }
            let (sender, receiver) = oneshot::channel();
            state.last += 1;
            let number = state.last;
            state.waiting.push(lane.clone(), Waiting { number, let_in: sender });
            Place { gate: self, lane, number, is_let_in: false, let_in: receiver }
        };
        place.wait().await
    }

    /// How much of a namespace waits.
    pub fn waiting(&self, namespace: &str) -> usize {
        self.state().waiting.len_of(namespace)
    }

    /// Whether nothing is under way and nothing waits.
    pub fn is_idle(&self) -> bool {
        let state = self.state();
        state.total == 0 && state.waiting.is_empty()
    }

    fn leave(&self, lane: &Key) {
        let mut state = self.state();
        state.uncount(lane);
        state.let_in(&self.0.limits);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn admits(&self, limits: &Limits, lane: &Key) -> bool {
        self.total < limits.total
            && self.has_room(limits, &lane.namespace)
            && count_of(&self.objects, lane) < limits.object
    }

    fn has_room(&self, limits: &Limits, namespace: &str) -> bool {
        self.namespaces.get(namespace).copied().unwrap_or_default() < limits.namespace
    }

    /// Lets in whom it may. A lane that is passed over has something under way, so only as many are as fill the limits.
    fn let_in(&mut self, limits: &Limits) {
        while self.total < limits.total {
            let mut waiting = std::mem::take(&mut self.waiting);
            let next = waiting.pop_if(
                |namespace| self.has_room(limits, namespace),
                |lane| count_of(&self.objects, lane) < limits.object,
            );
            self.waiting = waiting;
            let Some((lane, next)) = next else { return };
            // One that has stopped waiting has left its lane, by the same lock.
            if next.let_in.send(()).is_ok() {
                self.count(&lane);
            }
        }
    }

    fn count(&mut self, lane: &Key) {
        self.total += 1;
        *self.namespaces.entry(lane.namespace.clone()).or_default() += 1;
        *self.objects.entry(lane.clone()).or_default() += 1;
    }

    fn uncount(&mut self, lane: &Key) {
        self.total -= 1;
        uncount(&mut self.namespaces, &lane.namespace);
        uncount(&mut self.objects, lane);
    }
}

fn count_of(objects: &HashMap<Key, usize>, lane: &Key) -> usize {
    objects.get(lane).copied().unwrap_or_default()
}

fn uncount<K: Hash + Eq>(counts: &mut HashMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
    if counts.is_empty() {
        *counts = HashMap::new();
    }
}

impl Place<'_> {
    async fn wait(mut self) -> Permit {
        // The sender is dropped only by who sends, or by this place.
        let _ = (&mut self.let_in).await;
        self.is_let_in = true;
        Permit { gate: self.gate.clone(), lane: self.lane.clone() }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.is_let_in {
            return;
        }
        let mut state = self.gate.state();
        let own = state.waiting.remove(self.lane, |one| one.number == self.number);
        if own.is_none() {
            // It was let in, and did not come to know.
            state.uncount(self.lane);
            state.let_in(&self.gate.0.limits);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.gate.leave(&self.lane);
    }
}

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::*;

    const LIMITS: Limits = Limits { total: 4, namespace: 3, object: 2 };

    fn lane(text: &str) -> Key {
        let (namespace, object) = text.split_once('/').unwrap();
        Key::new(namespace, object)
    }

    #[tokio::test]
    async fn an_object_a_namespace_and_all_together_have_a_bound() {
        let gate = Gate::new(LIMITS);
        let (a, b, c, d) = (lane("n/a"), lane("n/b"), lane("n/c"), lane("m/d"));
        let held = (gate.enter(&a).await, gate.enter(&a).await);
        let mut third = Box::pin(gate.enter(&a));
        assert!(poll!(&mut third).is_pending(), "of one object");
        let other = gate.enter(&b).await;
        let mut fourth = Box::pin(gate.enter(&c));
        assert!(poll!(&mut fourth).is_pending(), "of one namespace");
        let elsewhere = gate.enter(&d).await;
        let mut last = Box::pin(gate.enter(&d));
        assert!(poll!(&mut last).is_pending(), "in all");
        assert_eq!((gate.waiting("n"), gate.waiting("m")), (2, 1));
        drop(elsewhere);
        assert!(poll!(&mut last).is_ready());
        drop((third, fourth, last, held, other));
        assert!(gate.is_idle());
    }

    #[tokio::test]
    async fn what_becomes_free_goes_to_the_lanes_in_turn() {
        let gate = Gate::new(Limits { total: 1, namespace: 1, object: 1 });
        let (loud, quiet) = (lane("loud/a"), lane("quiet/b"));
        let mut held = Some(gate.enter(&loud).await);
        let mut waiting: Vec<_> = (0..100).map(|_| Box::pin(gate.enter(&loud))).collect();
        for one in &mut waiting {
            assert!(poll!(one).is_pending());
        }
        let mut other = Box::pin(gate.enter(&quiet));
        assert!(poll!(&mut other).is_pending());
        let mut before = 0;
        loop {
            held.take();
            if let std::task::Poll::Ready(permit) = poll!(&mut other) {
                drop(permit);
                break;
            }
            let std::task::Poll::Ready(permit) = poll!(&mut waiting[before]) else {
                panic!("nobody was let in")
            };
            held = Some(permit);
            before += 1;
        }
        assert!(before <= 1, "{before} of the other namespace came before");
    }

    #[tokio::test]
    async fn who_stops_waiting_keeps_no_place_and_nothing_is_lost() {
        let gate = Gate::new(Limits { total: 1, namespace: 1, object: 1 });
        let a = lane("n/a");
        let held = gate.enter(&a).await;
        let mut left = Box::pin(gate.enter(&a));
        let mut unaware = Box::pin(gate.enter(&a));
        let mut last = Box::pin(gate.enter(&a));
        for one in [&mut left, &mut unaware, &mut last] {
            assert!(poll!(one).is_pending());
        }
        drop(left);
        drop(held);
        // Let in by now, and gone before it was asked.
        drop(unaware);
        let permit = poll!(&mut last);
        assert!(permit.is_ready());
        drop((permit, last));
        assert!(gate.is_idle());
        let state = gate.state();
        assert_eq!((state.objects.capacity(), state.namespaces.capacity()), (0, 0));
    }
}
