//! Attach rate limiter per VM: a token bucket with a burst and a rate per second. A VM whose spec removes many recently added
//! disks flaps: it loses its burst, and its rate halves each time. Detaches are not limited.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube_kit::informer::Key;
use process_kit::memory::shrink_map;

/// An attachment that is removed within this time after it was made counts towards flapping.
pub(crate) const RECENT: Duration = Duration::from_secs(60);

/// A VM that does not flap for this long has its full allowance again.
pub(crate) const PROBATION: Duration = Duration::from_secs(600);

/// Maximum number of times that the rate is halved: then it is a 32nd.
const MOST_HALVINGS: u32 = 5;

/// Minimum delay before a retry after too few tokens, so that disks are attached in batches.
const BATCH: Duration = Duration::from_millis(500);

/// Flags of the attach rate limiter.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args)]
pub struct RateArgs {
    /// Burst: number of disks of one VirtualMachine that are attached at once before --attach-rate applies.
    #[arg(long = "attach-burst", value_name = "DISKS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub burst: u32,
    /// Rate: number of disks of one VirtualMachine that are attached per second after the burst.
    #[arg(long = "attach-rate", value_name = "DISKS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub per_second: u32,
    /// A VirtualMachine flaps if it removes this many disks within a second, each added less than 60 s ago: it loses its burst,
    /// and half of its rate. Until it did not flap for 10 minutes, this many within a minute halve its rate again, down to a 32nd.
    #[arg(long = "flapping", value_name = "DISKS", default_value_t = 33, value_parser = clap::value_parser!(u32).range(1..))]
    pub flapping: u32,
}

/// Allowances of all VMs. A VM with its full allowance takes no memory.
#[derive(Debug)]
pub(crate) struct AttachLimiter {
    rate: RateArgs,
    allowances: Mutex<HashMap<Key, Allowance>>,
}

/// How many attaches of a VM may start now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Grant {
    rate: RateArgs,
    /// Number of attaches that may start.
    pub(crate) disks: usize,
    /// Number of disks per second that may be attached after that.
    per_second: f64,
    /// Whether this rate is reduced because the VM flaps.
    pub(crate) is_flapping: bool,
    /// Estimated time at which the last of the other attaches may start.
    pub(crate) last_at: Timestamp,
}

impl Grant {
    /// Delay before the next attaches may start.
    pub(crate) fn wait(&self) -> Duration {
        BATCH.max(Duration::from_secs(1).div_f64(self.per_second))
    }

    /// Why attaches wait.
    pub(crate) fn cause(&self) -> String {
        let RateArgs { burst, flapping, .. } = self.rate;
        let per_minute = 60.0 * self.per_second;
        match self.is_flapping {
            true => format!(
                "this VirtualMachine removed {flapping} or more disks within a minute after they were added: until it has \
                 not done so for 10 minutes, it attaches {per_minute:.0} disks per minute"
            ),
            false => format!(
                "this VirtualMachine attached {burst} disks at once, and now attaches {per_minute:.0} disks per minute"
            ),
        }
    }
}

/// Allowance of one VM.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Allowance {
    at: Timestamp,
    /// Number of disks that may be attached.
    disks: f64,
    /// Number of recent attachments that were removed. It decays.
    removed: f64,
    /// How often the rate is halved.
    halvings: u32,
    /// When it was halved last.
    flapped_at: Timestamp,
    /// Number of attaches that wait.
    waiting: usize,
    /// Estimated time at which the last of them may start.
    last_at: Timestamp,
}

impl Allowance {
    fn full(rate: &RateArgs, now: Timestamp) -> Self {
        Self {
            at: now,
            disks: rate.burst.into(),
            removed: 0.0,
            halvings: 0,
            flapped_at: now,
            waiting: 0,
            last_at: now,
        }
    }

    fn is_full(&self, rate: &RateArgs) -> bool {
        self.halvings == 0 && self.removed == 0.0 && self.disks >= f64::from(rate.burst)
    }

    fn per_second(&self, rate: &RateArgs) -> f64 {
        f64::from(rate.per_second) / f64::from(1 << self.halvings)
    }

