//! Concurrency limiter with fair queuing: limits in total, per namespace and per object.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::FairQueue;
use crate::informer::Key;

/// Maximum numbers of concurrent operations.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// In total.
    pub total: usize,
    /// Per namespace.
    pub namespace: usize,
    /// Per object.
    pub object: usize,
}

/// A concurrency limiter. A caller waits in its flow; a released permit goes to the next allowed flow. Clones share the
/// limits.
#[derive(Debug, Clone)]
pub struct FairLimiter(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limits: Limits,
    state: Mutex<State>,
}

/// Running and waiting operations. No operation waits that would be allowed to run.
#[derive(Debug, Default)]
struct State {
    total: usize,
    namespaces: HashMap<String, usize>,
    objects: HashMap<Key, usize>,
    waiting: FairQueue<Waiting>,
    last: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    grant: oneshot::Sender<()>,
}

/// Permission to run an operation; released on drop.
#[derive(Debug)]
pub struct Permit {
    limiter: FairLimiter,
    flow: Key,
}

/// A waiting operation; leaves its flow on drop.
struct Waiter<'a> {
    limiter: &'a FairLimiter,
    flow: &'a Key,
    number: u64,
    is_granted: bool,
    grant: oneshot::Receiver<()>,
}

impl FairLimiter {
    /// Creates a limiter without running operations.
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Shared { limits, state: Mutex::default() }))
    }

    /// Waits for a permit. Cancel-safe.
    pub async fn acquire(&self, flow: &Key) -> Permit {
        let waiter = {
            let mut state = self.state();
            if state.admits(&self.0.limits, flow) {
                state.count(flow);
                return Permit { limiter: self.clone(), flow: flow.clone() };
            }
            let (sender, receiver) = oneshot::channel();
            state.last += 1;
            let number = state.last;
            state.waiting.push(flow.clone(), Waiting { number, grant: sender });
            Waiter { limiter: self, flow, number, is_granted: false, grant: receiver }
        };
        waiter.wait().await
    }

    /// Number of waiting operations of a namespace.
    pub fn waiting(&self, namespace: &str) -> usize {
        self.state().waiting.len_of(namespace)
    }

    /// Whether no operation runs or waits.
    pub fn is_idle(&self) -> bool {
        let state = self.state();
        state.total == 0 && state.waiting.is_empty()
    }

    fn leave(&self, flow: &Key) {
        let mut state = self.state();
        state.uncount(flow);
        state.grant(&self.0.limits);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn admits(&self, limits: &Limits, flow: &Key) -> bool {
        self.total < limits.total
            && self.has_capacity(limits, &flow.namespace)
            && count_of(&self.objects, flow) < limits.object
    }

    fn has_capacity(&self, limits: &Limits, namespace: &str) -> bool {
        self.namespaces.get(namespace).copied().unwrap_or_default() < limits.namespace
    }

    /// Grants permits to waiting operations. A skipped flow has a running operation, so the number of skips is bounded.
    fn grant(&mut self, limits: &Limits) {
        while self.total < limits.total {
            let mut waiting = std::mem::take(&mut self.waiting);
            let next = waiting.pop_if(
                |namespace| self.has_capacity(limits, namespace),
                |flow| count_of(&self.objects, flow) < limits.object,
            );
            self.waiting = waiting;
            let Some((flow, next)) = next else { return };
            // Cancelled operations have left their flow, under the same lock.
            if next.grant.send(()).is_ok() {
                self.count(&flow);
            }
        }
    }

    fn count(&mut self, flow: &Key) {
        self.total += 1;
        *self.namespaces.entry(flow.namespace.clone()).or_default() += 1;
        *self.objects.entry(flow.clone()).or_default() += 1;
    }

    fn uncount(&mut self, flow: &Key) {
        self.total -= 1;
        uncount(&mut self.namespaces, &flow.namespace);
        uncount(&mut self.objects, flow);
    }
}

