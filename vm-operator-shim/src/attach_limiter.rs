//! Attach rate limiter per VM: a token bucket with a burst and a rate per second. A VM whose spec removes many recently added
//! disks at once loses its burst. Detaches are not limited.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube_kit::informer::Key;
use process_kit::memory::shrink_map;

/// An attachment that is deleted within this time counts as flapping.
pub(crate) const RECENT: Duration = Duration::from_secs(60);

/// Flags of the attach rate limiter.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args)]
pub struct RateArgs {
    /// Burst: number of disks of one VirtualMachine that are attached at once before --attach-rate applies.
    #[arg(long = "attach-burst", value_name = "DISKS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub burst: u32,
    /// Rate: number of disks of one VirtualMachine that are attached per second after the burst.
    #[arg(long = "attach-rate", value_name = "DISKS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub per_second: u32,
    /// A VirtualMachine that removes at least this many disks at once, each added less than 60 s ago, loses its burst.
    #[arg(long = "flapping", value_name = "DISKS", default_value_t = 33, value_parser = clap::value_parser!(u32).range(1..))]
    pub flapping: u32,
}

/// Token buckets of all VMs. A full bucket takes no memory.
#[derive(Debug)]
pub(crate) struct AttachLimiter {
    rate: RateArgs,
    available: Mutex<HashMap<Key, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    disks: f64,
    at: Instant,
}

impl AttachLimiter {
    pub(crate) fn new(rate: RateArgs) -> Self {
        Self { rate, available: Mutex::default() }
    }

    /// Takes up to `requested` tokens and returns their number.
    pub(crate) fn acquire(&self, vm: &Key, requested: usize) -> usize {
        self.acquire_at(vm, requested, Instant::now())
    }

    fn acquire_at(&self, vm: &Key, requested: usize, now: Instant) -> usize {
        if requested == 0 {
            return 0;
        }
        let mut all = self.all();
        let available = self.available(&all, vm, now);
        // The conversion truncates to whole tokens.
        let granted = requested.min(available as usize);
        self.keep(&mut all, vm, available - granted as f64, now);
        granted
    }

    /// Records that this many recent attachments were removed at once.
    pub(crate) fn record_removals(&self, vm: &Key, young: usize) {
        if young >= self.rate.flapping as usize {
            self.keep(&mut self.all(), vm, 0.0, Instant::now());
        }
    }

    /// Delay before a retry after too few tokens. It is long enough for several disks, so that they are attached in batches.
    pub(crate) fn wait(&self) -> Duration {
        Duration::from_millis(500).max(Duration::from_secs(1) / self.rate.per_second)
    }

    /// The configured rate, for messages.
    pub(crate) fn rate(&self) -> RateArgs {
        self.rate
    }

    fn available(&self, all: &HashMap<Key, Bucket>, vm: &Key, now: Instant) -> f64 {
        let full = f64::from(self.rate.burst);
        all.get(vm).map_or(full, |available| {
            let since = now.duration_since(available.at).as_secs_f64();
            full.min(available.disks + since * f64::from(self.rate.per_second))
        })
    }

    /// Stores a bucket, and drops full ones when the map would grow.
    fn keep(&self, all: &mut HashMap<Key, Bucket>, vm: &Key, disks: f64, now: Instant) {
        all.insert(vm.clone(), Bucket { disks, at: now });
        if all.len() == all.capacity() {
            let is_full = |available: f64| available >= f64::from(self.rate.burst);
            let full: Vec<Key> =
                all.keys().filter(|vm| is_full(self.available(all, vm, now))).cloned().collect();
            for vm in &full {
                all.remove(vm);
            }
            shrink_map(all);
        }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Key, Bucket>> {
        self.available.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: RateArgs = RateArgs { burst: 256, per_second: 10, flapping: 33 };

    fn vm(number: usize) -> Key {
        Key::new("guest", format!("vm-{number}"))
    }

    #[test]
    fn a_vm_attaches_its_burst_at_once_and_then_at_the_rate() {
        let (attach_limiter, now) = (AttachLimiter::new(RATE), Instant::now());
        assert_eq!(attach_limiter.acquire_at(&vm(1), 256, now), 256);
        assert_eq!(attach_limiter.acquire_at(&vm(1), 5, now), 0);
        assert_eq!(attach_limiter.acquire_at(&vm(2), 5, now), 5, "each VM has its own bucket");
        let second = Duration::from_secs(1);
        assert_eq!(attach_limiter.acquire_at(&vm(1), 50, now + second), 10);
        assert_eq!(attach_limiter.acquire_at(&vm(1), 50, now + second + second / 2), 5);
        assert_eq!(attach_limiter.acquire_at(&vm(1), 500, now + 100 * second), 256);
    }

    #[test]
    fn a_flapping_vm_loses_its_burst() {
        let attach_limiter = AttachLimiter::new(RATE);
        attach_limiter.record_removals(&vm(1), 32);
        assert_eq!(attach_limiter.acquire(&vm(1), 100), 100);
        attach_limiter.record_removals(&vm(1), 33);
        assert!(attach_limiter.acquire(&vm(1), 100) <= 1);
        assert_eq!(attach_limiter.acquire(&vm(2), 100), 100);
    }

    #[test]
    fn full_buckets_are_dropped() {
        let (attach_limiter, now) = (AttachLimiter::new(RATE), Instant::now());
        for number in 0..1000 {
            attach_limiter.acquire_at(&vm(number), 1, now);
        }
        let later = now + Duration::from_secs(60);
        for number in 0..4000 {
            attach_limiter.acquire_at(&vm(number), 256, later + Duration::from_millis(number as u64 * 100));
        }
        assert!(attach_limiter.all().len() < 1000, "{}", attach_limiter.all().len());
    }
}