    /// The allowance at a later time.
    fn at(self, rate: &RateArgs, now: Timestamp) -> Self {
        if self.halvings > 0 && now >= self.flapped_at + PROBATION {
            return Self::full(rate, now);
        }
        let is_limited = self.halvings > 0 || self.disks < 1.0;
        let decay = f64::from(rate.flapping) / if is_limited { RECENT.as_secs_f64() } else { 1.0 };
        let per_second = self.per_second(rate);
        let burst = if self.halvings > 0 { per_second.max(1.0) } else { rate.burst.into() };
        // A clock that was set back does not count.
        let since = now.duration_since(self.at).as_secs_f64().max(0.0);
        let disks = burst.min(self.disks + since * per_second);
        Self { at: now, disks, removed: (self.removed - since * decay).max(0.0), ..self }
    }

    /// Takes up to `requested` disks.
    fn take(&mut self, rate: &RateArgs, requested: usize) -> Grant {
        // The conversion truncates.
        let disks = requested.min(self.disks as usize);
        self.disks -= disks as f64;
        let (waiting, per_second) = (requested - disks, self.per_second(rate));
        if waiting > self.waiting {
            self.last_at = self.at + SignedDuration::from_secs_f64(waiting as f64 / per_second);
        }
        self.waiting = waiting;
        Grant { rate: *rate, disks, per_second, is_flapping: self.halvings > 0, last_at: self.last_at }
    }

    /// Counts recent attachments that were removed.
    fn count_removals(&mut self, rate: &RateArgs, recent: usize) {
        self.removed += recent as f64;
        if self.removed >= f64::from(rate.flapping) {
            let halvings = MOST_HALVINGS.min(self.halvings + 1);
            *self = Self { disks: 0.0, halvings, flapped_at: self.at, waiting: 0, removed: 0.0, ..*self };
        }
    }
}

impl AttachLimiter {
    pub(crate) fn new(rate: RateArgs) -> Self {
        Self { rate, allowances: Mutex::default() }
    }

    /// Takes up to `requested` attaches from a VM's allowance.
    pub(crate) fn acquire(&self, vm: &Key, requested: usize) -> Grant {
        self.change(vm, Timestamp::now(), |allowance| allowance.take(&self.rate, requested))
    }

    /// Counts recent attachments of a VM that were removed.
    pub(crate) fn count_removals(&self, vm: &Key, recent: usize) {
        self.change(vm, Timestamp::now(), |allowance| allowance.count_removals(&self.rate, recent));
    }

    /// Whether the rate of a VM is reduced because it flaps.
    pub(crate) fn is_flapping(&self, vm: &Key) -> bool {
        let kept = self.all().get(vm).copied();
        kept.is_some_and(|kept| kept.at(&self.rate, Timestamp::now()).halvings > 0)
    }