fn count_of(objects: &HashMap<Key, usize>, flow: &Key) -> usize {
    objects.get(flow).copied().unwrap_or_default()
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

impl Waiter<'_> {
    async fn wait(mut self) -> Permit {
        // The sender is dropped only after sending, or by this value.
        let _ = (&mut self.grant).await;
        self.is_granted = true;
        Permit { limiter: self.limiter.clone(), flow: self.flow.clone() }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        if self.is_granted {
            return;
        }
        let mut state = self.limiter.state();
        let own = state.waiting.remove(self.flow, |one| one.number == self.number);
        if own.is_none() {
            // The permit was granted but not received.
            state.uncount(self.flow);
            state.grant(&self.limiter.0.limits);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.limiter.leave(&self.flow);
    }
}

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::*;

    const LIMITS: Limits = Limits { total: 4, namespace: 3, object: 2 };

    fn flow(text: &str) -> Key {
        let (namespace, object) = text.split_once('/').unwrap();
        Key::new(namespace, object)
    }

    #[tokio::test]
    async fn concurrency_is_limited_per_object_per_namespace_and_in_total() {
        let limiter = FairLimiter::new(LIMITS);
        let (a, b, c, d) = (flow("n/a"), flow("n/b"), flow("n/c"), flow("m/d"));
        let held = (limiter.acquire(&a).await, limiter.acquire(&a).await);
        let mut third = Box::pin(limiter.acquire(&a));
        assert!(poll!(&mut third).is_pending(), "per object");
        let other = limiter.acquire(&b).await;
        let mut fourth = Box::pin(limiter.acquire(&c));
        assert!(poll!(&mut fourth).is_pending(), "per namespace");
        let elsewhere = limiter.acquire(&d).await;
        let mut last = Box::pin(limiter.acquire(&d));
        assert!(poll!(&mut last).is_pending(), "in total");
        assert_eq!((limiter.waiting("n"), limiter.waiting("m")), (2, 1));
        drop(elsewhere);
        assert!(poll!(&mut last).is_ready());
        drop((third, fourth, last, held, other));
        assert!(limiter.is_idle());
    }

    #[tokio::test]
    async fn released_permits_go_to_the_flows_in_turn() {
        let limiter = FairLimiter::new(Limits { total: 1, namespace: 1, object: 1 });
        let (loud, quiet) = (flow("loud/a"), flow("quiet/b"));
        let mut held = Some(limiter.acquire(&loud).await);
        let mut waiting: Vec<_> = (0..100).map(|_| Box::pin(limiter.acquire(&loud))).collect();
        for one in &mut waiting {
            assert!(poll!(one).is_pending());
        }
        let mut other = Box::pin(limiter.acquire(&quiet));
        assert!(poll!(&mut other).is_pending());
        let mut before = 0;
        loop {
            held.take();
            if let std::task::Poll::Ready(permit) = poll!(&mut other) {
                drop(permit);
                break;
            }
            let std::task::Poll::Ready(permit) = poll!(&mut waiting[before]) else {
                panic!("no permit was granted")
            };
            held = Some(permit);
            before += 1;
        }
        assert!(before <= 1, "{before} operations of the other namespace came first");
    }

    #[tokio::test]
    async fn a_cancelled_waiter_leaves_its_flow_and_loses_no_permit() {
        let limiter = FairLimiter::new(Limits { total: 1, namespace: 1, object: 1 });
        let a = flow("n/a");
        let held = limiter.acquire(&a).await;
        let mut left = Box::pin(limiter.acquire(&a));
        let mut unaware = Box::pin(limiter.acquire(&a));
        let mut last = Box::pin(limiter.acquire(&a));
        for one in [&mut left, &mut unaware, &mut last] {
            assert!(poll!(one).is_pending());
        }
        drop(left);
        drop(held);
        // Granted, and dropped before it was polled.
        drop(unaware);
        let permit = poll!(&mut last);
        assert!(permit.is_ready());
        drop((permit, last));
        assert!(limiter.is_idle());
        let state = limiter.state();
        assert_eq!((state.objects.capacity(), state.namespaces.capacity()), (0, 0));
    }
}
