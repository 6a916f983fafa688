//! How many disks of one VM may be attached: as many at once as a VM has, and so many a second from then on. A VM whose
//! spec undoes what it asked for a moment ago has nothing left of the former. Disks are always taken out at once.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube_kit::informer::Key;
use process_kit::memory::give_back;

/// An attachment that goes within this time was asked for in vain.
pub(crate) const YOUNG: Duration = Duration::from_secs(60);

/// What a VM may attach.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args)]
pub struct Rate {
    /// How many disks of one VirtualMachine are attached at once; beyond them, as many a second as --attach-rate says.
    #[arg(long = "attach-burst", value_name = "DISKS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub burst: u32,
    /// How many disks of one VirtualMachine are attached per second, after --attach-burst.
    #[arg(long = "attach-rate", value_name = "DISKS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub per_second: u32,
    /// From how many young attachments on that are taken back at once a VirtualMachine has nothing left of --attach-burst.
    #[arg(long = "flapping", value_name = "DISKS", default_value_t = 33, value_parser = clap::value_parser!(u32).range(1..))]
    pub flapping: u32,
}

/// What each VM has left. One that has all of it takes no memory.
#[derive(Debug)]
pub(crate) struct Allowance {
    rate: Rate,
    left: Mutex<HashMap<Key, Left>>,
}

#[derive(Debug, Clone, Copy)]
struct Left {
    disks: f64,
    at: Instant,
}

impl Allowance {
    pub(crate) fn new(rate: Rate) -> Self {
        Self { rate, left: Mutex::default() }
    }

    /// How many of `wanted` disks may be attached now; they count as attached.
    pub(crate) fn take(&self, vm: &Key, wanted: usize) -> usize {
        self.take_at(vm, wanted, Instant::now())
    }

    fn take_at(&self, vm: &Key, wanted: usize, now: Instant) -> usize {
        if wanted == 0 {
            return 0;
        }
        let mut all = self.all();
        let left = self.left(&all, vm, now);
        // Whole and not negative.
        let given = wanted.min(left as usize);
        self.keep(&mut all, vm, left - given as f64, now);
        given
    }

    /// So many attachments that were young are taken back at once.
    pub(crate) fn taken_back(&self, vm: &Key, young: usize) {
        if young >= self.rate.flapping as usize {
            self.keep(&mut self.all(), vm, 0.0, Instant::now());
        }
    }

    /// After which time there is something for who was given less than wanted: not for each disk by itself.
    pub(crate) fn wait(&self) -> Duration {
        Duration::from_millis(500).max(Duration::from_secs(1) / self.rate.per_second)
    }

    /// The rate, for people.
    pub(crate) fn rate(&self) -> Rate {
        self.rate
    }

    fn left(&self, all: &HashMap<Key, Left>, vm: &Key, now: Instant) -> f64 {
        let full = f64::from(self.rate.burst);
        all.get(vm).map_or(full, |left| {
            let since = now.duration_since(left.at).as_secs_f64();
            full.min(left.disks + since * f64::from(self.rate.per_second))
        })
    }

    /// Keeps what is left of one, and forgets those that have everything again.
    fn keep(&self, all: &mut HashMap<Key, Left>, vm: &Key, disks: f64, now: Instant) {
        all.insert(vm.clone(), Left { disks, at: now });
        if all.len() == all.capacity() {
            let is_full = |left: f64| left >= f64::from(self.rate.burst);
            let full: Vec<Key> = all.keys().filter(|vm| is_full(self.left(all, vm, now))).cloned().collect();
            for vm in &full {
                all.remove(vm);
            }
            give_back(all);
        }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Key, Left>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { burst: 256, per_second: 10, flapping: 33 };

    fn vm(number: usize) -> Key {
        Key::new("guest", format!("vm-{number}"))
    }

    #[test]
    fn a_vm_attaches_all_its_disks_at_once_and_then_so_many_a_second() {
        let (allowance, now) = (Allowance::new(RATE), Instant::now());
        assert_eq!(allowance.take_at(&vm(1), 256, now), 256);
        assert_eq!(allowance.take_at(&vm(1), 5, now), 0);
        assert_eq!(allowance.take_at(&vm(2), 5, now), 5, "another's is its own");
        let second = Duration::from_secs(1);
        assert_eq!(allowance.take_at(&vm(1), 50, now + second), 10);
        assert_eq!(allowance.take_at(&vm(1), 50, now + second + second / 2), 5);
        assert_eq!(allowance.take_at(&vm(1), 500, now + 100 * second), 256);
    }

    #[test]
    fn who_takes_many_back_at_once_that_were_just_attached_has_no_burst_left() {
        let allowance = Allowance::new(RATE);
        allowance.taken_back(&vm(1), 32);
        assert_eq!(allowance.take(&vm(1), 100), 100);
        allowance.taken_back(&vm(1), 33);
        assert!(allowance.take(&vm(1), 100) <= 1);
        assert_eq!(allowance.take(&vm(2), 100), 100);
    }

    #[test]
    fn who_has_everything_is_forgotten() {
        let (allowance, now) = (Allowance::new(RATE), Instant::now());
        for number in 0..1000 {
            allowance.take_at(&vm(number), 1, now);
        }
        let later = now + Duration::from_secs(60);
        for number in 0..4000 {
            allowance.take_at(&vm(number), 256, later + Duration::from_millis(number as u64 * 100));
        }
        assert!(allowance.all().len() < 1000, "{}", allowance.all().len());
    }
}