    fn change<T>(&self, vm: &Key, now: Timestamp, change: impl FnOnce(&mut Allowance) -> T) -> T {
        let mut all = self.all();
        let before =
            all.get(vm).map_or_else(|| Allowance::full(&self.rate, now), |kept| kept.at(&self.rate, now));
        let mut after = before;
        let result = change(&mut after);
        if after != before {
            all.insert(vm.clone(), after);
            // Drop full ones when the map would grow.
            if all.len() == all.capacity() {
                all.retain(|_, kept| !kept.at(&self.rate, now).is_full(&self.rate));
                shrink_map(&mut all);
            }
        }
        result
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Key, Allowance>> {
        self.allowances.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: RateArgs = RateArgs { burst: 256, per_second: 10, flapping: 33 };
    const SECOND: Duration = Duration::from_secs(1);

    /// A VM, at a time that passes only by [`Self::pass`].
    struct Vm(Allowance);

    impl Vm {
        fn new() -> Self {
            Self(Allowance::full(&RATE, "2026-01-01T00:00:00Z".parse().unwrap()))
        }

        fn pass(&mut self, time: Duration) {
            self.0 = self.0.at(&RATE, self.0.at + time);
        }

        fn attach(&mut self, requested: usize) -> usize {
            self.0.take(&RATE, requested).disks
        }

        fn remove(&mut self, recent: usize) {
            self.0.count_removals(&RATE, recent);
        }

        fn per_second(&self) -> f64 {
            self.0.per_second(&RATE)
        }
    }

    #[test]
    fn a_vm_attaches_its_burst_at_once_and_then_at_the_rate() {
        let mut vm = Vm::new();
        assert_eq!(vm.attach(256), 256);
        assert_eq!(vm.attach(5), 0);
        vm.pass(SECOND);
        assert_eq!(vm.attach(50), 10);
        vm.pass(SECOND * 3 / 2);
        assert_eq!(vm.attach(50), 15);
        vm.pass(SECOND * 100);
        assert_eq!(vm.attach(500), 256);
    }

    #[test]
    fn disks_that_move_in_small_numbers_are_not_limited() {
        let mut vm = Vm::new();
        for _ in 0..20 {
            assert_eq!(vm.attach(30), 30);
            vm.pass(SECOND);
            vm.remove(30);
            vm.pass(SECOND * 3);
        }
        assert_eq!(vm.per_second(), 10.0);
    }

    #[test]
    fn a_vm_that_removes_many_recent_disks_attaches_ever_fewer() {
        let (mut vm, mut attached) = (Vm::new(), Vec::new());
        for _ in 0..30 {
            let mut disks = vm.attach(100);
            for _ in 0..4 {
                vm.pass(SECOND / 2);
                disks += vm.attach(100 - disks);
            }
            attached.push(disks);
            vm.remove(disks);
            vm.pass(SECOND * 2);
        }
        assert_eq!(attached[..2], [100, 15]);
        let total: usize = attached[..15].iter().sum();
        assert!(total < 220, "{total} in a minute: {attached:?}");
        assert!(attached[20..].iter().all(|disks| *disks <= 8), "{attached:?}");
    }

    #[test]
    fn a_vm_that_used_its_burst_flaps_by_small_numbers_too() {
        let mut vm = Vm::new();
        assert_eq!(vm.attach(256), 256);
        for _ in 0..40 {
            vm.pass(SECOND / 10);
            let disks = vm.attach(100);
            vm.remove(disks);
        }
        assert!(vm.per_second() < 10.0);
    }

    #[test]
    fn a_vm_that_stops_to_flap_has_its_full_allowance_after_ten_minutes() {
        let mut vm = Vm::new();
        for _ in 0..10 {
            vm.remove(33);
        }
        assert_eq!(vm.per_second(), 10.0 / 32.0);
        vm.pass(PROBATION - SECOND);
        assert_eq!(vm.attach(100), 1);
        vm.pass(SECOND);
        assert_eq!((vm.attach(300), vm.per_second()), (256, 10.0));
    }

    #[test]
    fn the_time_of_the_last_attach_changes_only_with_more_attaches() {
        let mut vm = Vm::new();
        vm.remove(33);
        let first = vm.0.take(&RATE, 50);
        assert_eq!((first.disks, first.is_flapping, first.wait()), (0, true, BATCH));
        assert_eq!(first.last_at, vm.0.at + SECOND * 10);
        vm.pass(SECOND);
        let second = vm.0.take(&RATE, 50);
        assert_eq!((second.disks, second.last_at), (5, first.last_at));
        let third = vm.0.take(&RATE, 100);
        assert_eq!(third.last_at, vm.0.at + SECOND * 20);
    }

    #[test]
    fn a_vm_is_known_to_flap_by_its_removals() {
        let (limiter, vm) = (AttachLimiter::new(RATE), Key::new("guest", "vm"));
        limiter.count_removals(&vm, 32);
        assert!(!limiter.is_flapping(&vm));
        limiter.count_removals(&vm, 33);
        assert!(limiter.is_flapping(&vm));
        assert!(!limiter.is_flapping(&Key::new("guest", "another")));
    }

    #[test]
    fn vms_are_independent_and_full_allowances_take_no_memory() {
        let (limiter, start) = (AttachLimiter::new(RATE), Timestamp::now());
        let vm = |number: usize| Key::new("guest", format!("vm-{number}"));
        let take = |number, requested, now| {
            limiter.change(&vm(number), now, |allowance| allowance.take(&RATE, requested)).disks
        };
        assert_eq!((take(1, 256, start), take(1, 5, start), take(2, 5, start)), (256, 0, 5));
        for number in 0..4000 {
            take(number, 256, start + SECOND * 60 + Duration::from_millis(number as u64 * 100));
        }
        assert!(limiter.all().len() < 1000, "{}", limiter.all().len());
    }
}
